"""A plugin with a routing algorithm and a model, for the tests of the Lab."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from capsnet.models.base import Model, Output
from capsnet.models.config import ModelConfig
from capsnet.models.registry import register as register_model
from capsnet.routing.base import Parents, Routed, Routing, Sizes, Trace, register
from capsnet.routing.options import RoutingOptions


@dataclass(frozen=True)
class GateOptions(RoutingOptions):
    """Options of gated routing."""

    temperature: float = field(default=1.0, metadata={"min": 0.1})
    """Temperature of the gates."""
    score: Literal["length", "mean"] = "length"
    """What opens a gate."""


@register("gates")
class GateRouting(Routing):
    """One step in which every vote opens a gate of its own: the gates of a capsule do not sum to one."""

    Options = GateOptions
    options: GateOptions
    own_activations = True
    couplings = "gate"

    def build(self, sizes: Sizes, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> None:
        super().build(sizes, device=device, dtype=dtype)
        self.threshold = nn.Parameter(torch.zeros(sizes.upper, device=device, dtype=dtype))

    def route(self, u_hat: Tensor, a: Tensor | None, parents: Parents, trace: bool) -> Routed:
        score = u_hat.norm(dim=-1) if self.options.score == "length" else u_hat.mean(-1)
        gates = ((score - self.threshold) / self.options.temperature).sigmoid()  # b i j
        poses = torch.einsum("bij,bijq->bjq", gates, u_hat)
        activations = gates.mean(1)
        return Routed(poses, activations, Trace(gates[None], poses[None], activations[None], u_hat) if trace else None)


@dataclass(frozen=True)
class LinearConfig(ModelConfig):
    """A linear classifier."""


@register_model("linear")
class LinearModel(Model):
    """A model without capsules."""

    Config = LinearConfig
    default_loss = "entropy"

    def __init__(
        self, config: ModelConfig, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(config)
        pixels = torch.Size(config.image_shape).numel()
        self.linear = nn.Linear(pixels, config.num_classes, device=device, dtype=dtype)

    def forward(self, images: Tensor, trace: bool = False, routing: Mapping[str, Any] | None = None) -> Output:
        self.check(images)
        logits = self.linear(images.flatten(1))
        return Output(logits.softmax(1), logits=logits)
