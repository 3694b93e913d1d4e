"""Self-routing: a learnt gate and no agreement, and the ways to get it wrong."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from capsnet.errors import UserError
from capsnet.nn.functional import Capsules, votes
from capsnet.nn.layers import DenseCaps
from capsnet.routing.base import ALL
from capsnet.routing.self_routing import SelfRouting
from literal import (
    PATHS,
    array,
    assert_equal,
    assert_kernel_is_its_plain_twin,
    layer_and_poses,
    literal_softmax,
    literal_votes,
    taking,
)

Array = np.ndarray


def literal_self_routing(u: Array, a: Array, W: Array, gate: Array, gate_bias: Array) -> tuple[Array, Array, Array]:
    """One example: u (i, p), a (i,), A (n, j, p), α (n, j) → couplings (i, j), poses (j, q), activations (j,)."""
    u_hat, types = literal_votes(u, W), len(gate)
    lower, upper, dim = u_hat.shape
    c, poses, activations = np.zeros((lower, upper)), np.zeros((upper, dim)), np.zeros(upper)
    for i in range(lower):
        c[i] = literal_softmax(gate[i % types] @ u[i] + gate_bias[i % types])
    for j in range(upper):
        received = sum(a[i] * c[i, j] for i in range(lower))
        activations[j] = received / sum(a)
        poses[j] = sum(a[i] * c[i, j] * u_hat[i, j] for i in range(lower)) / received
    return c, poses, activations


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("path", PATHS[:2])
def test_self_routing_is_the_literal_loop(path: str, shared: bool, given: bool) -> None:
    layer, poses = layer_and_poses("self-routing", shared)
    a = torch.rand(3, 12, dtype=torch.float64) if given else None
    weights = [array(x) for x in (layer.weight, layer.routing.gate, layer.routing.gate_bias)]  # type: ignore[arg-type]
    lower = array(poses.norm(dim=-1).clamp(max=1) if a is None else a)
    expected = [literal_self_routing(u, a_i, *weights) for u, a_i in zip(array(poses), lower, strict=True)]
    trace = layer.route(poses, a, trace=True).trace
    assert trace is not None
    assert_equal(trace.couplings[0], [c for c, _, _ in expected])
    with taking(path):
        routed = layer.route(poses, a)
    assert_equal(routed.poses, [v for _, v, _ in expected])
    assert_equal(routed.activations, [a for _, _, a in expected])


@pytest.mark.parametrize("shared", [False, True])
def test_without_votes_it_is_the_plain_form_gradients_too(shared: bool) -> None:
    assert_kernel_is_its_plain_twin(*layer_and_poses("self-routing", shared), "torch", 1e-10)


def test_the_gate_starts_at_zero_and_learns() -> None:
    layer, u = DenseCaps(6, 4, 3, 5, routing="self-routing"), torch.randn(2, 6, 4)
    assert not layer.routing.gate.any()  # type: ignore[operator, union-attr]
    routed = layer.route(u)
    torch.testing.assert_close(routed.activations, torch.full((2, 3), 1 / 3))
    routed.activations[:, 0].sum().backward()
    assert layer.routing.gate.grad.any()  # type: ignore[operator, union-attr]


def test_layers_pass_activations_on() -> None:
    layers = [DenseCaps(6, 4, 5, 3, routing="self-routing"), DenseCaps(5, 3, 3, 2, routing="self-routing")]
    for layer in layers:
        torch.nn.init.normal_(layer.routing.gate)  # type: ignore[arg-type]
    hidden = layers[0](torch.randn(2, 6, 4))
    assert isinstance(hidden, Capsules)
    top = layers[1](hidden)
    assert isinstance(top, Capsules)
    torch.testing.assert_close(top.activations, layers[1].route(*hidden).activations)
    assert not torch.allclose(top.activations, layers[1].route(hidden.poses).activations)


def test_votes_alone_are_routed_by_the_bias_of_the_gate() -> None:
    layer, u = layer_and_poses("self-routing")
    routing = layer.routing
    routed = routing.route(votes(u, layer.weight), None, ALL, True)
    assert routed.trace is not None
    torch.testing.assert_close(routed.trace.couplings[0, 0], routing.gate_bias.softmax(-1))  # type: ignore[operator]


def test_one_upper_capsule_is_refused() -> None:
    with pytest.raises(UserError, match=r"at least two upper capsules.*choose another routing"):
        DenseCaps(6, 4, 1, 5, routing="self-routing")


def test_without_a_layer_it_has_no_parameters_and_says_so() -> None:
    with pytest.raises(UserError, match=r"the routing .self-routing. has parameters and is not part of a layer"):
        SelfRouting()(torch.randn(2, 6, 4), torch.randn(6, 3, 5, 4))


# --- Mistakes, and a guard against each ---------------------------------------------------------------------------

Send = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # û (b, i, j, q), a (b, i), b (b, i, j) → v and a


def ours(u_hat: Tensor, a: Tensor, b_ij: Tensor) -> tuple[Tensor, Tensor]:
    return SelfRouting().send(u_hat, a, b_ij, ALL, False)[:2]


def sending_with(over: int = -1, mean: bool = True, weighted: bool = True, share: bool = True) -> Send:
    """The equations with a mistake put in; without one they are right."""

    def send(u_hat: Tensor, a: Tensor, b_ij: Tensor) -> tuple[Tensor, Tensor]:
        c_ij = b_ij.softmax(over)
        sent = a.unsqueeze(-1) * c_ij if weighted else c_ij
        received = sent.sum(1)
        pose = torch.einsum("bij,bijq->bjq", sent, u_hat) / (received.unsqueeze(-1) if mean else 1)
        return pose, received / (a.sum(1, keepdim=True) if share else a.shape[1])

    return send


def guard_a_silent_capsule_changes_nothing_and_activations_sum_to_one(send: Send) -> None:
    """Equal votes are the pose, whatever their weights; a lower capsule with activation 0 counts nowhere."""
    torch.manual_seed(0)
    a, b_ij, vote = torch.rand(2, 6), torch.randn(2, 6, 3), torch.randn(3, 5)
    u_hat = vote.expand(2, 6, 3, 5).clone()
    a[:, 0], u_hat[:, 0] = 0.0, 100.0
    poses, activations = send(u_hat, a, b_ij)
    torch.testing.assert_close(poses, vote.expand(2, 3, 5))
    torch.testing.assert_close(activations.sum(1), torch.ones(2))
    without, _ = send(u_hat[:, 1:], a[:, 1:], b_ij[:, 1:])
    torch.testing.assert_close(poses, without)


def test_ours_and_the_equations_without_a_mistake_pass() -> None:
    guard_a_silent_capsule_changes_nothing_and_activations_sum_to_one(ours)
    guard_a_silent_capsule_changes_nothing_and_activations_sum_to_one(sending_with())


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(sending_with(over=1), id="softmax over the lower capsules"),
        pytest.param(sending_with(mean=False), id="a sum of votes instead of their mean"),
        pytest.param(sending_with(weighted=False), id="lower activations not used"),
        pytest.param(sending_with(share=False), id="divided by the number of lower capsules"),
    ],
)
def test_a_mistake_in_the_equations_is_noticed(wrong: Send) -> None:
    with pytest.raises(AssertionError):
        guard_a_silent_capsule_changes_nothing_and_activations_sum_to_one(wrong)


def guard_couplings_do_not_look_at_the_votes(couplings: Callable[[DenseCaps, Tensor], Tensor]) -> None:
    """Self-routing is the control without agreement: other transformations must leave the couplings alone."""
    layer, u = layer_and_poses("self-routing")
    before = couplings(layer, u)
    torch.nn.init.normal_(layer.weight)
    torch.testing.assert_close(couplings(layer, u), before)


def gated(layer: DenseCaps, u: Tensor) -> Tensor:
    trace = layer.route(u, trace=True).trace
    assert trace is not None
    return trace.couplings


def by_agreement(layer: DenseCaps, u: Tensor) -> Tensor:
    u_hat = votes(u, layer.weight)
    return torch.einsum("bijq,bjq->bij", u_hat, u_hat.mean(1)).softmax(-1)


def test_couplings_do_not_look_at_the_votes() -> None:
    guard_couplings_do_not_look_at_the_votes(gated)


def test_agreement_in_the_gate_is_noticed() -> None:
    with pytest.raises(AssertionError):
        guard_couplings_do_not_look_at_the_votes(by_agreement)
