"""A synchronisation network: oriented filters → oscillators → complex layers → classes.

    image → 7×7 filters, stride 3, ReLU → amplitudes (c, h, w)
          → Kuramoto layer, K steps: phases
          → complex convolutions, batch norm on amplitudes → complex linear layer → amplitudes → logits

What belongs together should fall into phase, and inputs out of phase cancel in the complex layers. After KomplexNet
(Muzellec, Alamia, Serre and VanRullen 2025), smaller: the filters start as Gabor functions and are learnt. Every class
has a sigmoid, because images have several labels.

With `phases=False` it is its own control: the coupling kernel, the learnt start and all other parameters stay, but they
act on amplitudes, m ← max(0, m + (J ★ m + start) / 2), and all phases are 0.

`guidance` adds a loss that uses the true pixels of each object, where the data knows them: units of one object should
be in phase and the two objects in opposite phase (a cluster synchrony loss). It needs masks, so it is an upper bound
and not a fair competitor of networks that see labels only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from capsnet.data.examples import Batch
from capsnet.errors import UserError
from capsnet.models.base import Losses, Model, Output, describe_image
from capsnet.models.config import LossConfig, ModelConfig
from capsnet.models.registry import register
from capsnet.ranges import MOST, WIDEST, check_range
from capsnet.sync import ComplexConv2d, ComplexLinear, KuramotoLayer, Oscillations, Waves

FILTER, STRIDE = 7, 3  # of the oriented filters
BRIGHT = 0.2  # a pixel of an object is at least this bright


@dataclass(frozen=True)
class SyncConfig(ModelConfig):
    """A synchronisation network."""

    kind: ClassVar[str] = "sync"

    image_shape: tuple[int, int, int] = (1, 36, 36)
    """Channels, height and width; taken from the data when training."""
    filters: int = 8
    """Oriented filters: oscillators at each position."""
    kernel: int = 5
    """Kernel size of the coupling, in positions."""
    steps: int = 8
    """K: steps of the oscillators."""
    step: float = 0.5
    """γ: length of a step."""
    channels: tuple[int, ...] = (24, 48)
    """Output channels of each complex convolution."""
    kernels: tuple[int, ...] = (5, 3)
    """Kernel size of each complex convolution."""
    strides: tuple[int, ...] = (2, 1)
    """Stride of each complex convolution."""
    hidden: int = 76
    """Width of the complex linear layer before the classes."""
    phases: bool = True
    """Units have phases; False is the real-valued control with the same parameters."""
    guidance: float = 0.0
    """Weight of the synchrony loss, which uses the true pixels of each object; 0 trains on labels alone."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, 1, WIDEST, "filters", "kernel", "channels", "kernels", "strides", "hidden")
        check_range(self, 0, 1000, "steps")
        check_range(self, 0, MOST, "step", "guidance")
        if not 0 < len(self.channels) == len(self.kernels) == len(self.strides):
            raise UserError("channels, kernels and strides need one number for each complex convolution.")
        if even := [size for size in (self.kernel, *self.kernels) if size % 2 == 0]:
            raise UserError(f"a kernel of {even[0]} positions has no centre: use an odd number.")
        if min(self.image_shape[1:]) < FILTER:
            size = "×".join(map(str, self.image_shape[1:]))
            raise UserError(f"a sync network needs images of at least {FILTER}×{FILTER} px, not {size}.")
        if self.guidance and not self.phases:
            raise UserError("guidance acts on phases: leave it at 0 where phases is False.")

    def tiny(self) -> Self:
        return replace(self, filters=4, kernel=3, steps=3, channels=(8,), kernels=(3,), strides=(2,), hidden=8)


@register("sync")
class SyncNet(Model):
    """Images (b, c, h, w) → probabilities of the classes; with `trace` also the phases of every step.

    >>> output = SyncNet(SyncConfig())(torch.rand(2, 1, 36, 36), trace=True)
    >>> output.activations.shape, output.oscillations.phases.shape
    (torch.Size([2, 10]), torch.Size([9, 2, 8, 12, 12]))
    """

    Config = SyncConfig
    config: SyncConfig
    default_loss = "entropy"
    first_convolution = "filters.weight"

    def __init__(
        self, config: SyncConfig, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(config)
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.multi_label = True
        self.filters = nn.Conv2d(config.image_shape[0], config.filters, FILTER, STRIDE, padding=FILTER // 2, **where)
        self.grid = ((config.image_shape[1] - 1) // STRIDE + 1, (config.image_shape[2] - 1) // STRIDE + 1)
        self.oscillators = KuramotoLayer(config.filters, self.grid, config.kernel, config.steps, config.step, **where)
        before, (height, width) = config.filters, self.grid
        convolutions = []
        for channels, kernel, stride in zip(config.channels, config.kernels, config.strides, strict=True):
            convolutions.append(ComplexConv2d(before, channels, kernel, stride, norm=True, **where))
            before, height, width = channels, (height - 1) // stride + 1, (width - 1) // stride + 1
        self.convolutions = nn.Sequential(*convolutions)
        self.hidden = ComplexLinear(before * height * width, config.hidden, norm=True, **where)
        self.head = nn.Linear(config.hidden, config.num_classes, **where)
        with torch.no_grad():
            self.filters.weight.copy_(gabor(config.filters).expand_as(self.filters.weight) / config.image_shape[0])
            nn.init.zeros_(cast(Tensor, self.filters.bias))
            if not config.phases:  # a bias of amplitudes, which values all over the circle would drown
                nn.init.zeros_(self.oscillators.start)

    def forward(self, images: Tensor, trace: bool = False, routing: Mapping[str, Any] | None = None) -> Output:
        """Probabilities, their logits and, if asked, the oscillations; there is no routing."""
        self.check(images)
        z, oscillations = self.oscillate(images, trace or bool(self.training and self.config.guidance))
        z = self.convolutions(z)
        flat = Waves(z.re.flatten(1), None if z.im is None else z.im.flatten(1))
        logits = self.head(self.hidden(flat).amplitude)
        activations = logits.sigmoid() if self.multi_label else logits.softmax(1)
        return Output(activations, logits=logits, oscillations=oscillations)

    def oscillate(self, images: Tensor, trace: bool) -> tuple[Waves, Oscillations | None]:
        """Amplitudes of the filters, and the phases that they settle at."""
        amplitude = F.relu(self.filters(images))
        if self.config.phases:
            return self.oscillators(amplitude, trace)
        lateral = F.conv2d(amplitude, self.oscillators.coupling, padding=self.config.kernel // 2)
        return Waves(F.relu(amplitude + (lateral + self.oscillators.start) / 2)), None

    def loss(self, output: Output, batch: Batch, config: LossConfig, progress: float = 1.0) -> Losses:
        found = super().loss(output, batch, config, progress)
        if not self.config.guidance or output.oscillations is None or batch.parts is None:
            return found
        guided = asynchrony(output.oscillations, masks(batch.parts, self.grid))
        return found._replace(total=found.total + self.config.guidance * guided)

    def describe(self) -> str:
        c = self.config
        first = f"{c.filters} oriented filters {FILTER}×{FILTER}, stride {STRIDE}"
        middle = f"{c.kernel}×{c.kernel} Kuramoto coupling, {c.steps} steps" if c.phases else "lateral convolution"
        kind = "complex convolution" if c.phases else "convolution"
        layers = [f"{kind} {k}×{k}, {n}" for n, k in zip(c.channels, c.kernels, strict=True)]
        last = f"{'complex' if c.phases else 'fully connected'} {c.hidden}"
        return " → ".join([describe_image(c.image_shape), first, middle, *layers, last, f"{c.num_classes} outputs"])

    def shown(self) -> dict[str, Any]:
        return super().shown() | ({"phases": {"grid": list(self.grid), "stride": STRIDE}} if self.config.phases else {})

    def by_class(self, name: str, tensor: Tensor) -> Tensor | None:
        return tensor if name.startswith("head.") else None


def gabor(filters: int) -> Tensor:
    """Gabor functions at evenly spaced orientations, even and odd in turn: (filters, 1, 7, 7), each of length 1."""
    offset = torch.arange(FILTER) - FILTER // 2
    y, x = torch.meshgrid(offset, offset, indexing="ij")
    angle = torch.arange(filters)[:, None, None] * math.pi / filters
    across = x * angle.cos() + y * angle.sin()
    odd = (torch.arange(filters) % 2 * math.pi / 2)[:, None, None]
    waves = torch.exp(-(x.square() + y.square()) / 8.0) * torch.cos(across * 1.3 - odd)
    waves = waves - waves.mean((1, 2), keepdim=True) * (1 - odd.sign())
    return (waves / waves.flatten(1).norm(dim=1)[:, None, None])[:, None]


def masks(parts: Tensor, grid: tuple[int, ...]) -> Tensor:
    """Where each object of an image is alone, on the grid of the oscillators: (b, k, c, H, W) → 0 or 1 (b, k, h, w)."""
    bright = F.adaptive_max_pool2d(parts.amax(2), grid) > BRIGHT
    return (bright & (bright.sum(1, keepdim=True) == 1)).float()


def asynchrony(oscillations: Oscillations, objects: Tensor) -> Tensor:
    """How far the last phases are from one phase in each object and opposite phases in the two: in [0, 1].

    Z_k is the mean over object k of the positions' mean fields; 1 − ½ Σ_k |Z_k|² counts phases that differ within an
    object, and ½ (1 + cos(arg Z_1 − arg Z_2)) objects of similar phases. `objects` (b, k, h, w) are 0 or 1.
    """
    field = Oscillations(oscillations.amplitude, oscillations.phases[-1:]).mean_field()
    assert field.im is not None
    weight = objects / (objects.sum((2, 3), keepdim=True) + 1e-6)
    re, im = ((weight * part[0].unsqueeze(1)).sum((2, 3)) for part in (field.re, field.im))  # b k
    squared = re.square() + im.square()
    apart = (re.prod(1) + im.prod(1)) / torch.sqrt(squared.prod(1) + 1e-4)
    return (0.5 * (1 - 0.5 * squared.sum(1)) + 0.25 * (1 + apart)).mean()
