"""The sums of `capsnet.kernels.grid` as fused loops for float32 on CPUs, compiled with Numba at first use.

Sixteen examples are routed at a time, one in each lane of a vector (`lanes`). For one lower capsule the votes for the
upper capsules of all windows that see it are formed side by side in the second-level cache, since they share one
softmax, and are gone before the next capsule's turn. Layouts: u (tile, cell, type, r, k, lane); the arguments and sums
of a window (tile, window, j, r, c, lane); W (block, type, j, k, c). Columns k and c are multiples of four.

Work is cut into tiles and bands of cells by shape alone. A job writes sums for the windows of its band to memory of its
own, and the bands are added in a fixed order: results are the same bits whatever the number of threads.
"""

# mypy: disable-error-code="no-untyped-def,call-arg,call-overload,var-annotated,import-untyped"
# (functions that Numba compiles have Numba's types, which mypy does not know)

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from capsnet.kernels.lanes import (
    LANES,
    add_totals,
    compiled,
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
from capsnet.kernels.routing_numba import JOBS, _flat, _parts
from capsnet.kernels.threads import run

GRADIENT_BYTES = 1 << 28  # for the gradients on W, of which every job of the backward pass has its own

# ---- One lower capsule, one window ----


@inner
def _vote(u, u_at, ks, kp, rs, W, W_at, js, cs, out, out_at):
    """V[j, r, c] = Σ_k M[r, k] W[j, k, c], two blocks of four columns at a time."""
    blocks = rs * cs // 4
    for _ in range(js):
        r = c = 0
        for block in range(0, blocks, 2):
            m0, w0, o0 = u_at + r * kp * LANES, W_at + c, out_at + (r * cs + c) * LANES
            c += 4
            if c == cs:
                r, c = r + 1, 0
            m1, w1, o1 = m0, w0, o0  # a last block without a partner is computed twice
            if block + 1 < blocks:
                m1, w1, o1 = u_at + r * kp * LANES, W_at + c, out_at + (r * cs + c) * LANES
                c += 4
                if c == cs:
                    r, c = r + 1, 0
            y0 = y1 = y2 = y3 = z0 = z1 = z2 = z3 = splat(f4(0.0))
            for _k in range(ks):
                x, y = load(u, m0), load(u, m1)
                y0, y1 = fma(spread(W, w0), x, y0), fma(spread(W, w0 + 1), x, y1)
                y2, y3 = fma(spread(W, w0 + 2), x, y2), fma(spread(W, w0 + 3), x, y3)
                z0, z1 = fma(spread(W, w1), y, z0), fma(spread(W, w1 + 1), y, z1)
                z2, z3 = fma(spread(W, w1 + 2), y, z2), fma(spread(W, w1 + 3), y, z3)
                m0 += LANES
                m1 += LANES
                w0 += cs
                w1 += cs
            store(out, o0, y0)
            store(out, o0 + LANES, y1)
            store(out, o0 + 2 * LANES, y2)
            store(out, o0 + 3 * LANES, y3)
            store(out, o1, z0)
            store(out, o1 + LANES, z1)
            store(out, o1 + 2 * LANES, z2)
            store(out, o1 + 3 * LANES, z3)
        W_at += kp * cs
        out_at += rs * cs * LANES


@inner
def _centred(d, at, mean, mean_at, count):
    """d = û − μ, in place of û."""
    for x in range(0, count, LANES):
        store(d, at + x, load(d, at + x) - load(mean, mean_at + x))


@inner
def _fits(d, at, k, k_at, P, P_at, js, q, R, R_at):
    """Logits k_j − ½ Σ_q P d²."""
    for j in range(js):
        total = other = splat(f4(0.0))
        for _ in range(q // 2):
            value, second = load(d, at), load(d, at + LANES)
            total = fma(load(P, P_at) * value, value, total)
            other = fma(load(P, P_at + LANES) * second, second, other)
            at += 2 * LANES
            P_at += 2 * LANES
        logit = fma(splat(f4(-0.5)), total + other, load(k, k_at + j * LANES))
        store(R, R_at + j * LANES, logit)


@inner
def _agrees(d, at, V, V_at, js, q, R, R_at):
    """Logits û_j · V_j."""
    for j in range(js):
        total = other = splat(f4(0.0))
        for _ in range(q // 2):
            total = fma(load(V, V_at), load(d, at), total)
            other = fma(load(V, V_at + LANES), load(d, at + LANES), other)
            at += 2 * LANES
            V_at += 2 * LANES
        store(R, R_at + j * LANES, total + other)


@inner
def _equal(R, count):
    """Couplings before the first iteration."""
    share = splat(f4(1.0) / f4(count // LANES))
    for x in range(0, count, LANES):
        store(R, x, share)


@inner
def _add_moments(d, at, R, R_at, active, js, q, agree, S, one, two, o):
    """S += r, one += r d, two += r d² for the upper capsules of one window; for agreements `one` only."""
    x = o * js * q * LANES
    for j in range(js):
        r = load(R, R_at + j * LANES) * active
        if agree:
            for _ in range(q):
                store(one, x, fma(r, load(d, at), load(one, x)))
                at += LANES
                x += LANES
        else:
            place = (o * js + j) * LANES
            store(S, place, load(S, place) + r)
            for _ in range(q):
                value = load(d, at)
                weighted = r * value
                store(one, x, load(one, x) + weighted)
                store(two, x, fma(weighted, value, load(two, x)))
                at += LANES
                x += LANES


@inner
def _share_gradient(d, at, g_S, S_at, g_one, g_two, g_at, js, q, agree, delta, delta_at):
    """g_r = g_S + Σ_q (g_1 d + g_2 d²), or Σ_q g_1 d for agreements."""
    for j in range(js):
        total = splat(f4(0.0))
        if agree:
            for _ in range(q):
                total = fma(load(d, at), load(g_one, g_at), total)
                at += LANES
                g_at += LANES
        else:
            total = load(g_S, S_at + j * LANES)
            for _ in range(q):
                value = load(d, at)
                total = fma(value, fma(load(g_two, g_at), value, load(g_one, g_at)), total)
                at += LANES
                g_at += LANES
        store(delta, delta_at + j * LANES, total)


@inner
def _softmax_backward(R, delta, active, count):
    """δ = R a (g_r − Σ R g_r) over all parents, in place of g_r; returns the gradient Σ R g_r on a."""
    mean = splat(f4(0.0))
    for x in range(0, count, LANES):
        mean = fma(load(R, x), load(delta, x), mean)
    for x in range(0, count, LANES):
        store(delta, x, load(R, x) * active * (load(delta, x) - mean))
    return mean


@inner
def _vote_gradient(d, at, R, R_at, active, delta, P, g_one, g_two, P_at, js, q, agree, g_k, g_mean, g_P, o):
    """g_û in place of d, and the gradients on k, μ and P (or V) of one window.

    g_û = r g_1 + (2 r g_2 − δ P) d, g_k += δ, g_μ −= g_û, g_P −= ½ δ d²; for agreements g_û = r g_1 + δ V, g_V += δ û.
    """
    x = o * js * q * LANES
    for j in range(js):
        r, change = load(R, R_at + j * LANES) * active, load(delta, R_at + j * LANES)
        if agree:
            for _ in range(q):
                value = load(d, at)
                store(g_mean, x, fma(change, value, load(g_mean, x)))
                store(d, at, fma(r, load(g_one, P_at), change * load(P, P_at)))
                at += LANES
                P_at += LANES
                x += LANES
        else:
            place, half, twice = (o * js + j) * LANES, change * splat(f4(-0.5)), r + r
            store(g_k, place, load(g_k, place) + change)
            for _ in range(q):
                value = load(d, at)
                slope = twice * load(g_two, P_at) - change * load(P, P_at)
                gradient = fma(slope, value, r * load(g_one, P_at))
                store(d, at, gradient)
                store(g_mean, x, load(g_mean, x) - gradient)
                store(g_P, x, fma(half * value, value, load(g_P, x)))
                at += LANES
                P_at += LANES
                x += LANES


@inner
def _equal_vote_gradient(d, at, r, g_one, g_two, P_at, js, q, agree):
    """g_û = r (g_1 + 2 g_2 û), or r g_1 for agreements, in place of û: equal couplings do not depend on û."""
    for x in range(0, js * q * LANES, LANES):
        slope = load(g_one, P_at + x)
        if not agree:
            value = load(d, at + x)
            slope = fma(value + value, load(g_two, P_at + x), slope)
        store(d, at + x, r * slope)


@inner
def _add_pose_gradient(g, at, js, rs, cs, W, W_at, kp, out, out_at):
    """out[r, k] += Σ_j,c g[j, r, c] W[j, k, c], four k at a time."""
    for r in range(rs):
        for k in range(0, kp, 4):
            here = out_at + (r * kp + k) * LANES
            y0, y1 = load(out, here), load(out, here + LANES)
            y2, y3 = load(out, here + 2 * LANES), load(out, here + 3 * LANES)
            z0 = z1 = z2 = z3 = splat(f4(0.0))
            for j in range(js):
                x, w = at + (j * rs + r) * cs * LANES, W_at + (j * kp + k) * cs
                for _ in range(cs // 2):
                    value, other = load(g, x), load(g, x + LANES)
                    y0, y1 = fma(spread(W, w), value, y0), fma(spread(W, w + cs), value, y1)
                    y2, y3 = fma(spread(W, w + 2 * cs), value, y2), fma(spread(W, w + 3 * cs), value, y3)
                    z0, z1 = fma(spread(W, w + 1), other, z0), fma(spread(W, w + cs + 1), other, z1)
                    z2, z3 = fma(spread(W, w + 2 * cs + 1), other, z2), fma(spread(W, w + 3 * cs + 1), other, z3)
                    x += 2 * LANES
                    w += 2
            store(out, here, y0 + z0)
            store(out, here + LANES, y1 + z1)
            store(out, here + 2 * LANES, y2 + z2)
            store(out, here + 3 * LANES, y3 + z3)


@inner
def _add_weight_gradient(g, at, js, rs, cs, u, u_at, kp, out, out_at):
    """out[j, k, c] += Σ_r M[r, k] g[j, r, c], summed over the examples, two k and four c at a time."""
    for j in range(js):
        for k in range(0, kp, 2):
            for c in range(0, cs, 4):
                y0 = y1 = y2 = y3 = z0 = z1 = z2 = z3 = splat(f4(0.0))
                m, x = u_at + k * LANES, at + (j * rs * cs + c) * LANES
                for _ in range(rs):
                    one, two = load(u, m), load(u, m + LANES)
                    g0, g1 = load(g, x), load(g, x + LANES)
                    g2, g3 = load(g, x + 2 * LANES), load(g, x + 3 * LANES)
                    y0, y1, y2, y3 = fma(one, g0, y0), fma(one, g1, y1), fma(one, g2, y2), fma(one, g3, y3)
                    z0, z1, z2, z3 = fma(two, g0, z0), fma(two, g1, z1), fma(two, g2, z2), fma(two, g3, z3)
                    m += kp * LANES
                    x += cs * LANES
                first = out_at + (j * kp + k) * cs + c
                add_totals(out, first, y0, y1, y2, y3)
                add_totals(out, first + cs, z0, z1, z2, z3)


# ---- The jobs: a band of cells ----


@inner
def _respond(place, n, ns, begin, count, tile, u, W, k, mean, P, window, block, sizes, agree, equal, d, R):
    """Votes (deviations from the means, unless agreements are wanted) and couplings of one lower capsule."""
    os, js, rs, ks, kp, cs = sizes
    q = rs * cs
    span = js * q * LANES
    for e in range(count):
        o = tile * os + window[begin + e]
        W_at = (block[begin + e] * ns + n) * js * kp * cs
        _vote(u, place * rs * kp * LANES, ks, kp, rs, W, W_at, js, cs, d, e * span)
        if equal:
            continue
        if agree:
            _agrees(d, e * span, P, o * span, js, q, R, e * js * LANES)
        else:
            _centred(d, e * span, mean, o * span, span)
            _fits(d, e * span, k, o * js * LANES, P, o * span, js, q, R, e * js * LANES)
    if equal:
        _equal(R, count * js * LANES)
    else:
        softmax(R, count * js * LANES, False)  # over all parents of the lower capsule


@compiled
def _moments(
    tile, first, last, low, S, one, two, u, W, a, k, mean, P, starts, window, block, ns, sizes, most, agree, equal
):  # fmt: skip
    """S, Σ r d and Σ r d² of the windows from `low` on, over the cells first … last-1 of one tile."""
    _, js, rs, _, _, cs = sizes
    q, cells = rs * cs, len(starts) - 1
    span = js * q * LANES
    d, R = scratch(most * span), scratch(most * js * LANES)
    for cell in range(first, last):
        begin, count = starts[cell], starts[cell + 1] - starts[cell]
        for n in range(ns if count else 0):
            place = (tile * cells + cell) * ns + n
            _respond(place, n, ns, begin, count, tile, u, W, k, mean, P, window, block, sizes, agree, equal, d, R)
            active = load(a, place * LANES)
            for e in range(count):
                o = window[begin + e] - low
                _add_moments(d, e * span, R, e * js * LANES, active, js, q, agree, S, one, two, o)


@compiled
def _moments_backward(
    near, far, first, last, low, high, g_u, g_a, g_W, g_k, g_mean, g_P, g_S, g_one, g_two,
    u, W, a, k, mean, P, starts, window, block, ns, sizes, most, agree, equal,
):  # fmt: skip
    """All gradients for the cells first … last-1 of the tiles near … far-1; those of W are the job's own."""
    os, js, rs, _, kp, cs = sizes
    q, cells = rs * cs, len(starts) - 1
    span = js * q * LANES
    d, R, delta = scratch(most * span), scratch(most * js * LANES), scratch(most * js * LANES)
    for tile in range(near, far):
        for cell in range(first, last):
            begin, count = starts[cell], starts[cell + 1] - starts[cell]
            for n in range(ns if count else 0):
                place = (tile * cells + cell) * ns + n
                pose = place * rs * kp * LANES
                _respond(place, n, ns, begin, count, tile, u, W, k, mean, P, window, block, sizes, agree, equal, d, R)
                active = load(a, place * LANES)
                for e in range(count):
                    o = tile * os + window[begin + e]
                    _share_gradient(
                        d, e * span, g_S, o * js * LANES, g_one, g_two, o * span, js, q, agree, delta, e * js * LANES
                    )
                store(g_a, place * LANES, _softmax_backward(R, delta, active, count * js * LANES))
                for e in range(count):
                    o, here = tile * os + window[begin + e], (tile - near) * (high - low) + window[begin + e] - low
                    W_at = (block[begin + e] * ns + n) * js * kp * cs
                    if equal:
                        r = load(R, 0) * active
                        _equal_vote_gradient(d, e * span, r, g_one, g_two, o * span, js, q, agree)
                    else:
                        _vote_gradient(
                            d, e * span, R, e * js * LANES, active, delta, P, g_one, g_two, o * span, js, q, agree,
                            g_k, g_mean, g_P, here,
                        )  # fmt: skip
                    _add_pose_gradient(d, e * span, js, rs, cs, W, W_at, kp, g_u, pose)
                    _add_weight_gradient(d, e * span, js, rs, cs, u, pose, kp, g_W, W_at)


# ---- The sums ----

Band = tuple[int, int, int, int]  # its first and last cell, and the first and last window that see any of them
Sums = tuple[Tensor, Tensor, Tensor]


class FusedGrid:
    """`capsnet.kernels.grid.moments` and `attend`, and their gradients, for float32 on a CPU.

    Tensors have the layouts of this file; if there is a single tile, it may have fewer lanes. With `equal`, all parents
    get equal shares, and k, μ and P (or V) are not read.
    """

    def __init__(self, u: Tensor, W: Tensor, starts: Tensor, window: Tensor, block: Tensor, windows: int) -> None:
        self.tiles, places, r, k, _ = u.shape
        self.u, self.W, self.starts, self.window, self.lanes = _filled(u), W, starts, window, u.shape[-1]
        self.windows, self.cells, self.j, self.q = windows, len(starts) - 1, W.shape[1], r * W.shape[3]
        sizes = (windows, self.j, r, k, k, W.shape[3])
        self.common = (
            _flat(starts), _flat(window), _flat(block), places // self.cells, sizes, int(starts.diff().max()),
        )  # fmt: skip

    def moments(self, a: Tensor, k: Tensor, mean: Tensor, P: Tensor, equal: bool) -> Sums:
        return self._forward((a, k, mean, P), False, equal)

    def attend(self, V: Tensor, equal: bool) -> Tensor:
        return self._forward(self._for_agreements(V), True, equal)[1]

    def gradients_of_moments(
        self, a: Tensor, k: Tensor, mean: Tensor, P: Tensor, equal: bool, *given: Tensor
    ) -> tuple[Tensor, ...]:
        """Gradients on u, W, a, k, mean and P, given those on S, one and two."""
        return self._backward(given, (a, k, mean, P), False, equal)

    def gradients_of_attend(self, V: Tensor, equal: bool, g_s: Tensor) -> Sums:
        """Gradients on u, W and V."""
        unread = g_s.new_empty(0)
        g_u, g_W, _, _, g_V, _ = self._backward((unread, g_s, unread), self._for_agreements(V), True, equal)
        return g_u, g_W, g_V

    def _for_agreements(self, V: Tensor) -> tuple[Tensor, ...]:
        """All children are active; means and k are not read."""
        unread = V.new_empty(0)
        return self.u.new_ones(*self.u.shape[:2], LANES), unread, unread, V

    def _forward(self, inputs: tuple[Tensor, ...], agree: bool, equal: bool) -> Sums:
        bands = self._bands(-(-JOBS // self.tiles))
        sums = [self._sums(self.tiles, band, agree) for band in bands]
        rest = (*map(_flat, (self.u, self.W, *_read(inputs, equal))), *self.common, agree, equal)
        jobs = [
            (tile, *band[:3], *of_tiles, *rest)
            for tile in range(self.tiles)
            for band, of_tiles in zip(bands, self._slices(sums, (tile, tile + 1)), strict=True)
        ]
        run(_moments, jobs)
        return self._added(bands, sums)

    def _backward(
        self, given: tuple[Tensor, ...], inputs: tuple[Tensor, ...], agree: bool, equal: bool
    ) -> tuple[Tensor, ...]:
        copies = max(2, GRADIENT_BYTES // (4 * self.W.numel()))
        bands = self._bands(min(-(-JOBS // self.tiles), copies))
        parts = _parts(self.tiles, max(1, copies // len(bands)))
        sums = [self._sums(0 if equal else self.tiles, band, agree) for band in bands]
        g_u, g_a = torch.zeros_like(self.u), self.u.new_zeros(*self.u.shape[:2], LANES)
        g_W = self.W.new_zeros(len(parts), len(bands), self.W.numel())
        flat_u, flat_a, of_jobs = _flat(g_u), _flat(g_a), g_W.numpy()
        arrays = chain(map(_filled, given), (self.u, self.W), _read(inputs, equal))
        rest = (*map(_flat, arrays), *self.common, agree, equal)
        jobs = [
            (*tiles, *band, flat_u, flat_a, of_job, *of_tiles, *rest)
            for tiles, of_part in zip(parts, of_jobs, strict=True)
            for band, of_job, of_tiles in zip(bands, of_part, self._slices(sums, tiles), strict=True)
        ]
        run(_moments_backward, jobs)
        found = [self.u.new_zeros(0) for _ in range(3)] if equal else self._added(bands, sums)
        g_u, g_a = (x[..., : self.lanes].contiguous() for x in (g_u, g_a))
        return g_u, g_W.sum((0, 1)).view_as(self.W), g_a, *found

    def _bands(self, count: int) -> list[Band]:
        """Ranges of cells, each with the range of windows that see any of them."""
        found = []
        for first, last in _parts(self.cells, count):
            seen = self.window[int(self.starts[first]) : int(self.starts[last])]
            if len(seen):
                found.append((first, last, int(seen.min()), int(seen.max()) + 1))
        return found

    def _sums(self, tiles: int, band: Band, agree: bool) -> Sums:
        """Zeros for the windows of a band: numbers for S, one and two, of which agreements need the second."""
        windows, scalars = band[3] - band[2], 0 if agree else tiles
        return (
            self.u.new_zeros(scalars, windows, self.j, LANES),
            self.u.new_zeros(tiles, windows, self.j, self.q, LANES),
            self.u.new_zeros(scalars, windows, self.j, self.q, LANES),
        )

    def _slices(self, sums: Sequence[Sums], tiles: tuple[int, int]) -> list[tuple[np.ndarray, ...]]:
        """The memory of each band for these tiles, flat."""
        return [tuple(part.numpy()[slice(*tiles)].reshape(-1) for part in parts) for parts in sums]

    def _added(self, bands: Sequence[Band], sums: Sequence[Sums]) -> Sums:
        """The sums of all bands, in order."""
        S, one, two = (self.u.new_zeros(len(part), self.windows, *part.shape[2:-1], self.lanes) for part in sums[0])
        for (*_, low, high), parts in zip(bands, sums, strict=True):
            for total, part in zip((S, one, two), parts, strict=True):
                total[:, low:high] += part[..., : self.lanes]
        return S, one, two


def _read(inputs: tuple[Tensor, ...], equal: bool) -> Iterator[Tensor]:
    """What the loops read of a, k, μ and P, with all lanes: for equal shares nothing but a."""
    a, *of_windows = inputs
    yield _filled(a)
    yield from (x.new_empty(0) if equal else _filled(x) for x in of_windows)


def _filled(x: Tensor) -> Tensor:
    """(…, lane) with zeros in the lanes that are missing."""
    missing = LANES - x.shape[-1]
    return F.pad(x, (0, missing)) if missing and x.numel() else x
