"""Several small capsule networks after a shared trunk, joined in the class capsules: what the preset `best` trains.

Ours, not a paper's. Each branch is a `CapsNet` without a decoder that reads the trunk's feature maps and is judged by
the margin loss alone. The class capsule of the whole network is the branches' capsules joined and divided by √branches,
so that its squared length is the mean of theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from capsnet.errors import UserError
from capsnet.models.base import Divided, Model, Output
from capsnet.models.capsnet import CapsNet, build_decoder
from capsnet.models.config import CapsNetConfig, LossConfig
from capsnet.models.registry import register
from capsnet.models.stem import build_stem, describe_stem, grid_size
from capsnet.nn.functional import lengths
from capsnet.ranges import WIDEST, check_range
from capsnet.routing.base import ROUTINGS, Trace


@dataclass(frozen=True)
class BranchedConfig(CapsNetConfig):
    """A capsule network whose stem divides into branches; sizes are those of all branches together."""

    kind: ClassVar[str] = "branched"

    branches: int = 3
    """Branches; channels after the trunk, primary types and class capsule dimensions are divided among them."""
    trunk: int = 0
    """How many of the stem convolutions come before the branches and are shared."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_trained_convolutions()
        check_range(self, 1, WIDEST, "branches")
        check_range(self, 0, WIDEST, "trunk")

    def tiny(self) -> Self:
        return replace(super().tiny(), branches=2, trunk=0)

    def cut(self) -> tuple[CapsNetConfig, CapsNetConfig]:
        """The configs of the trunk (whose stem it is) and of one branch."""
        self.check()
        k, t = self.branches, self.trunk
        plain = CapsNetConfig(**{field.name: getattr(self, field.name) for field in fields(CapsNetConfig)})
        kernels, strides = self.stem_kernels, self.stem_strides
        trunk = replace(plain, stem_channels=self.stem_channels[:t], stem_kernels=kernels[:t], stem_strides=strides[:t])
        side = replace(trunk, primary_kernel=1, primary_stride=1)
        shape = (self.stem_channels[t - 1], *grid_size(side)) if t else self.image_shape
        branch = replace(
            plain, image_shape=shape, stem_channels=tuple(n // k for n in self.stem_channels[t:]),
            stem_kernels=kernels[t:], stem_strides=strides[t:], primary_types=self.primary_types // k,
            class_dim=self.class_dim // k, decoder=(),
        )  # fmt: skip
        return trunk, branch

    def check(self) -> None:
        """Refuse sizes that cannot be divided among the branches."""
        k, t = self.branches, self.trunk
        if t >= len(self.stem_channels):
            raise UserError(
                f"trunk={t} leaves no convolution for the branches: the stem has {len(self.stem_channels)}; use a "
                f"longer stem or a smaller trunk."
            )
        sizes = {"stem_channels": self.stem_channels[t:], "primary_types": [self.primary_types]}
        for name, values in {**sizes, "class_dim": [self.class_dim]}.items():
            if wrong := [size for size in values if size % k]:
                raise UserError(f"{name}={wrong[0]} cannot be divided among {k} branches: choose a multiple of {k}.")


@register("branched")
class BranchedCapsNet(CapsNet):
    """A trunk, branches that are capsule networks, and a decoder of their joined class capsules.

    >>> config = BranchedConfig(stem_channels=(32, 96), stem_kernels=(5, 3), stem_strides=(2, 1), branches=3, trunk=1,
    ...                         primary_types=12, primary_kernel=3, class_dim=24)
    >>> BranchedCapsNet(config)(torch.rand(2, 1, 28, 28)).poses.shape
    torch.Size([2, 10, 24])
    """

    Config = BranchedConfig
    config: BranchedConfig
    first_convolution = "trunk.0.weight"

    def __init__(
        self, config: BranchedConfig, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        Model.__init__(self, config)
        trunk, branch = config.cut()
        self.grid = grid_size(config)
        self.trunk = build_stem(trunk, device, dtype)
        self.branches = nn.ModuleList(CapsNet(branch, device=device, dtype=dtype) for _ in range(config.branches))
        self.decoder = build_decoder(config, device, dtype)

    def forward(self, images: Tensor, trace: bool = False, routing: Mapping[str, Any] | None = None) -> Output:
        self.check(images)
        features = self.trunk(images)
        outputs: list[Output] = [branch(features, trace, routing) for branch in self.branches]
        k = len(outputs)
        poses = torch.cat([output.poses for output in outputs if output.poses is not None], -1) / math.sqrt(k)
        primary = torch.stack([output.primary for output in outputs if output.primary is not None], 2).flatten(1, 2)
        traces = [output.trace for output in outputs if output.trace is not None]
        joined = join_traces(traces) if traces else None
        if not self.own_activations:
            return Output(lengths(poses), poses, primary, None, joined)
        activations = torch.stack([output.activations for output in outputs]).mean(0)
        if joined is not None:
            joined = joined._replace(activations=torch.stack([trace.activations for trace in traces]).mean(0))
        return Output(activations, poses, primary, None, joined)

    @property
    def own_activations(self) -> bool:
        """Whether the routing computes activations; then the network's are the mean of its branches'."""
        return ROUTINGS.get(self.config.routing.algorithm).own_activations

    def classification_loss(self, output: Output, targets: Tensor, config: LossConfig, progress: float) -> Tensor:
        """Each branch is judged by itself, so that each learns to name the class alone.

        Where the routing computes activations they are judged together, because the poses do not contain them.
        """
        if self.own_activations:
            return super().classification_loss(output, targets, config, progress)
        assert output.poses is not None
        k = self.config.branches
        parts = output.poses.unflatten(-1, (k, -1)).movedim(-2, 0) * math.sqrt(k)  # k b j q
        each = output._replace(activations=lengths(parts).flatten(0, 1))
        return super().classification_loss(each, targets.repeat(k, 1), config, progress)

    def stages(self, images: Tensor, targets: Tensor) -> dict[str, Callable[[], object]]:
        return Model.stages(self, images, targets)

    def divided(self) -> Divided | None:
        parts = [part for branch in self.branches if isinstance(branch, CapsNet) and (part := branch.divided())]

        def primary(images: Tensor) -> tuple[Tensor, ...]:
            features = self.trunk(images)
            return tuple(capsules for part in parts for capsules in part.primary(features))

        branches = tuple(layers for part in parts for layers in part.branches)
        return Divided(primary, branches, self.config.primary_squash)

    def describe_stem(self) -> list[str]:
        stem = describe_stem(self.config, self.trunk)
        return [*stem[: self.config.trunk], f"{self.config.branches} branches", *stem[self.config.trunk :]]

    def by_class(self, name: str, tensor: Tensor) -> Tensor | None:
        if name.startswith("branches."):
            _, number, inner = name.split(".", 2)
            branch = self.branches[int(number)]
            assert isinstance(branch, CapsNet)
            return branch.by_class(inner, tensor)
        is_decoder = name == "decoder.linears.0.weight"
        return tensor.unflatten(1, (len(self.classes), -1)).transpose(0, 1) if is_decoder else None


def join_traces(traces: Sequence[Trace]) -> Trace:
    """The branches' routings as one: lower capsules interleaved, poses joined and divided by √branches.

    A vote of a branch concerns its own part of the pose and is zero in the others. The logits grew by agreement with
    the branches' own outputs, which are √branches times as long.
    """
    k, scale = len(traces), 1 / math.sqrt(len(traces))
    outputs = torch.cat([trace.outputs for trace in traces], -1) * scale
    padded = [F.pad(t.votes, (g * t.votes.shape[-1], (k - 1 - g) * t.votes.shape[-1])) for g, t in enumerate(traces)]
    couplings = torch.stack([trace.couplings for trace in traces], 3).flatten(2, 3)
    logits = [trace.logits for trace in traces if trace.logits is not None]
    return Trace(
        couplings, outputs, lengths(outputs), torch.stack(padded, 2).flatten(1, 2),
        torch.stack(logits, 3).flatten(2, 3) if logits else None,
    )  # fmt: skip
