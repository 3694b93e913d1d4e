"""Test pictures to pick from: by number, by class, at random, or only those that a model gets wrong.

They are the test part of what the model was trained on: MNIST for all that is made of its digits. A data set is read
when it is first asked for, fetched in the background where it has to be. A model's mistakes come from its card where
that is about these very pictures, and are counted in the background otherwise.
"""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from capsnet import data
from capsnet.errors import UserError
from capsnet.lab.shelf import Entry, Shelf
from capsnet.models import Model

PUBLISHED = ("mnist", "fashion-mnist", "cifar10")
AT_ONCE = 20  # few, so that the page's own requests get their turn in between
BREATH = 0.005  # seconds between them: a lock that is let go and taken at once never leaves the thread


class NotYet(Exception):
    """The pictures are still being fetched."""


def data_set(entry: Entry) -> str:
    """The published data set whose test pictures suit a model."""
    if entry.sees_digits:
        return "mnist"
    if entry.data not in PUBLISHED:
        raise UserError(
            f"{entry.name} was trained on {entry.data or 'unknown data'}: there are no test pictures of it."
        )
    return entry.data


@dataclass
class Pictures:
    """One data set's test part, arriving."""

    name: str
    done: threading.Event = field(default_factory=threading.Event)
    test: data.Dataset | None = None
    problem: str = ""

    def fetch(self) -> None:
        try:
            self.test = data.load(self.name, validation=0, progress=False).test
        except (UserError, OSError) as error:
            self.problem = str(error)
        finally:
            self.done.set()


@dataclass
class Count:
    """The mistakes of a model on a data set, as far as they are known."""

    wrong: list[int] = field(default_factory=list)
    progress: float = 0.0


class Digits:
    """The pictures of all data sets and the mistakes of all models, each when it is first asked for."""

    def __init__(self, shelf: Shelf) -> None:
        self.shelf, self.lock = shelf, threading.Lock()
        self.stopped = threading.Event()
        self._sets: dict[str, Pictures] = {}
        self._counts: dict[str, Count] = {}

    def pictures(self, name: str, wait: float = 10.0) -> data.Dataset:
        """A data set's test part; NotYet while it is fetched, a UserError where it cannot be had."""
        with self.lock:
            found = self._sets.get(name)
            if found is None or found.problem:  # a failure may have been the network's: try again
                found = self._sets[name] = Pictures(name)
                threading.Thread(target=found.fetch, daemon=True, name=f"fetch {name}").start()
        found.done.wait(wait if data.is_cached(name) else 0.5)
        if found.problem:
            raise UserError(found.problem)
        if found.test is None:
            raise NotYet
        return found.test

    def one(self, entry: Entry, index: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """A picture as a frame: pixels (h, w), or (c, h, w) in colour, from 0 to 1."""
        test = self.pictures(data_set(entry))
        if index >= len(test):
            raise UserError(f"there is no test picture {index}: they go from 0 to {len(test) - 1}.")
        image = test.images[index].float() / 255
        header = {"index": index, "label": int(test.labels[index]), "data": test.name}
        return header, {"pixels": image[0] if len(image) == 1 else image}

    def choose(
        self, entry: Entry, label: int | None, mistakes: bool, at_random: bool, after: int | None
    ) -> dict[str, Any]:
        """The number of a picture that fits: any, or the next after another."""
        try:
            test = self.pictures(data_set(entry))
        except NotYet:
            return {"index": None, "count": 0, "state": "fetching", "progress": 0.0}
        except UserError as error:
            return {"index": None, "count": 0, "state": "no data", "progress": 0.0, "why": str(error)}
        count = self.mistakes(entry, test) if mistakes else Count(list(range(len(test))), 1.0)
        wrong = list(count.wrong)
        fitting = wrong if label is None else [n for n in wrong if int(test.labels[n]) == label]
        state = "ready" if count.progress == 1 else "counting"
        return {
            "index": pick(fitting, at_random, after),
            "count": len(fitting),
            "state": state,
            "progress": round(count.progress, 3),
        }

    def mistakes(self, entry: Entry, test: data.Dataset) -> Count:
        """What the model gets wrong; begins to count where nobody has."""
        with self.lock:
            count = self._counts.get(entry.name)
            if count is None:
                known = entry.card.get("mistakes")
                recorded = isinstance(known, list) and entry.data == test.name and entry.image_shape == test.image_shape
                count = Count([int(n) for n in known or []], 1.0) if recorded else Count()
                self._counts[entry.name] = count
                if not recorded:
                    threading.Thread(target=self._count, args=(entry, test, count), daemon=True).start()
        return count

    def _count(self, entry: Entry, test: data.Dataset, count: Count) -> None:
        try:
            for start in range(0, len(test), AT_ONCE):
                if self.stopped.wait(BREATH):
                    return
                images, labels = (x[start : start + AT_ONCE] for x in (test.images, test.labels))
                with self.shelf.lock:
                    wrong = mistaken(self.shelf.load(entry.name), images, labels)
                count.wrong += [start + n for n in wrong]
                count.progress = min(1.0, (start + AT_ONCE) / len(test))
        finally:
            if count.progress < 1:
                self._counts.pop(entry.name, None)  # whoever asks next begins again


@torch.inference_mode()
def mistaken(model: Model, images: Tensor, labels: Tensor) -> list[int]:
    """Which of the images have a longest class that is not their label."""
    pixels = in_the_middle(images.float() / 255, model.config.image_shape)
    return (model(pixels).lengths.argmax(1) != labels).nonzero().flatten().tolist()


def in_the_middle(images: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """Images (…, c, h, w) in the middle of a field of another size, black around; cut where they are larger."""
    height, width = images.shape[-2:]
    top, left = (shape[1] - height) // 2, (shape[2] - width) // 2
    around = (left, shape[2] - width - left, top, shape[1] - height - top)
    padded = torch.nn.functional.pad(images, around)
    return padded.expand(*padded.shape[:-3], shape[0], -1, -1) if shape[0] != padded.shape[-3] else padded


def pick(numbers: list[int], at_random: bool, after: int | None) -> int | None:
    """One of the numbers, which ascend: any, or the first that comes after `after`, from the beginning at the end.

    >>> pick([2, 5, 7], False, 5), pick([2, 5, 7], False, 7), pick([], True, None)
    (7, 2, None)
    """
    if not numbers:
        return None
    if at_random:
        others = [n for n in numbers if n != after]
        return random.choice(others or numbers)
    return next((n for n in numbers if after is None or n > after), numbers[0])
