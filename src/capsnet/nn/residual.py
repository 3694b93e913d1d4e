"""Residual blocks (He, Zhang, Ren and Sun, "Deep residual learning", 2016): the stem for photographs.

    y = ReLU(BN(conv(ReLU(BN(conv(x))))) + shortcut(x))

The shortcut is the identity, or a 1×1 convolution with batch norm where channels or size change. All convolutions are
padded so that a stride of 1 keeps the size.

Deliberate deviation: the last batch norm of a block starts with scale 0 (Goyal et al. 2017), so that every block starts
as its shortcut and deep stems train from the first step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from capsnet.errors import UserError
from capsnet.nn.layers import Conv2d


class ResidualBlock(nn.Module):
    """Two convolutions and a shortcut around them. (b, c, h, w) → (b, c', ⌈h/stride⌉, ⌈w/stride⌉)

    >>> ResidualBlock(8, 16, stride=2)(torch.randn(2, 8, 10, 10)).shape
    torch.Size([2, 16, 5, 5])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int = 3,
        stride: int = 1,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.conv1 = padded(in_channels, out_channels, kernel_size, stride, device, dtype)
        self.norm1 = nn.BatchNorm2d(out_channels, device=device, dtype=dtype)
        self.conv2 = padded(out_channels, out_channels, kernel_size, 1, device, dtype)
        self.norm2 = nn.BatchNorm2d(out_channels, device=device, dtype=dtype)
        self.shortcut = nn.Sequential()  # the identity
        if stride != 1 or in_channels != out_channels:
            self.shortcut.append(padded(in_channels, out_channels, 1, stride, device, dtype))
            self.shortcut.append(nn.BatchNorm2d(out_channels, device=device, dtype=dtype))
        nn.init.zeros_(self.norm2.weight)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def padded(
    before: int, after: int, kernel: int, stride: int, device: torch.device | None, dtype: torch.dtype | None
) -> Conv2d:
    """A convolution that keeps the size at a stride of 1, without bias, because a norm follows."""
    if kernel % 2 == 0:
        raise UserError(f"a kernel of {kernel} px cannot be padded to keep the size: use an odd one.")
    return Conv2d(before, after, kernel, stride, bias=False, padding=kernel // 2, device=device, dtype=dtype)


def residual_stem(
    in_channels: int,
    channels: Sequence[int],
    kernels: Sequence[int],
    strides: Sequence[int],
    *,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Sequential:
    """A convolution with batch norm and ReLU for the first entry, a residual block for each of the others.

    >>> residual_stem(3, (8, 16), (3, 3), (1, 2))(torch.randn(2, 3, 10, 10)).shape
    torch.Size([2, 16, 5, 5])
    """
    layers: list[nn.Module] = []
    for depth, (width, kernel, stride) in enumerate(zip(channels, kernels, strides, strict=True)):
        if depth:
            layers.append(ResidualBlock(channels[depth - 1], width, kernel, stride, device=device, dtype=dtype))
        else:
            norm = nn.BatchNorm2d(width, device=device, dtype=dtype)
            layers += [padded(in_channels, width, kernel, stride, device, dtype), norm, nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)
