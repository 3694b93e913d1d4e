"""Dynamic routing (section 2, Procedure 1) without ever holding the votes: the twin of `capsnet.routing.dynamic`.

Written the plain way routing is bound by memory: û for 128 MNIST images is 94 MB and is walked over a dozen times,
forward and backward. Three observations take that away.

1. The logits need no storage. They only ever grow by agreement, b_ij ← b_ij + û_{j|i}·v_j, so before iteration t

        b_ij = û_{j|i} · V_j        with V = v of iteration 1 + … + v of iteration t-1   (b, j, q), tiny.

   Iteration t is therefore a function of V alone, s(V) = Σ_i softmax_j(û_{j|i}·V_j) û_{j|i}, and what has to be
   kept for the backward pass is s of every iteration, r · b · j · q numbers.

2. The backward pass recomputes c from V. With g_s the gradient on s of iteration t,

        g_c = û·g_s      δ = c (g_c − Σ_j c g_c)      g_V = Σ_i δ û      g_û += c g_s + δ V

   where g_V flows to v of every earlier iteration, since V is their sum. With `detach` only the last iteration
   counts and its couplings are constants: δ = 0.

3. The votes need not exist either. û·V = u·(Wᵀ V) and Σ_i c û = W (c u), summed over i: matrix products with W,
   on a few examples at a time so that all intermediate values stay in the cache.

`Votes` is that view of û: u and W, and the three things routing asks of them. Here are two in plain PyTorch, for
any device and dtype: transformations of their own for every lower capsule, and transformations shared over the
positions of a grid, where all positions of one capsule type make one matrix product. A third, fused loops compiled
with Numba for float32 on CPUs, is `capsnet.kernels.routing_numba`, taken where Numba is installed.

The first iteration has V = 0 and uniform couplings: one matrix product.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from capsnet.functional import EPS, squash

CACHE_BYTES = 6 << 20  # intermediate values of a chunk, CPU: measured best between 3 and 12 MB on a 2 × 2 MB L2
GPU_BYTES = 512 << 20  # an accelerator wants few large launches


class Votes(Protocol):
    """û_{j|i} = W_ij u_i, seen through what routing asks of it; V and g_s are (b, j, q), and V is None for 0."""

    def route(self, V: Tensor | None) -> Tensor:
        """s_j = Σ_i c_ij û_{j|i} with c = softmax_j(û·V). → (b, j, q)."""

    def pull(self, V: Tensor | None, g_s: Tensor, through_couplings: bool) -> Tensor | None:
        """The gradient g_V on V, given g_s on `route(V)`; what it means for u and W is added to `gradients`."""

    def gradients(self) -> tuple[Tensor, Tensor]:
        """g_u (b, i, p) and g_W (n, j, q, p), of everything pulled so far."""


def worth_it(u: Tensor, W: Tensor) -> bool:
    """Whether `dynamic_routing` beats the plain einsum on this problem."""
    return True


def choose(u: Tensor, W: Tensor, leaky: bool) -> Votes:
    """The way to compute that suits shape and device."""
    if W.shape[0] < u.shape[1]:
        return SharedVotes(u, W, leaky)
    return OwnVotes(u, W, leaky)


def dynamic_routing(
    u: Tensor, W: Tensor, bias: Tensor | None, iterations: int, leaky: bool = False, detach: bool = False
) -> Tensor:
    """Procedure 1: u (b, i, p), W (n, j, q, p) with n dividing i, bias (j, q) or None → v (b, j, q).

    Half precision, and everything under autocast, is computed and returned in float32.

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
        for t in range(iterations):
            s = votes.route(V)
            every_s.append(s if bias is None else s + bias)
            v = squash(every_s[-1])
            V = v if V is None else V + v
        return v.clone() if iterations == 1 else v, torch.stack(every_s)


@torch.library.custom_op("capsnet::dynamic_routing_backward", mutates_args=())
def _backward(
    g_v: Tensor, u: Tensor, W: Tensor, every_s: Tensor, leaky: bool, detach: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """g_u, g_W and g_bias: the iterations once more, last to first."""
    with torch.autocast(u.device.type, enabled=False):
        votes = choose(u, W, leaky)
        every_V = squash(every_s[:-1]).cumsum(0)
        g_bias = torch.zeros_like(every_s[0, 0])
        for t in reversed(range(len(every_s))):
            g_s = _squash_backward(every_s[t], g_v)
            g_bias += g_s.sum(0)
            g_V = votes.pull(every_V[t - 1] if t > 0 else None, g_s, not detach)
            if detach or g_V is None:
                break
            # v of iteration t-1 is in V of iteration t and of all later ones
            total = g_V if t == len(every_s) - 1 else total + g_V
            g_v = total
        g_u, g_W = votes.gradients()
        return g_u, g_W, g_bias


def _squash_backward(s: Tensor, g_v: Tensor) -> Tensor:
    """v = f(n) s with n = ‖s‖² and f = √(n + ε) / (1 + n), so g_s = f g_v + 2 f'(n) (s·g_v) s."""
    n = s.square().sum(-1, keepdim=True)
    root, one_more = torch.sqrt(n + EPS), 1 + n
    slope = (0.5 / root - root / one_more) / one_more
    return g_v * (root / one_more) + s * (2 * slope * (s * g_v).sum(-1, keepdim=True))


@_forward.register_fake
def _(
    u: Tensor, W: Tensor, bias: Tensor | None, iterations: int, leaky: bool, detach: bool
) -> tuple[Tensor, Tensor]:
    b, (_, j, q, _) = u.shape[0], W.shape
    return u.new_empty(b, j, q), u.new_empty(iterations, b, j, q)


@_backward.register_fake
def _(
    g_v: Tensor, u: Tensor, W: Tensor, every_s: Tensor, leaky: bool, detach: bool
) -> tuple[Tensor, Tensor, Tensor]:
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


def _couple(logits: Tensor, dim: int, leaky: bool) -> Tensor:
    """softmax over the upper capsules; leaky: with one more logit, 0, that takes its share and is thrown away."""
    if not leaky:
        return logits.softmax(dim)
    top = logits.amax(dim, keepdim=True).clamp_min_(0)
    c = (logits - top).exp_()
    return c.div_(c.sum(dim, keepdim=True) + torch.exp(-top))


def _couple_backward(c: Tensor, g_c: Tensor, dim: int) -> Tensor:
    """δ = c (g_c − Σ_j c g_c); the same with a leak, whose share is among the rest that sums to one."""
    return (g_c - (c * g_c).sum(dim, keepdim=True)).mul_(c)


def _chunks(total: int, bytes_each: int, device: torch.device) -> Iterator[slice]:
    """Slices of a range such that a slice's intermediate values fit in the cache."""
    budget = CACHE_BYTES if device.type == "cpu" else GPU_BYTES
    step = max(1, budget // max(1, bytes_each))
    return (slice(start, min(start + step, total)) for start in range(0, total, step))


class OwnVotes:
    """Every lower capsule has transformations of its own (n == i), in chunks of the batch.

    Inside a chunk the lower capsules i come last, so that sums over p and over j run along contiguous memory.
    """

    def __init__(self, u: Tensor, W: Tensor, leaky: bool) -> None:
        n, self.j, self.q, self.p = W.shape
        self.leaky = leaky
        self.weight = W.permute(1, 2, 3, 0).reshape(self.j, self.q, self.p * n)  # (j, q, pi)
        self.u = u.transpose(1, 2).contiguous()  # (b, p, i)
        self.uniform = 1 / (self.j + leaky)
        self.g_u: Tensor | None = None
        self.g_weight: Tensor | None = None

    def route(self, V: Tensor | None) -> Tensor:
        flat = self.weight.flatten(0, 1)
        if V is None:
            return (self.u.flatten(1) @ flat.T).mul_(self.uniform).unflatten(1, (self.j, self.q))
        s = torch.empty_like(V)
        for chunk in self._batch():
            c = _couple(self._agree(V[chunk], chunk)[1], 0, self.leaky)
            s[chunk] = self._gather(self._scale(c, chunk))
        return s

    def pull(self, V: Tensor | None, g_s: Tensor, through_couplings: bool) -> Tensor | None:
        if self.g_u is None or self.g_weight is None:
            self.g_u, self.g_weight = torch.zeros_like(self.u), torch.zeros_like(self.weight)
        if V is None:
            flat, g = self.weight.flatten(0, 1), g_s.flatten(1) * self.uniform
            self.g_u.flatten(1).addmm_(g, flat)
            self.g_weight.flatten(0, 1).addmm_(g.T, self.u.flatten(1))
            return None
        g_V = torch.empty_like(V)
        for chunk in self._batch():
            pushed, logits = self._agree(V[chunk], chunk)
            c = _couple(logits, 0, self.leaky)
            g_pushed, g_c = self._agree(g_s[chunk], chunk)
            self.g_u[chunk] += g_pushed.mul_(c.unsqueeze(2)).sum(0)
            self._add(g_s[chunk], self._scale(c, chunk))
            if not through_couplings:
                continue
            delta = _couple_backward(c, g_c, 0)
            self.g_u[chunk] += pushed.mul_(delta.unsqueeze(2)).sum(0)
            scaled = self._scale(delta, chunk)
            self._add(V[chunk], scaled)
            g_V[chunk] = self._gather(scaled)
        return g_V

    def gradients(self) -> tuple[Tensor, Tensor]:
        assert self.g_u is not None
        assert self.g_weight is not None
        g_W = self.g_weight.unflatten(2, (self.p, -1)).permute(3, 0, 1, 2)
        return self.g_u.transpose(1, 2).contiguous(), g_W.contiguous()

    def _batch(self) -> Iterator[slice]:
        return _chunks(len(self.u), self.j * self.u[0].nbytes, self.u.device)

    def _agree(self, V: Tensor, chunk: slice) -> tuple[Tensor, Tensor]:
        """Wᵀ V (j, b, p, i), and its product with u: the agreement û·V (j, b, i)."""
        pushed = torch.bmm(V.transpose(0, 1), self.weight).unflatten(2, (self.p, -1))
        return pushed, (pushed * self.u[chunk]).sum(2)

    def _scale(self, c: Tensor, chunk: slice) -> Tensor:
        """c u. (j, b, i) → (j, b, pi)."""
        return (c.unsqueeze(2) * self.u[chunk]).flatten(2)

    def _gather(self, scaled: Tensor) -> Tensor:
        """Σ_i W (c u). (j, b, pi) → (b, j, q)."""
        return torch.bmm(scaled, self.weight.transpose(1, 2)).transpose(0, 1)

    def _add(self, g_s: Tensor, scaled: Tensor) -> None:
        """g_W += Σ_b g_s ⊗ c u."""
        assert self.g_weight is not None
        self.g_weight.baddbmm_(g_s.permute(1, 2, 0), scaled)


class SharedVotes:
    """Transformations shared over the positions h of a grid, lower capsules lie as (h n), in chunks of the types n.

    For one example and one type, all positions at once: the agreement is (h × p)·(p × j) with Wᵀ V, and what is
    sent up is (p × h)·(h × j), so W is applied once a type and not once a position.
    """

    def __init__(self, u: Tensor, W: Tensor, leaky: bool) -> None:
        self.n, self.j, self.q, self.p = W.shape
        self.leaky = leaky
        self.weight = W.permute(1, 2, 0, 3).contiguous()  # (j, q, n, p)
        self.u = u.unflatten(1, (-1, self.n)).permute(2, 0, 1, 3).contiguous()  # (n, b, h, p)
        self.uniform = 1 / (self.j + leaky)
        self.g_u = torch.zeros_like(self.u)
        self.g_weight = torch.zeros_like(self.weight)

    def route(self, V: Tensor | None) -> Tensor:
        if V is None:
            # Σ_h u for every upper capsule alike
            total = self.u.sum(2).unsqueeze(2).expand(-1, -1, self.j, -1)
            return self._gather(total, slice(None)).mul_(self.uniform)
        s = torch.zeros_like(V)
        for kinds, chunk in self._blocks():
            c = _couple(self._agree(self._push(V[chunk], kinds), kinds, chunk), -1, self.leaky)
            s[chunk] += self._gather(self._collect(c, kinds, chunk), kinds)
        return s

    def pull(self, V: Tensor | None, g_s: Tensor, through_couplings: bool) -> Tensor | None:
        if V is None:
            g = g_s * self.uniform
            self._add(g, self.u.sum(2).unsqueeze(2).expand(-1, -1, self.j, -1), slice(None))
            self.g_u += self._push(g, slice(None)).sum(2).unsqueeze(2)
            return None
        g_V = torch.zeros_like(V)
        for kinds, chunk in self._blocks():
            pushed, g_pushed = self._push(V[chunk], kinds), self._push(g_s[chunk], kinds)
            c = _couple(self._agree(pushed, kinds, chunk), -1, self.leaky)
            self.g_u[kinds, chunk] += c @ g_pushed
            self._add(g_s[chunk], self._collect(c, kinds, chunk), kinds)
            if not through_couplings:
                continue
            delta = _couple_backward(c, self._agree(g_pushed, kinds, chunk), -1)
            self.g_u[kinds, chunk] += delta @ pushed
            collected = self._collect(delta, kinds, chunk)
            self._add(V[chunk], collected, kinds)
            g_V[chunk] += self._gather(collected, kinds)
        return g_V

    def gradients(self) -> tuple[Tensor, Tensor]:
        g_u = self.g_u.permute(1, 2, 0, 3).flatten(1, 2)
        return g_u.contiguous(), self.g_weight.permute(2, 0, 1, 3).contiguous()

    def _blocks(self) -> Iterator[tuple[slice, slice]]:
        """(types, examples): whole batches of few types, or one type of few examples where the grid is large."""
        _, b, h, _ = self.u.shape
        each = h * self.j * self.u.element_size()
        for kinds in _chunks(self.n, b * each, self.u.device):
            for chunk in _chunks(b, (kinds.stop - kinds.start) * each, self.u.device):
                yield kinds, chunk

    def _push(self, V: Tensor, kinds: slice) -> Tensor:
        """Wᵀ V. (b, j, q) → (n, b, j, p)."""
        weight = self.weight[:, :, kinds]
        pushed = torch.bmm(V.transpose(0, 1), weight.flatten(2))  # (j, b, np)
        return pushed.unflatten(2, weight.shape[2:]).permute(2, 1, 0, 3)

    def _agree(self, pushed: Tensor, kinds: slice, chunk: slice) -> Tensor:
        """û·V. (n, b, j, p) → (n, b, h, j)."""
        return self.u[kinds, chunk] @ pushed.transpose(2, 3)

    def _collect(self, c: Tensor, kinds: slice, chunk: slice) -> Tensor:
        """Σ_h c u. (n, b, h, j) → (n, b, j, p)."""
        return c.transpose(2, 3) @ self.u[kinds, chunk]

    def _gather(self, collected: Tensor, kinds: slice) -> Tensor:
        """Σ_n W (c u). (n, b, j, p) → (b, j, q)."""
        flat = collected.permute(2, 1, 0, 3).flatten(2)  # (j, b, np)
        return torch.bmm(flat, self.weight[:, :, kinds].flatten(2).transpose(1, 2)).transpose(0, 1)

    def _add(self, g_s: Tensor, collected: Tensor, kinds: slice) -> None:
        """g_W += Σ_b g_s ⊗ Σ_h c u."""
        self.g_weight[:, :, kinds] += torch.einsum("bjq,nbjp->jqnp", g_s, collected)
