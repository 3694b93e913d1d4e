"""Sharp routing: a lower capsule prefers the upper capsules for which its vote is long.

c_ij = softmax_j(β ‖û_{j|i}‖) with a learnt sharpness β, v_j = squash(Σ_i c_ij û_{j|i}).
"""

from dataclasses import dataclass

import torch
from torch import nn

from capsnet.nn.functional import lengths, squash
from capsnet.routing import Routed, Routing, RoutingOptions, Trace, register


@dataclass(frozen=True)
class SharpOptions(RoutingOptions):
    """Options of sharp routing."""

    start: float = 1.0
    """Initial sharpness."""


@register("sharp")
class SharpRouting(Routing):
    Options = SharpOptions

    def build(self, sizes, *, device=None, dtype=None):
        super().build(sizes, device=device, dtype=dtype)
        self.sharpness = nn.Parameter(torch.empty((), device=device, dtype=dtype))

    def reset_parameters(self, init="default"):
        nn.init.constant_(self.sharpness, self.options.start)

    def route(self, u_hat, a, parents, trace):
        b_ij = self.sharpness * lengths(u_hat)  # (b, i, j)
        c_ij = parents.softmax(b_ij)
        v_j = squash(torch.einsum("bij,bijq->bjq", c_ij, u_hat))  # (b, j, q)
        steps = [x.unsqueeze(0) for x in (c_ij, v_j, lengths(v_j))]  # one step
        return Routed(v_j, lengths(v_j), Trace(*steps, u_hat, b_ij.unsqueeze(0)) if trace else None)
