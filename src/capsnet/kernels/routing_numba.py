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

import operator
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
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


def _address(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), _ir_lanes.as_pointer())


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


@intrinsic
def _splat(typing: Any, number: Any) -> Any:
    """The same number for every example."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        one = builder.insert_element(ir.Constant(_ir_lanes, ir.Undefined), args[0], ir.Constant(ir.IntType(32), 0))
        zeros = ir.Constant(_ir_bits, [0] * LANES)
        return builder.shuffle_vector(one, one, zeros)

    return _lanes(types.float32), generate


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


@intrinsic
def _total(typing: Any, value: Any) -> Any:
    """The sum over the examples, halves first."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rest, width = args[0], LANES
        while width > 1:
            width //= 2
            halves = [
                builder.shuffle_vector(
                    rest, rest, ir.Constant(ir.VectorType(ir.IntType(32), width), list(range(k, k + width)))
                )
                for k in (0, width)
            ]
            rest = builder.fadd(*halves)
        return builder.extract_element(rest, ir.Constant(ir.IntType(32), 0))

    return types.float32(_lanes), generate


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

_jit = numba.njit(nogil=True, cache=True, error_model="numpy", boundscheck=False)
f4 = np.float32


@_jit
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


# ---- One lower capsule, one tile of examples ----


@_jit
def _multiply(W, at, row, column, rows, columns, x, x_at, out, out_at):  # type: ignore[no-untyped-def]
    """out = M x for the matrix M[r, c] = W[at + r·row + c·column], four rows at a time."""
    r = 0
    while r + 4 <= rows:
        a = b = c = d = _splat(f4(0.0))
        m = at + r * row
        for k in range(columns):
            value = _load(x, x_at + k * LANES)
            a = _fma(_splat(W[m]), value, a)
            b = _fma(_splat(W[m + row]), value, b)
            c = _fma(_splat(W[m + 2 * row]), value, c)
            d = _fma(_splat(W[m + 3 * row]), value, d)
            m += column
        _store(out, out_at + r * LANES, a)
        _store(out, out_at + (r + 1) * LANES, b)
        _store(out, out_at + (r + 2) * LANES, c)
        _store(out, out_at + (r + 3) * LANES, d)
        r += 4
    while r < rows:
        a = _splat(f4(0.0))
        for k in range(columns):
            a = _fma(_splat(W[at + r * row + k * column]), _load(x, x_at + k * LANES), a)
        _store(out, out_at + r * LANES, a)
        r += 1


@_jit
def _agree(u_hat, j, q, V, V_at):  # type: ignore[no-untyped-def]
    """û_j · V_j."""
    even = odd = _splat(f4(0.0))
    for k in range(j * q, j * q + q - 1, 2):
        even = _fma(_load(u_hat, k * LANES), _load(V, V_at + k * LANES), even)
        odd = _fma(_load(u_hat, (k + 1) * LANES), _load(V, V_at + (k + 1) * LANES), odd)
    if q % 2:
        k = j * q + q - 1
        even = _fma(_load(u_hat, k * LANES), _load(V, V_at + k * LANES), even)
    return even + odd


@_jit
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


@_jit
def _couple_backward(u_hat, g_s, g_at, js, q, c, delta):  # type: ignore[no-untyped-def]
    """δ = c (g_c − Σ_j c g_c) with g_c = û_j · g_s."""
    mean = _splat(f4(0.0))
    for j in range(js):
        g_c = _agree(u_hat, j, q, g_s, g_at)
        _store(delta, j * LANES, g_c)
        mean = _fma(_load(c, j * LANES), g_c, mean)
    for j in range(js):
        _store(delta, j * LANES, _load(c, j * LANES) * (_load(delta, j * LANES) - mean))


@_jit
def _add_scaled(c, x, x_at, js, q, out, out_at):  # type: ignore[no-untyped-def]
    """out_j += c_j x_j."""
    for j in range(js):
        share = _load(c, j * LANES)
        for k in range(j * q * LANES, (j + 1) * q * LANES, LANES):
            _store(out, out_at + k, _fma(share, _load(x, x_at + k), _load(out, out_at + k)))


@_jit
def _add_outer(g, g_at, g_step, u, u_at, u_step, tiles, rows, ps, g_W, at):  # type: ignore[no-untyped-def]
    """g_W[r, p] += Σ over tiles and lanes of g_r u_p."""
    for r in range(rows):
        p = 0
        while p + 4 <= ps:
            a = b = c = d = _splat(f4(0.0))
            k, m = g_at + r * LANES, u_at + p * LANES
            for _ in range(tiles):
                value = _load(g, k)
                a = _fma(value, _load(u, m), a)
                b = _fma(value, _load(u, m + LANES), b)
                c = _fma(value, _load(u, m + 2 * LANES), c)
                d = _fma(value, _load(u, m + 3 * LANES), d)
                k += g_step
                m += u_step
            here = at + r * ps + p
            g_W[here] += _total(a)
            g_W[here + 1] += _total(b)
            g_W[here + 2] += _total(c)
            g_W[here + 3] += _total(d)
            p += 4
        while p < ps:
            a = _splat(f4(0.0))
            for t in range(tiles):
                a = _fma(_load(g, g_at + r * LANES + t * g_step), _load(u, u_at + p * LANES + t * u_step), a)
            g_W[at + r * ps + p] += _total(a)
            p += 1


# ---- The three jobs: a range of lower capsules, for one tile or for all ----


@_jit
def _route(tile, first, last, u, W, n, js, q, p, leaky, V, s, s_at):  # type: ignore[no-untyped-def]
    """s += Σ_i c û over the lower capsules first … last-1 of one tile."""
    rows = js * q
    u_hat, c = np.empty(rows * LANES, f4), np.empty(js * LANES, f4)
    for i in range(first, last):
        _multiply(W, i * rows * p, p, 1, rows, p, u, (tile * n + i) * p * LANES, u_hat, 0)
        _couple(u_hat, V, tile * rows * LANES, js, q, leaky, c)
        _add_scaled(c, u_hat, 0, js, q, s, s_at)


@_jit
def _pull(tile, first, last, u, W, n, js, q, p, leaky, V, g_s, g_V, g_at):  # type: ignore[no-untyped-def]
    """g_V += Σ_i δ û over the lower capsules first … last-1 of one tile."""
    rows = js * q
    u_hat, c, delta = np.empty(rows * LANES, f4), np.empty(js * LANES, f4), np.empty(js * LANES, f4)
    here = tile * rows * LANES
    for i in range(first, last):
        _multiply(W, i * rows * p, p, 1, rows, p, u, (tile * n + i) * p * LANES, u_hat, 0)
        _couple(u_hat, V, here, js, q, leaky, c)
        _couple_backward(u_hat, g_s, here, js, q, c, delta)
        _add_scaled(delta, u_hat, 0, js, q, g_V, g_at)


@_jit
def _vote_gradient(u_hat, V, g_s, at, step, steps, js, q, leaky, through, c, delta, g, g_at):  # type: ignore[no-untyped-def]
    """g_û += c g_s + δ V of every iteration, for one lower capsule and one tile."""
    for _ in range(steps):
        _couple(u_hat, V, at, js, q, leaky, c)
        _add_scaled(c, g_s, at, js, q, g, g_at)
        if through:
            _couple_backward(u_hat, g_s, at, js, q, c, delta)
            _add_scaled(delta, V, at, js, q, g, g_at)
        at += step


@_jit
def _finish(  # type: ignore[no-untyped-def]
    first, last, u, W, n, js, q, p, leaky, tiles, steps, V, g_s, uniform, through, g_u, g_W
):
    """g_u and g_W of the lower capsules first … last-1, all tiles; `uniform` is g_û of the first iteration."""
    rows, span = js * q, js * q * LANES
    u_hat, c, delta = np.empty(span, f4), np.empty(js * LANES, f4), np.empty(js * LANES, f4)
    held = max(1, min(tiles, HELD // (BLOCK * span * 4)))
    g = np.empty(BLOCK * held * span, f4)
    for start in range(first, last, BLOCK):
        stop = min(start + BLOCK, last)
        for low in range(0, tiles, held):
            high = min(low + held, tiles)
            for tile in range(low, high):
                for i in range(start, stop):
                    here, at, x = ((i - start) * held + tile - low) * span, i * rows * p, (tile * n + i) * p * LANES
                    g[here : here + span] = uniform[tile * span : (tile + 1) * span]
                    if steps:
                        _multiply(W, at, p, 1, rows, p, u, x, u_hat, 0)
                    _vote_gradient(
                        u_hat, V, g_s, tile * span, tiles * span, steps, js, q, leaky, through, c, delta, g, here
                    )
                    _multiply(W, at, 1, p, p, rows, g, here, g_u, x)
            for i in range(start, stop):
                x = (low * n + i) * p * LANES
                _add_outer(
                    g, (i - start) * held * span, span, u, x, n * p * LANES, high - low, rows, p, g_W, i * rows * p
                )


# ---- Threads, and the votes themselves ----


@cache
def _pool(workers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(workers, thread_name_prefix="capsnet-routing")


def _run(job: Callable[..., None], jobs: list[tuple[Any, ...]]) -> None:
    """Run the jobs on as many threads as PyTorch uses, this one among them; each takes the next when it is done."""
    queue = iter(jobs)

    def work() -> None:
        for arguments in queue:
            job(*arguments)

    workers = min(torch.get_num_threads(), len(jobs)) - 1
    others = [_pool(torch.get_num_threads() - 1).submit(work) for _ in range(workers)]
    work()
    for other in others:
        other.result()


def _flat(x: Tensor) -> np.ndarray:
    return x.detach().contiguous().view(-1).numpy()


class FusedVotes:
    """`capsnet.kernels.routing.Votes` for float32 on a CPU, every lower capsule with transformations of its own."""

    def __init__(self, u: Tensor, W: Tensor, leaky: bool) -> None:
        self.b = u.shape[0]
        self.n, self.j, self.q, self.p = W.shape
        self.tiles = -(-self.b // LANES)
        self.leaky = leaky
        self.u = self._tiled(u)
        self.common = (_flat(self.u), _flat(W), self.n, self.j, self.q, self.p, leaky)
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
        rest = (self.tiles, steps, _flat(V), _flat(g_s), _flat(self.first), self.through, _flat(g_u), _flat(g_W))
        _run(_finish, [(*part, *self.common, *rest) for part in self._parts(JOBS)])
        return self._untiled(g_u), g_W

    def _sum_over_capsules(self, job: Callable[..., None], *inputs: Tensor) -> Tensor:
        """Every job has a tile and a part of the lower capsules; the parts are added in order. → (b, j, q)."""
        parts = self._parts(-(-JOBS // self.tiles))
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

    def _parts(self, count: int) -> list[tuple[int, int]]:
        """The lower capsules in about `count` ranges, whole blocks each."""
        step = -(-self.n // (count * BLOCK)) * BLOCK
        return [(start, min(start + step, self.n)) for start in range(0, self.n, step)]

    def _tiled(self, x: Tensor) -> Tensor:
        """(b, x, y) → (tile, x, y, lane); the last tile is filled up with zeros."""
        padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, self.tiles * LANES - self.b))
        return padded.unflatten(0, (self.tiles, LANES)).permute(0, 2, 3, 1).contiguous()

    def _untiled(self, x: Tensor) -> Tensor:
        """(tile, x, y, lane) → (b, x, y)."""
        return x.permute(0, 3, 1, 2).flatten(0, 1)[: self.b].contiguous()
