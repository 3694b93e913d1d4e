"""The capsule network of section 4: stem → PrimaryCaps → DenseCaps → Decoder.

With the default config it is the paper's network for MNIST (Fig. 1 and 2); every size is a field of the config.
The stem may also be residual, or any module (`capsnet.models.stem`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from capsnet.kernels import dispatch
from capsnet.models.base import Divided, Model, Output, describe_image
from capsnet.models.config import CapsNetConfig
from capsnet.models.registry import register
from capsnet.models.stem import (
    build_stem,
    describe_stem,
    feature_shape,
    grid_size,
    measured_shape,
    receptive_field,
)
from capsnet.nn.decoder import Decoder
from capsnet.nn.functional import Capsules, lengths, mask
from capsnet.nn.layers import DenseCaps, PrimaryCaps


@register("capsnet")
class CapsNet(Model):
    """Images (b, c, h, w) → class capsules, whose activations say what is present; poses describe how it looks.

    >>> from capsnet.models.config import CapsNetConfig
    >>> output = CapsNet(CapsNetConfig())(torch.rand(2, 1, 28, 28))
    >>> output.activations.shape, output.poses.shape
    (torch.Size([2, 10]), torch.Size([2, 10, 16]))
    """

    Config = CapsNetConfig
    config: CapsNetConfig
    decoder: Decoder | None

    def __init__(
        self,
        config: CapsNetConfig,
        *,
        stem: nn.Module | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(config if stem is None else replace(config, stem="module"))
        if stem is not None:
            self.given_stem = f"{type(stem).__module__}.{type(stem).__qualname__}"
        own = self.config.stem == "module"
        if not own:
            self.grid = grid_size(config)  # refuses sizes that do not fit before anything is built
        self.stem = self.make_stem(device, dtype) if stem is None else stem
        if config.freeze_stem:
            self.stem.requires_grad_(False)
        features = measured_shape(self.stem, config.image_shape) if own else feature_shape(config)
        if own:
            self.grid = grid_size(config, features)
        self.primary = self.make_primary(features[0], device, dtype)
        self.caps = nn.Sequential(*self._capsule_layers(device, dtype))
        self.decoder = build_decoder(config, device, dtype)

    def make_stem(self, device: torch.device | None, dtype: torch.dtype | None) -> nn.Module:
        """The stem of the config. A plugin's model overrides this and sets `stem: … = "module"` in its config."""
        return build_stem(self.config, device, dtype)

    def make_primary(self, channels: int, device: torch.device | None, dtype: torch.dtype | None) -> PrimaryCaps:
        c = self.config
        return PrimaryCaps(
            channels, c.primary_types, c.primary_dim, c.primary_kernel, c.primary_stride,
            factor=1 / c.primary_types if c.primary_factor else 1.0, squashed=c.primary_squash, init=c.init,
            device=device, dtype=dtype,
        )  # fmt: skip

    def train(self, mode: bool = True) -> Self:
        """A frozen stem stays in evaluation mode, so that its batch norms keep their statistics."""
        super().train(mode)
        if self.config.freeze_stem:
            self.stem.eval()
        return self

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
        if self.config.stem == "module":
            return ""
        return "stem.0.weight" if self.config.stem_channels else "primary.conv.weight"

    def forward(self, images: Tensor, trace: bool = False, routing: Mapping[str, Any] | None = None) -> Output:
        """Activations, poses, primary capsules and, if asked, the trace of the class capsules' routing."""
        self.check(images)
        primary = self.primary_capsules(images)
        return self._routed(primary, trace, routing or {}) if trace or routing else self.of_primary(primary)

    def of_primary(self, primary: Tensor) -> Output:
        """The output for primary capsules (b, i, p)."""
        capsules = self.caps(self.with_activations(primary))  # called as modules: hooks and pruning rely on that
        if isinstance(capsules, Capsules):
            return Output(capsules.activations, capsules.poses, primary)
        return Output(lengths(capsules), capsules, primary)

    def with_activations(self, primary: Tensor) -> Tensor | Capsules:
        """Primary capsules that are not squashed, with the lengths of squashed ones as their activations."""
        first = self.caps[0]
        assert isinstance(first, DenseCaps)
        if self.config.primary_squash or not first.routing.own_activations:
            return primary
        return Capsules(primary, lengths(self.primary.squash(primary)))

    def primary_capsules(self, images: Tensor) -> Tensor:
        """(b, c, h, w) → (b, i, p); the kernels know the layers of our own stems only."""
        if self.config.stem == "module":
            return self.primary(dispatch.without_emulation(self.stem, images))
        return dispatch.primary_capsules(cast(nn.Sequential, self.stem), self.primary, images)

    def _routed(self, primary: Tensor, trace: bool, options: Mapping[str, Any]) -> Output:
        """The capsule layers with other options, or with the trace of the last one."""
        lower = self.with_activations(primary)
        poses, activations = lower if isinstance(lower, Capsules) else (lower, None)
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
        grid, kept = f"{self.grid[0]}×{self.grid[1]}", "" if c.primary_squash else ", not squashed"
        parts.append(f"primary capsules: {c.primary_types} types of {c.primary_dim}-D on {grid}{kept}")
        parts += [f"{number} capsules of {dim}-D" for number, dim in c.hidden_caps]
        parts.append(f"{c.num_classes} class capsules of {c.class_dim}-D, {c.routing.describe()}")
        parts += ["decoder " + ", ".join(map(str, c.decoder))] if c.decoder else []
        return " → ".join(parts)

    def describe_stem(self) -> list[str]:
        return describe_stem(self.config, self.stem)

    def stages(self, images: Tensor, targets: Tensor) -> dict[str, Callable[[], object]]:
        u = self.primary_capsules(images).detach().requires_grad_()
        output = self.of_primary(u)
        assert output.poses is not None
        v = output.poses.detach().requires_grad_()
        stages: dict[str, Callable[[], object]] = {
            "convolutions": lambda: self.primary_capsules(images).sum().backward(),
            "routing": lambda: self.of_primary(u).activations.sum().backward(),
        }
        if self.decoder is not None:
            decoder = self.decoder
            stages["decoder"] = lambda: decoder(mask(v, targets)).sum().backward()
        return stages

    def shown(self) -> dict[str, Any]:
        c = self.config
        height, width = self.grid
        return {
            "capsules": True,
            "grid": [height, width],
            "primary_types": c.primary_types,
            "primary_dim": c.primary_dim,
            "primary_squash": c.primary_squash,
            "class_dim": c.class_dim,
            "routed": c.hidden_caps[-1][0] if c.hidden_caps else height * width * c.primary_types,
            "routed_grid": None if c.hidden_caps else [height, width],
            "routing": {"name": c.routing.algorithm, **dataclasses.asdict(c.routing)},
            "shared": c.shared,
            "has_decoder": bool(c.decoder),
            "decoder": list(c.decoder),
            "receptive": receptive_field(c, self.grid),
        }

    def divided(self) -> Divided | None:
        layers = tuple(layer for layer in self.caps if isinstance(layer, DenseCaps))
        return Divided(lambda images: (self.primary_capsules(images),), (layers,), self.config.primary_squash)

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


def build_decoder(config: CapsNetConfig, device: torch.device | None, dtype: torch.dtype | None) -> Decoder | None:
    """The decoder of the class capsules, unless the config has none."""
    if not config.decoder:
        return None
    return Decoder(
        config.num_classes, config.class_dim, config.image_shape, config.decoder,
        init=config.init, device=device, dtype=dtype,
    )  # fmt: skip
