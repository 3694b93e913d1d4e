"""Dynamic routing by agreement (Sabour, Frosst and Hinton 2017, section 2, Procedure 1).

Where the paper leaves a choice open there is an option: `leaky` (an extra zero logit takes what fits no upper capsule),
`bias` (added to s_j in every iteration, as the authors' code does), `detach` (backpropagate through the last iteration
only; the authors, and the default here, backpropagate through all of them).

The couplings are recomputed for every example and are not weights of the model: nothing here mixes examples.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from capsnet.errors import UserError
from capsnet.kernels import dispatch
from capsnet.nn.functional import at_least_float32, lengths, squash, without_autocast
from capsnet.routing.base import ALL, Parents, Routed, Routing, Sizes, Trace, check, register
from capsnet.routing.options import DynamicOptions


@register("dynamic")
class DynamicRouting(Routing):
    """Procedure 1 of the paper: a vote that agrees with the output of its upper capsule gains weight.

    Without a trace a kernel computes the same result faster where it can (`capsnet.kernels.routing`). A kernel can be
    differentiated once: for second derivatives route inside `with capsnet.kernels.plain():`.

    >>> routed = DynamicRouting(iterations=3)(torch.randn(2, 6, 8), torch.randn(6, 10, 16, 8))
    >>> routed.poses.shape, routed.activations.shape
    (torch.Size([2, 10, 16]), torch.Size([2, 10]))
    """

    Options = DynamicOptions
    options: DynamicOptions
    bias: nn.Parameter | None

    def __init__(self, options: DynamicOptions | None = None, **changes: Any) -> None:
        super().__init__(options, **changes)
        self.register_parameter("bias", None)

    def build(self, sizes: Sizes, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> None:
        super().build(sizes, device=device, dtype=dtype)
        if self.options.bias:
            self.bias = nn.Parameter(torch.empty(sizes.upper, sizes.upper_dim, device=device, dtype=dtype))

    def reset_parameters(self, init: str = "default") -> None:
        if self.bias is not None:
            nn.init.constant_(self.bias, 0.1 if init == "official" else 0.0)

    def by_class(self, name: str, tensor: Tensor) -> Tensor | None:
        return tensor if name == "bias" else None

    def without_votes(self, u: Tensor, W: Tensor, a: Tensor | None) -> Routed | None:
        if self.matrix:
            return self.on_grid(u, W, a, dispatch.one_window(u, W))
        v = dispatch.dynamic_routing(u, W, self.bias, self.options)
        return None if v is None else Routed(v, lengths(v))

    def on_grid(self, u: Tensor, W: Tensor, a: Tensor | None, windows: Any) -> Routed | None:
        """Procedure 1 with logits b_ij = û_{j|i} · (sum of the outputs so far)."""
        if self.options.leaky or self.options.detach:
            return None
        with without_autocast(u):
            votes = dispatch.grid_votes(at_least_float32(u), at_least_float32(W), self.matrix, windows)
            if votes is None:
                return None
            V = None
            for _ in range(self.options.iterations):
                s_j = votes.attend(V)
                v_j = squash(s_j if self.bias is None else s_j + self.bias)
                V = v_j if V is None else V + v_j
            v_j = votes.untiled(v_j)
            return Routed(v_j, lengths(v_j))

    def route(self, u_hat: Tensor, a: Tensor | None, parents: Parents, trace: bool) -> Routed:
        """Procedure 1 as the paper prints it, its line numbers in the margin. u_hat (b, i, j, q) → v (b, j, q)."""
        iterations, detach = self.options.iterations, self.options.detach
        steps: list[tuple[Tensor, Tensor, Tensor]] = []
        b_ij = u_hat.new_zeros(u_hat.shape[:-1])  # 2
        for t in range(iterations):  # 3
            last = t == iterations - 1
            vote = u_hat.detach() if detach and not last else u_hat
            c_ij = leaky_softmax(b_ij, parents) if self.options.leaky else parents.softmax(b_ij)  # 4
            s_j = torch.einsum("bij,bijq->bjq", c_ij, vote)  # 5
            v_j = squash(s_j if self.bias is None else s_j + self.bias)  # 6
            steps.append((b_ij, c_ij, v_j))
            if not last:
                agreement = torch.einsum("bijq,bjq->bij", vote, v_j)
                b_ij = b_ij + (agreement.detach() if detach else agreement)  # 7
        if not trace:
            return Routed(v_j, lengths(v_j))
        logits, couplings, outputs = (torch.stack(x) for x in zip(*steps, strict=True))
        return Routed(v_j, lengths(v_j), Trace(couplings, outputs, lengths(outputs), u_hat, logits))


def leaky_softmax(b_ij: Tensor, parents: Parents = ALL) -> Tensor:
    """Softmax over the parents and one more logit of zero, whose share is lost: a capsule may fit none of them."""
    top = parents.amax(b_ij).clamp(min=0)
    weight = (b_ij - top).exp()
    return weight / (parents.sum(weight) + (-top).exp())


def dynamic_routing(
    u: Tensor,
    W: Tensor,
    bias: Tensor | None = None,
    *,
    iterations: int = 3,
    leaky: bool = False,
    detach: bool = False,
    trace: bool = False,
) -> Routed:
    """Dynamic routing as a function: u (b, i, p) through W (n, j, q, p) to upper capsules (b, j, q).

    >>> dynamic_routing(torch.randn(2, 6, 8), torch.randn(6, 10, 16, 8)).poses.shape
    torch.Size([2, 10, 16])
    """
    routing = DynamicRouting(iterations=iterations, leaky=leaky, detach=detach)
    check(u, W)
    if bias is not None:
        wanted = tuple(W.shape[1:3])
        if tuple(bias.shape) not in (wanted, wanted[1:], (wanted[0], 1)):
            raise UserError(f"the bias of routing is (j, q), here {wanted}, and got {tuple(bias.shape)}.")
        object.__setattr__(routing, "bias", bias.expand(wanted))  # a plain tensor, so that its gradient flows
    return routing(u, W, trace=trace)
