"""Efficient-CapsNet (Mazzia, Salvetti and Chiaberge 2021): few capsules, self-attention routing, 161,824 parameters.

    28×28 → conv 5×5, 32 → conv 3×3, 64 → conv 3×3, 64 → conv 3×3, 128, stride 2 → 9×9×128
          → depthwise conv 9×9 → 1×1×128 = 16 primary capsules of 8-D → 10 class capsules of 16-D

Each convolution is followed by ReLU and then batch norm, in this order. The count is that of the paper: convolutions
with biases 130,112, batch norms 576, depthwise convolution 10,496, transformations 20,480, β of the routing 160; the
decoder is not included. Larger images give more primary capsules, on a grid.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from capsnet.errors import UserError
from capsnet.models.capsnet import CapsNet
from capsnet.models.config import CapsNetConfig
from capsnet.models.registry import register
from capsnet.nn.layers import Conv2d, PrimaryCaps
from capsnet.routing.options import RoutingOptions
from capsnet.routing.self_attention import SelfAttentionRouting, squash_exp


@dataclass(frozen=True)
class EfficientConfig(CapsNetConfig):
    """Efficient-CapsNet; the fields of a capsule network with the paper's sizes."""

    kind: ClassVar[str] = "efficient"

    stem_channels: tuple[int, ...] = (32, 64, 64, 128)
    """Output channels of each convolution; the last one is divided into primary capsules."""
    stem_kernels: tuple[int, ...] = (5, 3, 3, 3)
    """Kernel size of each convolution."""
    stem_strides: tuple[int, ...] = (1, 1, 1, 2)
    """Stride of each convolution."""
    stem_norm: bool = True
    """Batch normalisation after each ReLU."""
    primary_types: int = 16
    """Primary capsule types; with their dimension they make up the channels of the last convolution."""
    primary_stride: int = 1
    """Stride of the depthwise convolution."""
    routing: RoutingOptions = field(default_factory=SelfAttentionRouting.Options)
    """Routing algorithm and its options."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_trained_convolutions()
        channels = self.primary_types * self.primary_dim
        if self.stem_channels[-1:] != (channels,):
            raise UserError(
                f"primary_types={self.primary_types} of {self.primary_dim} dimensions need {channels} channels of the "
                f"last convolution, and stem_channels is {self.stem_channels}: change one of them."
            )


class DepthwiseCaps(PrimaryCaps):
    """Primary capsules by a depthwise convolution, with the paper's squash.

    (b, types dim, h, w) → (b, h' w' types, dim)

    >>> DepthwiseCaps(16, 8, kernel_size=9, stride=1)(torch.randn(2, 128, 9, 9)).shape
    torch.Size([2, 16, 8])
    """

    def __init__(self, types: int, dim: int, kernel_size: int, stride: int, **options: Any) -> None:
        channels = types * dim
        super().__init__(channels, types, dim, kernel_size, stride, groups=channels, **options)

    def squash(self, s: Tensor) -> Tensor:
        return squash_exp(s)


@register("efficient")
class EfficientCapsNet(CapsNet):
    """Convolutions, a depthwise convolution into few capsules, and class capsules.

    >>> model = EfficientCapsNet(EfficientConfig(decoder=()))
    >>> sum(p.numel() for p in model.parameters())
    161824
    """

    Config = EfficientConfig
    config: EfficientConfig

    def make_primary(self, channels: int, device: torch.device | None, dtype: torch.dtype | None) -> PrimaryCaps:
        c = self.config
        factor = 1 / c.primary_types if c.primary_factor else 1.0
        sizes = c.primary_types, c.primary_dim, c.primary_kernel, c.primary_stride
        return DepthwiseCaps(*sizes, factor=factor, squashed=c.primary_squash, init=c.init, device=device, dtype=dtype)

    def make_stem(self, device: torch.device | None, dtype: torch.dtype | None) -> nn.Sequential:
        c, layers, before = self.config, list[nn.Module](), self.config.image_shape[0]
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        std = 0.05 if c.init == "official" else None
        for channels, kernel, stride in zip(c.stem_channels, c.stem_kernels, c.stem_strides, strict=True):
            layers += [Conv2d(before, channels, kernel, stride, init_std=std, **where), nn.ReLU(inplace=True)]
            if c.stem_norm:
                layers.append(nn.BatchNorm2d(channels, **where))
            before = channels
        return nn.Sequential(*layers)
