"""The sums of `capsnet.kernels.grid` as fused loops for float32 on CPUs, compiled with Numba at first use.

Sixteen examples are routed at a time, one in each lane of a vector (`lanes`). For one lower capsule the votes for the
upper capsules of all windows that see it are formed side by side in the second-level cache, since they share one
softmax, and are gone before the next capsule's turn. Layouts: u (tile, cell, type, r, k, lane); the arguments and sums
of a window (tile, window, j, r, c, lane); W (block, type, j, k, c).

Work is cut into bands of cells by shape alone. A job writes sums for the windows of its band to memory of its own, and
the bands are added in a fixed order: results are the same bits whatever the number of threads.
"""

# mypy: disable-error-code="no-untyped-def,call-arg,call-overload,var-annotated,import-untyped"
# (functions that Numba compiles have Numba's types, which mypy does not know)

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from capsnet.kernels.lanes import LANES, compiled, f4, fma, inner, load, scratch, softmax, splat, spread, store
from capsnet.kernels.routing_numba import JOBS, _flat, _parts
from capsnet.kernels.threads import run

GRADIENT_BYTES = 1 << 28  # for the gradients on W, of which every band of the backward pass has its own

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
def _add_moments(d, at, R, R_at, active, js, q, agree, out, out_at):
    """S += r, one += r d, two += r d² for the upper capsules of one window; for agreements `one` only."""
    one, two = out_at + js * LANES, out_at + (js + js * q) * LANES
    for j in range(js):
        r = load(R, R_at + j * LANES) * active
        if agree:
            for _ in range(q):
                store(out, one, fma(r, load(d, at), load(out, one)))
                at += LANES
                one += LANES
        else:
            store(out, out_at + j * LANES, load(out, out_at + j * LANES) + r)
            for _ in range(q):
                value = load(d, at)
                weighted = r * value
                store(out, one, load(out, one) + weighted)
                store(out, two, fma(weighted, value, load(out, two)))
                at += LANES
                one += LANES
                two += LANES


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
def _vote_gradient(d, at, R, R_at, active, delta, P, g_one, g_two, P_at, js, q, agree, sums, sums_at):
    """g_û in place of d, and the gradients on k, μ and P (or V) of one window in `sums`.

    g_û = r g_1 + (2 r g_2 − δ P) d, g_k += δ, g_μ −= g_û, g_P −= ½ δ d²; for agreements g_û = r g_1 + δ V, g_V += δ û.
    """
    of_mean, of_P = sums_at + js * LANES, sums_at + (js + js * q) * LANES
    for j in range(js):
        r, change = load(R, R_at + j * LANES) * active, load(delta, R_at + j * LANES)
        if agree:
            for _ in range(q):
                value = load(d, at)
                store(sums, of_mean, fma(change, value, load(sums, of_mean)))
                store(d, at, fma(r, load(g_one, P_at), change * load(P, P_at)))
                at += LANES
                P_at += LANES
                of_mean += LANES
        else:
            half, twice = change * splat(f4(-0.5)), r + r
            store(sums, sums_at + j * LANES, load(sums, sums_at + j * LANES) + change)
            for _ in range(q):
                value = load(d, at)
                slope = twice * load(g_two, P_at) - change * load(P, P_at)
                gradient = fma(slope, value, r * load(g_one, P_at))
                store(d, at, gradient)
                store(sums, of_mean, load(sums, of_mean) - gradient)
                store(sums, of_P, fma(half * value, value, load(sums, of_P)))
                at += LANES
                P_at += LANES
                of_mean += LANES
                of_P += LANES


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
    """out[j, k, c] += Σ_r M[r, k] g[j, r, c], lane by lane, two k and four c at a time."""
    for j in range(js):
        for k in range(0, kp, 2):
            for c in range(0, cs, 4):
                first = out_at + ((j * kp + k) * cs + c) * LANES
                second = first + cs * LANES
                y0, y1 = load(out, first), load(out, first + LANES)
                y2, y3 = load(out, first + 2 * LANES), load(out, first + 3 * LANES)
                z0, z1 = load(out, second), load(out, second + LANES)
                z2, z3 = load(out, second + 2 * LANES), load(out, second + 3 * LANES)
                m, x = u_at + k * LANES, at + (j * rs * cs + c) * LANES
                for _ in range(rs):
                    one, two = load(u, m), load(u, m + LANES)
                    g0, g1 = load(g, x), load(g, x + LANES)
                    g2, g3 = load(g, x + 2 * LANES), load(g, x + 3 * LANES)
                    y0, y1, y2, y3 = fma(one, g0, y0), fma(one, g1, y1), fma(one, g2, y2), fma(one, g3, y3)
                    z0, z1, z2, z3 = fma(two, g0, z0), fma(two, g1, z1), fma(two, g2, z2), fma(two, g3, z3)
                    m += kp * LANES
                    x += cs * LANES
                store(out, first, y0)
                store(out, first + LANES, y1)
                store(out, first + 2 * LANES, y2)
                store(out, first + 3 * LANES, y3)
                store(out, second, z0)
                store(out, second + LANES, z1)
                store(out, second + 2 * LANES, z2)
                store(out, second + 3 * LANES, z3)


# ---- The jobs: a band of cells ----


@inner
def _respond(place, n, ns, begin, count, tile, u, W, k, mean, P, window, block, sizes, agree, d, R):
    """Votes (deviations from the means, unless agreements are wanted) and couplings of one lower capsule."""
    os, js, rs, ks, kp, cs = sizes
    q = rs * cs
    span = js * q * LANES
    for e in range(count):
        o = tile * os + window[begin + e]
        W_at = (block[begin + e] * ns + n) * js * kp * cs
        _vote(u, place * rs * kp * LANES, ks, kp, rs, W, W_at, js, cs, d, e * span)
        if agree:
            _agrees(d, e * span, P, o * span, js, q, R, e * js * LANES)
        else:
            _centred(d, e * span, mean, o * span, span)
            _fits(d, e * span, k, o * js * LANES, P, o * span, js, q, R, e * js * LANES)
    softmax(R, count * js * LANES, False)  # over all parents of the lower capsule


@compiled
def _moments(tile, first, last, low, out, out_at, u, W, a, k, mean, P, starts, window, block, ns, sizes, most, agree):
    """S, Σ r d and Σ r d² of the windows from `low` on, over the cells first … last-1 of one tile."""
    _, js, rs, _, _, cs = sizes
    q, cells = rs * cs, len(starts) - 1
    span, size = js * q * LANES, (js + 2 * js * q) * LANES
    d, R = scratch(most * span), scratch(most * js * LANES)
    for cell in range(first, last):
        begin, count = starts[cell], starts[cell + 1] - starts[cell]
        for n in range(ns if count else 0):
            place = (tile * cells + cell) * ns + n
            _respond(place, n, ns, begin, count, tile, u, W, k, mean, P, window, block, sizes, agree, d, R)
            active = load(a, place * LANES)
            for e in range(count):
                at = out_at + (window[begin + e] - low) * size
                _add_moments(d, e * span, R, e * js * LANES, active, js, q, agree, out, at)


@compiled
def _moments_backward(
    first, last, low, high, tiles, g_u, g_a, g_W, W_at, sums, sums_at, g_S, g_one, g_two,
    u, W, a, k, mean, P, starts, window, block, ns, sizes, most, agree,
):  # fmt: skip
    """All gradients for the cells first … last-1 of all tiles; those of windows and of W go to memory of the band."""
    os, js, rs, _, kp, cs = sizes
    q, cells = rs * cs, len(starts) - 1
    span, size = js * q * LANES, (js + 2 * js * q) * LANES
    d, R, delta = scratch(most * span), scratch(most * js * LANES), scratch(most * js * LANES)
    for tile in range(tiles):
        for cell in range(first, last):
            begin, count = starts[cell], starts[cell + 1] - starts[cell]
            for n in range(ns if count else 0):
                place = (tile * cells + cell) * ns + n
                pose = place * rs * kp * LANES
                _respond(place, n, ns, begin, count, tile, u, W, k, mean, P, window, block, sizes, agree, d, R)
                active = load(a, place * LANES)
                for e in range(count):
                    o = tile * os + window[begin + e]
                    _share_gradient(
                        d, e * span, g_S, o * js * LANES, g_one, g_two, o * span, js, q, agree, delta, e * js * LANES
                    )
                store(g_a, place * LANES, _softmax_backward(R, delta, active, count * js * LANES))
                for e in range(count):
                    o, number = tile * os + window[begin + e], block[begin + e] * ns + n
                    here = sums_at + (tile * (high - low) + window[begin + e] - low) * size
                    _vote_gradient(
                        d,
                        e * span,
                        R,
                        e * js * LANES,
                        active,
                        delta,
                        P,
                        g_one,
                        g_two,
                        o * span,
                        js,
                        q,
                        agree,
                        sums,
                        here,
                    )
                    _add_pose_gradient(d, e * span, js, rs, cs, W, number * js * kp * cs, kp, g_u, pose)
                    _add_weight_gradient(
                        d, e * span, js, rs, cs, u, pose, kp, g_W, W_at + number * js * kp * cs * LANES
                    )


# ---- The sums ----


def _up_to(x: Tensor, *multiples: int) -> Tensor:
    """Zeros at the end of the last two axes, up to multiples."""
    (k, c), (by_k, by_c) = x.shape[-2:], multiples
    return F.pad(x, (0, -c % by_c, 0, -k % by_k))


class FusedGrid:
    """`capsnet.kernels.grid.moments` and `attend`, and their gradients, for float32 on a CPU."""

    def __init__(self, u: Tensor, W: Tensor, starts: Tensor, window: Tensor, block: Tensor, windows: int) -> None:
        self.b, capsules, p = u.shape
        self.j, self.k, self.c = W.shape[1:]
        self.r, self.windows, self.cells = p // self.k, windows, len(starts) - 1
        self.n = capsules // self.cells
        self.tiles = -(-self.b // LANES)
        self.W = _up_to(W, 4, 4).contiguous()
        self.kp, self.cp = self.W.shape[-2:]
        self.u = self._tiled(_up_to(u.unflatten(-1, (self.r, self.k)), 1, 4).flatten(2))
        self.starts, self.window = starts, window
        self.sizes = (windows, self.j, self.r, self.k, self.kp, self.cp)
        most = int(starts.diff().max())
        self.common = (_flat(starts), _flat(window), _flat(block), self.n, self.sizes, most)
        self.size = self.j * (1 + 2 * self.r * self.cp)

    def moments(self, a: Tensor, k: Tensor, mean: Tensor, P: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self._forward(self._inputs(a, k, mean, P), False)

    def attend(self, V: Tensor) -> Tensor:
        return self._forward(self._agreements(V), True)[1]

    def gradients_of_moments(self, a: Tensor, k: Tensor, mean: Tensor, P: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        """Gradients on u, W, a, k, mean and P, given those on S, one and two."""
        g_S, g_one, g_two = given
        wanted = (_flat(self._per_window(g_S)), self._poses(g_one), self._poses(g_two))
        return self._backward(wanted, self._inputs(a, k, mean, P), False)

    def gradients_of_attend(self, V: Tensor, g_s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients on u, W and V."""
        g_one = self._poses(g_s)
        g_u, g_W, _, _, g_V, _ = self._backward((g_one, g_one, g_one), self._agreements(V), True)
        return g_u, g_W, g_V

    def _inputs(self, a: Tensor, k: Tensor, mean: Tensor, P: Tensor) -> tuple[np.ndarray, ...]:
        active = _flat(self._tiled(a.unsqueeze(-1)))
        return _flat(self.u), _flat(self.W), active, _flat(self._per_window(k)), self._poses(mean), self._poses(P)

    def _agreements(self, V: Tensor) -> tuple[np.ndarray, ...]:
        ones, flat = _flat(self.u.new_ones(self.tiles * self.cells * self.n * LANES)), self._poses(V)
        return _flat(self.u), _flat(self.W), ones, flat, flat, flat

    def _forward(self, inputs: tuple[np.ndarray, ...], agree: bool) -> tuple[Tensor, Tensor, Tensor]:
        bands = self._bands(-(-JOBS // self.tiles))
        sums = [self.u.new_zeros(self.tiles, high - low, self.size, LANES) for *_, low, high in bands]
        jobs = [
            (tile, first, last, low, _flat(out), tile * out[0].numel(), *inputs, *self.common, agree)
            for tile in range(self.tiles)
            for (first, last, low, _), out in zip(bands, sums, strict=True)
        ]
        run(_moments, jobs)
        return self._added(bands, sums)

    def _backward(
        self, wanted: tuple[np.ndarray, ...], inputs: tuple[np.ndarray, ...], agree: bool
    ) -> tuple[Tensor, ...]:
        bands = self._bands(max(2, min(JOBS, GRADIENT_BYTES // (4 * LANES * self.W.numel()))))
        sums = [self.u.new_zeros(self.tiles, high - low, self.size, LANES) for *_, low, high in bands]
        g_u, g_a = torch.zeros_like(self.u), self.u.new_zeros(self.tiles, self.cells * self.n, 1, LANES)
        g_W = self.u.new_zeros(len(bands), *self.W.shape, LANES)
        flat_u, flat_a, flat_W, of_band = _flat(g_u), _flat(g_a), _flat(g_W), self.W.numel() * LANES
        jobs = [
            (*band, self.tiles, flat_u, flat_a, flat_W, number * of_band, _flat(out), 0, *wanted, *inputs, *self.common,
             agree)
            for number, (band, out) in enumerate(zip(bands, sums, strict=True))
        ]  # fmt: skip
        run(_moments_backward, jobs)
        poses = self._untiled(g_u).unflatten(-1, (self.r, self.kp))[..., : self.k].flatten(2)
        of_W = g_W.sum((0, -1))[:, :, : self.k, : self.c].contiguous()
        return poses.contiguous(), of_W, self._untiled(g_a).squeeze(-1), *self._added(bands, sums)

    def _bands(self, count: int) -> list[tuple[int, int, int, int]]:
        """Ranges of cells, each with the range of windows that see any of them."""
        found = []
        for first, last in _parts(self.cells, count):
            seen = self.window[int(self.starts[first]) : int(self.starts[last])]
            if len(seen):
                found.append((first, last, int(seen.min()), int(seen.max()) + 1))
        return found

    def _added(self, bands: list[tuple[int, int, int, int]], sums: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """The sums of all bands as (b, window, j), (b, window, j, q) and (b, window, j, q)."""
        total = self.u.new_zeros(self.tiles, self.windows, self.size, LANES)
        for (*_, low, high), part in zip(bands, sums, strict=True):
            total[:, low:high] += part
        S, *poses = total.split([self.j, *[self.j * self.r * self.cp] * 2], 2)
        one, two = (
            self._untiled(x.flatten(1, 2)).unflatten(1, (self.windows, -1)).unflatten(2, (self.j, self.r, self.cp))
            for x in poses
        )
        one, two = (x[..., : self.c].flatten(-2).contiguous() for x in (one, two))
        return self._untiled(S.flatten(1, 2)).unflatten(1, (self.windows, -1)).contiguous(), one, two

    def _poses(self, x: Tensor) -> np.ndarray:
        """(b, window, j, q) with columns filled up, tiled and flat."""
        return _flat(self._per_window(_up_to(x.unflatten(-1, (self.r, self.c)), 1, 4)))

    def _per_window(self, x: Tensor) -> Tensor:
        return self._tiled(x.flatten(1))

    def _tiled(self, x: Tensor) -> Tensor:
        """(b, …) → (tile, …, lane); the last tile is filled up with zeros."""
        padded = F.pad(x.flatten(1), (0, 0, 0, self.tiles * LANES - self.b))
        return padded.unflatten(0, (self.tiles, LANES)).transpose(1, 2).contiguous().unflatten(1, x.shape[1:])

    def _untiled(self, x: Tensor) -> Tensor:
        """(tile, …, lane) → (b, …)."""
        return x.movedim(-1, 1).flatten(0, 1)[: self.b].contiguous()
