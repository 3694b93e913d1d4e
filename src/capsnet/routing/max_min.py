"""Dynamic routing with max-min normalisation (Zhao et al. 2019, "Capsule Networks with Max-Min Normalization").

Procedure 1 of dynamic routing with its softmax replaced: each lower capsule scales its logits to [0, 1] over j,

    c_ij = (b_ij − min_j b_ij) / (max_j b_ij − min_j b_ij)        c_ij = 1 in the first iteration

so that couplings do not sum to 1: a lower capsule sends everything to its best upper capsule, nothing to its worst,
and may support several in full. Everything else is as in `capsnet.routing.dynamic`.

Deviations: where a lower capsule's logits are all equal the quotient is 0/0, and its couplings stay 1, as at the start.
The paper lets the bounds of the interval be chosen; they are 0 and 1 here, as in its experiments. One upper capsule is
refused, because its logit would always be both the maximum and the minimum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from capsnet.errors import UserError
from capsnet.kernels import dispatch
from capsnet.nn.functional import lengths, squash
from capsnet.routing.base import ALL, Parents, Routed, Routing, Sizes, Trace, register
from capsnet.routing.options import IterativeOptions

FLAT = 1e-12  # logits that differ by less count as equal


@dataclass(frozen=True)
class MaxMinOptions(IterativeOptions):
    """Options of routing with max-min normalisation."""

    algorithm: ClassVar[str] = "max-min"

    iterations: int = 3
    """Routing iterations; 1 means that all couplings are 1."""


@register("max-min")
class MaxMinRouting(Routing):
    """Dynamic routing without its softmax: a lower capsule sends everything to the upper capsule that it agrees with
    best and nothing to the worst.

    >>> MaxMinRouting(iterations=2)(torch.randn(2, 6, 8), torch.randn(6, 10, 16, 8)).poses.shape
    torch.Size([2, 10, 16])
    """

    Options = MaxMinOptions
    options: MaxMinOptions
    couplings_sum_to_one = False

    def initial_coupling(self, sizes: Sizes) -> float:
        return 1.0

    def build(self, sizes: Sizes, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> None:
        check_several(sizes.upper)
        super().build(sizes, device=device, dtype=dtype)

    def without_votes(self, u: Tensor, W: Tensor, a: Tensor | None) -> Routed | None:
        """Logits only grow by agreement, so that they are agreements with the sum V of all outputs so far."""
        if self.matrix or not dispatch.routing_pays(u, W):
            return None
        check_several(W.shape[1])
        v_j = V = squash(dispatch.sum_of_votes(u, W))
        for _ in range(self.options.iterations - 1):
            c_ij = max_min(dispatch.agreements(u, W, V))
            v_j = squash(dispatch.weighted_sum_of_votes(u, W, c_ij))
            V = V + v_j
        return Routed(v_j, lengths(v_j))

    def route(self, u_hat: Tensor, a: Tensor | None, parents: Parents, trace: bool) -> Routed:
        """Procedure 1 with max-min couplings. u_hat (b, i, j, q) → v (b, j, q)."""
        check_several(u_hat.shape[2])
        steps: list[tuple[Tensor, Tensor, Tensor]] = []
        b_ij = u_hat.new_zeros(u_hat.shape[:-1])
        for _ in range(self.options.iterations):
            c_ij = max_min(b_ij, parents)
            v_j = squash(torch.einsum("bij,bijq->bjq", c_ij, u_hat))
            steps.append((b_ij, c_ij, v_j))
            b_ij = b_ij + torch.einsum("bijq,bjq->bij", u_hat, v_j)
        if not trace:
            return Routed(v_j, lengths(v_j))
        logits, couplings, outputs = (torch.stack(x) for x in zip(*steps, strict=True))
        return Routed(v_j, lengths(v_j), Trace(couplings, outputs, lengths(outputs), u_hat, logits))


def max_min(b_ij: Tensor, parents: Parents = ALL) -> Tensor:
    """Logits scaled to [0, 1] over the parents of each lower capsule; 1 where they are all equal.

    >>> max_min(torch.tensor([[1.0, 2.0, 3.0], [5.0, 5.0, 5.0]]))
    tensor([[0.0000, 0.5000, 1.0000],
            [1.0000, 1.0000, 1.0000]])
    """
    low = parents.amin(b_ij)
    width = parents.amax(b_ij) - low
    flat = width <= FLAT
    return torch.where(flat, 1.0, (b_ij - low) / torch.where(flat, 1.0, width))


def check_several(upper: int) -> None:
    if upper < 2:
        raise UserError(
            "max-min routing needs at least two upper capsules, because it scales couplings by the smallest and the "
            "largest of them: add a class, or choose another routing."
        )
