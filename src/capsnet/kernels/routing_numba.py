"""The votes of `capsnet.kernels.routing` as fused loops for float32 on CPUs, compiled with Numba at first use.

Sixteen examples are routed at a time, one in each lane of a vector, so the loops below read as if for a single
example: agreement, softmax and sums go lane by lane, and nothing is added across lanes but g_W. Layouts:
u (tile, i, p, lane); V, s and g_s (tile, j, q, lane); W as it is. For one lower capsule and one tile the votes are
j · q vectors, formed from W where they are needed and gone before they leave the first-level cache; forming them
again costs less than fetching them.

Work is cut into jobs by shape alone, every job writes memory of its own, and partial sums are added in a fixed
order: results are the same bits whatever the number of threads. Ordinary threads run the jobs (the loops release
the interpreter lock), which any number of callers may do at once.

No fast-math anywhere: NaN goes in, NaN comes out.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.datamodel import models
from numba.extending import intrinsic, overload, register_model
from torch import Tensor

LANES = 16  # one AVX-512 register, two of AVX2, four of NEON
JOBS = 16  # at least so many where the batch alone is too small to share out
BLOCK = 4  # lower capsules whose vote gradients are held at a time, for HELD bytes of the L2 cache
HELD = 1 << 19
_TEAM_MEMBER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

# ---- A value that is one float32 for each of sixteen examples ----


class _LanesType(types.Type):
    def __init__(self) -> None:
        super().__init__(name="lanes")


_lanes = _LanesType()
_ir_lanes = ir.VectorType(ir.FloatType(), LANES)
_ir_bits = ir.VectorType(ir.IntType(32), LANES)


@register_model(_LanesType)
class _LanesModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _ir_lanes)


def _address(context: Any, builder: Any, kind: Any, array: Any, index: Any, target: Any = _ir_lanes) -> Any:
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), target.as_pointer())


@intrinsic
def _load(typing: Any, array: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_address(context, builder, array, *args), align=4)

    return _lanes(array, types.intp), generate


@intrinsic
def _store(typing: Any, array: Any, index: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], _address(context, builder, array, *args[:2]), align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, _lanes), generate


def _broadcast(builder: Any, number: Any) -> Any:
    one = builder.insert_element(ir.Constant(_ir_lanes, ir.Undefined), number, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(one, one, ir.Constant(_ir_bits, [0] * LANES))


@intrinsic
def _splat(typing: Any, number: Any) -> Any:
    """The same number for every example."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _broadcast(builder, args[0])

    return _lanes(types.float32), generate


@intrinsic
def _spread(typing: Any, array: Any, index: Any) -> Any:
    """array[index] for every example; unlike Numba's own indexing it never counts from the end."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(array)(context, builder, args[0]).data
        return _broadcast(builder, builder.load(builder.gep(data, [args[1]])))

    return _lanes(array, types.intp), generate


@intrinsic
def _fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a · b + c."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(_ir_lanes, [_ir_lanes] * 3)
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32"), args)

    return _lanes(_lanes, _lanes, _lanes), generate


@intrinsic
def _larger(typing: Any, a: Any, b: Any) -> Any:
    """a where a > b, else b: a NaN in b stays."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", *args), *args)

    return _lanes(_lanes, _lanes), generate


@intrinsic
def _power_of_two(typing: Any, shifted: Any) -> Any:
    """2ⁿ of the whole number n that lies in the lowest bits of 1.5 · 2²³ + n."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        exponent = builder.shl(builder.bitcast(args[0], _ir_bits), ir.Constant(_ir_bits, [23] * LANES))
        return builder.bitcast(builder.add(exponent, ir.Constant(_ir_bits, [127 << 23] * LANES)), _ir_lanes)

    return _lanes(_lanes), generate


def _pick(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes))


def _fold(builder: Any, a: Any, b: Any, width: int) -> Any:
    """Halve every group of `width` lanes of a and of b: the groups of a, then those of b, width / 2 lanes each."""
    starts = [group + k for group in range(0, 2 * LANES, width) for k in range(width // 2)]
    return builder.fadd(_pick(builder, a, b, starts), _pick(builder, a, b, [k + width // 2 for k in starts]))


@intrinsic
def _add_totals(typing: Any, array: Any, index: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """array[index : index + 4] += the sums of a, b, c and d over the examples."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array_value, at, *values = args
        halves = [_fold(builder, *values[:2], LANES), _fold(builder, *values[2:], LANES)]
        rest = _fold(builder, *halves, LANES // 2)  # four lanes of a, four of b, of c, of d
        for step in (2, 1):
            kept = [k for k in range(step * 8) if k % (2 * step) < step]
            rest = builder.fadd(
                _pick(builder, rest, rest, kept), _pick(builder, rest, rest, [k + step for k in kept])
            )
        place = _address(context, builder, array, array_value, at, rest.type)
        builder.store(builder.fadd(builder.load(place, align=4), rest), place, align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, _lanes, _lanes, _lanes, _lanes), generate


def _arithmetic(operation: Any, instruction: str) -> None:
    """Teach Numba `a + b` and the like."""

    @intrinsic
    def compute(typing: Any, a: Any, b: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return getattr(builder, instruction)(*args)

        return _lanes(_lanes, _lanes), generate

    @overload(operation)
    def typed(a, b):  # type: ignore[no-untyped-def]
        return (lambda a, b: compute(a, b)) if a is _lanes and b is _lanes else None


for _operation, _instruction in [
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
]:
    _arithmetic(_operation, _instruction)

f4 = np.float32
_OPTIONS = {"nogil": True, "error_model": "numpy", "boundscheck": False}
_inner = numba.njit(**_OPTIONS)


def _job(function: Callable[..., None]) -> Callable[..., None]:
    """Compile at the first call, and keep the result on disk where there is a place for it."""
    try:
        return numba.njit(cache=True, **_OPTIONS)(function)
    except RuntimeError:  # neither this directory nor the user's cache can be written
        return numba.njit(**_OPTIONS)(function)


@_inner
def _exp(x):  # type: ignore[no-untyped-def]
    """e^x for x ≤ 0, to 2 units in the last place: 2ⁿ · e^rest with a polynomial for |rest| ≤ ln 2 / 2."""
    x = _larger(_splat(f4(-87.0)), x)
    shifted = _fma(x, _splat(f4(1.44269504)), _splat(f4(12582912.0)))  # + 1.5 · 2²³ rounds to a whole number
    n = shifted - _splat(f4(12582912.0))
    rest = _fma(n, _splat(f4(2.12194440e-4)), _fma(n, _splat(f4(-0.693359375)), x))
    y = _fma(_splat(f4(1.9875691500e-4)), rest, _splat(f4(1.3981999507e-3)))
    y = _fma(y, rest, _splat(f4(8.3334519073e-3)))
    y = _fma(y, rest, _splat(f4(4.1665795894e-2)))
    y = _fma(y, rest, _splat(f4(1.6666665459e-1)))
    y = _fma(y, rest, _splat(f4(5.0000001201e-1)))
    y = _fma(y, rest * rest, rest + _splat(f4(1.0)))
    return y * _power_of_two(shifted)


@_inner
def _scratch(size):  # type: ignore[no-untyped-def]
    """Zeros that start on a cache line: a vector across two lines takes twice as long to load."""
    room = np.zeros(size + LANES, f4)
    start = -(room.ctypes.data // 4) % LANES
    return room[start : start + size]


@_inner
def _copy(x, x_at, out, out_at, count):  # type: ignore[no-untyped-def]
    for k in range(0, count, LANES):
        _store(out, out_at + k, _load(x, x_at + k))


# ---- One lower capsule, one tile of examples ----


@_inner
def _multiply(W, at, block, column, rows, columns, x, x_at, out, out_at):  # type: ignore[no-untyped-def]
    """out = M x, eight rows at a time, where M[8 r + k, c] = W[at + r·block + c·column + k]."""
    for r in range(0, rows, 8):
        y0 = y1 = y2 = y3 = y4 = y5 = y6 = y7 = _splat(f4(0.0))
        m, k = at, x_at
        for _ in range(columns):
            value = _load(x, k)
            y0 = _fma(_spread(W, m), value, y0)
            y1 = _fma(_spread(W, m + 1), value, y1)
            y2 = _fma(_spread(W, m + 2), value, y2)
            y3 = _fma(_spread(W, m + 3), value, y3)
            y4 = _fma(_spread(W, m + 4), value, y4)
            y5 = _fma(_spread(W, m + 5), value, y5)
            y6 = _fma(_spread(W, m + 6), value, y6)
            y7 = _fma(_spread(W, m + 7), value, y7)
            m += column
            k += LANES
        here = out_at + r * LANES
        _store(out, here, y0)
        _store(out, here + LANES, y1)
        _store(out, here + 2 * LANES, y2)
        _store(out, here + 3 * LANES, y3)
        _store(out, here + 4 * LANES, y4)
        _store(out, here + 5 * LANES, y5)
        _store(out, here + 6 * LANES, y6)
        _store(out, here + 7 * LANES, y7)
        at += block


@_inner
def _agree(u_hat, j, q, V, V_at):  # type: ignore[no-untyped-def]
    """û_j · V_j."""
    y0 = y1 = y2 = y3 = _splat(f4(0.0))
    k = j * q * LANES
    for _ in range(q // 4):
        y0 = _fma(_load(u_hat, k), _load(V, V_at + k), y0)
        y1 = _fma(_load(u_hat, k + LANES), _load(V, V_at + k + LANES), y1)
        y2 = _fma(_load(u_hat, k + 2 * LANES), _load(V, V_at + k + 2 * LANES), y2)
        y3 = _fma(_load(u_hat, k + 3 * LANES), _load(V, V_at + k + 3 * LANES), y3)
        k += 4 * LANES
    for _ in range(q % 4):
        y0 = _fma(_load(u_hat, k), _load(V, V_at + k), y0)
        k += LANES
    return (y0 + y1) + (y2 + y3)


@_inner
def _couple(u_hat, V, V_at, js, q, leaky, c):  # type: ignore[no-untyped-def]
    """c = softmax over j of û_j · V_j, with one more logit 0 where it is leaky."""
    top = _splat(f4(0.0 if leaky else -np.inf))
    for j in range(js):
        logit = _agree(u_hat, j, q, V, V_at)
        _store(c, j * LANES, logit)
        top = _larger(top, logit)
    total = _exp(_splat(f4(0.0)) - top) if leaky else _splat(f4(0.0))
    for j in range(js):
        share = _exp(_load(c, j * LANES) - top)
        _store(c, j * LANES, share)
        total = total + share
    scale = _splat(f4(1.0)) / total
    for j in range(js):
        _store(c, j * LANES, _load(c, j * LANES) * scale)


@_inner
def _couple_backward(u_hat, g_s, g_at, js, q, c, delta):  # type: ignore[no-untyped-def]
    """δ = c (g_c − Σ_j c g_c) with g_c = û_j · g_s."""
    mean = _splat(f4(0.0))
    for j in range(js):
        g_c = _agree(u_hat, j, q, g_s, g_at)
        _store(delta, j * LANES, g_c)
        mean = _fma(_load(c, j * LANES), g_c, mean)
    for j in range(js):
        _store(delta, j * LANES, _load(c, j * LANES) * (_load(delta, j * LANES) - mean))


@_inner
def _add_scaled(c, x, x_at, js, q, out, out_at):  # type: ignore[no-untyped-def]
    """out_j += c_j x_j."""
    for j in range(js):
        share = _load(c, j * LANES)
        for k in range(j * q * LANES, (j + 1) * q * LANES, LANES):
            _store(out, out_at + k, _fma(share, _load(x, x_at + k), _load(out, out_at + k)))


@_inner
def _add_mixed(c, g_s, delta, V, at, js, q, start, start_at, out, out_at):  # type: ignore[no-untyped-def]
    """out_j = start_j + c_j g_s + δ_j V_j."""
    for j in range(js):
        share, change = _load(c, j * LANES), _load(delta, j * LANES)
        for k in range(j * q * LANES, (j + 1) * q * LANES, LANES):
            total = _fma(share, _load(g_s, at + k), _load(start, start_at + k))
            _store(out, out_at + k, _fma(change, _load(V, at + k), total))


@_inner
def _add_outer(g, g_at, g_step, u, tiles, rows, ps, g_W, at):  # type: ignore[no-untyped-def]
    """g_W[r, p] += Σ over tiles and lanes of g_r u_p, for pairs of rows and four p at a time; u is (tile, p, lane)."""
    for r in range(0, rows, 2):
        odd = LANES if r + 1 < rows else 0  # a last row without a partner is computed twice and added once
        for p in range(0, ps, 4):
            y0 = y1 = y2 = y3 = z0 = z1 = z2 = z3 = _splat(f4(0.0))
            k, m = g_at + r * LANES, p * LANES
            for _ in range(tiles):
                y, z = _load(g, k), _load(g, k + odd)
                x0, x1, x2, x3 = _load(u, m), _load(u, m + LANES), _load(u, m + 2 * LANES), _load(u, m + 3 * LANES)
                y0, y1, y2, y3 = _fma(y, x0, y0), _fma(y, x1, y1), _fma(y, x2, y2), _fma(y, x3, y3)
                z0, z1, z2, z3 = _fma(z, x0, z0), _fma(z, x1, z1), _fma(z, x2, z2), _fma(z, x3, z3)
                k += g_step
                m += ps * LANES
            _add_totals(g_W, at + r * ps + p, y0, y1, y2, y3)
            if odd:
                _add_totals(g_W, at + (r + 1) * ps + p, z0, z1, z2, z3)


# ---- The three jobs: a range of lower capsules, for one tile or for all ----


@_job
def _regroup(first, last, W, rows, p, by_eight):  # type: ignore[no-untyped-def]
    """(i, row, p) → (i, row / 8, p, 8) for the lower capsules first … last-1, zeros in rows that are not there."""
    out = first * ((rows + 7) // 8 * 8) * p
    for i in range(first, last):
        for r in range(0, rows, 8):
            for c in range(p):
                for k in range(8):
                    by_eight[out + k] = W[(i * rows + r + k) * p + c] if r + k < rows else f4(0.0)
                out += 8


@_inner
def _vote(i, tile, u, by_eight, i_s, n, rows, p, u_hat):  # type: ignore[no-untyped-def]
    """û of one lower capsule; rows = j·q, filled up to a multiple of eight."""
    _multiply(by_eight, i % n * rows * p, 8 * p, 8, rows, p, u, (tile * i_s + i) * p * LANES, u_hat, 0)


@_job
def _route(tile, first, last, u, by_eight, i_s, n, js, q, p, leaky, V, s, s_at):  # type: ignore[no-untyped-def]
    """s += Σ_i c û over the lower capsules first … last-1 of one tile."""
    rows = (js * q + 7) // 8 * 8
    u_hat, c = _scratch(rows * LANES), _scratch(js * LANES)
    for i in range(first, last):
        _vote(i, tile, u, by_eight, i_s, n, rows, p, u_hat)
        _couple(u_hat, V, tile * js * q * LANES, js, q, leaky, c)
        _add_scaled(c, u_hat, 0, js, q, s, s_at)


@_job
def _pull(tile, first, last, u, by_eight, i_s, n, js, q, p, leaky, V, g_s, g_V, g_at):  # type: ignore[no-untyped-def]
    """g_V += Σ_i δ û over the lower capsules first … last-1 of one tile."""
    rows = (js * q + 7) // 8 * 8
    u_hat, c, delta = _scratch(rows * LANES), _scratch(js * LANES), _scratch(js * LANES)
    here = tile * js * q * LANES
    for i in range(first, last):
        _vote(i, tile, u, by_eight, i_s, n, rows, p, u_hat)
        _couple(u_hat, V, here, js, q, leaky, c)
        _couple_backward(u_hat, g_s, here, js, q, c, delta)
        _add_scaled(delta, u_hat, 0, js, q, g_V, g_at)


@_inner
def _vote_gradient(u_hat, V, g_s, at, step, steps, js, q, leaky, through, c, delta, g, g_at):  # type: ignore[no-untyped-def]
    """g_û += c g_s + δ V of every iteration, for one lower capsule and one tile."""
    for _ in range(steps):
        _couple(u_hat, V, at, js, q, leaky, c)
        if through:
            _couple_backward(u_hat, g_s, at, js, q, c, delta)
        _add_mixed(c, g_s, delta, V, at, js, q, g, g_at, g, g_at)
        at += step


@_job
def _finish(  # type: ignore[no-untyped-def]
    first, last, u, by_eight, i_s, n, js, q, p, leaky, W, tiles, steps, V, g_s, uniform, through, g_u, g_W
):
    """g_u and g_W for the transformations first … last-1, all tiles; `uniform` is g_û of the first iteration."""
    rows, full, span = js * q, (js * q + 7) // 8 * 8, js * q * LANES
    u_hat, c, delta = _scratch(full * LANES), _scratch(js * LANES), _scratch(js * LANES)
    held = max(1, min(tiles, HELD // (BLOCK * span * 4)))
    g, u_i = _scratch(BLOCK * held * span), _scratch(held * p * LANES)
    for start in range(first, last, BLOCK):
        for position in range(0, i_s, n):
            low, high = position + start, position + min(start + BLOCK, last)
            for near in range(0, tiles, held):
                far = min(near + held, tiles)
                for tile in range(near, far):
                    for i in range(low, high):
                        here = ((i - low) * held + tile - near) * span
                        _copy(uniform, tile * span, g, here, span)
                        if steps:
                            _vote(i, tile, u, by_eight, i_s, n, full, p, u_hat)
                        _vote_gradient(
                            u_hat, V, g_s, tile * span, tiles * span, steps, js, q, leaky, through, c, delta, g, here
                        )
                        _multiply(W, i % n * rows * p, 8, p, p, rows, g, here, g_u, (tile * i_s + i) * p * LANES)
                for i in range(low, high):
                    for tile in range(near, far):  # side by side: far apart they fight for the same cache sets
                        _copy(u, (tile * i_s + i) * p * LANES, u_i, (tile - near) * p * LANES, p * LANES)
                    _add_outer(g, (i - low) * held * span, span, u_i, far - near, rows, p, g_W, i % n * rows * p)


# ---- Threads, and the votes themselves ----


@cache
def _openmp() -> Any:
    """The function that starts PyTorch's own OpenMP threads, or None where PyTorch is built otherwise."""
    try:
        start = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).GOMP_parallel
    except (OSError, AttributeError):
        return None
    start.argtypes, start.restype = [_TEAM_MEMBER, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return start


def _run(job: Callable[..., None], jobs: list[tuple[Any, ...]]) -> None:
    """Run the jobs on as many threads as PyTorch uses; each takes the next when it is done with one.

    They are PyTorch's own threads if possible: after a parallel operation those spin for milliseconds, waiting for
    the next, and threads of ours would have to share the cores with them.
    """
    queue, failures = iter(jobs), []

    def work(_: object = None) -> None:
        try:
            for arguments in queue:
                job(*arguments)
        except BaseException as failure:  # an exception must not unwind through OpenMP
            failures.append(failure)

    threads, start = min(torch.get_num_threads(), len(jobs)), _openmp()
    if threads == 1:
        work()
    elif start is not None:
        start(_TEAM_MEMBER(work), None, threads, 0)
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, range(threads)))
    if failures:
        raise failures[0]


def _parts(total: int, count: int) -> list[tuple[int, int]]:
    """The range of `total` in about `count` parts, whole blocks each."""
    step = -(-total // (count * BLOCK)) * BLOCK
    return [(start, min(start + step, total)) for start in range(0, total, step)]


def _flat(x: Tensor) -> np.ndarray:
    return x.detach().contiguous().view(-1).numpy()


class FusedVotes:
    """`capsnet.kernels.routing.Votes` for float32 on a CPU, every lower capsule with transformations of its own."""

    def __init__(self, u: Tensor, W: Tensor, leaky: bool) -> None:
        self.b, self.i, _ = u.shape
        self.n, self.j, self.q, self.true_p = W.shape
        self.tiles = -(-self.b // LANES)
        self.leaky = leaky
        # the loops take eight rows of W, and of its transpose, at a time; zeros up to a multiple of eight do no harm
        self.p = -(-self.true_p // 8) * 8
        u, W = (torch.nn.functional.pad(x, (0, self.p - self.true_p)) for x in (u, W))
        by_eight = torch.empty(self.n * -(-self.j * self.q // 8) * 8 * self.p)
        rest = (_flat(W), self.j * self.q, self.p, _flat(by_eight))
        _run(_regroup, [(*part, *rest) for part in _parts(self.n, JOBS)])
        self.u, self.W = self._tiled(u), W
        self.common = (_flat(self.u), _flat(by_eight), self.i, self.n, self.j, self.q, self.p, leaky)
        self.pulled: list[tuple[Tensor, Tensor]] = []
        self.first = torch.zeros(self.tiles, self.j, self.q, LANES)
        self.through = True

    def route(self, V: Tensor | None) -> Tensor:
        V = torch.zeros(self.b, self.j, self.q) if V is None else V
        return self._sum_over_capsules(_route, self._tiled(V))

    def pull(self, V: Tensor | None, g_s: Tensor, through_couplings: bool) -> Tensor | None:
        self.through = through_couplings
        if V is None:
            self.first = self._tiled(g_s / (self.j + self.leaky))
            return None
        self.pulled.append((self._tiled(V), self._tiled(g_s)))
        return self._sum_over_capsules(_pull, *self.pulled[-1]) if through_couplings else None

    def gradients(self) -> tuple[Tensor, Tensor]:
        g_u, g_W = torch.empty_like(self.u), torch.zeros(self.n, self.j, self.q, self.p)
        steps = len(self.pulled)
        V, g_s = (torch.stack(x) for x in zip(*self.pulled, strict=True)) if steps else (self.first, self.first)
        rest = (_flat(self.W), self.tiles, steps, _flat(V), _flat(g_s), _flat(self.first), self.through, _flat(g_u), _flat(g_W))
        _run(_finish, [(*part, *self.common, *rest) for part in _parts(self.n, JOBS)])
        return self._untiled(g_u)[..., : self.true_p].contiguous(), g_W[..., : self.true_p].contiguous()

    def _sum_over_capsules(self, job: Callable[..., None], *inputs: Tensor) -> Tensor:
        """Every job has a tile and a part of the lower capsules; the parts are added in order. → (b, j, q)."""
        parts = _parts(self.i, -(-JOBS // self.tiles))
        out = torch.zeros(len(parts), self.tiles, self.j, self.q, LANES)
        flat, arguments, size = _flat(out), [_flat(x) for x in inputs], out[0, 0].numel()
        _run(
            job,
            [
                (tile, *part, *self.common, *arguments, flat, (k * self.tiles + tile) * size)
                for tile in range(self.tiles)
                for k, part in enumerate(parts)
            ],
        )
        return self._untiled(out.sum(0))

    def _tiled(self, x: Tensor) -> Tensor:
        """(b, x, y) → (tile, x, y, lane); the last tile is filled up with zeros."""
        padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, self.tiles * LANES - self.b))
        return padded.unflatten(0, (self.tiles, LANES)).permute(0, 2, 3, 1).contiguous()

    def _untiled(self, x: Tensor) -> Tensor:
        """(tile, x, y, lane) → (b, x, y)."""
        return x.permute(0, 3, 1, 2).flatten(0, 1)[: self.b].contiguous()
