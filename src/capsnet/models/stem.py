"""From images to feature maps: the part of a capsule network before its capsules.

- conv: convolutions without padding, each with a ReLU, as in the paper;
- residual: a convolution and residual blocks, padded, with batch norm (`capsnet.nn.residual`);
- module: any module (b, c, h, w) → (b, c', h', w'), given as `CapsNet(config, stem=module)` or by a plugin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from capsnet.errors import UserError
from capsnet.models.base import evaluating
from capsnet.models.config import CapsNetConfig
from capsnet.nn.layers import Conv2d
from capsnet.nn.residual import residual_stem

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Window:
    """The geometry of a convolution."""

    kernel: int
    stride: int
    padding: int = 0

    def of(self, side: int) -> int:
        """The side of the output for an input of this side."""
        return (side + 2 * self.padding - self.kernel) // self.stride + 1


def windows(config: CapsNetConfig) -> list[Window]:
    """The convolutions of the stem in order; the shortcuts of residual blocks see less and are left out.

    >>> windows(CapsNetConfig(stem="residual"))
    [Window(kernel=9, stride=1, padding=4)]
    """
    sizes = list(zip(config.stem_kernels, config.stem_strides, strict=True))
    if config.stem == "conv":
        return [Window(kernel, stride) for kernel, stride in sizes]
    first = [Window(kernel, stride, kernel // 2) for kernel, stride in sizes[:1]]
    blocks = [Window(kernel, step, kernel // 2) for kernel, stride in sizes[1:] for step in (stride, 1)]
    return first + blocks


def feature_shape(config: CapsNetConfig) -> Shape:
    """Channels, height and width of the feature maps of a conv or residual stem."""
    if not len(config.stem_channels) == len(config.stem_kernels) == len(config.stem_strides):
        raise UserError("stem_channels, stem_kernels and stem_strides need one number for each convolution.")
    if config.stem == "residual" and not config.stem_channels:
        raise UserError("a residual stem needs at least one convolution: give stem_channels, stem_kernels and strides.")
    channels, *sides = config.image_shape
    for window in windows(config):
        sides = [window.of(side) for side in sides]
    return config.stem_channels[-1] if config.stem_channels else channels, sides[0], sides[1]


def grid_size(config: CapsNetConfig, features: Shape | None = None) -> tuple[int, int]:
    """Height and width of the primary capsules' grid; an image that is too small is refused here.

    `features` is the shape of the feature maps where the config does not determine it.
    """
    _, *sides = features or feature_shape(config)
    primary = Window(config.primary_kernel, config.primary_stride)
    height, width = (primary.of(side) for side in sides)
    if min(height, width, *sides) < 1:
        raise too_small(config, features)
    return height, width


def too_small(config: CapsNetConfig, features: Shape | None) -> UserError:
    height, width = config.image_shape[1:]
    if features is not None:
        return UserError(
            f"an image of {height}×{width} px gives feature maps of {features[1]}×{features[2]}, too small for a "
            f"primary_kernel of {config.primary_kernel}: use larger images or a smaller kernel."
        )
    kernels, strides = [*config.stem_kernels, config.primary_kernel], [*config.stem_strides, config.primary_stride]
    return UserError(
        f"an image of {height}×{width} px is too small for kernels of {kernels} with strides {strides}: "
        f"use larger images or smaller kernels."
    )


def receptive_field(config: CapsNetConfig, grid: tuple[int, int]) -> dict[str, int]:
    """The capsule at (y, x) of the grid sees `size` rows from offset + stride·y on, and columns likewise.

    Padding makes the offset negative. A module may see anything: its fields are as large as the image, one around each
    cell of the grid.
    """
    if config.stem == "module":
        size, stride = max(config.image_shape[1:]), max(1, config.image_shape[1] // grid[0])
        return {"size": size, "stride": stride, "offset": (stride - size) // 2}
    size, stride, offset = 1, 1, 0
    for window in (*windows(config), Window(config.primary_kernel, config.primary_stride)):
        size, offset = size + (window.kernel - 1) * stride, offset - window.padding * stride
        stride *= window.stride
    return {"size": size, "stride": stride, "offset": offset}


def build_stem(config: CapsNetConfig, device: torch.device | None, dtype: torch.dtype | None) -> nn.Sequential:
    """The stem that a config describes, with fresh weights."""
    if config.stem == "module":
        raise UserError(
            "the stem of this network is a module that was given in Python: pass it again as stem=module, "
            "or define the network as a model in a plugin."
        )
    if config.stem == "residual":
        sizes = config.stem_channels, config.stem_kernels, config.stem_strides
        return residual_stem(config.image_shape[0], *sizes, device=device, dtype=dtype)
    return conv_stem(config, device, dtype)


def conv_stem(config: CapsNetConfig, device: torch.device | None, dtype: torch.dtype | None) -> nn.Sequential:
    """Convolution, batch norm if asked for, ReLU; for each entry of the config."""
    layers: list[nn.Module] = []
    before, std = config.image_shape[0], 0.05 if config.init == "official" else None
    bias = not config.stem_norm  # a norm removes any bias
    for channels, kernel, stride in zip(config.stem_channels, config.stem_kernels, config.stem_strides, strict=True):
        layers.append(Conv2d(before, channels, kernel, stride, bias, init_std=std, device=device, dtype=dtype))
        if config.stem_norm:
            layers.append(nn.BatchNorm2d(channels, device=device, dtype=dtype))
        layers.append(nn.ReLU(inplace=True))
        before = channels
    return nn.Sequential(*layers)


@torch.no_grad()
def measured_shape(stem: nn.Module, image_shape: Shape) -> Shape:
    """The shape of a module's feature maps, from a black image; its statistics and mode stay as they are."""
    like = next(stem.parameters(), torch.zeros(()))
    with evaluating(stem):
        maps = stem(torch.zeros(1, *image_shape, device=like.device, dtype=like.dtype))
    if not isinstance(maps, Tensor) or maps.dim() != 4:
        came = f"a tensor of shape {tuple(maps.shape)}" if isinstance(maps, Tensor) else f"a {type(maps).__name__}"
        raise UserError(
            f"a stem turns images (b, c, h, w) into feature maps (b, c', h', w'), and {type(stem).__name__} gives "
            f"{came}: remove its pooling and its classifier."
        )
    return maps.shape[1], maps.shape[2], maps.shape[3]


def describe_stem(config: CapsNetConfig, stem: nn.Module) -> list[str]:
    """The stem in words, one entry per layer or block."""
    frozen = ", frozen" if config.freeze_stem else ""
    if config.stem == "module":
        return [type(stem).__name__ + frozen]
    sizes = config.stem_channels, config.stem_kernels, config.stem_strides
    if config.stem == "residual":
        return [said + frozen for said in describe_blocks(*sizes)]
    norm = ", batch norm" if config.stem_norm else ""
    return [f"convolution {size}{norm}{frozen}" for size in map(describe_size, *sizes)]


def describe_blocks(channels: Sequence[int], kernels: Sequence[int], strides: Sequence[int]) -> list[str]:
    """
    >>> describe_blocks((32, 64), (3, 3), (1, 2))
    ['convolution 3×3, 32', 'residual block 3×3, 64, stride 2']
    """
    first, *others = map(describe_size, channels, kernels, strides)
    return [f"convolution {first}", *(f"residual block {size}" for size in others)]


def describe_size(channels: int, kernel: int, stride: int) -> str:
    return f"{kernel}×{kernel}, {channels}" + (f", stride {stride}" if stride > 1 else "")
