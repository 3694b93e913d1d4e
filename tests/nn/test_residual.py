"""Residual blocks: the equation, how they start, and what they refuse."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from capsnet.errors import UserError
from capsnet.nn.residual import ResidualBlock, residual_stem


def normalised(x: Tensor, norm: nn.Module) -> Tensor:
    """Batch norm with the statistics of the batch, one channel at a time."""
    channels = []
    for c in range(x.shape[1]):
        y = x[:, c]
        spread = ((y - y.mean()) ** 2).mean()
        channels.append((y - y.mean()) / (spread + 1e-5) ** 0.5 * norm.weight[c] + norm.bias[c])
    return torch.stack(channels, 1)


@pytest.mark.parametrize(("before", "after", "stride"), [(4, 4, 1), (4, 6, 1), (4, 4, 2), (3, 5, 2)])
def test_a_block_is_the_equation_of_the_paper(before: int, after: int, stride: int) -> None:
    torch.manual_seed(0)
    block, x = ResidualBlock(before, after, 3, stride).double(), torch.randn(3, before, 7, 8, dtype=torch.double)
    nn.init.normal_(block.norm2.weight)
    y = F.relu(normalised(F.conv2d(x, block.conv1.weight, None, stride, 1), block.norm1))
    y = normalised(F.conv2d(y, block.conv2.weight, None, 1, 1), block.norm2)
    by = x
    if (before, stride) != (after, 1):
        conv, norm = block.shortcut
        by = normalised(F.conv2d(x, conv.weight, None, stride), norm)
    torch.testing.assert_close(block(x), F.relu(y + by))


def test_a_block_starts_as_its_shortcut() -> None:
    x = torch.rand(2, 4, 6, 6)
    torch.testing.assert_close(ResidualBlock(4, 4)(x), x)


def test_a_stem_is_a_convolution_and_then_blocks() -> None:
    stem = residual_stem(3, (4, 6, 6), (5, 3, 3), (2, 1, 2))
    assert [type(layer).__name__ for layer in stem] == ["Conv2d", "BatchNorm2d", "ReLU", *["ResidualBlock"] * 2]
    assert stem(torch.rand(2, 3, 13, 10)).shape == (2, 6, 4, 3)


def test_an_even_kernel_is_refused() -> None:
    with pytest.raises(UserError, match="a kernel of 4 px cannot be padded to keep the size: use an odd one"):
        residual_stem(3, (4,), (4,), (1,))
