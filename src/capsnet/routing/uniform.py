"""Uniform couplings: no routing at all, the control that every algorithm has to beat.

    c_ij = 1/J        s_j = Σ_i c_ij û_{j|i}        v_j = squash(s_j)

This is dynamic routing (Sabour, Frosst and Hinton 2017, Procedure 1) with one iteration. The votes need not exist:
Σ_i û_{j|i} is one matrix product, which is what `without_votes` computes; `route` is the readable form.
"""

from __future__ import annotations

import torch
from torch import Tensor

from capsnet.kernels import dispatch
from capsnet.nn.functional import lengths, squash
from capsnet.routing.base import Parents, Routed, Routing, Trace, register


@register("uniform")
class UniformRouting(Routing):
    """Every lower capsule sends the same share to every upper capsule.

    >>> UniformRouting()(torch.randn(2, 6, 8), torch.randn(6, 10, 16, 8)).poses.shape
    torch.Size([2, 10, 16])
    """

    def without_votes(self, u: Tensor, W: Tensor, a: Tensor | None) -> Routed | None:
        """One matrix product."""
        if self.matrix or not dispatch.enabled():
            return None
        v_j = squash(dispatch.sum_of_votes(u, W) / W.shape[1])
        return Routed(v_j, lengths(v_j))

    def route(self, u_hat: Tensor, a: Tensor | None, parents: Parents, trace: bool) -> Routed:
        b_ij = u_hat.new_zeros(u_hat.shape[:-1])
        c_ij = parents.softmax(b_ij)  # 1/J
        v_j = squash(torch.einsum("bij,bijq->bjq", c_ij, u_hat))
        a_j = lengths(v_j)
        return Routed(v_j, a_j, Trace(c_ij[None], v_j[None], a_j[None], u_hat, b_ij[None]) if trace else None)
