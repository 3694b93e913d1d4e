"""Self-attention routing (Mazzia, Salvetti and Chiaberge 2021, "Efficient-CapsNet: capsule network with self-attention
routing").

One pass, in which the votes for an upper capsule attend to each other:

    b_ij = Σ_k û_{j|i}·û_{j|k} / √Q                   agreement of a vote with all votes for the same j, itself included
    c_ij = softmax_j(b_ij) + β_ij                     β is learnt, starts at zero and is added AFTER the softmax
    s_j  = Σ_i c_ij û_{j|i}
    v_j  = (1 − e^{−‖s_j‖}) s_j / ‖s_j‖               a squash that is steeper near zero than that of Sabour et al.

The paper writes the agreements as an I × I matrix for each j. Σ_k û_{j|i}·û_{j|k} = û_{j|i}·Σ_k û_{j|k} needs none.
Where a kernel pays, not even the votes are formed (`without_votes`); `route` is the readable form.

Deviations: where positions of a grid share their transformations they share β, too. ‖s_j‖ has an epsilon under its
root, as everywhere in this package.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from capsnet.kernels import dispatch
from capsnet.nn.functional import at_least_float32, lengths
from capsnet.routing.base import Parents, Routed, Routing, Sizes, Trace, register
from capsnet.routing.options import RoutingOptions


@register("self-attention")
class SelfAttentionRouting(Routing):
    """In a single step, a vote gains weight where it agrees with the sum of all votes for the same upper capsule.

    >>> SelfAttentionRouting()(torch.randn(2, 6, 8), torch.randn(6, 10, 16, 8)).poses.shape
    torch.Size([2, 10, 16])
    """

    couplings_sum_to_one = False  # not once β has been learnt
    beta: nn.Parameter | None

    def __init__(self, options: RoutingOptions | None = None, **changes: Any) -> None:
        super().__init__(options, **changes)
        self.register_parameter("beta", None)

    def build(self, sizes: Sizes, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> None:
        super().build(sizes, device=device, dtype=dtype)
        self.beta = nn.Parameter(torch.empty(sizes.types, sizes.upper, device=device, dtype=dtype))  # n j

    def reset_parameters(self, init: str = "default") -> None:
        if self.beta is not None:
            nn.init.zeros_(self.beta)

    def initial_std(self) -> float | None:
        """As in the authors' code (He et al. 2015 over all of W); larger votes saturate couplings and lengths."""
        sizes = self.sizes
        return None if sizes is None else math.sqrt(2 / (sizes.types * sizes.upper * sizes.lower_dim))

    def by_class(self, name: str, tensor: Tensor) -> Tensor | None:
        return tensor.transpose(0, 1) if name == "beta" else None

    def without_votes(self, u: Tensor, W: Tensor, a: Tensor | None) -> Routed | None:
        if self.matrix or not dispatch.routing_pays(u, W):
            return None
        s_j = dispatch.attend(u, W, dispatch.sum_of_votes(u, W) / math.sqrt(W.shape[2]))  # softmax_j(b_ij) û
        if self.beta is not None:
            s_j = s_j + dispatch.sum_of_votes(u, W * at_least_float32(self.beta)[:, :, None, None])  # β_ij û
        v_j = squash_exp(s_j)
        return Routed(v_j, lengths(v_j))

    def route(self, u_hat: Tensor, a: Tensor | None, parents: Parents, trace: bool) -> Routed:
        """The equations above. u_hat (b, i, j, q) → v (b, j, q)."""
        b_ij = torch.einsum("bijq,bjq->bij", u_hat, u_hat.sum(1)) / math.sqrt(u_hat.shape[-1])
        c_ij = parents.softmax(b_ij)
        if self.beta is not None:
            c_ij = c_ij + at_least_float32(self.beta).repeat(c_ij.shape[1] // len(self.beta), 1)
        v_j = squash_exp(torch.einsum("bij,bijq->bjq", c_ij, u_hat))
        a_j = lengths(v_j)
        return Routed(v_j, a_j, Trace(c_ij[None], v_j[None], a_j[None], u_hat, b_ij[None]) if trace else None)


def squash_exp(s: Tensor) -> Tensor:
    """Keep the direction, map the length to 1 − e^{−‖s‖}. (…, q) → (…, q).

    >>> lengths(squash_exp(torch.tensor([3.0, 4.0])))
    tensor(0.9933)
    """
    length = lengths(s).unsqueeze(-1)
    return s * (-torch.expm1(-length) / length)
