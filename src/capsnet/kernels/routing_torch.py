"""The votes of `capsnet.kernels.routing` in plain PyTorch, for any device and dtype, without ever forming û.

The agreement is û·V = u·(Wᵀ V), and the weighted sum of the votes is Σ_i c û = Σ_i W (c u): matrix products with W
instead of passes over û, on a few examples at a time, so that intermediate values stay in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

CACHE_BYTES = 6 << 20  # intermediate values of a chunk, CPU: measured best between 3 and 12 MB on a 2 × 2 MB L2
GPU_BYTES = 512 << 20  # accelerators are faster with few large launches


def couple(logits: Tensor, dim: int, leaky: bool) -> Tensor:
    """Softmax over the upper capsules; with `leaky`, one more logit of 0 takes a share that is dropped."""
    if not leaky:
        return logits.softmax(dim)
    top = logits.amax(dim, keepdim=True).clamp_min_(0)
    c = (logits - top).exp_()
    return c.div_(c.sum(dim, keepdim=True) + torch.exp(-top))


def couple_backward(c: Tensor, g_c: Tensor, dim: int) -> Tensor:
    """δ = c (g_c − Σ_j c g_c), also with a leak, whose gradient is zero."""
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
            c = couple(self._agree(V[chunk], chunk)[1], 0, self.leaky)
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
            c = couple(logits, 0, self.leaky)
            g_pushed, g_c = self._agree(g_s[chunk], chunk)
            self.g_u[chunk] += g_pushed.mul_(c.unsqueeze(2)).sum(0)
            self._add(g_s[chunk], self._scale(c, chunk))
            if not through_couplings:
                continue
            delta = couple_backward(c, g_c, 0)
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
        return _chunks(len(self.u), self.weight.nbytes // self.q, self.u.device)

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

    For one example and one type, all positions at once: the agreement is (h × p)·(p × j) with Wᵀ V, and the weighted
    sum is (p × h)·(h × j), so W is applied once per type and not once per position.
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
            # Σ_h u, the same for every upper capsule
            total = self.u.sum(2).unsqueeze(2).expand(-1, -1, self.j, -1)
            return self._gather(total, slice(None)).mul_(self.uniform)
        s = torch.zeros_like(V)
        for kinds, chunk in self._blocks():
            c = couple(self._agree(self._push(V[chunk], kinds), kinds, chunk), -1, self.leaky)
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
            c = couple(self._agree(pushed, kinds, chunk), -1, self.leaky)
            self.g_u[kinds, chunk] += c @ g_pushed
            self._add(g_s[chunk], self._collect(c, kinds, chunk), kinds)
            if not through_couplings:
                continue
            delta = couple_backward(c, self._agree(g_pushed, kinds, chunk), -1)
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
