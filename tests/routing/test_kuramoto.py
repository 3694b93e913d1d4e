"""Kuramoto routing: its equations, its limits, and the ways to get it wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from capsnet.errors import UserError
from capsnet.nn.functional import squash
from capsnet.routing.base import ALL, options_for
from capsnet.routing.kuramoto import KuramotoRouting, turned
from capsnet.routing.uniform import UniformRouting
from literal import array, assert_equal, layer_and_poses, literal_softmax, literal_squash, literal_votes

Array = np.ndarray
GAMMA = 0.2


def unit(x: Array) -> Array:
    return x / np.sqrt((x * x).sum())


def literal_kuramoto(u_hat: Array, kappa: Array, iterations: int, step: float = GAMMA) -> Array:
    """One example: votes (i, j, q) → v (j, q), one oscillator at a time."""
    lower, upper, dim = u_hat.shape
    x, v = np.zeros(u_hat.shape), np.zeros((upper, dim))
    for i in range(lower):
        for j in range(upper):
            x[i, j] = unit(u_hat[i, j])
    c = np.full((lower, upper), 1 / upper)
    for t in range(iterations):
        for j in range(upper):
            v[j] = literal_squash(sum(c[i, j] * np.sqrt((u_hat[i, j] ** 2).sum()) * x[i, j] for i in range(lower)))
        if t == iterations - 1:
            return v
        for i in range(lower):
            for j in range(upper):
                force = unit(u_hat[i, j]) + kappa[j] * c[i, j] * v[j]
                along = force - (force @ x[i, j]) * x[i, j]
                x[i, j] = unit(x[i, j] + step * along)
            c[i] = literal_softmax(np.array([kappa[j] * (x[i, j] @ v[j]) for j in range(upper)]))
    return v


@pytest.mark.parametrize("iterations", [1, 2, 3, 6])
@pytest.mark.parametrize("shared", [False, True])
def test_kuramoto_routing_is_the_literal_loop(shared: bool, iterations: int) -> None:
    layer, poses = layer_and_poses("kuramoto", shared, iterations=iterations)
    routing = layer.routing
    assert isinstance(routing, KuramotoRouting)
    expected = [
        literal_kuramoto(literal_votes(u, array(layer.weight)), array(routing.kappa), iterations) for u in array(poses)
    ]
    assert_equal(layer.route(poses).poses, expected)


@pytest.mark.parametrize("iterations", [1, 2, 5])
@pytest.mark.parametrize("scale", [1e-6, 0.1, 3.0])
def test_without_a_trace_the_oscillators_are_the_same_gradients_too(scale: float, iterations: int) -> None:
    layer, poses = layer_and_poses("kuramoto", iterations=iterations)
    poses = (scale * poses).requires_grad_()
    found = []
    for trace in (False, True):
        routed = layer.route(poses, trace=trace)
        towards = torch.arange(routed.poses.numel(), dtype=poses.dtype).view_as(routed.poses).sin()
        inputs = [poses, layer.weight, *([layer.routing.kappa] if iterations > 1 else [])]
        found.append([routed.poses, *torch.autograd.grad((routed.poses * towards).sum(), inputs)])
    for lean, plain in zip(*found, strict=True):
        torch.testing.assert_close(lean, plain, rtol=1e-7, atol=1e-7 * float(plain.detach().abs().max()))


def test_one_iteration_is_uniform_routing() -> None:
    layer, poses = layer_and_poses("kuramoto", iterations=1)
    expected = UniformRouting()(poses, layer.weight)
    torch.testing.assert_close(layer.route(poses).poses, expected.poses, rtol=1e-6, atol=1e-6)


def test_the_trace_has_the_oscillators_of_every_step() -> None:
    layer, poses = layer_and_poses("kuramoto", iterations=5)
    trace = layer.route(poses, trace=True).trace
    assert trace is not None
    assert trace.oscillators is not None
    assert trace.logits is not None
    x, kappa = trace.oscillators, layer.routing.kappa
    assert x.shape == (5, 3, 12, 3, 5)
    torch.testing.assert_close(x.norm(dim=-1), torch.ones(x.shape[:-1]).double(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(x[0], trace.votes / trace.votes.norm(dim=-1, keepdim=True), rtol=1e-6, atol=1e-6)
    in_phase = torch.einsum("tbijq,tbjq->tbij", x[1:], trace.outputs[:-1]) * kappa
    torch.testing.assert_close(trace.logits[1:], in_phase)


def built(votes: Tensor, kappa: float, **options: Any) -> KuramotoRouting:
    routing = KuramotoRouting(**options)
    routing.kappa = nn.Parameter(torch.full((votes.shape[2],), kappa, dtype=votes.dtype))
    routing.sizes = layer_and_poses("kuramoto")[0].routing.sizes
    return routing


def test_votes_that_agree_synchronise_and_the_odd_one_is_left_out() -> None:
    """Two upper capsules; three lower capsules agree about the first, the fourth votes against them."""
    votes = torch.zeros(1, 4, 2, 2)
    votes[0, :, 0] = torch.tensor([[1.0, 0.0], [0.9, 0.3], [0.9, -0.3], [-0.8, 0.6]])
    votes[0, :, 1] = torch.tensor([[0.0, 0.3], [0.3, 0.0], [-0.3, 0.0], [0.8, 0.6]])
    trace = built(votes, 4.0, iterations=8).route(votes, None, ALL, True).trace
    assert trace is not None
    c_i0 = trace.couplings[-1, 0, :, 0]
    assert c_i0[:3].min() > 0.8
    assert c_i0[3] < 0.05


def test_an_oscillator_stays_on_the_sphere_and_turns_towards_the_force() -> None:
    x = nn.functional.normalize(torch.randn(50, 6), dim=-1)
    force = torch.randn(50, 6)
    after = turned(x, force, GAMMA)
    torch.testing.assert_close(after.norm(dim=-1), torch.ones(50))
    assert ((after * force).sum(-1) > (x * force).sum(-1)).all()


def test_gradients_are_those_of_finite_differences() -> None:
    votes = torch.randn(2, 3, 2, 3, dtype=torch.float64, requires_grad=True)
    routing = built(votes, 2.0, iterations=3)

    def run(u_hat: Tensor, kappa: Tensor) -> Tensor:
        return torch.func.functional_call(_Route(routing), {"routing.kappa": kappa}, (u_hat,))

    assert torch.autograd.gradcheck(run, (votes, routing.kappa))


class _Route(nn.Module):
    def __init__(self, routing: KuramotoRouting) -> None:
        super().__init__()
        self.routing = routing

    def forward(self, u_hat: Tensor) -> Tensor:
        return self.routing.route(u_hat, None, ALL, False).poses


def test_a_negative_step_is_refused() -> None:
    with pytest.raises(UserError, match=r"step=-1 is too small: it should be between 0 and 10"):
        options_for("kuramoto", step=-1)


# --- Mistakes, and a guard against each ---------------------------------------------------------------------------

Route = Callable[[Tensor], Tensor]  # votes (b, i, j, q) → v (b, j, q)


def ours(u_hat: Tensor) -> Tensor:
    return built(u_hat, 3.0, iterations=4).route(u_hat, None, ALL, False).poses


def kuramoto_with(
    over: int = -1, tangent: bool = True, held: bool = True, amplitude: bool = True, accumulated: bool = False,
    scaled: bool = False, symmetric: bool = True,
) -> Route:  # fmt: skip
    """The equations with a mistake put in; without one they are right."""

    def route(u_hat: Tensor) -> Tensor:
        length = u_hat.norm(dim=-1, keepdim=True)
        x, b_ij = (own := u_hat / length), u_hat.new_zeros(u_hat.shape[:-1])
        for _ in range(4):
            c_ij = b_ij.softmax(over).unsqueeze(-1)
            v_j = squash((c_ij * (length if amplitude else 1) * x).sum(1))
            force = 3.0 * (c_ij if symmetric else 1) * v_j.unsqueeze(1) + ((u_hat if scaled else own) if held else 0)
            along = force - (force * x).sum(-1, keepdim=True) * x if tangent else force
            x = nn.functional.normalize(x + GAMMA * along, dim=-1)
            agreement = 3.0 * torch.einsum("bijq,bjq->bij", x, v_j)
            b_ij = b_ij + agreement if accumulated else agreement
        return v_j

    return route


def guard_kuramoto_is_the_loop(route: Route) -> None:
    torch.manual_seed(0)
    u_hat = torch.randn(2, 6, 3, 5, dtype=torch.float64)
    assert_equal(route(u_hat), [literal_kuramoto(array(votes), np.full(3, 3.0), 4) for votes in u_hat])


def test_ours_and_the_equations_without_a_mistake_pass() -> None:
    guard_kuramoto_is_the_loop(ours)
    guard_kuramoto_is_the_loop(kuramoto_with())


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(kuramoto_with(over=1), id="softmax over the lower capsules"),
        pytest.param(kuramoto_with(tangent=False), id="the force is not projected on the sphere"),
        pytest.param(kuramoto_with(held=False), id="a vote does not hold its oscillator back"),
        pytest.param(kuramoto_with(amplitude=False), id="long and short votes count alike"),
        pytest.param(kuramoto_with(scaled=True), id="a long vote holds its oscillator back more"),
        pytest.param(kuramoto_with(symmetric=False), id="every field pulls, whatever the coupling"),
        pytest.param(kuramoto_with(accumulated=True), id="logits accumulated as in dynamic routing"),
    ],
)
def test_a_mistake_in_the_equations_is_noticed(wrong: Route) -> None:
    with pytest.raises(AssertionError):
        guard_kuramoto_is_the_loop(wrong)
