"""Dynamic routing by agreement (section 2, Procedure 1).

Where the paper leaves a choice open there is a named option: `leaky` (an extra zero logit takes what fits no upper
capsule), `bias` (added to s_j in every iteration, as the authors' code does), `detach` (gradient through the last
iteration only; the authors, and the default here, let it flow through all of them).

The couplings are recomputed for every example and are no weights of the model: nothing here mixes examples.
"""

from __future__ import annotations

import torch
from torch import Tensor

from capsnet.errors import UserError
from capsnet.functional import at_least_float32, squash, votes, without_autocast
from capsnet.kernels import enabled
from capsnet.routing import Routed, Trace, register


def couple(b_ij: Tensor, leaky: bool = False) -> Tensor:
    """c_i = softmax over the UPPER capsules j of b_i (Eq. 3). (b, i, j) → (b, i, j)."""
    if not leaky:
        return b_ij.softmax(dim=-1)
    none_of_them = b_ij.new_zeros(*b_ij.shape[:-1], 1)
    return torch.cat([none_of_them, b_ij], dim=-1).softmax(dim=-1)[..., 1:]


@register("dynamic")
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
    """Route lower capsules u (b, i, p) through W (n, j, q, p) to upper capsules (b, j, q).

    Without a trace a kernel computes the same thing faster where it can (`capsnet.kernels.routing`). A kernel can be
    differentiated once: for second derivatives route inside `with capsnet.kernels.plain():`.

    >>> dynamic_routing(torch.randn(2, 6, 8), torch.randn(6, 10, 16, 8)).v.shape
    torch.Size([2, 10, 16])
    """
    if iterations < 1:
        raise UserError(f"routing takes at least 1 iteration and got {iterations}: 3 is the paper's choice.")
    check(u, W, bias)
    u, W = at_least_float32(u), at_least_float32(W)  # bf16 would round the agreement away
    bias = bias if bias is None else bias.expand(W.shape[1:3])
    with without_autocast(u):
        if not trace and enabled():
            from capsnet.kernels import routing as kernel

            if kernel.worth_it(u, W):
                return Routed(kernel.dynamic_routing(u, W, bias, iterations, leaky, detach))
        return procedure_1(votes(u, W), bias, iterations, leaky, detach, trace)


def check(u: Tensor, W: Tensor, bias: Tensor | None) -> None:
    """Refuse what does not fit together: a compiled loop would read and write past its end."""
    fits = u.dim() == 3 and W.dim() == 4 and u.shape[2] == W.shape[3]
    if not fits or not W.shape[0] or u.shape[1] % W.shape[0]:
        raise UserError(
            f"routing expects u (b, i, p) and W (n, j, q, p), n being i or a divisor of it, and got "
            f"{tuple(u.shape)} and {tuple(W.shape)}."
        )
    wanted = tuple(W.shape[1:3])
    if bias is not None and tuple(bias.shape) not in (wanted, wanted[1:], (wanted[0], 1)):
        raise UserError(f"routing's bias is (j, q), here {wanted}, and got {tuple(bias.shape)}.")


def procedure_1(u_hat: Tensor, bias: Tensor | None, iterations: int, leaky: bool, detach: bool, trace: bool) -> Routed:
    """Procedure 1 as the paper prints it, its line numbers in the margin. u_hat (b, i, j, q) → v (b, j, q)."""
    steps: list[tuple[Tensor, Tensor, Tensor]] = []
    b_ij = u_hat.new_zeros(u_hat.shape[:-1])  # 2
    for t in range(iterations):  # 3
        last = t == iterations - 1
        vote = u_hat.detach() if detach and not last else u_hat
        c_ij = couple(b_ij, leaky)  # 4
        s_j = torch.einsum("bij,bijq->bjq", c_ij, vote)  # 5
        v_j = squash(s_j if bias is None else s_j + bias)  # 6
        steps.append((b_ij, c_ij, v_j))
        if not last:
            agreement = torch.einsum("bijq,bjq->bij", vote, v_j)
            b_ij = b_ij + (agreement.detach() if detach else agreement)  # 7
    if not trace:
        return Routed(v_j)
    logits, couplings, outputs = (torch.stack(x) for x in zip(*steps, strict=True))
    return Routed(v_j, Trace(logits, couplings, outputs, u_hat))
