"""The convolutional networks that the paper compares with (section 4 for MNIST, section 6 for MultiMNIST).

The paper's parameter counts (35.4 M and 24.56 M) come out only with padding that keeps the size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from capsnet.config import CNNConfig
from capsnet.errors import UserError
from capsnet.layers import Linear
from capsnet.models.base import Classifier, Output


class CNN(Classifier):
    """Convolutions with ReLU, optional batch norm and max-pooling, fully connected layers, dropout, an output a class.

    `multi_label` reads the outputs through a sigmoid each instead of a softmax together.
    """

    config: CNNConfig

    def __init__(
        self, config: CNNConfig, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(config)
        channels, height, width = config.image_shape
        check_features(config)
        features: list[nn.Module] = []
        for out, kernel, pool in zip(config.channels, config.kernels, config.pool, strict=True):
            bias = not config.norm  # a norm takes any bias away again
            features.append(
                nn.Conv2d(channels, out, kernel, padding=kernel // 2, bias=bias, device=device, dtype=dtype)
            )
            if config.norm:
                features.append(nn.BatchNorm2d(out, device=device, dtype=dtype))
            features.append(nn.ReLU(inplace=True))
            if pool > 1:
                features.append(nn.MaxPool2d(pool))
            channels, height, width = out, height // pool, width // pool
        if min(height, width) < 1:
            raise UserError(f"an image of {config.image_shape[1:]} px is too small for this much pooling.")
        self.features = nn.Sequential(*features)
        head: list[nn.Module] = []
        width_before = channels * height * width
        for hidden in config.hidden:
            head += [Linear(width_before, hidden, device=device, dtype=dtype), nn.ReLU(inplace=True)]
            width_before = hidden
        head += [nn.Dropout(config.dropout), Linear(width_before, config.num_classes, device=device, dtype=dtype)]
        self.head = nn.Sequential(*head)

    def forward(self, images: Tensor, trace: bool = False) -> Output:
        """Probabilities as `lengths`, and the logits that they come from; a CNN has no trace."""
        self.check(images)
        logits = self.head(self.features(images).flatten(1))
        return Output(logits.sigmoid() if self.multi_label else logits.softmax(1), logits=logits)


def check_features(config: CNNConfig) -> None:
    """One kernel and one pooling for each convolution; odd kernels, whose padding keeps the size."""
    if not len(config.channels) == len(config.kernels) == len(config.pool):
        raise UserError("channels, kernels and pool need one number for each convolution.")
    if even := [kernel for kernel in config.kernels if kernel % 2 == 0]:
        raise UserError(f"a kernel of {even[0]} px cannot be padded so that the size is kept: use an odd one.")
