"""The moments that EM and variational Bayes routing need, without ever holding the votes (`routing.gaussian`).

An iteration of either is a function of few numbers: with d = û_{j|i} − μ_j,

    R_ij = softmax_j(k_j − ½ Σ_q P_j^q (d^q)²)        r_ij = R_ij a_i
    S_j = Σ_i r_ij        one_j = Σ_i r_ij d        two_j = Σ_i r_ij d²

where μ, the precisions P and the constants k come from the iteration before (zeros before the first, which makes R
uniform): in EM P = 1/σ² and k_j = ln a_j − ½ Σ_q ln 2πσ², in variational Bayes their expectations under the posterior.
Votes are recomputed from u and W for each iteration, forward and backward. Deviations from the previous means keep the
difference of squares that a variance is well conditioned.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor

from capsnet.kernels.once import differentiable_once


@cache
def fused() -> Any:
    """The compiled loops, or None where Numba is not installed or cannot compile them here, which is said once."""
    try:
        from capsnet.kernels.moments_numba import FusedMoments

        one = torch.ones(1, 1, 1, dtype=torch.float32, device="cpu")
        FusedMoments(one, one[None]).gradients_of(one[0], one[0], one, one, one[0], one, one)
        FusedMoments(one, one[None]).moments(one[0], one[0], one, one)
    except Exception as error:  # a library we can do without must not stop anything, whatever its reasons
        if not (isinstance(error, ModuleNotFoundError) and error.name == "numba"):
            warnings.warn(
                f"Numba is installed but does not work here, so EM and VB routing are slower: {error!r}",
                RuntimeWarning,
                stacklevel=2,
            )
        return None
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
def _(u: Tensor, W: Tensor, a: Tensor, k: Tensor, mean: Tensor, P: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(k), torch.empty_like(mean), torch.empty_like(mean)


@_backward.register_fake
def _(
    u: Tensor, W: Tensor, a: Tensor, k: Tensor, mean: Tensor, P: Tensor, g_S: Tensor, g_one: Tensor, g_two: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    g_u, g_W, g_a, g_k, g_mean, g_P = (torch.empty_like(x) for x in (u, W, a, k, mean, P))
    return g_u, g_W, g_a, g_k, g_mean, g_P


def _keep(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs)


def _gradients(ctx, g_S, g_one, g_two):  # type: ignore[no-untyped-def]
    return _backward(*ctx.saved_tensors, g_S, g_one, g_two)


moments.register_autograd(_gradients, setup_context=_keep)
differentiable_once(_backward, "EM or VB routing")
