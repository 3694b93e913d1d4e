"""The moments of `capsnet.kernels.moments` as fused loops for float32 on CPUs, compiled with Numba at first use.

Layouts, lanes and jobs are those of `routing_numba`. For one lower capsule and one tile of sixteen examples, the votes
are formed in the first-level cache and turned into deviations d = û − μ from the current means; they are never stored.
"""

# mypy: disable-error-code="no-untyped-def,call-arg,call-overload,var-annotated,import-untyped"
# (functions that Numba compiles have Numba's types, which mypy does not know)

from __future__ import annotations

import torch
from torch import Tensor

from capsnet.kernels.lanes import LANES, compiled, copy, f4, fma, inner, load, scratch, softmax, splat, store
from capsnet.kernels.routing_numba import (
    BLOCK,
    HELD,
    JOBS,
    FusedVotes,
    _add_outer,
    _flat,
    _multiply,
    _parts,
    _vote,
)
from capsnet.kernels.threads import run


@inner
def _centre(u_hat, mean, at, count):
    """d = û − μ, in place of û."""
    for x in range(0, count, LANES):
        store(u_hat, x, load(u_hat, x) - load(mean, at + x))


@inner
def _respond(d, k, k_at, P, at, js, q, R):
    """R = softmax over j of k_j − ½ Σ_q P d²."""
    for j in range(js):
        total = splat(f4(0.0))
        for x in range(j * q * LANES, (j + 1) * q * LANES, LANES):
            value = load(d, x)
            total = fma(load(P, at + x), value * value, total)
        store(R, j * LANES, fma(splat(f4(-0.5)), total, load(k, k_at + j * LANES)))
    softmax(R, js * LANES, False)


@compiled
def _moments(tile, first, last, u, by_eight, i_s, n, js, q, p, a, k, mean, P, out, out_at):
    """S, Σ r d and Σ r d², one after the other, over the lower capsules first … last-1 of one tile."""
    rows, span = (js * q + 7) // 8 * 8, js * q * LANES
    d, R = scratch(rows * LANES), scratch(js * LANES)
    one, two = out_at + js * LANES, out_at + js * LANES + span
    for i in range(first, last):
        _vote(i, tile, u, by_eight, i_s, n, rows, p, d)
        _centre(d, mean, tile * span, span)
        _respond(d, k, tile * js * LANES, P, tile * span, js, q, R)
        active = load(a, (tile * i_s + i) * LANES)
        for j in range(js):
            r = load(R, j * LANES) * active
            store(out, out_at + j * LANES, load(out, out_at + j * LANES) + r)
            for x in range(j * q * LANES, (j + 1) * q * LANES, LANES):
                value = load(d, x)
                weighted = r * value
                store(out, one + x, load(out, one + x) + weighted)
                store(out, two + x, fma(weighted, value, load(out, two + x)))


@inner
def _respond_backward(d, R, active, g_S, k_at, g_one, g_two, at, js, q, delta):
    """δ = R a (g_r − Σ_j R g_r) with g_r = g_S + Σ_q (g_1 d + g_2 d²); returns the gradient Σ_j R g_r on a."""
    mean = splat(f4(0.0))
    for j in range(js):
        g_r = load(g_S, k_at + j * LANES)
        for x in range(j * q * LANES, (j + 1) * q * LANES, LANES):
            value = load(d, x)
            g_r = fma(value, fma(load(g_two, at + x), value, load(g_one, at + x)), g_r)
        store(delta, j * LANES, g_r)
        mean = fma(load(R, j * LANES), g_r, mean)
    for j in range(js):
        store(delta, j * LANES, load(R, j * LANES) * active * (load(delta, j * LANES) - mean))
    return mean


@inner
def _vote_gradient(d, R, active, delta, P, g_one, g_two, at, js, q, g, g_at, sums, sums_at):
    """g_û = r g_1 + (2 r g_2 − δ P) d; and g_k += δ, g_μ −= g_û, g_P −= ½ δ d² in `sums`."""
    span = js * q * LANES
    of_mean, of_P = sums_at + js * LANES, sums_at + js * LANES + span
    for j in range(js):
        change, r = load(delta, j * LANES), load(R, j * LANES) * active
        half, twice = change * splat(f4(-0.5)), r + r
        store(sums, sums_at + j * LANES, load(sums, sums_at + j * LANES) + change)
        for x in range(j * q * LANES, (j + 1) * q * LANES, LANES):
            value = load(d, x)
            slope = twice * load(g_two, at + x) - change * load(P, at + x)
            gradient = fma(slope, value, r * load(g_one, at + x))
            store(g, g_at + x, gradient)
            store(sums, of_mean + x, load(sums, of_mean + x) - gradient)
            store(sums, of_P + x, fma(half * value, value, load(sums, of_P + x)))


@compiled
def _moments_backward(
    first, last, u, by_eight, i_s, n, js, q, p, W, tiles, a, k, mean, P, g_S, g_one, g_two, g_u, g_W, g_a, sums, sums_at
):
    """All gradients for the transformations first … last-1 and all tiles; g_k, g_μ and g_P are added to `sums`."""
    rows, full, span, pose = js * q, (js * q + 7) // 8 * 8, js * q * LANES, p * LANES
    d, R, delta = scratch(full * LANES), scratch(js * LANES), scratch(js * LANES)
    held = max(1, min(tiles, HELD // (BLOCK * span * 4)))
    g, u_i = scratch(BLOCK * held * span), scratch(held * pose)
    size = js * LANES + 2 * span
    for start in range(first, last, BLOCK):
        for position in range(0, i_s, n):
            low, high = position + start, position + min(start + BLOCK, last)
            for near in range(0, tiles, held):
                far = min(near + held, tiles)
                for tile in range(near, far):
                    at, k_at = tile * span, tile * js * LANES
                    for i in range(low, high):
                        here = ((i - low) * held + tile - near) * span
                        active = load(a, (tile * i_s + i) * LANES)
                        _vote(i, tile, u, by_eight, i_s, n, full, p, d)
                        _centre(d, mean, at, span)
                        _respond(d, k, k_at, P, at, js, q, R)
                        g_active = _respond_backward(d, R, active, g_S, k_at, g_one, g_two, at, js, q, delta)
                        store(g_a, (tile * i_s + i) * LANES, g_active)
                        _vote_gradient(
                            d, R, active, delta, P, g_one, g_two, at, js, q, g, here, sums, sums_at + tile * size
                        )
                        _multiply(W, i % n * rows * p, 8, p, p, rows, g, here, g_u, (tile * i_s + i) * pose)
                for i in range(low, high):
                    for tile in range(near, far):
                        copy(u, (tile * i_s + i) * pose, u_i, (tile - near) * pose, pose)
                    _add_outer(g, (i - low) * held * span, span, u_i, far - near, rows, p, g_W, i % n * rows * p)


class FusedMoments(FusedVotes):
    """`capsnet.kernels.moments.moments` and its gradients for float32 on a CPU."""

    def __init__(self, u: Tensor, W: Tensor) -> None:
        super().__init__(u, W, False)
        self.sizes = self.common[:-1]  # without `leaky`

    def moments(self, a: Tensor, k: Tensor, mean: Tensor, P: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        parts = _parts(self.i, -(-JOBS // self.tiles))
        out = self.u.new_zeros(len(parts), self.tiles, self._sums(), LANES)
        inputs = [_flat(self._tiled(x)) for x in (a.unsqueeze(-1), k.unsqueeze(-1), mean, P)]
        flat, size = _flat(out), out[0, 0].numel()
        places = [(tile, part) for tile in range(self.tiles) for part in range(len(parts))]
        run(_moments, [(t, *parts[m], *self.sizes, *inputs, flat, (m * self.tiles + t) * size) for t, m in places])
        return self._split(out)

    def gradients_of(
        self, a: Tensor, k: Tensor, mean: Tensor, P: Tensor, g_S: Tensor, g_one: Tensor, g_two: Tensor
    ) -> tuple[Tensor, ...]:
        """Gradients on u, W, a, k, mean and P."""
        inputs = [
            _flat(self._tiled(x if x.dim() == 3 else x.unsqueeze(-1))) for x in (a, k, mean, P, g_S, g_one, g_two)
        ]
        parts = _parts(self.n, JOBS)
        g_u, g_W = torch.empty_like(self.u), torch.zeros_like(self.W)
        g_a = self.u.new_empty(self.tiles, self.i, 1, LANES)
        sums = self.u.new_zeros(len(parts), self.tiles, self._sums(), LANES)
        flat, size = _flat(sums), sums[0].numel()
        rest = (_flat(self.W), self.tiles, *inputs, _flat(g_u), _flat(g_W), _flat(g_a))
        run(_moments_backward, [(*part, *self.sizes, *rest, flat, m * size) for m, part in enumerate(parts)])
        poses = (self._untiled(g_u)[..., : self.true_p].contiguous(), g_W[..., : self.true_p].contiguous())
        return (*poses, self._untiled(g_a).squeeze(-1), *self._split(sums))

    def _sums(self) -> int:
        return self.j * (1 + 2 * self.q)

    def _split(self, sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(part, tile, j + 2 j q, lane) → (b, j), (b, j, q), (b, j, q), summed over the parts in order."""
        S, one, two = sums.sum(0).split([self.j, self.j * self.q, self.j * self.q], 1)
        one, two = (self._untiled(x.unflatten(1, (self.j, self.q))).clone() for x in (one, two))
        return self._untiled(S.unsqueeze(2)).squeeze(-1).clone(), one, two  # results of an operator share no memory
