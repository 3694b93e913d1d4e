"""Dynamic routing (section 2, Procedure 1) without storing the votes: the fast form of `capsnet.routing.dynamic`.

The plain form is bound by memory: û for 128 MNIST images is 94 MB and is read a dozen times, forward and backward.
Three observations avoid that.

1. The logits need no storage. They only ever grow by agreement, b_ij ← b_ij + û_{j|i}·v_j, so before iteration t

        b_ij = û_{j|i} · V_j        with V = v of iteration 1 + … + v of iteration t-1   (b, j, q), tiny.

   Iteration t is therefore a function of V alone, s(V) = Σ_i softmax_j(û_{j|i}·V_j) û_{j|i}, and what has to be
   kept for the backward pass is s of every iteration, r · b · j · q numbers.

2. The backward pass recomputes c from V. With g_s the gradient on s of iteration t,

        g_c = û·g_s      δ = c (g_c − Σ_j c g_c)      g_V = Σ_i δ û      g_û += c g_s + δ V

   where g_V flows to v of every earlier iteration, since V is their sum. With `detach` only the last iteration
   counts and its couplings are constants: δ = 0.

3. The votes need not exist, or only for a moment: see the three `Votes`, which are û as routing sees it, u and W
   and the three things that it asks of them. `OwnVotes` and `SharedVotes` (`routing_torch`) work on any device and
   in any dtype, `FusedVotes` (`routing_numba`) are loops compiled for CPUs, taken where Numba is installed.

The first iteration has V = 0 and uniform couplings.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from capsnet.kernels.dispatch import FEWEST_EXAMPLES
from capsnet.kernels.operators import differentiable_once, optional
from capsnet.kernels.routing_torch import OwnVotes, SharedVotes
from capsnet.nn.functional import EPS, squash

MANY_UPPER = 24  # measured: at 10 upper capsules the fused loops are 3 times faster, at 50 SharedVotes is


class Votes(Protocol):
    """û_{j|i} = W_ij u_i, seen through what routing asks of it; V and g_s are (b, j, q), and V is None for 0."""

    def __init__(self, u: Tensor, W: Tensor, leaky: bool) -> None: ...

    def route(self, V: Tensor | None) -> Tensor:
        """s_j = Σ_i c_ij û_{j|i} with c = softmax_j(û·V). → (b, j, q)."""

    def pull(self, V: Tensor | None, g_s: Tensor, through_couplings: bool) -> Tensor | None:
        """The gradient g_V on V, given g_s on `route(V)`; what it means for u and W is added to `gradients`."""

    def gradients(self) -> tuple[Tensor, Tensor]:
        """g_u (b, i, p) and g_W (n, j, q, p), of everything pulled so far."""


def choose(u: Tensor, W: Tensor, leaky: bool) -> Votes:
    """The way to compute that suits shape and device.

    The fused loops need a CPU, float32 and `FEWEST_EXAMPLES`, because they take sixteen at a time. With shared
    transformations and many upper capsules `SharedVotes` does far less arithmetic: about q times less.
    """
    shared, many = W.shape[0] < u.shape[1], W.shape[1] >= MANY_UPPER
    if u.device.type == "cpu" and u.dtype == torch.float32 and len(u) >= FEWEST_EXAMPLES and not (shared and many):
        fused = _fused()
        if fused is not None:
            return fused(u, W, leaky)
    return SharedVotes(u, W, leaky) if shared else OwnVotes(u, W, leaky)


@optional("routing uses a slower implementation")
def _fused() -> type[Votes]:
    """The compiled loops, after one forward and backward pass."""
    from capsnet.kernels.routing_numba import FusedVotes

    V = torch.ones(1, 1, 1, dtype=torch.float32, device="cpu")
    votes = FusedVotes(V, V[None], False)
    votes.route(V)
    votes.pull(V, V, True)
    votes.gradients()
    return FusedVotes


def dynamic_routing(
    u: Tensor, W: Tensor, bias: Tensor | None, iterations: int, leaky: bool = False, detach: bool = False
) -> Tensor:
    """Procedure 1: u (b, i, p), W (n, j, q, p) with n dividing i, bias (j, q) or None → v (b, j, q).

    Half precision, and everything under autocast, is computed and returned in float32. It can be differentiated once.

    >>> dynamic_routing(torch.randn(2, 6, 8), torch.randn(6, 10, 16, 8), None, 3).shape
    torch.Size([2, 10, 16])
    """
    dtype = torch.promote_types(torch.promote_types(u.dtype, W.dtype), torch.float32)
    bias = bias if bias is None else bias.to(dtype)
    v, _ = _forward(u.to(dtype), W.to(dtype), bias, iterations, leaky, detach)
    return v


@torch.library.custom_op("capsnet::dynamic_routing", mutates_args=())
def _forward(
    u: Tensor, W: Tensor, bias: Tensor | None, iterations: int, leaky: bool, detach: bool
) -> tuple[Tensor, Tensor]:
    """v (b, j, q), and s of every iteration (t, b, j, q) for the backward pass."""
    with torch.autocast(u.device.type, enabled=False):
        votes = choose(u, W, leaky)
        V: Tensor | None = None
        every_s = []
        for _ in range(iterations):
            s = votes.route(V)
            every_s.append(s if bias is None else s + bias)
            v = squash(every_s[-1])
            V = v if V is None else V + v
        return v.contiguous(), torch.stack(every_s)


@torch.library.custom_op("capsnet::dynamic_routing_backward", mutates_args=())
def _backward(
    g_v: Tensor, u: Tensor, W: Tensor, every_s: Tensor, leaky: bool, detach: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """g_u, g_W and g_bias: the iterations once more, last to first."""
    with torch.autocast(u.device.type, enabled=False):
        votes = choose(u, W, leaky)
        every_V = squash(every_s[:-1]).cumsum(0)
        g_bias = torch.zeros_like(every_s[0, 0])
        g_earlier = torch.zeros_like(g_v)  # v of an iteration is part of V of every later one
        for t in reversed(range(len(every_s))):
            g_s = _squash_backward(every_s[t], g_v)
            g_bias += g_s.sum(0)
            g_V = votes.pull(every_V[t - 1] if t > 0 else None, g_s, not detach)
            if detach or g_V is None:
                break
            g_v = g_earlier = g_earlier + g_V
        g_u, g_W = votes.gradients()
        return g_u, g_W, g_bias


def _squash_backward(s: Tensor, g_v: Tensor) -> Tensor:
    """v = f(n) s with n = ‖s‖² and f = √(n + ε) / (1 + n), so g_s = f g_v + 2 f'(n) (s·g_v) s."""
    n = s.square().sum(-1, keepdim=True)
    root, one_more = torch.sqrt(n + EPS), 1 + n
    slope = (0.5 / root - root / one_more) / one_more
    return g_v * (root / one_more) + s * (2 * slope * (s * g_v).sum(-1, keepdim=True))


@_forward.register_fake
def _(u, W, bias, iterations, leaky, detach):  # type: ignore[no-untyped-def]
    b, (_, j, q, _) = u.shape[0], W.shape
    return u.new_empty(b, j, q), u.new_empty(iterations, b, j, q)


@_backward.register_fake
def _(g_v, u, W, every_s, leaky, detach):  # type: ignore[no-untyped-def]
    return u.new_empty(u.shape), W.new_empty(W.shape), every_s.new_empty(every_s.shape[2:])


def _keep(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    u, W, bias, _, ctx.leaky, ctx.detach = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(u, W, output[1])
    ctx.set_materialize_grads(False)


def _gradients(ctx, g_v, g_every_s):  # type: ignore[no-untyped-def]
    if g_v is None:
        return (None,) * 6
    g_u, g_W, g_bias = _backward(g_v, *ctx.saved_tensors, ctx.leaky, ctx.detach)
    return g_u, g_W, g_bias if ctx.has_bias else None, None, None, None


_forward.register_autograd(_gradients, setup_context=_keep)
differentiable_once(_backward, "routing")


# --- One softmax over agreements with given V: self-attention and inverted attention are made of it ---------------


def attend(u: Tensor, W: Tensor, V: Tensor) -> Tensor:
    """s_j = Σ_i softmax_j(û_{j|i}·V_j) û_{j|i}: u (b, i, p), W (n, j, q, p), V (b, j, q) → (b, j, q).

    This is one iteration of the above, with V as an input. It can be differentiated once.

    >>> attend(torch.randn(2, 6, 8), torch.randn(6, 10, 16, 8), torch.randn(2, 10, 16)).shape
    torch.Size([2, 10, 16])
    """
    return _attend(u, W, V)


@torch.library.custom_op("capsnet::attend", mutates_args=())
def _attend(u: Tensor, W: Tensor, V: Tensor) -> Tensor:
    with torch.autocast(u.device.type, enabled=False):
        return choose(u, W, False).route(V.contiguous()).contiguous()


@torch.library.custom_op("capsnet::attend_backward", mutates_args=())
def _attend_backward(g_s: Tensor, u: Tensor, W: Tensor, V: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """g_u, g_W and g_V."""
    with torch.autocast(u.device.type, enabled=False):
        votes = choose(u, W, False)
        g_V = votes.pull(V.contiguous(), g_s.contiguous(), True)
        assert g_V is not None
        return *votes.gradients(), g_V.contiguous()


@_attend.register_fake
def _(u, W, V):  # type: ignore[no-untyped-def]
    return torch.empty_like(V, memory_format=torch.contiguous_format)


@_attend_backward.register_fake
def _(g_s, u, W, V):  # type: ignore[no-untyped-def]
    return u.new_empty(u.shape), W.new_empty(W.shape), V.new_empty(V.shape)


def _keep_attend(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs)


def _attend_gradients(ctx, g_s):  # type: ignore[no-untyped-def]
    return _attend_backward(g_s, *ctx.saved_tensors)


_attend.register_autograd(_attend_gradients, setup_context=_keep_attend)
differentiable_once(_attend_backward, "routing")
