"""The moments that EM and variational Bayes routing need, without storing the votes (`routing.gaussian`).

An iteration of either is a function of few numbers: with d = û_{j|i} − μ_j,

    R_ij = softmax_j(k_j − ½ Σ_q P_j^q (d^q)²)        r_ij = R_ij a_i
    S_j = Σ_i r_ij        one_j = Σ_i r_ij d        two_j = Σ_i r_ij d²

where μ, the precisions P and the constants k come from the iteration before (zeros before the first, which makes R
uniform): in EM P = 1/σ² and k_j = ln a_j − ½ Σ_q ln 2πσ², in variational Bayes their expectations under the posterior.
Votes are recomputed from u and W for each iteration, forward and backward. A variance is a difference of squares;
deviations from the previous means keep it well conditioned.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from capsnet.kernels.operators import differentiable_once, optional


@optional("EM and VB routing are slower")
def fused() -> Any:
    """The compiled loops, after one forward and backward pass."""
    from capsnet.kernels.moments_numba import FusedMoments

    one = torch.ones(1, 1, 1, dtype=torch.float32, device="cpu")
    FusedMoments(one, one[None]).gradients_of(one[0], one[0], one, one, one[0], one, one)
    FusedMoments(one, one[None]).moments(one[0], one[0], one, one)
    return FusedMoments


@torch.library.custom_op("capsnet::moments", mutates_args=())
def moments(u: Tensor, W: Tensor, a: Tensor, k: Tensor, mean: Tensor, P: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """u (b, i, p), W (n, j, q, p), a (b, i), k (b, j), mean and P (b, j, q) → S (b, j), one and two (b, j, q)."""
    return fused()(u, W).moments(a, k, mean, P)


@torch.library.custom_op("capsnet::moments_backward", mutates_args=())
def _backward(
    u: Tensor, W: Tensor, a: Tensor, k: Tensor, mean: Tensor, P: Tensor, g_S: Tensor, g_one: Tensor, g_two: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return fused()(u, W).gradients_of(a, k, mean, P, g_S, g_one, g_two)


@moments.register_fake
def _(u, W, a, k, mean, P):  # type: ignore[no-untyped-def]
    return torch.empty_like(k), torch.empty_like(mean), torch.empty_like(mean)


@_backward.register_fake
def _(u, W, a, k, mean, P, g_S, g_one, g_two):  # type: ignore[no-untyped-def]
    return tuple(torch.empty_like(x) for x in (u, W, a, k, mean, P))


def _keep(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs)


def _gradients(ctx, g_S, g_one, g_two):  # type: ignore[no-untyped-def]
    return _backward(*ctx.saved_tensors, g_S, g_one, g_two)


moments.register_autograd(_gradients, setup_context=_keep)
differentiable_once(_backward, "EM or VB routing")
