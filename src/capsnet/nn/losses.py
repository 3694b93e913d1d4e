"""Losses: margin loss (Eq. 4), reconstruction (section 4.1), and the losses of later papers and of the CNN baselines.

Targets are sets: T (b, j) has a 1 for every class that is present, so single-label and multi-label data share one
version. All losses are sums over what the paper sums over, and means over the batch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from capsnet.errors import UserError, unknown
from capsnet.nn.options import MARGIN_REDUCTIONS, MarginReduction


def margin_loss(
    lengths: Tensor,
    targets: Tensor,
    *,
    present: float = 0.9,
    absent: float = 0.1,
    down_weight: float = 0.5,
    reduction: MarginReduction = "sum",
) -> Tensor:
    """Margin loss (Eq. 4) on the lengths themselves, with no softmax before it.

        L_k = T_k max(0, m⁺ − ‖v_k‖)² + λ (1 − T_k) max(0, ‖v_k‖ − m⁻)²

    lengths, targets (b, j) → (). The paper sums over the classes; the authors' code halves and averages
    (`half-mean`), which with ten classes gives the reconstruction twenty times more weight.

    >>> margin_loss(torch.tensor([[0.9, 0.1]]), torch.tensor([[1.0, 0.0]]))
    tensor(0.)
    """
    if reduction not in MARGIN_REDUCTIONS:
        raise unknown("reduction", reduction, MARGIN_REDUCTIONS)
    check_shapes("lengths", lengths, "targets", targets)
    missing = targets * F.relu(present - lengths).square()
    too_long = down_weight * (1 - targets) * F.relu(lengths - absent).square()
    per_class = missing + too_long
    return (0.5 * per_class.mean(1) if reduction == "half-mean" else per_class.sum(1)).mean()


def spread_loss(activations: Tensor, targets: Tensor, margin: float = 0.9) -> Tensor:
    """Spread loss (Hinton, Sabour and Frosst 2018): the true class should lead every other one by a margin.

        L = Σ_{i≠t} max(0, m − (a_t − a_i))²

    activations, targets (b, j) → (). The paper raises m from 0.2 to 0.9 during training. With several true classes each
    of them counts as t against every class that is absent.

    >>> spread_loss(torch.tensor([[0.9, 0.1, 0.0]]), torch.tensor([[1.0, 0.0, 0.0]]), margin=0.5)
    tensor(0.)
    """
    check_shapes("activations", activations, "targets", targets)
    lead = activations.unsqueeze(2) - activations.unsqueeze(1)  # b t i: a_t − a_i
    counts = targets.unsqueeze(2) * (1 - targets.unsqueeze(1))
    return (counts * F.relu(margin - lead).square()).sum((1, 2)).mean()


def reconstruction_loss(reconstruction: Tensor, image: Tensor) -> Tensor:
    """SUM of squared pixel differences (not their mean, which is 784 times weaker on MNIST). (b, …) → ()."""
    check_shapes("the reconstruction", reconstruction, "the image", image)
    return (reconstruction - image).square().flatten(1).sum(1).mean()


def teacher_loss(lengths: Tensor, taught: Tensor) -> Tensor:
    """SUM over the classes of squared differences from a teacher's lengths. (b, j), (b, j) → ().

    The margin loss is zero once the true class is longer than 0.9 and the others shorter than 0.1; a teacher still says
    how much a 4 looks like a 9.
    """
    check_shapes("lengths", lengths, "the teacher's", taught)
    return (lengths - taught).square().sum(1).mean()


def classification_loss(logits: Tensor, targets: Tensor, multi_label: bool = False) -> Tensor:
    """Cross-entropy, as for the paper's CNN baselines; with `multi_label` a binary cross-entropy per class."""
    check_shapes("logits", logits, "targets", targets)
    # autocast gives logits in bfloat16, whose three digits are too few for a sum of exponentials
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if multi_label:
        return F.binary_cross_entropy_with_logits(logits, targets, reduction="none").sum(1).mean()
    return torch.mean(-(targets * logits.log_softmax(1)).sum(1))


def check_shapes(one: str, a: Tensor, other: str, b: Tensor) -> None:
    """Refuse shapes that differ: they would broadcast, and the loss would be meaningless."""
    if a.shape != b.shape:
        raise UserError(f"{one} is {tuple(a.shape)} and {other} {tuple(b.shape)}: a loss needs equal shapes.")
