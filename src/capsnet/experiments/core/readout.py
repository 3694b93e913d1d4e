"""Linear read-out: how much of a known pose the features of a network contain.

Ridge regression from features to the pose, one regression per class, fitted on some images and judged on others by R².
The features of a capsule network are the pose of the true class's capsule, those of a CNN its last hidden layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from capsnet.models.base import Model

RIDGE = 1e-3  # of standardised inputs; keeps the equations solvable
LEAST = 0.05  # standard deviation of a feature, relative to the largest, below which it is not standardised


class Reading(NamedTuple):
    """Features of n images and what should be read from them.

    numbers: (n, j, q) poses of all class capsules, or (n, h), the last hidden layer of a CNN; labels (n,); targets
    (n, t); all float64 but the labels.
    """

    numbers: Tensor
    labels: Tensor
    targets: Tensor

    @property
    def of_all_capsules(self) -> Reading:
        """The same with the capsules of all classes as features."""
        return self._replace(numbers=self.numbers.flatten(1))


def features(model: Model, images: Tensor, poses: Tensor | None) -> Tensor:
    """The poses of the class capsules, or the last hidden layer of a network that has none."""
    return poses if poses is not None else model.hidden(images)  # type: ignore[operator]


def r_squared(fitted_on: Reading, judged_on: Reading, columns: Mapping[str, tuple[int, ...]]) -> dict[str, float]:
    """1 − squared error / variance over all classes, for named columns of the targets."""
    error = variance = torch.zeros(fitted_on.targets.shape[1], dtype=torch.double)
    for j in fitted_on.labels.unique().tolist():
        (x, y), (new_x, new_y) = (of_class(reading, j) for reading in (fitted_on, judged_on))
        error = error + (ridge(x, y, new_x) - new_y).square().sum(0)
        variance = variance + (new_y - y.mean(0)).square().sum(0)
    return {name: float(1 - error[list(c)].sum() / variance[list(c)].sum()) for name, c in columns.items()}


def of_class(reading: Reading, j: int) -> tuple[Tensor, Tensor]:
    """For images of class j: the features to read from (m, q), and the targets (m, t)."""
    mine = reading.labels == j
    numbers = reading.numbers[mine]
    return numbers[:, j] if numbers.dim() == 3 else numbers, reading.targets[mine]


def ridge(x: Tensor, y: Tensor, new_x: Tensor) -> Tensor:
    """Predictions for new_x (k, q) of a ridge regression from x (m, q) to y (m, t), all float64.

    Units of a CNN that are almost silent in x can be active in new_x, where standardised they would be enormous.
    """
    mean, std = x.mean(0), x.std(0)
    std = std.clamp(min=LEAST * std.max().item() + 1e-9)  # constant features stay 0
    standard = (x - mean) / std
    gram = standard.T @ standard + RIDGE * len(x) * torch.eye(x.shape[1], dtype=x.dtype)
    weights = torch.linalg.solve(gram, standard.T @ (y - y.mean(0)))
    return (new_x - mean) / std @ weights + y.mean(0)
