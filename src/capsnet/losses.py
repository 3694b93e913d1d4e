"""What is minimised: margin loss (Eq. 4) plus a little reconstruction (section 4.1).

Targets are sets: T (b, j) has a 1 for every class that is there, so one label and several need no two versions.
All losses are sums over what the paper sums over, and means over the batch.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

MarginReduction = Literal["sum", "half-mean"]


def margin_loss(
    lengths: Tensor,
    targets: Tensor,
    *,
    present: float = 0.9,
    absent: float = 0.1,
    down_weight: float = 0.5,
    reduction: MarginReduction = "sum",
) -> Tensor:
    """Margin loss (Eq. 4) on the lengths themselves; no softmax comes before it.

        L_k = T_k max(0, m⁺ − ‖v_k‖)² + λ (1 − T_k) max(0, ‖v_k‖ − m⁻)²

    lengths, targets (b, j) → (). The paper sums over the classes; the authors' code halves and averages
    (`half-mean`), which makes the reconstruction count twenty times more beside it with ten classes.

    >>> margin_loss(torch.tensor([[0.9, 0.1]]), torch.tensor([[1.0, 0.0]]))
    tensor(0.)
    """
    missing = targets * F.relu(present - lengths).square()
    too_long = down_weight * (1 - targets) * F.relu(lengths - absent).square()
    per_class = missing + too_long
    return (0.5 * per_class.mean(1) if reduction == "half-mean" else per_class.sum(1)).mean()


def reconstruction_loss(reconstruction: Tensor, image: Tensor) -> Tensor:
    """SUM of squared pixel differences (not their mean: that is 784 times weaker on MNIST). (b, …) → ()."""
    return (reconstruction - image).square().flatten(1).sum(1).mean()


def classification_loss(logits: Tensor, targets: Tensor, multi_label: bool = False) -> Tensor:
    """What the paper's CNN baselines minimise: cross-entropy, or a sigmoid a class where several may be there."""
    if multi_label:
        return F.binary_cross_entropy_with_logits(logits, targets, reduction="none").sum(1).mean()
    return torch.mean(-(targets * logits.log_softmax(1)).sum(1))
