"""Test images to choose from: by index, by class, at random, or only those that a model misclassifies.

They come from the test split of the dataset that the model was trained on; datasets made of MNIST digits use MNIST. A
dataset is loaded on first use and, if necessary, downloaded in the background. The mistakes of a model come from its
card if the card refers to the same images; otherwise they are counted in the background.
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
from capsnet.lab.models import Entry, Shelf, dataset_of
from capsnet.models.base import Model

BATCH = 20  # small, so that requests of the page are answered in between
PAUSE = 0.005  # seconds between batches, in which other threads can take the lock


class NotYet(Exception):
    """The images are still being downloaded."""


@dataclass
class Download:
    """The test split of a dataset, possibly still being downloaded."""

    name: str
    done: threading.Event = field(default_factory=threading.Event)
    test: data.Dataset | None = None
    problem: str = ""

    def fetch(self) -> None:
        try:
            self.test = data.load(self.name, validation=0).test.in_memory()
        except (UserError, OSError) as error:
            self.problem = str(error)
        finally:
            self.done.set()


@dataclass
class Count:
    """The mistakes of a model on a dataset, as far as they are known."""

    wrong: list[int] = field(default_factory=list)
    progress: float = 0.0


class Digits:
    """The test images of all datasets and the mistakes of all models, each computed on first use."""

    def __init__(self, shelf: Shelf) -> None:
        self.shelf, self.lock = shelf, threading.Lock()
        self.stopped = threading.Event()
        self._sets: dict[str, Download] = {}
        self._counts: dict[str, Count] = {}

    def images(self, name: str) -> data.Dataset:
        """The test split of a dataset; raises NotYet while it is downloaded and UserError if that fails."""
        with self.lock:
            found = self._sets.get(name)
            if found is None or found.problem:  # retry: the network may have failed
                found = self._sets[name] = Download(name)
                threading.Thread(target=found.fetch, daemon=True, name=f"fetch {name}").start()
        found.done.wait(10.0 if data.is_cached(name) else 0.5)
        if found.problem:
            raise UserError(found.problem)
        if found.test is None:
            raise NotYet
        return found.test

    def one(self, entry: Entry, index: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """An image as a frame: pixels from 0 to 1, (h, w) or, in colour, (c, h, w)."""
        test = self.images(dataset_of(entry))
        if index >= len(test):
            raise UserError(f"there is no test image {index}: indices range from 0 to {len(test) - 1}.")
        image = test.images[index].float() / 255
        header = {"index": index, "label": int(test.labels[index]), "data": test.name}
        return header, {"pixels": image[0] if len(image) == 1 else image}

    def choose(
        self, entry: Entry, label: int | None, mistakes: bool, at_random: bool, after: int | None
    ) -> dict[str, Any]:
        """The index of a matching image: a random one or the next after another."""
        try:
            test = self.images(dataset_of(entry))
        except NotYet:
            return {"index": None, "count": 0, "state": "fetching", "progress": 0.0}
        except UserError as error:
            return {"index": None, "count": 0, "state": "no data", "progress": 0.0, "why": str(error)}
        count = self.mistakes(entry, test) if mistakes else Count(list(range(len(test))), 1.0)
        wrong = list(count.wrong)
        matching = wrong if label is None else [n for n in wrong if int(test.labels[n]) == label]
        state = "ready" if count.progress == 1 else "counting"
        return {
            "index": pick(matching, at_random, after),
            "count": len(matching),
            "state": state,
            "progress": round(count.progress, 3),
        }

    def mistakes(self, entry: Entry, test: data.Dataset) -> Count:
        """What the model misclassifies; starts counting on first use."""
        with self.lock:
            count = self._counts.get(entry.name)
            if count is None:
                known = recorded_mistakes(entry, test)
                count = Count() if known is None else Count(known, 1.0)
                self._counts[entry.name] = count
                if known is None:
                    threading.Thread(target=self._count, args=(entry, test, count), daemon=True).start()
        return count

    def _count(self, entry: Entry, test: data.Dataset, count: Count) -> None:
        try:
            for start in range(0, len(test), BATCH):
                if self.stopped.wait(PAUSE):
                    return
                images, labels = (x[start : start + BATCH] for x in (test.images, test.labels))
                with self.shelf.lock:
                    wrong = mistaken(self.shelf.load(entry.name), images, labels)
                count.wrong += [start + n for n in wrong]
                count.progress = min(1.0, (start + BATCH) / len(test))
        finally:
            if count.progress < 1:
                self._counts.pop(entry.name, None)  # the next request starts again


def recorded_mistakes(entry: Entry, test: data.Dataset) -> list[int] | None:
    """The mistakes on the model's card; None if there is no card or it refers to other images."""
    known = entry.card.mistakes if entry.card else None
    same = entry.trained_on == test.name and entry.image_shape == test.image_shape
    return list(known) if known is not None and same else None


@torch.inference_mode()
def mistaken(model: Model, images: Tensor, labels: Tensor) -> list[int]:
    """Indices of the images whose most active class is not their label."""
    pixels = centred(images.float() / 255, model.config.image_shape)
    return (model(pixels).activations.argmax(1) != labels).nonzero().flatten().tolist()


def centred(images: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """Images (…, c, h, w) centred on a black field of another size and cropped if they are larger."""
    height, width = images.shape[-2:]
    top, left = (shape[1] - height) // 2, (shape[2] - width) // 2
    around = (left, shape[2] - width - left, top, shape[1] - height - top)
    padded = torch.nn.functional.pad(images, around)
    return padded.expand(*padded.shape[:-3], shape[0], -1, -1) if shape[0] != padded.shape[-3] else padded


def pick(numbers: list[int], at_random: bool, after: int | None) -> int | None:
    """One of the numbers, which ascend: a random one, or the first after `after`, starting over at the end.

    >>> pick([2, 5, 7], False, 5), pick([2, 5, 7], False, 7), pick([], True, None)
    (7, 2, None)
    """
    if not numbers:
        return None
    if at_random:
        others = [n for n in numbers if n != after]
        return random.choice(others or numbers)
    return next((n for n in numbers if after is None or n > after), numbers[0])
