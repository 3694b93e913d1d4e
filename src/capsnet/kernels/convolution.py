"""Convolution with about a quarter of the multiply-adds: a faster equivalent of `F.conv2d` without padding.

The convolution of PrimaryCaps (section 4: 9 × 9, stride 2, 256 → 256 channels, 20 × 20 → 6 × 6) takes 191 M of the
202 M multiply-adds of the forward pass of one image. A convolution is bilinear, and every bilinear map has the form

    Y = A·[(G·w) ⊙ (B·x)]

with constant matrices: G transforms the taps of a filter, B the positions of an image, and A the products. Each row of
⊙ is one matrix product over channels, (b × c)·(c × o), for all images of a batch. `bilinear` provides the matrices:

1. Stride 2 splits the image into four interleaved phases of 10 × 10, 10 × 9, 9 × 10 and 9 × 9 positions, with
   5 × 5, 5 × 4, 4 × 5 and 4 × 4 taps.
2. In each phase, polynomials with 10 × 10 (or 9) coefficients are multiplied through their values, which takes 132,
   120, 120 and 109 products of 256 × 256 numbers per image: 31.5 M multiply-adds instead of 191 M, 6 times fewer.
3. The transforms add 11.2 M per image for B, 1.2 M per image for A, and 645 M per batch for G (5 M per image if
   b = 128). The data are stored as (position, image, channel), so all of them are matrix products with a small constant
   factor.

The total is 49 M instead of 191 M at b = 128, 3.9 times fewer. The backward pass uses the transposed matrices. In
float32 the result is as accurate as a float32 sum of 20736 products: the relative error is 1e-6 for the output and
3e-6 for the gradients. Only the constants are cached between calls. The backward pass keeps B·x instead of x, and in
bfloat16 G·w, too, if the gradient of x is wanted: six times as many numbers as weights, whatever the batch size.

Large images are cut into tiles, which are treated as images. `best_tile` compares the estimated cost with that of the
plain convolution. `stem` fuses this convolution with the convolution and ReLU before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import inf, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from capsnet.kernels.bilinear import (
    PRECISIONS,
    Algorithm,
    Pair,
    Phase,
    algorithm,
    keeps_filters,
    multiply,
    multiply_backward,
    phase_sizes,
)
from capsnet.kernels.operators import differentiable_once

OPERATOR = 25e6 / 30  # measured cost of one operator call, in multiply-adds

# --- Images to phases and back ----------------------------------------------------------------------------


def out_size(size: tuple[int, ...], kernel: tuple[int, ...], stride: int) -> Pair:
    return (size[-2] - kernel[-2]) // stride + 1, (size[-1] - kernel[-1]) // stride + 1


def _tiles(tile: Pair, out: Pair) -> list[tuple[Pair, Pair]]:
    """For each tile its first output, and how many rows and columns of it the tiles before have covered."""
    h, w = (
        [(min(k, length - size), max(0, k + size - length)) for k in range(0, length, size)]
        for size, length in zip(tile, out, strict=True)
    )
    return [((i, j), (di, dj)) for i, di in h for j, dj in w]


def window(phase: Phase, stride: int, corner: Pair = (0, 0)) -> tuple[slice, slice]:
    """Rows and columns of the input that make up the phase's image for the tile at this output."""
    h, w = (
        slice(at * stride + start, (at + n - 1) * stride + start + 1, stride)
        for at, start, n in zip(corner, phase.start, phase.inputs, strict=True)
    )
    return h, w


def to_output(Y: Tensor, bias: Tensor | None, tile: Pair, out: Pair, b: int) -> Tensor:
    """(tile outputs, tiles·b·o) to (b, o, h, w), channels last in memory."""
    tiles = _tiles(tile, out)
    Y = Y.view(*tile, len(tiles), b, -1)
    y = empty_output(Y, b, Y.shape[-1], out)
    last = y.permute(0, 2, 3, 1)
    for t, ((i, j), _) in enumerate(tiles):
        last[:, i : i + tile[0], j : j + tile[1]] = Y[:, :, t].permute(2, 0, 1, 3)
    if bias is not None:
        last += bias
    return y


def empty_output(like: Tensor, b: int, o: int, out: Pair) -> Tensor:
    """An empty result (b, o, h, w). It is not a view, so that a ReLU after it can work in place."""
    last = torch.channels_last
    return torch.empty((b, o, *out), dtype=torch.float32, device=like.device, memory_format=last)


def from_output(grad: Tensor, tile: Pair) -> Tensor:
    """(b, o, h, w) to (tile outputs, tiles·b, o); outputs that two tiles share count in the first one only."""
    b, o, h, w = grad.shape
    tiles = _tiles(tile, (h, w))
    G = grad.new_zeros((*tile, len(tiles), b, o), dtype=torch.float32)
    for t, ((i, j), (di, dj)) in enumerate(tiles):
        G[di:, dj:, t] = grad[:, :, i + di : i + tile[0], j + dj : j + tile[1]].permute(2, 3, 0, 1)
    return G.view(prod(tile), -1, o)


def plan_for(weight: Tensor, stride: int, tile: list[int], precision: str) -> Algorithm:
    kernel = weight.shape[2], weight.shape[3]
    return algorithm(kernel, stride, (tile[0], tile[1]), precision)


def if_wanted(wanted: bool, make: Callable[[], Tensor], like: Tensor) -> Tensor:
    """An operator's schema has no optional results: an empty tensor says that this one was not asked for."""
    return make() if wanted else like.new_empty(0)


# --- The operator: one convolution ------------------------------------------------------------------------


@torch.library.custom_op("capsnet::bilinear_conv2d", mutates_args=())
def _conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, tile: list[int], precision: str, keep: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """The convolution in float32, and the transformed input and filters that are to be kept for the backward pass."""
    plan, out = plan_for(weight, stride, tile, precision), out_size(x.shape, weight.shape, stride)
    (b, c), tiles = x.shape[:2], _tiles(plan.tile, out)
    last = x.contiguous(memory_format=torch.channels_last).permute(0, 2, 3, 1)

    def image(phase: Phase) -> Tensor:
        images = phase.B.new_empty(*phase.inputs, len(tiles), b, c)
        for t, (corner, _) in enumerate(tiles):
            images[:, :, t] = last[:, *window(phase, stride, corner)].permute(1, 2, 0, 3)
        return images.view(prod(phase.inputs), -1)

    with torch.autocast("cpu", enabled=False):
        Y, V, U = multiply(plan, weight, len(tiles) * b, image, keep)
        return to_output(Y, bias, plan.tile, out, b), V, U


@_conv.register_fake
def _(x, weight, bias, stride, tile, precision, keep):  # type: ignore[no-untyped-def]
    out, pair = out_size(x.shape, weight.shape, stride), (tile[0], tile[1])
    y = empty_output(x, x.shape[0], weight.shape[0], out)
    V, U = kept_sizes(weight, stride, pair, precision, len(_tiles(pair, out)) * x.shape[0], keep)
    return y, x.new_empty(V, dtype=PRECISIONS[precision].dtype), x.new_empty(U, dtype=PRECISIONS[precision].dtype)


def kept_sizes(
    weight: Tensor, stride: int, tile: Pair, precision: str, rows: int, keep: Sequence[bool]
) -> tuple[int, int]:
    """How many numbers of the transformed inputs and filters are kept."""
    o, c, *kernel = weight.shape
    products = sum(m for m, _ in phase_sizes((kernel[0], kernel[1]), stride, tile, precision))
    filters = keep[1] and keeps_filters(PRECISIONS[precision].dtype)
    return products * rows * c * keep[0], products * o * c * filters


@torch.library.custom_op("capsnet::bilinear_conv2d_backward", mutates_args=())
def _conv_backward(
    grad: Tensor,
    size: list[int],
    weight: Tensor,
    V: Tensor,
    U: Tensor,
    stride: int,
    tile: list[int],
    precision: str,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias, as far as they are needed."""
    plan, (b, c, h, w) = plan_for(weight, stride, tile, precision), size
    tiles = _tiles(plan.tile, (grad.shape[2], grad.shape[3]))
    grad_x = if_wanted(needs[0], lambda: grad.new_zeros(b, h, w, c), grad)

    def take(phase: Phase, images: Tensor) -> None:
        parts = images.view(*phase.inputs, len(tiles), b, c).permute(2, 3, 0, 1, 4)
        for part, (corner, _) in zip(parts, tiles, strict=True):
            target = grad_x[:, *window(phase, stride, corner)]
            target.copy_(part) if len(tiles) == 1 else target.add_(part)

    with torch.autocast("cpu", enabled=False):
        G = from_output(grad, plan.tile)
        grad_weight = multiply_backward(plan, weight, G, (V, U), needs[1], take if needs[0] else None)
    grad_bias = if_wanted(needs[2], lambda: grad.sum((0, 2, 3)), grad)
    return grad_x.permute(0, 3, 1, 2) if needs[0] else grad_x, grad_weight, grad_bias


@_conv_backward.register_fake
def _(grad, size, weight, V, U, stride, tile, precision, needs):  # type: ignore[no-untyped-def]
    b, c, h, w = size
    grad_x = if_wanted(needs[0], lambda: grad.new_empty(b, h, w, c).permute(0, 3, 1, 2), grad)
    grad_weight = if_wanted(needs[1], lambda: weight.new_empty(weight.shape), weight)
    return grad_x, grad_weight, grad.new_empty(len(weight) if needs[2] else 0)


def _conv_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, _, *ctx.options, _ = inputs
    ctx.size = list(x.shape)
    ctx.save_for_backward(weight, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _conv_gradients(ctx: Any, grad: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    needs = list(ctx.needs_input_grad[:3])
    grads = _conv_backward(grad, ctx.size, *ctx.saved_tensors, *ctx.options, needs)
    return *(g if need else None for g, need in zip(grads, needs, strict=True)), None, None, None, None


_conv.register_autograd(_conv_gradients, setup_context=_conv_save)
differentiable_once(_conv_backward, "convolution")


# --- Choice of the algorithm ------------------------------------------------------------------------------


class Costs(NamedTuple):
    """What the two forms cost on a kind of processor, in units of a float32 multiply-add of a matrix product.

    A multiply-add of plain convolution costs plain · (1 + min(most, narrow / width²)) where the output has that width,
    times `strided` if it has a stride and times `training` if there will be a backward pass.
    """

    plain: float
    narrow: float
    most: float
    strided: float
    training: float
    bilinear: float


# A table and no measurement at run time: the choice changes the last bits of a result, so it may depend on the kind of
# processor, but not on what else the processor was doing when a run was resumed.
USUAL = Costs(plain=0.6, narrow=12, most=5, strided=1, training=1.25, bilinear=1)  # bfloat16 too: both forms gain
AMX = Costs(plain=0.08, narrow=50, most=3, strided=1.75, training=1.8, bilinear=0.73)  # bfloat16 in tiles


def _bilinear_cost(b: int, c: int, o: int, out: Pair, kernel: Pair, stride: int, tile: Pair) -> float:
    """Estimated time of the forward pass in units of one multiply-add; the other costs were measured in that unit.

    It is the time of the exact form; the other precisions use the same choice.
    """
    tiles, phases = (
        prod(-(-n // size) for n, size in zip(out, tile, strict=True)),
        phase_sizes(kernel, stride, tile, "exact"),
    )
    rows, taps = b * tiles, prod(kernel) / min(stride, *kernel) ** 2
    cost = OPERATOR * (30 + (tiles - 1) * (len(phases) + 1))  # a tile is copied once a phase, and its result once
    for m, inputs in phases:
        cost += m * rows * c * o + 0.9 * (m * inputs * rows * c + m * taps * c * o)
        cost += 38 * inputs * rows * c + 21 * m * c * o + 16 * m * rows * o  # memory: x, G·w and the products
    return cost


def _plain_cost(b: int, c: int, o: int, out: Pair, kernel: Pair, stride: int, costs: Costs) -> float:
    """The same for plain convolution, whose loops are faster unless the rows of the output are very short."""
    each = costs.plain * (1 + min(costs.most, costs.narrow / out[1] ** 2)) * (costs.strided if stride > 1 else 1)
    return each * b * c * o * prod(out) * prod(kernel)


@lru_cache(maxsize=1024)
def _best_tile(
    b: int, c: int, o: int, out: Pair, kernel: Pair, stride: int, training: bool, amx: bool = False
) -> Pair | None:
    measured = AMX if amx else USUAL
    plain = _plain_cost(b, c, o, out, kernel, stride, measured) / measured.bilinear
    if plain < 30 * OPERATOR or max(kernel) > 32:
        return None
    sides = [sorted({-(-n // parts) for parts in range(1, n + 1)}) for n in out]
    tiles = [(h, w) for h in sides[0] for w in sides[1] if max(h, w) <= 16]
    costs = {tile: _bilinear_cost(b, c, o, out, kernel, stride, tile) for tile in tiles}
    best = min(costs, key=lambda tile: costs[tile])
    if costs.get(out, inf) < 1.1 * costs[best]:
        best = out  # in one tile a convolution can be fused with the one before it
    return best if costs[best] < 0.8 * (measured.training if training else 1) * plain else None


def best_tile(
    b: int, c: int, o: int, out: Pair, kernel: Pair, stride: int, training: bool, amx: bool = False
) -> Pair | None:
    """The tile of outputs that makes the bilinear form cheapest; None where plain convolution is as good.

    `amx` says that products are computed in bfloat16 by a processor with AMX. The backward pass gains more than the
    forward pass, so without one the bilinear form has to promise more to be chosen.

    >>> best_tile(128, 256, 256, (6, 6), (9, 9), 2, True), best_tile(1, 256, 256, (6, 6), (9, 9), 2, False)
    ((6, 6), None)
    """
    return _best_tile(b, c, o, out, kernel, stride, training, amx)


def bilinear_conv2d(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, tile: Pair, precision: str) -> Tensor:
    """The convolution in the bilinear form, cut into tiles of outputs. It can be differentiated once."""
    keep = [torch.is_grad_enabled() and wanted for wanted in (weight.requires_grad, x.requires_grad)]
    tensors = [t if t is None else t.float() for t in (x, weight, bias)]
    y, *_ = _conv(*tensors, stride, list(tile), precision, keep)
    return y.to(x.dtype)
