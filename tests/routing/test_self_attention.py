"""Self-attention routing: its equations, its kernel, and the ways to get it wrong."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from capsnet.errors import UserError
from capsnet.kernels import dispatch
from capsnet.kernels import routing as kernel
from capsnet.nn.functional import lengths, squash
from capsnet.nn.layers import DenseCaps
from capsnet.routing.base import ALL, Trace
from capsnet.routing.self_attention import SelfAttentionRouting, squash_exp
from literal import (
    PATHS,
    array,
    assert_equal,
    assert_kernel_is_its_plain_twin,
    dtype_of,
    layer_and_poses,
    literal_softmax,
    literal_votes,
    taking,
)

Array = np.ndarray


def literal_self_attention(u_hat: Array, beta: Array) -> tuple[Array, Array]:
    """One example: votes (i, j, q) and β (n, j) → couplings (i, j) and v (j, q). With the I × I agreements."""
    lower, upper, dim = u_hat.shape
    logits, c, v = np.zeros((lower, upper)), np.zeros((lower, upper)), np.zeros((upper, dim))
    for j in range(upper):
        for i in range(lower):
            for k in range(lower):
                logits[i, j] += u_hat[i, j] @ u_hat[k, j] / math.sqrt(dim)
    for i in range(lower):
        c[i] = literal_softmax(logits[i]) + beta[i % len(beta)]
    for j in range(upper):
        s = sum(c[i, j] * u_hat[i, j] for i in range(lower))
        length = math.sqrt(s @ s)
        v[j] = (1 - math.exp(-length)) * s / length
    return c, v


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_self_attention_is_the_literal_loop(path: str, shared: bool) -> None:
    layer, poses = layer_and_poses("self-attention", shared, dtype_of(path))
    beta = array(layer.routing.beta)
    expected = [literal_self_attention(literal_votes(u, array(layer.weight)), beta)[1] for u in array(poses)]
    with taking(path):
        assert_equal(layer.route(poses).poses, expected, 1e-6 if path != "fused" else 1e-4)


def test_the_couplings_are_those_of_the_literal_loop() -> None:
    layer, poses = layer_and_poses("self-attention")
    trace = layer.route(poses, trace=True).trace
    assert trace is not None
    beta = array(layer.routing.beta)
    expected = [literal_self_attention(literal_votes(u, array(layer.weight)), beta)[0] for u in array(poses)]
    assert_equal(trace.couplings[0], expected)


@pytest.mark.parametrize("b", [1, 3, 16, 21])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("path", PATHS[1:])
def test_the_kernel_is_the_plain_form_gradients_too(path: str, shared: bool, b: int) -> None:
    layer, u = layer_and_poses("self-attention", shared, dtype_of(path), b)
    assert_kernel_is_its_plain_twin(layer, u, path, 1e-10 if path == "torch" else 3e-5)


def test_the_kernel_is_taken_for_large_votes_and_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer, u = DenseCaps(288, 8, 10, 16, routing="self-attention"), torch.randn(16, 288, 8) / 8
    torch.nn.init.normal_(layer.routing.beta, std=0.1)  # type: ignore[arg-type]
    taken: list[int] = []
    attend = dispatch.attend
    monkeypatch.setattr(dispatch, "attend", lambda *x: (taken.append(1), attend(*x))[1])
    assert_kernel_is_its_plain_twin(layer, u, "fused", 3e-5)
    taken.clear()
    layer(u)
    assert taken == [1]
    layer(u[:4])
    layer.route(u, trace=True)
    assert taken == [1]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("path", PATHS[1:])
def test_attend_has_the_gradient_of_its_equation(path: str, shared: bool) -> None:
    layer, u = layer_and_poses("self-attention", shared, b=2)
    W, V = layer.weight, torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    if path == "torch":
        with taking(path):
            assert torch.autograd.gradcheck(kernel.attend, (u.requires_grad_(), W, V))
    with taking(path):
        s = kernel.attend(u.float(), W.float(), V.float())
    u_hat = layer.routing.votes(u, W)
    c_ij = torch.einsum("bijq,bjq->bij", u_hat, V).softmax(-1)
    torch.testing.assert_close(s.double(), torch.einsum("bij,bijq->bjq", c_ij, u_hat), rtol=1e-5, atol=1e-5)


def test_a_second_derivative_of_the_kernel_is_refused_with_what_to_do() -> None:
    u, W, V = (torch.randn(shape, requires_grad=True) for shape in ((2, 6, 4), (6, 3, 5, 4), (2, 3, 5)))
    (gradient,) = torch.autograd.grad(kernel.attend(u, W, V).square().sum(), u, create_graph=True)
    with pytest.raises(UserError, match="can be differentiated once"):
        gradient.sum().backward()


def test_beta_starts_at_zero() -> None:
    layer = DenseCaps(6, 4, 3, 5, routing="self-attention")
    assert layer.routing.beta.shape == (6, 3)  # type: ignore[union-attr]
    assert not layer.routing.beta.any()  # type: ignore[operator, union-attr]


@pytest.mark.parametrize("magnitude", [0.0, 1e-20, 1e-6, 1.0, 1e4])
def test_the_steeper_squash_keeps_lengths_below_one_and_gradients_finite(magnitude: float) -> None:
    s = (magnitude * torch.randn(7, 5)).requires_grad_()
    v = squash_exp(s)
    torch.testing.assert_close(v.norm(dim=-1), 1 - torch.exp(-s.norm(dim=-1)), rtol=1e-4, atol=1e-5)
    lengths(v).sum().backward()
    assert s.grad is not None
    assert s.grad.isfinite().all()


# --- Mistakes, and a guard against each ---------------------------------------------------------------------------

Attend = Callable[[Tensor, Tensor], Tensor]  # votes (b, i, j, q), β (i, j) → v (b, j, q)


def ours(u_hat: Tensor, beta: Tensor) -> Tensor:
    routing = SelfAttentionRouting()
    routing.beta = torch.nn.Parameter(beta)
    return routing.route(u_hat, None, ALL, False).poses


def attention_with(
    over: int = -1, inside: bool = False, scale: float | None = None, itself: bool = True,
    squashing: Callable[[Tensor], Tensor] = squash_exp,
) -> Attend:  # fmt: skip
    """The equations with a mistake put in; without one they are right."""

    def attend(u_hat: Tensor, beta: Tensor) -> Tensor:
        logits = torch.einsum("bijq,bjq->bij", u_hat, u_hat.sum(1))
        if not itself:
            logits = logits - u_hat.square().sum(-1)
        logits = logits / (math.sqrt(u_hat.shape[-1]) if scale is None else scale)
        c_ij = (logits + beta).softmax(over) if inside else logits.softmax(over) + beta
        return squashing(torch.einsum("bij,bijq->bjq", c_ij, u_hat))

    return attend


def guard_attention_is_the_papers(attend: Attend) -> None:
    torch.manual_seed(0)
    u_hat, beta = torch.randn(2, 6, 3, 5, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
    expected = [literal_self_attention(array(votes), array(beta))[1] for votes in u_hat]
    assert_equal(attend(u_hat, beta), expected)


def test_ours_and_the_equations_without_a_mistake_pass() -> None:
    guard_attention_is_the_papers(ours)
    guard_attention_is_the_papers(attention_with())


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(attention_with(over=1), id="softmax over the lower capsules"),
        pytest.param(attention_with(inside=True), id="β inside the softmax"),
        pytest.param(attention_with(scale=1.0), id="no √Q"),
        pytest.param(attention_with(scale=math.sqrt(6)), id="√I instead of √Q"),
        pytest.param(attention_with(itself=False), id="a vote does not attend to itself"),
        pytest.param(attention_with(squashing=squash), id="the squash of dynamic routing"),
        pytest.param(attention_with(squashing=lambda s: s), id="no squash"),
    ],
)
def test_a_mistake_in_the_equations_is_noticed(wrong: Attend) -> None:
    with pytest.raises(AssertionError):
        guard_attention_is_the_papers(wrong)


@pytest.mark.parametrize("lower", [16, 1152])
def test_a_new_layer_is_neither_decided_nor_saturated(lower: int) -> None:
    trace = trace_of_a_new_layer(lower)
    assert trace.couplings.max() < 0.5
    assert trace.activations.max() < 0.9


def test_sixteen_capsules_with_the_scale_of_other_layers_would_be_both() -> None:
    trace = trace_of_a_new_layer(16, std=0.8)
    assert trace.couplings.max() > 0.99
    assert trace.activations.max() > 0.999


def trace_of_a_new_layer(lower: int, std: float | None = None) -> Trace:
    torch.manual_seed(0)
    layer, u = DenseCaps(lower, 8, 10, 16, routing="self-attention"), squash_exp(2 * torch.randn(32, lower, 8))
    if std:
        torch.nn.init.normal_(layer.weight, std=std)
    trace = layer.route(u, trace=True).trace
    assert trace is not None
    return trace
