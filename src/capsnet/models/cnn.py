"""The convolutional networks that the paper compares with (section 4 for MNIST, section 6 for MultiMNIST).

The paper's parameter counts (35.4 M and 24.56 M) result only with padding that keeps the size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from capsnet.errors import UserError
from capsnet.models.base import Model, Output, describe_image
from capsnet.models.config import CNNConfig
from capsnet.models.registry import register
from capsnet.nn.decoder import Linear


@register("cnn")
class CNN(Model):
    """Convolutions with ReLU, optional batch norm and max-pooling, fully connected layers, dropout, outputs.

    With `multi_label` the outputs pass through a sigmoid each instead of one softmax.
    """

    Config = CNNConfig
    config: CNNConfig
    default_loss = "entropy"
    first_convolution = "features.0.weight"

    def __init__(
        self, config: CNNConfig, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(config)
        channels, height, width = config.image_shape
        check_features(config)
        features: list[nn.Module] = []
        for out, kernel, pool in zip(config.channels, config.kernels, config.pool, strict=True):
            bias = not config.norm  # a norm removes any bias
            stride = pool if config.strided else 1
            features.append(
                nn.Conv2d(channels, out, kernel, stride, padding=kernel // 2, bias=bias, device=device, dtype=dtype)
            )
            if config.norm:
                features.append(nn.BatchNorm2d(out, device=device, dtype=dtype))
            features.append(nn.ReLU(inplace=True))
            if pool > stride:
                features.append(nn.MaxPool2d(pool))
            up = pool - 1 if config.strided else 0  # a padded convolution rounds up, max-pooling down
            channels, height, width = out, (height + up) // pool, (width + up) // pool
        if min(height, width) < 1:
            size = "×".join(map(str, config.image_shape[1:]))
            raise UserError(f"an image of {size} px is too small for this pooling: use larger images.")
        self.features = nn.Sequential(*features)
        head: list[nn.Module] = []
        width_before = channels * height * width
        for hidden in config.hidden:
            head += [Linear(width_before, hidden, device=device, dtype=dtype), nn.ReLU(inplace=True)]
            width_before = hidden
        head += [nn.Dropout(config.dropout), Linear(width_before, config.num_classes, device=device, dtype=dtype)]
        self.head = nn.Sequential(*head)

    def forward(self, images: Tensor, trace: bool = False, routing: Mapping[str, Any] | None = None) -> Output:
        """Probabilities as activations, and the logits that they come from; a CNN has no trace and no routing."""
        self.check(images)
        logits = self.head(self.features(images).flatten(1))
        return Output(logits.sigmoid() if self.multi_label else logits.softmax(1), logits=logits)

    def hidden(self, images: Tensor) -> Tensor:
        """The last hidden layer (b, n), before dropout and outputs."""
        return self.head[:-2](self.features(images).flatten(1))

    def describe(self) -> str:
        config = self.config
        parts, norm = [describe_image(config.image_shape)], ", batch norm" if config.norm else ""
        for channels, kernel, pool in zip(config.channels, config.kernels, config.pool, strict=True):
            pooled = f", {'stride' if config.strided else 'max-pooling'} {pool}" if pool > 1 else ""
            parts.append(f"convolution {kernel}×{kernel}, {channels}{norm}{pooled}")
        parts += [f"fully connected {width}" for width in config.hidden]
        return " → ".join([*parts, f"{config.num_classes} outputs"])

    def by_class(self, name: str, tensor: Tensor) -> Tensor | None:
        return tensor if name.startswith(f"head.{len(self.head) - 1}.") else None


def check_features(config: CNNConfig) -> None:
    """Refuse lists of different lengths, and even kernels, whose padding cannot keep the size."""
    if not len(config.channels) == len(config.kernels) == len(config.pool):
        raise UserError("channels, kernels and pool need one number for each convolution.")
    if even := [kernel for kernel in config.kernels if kernel % 2 == 0]:
        raise UserError(f"a kernel of {even[0]} px cannot be padded to keep the size: use an odd one.")
