"""Inverted dot-product attention routing (Tsai, Srivastava, Goh and Salakhutdinov 2020, "Capsules with Inverted
Dot-Product Attention Routing").

Upper capsules are queries and votes are keys and values, but the softmax is over the upper capsules: "inverted". With
uniform couplings in the first pass, each further pass computes

    b_ij = û_{j|i}·v_j / √Q              replaced in every pass, not accumulated as in dynamic routing
    c_ij = softmax_j(b_ij)
    v_j  = LayerNorm_q(Σ_i c_ij û_{j|i})     over the pose of each capsule, with learnt gain and bias; no squash
    z_j  = w·v_j + w_0                   the score of a class: one linear read-out, shared by all upper capsules

A normalised pose has the same length for every capsule, so its length says nothing about presence. The activation is
sigmoid(z_j), in [0, 1] as margin and spread loss need it; the log-odds of the activation are z_j again, which is what
the cross-entropy loss uses (`capsnet.models.base`), as in the paper. Lower activations are not used.

Deviations: the paper updates all layers of a stack together in every pass ("concurrent routing"); here each layer
finishes before the next one starts. For a single capsule layer both are the same. `iterations` counts the uniform pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from capsnet.errors import UserError
from capsnet.kernels import dispatch
from capsnet.nn.functional import at_least_float32
from capsnet.routing.base import Parents, Routed, Routing, Sizes, Trace, register
from capsnet.routing.options import IterativeOptions


@dataclass(frozen=True)
class InvertedAttentionOptions(IterativeOptions):
    """Options of inverted dot-product attention routing."""

    algorithm: ClassVar[str] = "inverted-attention"

    iterations: int = 3
    """Passes of routing, the first one with uniform couplings."""


@register("inverted-attention")
class InvertedAttentionRouting(Routing):
    """Upper capsules compete for each vote by how well their pose agrees with it, starting over in every pass; poses
    are normalised, not squashed."""

    Options = InvertedAttentionOptions
    options: InvertedAttentionOptions
    own_activations = True
    gain: nn.Parameter
    bias: nn.Parameter
    readout: nn.Parameter
    offset: nn.Parameter

    def build(self, sizes: Sizes, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> None:
        if sizes.upper_dim < 2:
            raise UserError(
                "inverted-attention routing needs upper capsules of at least two dimensions, because a layer "
                "normalisation of one number is constant: choose a larger dimension, or another routing."
            )
        super().build(sizes, device=device, dtype=dtype)
        for name in ("gain", "bias", "readout"):
            setattr(self, name, nn.Parameter(torch.empty(sizes.upper_dim, device=device, dtype=dtype)))
        self.offset = nn.Parameter(torch.empty((), device=device, dtype=dtype))

    def reset_parameters(self, init: str = "default") -> None:
        nn.init.ones_(self.gain)
        nn.init.zeros_(self.bias)
        nn.init.normal_(self.readout, std=1 / math.sqrt(len(self.readout)))  # scores start with a variance of 1
        nn.init.zeros_(self.offset)

    def without_votes(self, u: Tensor, W: Tensor, a: Tensor | None) -> Routed | None:
        if self.matrix or not dispatch.routing_pays(u, W):
            return None
        v_j = self.normalise(dispatch.sum_of_votes(u, W) / W.shape[1])
        for _ in range(self.options.iterations - 1):
            v_j = self.normalise(dispatch.attend(u, W, v_j / math.sqrt(W.shape[2])))
        return Routed(v_j, self.activations(v_j))

    def route(self, u_hat: Tensor, a: Tensor | None, parents: Parents, trace: bool) -> Routed:
        """The equations above. u_hat (b, i, j, q) → v (b, j, q)."""
        steps: list[tuple[Tensor, Tensor, Tensor]] = []
        b_ij = u_hat.new_zeros(u_hat.shape[:-1])
        for _ in range(self.options.iterations):
            c_ij = parents.softmax(b_ij)
            v_j = self.normalise(torch.einsum("bij,bijq->bjq", c_ij, u_hat))
            steps.append((b_ij, c_ij, v_j))
            b_ij = torch.einsum("bijq,bjq->bij", u_hat, v_j) / math.sqrt(u_hat.shape[-1])
        if not trace:
            return Routed(v_j, self.activations(v_j))
        logits, couplings, outputs = (torch.stack(x) for x in zip(*steps, strict=True))
        activations = self.activations(outputs)
        return Routed(v_j, activations[-1], Trace(couplings, outputs, activations, u_hat, logits))

    def normalise(self, s_j: Tensor) -> Tensor:
        """Layer normalisation of each pose by itself. (…, q) → (…, q)."""
        self.check_built()
        gain, bias = at_least_float32(self.gain), at_least_float32(self.bias)
        return F.layer_norm(s_j, gain.shape, gain, bias)

    def activations(self, v_j: Tensor) -> Tensor:
        """sigmoid(w·v_j + w_0). (…, q) → (…)."""
        return torch.sigmoid(v_j @ at_least_float32(self.readout) + self.offset)
