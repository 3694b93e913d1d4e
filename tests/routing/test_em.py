"""EM routing is Procedure 1 of Hinton, Sabour and Frosst (2018), and avoids what makes it fail elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal
from torch import Tensor

from capsnet.errors import UserError
from capsnet.nn.functional import Capsules, matrix_votes, votes
from capsnet.nn.layers import DenseCaps
from capsnet.routing import em
from capsnet.routing.base import ALL, Parents, Routed
from capsnet.routing.em import EMRouting, Gaussians

SIZES = [(1, 1, 1, 1, 1, 1), (2, 6, 3, 4, 5, 6), (3, 12, 10, 2, 4, 3), (1, 5, 7, 3, 1, 5)]  # b i j p q n


def layer_of(
    sizes: tuple[int, ...], kind: type[EMRouting] = EMRouting, dtype: torch.dtype = torch.float64, **options: Any
) -> DenseCaps:
    """A layer whose parameters all matter."""
    _, i, j, p, q, n = sizes
    torch.manual_seed(sum(sizes))
    matrix = options.pop("matrix", False)
    layer = DenseCaps(i, p, j, q, routing=kind(**options), shared=n if n < i else None, matrix=matrix, dtype=dtype)
    with torch.no_grad():
        for beta in (layer.routing.beta_u, layer.routing.beta_a):
            beta.copy_(torch.randn(j))
    return layer


def problem(sizes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Lower poses and activations."""
    b, i, _, p, *_ = sizes
    generator = torch.Generator().manual_seed(b + i)
    return tuple(
        make(*shape, generator=generator, dtype=dtype)
        for make, shape in ((torch.randn, (b, i, p)), (torch.rand, (b, i)))
    )


# --- Procedure 1, word for word, on NumPy's float64 ------------------------------------------------------------


def literal_em(
    V: np.ndarray, a: np.ndarray, beta_u: np.ndarray, beta_a: np.ndarray, iterations: int, final_lambda: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One example: votes V [i][j][q], activations a [i] → means [j][q], activations [j], responsibilities [i][j]."""
    lower, upper, dims = V.shape
    R = np.full((lower, upper), 1 / upper)
    for t in range(iterations):
        mean, variance, active = np.zeros((upper, dims)), np.zeros((upper, dims)), np.zeros(upper)
        for j in range(upper):
            r = [R[i, j] * a[i] for i in range(lower)]
            received, cost = sum(r) + em.NOBODY, 0.0
            for q in range(dims):
                mean[j, q] = sum(r[i] * V[i, j, q] for i in range(lower)) / received
                variance[j, q] = sum(r[i] * (V[i, j, q] - mean[j, q]) ** 2 for i in range(lower)) / received + em.FLOOR
                cost += (beta_u[j] + math.log(math.sqrt(variance[j, q]))) * received / (lower / upper) * 16 / dims
            active[j] = 1 / (1 + math.exp(-final_lambda * (1 - 0.95 ** (t + 1)) * (beta_a[j] - cost)))
        if t == iterations - 1:
            return mean, active, R
        for i in range(lower):
            p = [active[j] * gaussian(V[i, j], mean[j], variance[j]) for j in range(upper)]
            R[i] = np.array(p) / sum(p)
    raise AssertionError


def gaussian(x: np.ndarray, mean: np.ndarray, variance: np.ndarray) -> float:
    """The density of a Gaussian with a diagonal covariance."""
    return math.prod(np.exp(-((x - mean) ** 2) / (2 * variance)) / np.sqrt(2 * math.pi * variance))


def expected(layer: DenseCaps, u: Tensor, a: Tensor) -> list[np.ndarray]:
    V = (matrix_votes if layer.matrix else votes)(u, layer.weight).detach().numpy()
    options, routing = layer.routing.options, layer.routing
    betas = [beta.detach().numpy() for beta in (routing.beta_u, routing.beta_a)]
    every = [
        literal_em(V[b], a[b].numpy(), *betas, options.iterations, options.inverse_temperature) for b in range(len(V))
    ]
    return [np.stack(parts) for parts in zip(*every, strict=True)]


@pytest.mark.parametrize("iterations", [1, 2, 3, 4])
@pytest.mark.parametrize("sizes", SIZES)
def test_em_is_procedure_1_word_for_word(sizes: tuple[int, ...], iterations: int) -> None:
    layer, (u, a) = layer_of(sizes, iterations=iterations), problem(sizes)
    check_against_the_loop(layer, u, a)


def test_em_with_matrix_poses_is_procedure_1_word_for_word() -> None:
    sizes = (2, 6, 3, 16, 16, 6)
    layer, (u, a) = layer_of(sizes, matrix=True), problem(sizes)
    check_against_the_loop(layer, u / 4, a)


def check_against_the_loop(layer: DenseCaps, u: Tensor, a: Tensor) -> None:
    routed = layer.route(u, a, trace=True)
    assert routed.trace is not None
    came = (routed.poses, routed.activations, routed.trace.couplings[-1])
    for ours, theirs in zip(came, expected(layer, u, a), strict=True):
        np.testing.assert_allclose(ours.detach().numpy(), theirs, rtol=1e-6, atol=1e-7)


def test_lower_activations_are_the_lengths_of_the_poses_where_none_are_given() -> None:
    layer, (u, _) = layer_of(SIZES[1]), problem(SIZES[1])
    u = u / 8
    for ours, theirs in zip(layer.route(u)[:2], layer.route(u, u.norm(dim=-1))[:2], strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("iterations", [1, 2, 3])
def test_gradients_flow_through_every_iteration(iterations: int) -> None:
    layer, (u, a) = layer_of((2, 4, 3, 2, 3, 4), iterations=iterations), problem((2, 4, 3, 2, 3, 4))
    parameters = [layer.weight, layer.routing.beta_u, layer.routing.beta_a]

    def route(u: Tensor, a: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        return layer.route(u, a)[:2]

    assert torch.autograd.gradcheck(route, (u.requires_grad_(), a.requires_grad_(), *parameters))


def test_the_trace_tells_what_happened() -> None:
    b, i, j, _, q, _ = sizes = SIZES[1]
    layer, (u, a) = layer_of(sizes, iterations=4), problem(sizes)
    poses, activations, trace = layer.route(u, a, trace=True)
    assert trace is not None
    assert trace.variances is not None
    assert (trace.couplings.shape, trace.variances.shape) == ((4, b, i, j), (4, b, j, q))
    assert torch.equal(trace.outputs[-1], poses)
    assert torch.equal(trace.activations[-1], activations)
    torch.testing.assert_close(trace.couplings.sum(-1), torch.ones(4, b, i).double())
    weight = trace.couplings * a[:, :, None]  # the Gaussians of a step come from the responsibilities of that step
    means = torch.einsum("tbij,bijq->tbjq", weight, trace.votes) / weight.sum(2).unsqueeze(-1)
    torch.testing.assert_close(trace.outputs, means)


def test_layers_stack_and_pass_activations_on() -> None:
    below, above = (
        DenseCaps(8, 16, 5, 16, routing="em", matrix=True),
        DenseCaps(5, 16, 3, 16, routing="em", matrix=True),
    )
    capsules = below(torch.randn(2, 8, 16) / 4)
    assert isinstance(capsules, Capsules)
    torch.testing.assert_close(above(capsules)[0], above.route(capsules.poses, capsules.activations).poses)
    assert (above(capsules)[0] - above.route(capsules.poses).poses).abs().max() > 1e-6


@pytest.mark.parametrize("a", [torch.full((2, 6), 1.5), torch.full((2, 6), -0.1)])
def test_activations_outside_0_and_1_are_refused(a: Tensor) -> None:
    layer, (u, _) = layer_of(SIZES[1], dtype=torch.float32), problem(SIZES[1], torch.float32)
    with pytest.raises(UserError, match=r"in \[0, 1\]"):
        layer.route(u, a)


# --- What makes EM fail elsewhere: a guard passes on ours and fails with the mistake put in ----------------------


class OutsideLogSpace(EMRouting):
    def route(self, u_hat: Tensor, a: Tensor | None, parents: Parents, trace: bool) -> Routed:
        class Densities(Parents):
            def softmax(self, b_ij: Tensor) -> Tensor:
                return b_ij.exp() / parents.sum(b_ij.exp())

        return super().route(u_hat, a, Densities(), trace)


class WrongGaussian(EMRouting):
    def log_density(self, u_hat: Tensor, fitted: Gaussians) -> Tensor:
        return super().log_density(u_hat, fitted) - 0.5 * fitted.variance.log().sum(-1).unsqueeze(1)  # ln σ² for ln σ


class Growing(EMRouting):
    def share(self, S: Tensor, capacity: Tensor | float) -> Tensor:
        return S


class NoFloor(EMRouting):
    def variance(self, weight: Tensor, u_hat: Tensor, mean: Tensor) -> Tensor:
        return super().variance(weight, u_hat, mean) - em.FLOOR


class FewerWhenEvaluating(EMRouting):
    def route(self, u_hat: Tensor, a: Tensor | None, parents: Parents, trace: bool) -> Routed:
        used = self if self.training else self.with_options(iterations=1)
        return EMRouting.route(used, u_hat, a, parents, trace)  # type: ignore[arg-type]


class EachWindowByItself(EMRouting):
    def route(self, u_hat: Tensor, a: Tensor | None, parents: Parents, trace: bool) -> Routed:
        return super().route(u_hat, a, ALL, trace)


class TooCold(EMRouting):
    def __init__(self) -> None:
        super().__init__(inverse_temperature=1000.0)


Kind = Callable[..., EMRouting]


def guard_votes_far_from_every_parent_are_still_divided(kind: Kind) -> None:
    layer = layer_of((2, 6, 3, 4, 400, 6), kind, torch.float32)  # 400 dimensions: the densities are all 0 in float32
    trace = layer.route(*problem((2, 6, 3, 4), torch.float32), trace=True).trace
    torch.testing.assert_close(trace.couplings.sum(-1), torch.ones(3, 2, 6))


def guard_the_density_is_a_gaussian(kind: Kind) -> None:
    generator = torch.Generator().manual_seed(0)
    V, mean = torch.randn(2, 4, 3, 5, generator=generator).double(), torch.randn(2, 3, 5, generator=generator).double()
    variance = torch.rand(2, 3, 5, generator=generator).double() + 0.1
    ours = kind().log_density(V, Gaussians(mean, variance, mean[..., 0], mean[..., 0]))
    library = torch.distributions.Normal(mean.unsqueeze(1), variance.sqrt().unsqueeze(1)).log_prob(V).sum(-1)
    torch.testing.assert_close(ours, library)
    one = multivariate_normal.logpdf(V[0, 0, 0], mean[0, 0], np.diag(variance[0, 0]))
    np.testing.assert_allclose(ours[0, 0, 0], one)


def guard_activations_start_between_dead_and_saturated(kind: Kind) -> None:
    for i, j, q in ((1152, 10, 16), (6, 3, 4), (300, 100, 16), (32, 2, 64), (1, 1, 1)):
        torch.manual_seed(i)
        layer = DenseCaps(i, 8, j, q, routing=kind())
        directions = torch.nn.functional.normalize(torch.randn(4, i, 8), dim=-1)
        for length in (0.1, 0.3, 0.5):  # untrained primary capsules are short
            a = layer.route(length * directions).activations
            assert a.min() > 0.05
            assert a.max() < 0.95


def guard_more_children_of_the_same_kind_change_nothing(kind: Kind) -> None:
    layer, (u, a) = layer_of((2, 6, 3, 4, 5, 6), kind), problem((2, 6, 3, 4))
    many = DenseCaps(300, 4, 3, 5, routing=kind(), shared=6, dtype=torch.float64)
    many.load_state_dict(layer.state_dict())
    for one, other in zip(layer.route(u, a)[:2], many.route(u.repeat(1, 50, 1), a.repeat(1, 50))[:2], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def guard_a_parent_with_one_child_is_finite(kind: Kind) -> None:
    layer = layer_of((2, 1, 3, 4, 5, 1), kind, torch.float32)
    u = problem((2, 1, 3, 4), torch.float32)[0].requires_grad_()
    poses, activations, _ = layer.route(u)
    (poses.sum() + activations.sum()).backward()
    assert all(x.isfinite().all() for x in (poses, activations, u.grad, layer.weight.grad))


def guard_training_and_evaluation_take_the_same_iterations(kind: Kind) -> None:
    layer, (u, a) = layer_of((2, 6, 3, 4, 5, 6), kind), problem((2, 6, 3, 4))
    for one, other in zip(layer.train().route(u, a)[:2], layer.eval().route(u, a)[:2], strict=True):
        torch.testing.assert_close(one, other)


class TwoWindows(Parents):
    """Every child is seen by two windows, as rows i and i + half of the votes."""

    def softmax(self, b_ij: Tensor) -> Tensor:
        return torch.cat(torch.cat(b_ij.chunk(2, 1), -1).softmax(-1).chunk(2, -1), 1)


def guard_a_child_divides_itself_among_the_parents_of_all_windows(kind: Kind) -> None:
    layer, (u, a) = layer_of((2, 6, 3, 4, 5, 6), kind), problem((2, 6, 3, 4))
    routed = layer.routing(u, layer.weight, a, parents=TwoWindows(), trace=True)
    both = sum(routed.trace.couplings.sum(-1).chunk(2, -1))
    torch.testing.assert_close(both, torch.ones(3, 2, 3).double())


MISTAKES: list[tuple[Callable[[Kind], None], list[Kind]]] = [
    (guard_votes_far_from_every_parent_are_still_divided, [OutsideLogSpace]),
    (guard_the_density_is_a_gaussian, [WrongGaussian]),
    (guard_activations_start_between_dead_and_saturated, [TooCold, Growing]),
    (guard_more_children_of_the_same_kind_change_nothing, [Growing]),
    (guard_a_child_divides_itself_among_the_parents_of_all_windows, [EachWindowByItself]),
    (guard_a_parent_with_one_child_is_finite, [NoFloor]),
    (guard_training_and_evaluation_take_the_same_iterations, [FewerWhenEvaluating]),
]


@pytest.mark.parametrize("guard", [guard for guard, _ in MISTAKES])
def test_ours_passes_the_guard(guard: Callable[[Kind], None]) -> None:
    guard(EMRouting)


@pytest.mark.parametrize(("guard", "kind"), [(guard, kind) for guard, kinds in MISTAKES for kind in kinds])
def test_the_mistake_is_noticed(guard: Callable[[Kind], None], kind: Kind) -> None:
    with pytest.raises(AssertionError):
        guard(kind)
