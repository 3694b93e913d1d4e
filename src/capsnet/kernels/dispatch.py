"""Dispatch: the plain form of a computation, or a kernel that is faster for this shape, device and dtype.

Layers call the functions here and do not know which implementation runs. `with plain():` disables every fast path. They
are also disabled inside `torch.func` and forward-mode differentiation, which support PyTorch's own operators only.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from capsnet.kernels import convolution
from capsnet.kernels.bilinear import Pair
from capsnet.kernels.convolution import out_size
from capsnet.kernels.operators import LANES
from capsnet.kernels.private import constant, has_hooks, is_transformed, processor_has_amx, processor_has_bf16
from capsnet.kernels.products import mm
from capsnet.kernels.stem import fused_stem

if TYPE_CHECKING:
    from capsnet.routing.options import DynamicOptions

SMALL = 2**15  # elements; smaller inputs go to F.conv2d at once, because choosing would take longer than it saves
FEW_PLACES, MANY_TAPS, MANY_WEIGHTS = 150, 49, 2**20  # where one product over patches beats F.conv2d: measured
LARGE_VOTES = 1 << 30  # bytes; the plain form of routing holds several times as much
FEWEST_EXAMPLES = 8  # the fused routing loops take sixteen examples at a time and are faster from half of that on
FEWEST_GRID_VOTES = 200_000

# --- The switch -------------------------------------------------------------------------------------------

_lock, _plain_blocks = threading.Lock(), 0  # of all threads


@contextmanager
def plain() -> Iterator[None]:
    """Compute everything in the readable form, for tests, benchmarks and exports.

    >>> with plain():
    ...     enabled()
    False
    """
    global _plain_blocks
    with _lock:
        _plain_blocks += 1
    try:
        yield
    finally:
        with _lock:
            _plain_blocks -= 1


def enabled() -> bool:
    """Whether a fast path may be taken."""
    return _plain_blocks == 0 and not is_transformed()


# --- Precision --------------------------------------------------------------------------------------------

best_tile = constant(convolution.best_tile)


@constant
def has_bf16() -> bool:
    """Whether the processor multiplies bfloat16 in hardware, or CAPSNET_EMULATE_BF16=1 asks to act as if it did.

    Emulation is slow but gives the numbers of a processor with bfloat16.
    """
    return os.environ.get("CAPSNET_EMULATE_BF16") == "1" or processor_has_bf16()


has_amx = constant(processor_has_amx)


def wants_bf16(x: Tensor) -> bool:
    """Whether x or autocast asks for bfloat16."""
    autocast = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16
    return autocast or x.dtype == torch.bfloat16


def precision_for(x: Tensor) -> str:
    """The precision that x or autocast asks for, in the way that suits this processor best."""
    if not wants_bf16(x):
        return "exact"
    return "bf16" if has_bf16() else "rough"


def would_emulate_bf16(x: Tensor) -> bool:
    """Whether autocast would turn x into bfloat16 on a processor that has to emulate it."""
    return enabled() and x.device.type == "cpu" and x.dtype == torch.float32 and precision_for(x) == "rough"


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear; autocast leaves it in float32 where bfloat16 would be emulated."""
    if not would_emulate_bf16(x):
        return F.linear(x, weight, bias)
    with torch.autocast("cpu", enabled=False):
        return F.linear(x, weight, bias)


# --- Convolutions -----------------------------------------------------------------------------------------


def choose_tile(x: Tensor, size: tuple[int, ...], weight: Tensor, stride: int) -> Pair | None:
    """The tile for a bilinear convolution of something of this size (b, c, h, w), or None for the plain one.

    A program that is being exported gets the plain one: it may run where this package is not installed.
    """
    if not enabled() or x.dim() != 4 or torch.compiler.is_exporting():
        return None
    if size[0] * size[1] * size[2] * size[3] < SMALL or x.device.type != "cpu":
        return None
    if x.dtype not in (torch.float32, torch.bfloat16) or weight.dtype not in (torch.float32, x.dtype):
        return None
    (b, c, *_), (o, channels, *kernel) = size, weight.shape
    if c != channels or size[2] < kernel[0] or size[3] < kernel[1]:
        return None  # F.conv2d reports the error
    out = out_size(size, weight.shape, stride)
    training = torch.is_grad_enabled() and weight.requires_grad
    # while a graph is traced sizes are symbols, and `range` turns them into numbers: there is a graph for each size
    b, c, o, *sides = (range(n).stop for n in (b, c, o, *out, *kernel))
    return best_tile(b, c, o, (sides[0], sides[1]), (sides[2], sides[3]), stride, training, wants_bf16(x) and has_amx())


def _plain(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int) -> Tensor:
    cpu = enabled() and x.device.type == "cpu" and x.dtype != torch.float64
    if cpu and x.dim() == 4 and (padding or (wants_bf16(x) and has_bf16())):
        # padded and bfloat16 convolutions are fastest channels last; what comes after one is so already
        x = x.contiguous(memory_format=torch.channels_last)
    if not cpu or not wants_bf16(x):
        return F.conv2d(x, weight, bias, stride, padding)
    if has_bf16():
        return F.conv2d(x, weight, bias, stride, padding).to(x.dtype)
    with torch.autocast("cpu", enabled=False):
        full = None if bias is None else bias.float()
        return F.conv2d(x.float(), weight.float(), full, stride, padding).to(x.dtype)


def patches_pay(x: Tensor, weight: Tensor, stride: int) -> bool:
    """Whether `_patches` is faster: few results from large kernels, as for a single image, and no gradient wanted.

    With fewer places than output channels the weights are most of what is read. F.conv2d first rearranges them; a
    matrix product reads them in place if they are contiguous, in float32 also where bfloat16 is asked for: rounding the
    weights would take longer.
    """
    if not enabled() or x.device.type != "cpu" or torch.compiler.is_exporting():
        return False
    if x.dim() != 4 or not x.dtype == weight.dtype == torch.float32 or x.shape[1] != weight.shape[1]:
        return False
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return False
    out, kernel = out_size(x.shape, weight.shape, stride), weight.shape[2:]
    few = min(out) > 0 and 0 < len(x) * prod(out) <= min(FEW_PLACES, len(weight))
    return few and prod(kernel) >= MANY_TAPS and weight.numel() >= MANY_WEIGHTS and weight.is_contiguous()


def _patches(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int) -> Tensor:
    """Convolution as one matrix product of image patches with filters: (places × taps)·(taps × o)."""
    patches = x.unfold(2, weight.shape[2], stride).unfold(3, weight.shape[3], stride).permute(0, 2, 3, 1, 4, 5)
    rows, taps = patches.flatten(3).flatten(0, 2), weight.flatten(1).T
    with torch.autocast("cpu", enabled=False):
        y = mm(rows, taps) if bias is None else mm(rows, taps).add_(bias)
    return y.unflatten(0, patches.shape[:3]).permute(0, 3, 1, 2)


def conv2d(x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: int = 1, padding: int = 0) -> Tensor:
    """F.conv2d by the fastest of three ways: (b, c, h, w), (o, c, kh, kw) → (b, o, h', w').

    The bilinear form is taken on CPUs, for float32 and bfloat16, where `best_tile` estimates from multiply-adds and
    memory traffic that it is faster. Otherwise single images with large kernels take a product over patches
    (`patches_pay`), and everything else F.conv2d. `torch.compile` makes a program for each batch size. The result is
    channels last in memory and can be differentiated once; use `kernels.plain()` for higher derivatives.

    If x or autocast asks for bfloat16 and the processor supports it, the operands of transforms and products are
    bfloat16. The result keeps the dtype of x: float32 under autocast, because the last stage accumulates in float32 and
    squash and routing need it. Emulated bfloat16 would be four times slower, so other processors compute in float32 by
    a form with fewer products and errors near 1e-4 (those of bfloat16 are near 1e-2).
    """
    size = (*x.shape[:2], *(side + 2 * padding for side in x.shape[2:]))
    tile = choose_tile(x, size, weight, stride)
    if tile is None:
        patches = not padding and patches_pay(x, weight, stride)
        return _patches(x, weight, bias, stride) if patches else _plain(x, weight, bias, stride, padding)
    x = F.pad(x, [padding] * 4) if padding else x
    return convolution.bilinear_conv2d(x, weight, bias, stride, tile, precision_for(x))


def stem_pays(x: Tensor, weight1: Tensor, weight2: Tensor, stride1: int = 1, stride2: int = 2) -> bool:
    """Whether the fused stem is fastest: where the first convolution is best plain and the second is one tile."""
    size = (*x.shape[:1], len(weight1), *out_size(x.shape, weight1.shape, stride1))
    tile = choose_tile(x, size, weight2, stride2)
    if tile is None or tile != out_size(size, weight2.shape, stride2):
        return False
    return x.shape[1] == weight1.shape[1] and choose_tile(x, x.shape, weight1, stride1) is None


def primary_capsules(stem: nn.Sequential, primary: Any, images: Tensor) -> Tensor:
    """primary(stem(images)) for a `PrimaryCaps` after a convolutional stem, by one kernel where that is faster.

    The kernel does not call the modules, so it is not taken where one of them has a hook. With bfloat16 in hardware,
    what passes between the layers of a stem is rounded to bfloat16 too.
    """
    if fuses(stem, primary, images):
        conv1: Any = stem[0]
        conv2 = primary.conv
        weights = conv1.weight, conv1.bias, conv2.weight, conv2.bias
        strides = conv1.stride[0], conv2.stride[0]
        return primary.to_capsules(fused_stem(images, *weights, *strides, precision_for(images)))
    return primary(in_bf16(stem, images))


def fuses(stem: nn.Sequential, primary: Any, images: Tensor) -> bool:
    """Whether stem and primary capsules are two plain convolutions with a ReLU between them that one kernel can do."""
    if len(stem) != 2 or not isinstance(stem[1], nn.ReLU) or type(stem[0]) is not type(primary.conv):
        return False
    if any(map(has_hooks, (stem, *stem, primary, primary.conv))):
        return False
    conv1, conv2 = cast(nn.Conv2d, stem[0]), cast(nn.Conv2d, primary.conv)
    return stem_pays(images, conv1.weight, conv2.weight, conv1.stride[0], conv2.stride[0])


def in_bf16(stem: nn.Sequential, images: Tensor) -> Tensor:
    """stem(images), with bfloat16 between its layers where that is asked for and in hardware.

    Convolutions round their inputs to bfloat16 anyway; norms and ReLUs then move half the bytes, which is what they
    wait for. Statistics are accumulated in float32, and the result is float32.
    """
    cpu = enabled() and images.device.type == "cpu" and images.dtype == torch.float32 and images.dim() == 4
    if not cpu or precision_for(images) != "bf16":
        return stem(images)
    return stem(images.to(torch.bfloat16, memory_format=torch.channels_last)).float()


def without_emulation(module: nn.Module, x: Tensor) -> Tensor:
    """module(x) for a module of ordinary layers, in float32 where autocast would have to emulate bfloat16."""
    if not would_emulate_bf16(x):
        return module(x).to(x.dtype)
    with torch.autocast("cpu", enabled=False):
        return module(x)


# --- Routing ----------------------------------------------------------------------------------------------


def routing_pays(u: Tensor, W: Tensor) -> bool:
    """Whether routing without stored votes beats the plain einsum: û is large, and unless W is shared the batch too.

    Below that the rearranging costs more than it saves. The sizes were measured on a CPU. Other devices have the
    bandwidth for the plain form until the votes are too large to hold. An exported program takes the plain form too,
    because it may run where this package is not installed.
    """
    if not enabled() or torch.compiler.is_exporting():
        return False
    b, i, (n, j, q, _) = u.shape[0], u.shape[1], W.shape
    votes = b * i * j * q
    too_large = votes * u.element_size() > LARGE_VOTES
    if too_large or u.device.type != "cpu":
        return too_large
    return votes >= 180_000 if n < i else votes >= 400_000 and b >= FEWEST_EXAMPLES


def dynamic_routing(u: Tensor, W: Tensor, bias: Tensor | None, options: DynamicOptions) -> Tensor | None:
    """Upper capsules (b, j, q) by the kernel, or None where the plain form is as good."""
    if not routing_pays(u, W):
        return None
    from capsnet.kernels import routing

    return routing.dynamic_routing(u, W, bias, options.iterations, options.leaky, options.detach)


def attend(u: Tensor, W: Tensor, V: Tensor) -> Tensor:
    """Σ_i softmax_j(û_{j|i}·V_j) û_{j|i} without stored votes; to be called where `routing_pays`."""
    from capsnet.kernels import routing

    return routing.attend(u, W, V)


def sum_of_votes(u: Tensor, W: Tensor) -> Tensor:
    """Σ_i û_{j|i} (b, j, q) as one matrix product; the positions of a grid that share W are added up before."""
    n, j, q, _ = W.shape
    total = u if n == u.shape[1] else u.unflatten(1, (-1, n)).sum(1)
    return (total.flatten(1) @ W.permute(0, 3, 1, 2).flatten(2).flatten(0, 1)).unflatten(1, (j, q))


def weighted_sum_of_votes(u: Tensor, W: Tensor, c: Tensor) -> Tensor:
    """Σ_i c_ij û_{j|i} = Σ_i W_ij (c_ij u_i), c (b, i, j) → (b, j, q); a grid that shares W is added up before W."""
    n, i = len(W), u.shape[1]
    if n == i:
        scaled = c.permute(2, 0, 1).unsqueeze(-1) * u  # j b i p
    else:
        scaled = torch.einsum("bgnj,bgnp->jbnp", c.unflatten(1, (-1, n)), u.unflatten(1, (-1, n)))
    return torch.bmm(scaled.flatten(2), W.permute(1, 0, 3, 2).flatten(1, 2)).transpose(0, 1)


def agreements(u: Tensor, W: Tensor, V: Tensor) -> Tensor:
    """û_{j|i}·V_j = u_i·(W_ijᵀ V_j): V (b, j, q) → (b, i, j); a grid that shares W shares Wᵀ V, too."""
    n = len(W)
    pushed = torch.bmm(V.transpose(0, 1), W.permute(1, 2, 0, 3).flatten(2)).unflatten(2, (n, -1))  # j b n p
    if n == u.shape[1]:
        return (pushed * u).sum(-1).permute(1, 2, 0)
    grid = u.unflatten(1, (-1, n)).permute(2, 0, 1, 3)  # n b g p
    return (grid @ pushed.permute(2, 1, 3, 0)).permute(1, 2, 0, 3).flatten(1, 2)


def moments(u: Tensor, W: Tensor) -> Any:
    """The kernel that computes the moments of Gaussian routing, or None where the plain form is as good."""
    if u.device.type != "cpu" or u.dtype != torch.float32 or W.dtype != torch.float32 or not routing_pays(u, W):
        return None
    from capsnet.kernels import moments as kernel

    return None if kernel.fused() is None else kernel.moments


def windows_of(cell: Tensor, filled: Tensor, cells: int) -> Any:
    """The windows that see each cell of a grid: see `capsnet.kernels.grid.Windows`."""
    from capsnet.kernels.grid import Windows

    return Windows.of(cell, filled, cells)


def tiled_examples(b: int) -> int:
    """How many examples the kernel for grids stores for a batch of b: from sixteen on, the last tile is filled up."""
    return b if b < LANES else -(-b // LANES) * LANES


def one_window(u: Tensor, W: Tensor) -> Any:
    """A dense layer as a grid with a single window: u (b, i, p) and W (n, j, …) with n dividing i."""
    from capsnet.kernels.grid import Windows

    return Windows.one(u.shape[1] // W.shape[0])


def grid_votes(u: Tensor, W: Tensor, matrix: bool, windows: Any) -> Any:
    """The votes of a grid as a kernel sees them, or None where the plain form is as good."""
    if not grid_pays(u, W, windows):
        return None
    from capsnet.kernels import grid

    return None if grid.fused() is None else grid.GridVotes(u, W if matrix else W.transpose(-1, -2), windows)


def grid_pays(u: Tensor, W: Tensor, windows: Any) -> bool:
    """Whether the fused loops over a grid beat the plain form: from half of their sixteen examples on."""
    if not enabled() or torch.compiler.is_compiling() or u.device.type != "cpu":
        return False
    cells = len(windows.starts) - 1
    votes = u.shape[0] * len(windows.window) * (u.shape[1] // cells) * W.shape[1] * u.shape[2]
    many = u.shape[0] >= FEWEST_EXAMPLES and votes >= FEWEST_GRID_VOTES
    return u.dtype == W.dtype == torch.float32 and (many or votes * u.element_size() > LARGE_VOTES)
