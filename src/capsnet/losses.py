"""What is minimised: margin loss (Eq. 4) plus a little reconstruction (section 4.1); with a teacher, its answers too.

Targets are sets: T (b, j) has a 1 for every class that is there, so one label and several need no two versions.
All losses are sums over what the paper sums over, and means over the batch.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from capsnet.errors import UserError, unknown

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
    if reduction not in get_args(MarginReduction):
        raise unknown("reduction", reduction, get_args(MarginReduction))
    check_shapes("lengths", lengths, "targets", targets)
    missing = targets * F.relu(present - lengths).square()
    too_long = down_weight * (1 - targets) * F.relu(lengths - absent).square()
    per_class = missing + too_long
    return (0.5 * per_class.mean(1) if reduction == "half-mean" else per_class.sum(1)).mean()


def reconstruction_loss(reconstruction: Tensor, image: Tensor) -> Tensor:
    """SUM of squared pixel differences (not their mean: that is 784 times weaker on MNIST). (b, …) → ()."""
    check_shapes("the reconstruction", reconstruction, "the image", image)
    return (reconstruction - image).square().flatten(1).sum(1).mean()


def teacher_loss(lengths: Tensor, taught: Tensor) -> Tensor:
    """SUM over the classes of squared differences from a teacher's lengths. (b, j), (b, j) → ().

    The margin loss asks no more of an image once its class is 0.9 long and the others are 0.1; a teacher goes on saying
    how much a 4 looks like a 9.
    """
    check_shapes("lengths", lengths, "the teacher's", taught)
    return (lengths - taught).square().sum(1).mean()


def classification_loss(logits: Tensor, targets: Tensor, multi_label: bool = False) -> Tensor:
    """What the paper's CNN baselines minimise: cross-entropy, or a sigmoid a class where several may be there."""
    check_shapes("logits", logits, "targets", targets)
    # under autocast logits come in bfloat16, whose three digits are too few for a sum of exponentials
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if multi_label:
        return F.binary_cross_entropy_with_logits(logits, targets, reduction="none").sum(1).mean()
    return torch.mean(-(targets * logits.log_softmax(1)).sum(1))


def check_shapes(one: str, a: Tensor, other: str, b: Tensor) -> None:
    """Shapes that differ would broadcast, and the loss be a number that means nothing."""
    if a.shape != b.shape:
        raise UserError(f"{one} is {tuple(a.shape)} and {other} {tuple(b.shape)}: a loss needs the same shape of both.")
