"""A residual network without capsules: what a capsule network with a residual stem is compared with.

The stem is the same (`capsnet.nn.residual`); its feature maps are averaged over the positions, and one linear layer
gives the logits of the classes (He et al. 2016).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from capsnet.errors import UserError
from capsnet.kernels import dispatch
from capsnet.models.base import Model, Output, describe_image
from capsnet.models.config import ModelConfig
from capsnet.models.registry import register
from capsnet.models.stem import describe_blocks
from capsnet.nn.decoder import Linear
from capsnet.nn.residual import residual_stem
from capsnet.ranges import WIDEST, check_range


@dataclass(frozen=True)
class ResNetConfig(ModelConfig):
    """A residual network: a convolution, residual blocks, average pooling, a linear layer."""

    kind: ClassVar[str] = "resnet"

    stem_channels: tuple[int, ...] = (32, 64, 128)
    """Output channels of the first convolution and of each residual block."""
    stem_kernels: tuple[int, ...] = (3, 3, 3)
    """Kernel size of the first convolution and of each block."""
    stem_strides: tuple[int, ...] = (1, 2, 2)
    """Stride of the first convolution and of each block."""
    dropout: float = 0.0
    """Dropout before the linear layer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, 1, WIDEST, "stem_channels", "stem_kernels", "stem_strides")
        check_range(self, 0, 1, "dropout")
        if not 0 < len(self.stem_channels) == len(self.stem_kernels) == len(self.stem_strides):
            raise UserError("stem_channels, stem_kernels and stem_strides need one number for each block.")

    def tiny(self) -> Self:
        return replace(self, stem_channels=(8, 8), stem_kernels=(3, 3), stem_strides=(2, 2))


@register("resnet")
class ResNet(Model):
    """Images (b, c, h, w) → probabilities of the classes.

    >>> ResNet(ResNetConfig((3, 32, 32)))(torch.rand(2, 3, 32, 32)).activations.shape
    torch.Size([2, 10])
    """

    Config = ResNetConfig
    config: ResNetConfig
    default_loss = "entropy"
    first_convolution = "stem.0.weight"

    def __init__(
        self, config: ResNetConfig, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(config)
        sizes = config.stem_channels, config.stem_kernels, config.stem_strides
        self.stem = residual_stem(config.image_shape[0], *sizes, device=device, dtype=dtype)
        self.dropout = nn.Dropout(config.dropout)
        self.head = Linear(config.stem_channels[-1], config.num_classes, device=device, dtype=dtype)

    def forward(self, images: Tensor, trace: bool = False, routing: Mapping[str, Any] | None = None) -> Output:
        """Probabilities as activations, and the logits that they come from; there is no trace and no routing."""
        self.check(images)
        features = dispatch.in_bf16(self.stem, images).mean((2, 3))
        logits = self.head(self.dropout(features))
        return Output(logits.sigmoid() if self.multi_label else logits.softmax(1), logits=logits)

    def describe(self) -> str:
        c = self.config
        blocks = describe_blocks(c.stem_channels, c.stem_kernels, c.stem_strides)
        parts = [describe_image(c.image_shape), *blocks, "average pooling", f"{c.num_classes} outputs"]
        return " → ".join(parts)

    def by_class(self, name: str, tensor: Tensor) -> Tensor | None:
        return tensor if name.startswith("head.") else None
