"""Decoupled convolution: norm and angle as separate factors (Liu et al. 2018, "Decoupled Networks").

A convolution is w·x = ‖w‖ ‖x‖ cos θ, for a filter w and a window x. A decoupled one is

    f(w, x) = h(‖w‖, ‖x‖) · g(θ)

where h says how strong a response may be and g how it depends on the angle θ between them. The paper's choices, with
its scale α = 1 and a radius ρ:

    sphere        h = 1                                     SphereConv: norms do not count at all
    ball          h = min(‖x‖, ρ) / ρ                       BallConv
    tanh          h = tanh(‖x‖ / ρ)                         TanhConv
    linear        h = ‖x‖                                   LinearConv
    segmented     h = ‖x‖, beyond ρ: ρ + ½ (‖x‖ − ρ)        SegConv: two slopes
    log           h = ln(1 + ‖x‖)                           LogConv

    linear        g = 1 − 2θ/π
    cosine        g = cos θ
    square-cosine g = sign(cos θ) cos² θ

`weighted` multiplies h by ‖w‖ (the paper's weighted operators): linear, cosine and weighted is the ordinary
convolution.

Deviations: ρ is fixed, not learnt, and the second slope of SegConv is ½. Norms have an epsilon under their root, so
that an empty window has a cosine of 0 and no response, and θ is taken from a cosine of at most 1 − 1e-6, because
arccos is infinitely steep at 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from capsnet.errors import UserError, unknown

FLOOR = 1e-9  # under the root of a norm
SLOPE = 0.5  # of segmented norms beyond the radius
STEEPEST = 1 - 1e-6  # the largest cosine whose angle is taken

NORMS: Mapping[str, Callable[[Tensor, float], Tensor]] = {
    "sphere": lambda x, rho: torch.ones_like(x),
    "linear": lambda x, rho: x,
    "ball": lambda x, rho: x.clamp(max=rho) / rho,
    "tanh": lambda x, rho: torch.tanh(x / rho),
    "segmented": lambda x, rho: x.clamp(max=rho) + SLOPE * (x - rho).clamp(min=0),
    "log": lambda x, rho: torch.log1p(x),
}
ANGLES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda cos: 1 - 2 / math.pi * torch.acos(cos.clamp(-STEEPEST, STEEPEST)),
    "cosine": lambda cos: cos,
    "square-cosine": lambda cos: cos * cos.abs(),
}


class DecoupledConv2d(nn.Module):
    """Images or feature maps (b, c, h, w) → responses h · g (b, channels, h', w').

    >>> DecoupledConv2d(3, 5, kernel=3, norm="tanh", angle="square-cosine")(torch.rand(2, 3, 8, 8)).shape
    torch.Size([2, 5, 6, 6])
    """

    def __init__(
        self,
        before: int,
        channels: int,
        kernel: int,
        stride: int = 1,
        padding: int = 0,
        *,
        norm: str = "tanh",
        angle: str = "cosine",
        radius: float = 1.0,
        weighted: bool = False,
        **where: Any,
    ) -> None:
        super().__init__()
        if norm not in NORMS:
            raise unknown("norm of a decoupled convolution", norm, NORMS)
        if angle not in ANGLES:
            raise unknown("angle of a decoupled convolution", angle, ANGLES)
        if radius <= 0:
            raise UserError(f"radius={radius:g} should be positive: norms count in full up to it.")
        self.norm, self.angle, self.radius, self.weighted = norm, angle, radius, weighted
        self.stride, self.padding = stride, padding
        self.weight = nn.Parameter(torch.empty(channels, before, kernel, kernel, **where))
        nn.init.kaiming_uniform_(self.weight, nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        of_x = self.norms_of_windows(x)  # b 1 h' w'
        of_w = torch.sqrt(self.weight.square().sum((1, 2, 3)) + FLOOR)[:, None, None]
        cos = F.conv2d(x, self.weight, stride=self.stride, padding=self.padding) / (of_x * of_w)
        h = NORMS[self.norm](of_x, self.radius)
        return (h * of_w if self.weighted else h) * ANGLES[self.angle](cos)

    def norms_of_windows(self, x: Tensor) -> Tensor:
        """‖x‖ of every window: (b, c, h, w) → (b, 1, h', w')."""
        ones = torch.ones_like(self.weight[:1])
        return torch.sqrt(F.conv2d(x.square(), ones, stride=self.stride, padding=self.padding) + FLOOR)

    def extra_repr(self) -> str:
        return f"norm={self.norm}, angle={self.angle}, radius={self.radius:g}, weighted={self.weighted}"
