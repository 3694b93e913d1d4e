"""The decoder: fully connected layers that reconstruct an image from the poses of class capsules (section 4.1)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from capsnet.errors import UserError
from capsnet.kernels import dispatch
from capsnet.nn.initial import check_init, truncated_normal_
from capsnet.nn.options import Init


class Linear(nn.Linear):
    """A fully connected layer that autocast leaves in float32 where bfloat16 would be emulated."""

    def forward(self, x: Tensor) -> Tensor:
        return dispatch.linear(x, self.weight, self.bias)


class Decoder(nn.Module):
    """Reconstruct an image from masked poses (section 4.1): fully connected 512, 1024 with ReLU, pixels by a sigmoid.

    (…, j, q) → (…, c, h, w)

    >>> Decoder(10, 16, (1, 28, 28))(torch.randn(2, 10, 16)).shape
    torch.Size([2, 1, 28, 28])
    """

    def __init__(
        self,
        upper: int,
        upper_dim: int,
        image_shape: tuple[int, int, int],
        hidden: Sequence[int] = (512, 1024),
        *,
        init: Init = "default",
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_init(init)
        self.upper, self.upper_dim, self.image_shape, self.init = upper, upper_dim, image_shape, init
        widths = [upper * upper_dim, *hidden, math.prod(image_shape)]
        self.linears = nn.ModuleList(
            Linear(before, after, device=device, dtype=dtype) for before, after in itertools.pairwise(widths)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for linear in self.linears:
            assert isinstance(linear, nn.Linear)
            linear.reset_parameters()
            if self.init == "official":
                truncated_normal_(linear.weight, 0.1)
                nn.init.constant_(linear.bias, 0.1)

    def forward(self, poses: Tensor) -> Tensor:
        if poses.shape[-2:] != (self.upper, self.upper_dim):
            raise UserError(
                f"Decoder expects (…, {self.upper}, {self.upper_dim}) and got {tuple(poses.shape)}: "
                f"set upper and upper_dim to what the capsule layer below gives."
            )
        *hidden, pixels = self.linears
        # routing gives float32 even where the weights are bfloat16
        x = poses.flatten(-2).to(next(self.parameters()).dtype)
        for linear in hidden:
            x = torch.relu(linear(x))
        return torch.sigmoid(pixels(x)).unflatten(-1, self.image_shape)
