"""Inverted dot-product attention: its equations, its kernel, and the ways to get it wrong."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from capsnet.errors import UserError
from capsnet.models.base import Output
from capsnet.models.capsnet import CapsNet
from capsnet.models.config import CapsNetConfig, LossConfig
from capsnet.nn.functional import squash
from capsnet.nn.layers import DenseCaps
from capsnet.routing.base import ALL
from capsnet.routing.inverted_attention import InvertedAttentionRouting
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


def literal_layer_norm(s: Array, gain: Array, bias: Array) -> Array:
    mean = s.sum() / len(s)
    variance = ((s - mean) ** 2).sum() / len(s)
    return (s - mean) / math.sqrt(variance + 1e-5) * gain + bias


def literal_inverted_attention(u_hat: Array, gain: Array, bias: Array, iterations: int) -> Array:
    """One example: votes (i, j, q) → v (j, q)."""
    lower, upper, dim = u_hat.shape
    c, v = np.full((lower, upper), 1 / upper), np.zeros((upper, dim))
    for t in range(iterations):
        if t > 0:
            for i in range(lower):
                c[i] = literal_softmax(np.array([u_hat[i, j] @ v[j] / math.sqrt(dim) for j in range(upper)]))
        for j in range(upper):
            v[j] = literal_layer_norm(sum(c[i, j] * u_hat[i, j] for i in range(lower)), gain, bias)
    return v


@pytest.mark.parametrize("iterations", [1, 2, 3, 5])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_inverted_attention_is_the_literal_loop(path: str, shared: bool, iterations: int) -> None:
    layer, poses = layer_and_poses("inverted-attention", shared, dtype_of(path), iterations=iterations)
    routing = layer.routing
    assert isinstance(routing, InvertedAttentionRouting)
    norm = array(routing.gain), array(routing.bias)
    expected = [
        literal_inverted_attention(literal_votes(u, array(layer.weight)), *norm, iterations) for u in array(poses)
    ]
    with taking(path):
        routed = layer.route(poses)
    tolerance = 1e-6 if path != "fused" else 1e-3  # a normalisation magnifies what rounding does to a small sum
    assert_equal(routed.poses, expected, tolerance)
    scores = [v @ array(routing.readout) + array(routing.offset) for v in expected]
    assert_equal(routed.activations, [1 / (1 + np.exp(-z)) for z in scores], tolerance)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("path", PATHS[1:])
def test_the_kernel_is_the_plain_form_gradients_too(path: str, shared: bool) -> None:
    layer, u = layer_and_poses("inverted-attention", shared, dtype_of(path), 21)
    assert_kernel_is_its_plain_twin(layer, u, path, 1e-10 if path == "torch" else 1e-3)


def test_the_trace_has_every_pass_beginning_with_uniform_couplings() -> None:
    layer, u = layer_and_poses("inverted-attention", iterations=4)
    routed = layer.route(u, trace=True)
    assert routed.trace is not None
    assert routed.trace.couplings.shape == (4, 3, 12, 3)
    torch.testing.assert_close(routed.trace.couplings[0], torch.full((3, 12, 3), 1 / 3).double())
    torch.testing.assert_close(routed.trace.outputs[-1], routed.poses)
    torch.testing.assert_close(routed.trace.activations[-1], routed.activations)
    agreement = torch.einsum("bijq,tbjq->tbij", routed.trace.votes, routed.trace.outputs[:-1]) / math.sqrt(5)
    assert routed.trace.logits is not None
    torch.testing.assert_close(routed.trace.logits[1:], agreement)


def test_a_pose_of_one_dimension_is_refused() -> None:
    with pytest.raises(UserError, match=r"at least two dimensions.*choose a larger dimension"):
        DenseCaps(6, 4, 3, 1, routing="inverted-attention")


def test_without_a_layer_it_has_no_parameters_and_says_so() -> None:
    with pytest.raises(UserError, match=r"the routing .inverted-attention. has parameters and is not part of a layer"):
        InvertedAttentionRouting()(torch.randn(2, 6, 4), torch.randn(6, 3, 5, 4))


@pytest.mark.parametrize("multi_label", [False, True])
def test_cross_entropy_sees_the_linear_read_out(multi_label: bool) -> None:
    """The log-odds of the activations are the scores, so the loss is that of the paper."""
    config = CapsNetConfig((1, 12, 12), 3, (8,), (3,), (1,), primary_types=4, primary_dim=4, primary_kernel=3)
    model = CapsNet(config)
    model.multi_label = multi_label
    scores, targets = 3 * torch.randn(5, 3), torch.eye(3)[torch.tensor([0, 1, 2, 1, 0])]
    loss = model.classification_loss(Output(scores.sigmoid()), targets, LossConfig(kind="entropy"), 1.0)
    expected = (
        F.binary_cross_entropy_with_logits(scores, targets, reduction="none").sum(1).mean()
        if multi_label
        else F.cross_entropy(scores, targets)
    )
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)


# --- Mistakes, and a guard against each ---------------------------------------------------------------------------

Route = Callable[[Tensor], Tensor]  # votes (b, i, j, q) → v (b, j, q)


def ours(u_hat: Tensor) -> Tensor:
    layer, _ = layer_and_poses("inverted-attention")
    nn.init.ones_(layer.routing.gain)  # type: ignore[arg-type]
    nn.init.zeros_(layer.routing.bias)  # type: ignore[arg-type]
    return layer.routing.route(u_hat, None, ALL, False).poses


def attention_with(
    over: int = -1, accumulated: bool = False, scale: float | None = None,
    finish: Callable[[Tensor], Tensor] = lambda s: F.layer_norm(s, s.shape[-1:]),
) -> Route:  # fmt: skip
    """The equations with a mistake put in; without one they are right."""

    def route(u_hat: Tensor) -> Tensor:
        logits = u_hat.new_zeros(u_hat.shape[:-1])
        for _ in range(3):
            v_j = finish(torch.einsum("bij,bijq->bjq", logits.softmax(over), u_hat))
            agreement = torch.einsum("bijq,bjq->bij", u_hat, v_j) / (scale or math.sqrt(u_hat.shape[-1]))
            logits = logits + agreement if accumulated else agreement
        return v_j

    return route


def guard_attention_is_the_papers(route: Route) -> None:
    torch.manual_seed(0)
    u_hat = torch.randn(2, 6, 3, 5, dtype=torch.float64)
    expected = [literal_inverted_attention(array(votes), np.ones(5), np.zeros(5), 3) for votes in u_hat]
    assert_equal(route(u_hat), expected)


def test_ours_and_the_equations_without_a_mistake_pass() -> None:
    guard_attention_is_the_papers(ours)
    guard_attention_is_the_papers(attention_with())


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(attention_with(over=1), id="softmax over the lower capsules, not inverted"),
        pytest.param(attention_with(accumulated=True), id="logits accumulated as in dynamic routing"),
        pytest.param(attention_with(scale=1.0), id="no √Q"),
        pytest.param(attention_with(finish=squash), id="squash instead of layer normalisation"),
        pytest.param(attention_with(finish=lambda s: F.layer_norm(s, s.shape[-2:])), id="normalised over all capsules"),
        pytest.param(attention_with(finish=lambda s: s), id="not normalised"),
    ],
)
def test_a_mistake_in_the_equations_is_noticed(wrong: Route) -> None:
    with pytest.raises(AssertionError):
        guard_attention_is_the_papers(wrong)
