"""The losses are the paper's, to the number."""

from __future__ import annotations

import math

import pytest
import torch

from capsnet.errors import UserError
from capsnet.nn.losses import classification_loss, margin_loss, reconstruction_loss, spread_loss, teacher_loss


def test_the_margin_loss_is_equation_4() -> None:
    lengths = torch.tensor([[0.5, 0.3, 0.05], [0.95, 0.1, 0.6]])
    targets = torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    first = (0.9 - 0.5) ** 2 + 0.5 * (0.3 - 0.1) ** 2  # 0.05 is short enough
    second = 0.5 * (0.6 - 0.1) ** 2  # 0.95 is long enough
    assert float(margin_loss(lengths, targets)) == pytest.approx((first + second) / 2)


def test_several_classes_may_be_there_at_once_or_none() -> None:
    lengths = torch.tensor([[0.7, 0.2, 0.4]])
    both, none = torch.tensor([[1.0, 1.0, 0.0]]), torch.zeros(1, 3)
    assert float(margin_loss(lengths, both)) == pytest.approx(0.2**2 + 0.7**2 + 0.5 * 0.3**2)
    assert float(margin_loss(lengths, none)) == pytest.approx(0.5 * (0.6**2 + 0.1**2 + 0.3**2))


def test_half_mean_halves_and_averages_over_the_classes() -> None:
    lengths, targets = torch.rand(4, 10), torch.eye(10)[:4]
    summed = margin_loss(lengths, targets)
    halved = margin_loss(lengths, targets, reduction="half-mean")
    torch.testing.assert_close(halved * 20, summed)


def test_margins_and_their_weight_can_be_chosen() -> None:
    lengths, targets = torch.tensor([[0.5, 0.5]]), torch.tensor([[1.0, 0.0]])
    loss = margin_loss(lengths, targets, present=0.8, absent=0.3, down_weight=0.25)
    assert float(loss) == pytest.approx(0.3**2 + 0.25 * 0.2**2)


def test_capsules_within_their_margins_cost_nothing_and_pull_nowhere() -> None:
    lengths = torch.tensor([[0.93, 0.07]], requires_grad=True)
    loss = margin_loss(lengths, torch.tensor([[1.0, 0.0]]))
    loss.backward()
    assert loss.item() == 0
    assert not lengths.grad.any()  # type: ignore[union-attr]


def literal_spread_loss(activations: list[list[float]], targets: list[list[float]], margin: float) -> float:
    """Every true class t against every absent class i, summed; a mean over the batch."""
    total = 0.0
    for a, present in zip(activations, targets, strict=True):
        for t in range(len(a)):
            for i in range(len(a)):
                if present[t] and not present[i]:
                    total += max(0.0, margin - (a[t] - a[i])) ** 2
    return total / len(activations)


@pytest.mark.parametrize("margin", [0.2, 0.9])
def test_the_spread_loss_is_a_sum_over_pairs_of_true_and_absent_classes(margin: float) -> None:
    activations = torch.rand(6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    one, several = torch.eye(5)[[0, 3, 4, 1, 1, 2]], (activations > 0.5).float()
    several[0], several[1] = 0, 1  # no class at all, and all of them
    for targets in (one, several):
        expected = literal_spread_loss(activations.tolist(), targets.tolist(), margin)
        assert float(spread_loss(activations, targets, margin)) == pytest.approx(expected)


def test_a_lead_of_the_margin_costs_nothing_and_pulls_nowhere() -> None:
    activations = torch.tensor([[0.9, 0.1, 0.0]], requires_grad=True)
    loss = spread_loss(activations, torch.tensor([[1.0, 0.0, 0.0]]), margin=0.5)
    loss.backward()
    assert loss.item() == 0
    assert not activations.grad.any()  # type: ignore[union-attr]


def test_the_teacher_loss_is_a_sum_over_classes_and_a_mean_over_the_batch() -> None:
    lengths, taught = torch.tensor([[0.9, 0.1], [0.5, 0.5]]), torch.tensor([[0.8, 0.3], [0.5, 0.5]])
    assert float(teacher_loss(lengths, taught)) == pytest.approx((0.1**2 + 0.2**2) / 2)


def test_the_reconstruction_loss_is_a_sum_over_pixels_and_a_mean_over_the_batch() -> None:
    image = torch.zeros(2, 1, 28, 28)
    decoded = torch.full((2, 1, 28, 28), 0.5)
    decoded[1] = 0
    assert float(reconstruction_loss(decoded, image)) == pytest.approx(784 * 0.25 / 2)


def test_the_classification_loss_is_cross_entropy() -> None:
    logits, targets = torch.tensor([[2.0, 0.0, 0.0]]), torch.tensor([[1.0, 0.0, 0.0]])
    assert float(classification_loss(logits, targets)) == pytest.approx(-math.log(math.e**2 / (math.e**2 + 2)))
    logits, labels = torch.randn(5, 4), torch.tensor([0, 3, 1, 1, 2])
    torch.testing.assert_close(
        classification_loss(logits, torch.eye(4)[labels]), torch.nn.functional.cross_entropy(logits, labels)
    )


def test_the_classification_loss_of_several_labels_is_a_sum_of_sigmoids() -> None:
    logits, targets = torch.tensor([[1.0, -2.0, 0.0]]), torch.tensor([[1.0, 1.0, 0.0]])
    expected = math.log(1 + math.exp(-1)) + math.log(1 + math.exp(2)) + math.log(2)
    assert float(classification_loss(logits, targets, multi_label=True)) == pytest.approx(expected)


@pytest.mark.parametrize("multi_label", [False, True])
def test_the_classification_loss_is_computed_in_float32_under_autocast(multi_label: bool) -> None:
    logits, targets = 5 * torch.randn(8, 10), torch.eye(10)[:8]
    with torch.autocast("cpu", torch.bfloat16):
        loss = classification_loss(logits.bfloat16(), targets, multi_label)
    assert loss.dtype == torch.float32
    assert loss == classification_loss(logits.bfloat16().float(), targets, multi_label)
    assert classification_loss(logits.double(), targets.double(), multi_label).dtype == torch.float64


def test_an_unknown_reduction_is_refused() -> None:
    with pytest.raises(UserError, match="no reduction 'mean'; did you mean 'half-mean'"):
        margin_loss(torch.rand(2, 3), torch.eye(3)[:2], reduction="mean")  # type: ignore[arg-type]


def test_shapes_that_would_broadcast_are_refused() -> None:
    for loss, one, other in (
        (reconstruction_loss, (4, 1, 8, 8), (4, 8, 8)),
        (margin_loss, (4, 10), (10,)),
        (spread_loss, (4, 10), (10,)),
        (teacher_loss, (4, 10), (4, 1)),
        (classification_loss, (4, 10), (1, 10)),
    ):
        with pytest.raises(UserError, match="needs equal shapes"):
            loss(torch.rand(one), torch.rand(other))


@pytest.mark.parametrize("n", [1, 2, 7])
def test_a_loss_does_not_grow_with_the_batch(n: int) -> None:
    lengths, targets, image = torch.rand(1, 10), torch.eye(10)[:1], torch.rand(1, 1, 4, 4)
    one, many = (margin_loss(lengths.expand(k, -1), targets.expand(k, -1)) for k in (1, n))
    torch.testing.assert_close(many, one)
    one, many = (reconstruction_loss(torch.zeros(k, 1, 4, 4), image.expand(k, -1, -1, -1)) for k in (1, n))
    torch.testing.assert_close(many, one)
