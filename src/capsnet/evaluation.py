"""How good a model is: errors with their confidence interval, what it confuses, and mean ± std over seeds.

A prediction counts as right when it names exactly the classes that are there: the one class of a digit, or both of
an overlapping pair. Half right is wrong.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from capsnet.data import Examples, in_order
from capsnet.errors import UserError
from capsnet.models.base import PRESENT, evaluating
from capsnet.models.registry import Model

# edges of the bins in which errors are counted against how an example was made
BINS = {
    "overlap": tuple(k / 20 for k in range(21)),
    "rotation": tuple(float(k) for k in range(-20, 21, 4)),  # degrees
    "shear": tuple(k / 25 for k in range(-5, 6)),
    "scale_across": tuple(k / 25 for k in range(20, 31)),
    "scale_down": tuple(k / 25 for k in range(20, 31)),
    "shift": tuple(float(k) for k in range(0, 29, 2)),  # pixels from the middle; beyond the last, it counts there
}


@dataclass(frozen=True)
class Evaluation:
    """The outcome on one data set; `summary()` is what goes into JSON."""

    data: str
    lengths: Tensor  # (n, j)
    targets: Tensor  # (n, j)
    predicted: Tensor  # (n, j) bool: the set of classes that the model names
    classes: tuple[str, ...]
    multi_label: bool
    measures: dict[str, Tensor] = field(default_factory=dict)  # (n,) each: how an example was made, e.g. its overlap

    @property
    def n(self) -> int:
        return len(self.targets)

    @property
    def wrong(self) -> Tensor:
        """(n,) bool: which examples are not exactly right."""
        return (self.predicted != self.targets.bool()).any(1)

    @property
    def errors(self) -> int:
        return int(self.wrong.sum())

    @property
    def error_percent(self) -> float:
        return 100 * self.errors / self.n

    @property
    def confusion(self) -> Tensor:
        """(j, j) counts of true (rows) against predicted class; for one label an image."""
        true, named = self.targets.argmax(1), self.lengths.argmax(1)
        j = len(self.classes)
        return torch.bincount(true * j + named, minlength=j * j).view(j, j)

    def errors_by(self, measure: str) -> dict[str, list]:
        """Examples and errors in bins of a measure, for a curve: bin k goes from edges[k] to edges[k + 1]."""
        values = self.measures[measure]
        edges = torch.tensor(BINS[measure])
        known = values.isfinite()  # one digit alone overlaps with nothing
        # the last bin holds its upper edge too
        place = (torch.bucketize(values[known], edges, right=True) - 1).clamp(0, len(edges) - 2)
        n = torch.bincount(place, minlength=len(edges) - 1)
        errors = torch.bincount(place[self.wrong[known]], minlength=len(edges) - 1)
        return {"edges": list(BINS[measure]), "n": n.tolist(), "errors": errors.tolist()}

    def summary(self) -> dict[str, Any]:
        """n, errors, error_percent, its 95 % interval, and what helps to judge them."""
        low, high = wilson_interval(self.errors, self.n)
        record: dict[str, Any] = {
            "data": self.data,
            "n": self.n,
            "errors": self.errors,
            "error_percent": round(self.error_percent, 4),
            "error_percent_interval_95": [round(100 * low, 4), round(100 * high, 4)],
            "accuracy_percent": round(100 - self.error_percent, 4),
        }
        if self.multi_label:
            differing = (self.predicted != self.targets.bool()).float().mean()
            record["per_label_error_percent"] = round(100 * float(differing), 4)
            missed = (self.targets.bool() & ~self.predicted).sum() / self.targets.sum().clamp(min=1)
            record["missed_label_percent"] = round(100 * float(missed), 4)
        else:
            per_class = zip(self.classes, self.confusion.diag().tolist(), self.confusion.sum(1).tolist(), strict=True)
            record["error_percent_by_class"] = {  # a class without an example has no error, neither 0 nor 100
                name: round(100 * (1 - right / n), 3) for name, right, n in per_class if n
            }
        return record | {f"errors_by_{measure}": self.errors_by(measure) for measure in self.measures}


@torch.inference_mode()
def evaluate(
    model: Model,
    dataset: Examples,
    *,
    batch_size: int = 250,
    top: int | None = None,
    threshold: float | None = None,
    on_batch: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Run a model over every example of a data set, the last partial batch included, without augmentation.

    With one label an image the longest capsule is the answer. With several: the `top` longest, or all that are at least
    `threshold` long. Unless told otherwise the two longest where every image has two labels (the paper's measure), and
    all above 0.5 where their number differs. `on_batch(done, n)` is called after each batch.
    """
    check_fit(model, dataset)
    check_top(top, dataset)
    order = class_order(model, dataset)
    parts, targets, measures, done = [], [], [], 0
    with evaluating(model):
        for batch in in_order(dataset, batch_size):
            parts.append(model(batch.images.to(model.device)).lengths.float().cpu())
            targets.append(batch.targets.cpu())
            measures.append({name: values.cpu() for name, values in batch.measures.items()})
            done += len(parts[-1])
            if on_batch:
                on_batch(done, len(dataset))
    lengths = torch.cat(parts)[:, order]
    if top is None and (threshold is None or not dataset.multi_label):
        top = dataset.labels_per_image
    predicted = name_classes(lengths, top, PRESENT if threshold is None else threshold)
    return Evaluation(
        dataset.name, lengths, torch.cat(targets), predicted, dataset.classes, dataset.multi_label,
        {name: torch.cat([some[name] for some in measures]) for name in measures[0]},
    )  # fmt: skip


def name_classes(lengths: Tensor, top: int | None, threshold: float) -> Tensor:
    """The set of classes that the lengths name: (n, j) → (n, j) bool."""
    if top is None:
        return lengths >= threshold
    longest = lengths.topk(min(top, lengths.shape[1]), dim=1).indices
    return torch.zeros_like(lengths, dtype=torch.bool).scatter_(1, longest, True)


def check_fit(model: Model, dataset: Examples) -> None:
    """Refuse data that the model was not built for, and say what does not fit."""
    shape, classes = dataset.image_shape, len(dataset.classes)
    if not len(dataset):
        raise UserError(f"{dataset.name} has no images in this part: there is nothing to evaluate on.")
    if shape != tuple(model.config.image_shape):
        raise UserError(
            f"the model takes images of {tuple(model.config.image_shape)} and {dataset.name} has {shape}: "
            f"evaluate it on the data it was trained for, or train one for these."
        )
    if classes != model.config.num_classes:
        raise UserError(
            f"the model knows {model.config.num_classes} classes and {dataset.name} has {classes}: "
            f"evaluate it on the data it was trained for, or train one for these."
        )


def check_top(top: int | None, dataset: Examples) -> None:
    """Refuse to name no class at all, or several where every image has one."""
    if top is not None and top < 1:
        raise UserError(f"top is how many classes to name, at least 1, and is {top}.")
    if not dataset.multi_label and top not in (None, 1):
        raise UserError(f"top={top} needs data with several labels an image, and {dataset.name} has one: leave it out.")


def class_order(model: Model, dataset: Examples) -> list[int]:
    """Where each class of a data set is among the model's, by name.

    A model whose classes nobody has named has numbers for names; it then takes them in their order.
    """
    numbers = [str(j) for j in range(len(model.classes))]
    if list(model.classes) == numbers and set(dataset.classes) != set(numbers):
        return list(range(len(numbers)))
    check_names(model, dataset)
    return [model.classes.index(name) for name in dataset.classes]


def check_names(model: Model, dataset: Examples) -> None:
    """Refuse data whose classes are called otherwise than the model's."""
    ours, theirs = set(model.classes), set(dataset.classes)
    if ours != theirs:
        raise UserError(
            f"only the model knows {few(ours - theirs)} and only {dataset.name} has {few(theirs - ours)}: "
            f"evaluate it on the classes it was trained for, or train one for these."
        )


def few(names: set[str]) -> str:
    """Some names in words.

    >>> few({"ant", "bee", "cat", "dog"})
    'ant, bee, cat, …'
    """
    return ", ".join([*sorted(names)[:3], *["…"] * (len(names) > 3)]) or "no other class"


def wilson_interval(errors: int, n: int, z: float = 1.959964) -> tuple[float, float]:
    """95 % confidence interval of a proportion (Wilson's, which stays sensible near zero errors).

    >>> [round(100 * x, 3) for x in wilson_interval(25, 10_000)]
    [0.169, 0.369]
    """
    if n == 0:
        return 0.0, 1.0
    share = errors / n
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, middle - half), min(1.0, middle + half)


def mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation over seeds; the deviation of one value is 0.

    >>> mean_and_std([0.25, 0.27, 0.26])
    (0.26, 0.01)
    """
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return round(statistics.fmean(values), 10), round(spread, 10)
