"""Configs of the models and of what they minimise: a field is a flag, its help text and its record in the JSON.

This module imports no torch. A model of a plugin subclasses `ModelConfig` in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self, get_args

from capsnet.errors import UserError, unknown
from capsnet.nn.options import Init, MarginReduction
from capsnet.ranges import MOST, WIDEST, check_range
from capsnet.routing.options import DynamicOptions, RoutingOptions

Stem = Literal["conv", "residual", "module"]
Pose = Literal["vector", "matrix"]
Loss = Literal["auto", "margin", "spread", "entropy"]


@dataclass(frozen=True)
class ModelConfig:
    """The settings that every model has: `kind` is the name under which it is registered."""

    kind: ClassVar[str] = ""

    image_shape: tuple[int, int, int] = (1, 28, 28)
    """Channels, height and width; taken from the data when training."""
    num_classes: int = 10
    """Number of classes; taken from the data when training."""

    def __post_init__(self) -> None:
        check_range(self, 1, WIDEST, "image_shape", "num_classes")

    def tiny(self) -> Self:
        """The same kind of network in a size that trains in seconds; override it if sizes are fields."""
        return self


TINY: dict[str, Any] = {  # of a capsule network
    "stem": "conv",
    "freeze_stem": False,
    "stem_channels": (16,),
    "stem_kernels": (9,),
    "stem_strides": (2,),
    "primary_types": 4,
    "primary_dim": 4,
    "primary_kernel": 5,
    "primary_stride": 2,
    "class_dim": 8,
}


@dataclass(frozen=True)
class CapsNetConfig(ModelConfig):
    """A capsule network: stem, primary capsules, class capsules by routing, decoder."""

    kind: ClassVar[str] = "capsnet"

    stem_channels: tuple[int, ...] = (256,)
    """Output channels of each convolution before the primary capsules."""
    stem_kernels: tuple[int, ...] = (9,)
    """Kernel size of each stem convolution."""
    stem_strides: tuple[int, ...] = (1,)
    """Stride of each stem convolution."""
    stem_norm: bool = False
    """Batch normalisation after each stem convolution (the paper has none, a residual stem always)."""
    stem: Stem = "conv"
    """Layers before the primary capsules: convolutions as in the paper; residual, where every entry of the stem flags
    but the first is a residual block with batch normalisation; or module, for one that is given in Python."""
    freeze_stem: bool = False
    """Do not train the stem, and keep the statistics of its batch normalisation; for a pretrained one."""
    primary_types: int = 32
    """Primary capsule types per position of the grid."""
    primary_dim: int = 8
    """Primary capsule dimension."""
    primary_kernel: int = 9
    """Kernel size of the primary capsules' convolution."""
    primary_stride: int = 2
    """Stride of the primary capsules' convolution."""
    primary_factor: bool = False
    """Multiply the primary capsules' convolution by 1/types, as the authors' code does."""
    primary_squash: bool = True
    """Squash the primary capsules, as the paper does. Without it their lengths are unbounded."""
    hidden_caps: tuple[tuple[int, int], ...] = ()
    """Capsule layers between primary and class capsules: (capsules, dimension) of each layer."""
    class_dim: int = 16
    """Class capsule dimension."""
    pose: Pose = "vector"
    """Poses as vectors, or as square matrices of one size (primary_dim = class_dim = 16 for 4×4)."""
    routing: RoutingOptions = field(default_factory=DynamicOptions)
    """Options of the routing algorithm; `--model.routing NAME` selects another one."""
    shared: bool = False
    """Share the transformations over the positions of the grid, so that large images and many classes fit."""
    decoder: tuple[int, ...] = (512, 1024)
    """Hidden layer widths of the decoder; empty for no decoder."""
    init: Init = "default"
    """Initial weights: PyTorch's defaults, or the authors' truncated normals with biases of 0.1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value, choices in (("stem", self.stem, get_args(Stem)), ("pose", self.pose, get_args(Pose))):
            if value not in choices:
                raise unknown(name, value, choices)
        stem = ("stem_channels", "stem_kernels", "stem_strides")
        primary = ("primary_types", "primary_dim", "primary_kernel", "primary_stride")
        check_range(self, 1, WIDEST, *stem, *primary, "hidden_caps", "class_dim", "decoder")

    def tiny(self) -> Self:
        return replace(self, **TINY, pose="vector", decoder=(16,) if self.decoder else ())

    def check_trained_convolutions(self) -> None:
        """For networks that build their own stem: refuse another one."""
        if self.stem != "conv" or self.freeze_stem:
            raise UserError(
                f"the model {self.kind} always trains a convolutional stem: leave --model.stem and "
                f"--model.freeze-stem out, or use --model capsnet."
            )


@dataclass(frozen=True)
class CNNConfig(ModelConfig):
    """One of the paper's convolutional baselines, or a network of the same design in other sizes."""

    kind: ClassVar[str] = "cnn"

    channels: tuple[int, ...] = (256, 256, 128)
    """Output channels of each convolution."""
    kernels: tuple[int, ...] = (5, 5, 5)
    """Kernel size of each convolution (padding keeps the size)."""
    pool: tuple[int, ...] = (1, 1, 1)
    """Max-pooling after each convolution; 1 for none."""
    hidden: tuple[int, ...] = (328, 192)
    """Widths of the fully connected layers."""
    dropout: float = 0.5
    """Dropout before the outputs."""
    norm: bool = False
    """Batch normalisation after each convolution (the paper has none)."""
    strided: bool = False
    """Strides of the convolutions instead of max-pooling of the same size."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, 1, WIDEST, "channels", "kernels", "pool", "hidden")
        check_range(self, 0, 1, "dropout")

    def tiny(self) -> Self:
        return replace(self, channels=(8,), kernels=(5,), pool=(4,), hidden=(16,))


@dataclass(frozen=True)
class LossConfig:
    """The loss: a classification loss, a weighted reconstruction loss and, with a teacher, a distillation loss."""

    kind: Loss = "auto"
    """Classification loss: the model's own (margin for capsules, spread for the model `matrix`, cross-entropy for a
    CNN), or the one named."""
    present: float = 0.9
    """m⁺ of the margin loss: a class that is present should be at least this long; also the final spread margin."""
    absent: float = 0.1
    """m⁻ of the margin loss: a class that is absent should be at most this long."""
    down_weight: float = 0.5
    """λ of the margin loss: weight of the absent classes."""
    margin_reduction: MarginReduction = "sum"
    """Sum over the classes (the paper), or half their mean (the authors' code)."""
    reconstruction: float = 0.0005
    """Weight of the SUM of squared pixel differences; 0 leaves the decoder untrained."""
    teacher: float = 1.0
    """With a teacher: weight of the SUM over the classes of squared differences from its activations."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Loss):
            raise unknown("loss", self.kind, get_args(Loss))
        check_range(self, 0, 1, "present", "absent")
        check_range(self, 0, MOST, "down_weight", "reconstruction", "teacher")
