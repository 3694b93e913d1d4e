"""Evaluation: errors with confidence intervals, confusions, and mean ± standard deviation over seeds.

A prediction is correct if it names exactly the classes that are present: the class of a digit, or both classes of an
overlapping pair. One out of two is an error.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from capsnet.data import Examples, in_order
from capsnet.data.registry import bin_edges
from capsnet.errors import UserError
from capsnet.group.base import ONE, current, divided
from capsnet.models.base import PRESENT, Model, evaluating


@dataclass(frozen=True)
class Evaluation:
    """The result on one dataset; `summary()` returns it as JSON."""

    data: str
    activations: Tensor  # (n, j)
    targets: Tensor  # (n, j)
    predicted: Tensor  # (n, j) bool: the predicted set of classes
    classes: tuple[str, ...]
    multi_label: bool
    measures: dict[str, Tensor] = field(default_factory=dict)  # (n,) each: how an example was made, e.g. its overlap
    bins: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # bin edges of the measures

    @property
    def n(self) -> int:
        return len(self.targets)

    @property
    def wrong(self) -> Tensor:
        """(n,) bool: which examples are not predicted exactly."""
        return (self.predicted != self.targets.bool()).any(1)

    @property
    def errors(self) -> int:
        return int(self.wrong.sum())

    @property
    def error_percent(self) -> float:
        return 100 * self.errors / self.n

    @property
    def confusion(self) -> Tensor:
        """(j, j) counts of true (rows) against predicted classes, for single-label data."""
        true, named = self.targets.argmax(1), self.activations.argmax(1)
        j = len(self.classes)
        return torch.bincount(true * j + named, minlength=j * j).view(j, j)

    def errors_by(self, measure: str) -> dict[str, list]:
        """Number of examples and errors per bin of a measure; bin k ranges from edges[k] to edges[k + 1]."""
        values = self.measures[measure]
        edges = torch.tensor(self.bins[measure])
        known = values.isfinite()  # a single digit has no overlap
        # the first and the last bin include values beyond their outer edges
        place = (torch.bucketize(values[known], edges, right=True) - 1).clamp(0, len(edges) - 2)
        n = torch.bincount(place, minlength=len(edges) - 1)
        errors = torch.bincount(place[self.wrong[known]], minlength=len(edges) - 1)
        return {"edges": list(self.bins[measure]), "n": n.tolist(), "errors": errors.tolist()}

    def summary(self) -> dict[str, Any]:
        """n, errors, error_percent with its 95 % interval, and errors per class or label."""
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
            record["error_percent_by_class"] = {  # undefined for a class without examples
                name: round(100 * (1 - right / n), 3) for name, right, n in per_class if n
            }
        return record | {
            f"errors_by_{measure}": self.errors_by(measure) for measure in self.measures if measure in self.bins
        }


@torch.inference_mode()
def evaluate(
    model: Model,
    dataset: Examples,
    *,
    batch_size: int = 250,
    top: int | None = None,
    threshold: float | None = None,
    limit: int | None = None,
    on_batch: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Run a model over a dataset without augmentation: every example, or `limit` evenly spaced ones.

    Single-label data: the class with the highest activation is predicted. Multi-label data: the `top` classes with the
    highest activations, or all with an activation of at least `threshold`. By default `top` is the number of labels if
    all images have the same number (two in MultiMNIST, as in the paper), else `threshold` is 0.5. `on_batch(done, n)`
    is called after each batch. Several processes each run over a part of the dataset and exchange the results.
    """
    check_fit(model, dataset)
    check_top(top, dataset)
    if limit is not None and limit < 1:
        raise UserError(f"limit should be at least 1 image, not {limit}.")
    order = class_order(model, dataset)
    n = len(dataset) if limit is None else min(limit, len(dataset))
    group = current() if n >= current().size else ONE
    ours = slice(*divided(0, n, group.size)[group.rank])
    parts, targets, measures, done = [], [], [], 0
    with evaluating(model):
        for batch in in_order(dataset, batch_size, limit, ours):
            parts.append(model(batch.images.to(model.device)).activations.float().cpu())
            targets.append(batch.targets.cpu())
            measures.append({name: values.cpu() for name, values in batch.measures.items()})
            done += len(parts[-1])
            if on_batch:
                on_batch(min(done * group.size, n), n)
    activations = group.rows(torch.cat(parts)[:, order], n)
    if top is None and (threshold is None or not dataset.multi_label):
        top = dataset.labels_per_image
    predicted = name_classes(activations, top, PRESENT if threshold is None else threshold)
    return Evaluation(
        dataset.name, activations, group.rows(torch.cat(targets), n), predicted, dataset.classes, dataset.multi_label,
        {name: group.rows(torch.cat([some[name] for some in measures]), n) for name in measures[0]},
        bin_edges(dataset.name),
    )  # fmt: skip


def name_classes(activations: Tensor, top: int | None, threshold: float) -> Tensor:
    """The predicted set of classes: (n, j) → (n, j) bool."""
    if top is None:
        return activations >= threshold
    highest = activations.topk(min(top, activations.shape[1]), dim=1).indices
    return torch.zeros_like(activations, dtype=torch.bool).scatter_(1, highest, True)


def check_fit(model: Model, dataset: Examples) -> None:
    """Refuse data whose image shape or number of classes does not fit the model."""
    shape, classes = dataset.image_shape, len(dataset.classes)
    if not len(dataset):
        raise UserError(f"{dataset.name} has no images in this split: choose another one to evaluate on.")
    if shape != tuple(model.config.image_shape):
        raise UserError(
            f"the model takes images of {tuple(model.config.image_shape)} and {dataset.name} has {shape}: "
            f"evaluate it on the data that it was trained for, or train a model for this data."
        )
    if classes != model.config.num_classes:
        raise UserError(
            f"the model has {model.config.num_classes} classes and {dataset.name} has {classes}: "
            f"evaluate it on the data that it was trained for, or train a model for this data."
        )


def check_top(top: int | None, dataset: Examples) -> None:
    """Refuse to predict no class at all, or several classes for single-label data."""
    if top is not None and top < 1:
        raise UserError(f"top should be at least 1 class, not {top}.")
    if not dataset.multi_label and top not in (None, 1):
        raise UserError(f"top={top} needs multi-label data, and {dataset.name} has one label per image: leave top out.")


def class_order(model: Model, dataset: Examples) -> list[int]:
    """Index of each class of a dataset among the classes of the model, by name.

    If the classes of the model are only numbered, both are in the same order.
    """
    numbers = [str(j) for j in range(len(model.classes))]
    if list(model.classes) == numbers and set(dataset.classes) != set(numbers):
        return list(range(len(numbers)))
    check_names(model, dataset)
    return [model.classes.index(name) for name in dataset.classes]


def check_names(model: Model, dataset: Examples) -> None:
    """Refuse data with other classes than the model."""
    ours, theirs = set(model.classes), set(dataset.classes)
    if ours != theirs:
        extra = (("the model", ours - theirs), (dataset.name, theirs - ours))
        found = " and ".join(f"only {name} has {few(classes)}" for name, classes in extra if classes)
        raise UserError(f"{found}: evaluate it on the classes that it was trained for, or train a model for these.")


def few(names: set[str]) -> str:
    """The first few names.

    >>> few({"ant", "bee", "cat", "dog"})
    'ant, bee, cat, …'
    """
    return ", ".join([*sorted(names)[:3], *(["…"] if len(names) > 3 else [])])


def wilson_interval(errors: int, n: int, z: float = 1.959964) -> tuple[float, float]:
    """95 % confidence interval of a proportion (Wilson score interval, which is valid near zero errors).

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
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return round(statistics.fmean(values), 10), round(deviation, 10)


STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # t at 97.5 % for 1 to 9 degrees of freedom


def student(free: int) -> float:
    """Student's t at 97.5 % for that many degrees of freedom."""
    z = 1.959964
    return STUDENT[free - 1] if free <= len(STUDENT) else z + (z**3 + z) / (4 * free) + 2.8 / free**2


def mean_interval(values: Sequence[float]) -> float:
    """Half the width of Student's 95 % interval of a mean; infinite for a single value.

    >>> round(mean_interval([0.1, 0.2, 0.3]), 3)
    0.248
    """
    if len(values) < 2:
        return math.inf
    return student(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
