"""The network of matrix capsules with EM routing (Hinton, Sabour and Frosst 2018, section 4).

    image → convolution 5×5, stride 2, A channels, ReLU
          → primary capsules: 1×1 convolution, B types with a pose of 4×4 and an activation
          → convolutional capsules 3×3, stride 2, C types → convolutional capsules 3×3, D types
          → class capsules: transformations shared over the grid, coordinates added to the votes

Parameters for images of 32×32×2 and five classes:

    part                          A 64, B 8, C = D 16    A = B = C = D = 32
    convolution                         3,200 +  64            1,600 +  32
    primary capsules                    8,704 + 136           17,408 + 544
    first convolutional capsules       18,432 +  32          147,456 +  64
    second convolutional capsules      36,864 +  32          147,456 +  64
    class capsules                      1,280 +  10            2,560 +  10
    total                                    68,754               317,194

The second numbers are biases: of the two convolutions, one per channel, and of EM routing, β_u and β_a of every upper
type, shared over the positions. Without the biases of the convolutions there would be 68,554 and 316,618 parameters.
Other routings have other parameters in the place of β.

Deviations: those of `capsnet.routing.em`. A routing that computes no activations gets squashed primary capsules,
whose lengths are their activations, and no channels for them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from capsnet.errors import UserError
from capsnet.models.base import Model, Output, describe_image
from capsnet.models.config import ModelConfig
from capsnet.models.registry import register
from capsnet.nn.conv import ClassCaps, ConvCaps
from capsnet.nn.functional import Capsules, lengths
from capsnet.nn.layers import Conv2d, PrimaryCaps
from capsnet.ranges import WIDEST, check_range
from capsnet.routing.base import ROUTINGS
from capsnet.routing.em import EMOptions
from capsnet.routing.options import RoutingOptions

KERNEL, STRIDE = 5, 2  # of the first convolution
WINDOW, WINDOW_STRIDES = 3, (2, 1)  # of the convolutional capsules
POSE = 16  # 4×4


@dataclass(frozen=True)
class MatrixConfig(ModelConfig):
    """Matrix capsules: a convolution, primary capsules, two layers of convolutional capsules and class capsules."""

    kind: ClassVar[str] = "matrix"

    channels: int = 64
    """A: output channels of the first convolution."""
    primary_types: int = 8
    """B: primary capsule types."""
    conv_types: tuple[int, int] = (16, 16)
    """C and D: capsule types of the two convolutional capsule layers."""
    routing: RoutingOptions = field(default_factory=EMOptions)
    """Routing algorithm of all capsule layers and its options."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, 1, WIDEST, "channels", "primary_types", "conv_types")

    def tiny(self) -> Self:
        return replace(self, channels=8, primary_types=2, conv_types=(2, 2))


@register("matrix")
class MatrixCapsNet(Model):
    """Images (b, c, h, w) → class capsules with matrix poses, by convolutional capsules.

    >>> model = MatrixCapsNet(MatrixConfig(image_shape=(2, 32, 32), num_classes=5))
    >>> sum(p.numel() for p in model.parameters())
    68754
    >>> model(torch.rand(2, 2, 32, 32)).poses.shape
    torch.Size([2, 5, 16])
    """

    Config = MatrixConfig
    config: MatrixConfig
    default_loss = "spread"
    first_convolution = "stem.0.weight"

    def __init__(
        self, config: MatrixConfig, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(config)
        self.grids = grid_sizes(config)
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        own = ROUTINGS.get(config.routing.algorithm).own_activations
        self.stem = nn.Sequential(
            Conv2d(config.image_shape[0], config.channels, KERNEL, STRIDE, **where), nn.ReLU(inplace=True)
        )
        self.primary = PrimaryCaps(
            config.channels, config.primary_types, POSE, 1, 1, grid=True, activations=own, **where
        )
        self.caps = nn.Sequential(*self._capsule_layers(where))

    def _capsule_layers(self, where: dict[str, Any]) -> list[nn.Module]:
        c, common = self.config, {"routing": self.config.routing, "matrix": True, **where}
        lower = (c.primary_types, *c.conv_types)
        layers: list[nn.Module] = [
            ConvCaps(types, POSE, upper, POSE, WINDOW, stride, **common)
            for types, upper, stride in zip(lower, c.conv_types, WINDOW_STRIDES, strict=False)
        ]
        return [*layers, ClassCaps(lower[-1], POSE, c.num_classes, POSE, self.grids[-1], **common)]

    def forward(self, images: Tensor, trace: bool = False, routing: Mapping[str, Any] | None = None) -> Output:
        """Activations, poses, primary capsules and, if asked, the trace of the class capsules' routing."""
        self.check(images)
        primary = self.primary(self.stem(images))
        listed = (primary.poses if isinstance(primary, Capsules) else primary).flatten(1, 3)
        if trace or routing:
            return self._routed(primary, listed, trace, routing or {})
        capsules = self.caps(primary)  # called as modules, because hooks and pruning rely on that
        if isinstance(capsules, Capsules):
            return Output(capsules.activations, capsules.poses, listed)
        return Output(lengths(capsules), capsules, listed)

    def _routed(self, primary: Tensor | Capsules, listed: Tensor, trace: bool, options: Mapping[str, Any]) -> Output:
        """The capsule layers with other options, or with the trace of the last one."""
        *convolutional, last = self.caps
        poses, a = primary if isinstance(primary, Capsules) else (primary, None)
        for layer in convolutional:
            assert isinstance(layer, ConvCaps)
            routed = layer.route(poses, a, **options)
            poses, a = routed.poses, routed.activations if layer.routing.own_activations else None
        assert isinstance(last, ClassCaps)
        routed = last.route(poses, a, trace, **options)
        return Output(routed.activations, routed.poses, listed, None, routed.trace)

    def describe(self) -> str:
        c, (primary, *above) = self.config, self.grids
        parts = [
            describe_image(c.image_shape),
            f"convolution {KERNEL}×{KERNEL}, {c.channels}, stride {STRIDE}",
            f"primary capsules: {c.primary_types} types of 4×4 on {primary[0]}×{primary[1]}",
        ]
        parts += [
            f"convolutional capsules: {types} types of 4×4 on {grid[0]}×{grid[1]}"
            for types, grid in zip(c.conv_types, above, strict=True)
        ]
        return " → ".join([*parts, f"{c.num_classes} class capsules of 4×4, {c.routing.describe()}"])

    def shown(self) -> dict[str, Any]:
        c, (primary, *_, last) = self.config, self.grids
        return {
            "capsules": True,
            "grid": list(primary),
            "primary_types": c.primary_types,
            "primary_dim": POSE,
            "class_dim": POSE,
            "routed": math.prod(last) * c.conv_types[-1],
            "routed_grid": list(last),
            "routing": {"name": c.routing.algorithm, **dataclasses.asdict(c.routing)},
            "shared": True,
            "has_decoder": False,
            "decoder": [],
            "receptive": {"size": KERNEL, "stride": STRIDE, "offset": 0},
        }

    def by_class(self, name: str, tensor: Tensor) -> Tensor | None:
        last, layer = f"caps.{len(self.caps) - 1}.", self.caps[-1]
        assert isinstance(layer, ClassCaps)
        if name == f"{last}weight":
            return tensor.transpose(0, 1)  # n j k c
        of_routing = name.removeprefix(f"{last}routing.")
        return None if of_routing == name else layer.routing.by_class(of_routing, tensor)


def grid_sizes(config: MatrixConfig) -> list[tuple[int, int]]:
    """Height and width of the primary capsules' grid and of the convolutional capsules'; a small image is refused."""
    sides, sizes = config.image_shape[1:], list[tuple[int, int]]()
    for kernel, stride in [(KERNEL, STRIDE), *((WINDOW, stride) for stride in WINDOW_STRIDES)]:
        sides = ((sides[0] - kernel) // stride + 1, (sides[1] - kernel) // stride + 1)
        sizes.append(sides)
    if min(sides) < 1:
        height, width = config.image_shape[1:]
        raise UserError(
            f"an image of {height}×{width} px is too small for matrix capsules, which need 17×17: use larger images."
        )
    return sizes
