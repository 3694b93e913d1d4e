"""Max-min routing: couplings scaled to [0, 1] instead of a softmax, and the ways to get that wrong."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from capsnet import kernels
from capsnet.errors import UserError
from capsnet.kernels import dispatch
from capsnet.nn.functional import squash, votes
from capsnet.nn.layers import DenseCaps
from capsnet.routing.max_min import MaxMinRouting, max_min
from literal import array, assert_equal, layer_and_poses, literal_squash, literal_votes

Array = np.ndarray


def literal_max_min(u_hat: Array, iterations: int) -> Array:
    """One example: votes (i, j, q) → v (j, q)."""
    lower, upper, dim = u_hat.shape
    b, c, v = np.zeros((lower, upper)), np.ones((lower, upper)), np.zeros((upper, dim))
    for t in range(iterations):
        if t > 0:
            for i in range(lower):
                for j in range(upper):
                    b[i, j] += u_hat[i, j] @ v[j]
                for j in range(upper):
                    c[i, j] = (b[i, j] - min(b[i])) / (max(b[i]) - min(b[i]))
        for j in range(upper):
            v[j] = literal_squash(sum(c[i, j] * u_hat[i, j] for i in range(lower)))
    return v


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("iterations", [1, 2, 3, 5])
def test_max_min_is_the_literal_loop(iterations: int, shared: bool) -> None:
    layer, poses = layer_and_poses("max-min", shared, iterations=iterations)
    expected = [literal_max_min(literal_votes(u, array(layer.weight)), iterations) for u in array(poses)]
    assert_equal(layer.route(poses).poses, expected)


@pytest.mark.parametrize("shared", [None, 32])
def test_the_form_without_votes_equals_the_plain_one(shared: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "routing_pays", lambda u, W: dispatch.enabled())
    torch.manual_seed(0)
    layer, u = DenseCaps(288, 8, 5, 6, routing="max-min", shared=shared), torch.randn(9, 288, 8, requires_grad=True)

    def everything() -> list[Tensor]:
        poses = layer.route(u).poses
        return [poses, *torch.autograd.grad(poses.square().sum(), [u, layer.weight])]

    found = everything()
    with kernels.plain():
        expected = everything()
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() < 1e-4 * other.norm()


def test_gradients_flow_through_every_iteration() -> None:
    torch.manual_seed(0)
    u, W = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 4, 2), (4, 3, 3, 2)))
    assert torch.autograd.gradcheck(lambda u, W: MaxMinRouting(iterations=3)(u, W).poses, (u, W))


def test_equal_logits_leave_the_couplings_at_one_and_the_gradient_finite() -> None:
    layer, _ = layer_and_poses("max-min", dtype=torch.float32)
    u = torch.zeros(2, 12, 4, requires_grad=True)
    routed = layer.route(u, trace=True)
    assert routed.trace is not None
    assert (routed.trace.couplings == 1).all()
    routed.activations.sum().backward()
    assert u.grad is not None
    assert u.grad.isfinite().all()


def test_one_upper_capsule_is_refused() -> None:
    with pytest.raises(UserError, match=r"at least two upper capsules.*add a class, or choose another routing"):
        DenseCaps(6, 4, 1, 5, routing="max-min")


def test_no_iteration_is_refused() -> None:
    with pytest.raises(UserError, match="iterations=0 is out of range"):
        DenseCaps(6, 4, 2, 5, routing="max-min", iterations=0)


# --- Mistakes, and a guard against each ---------------------------------------------------------------------------

Couple = Callable[[Tensor], Tensor]


def guard_the_best_gets_everything_and_the_worst_nothing(couple: Couple) -> None:
    c_ij = couple(torch.randn(2, 6, 4))
    torch.testing.assert_close(c_ij.amax(-1), torch.ones(2, 6))
    torch.testing.assert_close(c_ij.amin(-1), torch.zeros(2, 6))


def over_the_lower_capsules(b_ij: Tensor) -> Tensor:
    return max_min(b_ij.transpose(1, 2)).transpose(1, 2)


def normalised_to_sum_to_one(b_ij: Tensor) -> Tensor:
    c_ij = max_min(b_ij)
    return c_ij / c_ij.sum(-1, keepdim=True)


def test_couplings_span_zero_to_one_over_the_upper_capsules() -> None:
    guard_the_best_gets_everything_and_the_worst_nothing(max_min)


@pytest.mark.parametrize("wrong", [over_the_lower_capsules, normalised_to_sum_to_one, lambda b: b.softmax(-1)])
def test_other_normalisations_are_noticed(wrong: Couple) -> None:
    with pytest.raises(AssertionError):
        guard_the_best_gets_everything_and_the_worst_nothing(wrong)


def guard_the_first_iteration_counts_every_vote_in_full(route: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    u, W = torch.randn(2, 6, 4), torch.randn(6, 3, 5, 4)
    torch.testing.assert_close(route(u, W), squash(votes(u, W).sum(1)))


def test_couplings_start_at_one() -> None:
    guard_the_first_iteration_counts_every_vote_in_full(lambda u, W: MaxMinRouting(iterations=1)(u, W).poses)


def test_a_uniform_start_is_noticed() -> None:
    with pytest.raises(AssertionError):
        guard_the_first_iteration_counts_every_vote_in_full(lambda u, W: squash(votes(u, W).mean(2)))


def guard_equal_logits_give_numbers(couple: Couple) -> None:
    b_ij = torch.full((1, 2, 3), 0.3, requires_grad=True)
    c_ij = couple(b_ij)
    (gradient,) = torch.autograd.grad(c_ij.sum(), b_ij)
    assert c_ij.isfinite().all()
    assert gradient.isfinite().all()


def unprotected(b_ij: Tensor) -> Tensor:
    low, high = b_ij.amin(-1, keepdim=True), b_ij.amax(-1, keepdim=True)
    return (b_ij - low) / (high - low)


def masked_too_late(b_ij: Tensor) -> Tensor:
    """The output is a number, but the gradient of the discarded 0/0 is not."""
    c_ij = unprotected(b_ij)
    return torch.where(c_ij.isnan(), 1.0, c_ij)


def test_equal_logits_do_not_divide_by_zero() -> None:
    guard_equal_logits_give_numbers(max_min)


@pytest.mark.parametrize("wrong", [unprotected, masked_too_late])
def test_a_division_by_zero_is_noticed(wrong: Couple) -> None:
    with pytest.raises(AssertionError):
        guard_equal_logits_give_numbers(wrong)
