"""Convolution, ReLU and convolution as one operator: conv1 and PrimaryCaps of the paper's network (section 4).

The second convolution is the bilinear one of `convolution`. Its transform B reads the hidden layer in the order (phase,
position, image, channel). If the rows of an im2col of the input have that order, the first convolution is one matrix
product that writes the hidden layer as B reads it. The 52 MB of a batch of 128 are never rearranged, and the ReLU works
in place. The gradient arrives in the same order and uses the same im2col. Hidden positions that no output reads (the
twentieth row and column for the paper's sizes) are not computed.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.grad import conv2d_input

from capsnet.kernels.bilinear import PRECISIONS, Algorithm, Pair, Phase, multiply, multiply_backward, phase_sizes
from capsnet.kernels.convolution import (
    empty_output,
    from_output,
    if_wanted,
    kept_sizes,
    out_size,
    plan_for,
    to_output,
    window,
)
from capsnet.kernels.operators import differentiable_once
from capsnet.kernels.private import relu_backward
from capsnet.kernels.products import mm


def _patches(x: Tensor, kernel: tuple[int, ...], strides: list[int], phase: Phase) -> Tensor:
    """im2col, (positions of the phase · b, c·kh·kw + 1): its rows are in the order of the phase's image.

    The last column is ones, for the bias.
    """
    windows = x.unfold(2, kernel[-2], strides[0]).unfold(3, kernel[-1], strides[0])
    windows = windows[:, :, *window(phase, strides[1])].permute(2, 3, 0, 1, 4, 5)
    rows, length = prod(windows.shape[:3]), prod(windows.shape[3:])
    patches = phase.B.new_empty(rows, length + 1)
    patches[:, :length].view(windows.shape).copy_(windows)
    patches[:, length] = 1
    return patches


def _positions(plan: Algorithm, b: int) -> list[int]:
    return [prod(phase.inputs) * b for phase in plan.phases]


def _stem_out(x: Tensor, weight1: Tensor, weight2: Tensor, strides: list[int]) -> Pair:
    return out_size(out_size(x.shape, weight1.shape, strides[0]), weight2.shape, strides[1])


@torch.library.custom_op("capsnet::bilinear_stem", mutates_args=())
def _stem(
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    strides: list[int],
    precision: str,
    keep: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The result; and the hidden layer, phase by phase, its transform and that of the second filters.

    keep says whether weight2 wants a gradient, for which that transform is kept, and whether anything before it does,
    for which the hidden layer is and, as far as `keeps_filters`, the transform of the filters.
    """
    b, c, out = len(x), len(weight1), _stem_out(x, weight1, weight2, strides)
    plan = plan_for(weight2, strides[1], list(out), precision)
    sizes = _positions(plan, b)
    bias = weight1.new_zeros(c) if bias1 is None else bias1
    columns = torch.cat([weight1.flatten(1), bias[:, None]], 1).T.to(plan.dtype)
    hidden = columns.new_empty(sum(sizes) if keep[1] else max(sizes), c)
    places = iter(hidden.split(sizes) if keep[1] else [hidden[:size] for size in sizes])

    def image(phase: Phase) -> Tensor:
        patches = _patches(x, weight1.shape, strides, phase)
        place = next(places)
        active = torch.clamp_min(mm(patches, columns, out=place), 0.0, out=place)
        return active.view(prod(phase.inputs), -1)

    with torch.autocast("cpu", enabled=False):
        Y, V, U = multiply(plan, weight2, b, image, keep)
        return to_output(Y, bias2, out, out, b), hidden if keep[1] else hidden.new_empty(0, c), V, U


@_stem.register_fake
def _(x, weight1, bias1, weight2, bias2, strides, precision, keep):  # type: ignore[no-untyped-def]
    out, c = _stem_out(x, weight1, weight2, strides), len(weight1)
    y = empty_output(x, x.shape[0], weight2.shape[0], out)
    sizes = phase_sizes((weight2.shape[2], weight2.shape[3]), strides[1], out, precision)
    rows, dtype = len(x) if keep[1] else 0, PRECISIONS[precision].dtype
    hidden = x.new_empty((rows * sum(n for _, n in sizes), c), dtype=dtype)
    V, U = kept_sizes(weight2, strides[1], out, precision, len(x), keep)
    return y, hidden, x.new_empty(V, dtype=dtype), x.new_empty(U, dtype=dtype)


@torch.library.custom_op("capsnet::bilinear_stem_backward", mutates_args=())
def _stem_backward(
    grad: Tensor,
    x: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    hidden: Tensor,
    V: Tensor,
    U: Tensor,
    strides: list[int],
    precision: str,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, weight1, bias1, weight2 and bias2, as far as they are needed."""
    b, c, out = len(x), len(weight1), (grad.shape[2], grad.shape[3])
    plan = plan_for(weight2, strides[1], list(out), precision)
    places = iter(hidden.split(_positions(plan, b)) if any(needs[:3]) else ())
    grad_columns = grad.new_zeros(weight1[0].numel() + 1, c)
    size1 = out_size(x.shape, weight1.shape, strides[0])
    grad_hidden = if_wanted(needs[0], lambda: grad.new_zeros(b, *size1, c), grad)

    def take(phase: Phase, images: Tensor) -> None:
        active = relu_backward(images.view(-1, c), next(places))
        grad_columns.add_(mm(_patches(x, weight1.shape, strides, phase).T, active))
        if needs[0]:
            grad_hidden[:, *window(phase, strides[1])] = active.view(*phase.inputs, b, c).permute(2, 0, 1, 3)

    def through_conv1() -> Tensor:
        grad1 = grad_hidden.permute(0, 3, 1, 2)
        return conv2d_input(x.shape, weight1, grad1, strides[0]).contiguous()

    with torch.autocast("cpu", enabled=False):
        G = from_output(grad, out)
        grad_weight2 = multiply_backward(plan, weight2, G, (V, U), needs[3], take if any(needs[:3]) else None)
        return (
            if_wanted(needs[0], through_conv1, grad),
            if_wanted(needs[1], lambda: grad_columns[:-1].T.reshape(weight1.shape), grad),
            if_wanted(needs[2], lambda: grad_columns[-1].clone(), grad),
            grad_weight2,
            if_wanted(needs[4], lambda: grad.sum((0, 2, 3)), grad),
        )


@_stem_backward.register_fake
def _(grad, x, weight1, weight2, hidden, V, U, strides, precision, needs):  # type: ignore[no-untyped-def]
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
differentiable_once(_stem_backward, "convolution")


def fused_stem(
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    stride1: int,
    stride2: int,
    precision: str,
) -> Tensor:
    """conv2(relu(conv1(x))), with conv1 writing its result where and how conv2's transform reads it.

    For shapes and dtypes for which `dispatch.stem_pays` holds. It can be differentiated once.
    """
    tensors = [t if t is None else t.float() for t in (x, weight1, bias1, weight2, bias2)]
    before = any(t is not None and t.requires_grad for t in tensors[:3])
    keep = [torch.is_grad_enabled() and wanted for wanted in (weight2.requires_grad, before)]
    y, *_ = _stem(*tensors, [stride1, stride2], precision, keep)
    return y.to(x.dtype)
