"""A vector type with one float32 for each of sixteen examples, for the compiled loops of the routing kernels.

Numba vectorises a loop over arrays only if it can prove that this is safe, which fails for most loops of routing. Here
the vector is an explicit type: `a + b`, `fma(a, b, c)` and `exp(a)` operate on sixteen examples, and the code reads as
if it were written for one. LLVM maps the type to one AVX-512 register, two AVX2 registers or four NEON registers.
Fast-math is off, so NaN propagates. Arrays are flat, contiguous and float32; indices count elements.
"""

# mypy: disable-error-code="no-untyped-def,call-arg,call-overload,var-annotated,import-untyped"
# (functions that Numba compiles have Numba's types, which mypy does not know)

from __future__ import annotations

import operator
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, overload, register_model

from capsnet.kernels.operators import LANES


class _LanesType(types.Type):
    def __init__(self) -> None:
        super().__init__(name="lanes")


_lanes = _LanesType()
_ir_lanes = ir.VectorType(ir.FloatType(), LANES)
_ir_bits = ir.VectorType(ir.IntType(32), LANES)


@register_model(_LanesType)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _ir_lanes)


def _address(context: Any, builder: Any, kind: Any, array: Any, index: Any, target: Any = _ir_lanes) -> Any:
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), target.as_pointer())


@intrinsic
def load(typing: Any, array: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_address(context, builder, array, *args), align=4)

    return _lanes(array, types.intp), generate


@intrinsic
def store(typing: Any, array: Any, index: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], _address(context, builder, array, *args[:2]), align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, _lanes), generate


def _broadcast(builder: Any, number: Any) -> Any:
    one = builder.insert_element(ir.Constant(_ir_lanes, ir.Undefined), number, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(one, one, ir.Constant(_ir_bits, [0] * LANES))


@intrinsic
def splat(typing: Any, number: Any) -> Any:
    """The same number for every example."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _broadcast(builder, args[0])

    return _lanes(types.float32), generate


@intrinsic
def spread(typing: Any, array: Any, index: Any) -> Any:
    """array[index] for every example; unlike Numba's own indexing it never counts from the end."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(array)(context, builder, args[0]).data
        return _broadcast(builder, builder.load(builder.gep(data, [args[1]])))

    return _lanes(array, types.intp), generate


@intrinsic
def fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a · b + c."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        name = f"llvm.fma.v{LANES}f32"
        kind = ir.FunctionType(_ir_lanes, [_ir_lanes] * 3)
        return builder.call(builder.module.globals.get(name) or ir.Function(builder.module, kind, name), args)

    return _lanes(_lanes, _lanes, _lanes), generate


@intrinsic
def larger(typing: Any, a: Any, b: Any) -> Any:
    """a where a > b, else b: a NaN in b stays."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", *args), *args)

    return _lanes(_lanes, _lanes), generate


@intrinsic
def power_of_two(typing: Any, shifted: Any) -> Any:
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
def add_totals(typing: Any, array: Any, index: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """array[index : index + 4] += the sums of a, b, c and d over the examples."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array_value, at, *values = args
        halves = [_fold(builder, *values[:2], LANES), _fold(builder, *values[2:], LANES)]
        rest = _fold(builder, *halves, LANES // 2)  # four lanes of a, four of b, of c, of d
        for step in (2, 1):
            kept = [k for k in range(step * 8) if k % (2 * step) < step]
            rest = builder.fadd(_pick(builder, rest, rest, kept), _pick(builder, rest, rest, [k + step for k in kept]))
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
    def typed(a, b):
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
inner = numba.njit(**_OPTIONS)


def compiled(function: Callable[..., None]) -> Callable[..., None]:
    """Compile at the first call, and keep the result on disk where there is a place for it.

    Numba names the file on disk after the function, and takes it for stale when the function's own file has changed.
    What is inlined from here must count too, so a fingerprint of both files goes into the name.
    """
    try:
        sources = Path(function.__code__.co_filename).read_bytes() + Path(__file__).read_bytes()
        function.__qualname__ += f"_{sha256(sources).hexdigest()[:12]}"
        return numba.njit(cache=True, **_OPTIONS)(function)
    except (OSError, RuntimeError):  # there is no source to read, or neither this directory nor the user's cache
        return numba.njit(**_OPTIONS)(function)  # can be written


@inner
def exp(x):
    """e^x for x ≤ 0, to 2 units in the last place: 2ⁿ · e^rest with a polynomial for |rest| ≤ ln 2 / 2."""
    x = larger(splat(f4(-87.0)), x)
    shifted = fma(x, splat(f4(1.44269504)), splat(f4(12582912.0)))  # + 1.5 · 2²³ rounds to a whole number
    n = shifted - splat(f4(12582912.0))
    rest = fma(n, splat(f4(2.12194440e-4)), fma(n, splat(f4(-0.693359375)), x))
    y = fma(splat(f4(1.9875691500e-4)), rest, splat(f4(1.3981999507e-3)))
    y = fma(y, rest, splat(f4(8.3334519073e-3)))
    y = fma(y, rest, splat(f4(4.1665795894e-2)))
    y = fma(y, rest, splat(f4(1.6666665459e-1)))
    y = fma(y, rest, splat(f4(5.0000001201e-1)))
    y = fma(y, rest * rest, rest + splat(f4(1.0)))
    return y * power_of_two(shifted)


@inner
def softmax(x, count, leaky):
    """The softmax of x[:count], in place of the logits; if leaky, one more logit of 0 takes a share that is dropped."""
    top = splat(f4(0.0 if leaky else -np.inf))
    for k in range(0, count, LANES):
        top = larger(top, load(x, k))
    total = exp(splat(f4(0.0)) - top) if leaky else splat(f4(0.0))
    for k in range(0, count, LANES):
        share = exp(load(x, k) - top)
        store(x, k, share)
        total = total + share
    scale = splat(f4(1.0)) / total
    for k in range(0, count, LANES):
        store(x, k, load(x, k) * scale)


@inner
def scratch(size):
    """Zeros that start on a cache line: a vector across two lines takes twice as long to load."""
    room = np.zeros(size + LANES, f4)
    start = -(room.ctypes.data // 4) % LANES
    return room[start : start + size]


@inner
def copy(x, x_at, out, out_at, count):
    """count numbers, a multiple of the lanes."""
    for k in range(0, count, LANES):
        store(out, out_at + k, load(x, x_at + k))
