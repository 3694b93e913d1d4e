"""docstring later."""

from __future__ import annotations

import cmath
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from capsnet.kernels.switch import enabled

RADIUS = 0.8  # the real points are ±0.8 and ±1/0.8: closer to 1 they crowd, farther out their powers grow

Pair = tuple[int, int]


# --- The constants -------------------------------------------------------------------------------------------


def _points(n: int) -> list[complex | None]:
    """Where the polynomials are evaluated; None is infinity, a complex point stands for its conjugate too.

    >>> _points(6)
    [None, 0j, (0.8+0j), (-0.8+0j), (1.25+0j), (-1.25+0j)]
    """
    pairs = (n - 1) // 2  # of finite points other than 0
    zero = [0j] if n % 2 == 0 else []
    if pairs < 2:
        return [None, *zero, *[1 + 0j, -1 + 0j] * pairs]
    circle = [cmath.exp(1j * cmath.pi * k / (pairs - 1)) for k in range(1, pairs - 1)]
    return [None, *zero, *(complex(sign * r) for r in (RADIUS, 1 / RADIUS) for sign in (1, -1)), *circle]


def _is_complex(point: complex | None) -> bool:
    return point is not None and point.imag != 0


def _powers(points: list[complex | None], n: int) -> Tensor:
    """(point, n): times n coefficients gives the polynomial's values; at infinity that is the leading one."""
    rows = [[0] * (n - 1) + [1] if p is None else [p**k for k in range(n)] for p in points]
    return torch.tensor(rows, dtype=torch.complex128)


def _line(points: list[complex | None], taps: int, outputs: int) -> tuple[Tensor, Tensor]:
    """Filter and input matrix in one dimension, (point, taps) and (point, inputs), complex.

    Evaluate, multiply, interpolate is polynomial multiplication. Correlation is its transpose: the
    interpolation (an inverse) meets the input, and evaluation, transposed, gives the output.
    """
    inputs = taps + outputs - 1
    short = len(points) + sum(map(_is_complex, points)) - inputs  # 1 when this phase needs no infinity
    used = points[short:]
    every = _powers([*used, *(p.conjugate() for p in used if p is not None and p.imag)], inputs)
    interpolate = torch.linalg.inv(every).T[: len(used)]
    return F.pad(_powers(used, taps), (0, 0, short, 0)), F.pad(interpolate, (0, 0, short, 0))


@dataclass(frozen=True)
class Phase:
    """One of the stride² interleaved images: where it starts, its sizes, the products it takes part in."""

    start: Pair
    taps: Pair
    inputs: Pair
    products: slice
    G: Tensor  # (products, taps)
    B: Tensor  # (products, inputs)


@dataclass(frozen=True)
class Algorithm:
    """Y = A·[(G·w) ⊙ (B·x)] for a tile of outputs; the phases share A and add up their products."""

    stride: int
    tile: Pair
    products: int
    A: Tensor  # (products, outputs)
    phases: tuple[Phase, ...]


class _Grid:
    """All pairs of a point in h and a point in w, and the real products each of them costs."""

    def __init__(self, h: list[complex | None], w: list[complex | None]) -> None:
        # By who stands at infinity: h only, none, w only, both. The products of a phase that is one tap
        # short, and therefore has no point at infinity, are then one slice.
        order = {(True, False): 0, (False, False): 1, (False, True): 2, (True, True): 3}
        pairs = [
            (order[p is None, q is None], i, j, conjugate, _is_complex(p) or _is_complex(q))
            for i, p in enumerate(h)
            for j, q in enumerate(w)
            # the product of two conjugate pairs is two pairs: (p, q) and (p, q̄)
            for conjugate in ([False, True] if _is_complex(p) and _is_complex(q) else [False])
        ]
        group, i, j, conjugate, is_complex = (torch.tensor(column) for column in zip(*sorted(pairs), strict=True))
        self.i, self.j, self.conjugate = i, j, conjugate[:, None]
        self.weight = torch.where(is_complex, 2.0, 1.0).double()[:, None]  # a pair is counted once for two
        self.kept = torch.stack([torch.ones_like(is_complex), is_complex, is_complex], 1)  # 1 or 3 products
        cost = self.kept.sum(1)
        self.ends = [0, *(int(cost[group <= k].sum()) for k in range(4))]

    def _outer(self, h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        w = torch.where(self.conjugate, w[self.j].conj(), w[self.j])
        values = (h[self.i][:, :, None] * w[:, None, :]).flatten(1)
        return values.real, values.imag

    def outputs(self, h: Tensor, w: Tensor) -> Tensor:
        """2·Re(a·z) with z = (k1 − k3) + i(k1 + k2)."""
        re, im = self._outer(h, w)
        return (torch.stack([re - im, -im, -re], 1) * self.weight[:, None])[self.kept]

    def filters(self, h: Tensor, w: Tensor) -> Tensor:
        """k1 = (Re g + Im g)·Re d, k2 = Re g·(Im d − Re d), k3 = Im g·(Re d + Im d): the factors of g."""
        re, im = self._outer(h, w)
        return torch.stack([re + im, re, im], 1)[self.kept]

    def inputs(self, h: Tensor, w: Tensor) -> Tensor:
        """The factors of d in the three products."""
        re, im = self._outer(h, w)
        return torch.stack([re, im - re, re + im], 1)[self.kept]


@lru_cache(maxsize=64)
def _algorithm(kernel: Pair, stride: int, tile: Pair, dtype: torch.dtype) -> Algorithm:
    """The constants, computed once in double precision."""
    with torch.inference_mode(False):
        taps = [-(-k // stride) for k in kernel]
        points = [_points(t + n - 1) for t, n in zip(taps, tile, strict=True)]
        grid = _Grid(*points)
        phases = []
        for start in ((i, j) for i in range(min(stride, kernel[0])) for j in range(min(stride, kernel[1]))):
            own = tuple(-(-(k - s) // stride) for k, s in zip(kernel, start, strict=True))
            (g_h, b_h), (g_w, b_w) = (_line(*args) for args in zip(points, own, tile, strict=True))
            short = own[0] < taps[0], own[1] < taps[1]
            products = slice(grid.ends[short[0]], grid.ends[2 if short[1] else 3 if short[0] else 4])
            G, B = grid.filters(g_h, g_w)[products], grid.inputs(b_h, b_w)[products]
            inputs = (own[0] + tile[0] - 1, own[1] + tile[1] - 1)
            phases.append(Phase(start, own, inputs, products, G.to(dtype), B.to(dtype)))
        A = grid.outputs(*(_powers(p, n) for p, n in zip(points, tile, strict=True))).float()
    return Algorithm(stride, tile, len(A), A, tuple(phases))


# --- The matrix stages: transform, multiply, transform back ------------------------------------------------------


def _taps(phase: Phase, stride: int, weight: Tensor) -> Tensor:
    """A view (tap rows, tap columns, o, c) of the filter taps that meet this phase."""
    return weight[:, :, phase.start[0] :: stride, phase.start[1] :: stride].permute(2, 3, 0, 1)


def _transformed_filter(phase: Phase, stride: int, weight: Tensor) -> Tensor:
    """U = G·w: (products, o, c)."""
    o, c = weight.shape[:2]
    return (phase.G @ _taps(phase, stride, weight).to(phase.G.dtype).reshape(-1, o * c)).view(-1, o, c)


def _split(kept: Tensor, algorithm: Algorithm, rows: int, c: int) -> Iterator[Tensor]:
    """The transformed inputs V of the phases, (products, rows, c) each, that lie one after the other in `kept`."""
    sizes = [len(phase.B) * rows * c for phase in algorithm.phases]
    return (part.view(-1, rows, c) for part in kept.split(sizes))


def _forward(
    algorithm: Algorithm, weight: Tensor, rows: int, image: Callable[[Phase], Tensor], keep: bool
) -> tuple[Tensor, Tensor]:
    """Y = A·[(G·w) ⊙ (B·x)], (outputs, rows·o), from images (inputs, rows·c); and V = B·x, flat, if asked to keep it."""
    o, c = weight.shape[:2]
    total = weight.new_zeros((algorithm.products, rows, o), dtype=torch.float32)
    sizes = [len(phase.B) * rows * c for phase in algorithm.phases]
    kept = algorithm.phases[0].B.new_empty(sum(sizes) if keep else max(sizes))
    places = kept.split(sizes) if keep else [kept[:size] for size in sizes]
    for phase, place in zip(algorithm.phases, places, strict=True):
        V = torch.mm(phase.B, image(phase), out=place.view(len(phase.B), -1)).view(-1, rows, c)
        U = _transformed_filter(phase, algorithm.stride, weight).transpose(1, 2)
        if V.dtype == torch.float32:
            total[phase.products].baddbmm_(V, U)
        else:  # the sum over the phases stays in float32
            total[phase.products] += torch.bmm(V, U)
    return algorithm.A.T @ total.view(algorithm.products, -1), kept if keep else kept.new_empty(0)


def _backward(
    algorithm: Algorithm,
    weight: Tensor,
    grad: Tensor,
    kept: Tensor,
    grad_weight: Tensor | None,
    take_image: Callable[[Phase, Tensor], None] | None,
) -> None:
    """The transposes of the three stages, for grad (outputs, rows, o): fills grad_weight, hands out image gradients."""
    o, c = weight.shape[:2]
    rows = grad.shape[1]
    total = (algorithm.A @ grad.reshape(-1, rows * o)).view(-1, rows, o)
    inputs = _split(kept, algorithm, rows, c) if grad_weight is not None else None
    for phase in algorithm.phases:
        part = total[phase.products].to(phase.B.dtype)
        if grad_weight is not None and inputs is not None:
            grad_U = torch.bmm(part.transpose(1, 2), next(inputs))
            taps = _taps(phase, algorithm.stride, grad_weight)
            taps.copy_((phase.G.T @ grad_U.view(-1, o * c)).view(taps.shape))
            del grad_U
        if take_image is not None:
            grad_V = torch.bmm(part, _transformed_filter(phase, algorithm.stride, weight))
            take_image(phase, phase.B.T @ grad_V.view(-1, rows * c))


# --- Images to phases and back -----------------------------------------------------------------------------------


def _tiles(tile: Pair, out: Pair) -> list[tuple[Pair, Pair]]:
    """For each tile, its first output and how many rows and columns the tile before it has already covered."""
    spans = []
    for size, length in zip(tile, out, strict=True):
        starts = [min(start, length - size) for start in range(0, length, size)]
        spans.append([(start, k * size - start) for k, start in enumerate(starts)])
    return [((i, j), (di, dj)) for i, di in spans[0] for j, dj in spans[1]]


def _window(phase: Phase, stride: int, corner: Pair) -> tuple[slice, slice]:
    """Rows and columns of the input that the phase's image of the tile at this output corner is made of."""
    first = [c * stride + s for c, s in zip(corner, phase.start, strict=True)]
    h, w = (slice(f, f + stride * (n - 1) + 1, stride) for f, n in zip(first, phase.inputs, strict=True))
    return h, w


def _out_size(size: Pair, kernel: Pair, stride: int) -> Pair:
    return (size[0] - kernel[0]) // stride + 1, (size[1] - kernel[1]) // stride + 1


def _to_output(Y: Tensor, bias: Tensor | None, tile: Pair, out: Pair, b: int) -> Tensor:
    """(tile outputs, tiles·b·o) to (b, o, h, w), channels last in memory, bias added on the way."""
    tiles = _tiles(tile, out)
    Y = Y.view(*tile, len(tiles), b, -1)
    y = Y.new_empty(b, *out, Y.shape[-1])
    for t, ((i, j), _) in enumerate(tiles):
        target = y[:, i : i + tile[0], j : j + tile[1]]
        target.copy_(Y[:, :, t].permute(2, 0, 1, 3))
    if bias is not None:
        y += bias
    return y.permute(0, 3, 1, 2)


def _from_output(grad: Tensor, tile: Pair) -> Tensor:
    """(b, o, h, w) to (tile outputs, tiles·b, o); what two tiles share counts in the first alone."""
    b, o = grad.shape[:2]
    tiles = _tiles(tile, (grad.shape[2], grad.shape[3]))
    G = grad.new_zeros((*tile, len(tiles), b, o), dtype=torch.float32)
    for t, ((i, j), (di, dj)) in enumerate(tiles):
        fresh = grad[:, :, i + di : i + tile[0], j + dj : j + tile[1]]
        G[di:, dj:, t] = fresh.permute(2, 3, 0, 1)
    return G.view(prod(tile), -1, o)


# --- The operator ------------------------------------------------------------------------------------------------


@torch.library.custom_op("capsnet::bilinear_conv2d", mutates_args=())
def _bilinear(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, tile: list[int], bf16: bool, keep: bool
) -> tuple[Tensor, Tensor]:
    """The convolution, and the transformed input if its weight's gradient will want it."""
    (b, c, h, w), kernel = x.shape, weight.shape[2:]
    algorithm = _algorithm(tuple(kernel), stride, tuple(tile), torch.bfloat16 if bf16 else torch.float32)
    out = _out_size((h, w), tuple(kernel), stride)
    tiles = _tiles(algorithm.tile, out)
    last = x.contiguous(memory_format=torch.channels_last).permute(0, 2, 3, 1)

    def image(phase: Phase) -> Tensor:
        images = phase.B.new_empty(*phase.inputs, len(tiles), b, c)
        for t, (corner, _) in enumerate(tiles):
            images[:, :, t] = last[:, *_window(phase, stride, corner)].permute(1, 2, 0, 3)
        return images.view(prod(phase.inputs), -1)

    with torch.autocast(x.device.type, enabled=False):
        Y, kept = _forward(algorithm, weight, len(tiles) * b, image, keep)
        return _to_output(Y, bias, algorithm.tile, out, b), kept


@_bilinear.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, tile: list[int], bf16: bool, keep: bool
) -> tuple[Tensor, Tensor]:
    kernel, pair = (weight.shape[2], weight.shape[3]), (tile[0], tile[1])
    out = _out_size((x.shape[2], x.shape[3]), kernel, stride)
    y = x.new_empty((x.shape[0], *out, weight.shape[0]), dtype=torch.float32).permute(0, 3, 1, 2)
    size = _kept_size(kernel, stride, pair) * len(_tiles(pair, out)) * x.shape[0] * x.shape[1] if keep else 0
    return y, x.new_empty(size, dtype=torch.bfloat16 if bf16 else torch.float32)


@torch.library.custom_op("capsnet::bilinear_conv2d_backward", mutates_args=())
def _bilinear_backward(
    grad: Tensor,
    weight: Tensor,
    kept: Tensor,
    size: list[int],
    stride: int,
    tile: list[int],
    bf16: bool,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias; an empty tensor for each that is not needed."""
    (b, c, h, w), kernel = size, weight.shape[2:]
    algorithm = _algorithm(tuple(kernel), stride, tuple(tile), torch.bfloat16 if bf16 else torch.float32)
    tiles = _tiles(algorithm.tile, (grad.shape[2], grad.shape[3]))
    grad_x = grad.new_zeros((b, h, w, c) if needs[0] else 0)

    def take_image(phase: Phase, images: Tensor) -> None:
        parts = images.view(*phase.inputs, len(tiles), b, c)
        for t, (corner, _) in enumerate(tiles):
            target = grad_x[:, *_window(phase, stride, corner)]
            target += parts[:, :, t].permute(2, 0, 1, 3)

    with torch.autocast(grad.device.type, enabled=False):
        grad_weight = torch.empty_like(weight, dtype=torch.float32) if needs[1] else None
        G = _from_output(grad, algorithm.tile)
        _backward(algorithm, weight, G, kept, grad_weight, take_image if needs[0] else None)
        grad_bias = grad.sum((0, 2, 3)) if needs[2] else grad.new_empty(0)
    grad_x = grad_x.permute(0, 3, 1, 2) if needs[0] else grad_x
    return grad_x, grad.new_empty(0) if grad_weight is None else grad_weight, grad_bias


@_bilinear_backward.register_fake
def _(
    grad: Tensor,
    weight: Tensor,
    kept: Tensor,
    size: list[int],
    stride: int,
    tile: list[int],
    bf16: bool,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    b, c, h, w = size
    nothing = grad.new_empty(0)
    grad_x = grad.new_empty(b, h, w, c).permute(0, 3, 1, 2) if needs[0] else nothing
    grad_weight = torch.empty_like(weight, dtype=torch.float32) if needs[1] else grad.new_empty(0)
    return grad_x, grad_weight, grad.new_empty(weight.shape[0] if needs[2] else 0)


def _keep_for_backward(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, weight, _, ctx.stride, ctx.tile, ctx.bf16, _ = inputs
    ctx.size = list(x.shape)
    ctx.save_for_backward(weight, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _gradients(ctx, grad, _):  # type: ignore[no-untyped-def]
    weight, kept = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:3])
    grads = _bilinear_backward(grad, weight, kept, ctx.size, ctx.stride, ctx.tile, ctx.bf16, needs)
    return *(g if need else None for g, need in zip(grads, needs, strict=True)), None, None, None, None


_bilinear.register_autograd(_gradients, setup_context=_keep_for_backward)


# --- Convolution, ReLU, convolution ------------------------------------------------------------------------------


def _patches(x: Tensor, kernel: Pair, stride: int, phase: Phase, stride2: int) -> Tensor:
    """im2col with rows in the order (position in the phase, b), and a column of ones for the bias."""
    windows = x.unfold(2, kernel[0], stride).unfold(3, kernel[1], stride)
    windows = windows[:, :, *_window(phase, stride2, (0, 0))].permute(2, 3, 0, 1, 4, 5)
    length = prod(windows.shape[3:])
    patches = phase.B.new_empty(prod(windows.shape[:3]), length + 1)
    patches[:, :length].view(windows.shape).copy_(windows)
    patches[:, length] = 1
    return patches


def _stem_filter(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """(c·kh·kw + 1, o): the filters as columns, the bias below them."""
    last = weight.new_zeros(len(weight)) if bias is None else bias
    return torch.cat([weight.flatten(1), last[:, None]], 1).T.to(dtype)


def _stem_sizes(algorithm: Algorithm, rows: int) -> list[int]:
    return [prod(phase.inputs) * rows for phase in algorithm.phases]


@torch.library.custom_op("capsnet::bilinear_stem", mutates_args=())
def _stem(
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    stride1: int,
    stride2: int,
    bf16: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """conv2(relu(conv1(x))); if `keep`, the hidden layer phase by phase, and its transform."""
    b, kernel1, kernel2 = len(x), tuple(weight1.shape[2:]), tuple(weight2.shape[2:])
    out = _out_size(_out_size(tuple(x.shape[2:]), kernel1, stride1), kernel2, stride2)
    algorithm = _algorithm(kernel2, stride2, out, torch.bfloat16 if bf16 else torch.float32)
    sizes = _stem_sizes(algorithm, b)
    dtype = algorithm.phases[0].B.dtype
    hidden = x.new_empty((sum(sizes) if keep else max(sizes), len(weight1)), dtype=dtype)
    places = iter(hidden.split(sizes) if keep else [hidden[:size] for size in sizes])
    columns = _stem_filter(weight1, bias1, dtype)

    def image(phase: Phase) -> Tensor:
        patches = _patches(x, kernel1, stride1, phase, stride2)
        return torch.mm(patches, columns, out=next(places)).relu_().view(prod(phase.inputs), -1)

    with torch.autocast(x.device.type, enabled=False):
        Y, kept = _forward(algorithm, weight2, b, image, keep)
        return _to_output(Y, bias2, out, out, b), hidden if keep else hidden.new_empty(0), kept


@torch.library.custom_op("capsnet::bilinear_stem_backward", mutates_args=())
def _stem_backward(
    grad: Tensor,
    x: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    hidden: Tensor,
    kept: Tensor,
    stride1: int,
    stride2: int,
    bf16: bool,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, weight1, bias1, weight2, bias2; an empty tensor for each that is not needed."""
    b, kernel1, kernel2, out = len(x), tuple(weight1.shape[2:]), tuple(weight2.shape[2:]), tuple(grad.shape[2:])
    algorithm = _algorithm(kernel2, stride2, out, torch.bfloat16 if bf16 else torch.float32)
    places = iter(hidden.split(_stem_sizes(algorithm, b)))
    size1, c = _out_size(tuple(x.shape[2:]), kernel1, stride1), len(weight1)
    grad_hidden = grad.new_zeros((b, *size1, c) if needs[0] else 0)
    grad_columns = grad.new_zeros(weight1[0].numel() + 1, c, dtype=torch.float32)

    def take_image(phase: Phase, images: Tensor) -> None:
        active = torch.ops.aten.threshold_backward(images.view(-1, c), next(places), 0)
        if needs[1] or needs[2]:
            patches = _patches(x, kernel1, stride1, phase, stride2)
            if bf16:
                grad_columns.add_(patches.T @ active)
            else:
                grad_columns.addmm_(patches.T, active)
        if needs[0]:
            target = grad_hidden[:, *_window(phase, stride2, (0, 0))]
            target += active.view(*phase.inputs, b, c).permute(2, 0, 1, 3)

    nothing = grad.new_empty(0)
    grad_weight2 = torch.empty_like(weight2, dtype=torch.float32) if needs[3] else None
    with torch.autocast(x.device.type, enabled=False):
        G = _from_output(grad, out)
        _backward(algorithm, weight2, G, kept, grad_weight2, take_image if any(needs[:3]) else None)
        grad_x = nothing
        if needs[0]:
            grad_x = torch.nn.grad.conv2d_input(x.shape, weight1, grad_hidden.permute(0, 3, 1, 2), stride1).contiguous()
    return (
        grad_x,
        grad_columns[:-1].T.reshape(weight1.shape) if needs[1] else grad.new_empty(0),
        grad_columns[-1].clone() if needs[2] else grad.new_empty(0),
        grad.new_empty(0) if grad_weight2 is None else grad_weight2,
        grad.sum((0, 2, 3)) if needs[4] else grad.new_empty(0),
    )


def _stem_keep(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, weight1, _, weight2, _, ctx.stride1, ctx.stride2, ctx.bf16, _ = inputs
    ctx.save_for_backward(x, weight1, weight2, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _stem_gradients(ctx, grad, *_):  # type: ignore[no-untyped-def]
    needs = list(ctx.needs_input_grad[:5])
    grads = _stem_backward(grad, *ctx.saved_tensors, ctx.stride1, ctx.stride2, ctx.bf16, needs)
    return *(g if need else None for g, need in zip(grads, needs, strict=True)), None, None, None, None


_stem.register_autograd(_stem_gradients, setup_context=_stem_keep)
