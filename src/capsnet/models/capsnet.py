"""The capsule network of section 4: convolutional stem → PrimaryCaps → DenseCaps → Decoder.

With the default config it is the paper's network for MNIST (Fig. 1 and 2); every size is a field of the config.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from capsnet.errors import UserError
from capsnet.kernels import dispatch
from capsnet.models.base import Model, Output, describe_image
from capsnet.models.config import CapsNetConfig
from capsnet.models.registry import register
from capsnet.nn.decoder import Decoder
from capsnet.nn.functional import Capsules, lengths, mask
from capsnet.nn.layers import Conv2d, DenseCaps, PrimaryCaps


@register("capsnet")
class CapsNet(Model):
    """Images (b, c, h, w) → class capsules, whose activations say what is present and whose poses say how it looks.

    >>> from capsnet.models.config import CapsNetConfig
    >>> output = CapsNet(CapsNetConfig())(torch.rand(2, 1, 28, 28))
    >>> output.activations.shape, output.poses.shape
    (torch.Size([2, 10]), torch.Size([2, 10, 16]))
    """

    Config = CapsNetConfig
    config: CapsNetConfig
    decoder: Decoder | None

    def __init__(
        self, config: CapsNetConfig, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(config)
        self.grid = grid_size(config)
        self.stem = build_stem(config, device, dtype)
        self.primary = PrimaryCaps(
            config.stem_channels[-1] if config.stem_channels else config.image_shape[0],
            config.primary_types,
            config.primary_dim,
            config.primary_kernel,
            config.primary_stride,
            factor=1 / config.primary_types if config.primary_factor else 1.0,
            init=config.init,
            device=device,
            dtype=dtype,
        )
        self.caps = nn.Sequential(*self._capsule_layers(device, dtype))
        self.decoder = build_decoder(config, device, dtype)

    def _capsule_layers(self, device: torch.device | None, dtype: torch.dtype | None) -> list[DenseCaps]:
        c = self.config
        sizes = [(self.grid[0] * self.grid[1] * c.primary_types, c.primary_dim)]
        sizes += [*c.hidden_caps, (c.num_classes, c.class_dim)]
        shared = [c.primary_types if c.shared else None, *[None] * len(c.hidden_caps)]
        common: dict[str, Any] = {"matrix": c.pose == "matrix", "init": c.init, "device": device, "dtype": dtype}
        return [
            DenseCaps(*lower, *upper, routing=c.routing, shared=types, **common)
            for (lower, upper), types in zip(itertools.pairwise(sizes), shared, strict=True)
        ]

    @property
    def first_convolution(self) -> str:  # type: ignore[override]
        return "stem.0.weight" if len(self.stem) else "primary.conv.weight"

    def forward(self, images: Tensor, trace: bool = False, routing: Mapping[str, Any] | None = None) -> Output:
        """Activations, poses, primary capsules and, if asked, the trace of the class capsules' routing."""
        self.check(images)
        primary = dispatch.primary_capsules(self.stem, self.primary, images)
        if trace or routing:
            return self._routed(primary, trace, routing or {})
        capsules = self.caps(primary)  # called as modules, because hooks and pruning rely on that
        if isinstance(capsules, Capsules):
            return Output(capsules.activations, capsules.poses, primary)
        return Output(lengths(capsules), capsules, primary)

    def _routed(self, primary: Tensor, trace: bool, options: Mapping[str, Any]) -> Output:
        """The capsule layers with other options, or with the trace of the last one."""
        poses, activations = primary, None
        for depth, layer in enumerate(self.caps, 1):
            assert isinstance(layer, DenseCaps)
            routed = layer.route(poses, activations, trace and depth == len(self.caps), **options)
            poses, activations = routed.poses, routed.activations if layer.routing.own_activations else None
        return Output(routed.activations, routed.poses, primary, None, routed.trace)

    def reconstruct(self, poses: Tensor, classes: Tensor) -> Tensor | None:
        if self.decoder is None:
            return None
        kept = nn.functional.one_hot(classes, self.config.num_classes)
        return self.decoder(mask(poses if classes.dim() == 1 else poses.unsqueeze(1), kept))

    def reconstruct_set(self, poses: Tensor, targets: Tensor) -> Tensor | None:
        return None if self.decoder is None else self.decoder(mask(poses, targets))

    def describe(self) -> str:
        c = self.config
        parts = [describe_image(c.image_shape), *self.describe_stem()]
        parts.append(f"primary capsules: {c.primary_types} types of {c.primary_dim}-D on {self.grid[0]}×{self.grid[1]}")
        parts += [f"{number} capsules of {dim}-D" for number, dim in c.hidden_caps]
        parts.append(f"{c.num_classes} class capsules of {c.class_dim}-D, {describe_routing(c)}")
        return " → ".join(parts + ["decoder " + ", ".join(map(str, c.decoder))] * bool(c.decoder))

    def describe_stem(self) -> list[str]:
        c, norm = self.config, ", batch norm" if self.config.stem_norm else ""
        sizes = zip(c.stem_channels, c.stem_kernels, c.stem_strides, strict=True)
        return [
            f"convolution {kernel}×{kernel}, {channels}{f', stride {stride}' if stride > 1 else ''}{norm}"
            for channels, kernel, stride in sizes
        ]

    def shown(self) -> dict[str, Any]:
        c = self.config
        height, width = self.grid
        return {
            "capsules": True,
            "grid": [height, width],
            "primary_types": c.primary_types,
            "primary_dim": c.primary_dim,
            "class_dim": c.class_dim,
            "routed": c.hidden_caps[-1][0] if c.hidden_caps else height * width * c.primary_types,
            "routing": {"name": c.routing.algorithm, **dataclasses.asdict(c.routing)},
            "shared": c.shared,
            "has_decoder": bool(c.decoder),
            "decoder": list(c.decoder),
            "receptive": receptive_field(c),
        }

    def by_class(self, name: str, tensor: Tensor) -> Tensor | None:
        last = f"caps.{len(self.caps) - 1}"
        if name == f"{last}.weight":
            return tensor.transpose(0, 1)  # i j q p
        if name == "decoder.linears.0.weight":
            return tensor.unflatten(1, (len(self.classes), -1)).transpose(0, 1)
        layer = self.caps[-1]
        assert isinstance(layer, DenseCaps)
        of_routing = name.removeprefix(f"{last}.routing.")
        return None if of_routing == name else layer.routing.by_class(of_routing, tensor)


def describe_routing(config: CapsNetConfig) -> str:
    """
    >>> describe_routing(CapsNetConfig())
    'dynamic routing, 3 iterations'
    """
    iterations = getattr(config.routing, "iterations", None)
    times = f", {iterations} iteration{'s' if iterations > 1 else ''}" if iterations else ""
    return f"{config.routing.algorithm} routing{times}"


def receptive_field(config: CapsNetConfig) -> dict[str, int]:
    """The capsule at (y, x) of the grid sees `size` rows from offset + stride·y on, and columns likewise."""
    size, stride = 1, 1
    kernels, strides = [*config.stem_kernels, config.primary_kernel], [*config.stem_strides, config.primary_stride]
    for kernel, step in zip(kernels, strides, strict=True):
        size += (kernel - 1) * stride
        stride *= step
    return {"size": size, "stride": stride, "offset": 0}


def grid_size(config: CapsNetConfig) -> tuple[int, int]:
    """Height and width of the primary capsules' grid; an image that is too small is refused here."""
    if not len(config.stem_channels) == len(config.stem_kernels) == len(config.stem_strides):
        raise UserError("stem_channels, stem_kernels and stem_strides need one number for each convolution.")
    sides = list(config.image_shape[1:])
    kernels, strides = [*config.stem_kernels, config.primary_kernel], [*config.stem_strides, config.primary_stride]
    for kernel, stride in zip(kernels, strides, strict=True):
        sides = [(side - kernel) // stride + 1 for side in sides]
    if min(sides) < 1:
        height, width = config.image_shape[1:]
        raise UserError(
            f"an image of {height}×{width} px is too small for kernels of {kernels} with strides {strides}: "
            f"use larger images or smaller kernels."
        )
    return sides[0], sides[1]


def build_stem(config: CapsNetConfig, device: torch.device | None, dtype: torch.dtype | None) -> nn.Sequential:
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


def build_decoder(config: CapsNetConfig, device: torch.device | None, dtype: torch.dtype | None) -> Decoder | None:
    """The decoder of the class capsules, unless the config has none."""
    if not config.decoder:
        return None
    return Decoder(
        config.num_classes, config.class_dim, config.image_shape, config.decoder,
        init=config.init, device=device, dtype=dtype,
    )  # fmt: skip
