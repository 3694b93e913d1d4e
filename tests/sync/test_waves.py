"""Complex layers: amplitudes and phases against a literal loop with complex numbers."""

from __future__ import annotations

import cmath
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from capsnet.sync.waves import FLOOR, ComplexConv2d, ComplexLinear, Waves
from literal import array

Array = np.ndarray


def waves(*shape: int) -> Waves:
    generator = torch.Generator().manual_seed(1)
    amplitude, phase = (torch.rand(*shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return Waves.polar(amplitude + 0.1, 6 * phase)


def literal_unit(z: list[complex], w: list[float], bias: float) -> complex:
    """z' of one unit, for the inputs in its window."""
    psi = sum(weight * value for weight, value in zip(w, z, strict=True))
    chi = sum(weight * math.sqrt(abs(value) ** 2 + FLOOR) for weight, value in zip(w, z, strict=True))
    length = math.sqrt(abs(psi) ** 2 + FLOOR)
    return max(0.0, 0.5 * (length + chi) + bias) * psi / length


def literal_convolution(z: Array, W: Array, bias: Array, stride: int) -> Array:
    """One image (c, h, w) of complex numbers, padded by half a kernel."""
    k = W.shape[-1]
    padded = np.pad(z, ((0, 0), (k // 2, k // 2), (k // 2, k // 2)))
    side = (z.shape[-1] - 1) // stride + 1
    out = np.zeros((len(W), side, side), dtype=complex)
    for d in range(len(W)):
        for row in range(side):
            for column in range(side):
                window = padded[:, row * stride : row * stride + k, column * stride : column * stride + k]
                inside = np.pad(np.ones_like(z, dtype=bool), ((0, 0), (k // 2,) * 2, (k // 2,) * 2))
                here = inside[:, row * stride : row * stride + k, column * stride : column * stride + k]
                out[d, row, column] = literal_unit(list(window[here]), list(W[d][here]), bias[d])
    return out


def assert_waves(found: Waves, expected: list[Array]) -> None:
    assert found.im is not None
    np.testing.assert_allclose(array(found.re) + 1j * array(found.im), np.stack(expected), rtol=1e-8, atol=1e-8)


def as_complex(z: Waves) -> Array:
    assert z.im is not None
    return array(z.re) + 1j * array(z.im)


@pytest.mark.parametrize("stride", [1, 2])
def test_a_complex_convolution_is_the_literal_loop(stride: int) -> None:
    torch.manual_seed(0)
    layer, z = ComplexConv2d(2, 3, 3, stride, dtype=torch.float64), waves(2, 2, 5, 5)
    torch.nn.init.normal_(layer.bias, std=0.3)
    expected = [literal_convolution(image, array(layer.weight), array(layer.bias), stride) for image in as_complex(z)]
    assert_waves(layer(z), expected)


def test_a_complex_linear_layer_is_the_literal_loop() -> None:
    torch.manual_seed(0)
    layer, z = ComplexLinear(6, 4, dtype=torch.float64), waves(3, 6)
    torch.nn.init.normal_(layer.bias, std=0.3)
    weight, bias = array(layer.weight), array(layer.bias)
    expected = [
        np.array([literal_unit(list(inputs), list(w), b) for w, b in zip(weight, bias, strict=True)])
        for inputs in as_complex(z)
    ]
    assert_waves(layer(z), expected)


def test_gradients_are_those_of_finite_differences() -> None:
    torch.manual_seed(0)
    layer, z = ComplexConv2d(2, 2, 3, norm=True, dtype=torch.float64), waves(2, 2, 3, 3)

    def run(re: Tensor, im: Tensor) -> tuple[Tensor, Tensor]:
        out = layer(Waves(re, im))
        assert out.im is not None
        return out.re, out.im

    assert z.im is not None
    assert torch.autograd.gradcheck(run, (z.re.requires_grad_(), z.im.requires_grad_()))


def test_without_phases_it_is_an_ordinary_convolution() -> None:
    layer, x = ComplexConv2d(2, 3, 3), torch.rand(2, 2, 5, 5)
    out = layer(Waves(x))
    assert out.im is None
    torch.testing.assert_close(out.re, F.relu(F.conv2d(x, layer.weight, layer.bias, padding=1)))


def test_turning_all_inputs_turns_all_outputs_and_changes_no_amplitude() -> None:
    layer, z = ComplexConv2d(2, 3, 3, dtype=torch.float64), waves(2, 2, 5, 5)
    before, turn = as_complex(layer(z)), cmath.exp(0.7j)
    turned = as_complex(z) * turn
    after = as_complex(layer(Waves(torch.from_numpy(turned.real.copy()), torch.from_numpy(turned.imag.copy()))))
    np.testing.assert_allclose(after, before * turn, atol=1e-10)


def test_inputs_in_phase_drive_a_unit_more_than_inputs_out_of_phase() -> None:
    layer = ComplexLinear(2, 1)
    with torch.no_grad():
        layer.weight.fill_(1.0)
    amplitude = torch.ones(2, 2)
    phase = torch.tensor([[0.3, 0.3], [0.3, 0.3 + 0.9 * math.pi]])
    together, apart = layer(Waves.polar(amplitude, phase)).amplitude[:, 0].tolist()
    assert together == pytest.approx(2, abs=0.01)
    assert apart == pytest.approx(1 + math.cos(0.45 * math.pi), abs=0.01)


@pytest.mark.parametrize("scale", [0.0, 1e-20, 1e4])
def test_silent_and_loud_units_have_finite_gradients(scale: float) -> None:
    layer, z = ComplexConv2d(2, 3, 3), waves(2, 2, 5, 5)
    assert z.im is not None
    re, im = (scale * part.float() for part in (z.re, z.im))
    out = layer(Waves(re.requires_grad_(), im.requires_grad_()))
    assert out.amplitude.isfinite().all()
    gradients = torch.autograd.grad(out.amplitude.sum(), [re, im, *layer.parameters()])
    assert all(gradient.isfinite().all() for gradient in gradients)
