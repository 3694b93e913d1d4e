"""Convolution with fewer multiplications. (Docstring to come.)"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import inf, prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_input

from capsnet.kernels.bilinear import Algorithm, Pair, Phase, algorithm, multiply, multiply_backward, phase_sizes
from capsnet.kernels.switch import enabled

# --- Images to phases and back ----------------------------------------------------------------------------


def _out_size(size: tuple[int, ...], kernel: tuple[int, ...], stride: int) -> Pair:
    return (size[-2] - kernel[-2]) // stride + 1, (size[-1] - kernel[-1]) // stride + 1


def _tiles(tile: Pair, out: Pair) -> list[tuple[Pair, Pair]]:
    """For each tile its first output, and how many rows and columns of it the tiles before have covered."""
    h, w = (
        [(min(k, length - size), max(0, k + size - length)) for k in range(0, length, size)]
        for size, length in zip(tile, out, strict=True)
    )
    return [((i, j), (di, dj)) for i, di in h for j, dj in w]


def _window(phase: Phase, stride: int, corner: Pair = (0, 0)) -> tuple[slice, slice]:
    """Rows and columns of the input that make up the phase's image for the tile at this output."""
    h, w = (
        slice(at * stride + start, (at + n - 1) * stride + start + 1, stride)
        for at, start, n in zip(corner, phase.start, phase.inputs, strict=True)
    )
    return h, w


def _to_output(Y: Tensor, bias: Tensor | None, tile: Pair, out: Pair, b: int) -> Tensor:
    """(tile outputs, tiles·b·o) to (b, o, h, w), channels last in memory."""
    tiles = _tiles(tile, out)
    Y = Y.view(*tile, len(tiles), b, -1)
    y = Y.new_empty(b, *out, Y.shape[-1])
    for t, ((i, j), _) in enumerate(tiles):
        y[:, i : i + tile[0], j : j + tile[1]] = Y[:, :, t].permute(2, 0, 1, 3)
    if bias is not None:
        y += bias
    return y.permute(0, 3, 1, 2)


def _from_output(grad: Tensor, tile: Pair) -> Tensor:
    """(b, o, h, w) to (tile outputs, tiles·b, o); what two tiles share counts in the first of them alone."""
    b, o, h, w = grad.shape
    tiles = _tiles(tile, (h, w))
    G = grad.new_zeros((*tile, len(tiles), b, o), dtype=torch.float32)
    for t, ((i, j), (di, dj)) in enumerate(tiles):
        G[di:, dj:, t] = grad[:, :, i + di : i + tile[0], j + dj : j + tile[1]].permute(2, 3, 0, 1)
    return G.view(prod(tile), -1, o)


def _plan(weight: Tensor, stride: int, tile: list[int], bf16: bool) -> Algorithm:
    kernel = weight.shape[2], weight.shape[3]
    return algorithm(kernel, stride, (tile[0], tile[1]), torch.bfloat16 if bf16 else torch.float32)


def _maybe(wanted: bool, make: Callable[[], Tensor], like: Tensor) -> Tensor:
    """An operator's schema has no optional results: an empty tensor says that this one was not asked for."""
    return make() if wanted else like.new_empty(0)


# --- The operator: one convolution ------------------------------------------------------------------------


@torch.library.custom_op("capsnet::bilinear_conv2d", mutates_args=())
def _conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, tile: list[int], bf16: bool, keep: bool
) -> tuple[Tensor, Tensor]:
    """The convolution in float32, and the transformed input if the weight's gradient will want it."""
    plan, out = _plan(weight, stride, tile, bf16), _out_size(x.shape, weight.shape, stride)
    (b, c), tiles = x.shape[:2], _tiles(plan.tile, out)
    last = x.contiguous(memory_format=torch.channels_last).permute(0, 2, 3, 1)

    def image(phase: Phase) -> Tensor:
        images = phase.B.new_empty(*phase.inputs, len(tiles), b, c)
        for t, (corner, _) in enumerate(tiles):
            images[:, :, t] = last[:, *_window(phase, stride, corner)].permute(1, 2, 0, 3)
        return images.view(prod(phase.inputs), -1)

    with torch.autocast("cpu", enabled=False):
        Y, flat = multiply(plan, weight, len(tiles) * b, image, keep)
        return _to_output(Y, bias, plan.tile, out, b), flat


@_conv.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, tile: list[int], bf16: bool, keep: bool
) -> tuple[Tensor, Tensor]:
    out, pair = _out_size(x.shape, weight.shape, stride), (tile[0], tile[1])
    y = x.new_empty((len(x), *out, len(weight)), dtype=torch.float32).permute(0, 3, 1, 2)
    products = sum(m for m, _ in phase_sizes((weight.shape[2], weight.shape[3]), stride, pair))
    size = products * len(_tiles(pair, out)) * x.shape[0] * x.shape[1] if keep else 0
    return y, x.new_empty(size, dtype=torch.bfloat16 if bf16 else torch.float32)


@torch.library.custom_op("capsnet::bilinear_conv2d_backward", mutates_args=())
def _conv_backward(
    grad: Tensor,
    size: list[int],
    weight: Tensor,
    flat: Tensor,
    stride: int,
    tile: list[int],
    bf16: bool,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias, as far as they are needed."""
    plan, (b, c, h, w) = _plan(weight, stride, tile, bf16), size
    tiles = _tiles(plan.tile, (grad.shape[2], grad.shape[3]))
    grad_x = _maybe(needs[0], lambda: grad.new_zeros(b, h, w, c), grad)

    def take(phase: Phase, images: Tensor) -> None:
        parts = images.view(*phase.inputs, len(tiles), b, c).permute(2, 3, 0, 1, 4)
        for part, (corner, _) in zip(parts, tiles, strict=True):
            target = grad_x[:, *_window(phase, stride, corner)]
            target.copy_(part) if len(tiles) == 1 else target.add_(part)

    with torch.autocast("cpu", enabled=False):
        G = _from_output(grad, plan.tile)
        grad_weight = multiply_backward(plan, weight, G, flat, needs[1], take if needs[0] else None)
    grad_bias = _maybe(needs[2], lambda: grad.sum((0, 2, 3)), grad)
    return grad_x.permute(0, 3, 1, 2) if needs[0] else grad_x, grad_weight, grad_bias


@_conv_backward.register_fake
def _(
    grad: Tensor,
    size: list[int],
    weight: Tensor,
    flat: Tensor,
    stride: int,
    tile: list[int],
    bf16: bool,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    b, c, h, w = size
    grad_x = _maybe(needs[0], lambda: grad.new_empty(b, h, w, c).permute(0, 3, 1, 2), grad)
    grad_weight = _maybe(needs[1], lambda: weight.new_empty(weight.shape), weight)
    return grad_x, grad_weight, grad.new_empty(len(weight) if needs[2] else 0)


def _conv_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _, *ctx.options, _ = inputs
    ctx.size = list(x.shape)
    ctx.save_for_backward(weight, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _conv_gradients(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
    needs = list(ctx.needs_input_grad[:3])
    grads = _conv_backward(grad, ctx.size, *ctx.saved_tensors, *ctx.options, needs)
    return *(g if need else None for g, need in zip(grads, needs, strict=True)), None, None, None, None


_conv.register_autograd(_conv_gradients, setup_context=_conv_save)


# --- The operator: convolution, ReLU, convolution -----------------------------------------------------------


def _patches(x: Tensor, kernel: tuple[int, ...], strides: list[int], phase: Phase) -> Tensor:
    """im2col, (positions of the phase · b, c·kh·kw + 1): its rows lie as the phase's image wants them.

    The last column is ones, for the bias.
    """
    windows = x.unfold(2, kernel[-2], strides[0]).unfold(3, kernel[-1], strides[0])
    windows = windows[:, :, *_window(phase, strides[1])].permute(2, 3, 0, 1, 4, 5)
    rows, length = prod(windows.shape[:3]), prod(windows.shape[3:])
    patches = phase.B.new_empty(rows, length + 1)
    patches[:, :length].view(windows.shape).copy_(windows)
    patches[:, length] = 1
    return patches


def _positions(plan: Algorithm, b: int) -> list[int]:
    return [prod(phase.inputs) * b for phase in plan.phases]


def _stem_out(x: Tensor, weight1: Tensor, weight2: Tensor, strides: list[int]) -> Pair:
    return _out_size(_out_size(x.shape, weight1.shape, strides[0]), weight2.shape, strides[1])


@torch.library.custom_op("capsnet::bilinear_stem", mutates_args=())
def _stem(
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    strides: list[int],
    bf16: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The result; and, if they are to be kept, the hidden layer, phase by phase, and its transform."""
    b, c, out = len(x), len(weight1), _stem_out(x, weight1, weight2, strides)
    plan = _plan(weight2, strides[1], list(out), bf16)
    sizes = _positions(plan, b)
    bias = weight1.new_zeros(c) if bias1 is None else bias1
    columns = torch.cat([weight1.flatten(1), bias[:, None]], 1).T.to(plan.tap_order.dtype)
    hidden = columns.new_empty(sum(sizes) if keep else max(sizes), c)
    places = iter(hidden.split(sizes) if keep else [hidden[:size] for size in sizes])

    def image(phase: Phase) -> Tensor:
        patches = _patches(x, weight1.shape, strides, phase)
        return torch.mm(patches, columns, out=next(places)).relu_().view(prod(phase.inputs), -1)

    with torch.autocast("cpu", enabled=False):
        Y, flat = multiply(plan, weight2, b, image, keep)
        return _to_output(Y, bias2, out, out, b), hidden if keep else hidden.new_empty(0, c), flat


@_stem.register_fake
def _(
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    strides: list[int],
    bf16: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    out, c = _stem_out(x, weight1, weight2, strides), len(weight1)
    y = x.new_empty((len(x), *out, len(weight2)), dtype=torch.float32).permute(0, 3, 1, 2)
    sizes = phase_sizes((weight2.shape[2], weight2.shape[3]), strides[1], out)
    rows, dtype = len(x) if keep else 0, torch.bfloat16 if bf16 else torch.float32
    hidden = x.new_empty((rows * sum(n for _, n in sizes), c), dtype=dtype)
    return y, hidden, x.new_empty(rows * c * sum(m for m, _ in sizes), dtype=dtype)


@torch.library.custom_op("capsnet::bilinear_stem_backward", mutates_args=())
def _stem_backward(
    grad: Tensor,
    x: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    hidden: Tensor,
    flat: Tensor,
    strides: list[int],
    bf16: bool,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, weight1, bias1, weight2 and bias2, as far as they are needed."""
    b, c, out = len(x), len(weight1), (grad.shape[2], grad.shape[3])
    plan = _plan(weight2, strides[1], list(out), bf16)
    places = iter(hidden.split(_positions(plan, b)))
    grad_columns = grad.new_zeros(weight1[0].numel() + 1, c)
    size1 = _out_size(x.shape, weight1.shape, strides[0])
    grad_hidden = _maybe(needs[0], lambda: grad.new_zeros(b, *size1, c), grad)

    def take(phase: Phase, images: Tensor) -> None:
        active = torch.ops.aten.threshold_backward(images.view(-1, c), next(places), 0)
        grad_columns.add_(_patches(x, weight1.shape, strides, phase).T @ active)
        if needs[0]:
            grad_hidden[:, *_window(phase, strides[1])] = active.view(*phase.inputs, b, c).permute(2, 0, 1, 3)

    def through_conv1() -> Tensor:
        grad1 = grad_hidden.permute(0, 3, 1, 2)
        return conv2d_input(x.shape, weight1, grad1, strides[0]).contiguous()

    with torch.autocast("cpu", enabled=False):
        G = _from_output(grad, out)
        grad_weight2 = multiply_backward(plan, weight2, G, flat, needs[3], take if any(needs[:3]) else None)
        return (
            _maybe(needs[0], through_conv1, grad),
            _maybe(needs[1], lambda: grad_columns[:-1].T.reshape(weight1.shape), grad),
            _maybe(needs[2], lambda: grad_columns[-1].clone(), grad),
            grad_weight2,
            _maybe(needs[4], lambda: grad.sum((0, 2, 3)), grad),
        )


@_stem_backward.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    hidden: Tensor,
    flat: Tensor,
    strides: list[int],
    bf16: bool,
    needs: list[bool],
) -> tuple[Tensor, ...]:
    shapes = [x.shape, weight1.shape, weight1.shape[:1], weight2.shape, weight2.shape[:1]]
    return tuple(grad.new_empty(shape if need else 0) for shape, need in zip(shapes, needs, strict=True))


def _stem_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight1, _, weight2, _, *ctx.options, _ = inputs
    ctx.save_for_backward(x, weight1, weight2, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _stem_gradients(ctx: Any, grad: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    needs = list(ctx.needs_input_grad[:5])
    grads = _stem_backward(grad, *ctx.saved_tensors, *ctx.options, needs)
    return *(g if need else None for g, need in zip(grads, needs, strict=True)), None, None, None


_stem.register_autograd(_stem_gradients, setup_context=_stem_save)


# --- Which way to compute it ------------------------------------------------------------------------------


def _bilinear_cost(b: int, c: int, o: int, out: Pair, kernel: Pair, stride: int, tile: Pair) -> float:
    """Time of the forward pass in multiply-adds of its products; what is not one was measured in this coin."""
    rows, taps = b * len(_tiles(tile, out)), prod(kernel) / min(stride, *kernel) ** 2
    cost = 25e6  # to call some thirty operators
    for m, inputs in phase_sizes(kernel, stride, tile):
        cost += m * rows * c * o + 0.9 * (m * inputs * rows * c + m * taps * c * o)
        cost += 38 * inputs * rows * c + 21 * m * c * o + 16 * m * rows * o  # memory: x, G·w and the products
    return cost


def _plain_cost(b: int, c: int, o: int, out: Pair, kernel: Pair) -> float:
    """The same for plain convolution, whose loops are tighter, unless the rows of its output are very short."""
    return 0.6 * b * c * o * prod(out) * prod(kernel) * (1 + min(5, 12 / out[1] ** 2))


@lru_cache(maxsize=1024)
def _best_tile(b: int, c: int, o: int, out: Pair, kernel: Pair, stride: int, training: bool) -> Pair | None:
    plain = _plain_cost(b, c, o, out, kernel)
    if plain < 25e6 or max(kernel) > 32:
        return None
    sides = [sorted({-(-n // parts) for parts in range(1, n + 1)}) for n in out]
    tiles = [(h, w) for h in sides[0] for w in sides[1] if max(h, w) <= 16]
    costs = {tile: _bilinear_cost(b, c, o, out, kernel, stride, tile) for tile in tiles}
    best = min(costs, key=lambda tile: costs[tile])
    if costs.get(out, inf) < 1.1 * costs[best]:
        best = out  # in one tile a convolution can be fused with the one before it
    return best if costs[best] < (1.0 if training else 0.8) * plain else None


@torch.compiler.assume_constant_result
def best_tile(b: int, c: int, o: int, out: Pair, kernel: Pair, stride: int, training: bool) -> Pair | None:
    """The tile of outputs that makes the bilinear form cheapest; None where plain convolution is as good.

    Backward passes gain more than forward ones, so it takes more to be chosen when there will be none.

    >>> best_tile(128, 256, 256, (6, 6), (9, 9), 2, True), best_tile(1, 256, 256, (6, 6), (9, 9), 2, False)
    ((6, 6), None)
    """
    return _best_tile(b, c, o, out, kernel, stride, training)


@lru_cache(maxsize=1)
def has_bf16() -> bool:
    """Whether the processor multiplies bfloat16 in hardware."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def _wants_bf16(x: Tensor) -> bool:
    autocast = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16
    return autocast or x.dtype == torch.bfloat16


def _choose(x: Tensor, size: tuple[int, ...], weight: Tensor, stride: int) -> Pair | None:
    """The tile for a bilinear convolution of something of this size (b, c, h, w), or None for the plain one.

    A program that is being exported gets the plain one: it may run where this package is not installed.
    """
    if not enabled() or x.device.type != "cpu" or x.dim() != 4 or torch.compiler.is_exporting():
        return None
    if x.dtype not in (torch.float32, torch.bfloat16) or weight.dtype not in (torch.float32, x.dtype):
        return None
    (b, c, *_), (o, channels, *kernel) = size, weight.shape
    if c != channels or size[2] < kernel[0] or size[3] < kernel[1]:
        return None  # F.conv2d words the error
    out = _out_size(size, weight.shape, stride)
    training = torch.is_grad_enabled() and weight.requires_grad
    # sizes are symbols while a graph is traced; what a range is made of is made known: a graph for each size
    b, c, o, *sides = (range(n).stop for n in (b, c, o, *out, *kernel))
    return best_tile(b, c, o, (sides[0], sides[1]), (sides[2], sides[3]), stride, training)


def _plain(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int) -> Tensor:
    if not enabled() or x.device.type != "cpu" or not _wants_bf16(x):
        return F.conv2d(x, weight, bias, stride)
    if has_bf16():
        return F.conv2d(x, weight, bias, stride).to(x.dtype)
    with torch.autocast("cpu", enabled=False):
        return F.conv2d(x.float(), weight.float(), None if bias is None else bias.float(), stride).to(x.dtype)


def conv2d(x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: int = 1) -> Tensor:
    """F.conv2d without padding, by the cheaper of two ways: (b, c, h, w), (o, c, kh, kw) → (b, o, h', w').

    The bilinear form is taken on CPUs, for float32 and bfloat16, where `best_tile` reckons that it is
    faster, from the multiply-adds and the traffic of each way; small batches, few channels and small kernels go to F.conv2d.
    Its result is channels last in memory, and can be differentiated once (for more use `kernels.plain()`).

    bfloat16, asked for by x or by autocast, is used for the operands of transforms and products where the
    processor has it, and the result keeps the dtype of x: float32 under autocast, since the last stage adds
    up in float32 anyhow and squash and routing want it. Without hardware all is computed in float32, because
    emulated bfloat16 is four times slower.
    """
    tile = _choose(x, x.shape, weight, stride)
    if tile is None:
        return _plain(x, weight, bias, stride)
    keep, bf16 = torch.is_grad_enabled() and weight.requires_grad, _wants_bf16(x) and has_bf16()
    tensors = [t if t is None else t.float() for t in (x, weight, bias)]
    y, _ = _conv(*tensors, stride, list(tile), bf16, keep)
    return y.to(x.dtype)


def stem_conv2d(
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    stride1: int = 1,
    stride2: int = 2,
) -> Tensor:
    """conv2(relu(conv1(x))), with conv1 writing its result where and how conv2's transform reads it.

    Taken where conv1 is plain and conv2 bilinear in one tile; otherwise it is the two convolutions in turn.
    """
    size = (*x.shape[:1], len(weight1), *_out_size(x.shape, weight1.shape, stride1))
    tile = _choose(x, size, weight2, stride2)
    if tile != _out_size(size, weight2.shape, stride2) or _choose(x, x.shape, weight1, stride1):
        return conv2d(F.relu(conv2d(x, weight1, bias1, stride1)), weight2, bias2, stride2)
    tensors = [t if t is None else t.float() for t in (x, weight1, bias1, weight2, bias2)]
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    y, *_ = _stem(*tensors, [stride1, stride2], _wants_bf16(x) and has_bf16(), keep)
    return y.to(x.dtype)
