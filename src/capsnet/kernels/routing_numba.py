"""The votes of `capsnet.kernels.routing` as fused loops for float32 on CPUs, compiled with Numba at first use.

Sixteen examples are routed at a time, one in each lane of a vector (`lanes`), so the loops read as if they were written
for one example. Agreement, softmax and sums are computed per lane; only g_W is summed over lanes. Layouts:
u (tile, i, p, lane); V, s and g_s (tile, j, q, lane); W unchanged. The votes of one lower capsule for one tile are
j · q vectors. They are computed from W when needed and stay in the first-level cache; recomputing them is cheaper than
reading them from memory.

The work is divided into jobs that depend on the shapes only. Each job writes to separate memory, and partial sums are
added in a fixed order, so results are bit-identical for any number of threads. Jobs release the interpreter lock and
run on PyTorch's OpenMP threads.

Array arguments are flat; an argument `x_at` is the offset of the first element in `x`. Compilation takes a few seconds
once, and the result is cached on disk. Memory is allocated with `new_empty` and related methods of the inputs, so it
does not depend on PyTorch's default dtype and device.
"""

# mypy: disable-error-code="no-untyped-def,call-arg,call-overload,var-annotated,import-untyped"
# (functions that Numba compiles have Numba's types, which mypy does not know)

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from capsnet.kernels.lanes import (
    LANES,
    add_totals,
    compiled,
    copy,
    f4,
    fma,
    inner,
    load,
    scratch,
    softmax,
    splat,
    spread,
    store,
)
from capsnet.kernels.threads import run

JOBS = 16  # jobs of a pass over the lower capsules; more if the batch has more tiles
BLOCK = 4  # lower capsules whose vote gradients are kept at a time, in HELD bytes of the L2 cache
HELD = 1 << 19

# ---- One lower capsule, one tile of examples ----


@inner
def _multiply(W, at, block, column, rows, columns, x, x_at, out, out_at):
    """out = M x, eight rows at a time, where M[8 r + k, c] = W[at + r·block + c·column + k]."""
    for r in range(0, rows, 8):
        y0 = y1 = y2 = y3 = y4 = y5 = y6 = y7 = splat(f4(0.0))
        m, k = at, x_at
        for _ in range(columns):
            value = load(x, k)
            y0 = fma(spread(W, m), value, y0)
            y1 = fma(spread(W, m + 1), value, y1)
            y2 = fma(spread(W, m + 2), value, y2)
            y3 = fma(spread(W, m + 3), value, y3)
            y4 = fma(spread(W, m + 4), value, y4)
            y5 = fma(spread(W, m + 5), value, y5)
            y6 = fma(spread(W, m + 6), value, y6)
            y7 = fma(spread(W, m + 7), value, y7)
            m += column
            k += LANES
        here = out_at + r * LANES
        store(out, here, y0)
        store(out, here + LANES, y1)
        store(out, here + 2 * LANES, y2)
        store(out, here + 3 * LANES, y3)
        store(out, here + 4 * LANES, y4)
        store(out, here + 5 * LANES, y5)
        store(out, here + 6 * LANES, y6)
        store(out, here + 7 * LANES, y7)
        at += block


@inner
def _agree(u_hat, j, q, V, V_at):
    """û_j · V_j."""
    y0 = y1 = y2 = y3 = splat(f4(0.0))
    k = j * q * LANES
    for _ in range(q // 4):
        y0 = fma(load(u_hat, k), load(V, V_at + k), y0)
        y1 = fma(load(u_hat, k + LANES), load(V, V_at + k + LANES), y1)
        y2 = fma(load(u_hat, k + 2 * LANES), load(V, V_at + k + 2 * LANES), y2)
        y3 = fma(load(u_hat, k + 3 * LANES), load(V, V_at + k + 3 * LANES), y3)
        k += 4 * LANES
    for _ in range(q % 4):
        y0 = fma(load(u_hat, k), load(V, V_at + k), y0)
        k += LANES
    return (y0 + y1) + (y2 + y3)


@inner
def _couple(u_hat, V, V_at, js, q, leaky, c):
    """c = softmax over j of û_j · V_j, with one more logit 0 where it is leaky."""
    for j in range(js):
        store(c, j * LANES, _agree(u_hat, j, q, V, V_at))
    softmax(c, js * LANES, leaky)


@inner
def _couple_backward(u_hat, g_s, g_at, js, q, c, delta):
    """δ = c (g_c − Σ_j c g_c) with g_c = û_j · g_s."""
    mean = splat(f4(0.0))
    for j in range(js):
        g_c = _agree(u_hat, j, q, g_s, g_at)
        store(delta, j * LANES, g_c)
        mean = fma(load(c, j * LANES), g_c, mean)
    for j in range(js):
        store(delta, j * LANES, load(c, j * LANES) * (load(delta, j * LANES) - mean))


@inner
def _add_scaled(c, x, x_at, js, q, out, out_at):
    """out_j += c_j x_j."""
    for j in range(js):
        share = load(c, j * LANES)
        for k in range(j * q * LANES, (j + 1) * q * LANES, LANES):
            store(out, out_at + k, fma(share, load(x, x_at + k), load(out, out_at + k)))


@inner
def _add_mixed(c, g_s, delta, V, at, js, q, out, out_at):
    """out_j += c_j g_s + δ_j V_j."""
    for j in range(js):
        share, change = load(c, j * LANES), load(delta, j * LANES)
        for k in range(j * q * LANES, (j + 1) * q * LANES, LANES):
            total = fma(share, load(g_s, at + k), load(out, out_at + k))
            store(out, out_at + k, fma(change, load(V, at + k), total))


@inner
def _add_outer(g, g_at, g_step, u, tiles, rows, ps, g_W, at):
    """g_W[r, p] += Σ over tiles and lanes of g_r u_p, two rows and four p at a time; u is (tile, p, lane)."""
    for r in range(0, rows, 2):
        odd = LANES if r + 1 < rows else 0  # a last row without a partner is computed twice and added once
        for p in range(0, ps, 4):
            y0 = y1 = y2 = y3 = z0 = z1 = z2 = z3 = splat(f4(0.0))
            k, m = g_at + r * LANES, p * LANES
            for _ in range(tiles):
                y, z = load(g, k), load(g, k + odd)
                x0, x1 = load(u, m), load(u, m + LANES)
                x2, x3 = load(u, m + 2 * LANES), load(u, m + 3 * LANES)
                y0, y1, y2, y3 = fma(y, x0, y0), fma(y, x1, y1), fma(y, x2, y2), fma(y, x3, y3)
                z0, z1, z2, z3 = fma(z, x0, z0), fma(z, x1, z1), fma(z, x2, z2), fma(z, x3, z3)
                k += g_step
                m += ps * LANES
            add_totals(g_W, at + r * ps + p, y0, y1, y2, y3)
            if odd:
                add_totals(g_W, at + (r + 1) * ps + p, z0, z1, z2, z3)


# ---- The jobs: a range of lower capsules, for one tile or for all ----


@compiled
def _regroup(first, last, W, rows, p, by_eight):
    """(i, row, p) → (i, row / 8, p, 8) for the lower capsules first … last-1, zeros in rows that are not there."""
    out = first * ((rows + 7) // 8 * 8) * p
    for i in range(first, last):
        for r in range(0, rows, 8):
            for c in range(p):
                for k in range(8):
                    by_eight[out + k] = W[(i * rows + r + k) * p + c] if r + k < rows else f4(0.0)
                out += 8


@inner
def _vote(i, tile, u, by_eight, i_s, n, rows, p, u_hat):
    """û of one lower capsule; rows = j·q, filled up to a multiple of eight."""
    _multiply(by_eight, i % n * rows * p, 8 * p, 8, rows, p, u, (tile * i_s + i) * p * LANES, u_hat, 0)


@compiled
def _route(tile, first, last, u, by_eight, i_s, n, js, q, p, leaky, V, s, s_at):
    """s += Σ_i c û over the lower capsules first … last-1 of one tile."""
    rows = (js * q + 7) // 8 * 8
    u_hat, c = scratch(rows * LANES), scratch(js * LANES)
    for i in range(first, last):
        _vote(i, tile, u, by_eight, i_s, n, rows, p, u_hat)
        _couple(u_hat, V, tile * js * q * LANES, js, q, leaky, c)
        _add_scaled(c, u_hat, 0, js, q, s, s_at)


@compiled
def _pull(tile, first, last, u, by_eight, i_s, n, js, q, p, leaky, V, g_s, g_V, g_at):
    """g_V += Σ_i δ û over the lower capsules first … last-1 of one tile."""
    rows = (js * q + 7) // 8 * 8
    u_hat, c, delta = scratch(rows * LANES), scratch(js * LANES), scratch(js * LANES)
    here = tile * js * q * LANES
    for i in range(first, last):
        _vote(i, tile, u, by_eight, i_s, n, rows, p, u_hat)
        _couple(u_hat, V, here, js, q, leaky, c)
        _couple_backward(u_hat, g_s, here, js, q, c, delta)
        _add_scaled(delta, u_hat, 0, js, q, g_V, g_at)


@inner
def _vote_gradient(room, V, g_s, tile, tiles, steps, js, q, leaky, through, g, g_at):
    """g_û += c g_s + δ V of every iteration, for one lower capsule and one tile; V and g_s are (t, tile, …)."""
    u_hat, c, delta = room
    span = js * q * LANES
    for t in range(steps):
        at = (t * tiles + tile) * span
        _couple(u_hat, V, at, js, q, leaky, c)
        if through:
            _couple_backward(u_hat, g_s, at, js, q, c, delta)
        _add_mixed(c, g_s, delta, V, at, js, q, g, g_at)


@compiled
def _finish(first, last, u, by_eight, i_s, n, js, q, p, leaky, W, tiles, steps, V, g_s, uniform, through, g_u, g_W):
    """g_u and g_W for the transformations first … last-1, all tiles; `uniform` is g_û of the first iteration."""
    rows, full, span, pose = js * q, (js * q + 7) // 8 * 8, js * q * LANES, p * LANES
    room = (scratch(full * LANES), scratch(js * LANES), scratch(js * LANES))
    held = max(1, min(tiles, HELD // (BLOCK * span * 4)))
    g, u_i = scratch(BLOCK * held * span), scratch(held * pose)
    for start in range(first, last, BLOCK):
        for position in range(0, i_s, n):
            low, high = position + start, position + min(start + BLOCK, last)
            for near in range(0, tiles, held):
                far = min(near + held, tiles)
                for tile in range(near, far):
                    for i in range(low, high):
                        here = ((i - low) * held + tile - near) * span
                        copy(uniform, tile * span, g, here, span)
                        if steps:
                            _vote(i, tile, u, by_eight, i_s, n, full, p, room[0])
                        _vote_gradient(room, V, g_s, tile, tiles, steps, js, q, leaky, through, g, here)
                        _multiply(W, i % n * rows * p, 8, p, p, rows, g, here, g_u, (tile * i_s + i) * pose)
                for i in range(low, high):
                    for tile in range(near, far):  # side by side: far apart they fight for the same cache sets
                        copy(u, (tile * i_s + i) * pose, u_i, (tile - near) * pose, pose)
                    g_at = (i - low) * held * span
                    _add_outer(g, g_at, span, u_i, far - near, rows, p, g_W, i % n * rows * p)


# ---- The votes ----


def _parts(total: int, count: int) -> list[tuple[int, int]]:
    """The range of `total` in at most `count` parts."""
    step = -(-total // count)
    return [(start, min(start + step, total)) for start in range(0, total, step)]


def _flat(x: Tensor) -> np.ndarray:
    return x.detach().contiguous().view(-1).numpy()


class FusedVotes:
    """`capsnet.kernels.routing.Votes` for float32 on a CPU, transformations shared over positions or not."""

    def __init__(self, u: Tensor, W: Tensor, leaky: bool) -> None:
        self.b, self.i, _ = u.shape
        self.n, self.j, self.q, self.true_p = W.shape
        self.tiles = -(-self.b // LANES)
        self.leaky = leaky
        # the loops take eight rows of W, and of its transpose, at a time; zeros up to a multiple of eight do no harm
        self.p = -(-self.true_p // 8) * 8
        if self.p > self.true_p:
            u, W = (torch.nn.functional.pad(x, (0, self.p - self.true_p)) for x in (u, W))
        self.u, self.W = self._tiled(u), W.contiguous()
        rows = self.j * self.q
        by_eight = _flat(u.new_empty(self.n * -(-rows // 8) * 8 * self.p))
        run(_regroup, [(*part, _flat(self.W), rows, self.p, by_eight) for part in _parts(self.n, JOBS)])
        self.common = (_flat(self.u), by_eight, self.i, self.n, self.j, self.q, self.p, leaky)
        self.pulled: list[tuple[Tensor, Tensor]] = []
        self.first = u.new_zeros(self.tiles, self.j, self.q, LANES)
        self.through = True

    def route(self, V: Tensor | None) -> Tensor:
        V = self.u.new_zeros(self.b, self.j, self.q) if V is None else V
        return self._sum_over_capsules(_route, self._tiled(V))

    def pull(self, V: Tensor | None, g_s: Tensor, through_couplings: bool) -> Tensor | None:
        self.through = through_couplings
        if V is None:
            self.first = self._tiled(g_s / (self.j + self.leaky))
            return None
        self.pulled.append((self._tiled(V), self._tiled(g_s)))
        return self._sum_over_capsules(_pull, *self.pulled[-1]) if through_couplings else None

    def gradients(self) -> tuple[Tensor, Tensor]:
        g_u, g_W = torch.empty_like(self.u), torch.zeros_like(self.W)
        steps = len(self.pulled)
        V, g_s = [torch.stack(x) for x in zip(*self.pulled, strict=True)] if steps else [self.first] * 2
        inputs = (_flat(self.W), self.tiles, steps, _flat(V), _flat(g_s), _flat(self.first), self.through)
        rest = (*inputs, _flat(g_u), _flat(g_W))
        run(_finish, [(*part, *self.common, *rest) for part in _parts(self.n, JOBS)])
        return self._untiled(g_u)[..., : self.true_p].contiguous(), g_W[..., : self.true_p].contiguous()

    def _sum_over_capsules(self, job: Callable[..., None], *inputs: Tensor) -> Tensor:
        """Every job has a tile and a part of the lower capsules; the parts are added in order. → (b, j, q)."""
        parts = _parts(self.i, -(-JOBS // self.tiles))
        out = self.u.new_zeros(len(parts), self.tiles, self.j, self.q, LANES)
        flat, arguments, size = _flat(out), [_flat(x) for x in inputs], out[0, 0].numel()
        places = [(tile, k) for tile in range(self.tiles) for k in range(len(parts))]
        run(
            job,
            [(t, *parts[k], *self.common, *arguments, flat, (k * self.tiles + t) * size) for t, k in places],
        )
        return self._untiled(out.sum(0))

    def _tiled(self, x: Tensor) -> Tensor:
        """(b, x, y) → (tile, x, y, lane); the last tile is filled up with zeros."""
        missing = self.tiles * LANES - self.b
        padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, missing)) if missing else x
        return padded.unflatten(0, (self.tiles, LANES)).permute(0, 2, 3, 1).contiguous()

    def _untiled(self, x: Tensor) -> Tensor:
        """(tile, x, y, lane) → (b, x, y)."""
        return x.permute(0, 3, 1, 2).flatten(0, 1)[: self.b].contiguous()
