"""Decoupled convolution against a literal loop over windows."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from capsnet.errors import UserError
from capsnet.sync.decoupled import ANGLES, NORMS, DecoupledConv2d
from literal import array

Array = np.ndarray
RADIUS = 1.5


def literal_h(norm: str, x: float) -> float:
    if norm == "sphere":
        return 1.0
    if norm == "ball":
        return min(x, RADIUS) / RADIUS
    if norm == "tanh":
        return math.tanh(x / RADIUS)
    if norm == "segmented":
        return x if x <= RADIUS else RADIUS + 0.5 * (x - RADIUS)
    return x if norm == "linear" else math.log(1 + x)


def literal_g(angle: str, cos: float) -> float:
    if angle == "linear":
        return 1 - 2 * math.acos(cos) / math.pi
    return cos if angle == "cosine" else math.copysign(cos**2, cos)


def literal_decoupled(x: Array, W: Array, norm: str, angle: str, weighted: bool, stride: int) -> Array:
    """One image (c, h, w), filters (d, c, k, k)."""
    k = W.shape[-1]
    side = (x.shape[-1] - k) // stride + 1
    out = np.zeros((len(W), side, side))
    for d, w in enumerate(W):
        for row in range(side):
            for column in range(side):
                window = x[:, row * stride : row * stride + k, column * stride : column * stride + k]
                of_x, of_w = np.sqrt((window**2).sum()), np.sqrt((w**2).sum())
                h = literal_h(norm, of_x) * (of_w if weighted else 1)
                out[d, row, column] = h * literal_g(angle, (window * w).sum() / (of_x * of_w))
    return out


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("angle", ANGLES)
def test_a_decoupled_convolution_is_the_literal_loop(norm: str, angle: str) -> None:
    torch.manual_seed(0)
    x = 0.4 * torch.randn(2, 2, 7, 7, dtype=torch.float64)
    for weighted in (False, True):
        layer = DecoupledConv2d(
            2, 3, 3, stride=2, norm=norm, angle=angle, radius=RADIUS, weighted=weighted, dtype=torch.float64
        )
        expected = [literal_decoupled(image, array(layer.weight), norm, angle, weighted, 2) for image in x.numpy()]
        np.testing.assert_allclose(array(layer(x)), np.stack(expected), rtol=1e-6, atol=1e-6)
        assert torch.autograd.gradcheck(layer, (x[:1, :, :5, :5].clone().requires_grad_(),))


def test_linear_cosine_and_weighted_is_the_ordinary_convolution() -> None:
    layer, x = DecoupledConv2d(2, 3, 3, padding=1, norm="linear", weighted=True), torch.randn(2, 2, 6, 6)
    torch.testing.assert_close(layer(x), F.conv2d(x, layer.weight, padding=1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("norm", ["sphere", "ball", "tanh"])
def test_bounded_operators_are_bounded_and_the_sphere_ignores_norms(norm: str) -> None:
    layer, x = DecoupledConv2d(2, 3, 3, norm=norm), torch.randn(2, 2, 6, 6)
    assert layer(1e4 * x).abs().max() <= 1 + 1e-5
    if norm == "sphere":
        torch.testing.assert_close(layer(50 * x), layer(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("angle", ANGLES)
@pytest.mark.parametrize("norm", NORMS)
def test_empty_and_equal_windows_have_finite_gradients(norm: str, angle: str) -> None:
    layer = DecoupledConv2d(2, 1, 3, norm=norm, angle=angle)
    x = torch.zeros(2, 2, 3, 3)
    x[1] = layer.weight.detach()[0]  # angle 0
    y = layer(x.requires_grad_())
    assert y[0].abs().max() < 1e-3
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert layer.weight.grad is not None
    assert layer.weight.grad.isfinite().all()


def test_unknown_choices_and_radii_are_refused() -> None:
    with pytest.raises(UserError, match="no norm of a decoupled convolution 'bal'"):
        DecoupledConv2d(2, 3, 3, norm="bal")
    with pytest.raises(UserError, match="no angle of a decoupled convolution 'cosin'"):
        DecoupledConv2d(2, 3, 3, angle="cosin")
    with pytest.raises(UserError, match="radius=0 should be positive"):
        DecoupledConv2d(2, 3, 3, radius=0)
