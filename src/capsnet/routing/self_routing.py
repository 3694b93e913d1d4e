"""Self-routing (Hahn, Pyeon and Kim 2019, "Self-Routing Capsule Networks").

One pass without any agreement: each lower capsule decides by itself, from its own pose, where its output goes.

    c_ij = softmax_j(A_i u_i + α_i)                           A and α are learnt and start at zero
    a_j  = Σ_i a_i c_ij / Σ_i a_i                             the activation
    v_j  = Σ_i a_i c_ij û_{j|i} / Σ_i a_i c_ij                the pose: a weighted mean of the votes, no squash

It is the control that shows whether agreement helps, or gating alone. The activations of all upper capsules sum to 1:
the classes of a multi-label image share that 1, and a layer with a single upper capsule is refused, because its
activation would always be 1.

Deviations: an epsilon in both denominators, for lower capsules that are all silent. Lower activations are the lengths
of the poses, at most 1, where the layer below has none of its own; the paper's first layer predicts them by a
convolution. Where positions of a grid share their transformations they share A and α, too.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from capsnet.errors import UserError
from capsnet.kernels import dispatch
from capsnet.nn.functional import EPS, at_least_float32, without_autocast
from capsnet.routing.base import ALL, Parents, Routed, Routing, Sizes, Trace, check, lower_activations, register


@register("self-routing")
class SelfRouting(Routing):
    """Each lower capsule decides from its own pose, by a learnt gate, where its output goes: agreement is not used."""

    own_activations = True
    decayed = ("gate",)
    gate: nn.Parameter  # A (n, j, p)
    gate_bias: nn.Parameter  # α (n, j)

    def initial_coupling(self, sizes: Sizes) -> float:
        return 1 / sizes.lower  # the pose is a mean over the lower capsules

    def build(self, sizes: Sizes, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> None:
        if sizes.upper < 2:
            raise UserError(
                "self-routing needs at least two upper capsules, because their activations sum to 1: add a class, or "
                "choose another routing."
            )
        super().build(sizes, device=device, dtype=dtype)
        gate = torch.empty(sizes.types, sizes.upper, sizes.lower_dim, device=device, dtype=dtype)
        self.gate, self.gate_bias = nn.Parameter(gate), nn.Parameter(torch.empty_like(gate[..., 0]))

    def reset_parameters(self, init: str = "default") -> None:
        nn.init.zeros_(self.gate)
        nn.init.zeros_(self.gate_bias)

    def by_class(self, name: str, tensor: Tensor) -> Tensor | None:
        return tensor.transpose(0, 1)  # n j …

    def forward(
        self, u: Tensor, W: Tensor, a: Tensor | None = None, *, parents: Parents = ALL, trace: bool = False
    ) -> Routed:
        """The couplings need the lower poses, which `route` does not see. Without a trace, votes need not be formed."""
        check(u, W, self.matrix, a)
        with without_autocast(u):
            u, W = at_least_float32(u), at_least_float32(W)
            a, b_ij = lower_activations(u, a), self.logits(u)
            if trace or parents is not ALL or self.matrix or not dispatch.routing_pays(u, W):
                return self.send(self.votes(u, W), a, b_ij, parents, trace)
            sent = a.unsqueeze(-1) * b_ij.softmax(-1)
            return Routed(*upper_capsules(dispatch.weighted_sum_of_votes(u, W, sent), sent, a))

    def logits(self, u: Tensor) -> Tensor:
        """A_i u_i + α_i: u (b, i, p) → (b, i, j)."""
        self.check_built()
        grid = u.unflatten(1, (-1, len(self.gate)))
        return (torch.einsum("bgip,ijp->bgij", grid, at_least_float32(self.gate)) + self.gate_bias).flatten(1, 2)

    def send(self, u_hat: Tensor, a: Tensor, b_ij: Tensor, parents: Parents, trace: bool) -> Routed:
        """The equations above, given the logits."""
        c_ij = parents.softmax(b_ij)
        sent = a.unsqueeze(-1) * c_ij  # a_i c_ij
        v_j, a_j = upper_capsules(torch.einsum("bij,bijq->bjq", sent, u_hat), sent, a)
        return Routed(v_j, a_j, Trace(c_ij[None], v_j[None], a_j[None], u_hat, b_ij[None]) if trace else None)

    def route(self, u_hat: Tensor, a: Tensor | None, parents: Parents, trace: bool) -> Routed:
        """Votes alone: without lower poses the gate knows its bias only."""
        b, i, j, _ = u_hat.shape
        self.check_built()
        b_ij = at_least_float32(self.gate_bias).repeat(i // len(self.gate_bias), 1).expand(b, i, j)
        return self.send(u_hat, u_hat.new_ones(b, i) if a is None else a, b_ij, parents, trace)


def upper_capsules(s_j: Tensor, sent: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """Poses and activations from Σ_i a_i c_ij û_{j|i} (b, j, q), a_i c_ij (b, i, j) and a_i (b, i)."""
    received = sent.sum(1)  # b j
    return s_j / (received + EPS).unsqueeze(-1), received / (a.sum(1, keepdim=True) + EPS)
