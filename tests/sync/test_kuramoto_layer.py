"""The Kuramoto layer: every pair of oscillators by itself, and what coupling does to phases."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from capsnet.errors import UserError
from capsnet.sync.kuramoto import KuramotoLayer, Oscillations
from literal import array

Array = np.ndarray


def literal_kuramoto(m: Array, start: Array, J: Array, steps: int, step: float) -> list[Array]:
    """One image of amplitudes (c, h, w): phases at the start and after every step, pair by pair."""
    channels, height, width = m.shape
    reach, history = J.shape[-1] // 2, [start]
    for _ in range(steps):
        phase, after = history[-1], history[-1].copy()
        for d, y, x in np.ndindex(channels, height, width):
            for c in range(channels):
                for v in range(max(0, y - reach), min(height, y + reach + 1)):
                    for u in range(max(0, x - reach), min(width, x + reach + 1)):
                        coupling = J[d, c, v - y + reach, u - x + reach]
                        after[d, y, x] += step * coupling * m[c, v, u] * math.sin(phase[c, v, u] - phase[d, y, x])
        history.append(after)
    return history


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_the_layer_is_the_literal_loop(steps: int) -> None:
    torch.manual_seed(0)
    layer = KuramotoLayer(2, (3, 4), kernel=3, steps=steps, step=0.4, dtype=torch.float64)
    m = torch.rand(2, 2, 3, 4, dtype=torch.float64)
    z, oscillations = layer(m, trace=True)
    expected = [literal_kuramoto(image, array(layer.start), array(layer.coupling), steps, 0.4) for image in m.numpy()]
    np.testing.assert_allclose(array(oscillations.phases), np.stack(expected, 1), atol=1e-10)
    np.testing.assert_allclose(array(z.re), m.numpy() * np.cos(np.stack([e[-1] for e in expected])), atol=1e-10)


def test_gradients_are_those_of_finite_differences() -> None:
    layer = KuramotoLayer(2, (3, 3), kernel=3, steps=2, dtype=torch.float64)

    def run(m: Tensor, coupling: Tensor, start: Tensor) -> Tensor:
        parameters = {"coupling": coupling, "start": start}
        z, _ = torch.func.functional_call(layer, parameters, (m,))
        return z.im

    m = torch.rand(1, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(run, (m, layer.coupling, layer.start))


@pytest.mark.parametrize(("sign", "together"), [(1, True), (-1, False)])
def test_positive_coupling_synchronises_and_negative_coupling_does_not(sign: int, together: bool) -> None:
    torch.manual_seed(0)
    layer = KuramotoLayer(1, (4, 4), kernel=7, steps=60, step=0.3)
    nn.init.constant_(layer.coupling, 0.1 * sign)
    nn.init.uniform_(layer.start, -math.pi, math.pi)
    _, oscillations = layer(torch.ones(1, 1, 4, 4), trace=True)
    order = torch.exp(1j * oscillations.phases[-1]).mean().abs()
    assert (order > 0.99) == together


def test_silent_units_pull_nobody() -> None:
    layer = KuramotoLayer(1, (1, 2), kernel=3, steps=5)
    nn.init.uniform_(layer.start, -math.pi, math.pi)
    m = torch.tensor([[[[1.0, 0.0]]]])
    _, oscillations = layer(m, trace=True)
    loud, silent = oscillations.phases[:, 0, 0, 0].unbind(-1)
    assert torch.equal(loud, loud[:1].expand(6))
    assert not torch.equal(silent, silent[:1].expand(6))


def test_the_mean_field_weighs_phases_by_amplitude() -> None:
    amplitude = torch.tensor([1.0, 3.0]).view(1, 2, 1, 1)
    phases = torch.tensor([0.0, math.pi]).view(1, 1, 2, 1, 1)
    field = Oscillations(amplitude, phases).mean_field()
    assert float(field.re) == pytest.approx(-0.5, abs=1e-4)
    assert field.im is not None
    assert float(field.im) == pytest.approx(0, abs=1e-4)


def test_each_channel_starts_at_a_phase_of_its_own() -> None:
    start = KuramotoLayer(4, (2, 3), kernel=3).start
    assert torch.equal(start, start[:, :1, :1].expand_as(start))
    torch.testing.assert_close(start[:, 0, 0], torch.arange(4) * math.pi / 2)


def test_an_even_kernel_is_refused() -> None:
    with pytest.raises(UserError, match="has no centre: use an odd number"):
        KuramotoLayer(2, (3, 3), kernel=4)
