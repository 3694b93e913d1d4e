"""Units with amplitude and phase, and layers between them (Reichert and Serre 2014, "Neuronal synchrony in
complex-valued deep networks"; Löwe, Lippe, Rudolph and Welling 2022, "Complex-valued autoencoders for object
discovery").

A unit is z = m e^{iφ}: the amplitude m ≥ 0 says how much of a feature there is, the phase φ what it belongs to. With
real weights w (★ is a convolution or a matrix product) a layer computes

    ψ = w ★ z                          inputs of opposite phase cancel
    χ = w ★ m                          the same without phases
    a = ½(|ψ| + χ) + bias
    z' = max(0, norm(a)) · ψ / |ψ|     the phase of ψ; norm is an optional batch normalisation

so inputs in phase drive a unit more than inputs out of phase. Where there are no phases a layer is an ordinary real
one, a = χ + bias.

Deviation: χ has no bias and no nonlinearity of its own, and |ψ| = √(ψψ* + ε) with ε = 1e-4, because silent units have
no phase and its gradient would be infinite.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FLOOR = 1e-4  # added to the square of an amplitude before it divides


class Waves(NamedTuple):
    """z = re + i·im. `im` is None where there are no phases: then `re` is the amplitude."""

    re: Tensor
    im: Tensor | None = None

    @classmethod
    def polar(cls, amplitude: Tensor, phase: Tensor) -> Waves:
        """
        >>> Waves.polar(torch.tensor(2.0), torch.tensor(0.0))
        Waves(re=tensor(2.), im=tensor(0.))
        """
        return cls(amplitude * phase.cos(), amplitude * phase.sin())

    @property
    def amplitude(self) -> Tensor:
        """|z|, at least √ε where there are phases."""
        return self.re if self.im is None else torch.sqrt(self.re.square() + self.im.square() + FLOOR)

    @property
    def phase(self) -> Tensor:
        """In (−π, π]."""
        return torch.atan2(torch.zeros_like(self.re) if self.im is None else self.im, self.re)


class ComplexLayer(nn.Module):
    """The equations above for any linear map; subclasses say which one in `apply_weight`."""

    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.norm = norm

    def apply_weight(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, z: Waves) -> Waves:
        """z → z'."""
        bias = self.bias.view(-1, *(1,) * (z.re.dim() - 2))
        if z.im is None:
            return Waves(self.activate(self.apply_weight(z.re) + bias))
        re, im, chi = self.apply_weight(torch.cat([z.re, z.im, z.amplitude])).unflatten(0, (3, -1)).unbind()
        length = Waves(re, im).amplitude
        direction = self.activate(0.5 * (length + chi) + bias) / length
        return Waves(direction * re, direction * im)

    def activate(self, a: Tensor) -> Tensor:
        return F.relu(a if self.norm is None else self.norm(a))


class ComplexConv2d(ComplexLayer):
    """A complex convolution: amplitudes and phases (b, c, h, w) → (b, channels, h', w').

    >>> z = Waves.polar(torch.rand(2, 3, 8, 8), torch.rand(2, 3, 8, 8))
    >>> ComplexConv2d(3, 5, kernel=3, stride=2)(z).re.shape
    torch.Size([2, 5, 4, 4])
    """

    def __init__(
        self, before: int, channels: int, kernel: int, stride: int = 1, *, norm: bool = False, **where: Any
    ) -> None:
        super().__init__(nn.BatchNorm2d(channels, **where) if norm else None)
        self.stride, self.padding = stride, kernel // 2
        self.weight = nn.Parameter(torch.empty(channels, before, kernel, kernel, **where))
        self.bias = nn.Parameter(torch.zeros(channels, **where))
        nn.init.kaiming_uniform_(self.weight, nonlinearity="relu")

    def apply_weight(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight, stride=self.stride, padding=self.padding)


class ComplexLinear(ComplexLayer):
    """A complex linear layer: (b, before) → (b, units).

    >>> ComplexLinear(6, 4)(Waves.polar(torch.rand(2, 6), torch.rand(2, 6))).amplitude.shape
    torch.Size([2, 4])
    """

    def __init__(self, before: int, units: int, *, norm: bool = False, **where: Any) -> None:
        super().__init__(nn.BatchNorm1d(units, **where) if norm else None)
        self.weight = nn.Parameter(torch.empty(units, before, **where))
        self.bias = nn.Parameter(torch.zeros(units, **where))
        nn.init.kaiming_uniform_(self.weight, nonlinearity="relu")

    def apply_weight(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)
