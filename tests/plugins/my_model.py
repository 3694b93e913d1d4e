"""A model with capsules straight from the pixels: PrimaryCaps, one routing layer, no decoder."""

from dataclasses import dataclass, field

from capsnet.models import Model, ModelConfig, Output, register
from capsnet.nn.layers import DenseCaps, PrimaryCaps
from capsnet.routing import DynamicOptions, RoutingOptions


@dataclass(frozen=True)
class ShallowConfig(ModelConfig):
    """A shallow capsule network."""

    types: int = 8
    """Primary capsule types per position of the grid."""
    routing: RoutingOptions = field(default_factory=DynamicOptions)
    """Options of the routing algorithm."""


@register("shallow")
class Shallow(Model):
    Config = ShallowConfig

    def __init__(self, config, *, device=None, dtype=None):
        super().__init__(config)
        channels, *size = config.image_shape
        height, width = ((side - 9) // 2 + 1 for side in size)
        sizes = height * width * config.types, 8, config.num_classes, 16
        self.primary = PrimaryCaps(channels, config.types, device=device, dtype=dtype)
        self.caps = DenseCaps(*sizes, routing=config.routing, shared=config.types, device=device, dtype=dtype)

    def forward(self, images, trace=False, routing=None):
        self.check(images)
        primary = self.primary(images)
        routed = self.caps.route(primary, trace=trace, **(routing or {}))
        return Output(routed.activations, routed.poses, primary, trace=routed.trace)

    def describe(self):
        return f"{self.config.types} types of primary capsules → {self.config.num_classes} class capsules"
