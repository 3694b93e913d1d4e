"""Constants of the bilinear convolution Y = A·[(G·w) ⊙ (B·x)], which `convolution` computes.

In one dimension, a correlation with `taps` taps and `outputs` outputs reads n = taps + outputs − 1 inputs and needs n
products: evaluate two polynomials at n points, multiply the values, interpolate, and transpose the algorithm (the
Toom-Cook method, applied to filters by Winograd). The choice of points determines cost and error. Small integers need
the fewest products but lose a decimal digit. The n-th roots of unity (the DFT) lose no accuracy, but a pair of complex
points costs three products instead of two. This module uses 0, infinity, ±0.8, ±1.25 and, for the remaining points,
conjugate pairs on the unit circle. All finite points except 0 are near the circle, so powers neither grow nor vanish.

| n × n = 10 × 10, 512 channels                       | products | relative error, float32 |
|-----------------------------------------------------|----------|-------------------------|
| DFT                                                 | 148      | 0.7e-6                  |
| 0, ∞, ±1, 3 pairs on the circle                     | 142      | 0.7e-6                  |
| 0, ∞, ±0.8, ±1.25, 2 pairs on the circle (exact)    | 132      | 1.3e-6                  |
| 0, ∞, ±1, ±2, ±1/2, ±i                              | 118      | 6.9e-6                  |
| 0, ∞, ±0.4, ±0.74, ±1.36, ±2.5 (rough)              | 100      | 5e-5                    |

bfloat16 is faster, with a relative error of 1e-2. Processors without bfloat16 arithmetic use `rough` instead: up to
twelve real points in float32, with errors near 1e-4 and, for 10 × 10, a quarter fewer products than `exact`.

A stride s splits the image into s² phases. Each phase is convolved with every s-th tap, and the results are added. The
phases share the points and A, so they are added before A is applied. A phase with one tap less does not need the point
at infinity: 9 × 9 taps at stride 2 give phases of 5 × 5, 5 × 4, 4 × 5 and 4 × 4 taps, which use 132, 120, 120 and 109
of the products.
"""

from __future__ import annotations

import cmath
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from capsnet.kernels.products import baddbmm_, bmm, mm
from capsnet.kernels.threads import run


class Points(NamedTuple):
    """How many pairs ±r of real points at most, the smallest r (the largest is its inverse), and the operands' type."""

    reals: int
    radius: float
    dtype: torch.dtype


PRECISIONS: dict[str, Points] = {  # best of a grid of radii at n = 10, and close to the best elsewhere
    "exact": Points(2, 0.8, torch.float32),
    "rough": Points(5, 0.4, torch.float32),  # a sixth pair raises the error to 1e-3
    "bf16": Points(2, 0.8, torch.bfloat16),
}
LONGEST_ROUGH = 24  # inputs; beyond this, powers of 0.4 and 2.5 lose too much accuracy
TRANSPOSED = 1024  # filters of one channel that a thread transposes at a time

Pair = tuple[int, int]
Array = np.ndarray  # the constants are computed with NumPy, because modes of PyTorch affected them
Point = complex | None  # None is infinity; a complex point also represents its conjugate


def real_pairs(n: int, precision: str) -> tuple[int, float]:
    """How many pairs ±r of real points are among n, and the smallest r; a few or very many points are always exact.

    >>> real_pairs(10, "exact"), real_pairs(10, "rough"), real_pairs(6, "rough")
    ((2, 0.8), (4, 0.4), (2, 0.8))
    """
    most, radius, _ = PRECISIONS[precision if 6 < n <= LONGEST_ROUGH else "exact"]
    return min((n - 1) // 2, most), radius


def points(n: int, precision: str) -> list[Point]:
    """Where polynomials are evaluated, infinity first; n numbers in all, as a conjugate pair counts two.

    >>> points(6, "exact")
    [None, 0j, (0.8+0j), (-0.8+0j), (1.25+0j), (-1.25+0j)]
    """
    pairs = (n - 1) // 2  # of finite points other than 0
    reals, radius = real_pairs(n, precision)
    radii = [radius ** (1 - 2 * k / (reals - 1)) for k in range(reals)] if reals > 1 else [1.0] * reals
    circle = [cmath.exp(1j * cmath.pi * k / (pairs - reals + 1)) for k in range(1, pairs - reals + 1)]
    zero = [0j] if n % 2 == 0 else []
    return [None, *zero, *(complex(sign * r) for r in radii for sign in (1, -1)), *circle]


def _is_pair(point: Point) -> bool:
    return point is not None and point.imag != 0


def _powers(at: list[Point], n: int) -> Array:
    """(point, n): times n coefficients gives the polynomial's values; at infinity that is the leading one."""
    rows = [[0] * (n - 1) + [1] if p is None else [p**k for k in range(n)] for p in at]
    return np.array(rows, dtype=np.complex128)


def _line(at: list[Point], taps: int, outputs: int) -> tuple[Array, Array]:
    """Filter and input matrix in one dimension, complex: (point, taps) and (point, inputs)."""
    inputs = taps + outputs - 1
    short = len(at) + sum(map(_is_pair, at)) - inputs  # 1 where this phase does without infinity, else 0
    used = at[short:]
    every = _powers([*used, *(p.conjugate() for p in used if p is not None and p.imag)], inputs)
    interpolate = np.linalg.inv(every).T[: len(used)]
    nothing = ((short, 0), (0, 0))
    return np.pad(_powers(used, taps), nothing), np.pad(interpolate, nothing)


class _Grid:
    """All pairs of a point in h and a point in w, and the one or three real products that each costs."""

    def __init__(self, h: list[Point], w: list[Point]) -> None:
        # Sorted by which point is at infinity (of h, none, of w, both): the products of a phase are then one slice.
        order = {(True, False): 0, (False, False): 1, (False, True): 2, (True, True): 3}
        pairs = [
            (order[p is None, q is None], i, j, conjugate, _is_pair(p) or _is_pair(q))
            for i, p in enumerate(h)
            for j, q in enumerate(w)
            # two conjugate pairs meet in two pairs: (p, q) and (p, q̄)
            for conjugate in ([False, True] if _is_pair(p) and _is_pair(q) else [False])
        ]
        group, self.i, self.j, conjugate, is_pair = (np.array(t) for t in zip(*sorted(pairs), strict=True))
        self.conjugate = conjugate[:, None]
        self.weight = 1.0 + is_pair[:, None, None]  # a pair is computed once and counts twice
        self.kept = np.stack([np.ones_like(is_pair), is_pair, is_pair], 1)
        self.ends = [0, *(int(self.kept[group <= k].sum()) for k in range(4))]

    def products(self, short_h: bool, short_w: bool) -> slice:
        """Those that a phase takes part in."""
        return slice(self.ends[short_h], self.ends[2 if short_w else 3 if short_h else 4])

    def _outer(self, h: Array, w: Array) -> tuple[Array, Array]:
        w = np.where(self.conjugate, w[self.j].conj(), w[self.j])
        values = (h[self.i][:, :, None] * w[:, None, :]).reshape(len(w), -1)
        return values.real, values.imag

    # A complex product z = g·d takes k1 = (Re g + Im g)·Re d, k2 = Re g·(Im d − Re d), k3 = Im g·(Re d + Im d),
    # z = (k1 − k3) + i(k1 + k2). The sums are folded into the matrices; a real point needs k1 alone.

    def filters(self, h: Array, w: Array) -> Array:
        re, im = self._outer(h, w)
        return np.stack([re + im, re, im], 1)[self.kept]

    def inputs(self, h: Array, w: Array) -> Array:
        re, im = self._outer(h, w)
        return np.stack([re, im - re, re + im], 1)[self.kept]

    def outputs(self, h: Array, w: Array) -> Array:
        re, im = self._outer(h, w)
        return (np.stack([re - im, -im, -re], 1) * self.weight)[self.kept]


@dataclass(frozen=True)
class Phase:
    """One of the stride² interleaved images: its first row and column, sizes, products and matrices."""

    start: Pair
    taps: Pair
    inputs: Pair
    products: slice
    G: Tensor  # (products, taps)
    B: Tensor  # (products, inputs)


@dataclass(frozen=True)
class Algorithm:
    """Everything constant about a tile of outputs."""

    kernel: Pair
    stride: int
    tile: Pair
    products: int
    A: Tensor  # (products, outputs), float32
    phases: tuple[Phase, ...]

    @property
    def dtype(self) -> torch.dtype:
        """Of the products."""
        return self.phases[0].G.dtype


def _phase_starts(kernel: Pair, stride: int) -> list[Pair]:
    return [(i, j) for i in range(min(stride, kernel[0])) for j in range(min(stride, kernel[1]))]


def _phase_taps(kernel: Pair, stride: int, start: Pair) -> Pair:
    return -(-(kernel[0] - start[0]) // stride), -(-(kernel[1] - start[1]) // stride)


def phase_sizes(kernel: Pair, stride: int, tile: Pair, precision: str) -> list[Pair]:
    """Products and inputs of each phase, without computing any constants.

    >>> phase_sizes((9, 9), 2, (6, 6), "exact")
    [(132, 100), (120, 90), (120, 90), (109, 81)]
    """
    full = _phase_taps(kernel, stride, (0, 0))
    lengths = [t + n - 1 for t, n in zip(full, tile, strict=True)]
    pair_h, pair_w = ((n - 1) // 2 - real_pairs(n, precision)[0] for n in lengths)
    sizes = []
    for start in _phase_starts(kernel, stride):
        h, w = (t + n - 1 for t, n in zip(_phase_taps(kernel, stride, start), tile, strict=True))
        real_h, real_w = h - 2 * pair_h, w - 2 * pair_w
        sizes.append((real_h * real_w + 3 * (real_h * pair_w + pair_h * real_w) + 6 * pair_h * pair_w, h * w))
    return sizes


@lru_cache(maxsize=64)
def algorithm(kernel: Pair, stride: int, tile: Pair, precision: str) -> Algorithm:
    """The constants for a tile, computed once in double precision."""
    full, dtype = _phase_taps(kernel, stride, (0, 0)), PRECISIONS[precision].dtype
    at = [points(t + n - 1, precision) for t, n in zip(full, tile, strict=True)]
    grid, phases = _Grid(*at), []
    with torch.inference_mode(False):
        for start in _phase_starts(kernel, stride):
            taps = _phase_taps(kernel, stride, start)
            (g_h, b_h), (g_w, b_w) = (_line(*sizes) for sizes in zip(at, taps, tile, strict=True))
            products = grid.products(taps[0] < full[0], taps[1] < full[1])
            G, B = (torch.from_numpy(m[products]).to(dtype) for m in (grid.filters(g_h, g_w), grid.inputs(b_h, b_w)))
            inputs = (taps[0] + tile[0] - 1, taps[1] + tile[1] - 1)
            phases.append(Phase(start, taps, inputs, products, G, B))
        A = torch.from_numpy(grid.outputs(*(_powers(p, n) for p, n in zip(at, tile, strict=True)))).float()
    return Algorithm(kernel, stride, tile, len(A), A, tuple(phases))


# --- The stages: transform, multiply, transform back, and their transposes --------------------------------


def _by_tap(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """(o, c, kh, kw) → (kh, kw, o·c), by all threads in parts that fit into their caches."""
    rows = weight.reshape(-1, prod(weight.shape[2:]))
    transposed = rows.new_empty(rows.shape[::-1], dtype=dtype)

    def transpose(start: int, stop: int) -> None:
        transposed[:, start:stop].copy_(rows[start:stop].T.contiguous())

    run(transpose, _ranges(len(rows)))
    return transposed.view(*weight.shape[2:], -1)


def _by_filter(transposed: Tensor, shape: torch.Size) -> Tensor:
    """The way back, in float32."""
    taps = transposed.flatten(0, 1)
    rows = taps.new_empty(taps.shape[::-1], dtype=torch.float32)

    def transpose(start: int, stop: int) -> None:
        rows[start:stop].copy_(taps[:, start:stop].float().contiguous().T)

    run(transpose, _ranges(len(rows)))
    return rows.view(shape)


def _ranges(rows: int) -> list[tuple[int, int]]:
    return [(start, min(start + TRANSPOSED, rows)) for start in range(0, rows, TRANSPOSED)]


def _of_phase(transposed: Tensor, plan: Algorithm, phase: Phase) -> Tensor:
    """The taps of a phase: a view (kh, kw, o·c) of those of all phases."""
    return transposed[phase.start[0] :: plan.stride, phase.start[1] :: plan.stride]


def _split(flat: Tensor, plan: Algorithm, keep: bool, unit: int) -> list[Tensor]:
    """A place (products, unit) for each phase's transform: its own, or the same for all if none is kept."""
    sizes = [len(phase.B) * unit for phase in plan.phases]
    parts = flat.split(sizes) if keep else [flat[:size] for size in sizes]
    return [part.view(-1, unit) for part in parts]


def _length(plan: Algorithm, keep: bool, unit: int) -> int:
    return (sum if keep else max)(len(phase.B) for phase in plan.phases) * unit


def keeps_filters(dtype: torch.dtype) -> bool:
    """Whether U = G·w is kept for the backward pass; float32 computes it again, because it is six times the weights."""
    return dtype != torch.float32


def multiply(
    plan: Algorithm, weight: Tensor, rows: int, image: Callable[[Phase], Tensor], keep: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Y = A·[(G·w) ⊙ (B·x)]: (outputs, rows·o); and V = B·x and U = G·w of all phases, flat, where they are kept.

    image(phase) is x: (inputs, rows·c), where a row is an image or a tile of one. The gradient of the weight needs V,
    and that of the image U, which is kept as far as `keeps_filters`.
    """
    o, c = weight.shape[:2]
    keep = keep[0], keep[1] and keeps_filters(plan.dtype)
    empty, taps = plan.phases[0].G.new_empty, _by_tap(weight, plan.dtype)
    buffers = [empty(_length(plan, kept, unit)) for kept, unit in zip(keep, (rows * c, o * c), strict=True)]
    total = empty((plan.products, rows, o), dtype=torch.float32)
    places = zip(_split(buffers[0], plan, keep[0], rows * c), _split(buffers[1], plan, keep[1], o * c), strict=True)
    for phase, (V_place, U_place) in zip(plan.phases, places, strict=True):
        V = mm(phase.B, image(phase), out=V_place)
        own = _of_phase(taps, plan, phase).flatten(0, 1)
        U = mm(phase.G, own, out=U_place)
        factors = V.view(-1, rows, c), U.view(-1, o, c).transpose(1, 2)
        if plan.dtype != torch.float32:  # the sum over the phases stays in float32
            product, place = torch.bmm(*factors), total[phase.products]
            place.copy_(product) if phase is plan.phases[0] else place.add_(product)
        elif phase is plan.phases[0]:  # it takes part in all the products
            bmm(*factors, out=total)
        else:
            baddbmm_(total[phase.products], *factors)
    V, U = (room if kept else room.new_empty(0) for room, kept in zip(buffers, keep, strict=True))
    return mm(plan.A.T, total.view(plan.products, -1)), V, U


def multiply_backward(
    plan: Algorithm,
    weight: Tensor,
    grad: Tensor,
    kept: Sequence[Tensor],
    weight_wanted: bool,
    take: Callable[[Phase, Tensor], None] | None,
) -> Tensor:
    """The same transposed, for grad (outputs, rows, o): the weight's gradient; `take` gets that of each image."""
    (o, c), rows = weight.shape[:2], grad.shape[1]
    empty = plan.phases[0].G.new_empty
    total = mm(plan.A, grad.view(-1, rows * o)).view(-1, rows, o).to(plan.dtype)
    buffers = empty(_length(plan, False, rows * c) if take else 0), empty(_length(plan, False, o * c))
    grads = [_split(room, plan, False, unit) for room, unit in zip(buffers, (rows * c, o * c), strict=True)]
    parts = [  # of what is not wanted nothing was kept
        _split(flat, plan, True, unit) if len(flat) else [flat] * len(plan.phases)
        for flat, unit in zip(kept, (rows * c, o * c), strict=True)
    ]
    grad_taps = empty((*weight.shape[2:], o * c) if weight_wanted else 0)
    taps = _by_tap(weight, plan.dtype) if take and not keeps_filters(plan.dtype) else None
    for phase, V, U, grad_V, grad_U in zip(plan.phases, *parts, *grads, strict=True):
        part = total[phase.products]
        if weight_wanted:
            bmm(part.transpose(1, 2), V.view(-1, rows, c), out=grad_U.view(-1, o, c))
            place = _of_phase(grad_taps, plan, phase)
            place.copy_(mm(phase.G.T, grad_U).view(place.shape))
        if take:
            if taps is not None:
                U = mm(phase.G, _of_phase(taps, plan, phase).flatten(0, 1), out=grad_U)
            bmm(part, U.view(-1, o, c), out=grad_V.view(-1, rows, c))
            take(phase, mm(phase.B.T, grad_V))
    return _by_filter(grad_taps, weight.shape) if weight_wanted else weight.new_empty(0)
