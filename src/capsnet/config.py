"""Every choice in one place: a field is a command-line flag, its help text and its record in the JSON.

Frozen dataclasses, one for each concern; `Config` holds them all, and a value that makes no sense is refused where
it comes in. A preset's docstring gives the command, its cost on two cores and, once measured, the error to expect.
"""

from __future__ import annotations

import dataclasses
import sys
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from capsnet.data.augment import Augment
from capsnet.errors import UserError, unknown
from capsnet.layers import Init
from capsnet.losses import MarginReduction

MOST = sys.float_info.max  # infinity is no setting, and JSON has none
WIDEST = 1_000_000  # of anything in a network: far beyond what a machine holds, and no number overflows below it


def check_range(config: Any, low: float, high: float, *names: str) -> None:
    """Refuse fields with a value outside [low, high]; of a tuple every number counts."""
    for name in names:
        value = getattr(config, name)
        if wrong := [x for x in _numbers(value) if not low <= x <= high]:
            how = "too small" if wrong[0] < low else "too large" if wrong[0] > high else "no number"
            wanted = f"{low:,} or more" if high == MOST else f"between {low:,} and {high:,}"
            raise UserError(f"{name}={value} is {how}: it should be {wanted}.")


def _numbers(value: Any) -> list[float]:
    return [x for part in value for x in _numbers(part)] if isinstance(value, tuple) else [value]


@dataclass(frozen=True)
class CapsNetConfig:
    """A capsule network: convolutional stem, primary capsules, class capsules by routing, decoder."""

    image_shape: tuple[int, int, int] = (1, 28, 28)
    """Channels, height and width; taken from the data when training."""
    num_classes: int = 10
    """Number of class capsules; taken from the data when training."""
    stem_channels: tuple[int, ...] = (256,)
    """Output channels of each convolution before the primary capsules."""
    stem_kernels: tuple[int, ...] = (9,)
    """Kernel size of each of them."""
    stem_strides: tuple[int, ...] = (1,)
    """Stride of each of them."""
    stem_norm: bool = False
    """Batch normalisation after each of them (the paper has none)."""
    branches: int = 1
    """Branches side by side, which do not see each other until the end: channels (after the trunk), types of primary
    capsules and the numbers of a class capsule are divided among them. Each has a margin loss of its own; a teacher
    looks at what they come to together. The paper has one."""
    trunk: int = 0
    """How many of the convolutions come before the branches part, and are shared."""
    primary_types: int = 32
    """Types of primary capsules at each position of the grid."""
    primary_dim: int = 8
    """Numbers in a primary capsule."""
    primary_kernel: int = 9
    """Kernel size of the primary capsules' convolution."""
    primary_stride: int = 2
    """Its stride."""
    primary_factor: bool = False
    """Multiply the primary capsules' convolution by 1/types, as the authors' code does."""
    hidden_caps: tuple[tuple[int, int], ...] = ()
    """Capsule layers between primary and class capsules: (number, numbers in each) for each layer."""
    class_dim: int = 16
    """Numbers in a class capsule: its pose."""
    routing: str = "dynamic"
    """Routing algorithm."""
    iterations: int = 3
    """Routing iterations; 1 means uniform couplings."""
    leaky: bool = False
    """Leaky routing: an extra zero logit takes what fits no class."""
    routing_bias: bool = False
    """A learnt bias added to s_j in every iteration, as in the authors' code."""
    detach: bool = False
    """Let the gradient flow through the last routing iteration only."""
    shared: bool = False
    """Share the transformations over the positions of the grid: large images and many classes fit."""
    decoder: tuple[int, ...] = (512, 1024)
    """Hidden widths of the decoder; empty for no decoder at all."""
    init: Init = "default"
    """Initial weights: PyTorch's own, or the authors' truncated normals with biases of 0.1."""

    def __post_init__(self) -> None:
        check_range(
            self, 1, WIDEST, "image_shape", "num_classes", "stem_channels", "stem_kernels", "stem_strides",
            "primary_types", "primary_dim", "primary_kernel", "primary_stride", "hidden_caps", "class_dim",
            "iterations", "decoder", "branches",
        )  # fmt: skip
        check_range(self, 0, WIDEST, "trunk")


@dataclass(frozen=True)
class CNNConfig:
    """One of the paper's convolutional baselines, or a network of the same make in other sizes."""

    image_shape: tuple[int, int, int] = (1, 28, 28)
    """Channels, height and width; taken from the data when training."""
    num_classes: int = 10
    """Number of outputs; taken from the data when training."""
    channels: tuple[int, ...] = (256, 256, 128)
    """Output channels of each convolution."""
    kernels: tuple[int, ...] = (5, 5, 5)
    """Kernel size of each of them (padding keeps the size)."""
    pool: tuple[int, ...] = (1, 1, 1)
    """Max-pooling after each of them; 1 for none."""
    hidden: tuple[int, ...] = (328, 192)
    """Widths of the fully connected layers."""
    dropout: float = 0.5
    """Dropout before the outputs."""
    norm: bool = False
    """Batch normalisation after each convolution (the paper has none)."""

    def __post_init__(self) -> None:
        check_range(self, 1, WIDEST, "image_shape", "num_classes", "channels", "kernels", "pool", "hidden")
        check_range(self, 0, 1, "dropout")


ModelConfig = CapsNetConfig | CNNConfig


@dataclass(frozen=True)
class LossConfig:
    """Margin loss plus reconstruction; CNNs take cross-entropy and ignore all but `teacher`, unless told otherwise."""

    present: float = 0.9
    """m⁺: a class that is there should be at least this long."""
    absent: float = 0.1
    """m⁻: a class that is not there should be at most this long."""
    down_weight: float = 0.5
    """λ: how much the classes that are not there count."""
    margin_reduction: MarginReduction = "sum"
    """Sum over the classes (the paper), or half their mean (the authors' code)."""
    reconstruction: float = 0.0005
    """Weight of the SUM of squared pixel differences; 0 leaves the decoder untrained."""
    teacher: float = 1.0
    """With a teacher: weight of the SUM over the classes of squared differences from its lengths."""
    cnn: Literal["entropy", "margin"] = "entropy"
    """What a CNN minimises: cross-entropy (the paper's baselines), or the margin loss on a sigmoid for each class."""

    def __post_init__(self) -> None:
        check_range(self, 0, 1, "present", "absent")
        check_range(self, 0, MOST, "down_weight", "reconstruction", "teacher")


@dataclass(frozen=True)
class Config:
    """A training, whole."""

    preset: str = "quick"
    """Which settings to begin with: quick, best, own-images, paper, official, … (`capsnet models` lists them)."""
    data: str = "mnist"
    """mnist, fashion-mnist, cifar10, multimnist, expanded-mnist, affine-mnist, parts, folder:PATH or csv:PATH."""
    init: str = ""
    """Begin with what fits of a trained model: a shipped one's name, a run's folder or a .safetensors file. Its network
    is then the default, and your own images are converted to its size and channels."""
    teacher: str = ""
    """Learn from a trained model's answers too (distillation): one that knows these classes on images of this size, by
    its name, a run's folder or a .safetensors file."""
    image_size: int = 0
    """Resize images to this many pixels; 0 keeps their size (a folder's images become 64 where they are larger or of
    several sizes)."""
    validation: int = 10_000
    """How many training images are held back to choose things on; 0 trains on all of them."""
    validation_choice: Literal["seeded", "first"] = "seeded"
    """Which ones: by the seed, or the first ones as in the authors' code."""
    train_limit: int = 0
    """Train on this many of the others only, equally many of each class, drawn by the seed; 0 for all of them."""
    epochs: float = 10
    """Passes over the training images; 2.5 ends in the middle of one."""
    batch_size: int = 128
    """Images in a step."""
    optimizer: Literal["adam", "adamw"] = "adam"
    """Adam, or Adam with decoupled weight decay."""
    lr: float = 0.001
    """Learning rate (its peak, where the schedule has one)."""
    schedule: Literal["constant", "exponential", "one-cycle"] = "constant"
    """How it changes: not at all; × 0.96 every 2,000 steps, continuously; up, then down to almost nothing."""
    warmup: float = 0.2
    """Share of the steps on which one-cycle goes up."""
    weight_decay: float = 0.0
    """Decoupled weight decay, with adamw."""
    average: float = 0.0
    """Weight averaging: decay of the moving average that is evaluated and saved; 0 for none."""
    clip: float = 0.0
    """Clip the norm of the gradient at this; 0 for never."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: large products, and what lies between the layers of a deep stem, in bfloat16 where the processor has it;
    else fewer and rougher products in float32."""
    patience: int = 0
    """Stop when the validation error has not improved for this many epochs; 0 for never."""
    stop_at: float = 0.0
    """Stop at the end of the epoch whose validation error is at or below this many percent; 0 for never."""
    seed: int = 0
    """Fixes the initial weights, the split, every batch and every augmentation."""
    device: str = "auto"
    """auto, cpu, cuda or mps."""
    save_every: float = 60.0
    """Seconds between two checkpoints; one is also written after every epoch of more than a few seconds."""
    model: ModelConfig = field(default_factory=CapsNetConfig)
    """The network."""
    loss: LossConfig = field(default_factory=LossConfig)
    """What is minimised."""
    augment: Augment = field(default_factory=Augment)
    """What is done to training images; never to test images."""

    def __post_init__(self) -> None:
        check_range(self, 1, MOST, "batch_size")
        check_range(self, 0.001, WIDEST, "epochs")
        if self.epochs == int(self.epochs):
            object.__setattr__(self, "epochs", int(self.epochs))  # 2 and not 2.0, wherever it is shown
        check_range(self, 0, MOST, "validation", "train_limit", "lr", "weight_decay", "clip", "patience", "save_every")
        check_range(self, 0, 1, "warmup", "average")
        check_range(self, 0, 100, "stop_at")
        check_range(self, 0, WIDEST, "image_size")
        check_range(self, 0, 2**63 - 1, "seed")


PRESETS: dict[str, Config] = {}
PROMISES: dict[str, str] = {}


def preset(function: Callable[[], Config]) -> Callable[[], Config]:
    """Register a preset under its function's name; its docstring is its promise."""
    name = function.__name__.replace("_", "-")
    PRESETS[name] = replace(function(), preset=name)
    PROMISES[name] = " ".join((function.__doc__ or "").split())
    return function


def get_preset(name: str) -> Config:
    """The preset of that name; an unknown name lists the choices."""
    if name not in PRESETS:
        raise unknown("preset", name, PRESETS)
    return PRESETS[name]


@preset
def quick() -> Config:
    """A compact capsule network of 1,984,272 parameters on all 60,000 digits: at least 99.5 % of the test digits right
    after less than 2 minutes of training on two cores.

    `capsnet train`
    """
    return Config(
        validation=0, epochs=4, batch_size=128, optimizer="adamw", lr=0.006, schedule="one-cycle", weight_decay=0.01,
        precision="bf16",
        model=CapsNetConfig(
            stem_channels=(32, 64, 64), stem_kernels=(5, 3, 3), stem_strides=(2, 1, 1), stem_norm=True,
            primary_types=32, primary_kernel=3, primary_stride=2, routing_bias=True,
        ),
        augment=Augment(shift=2),
    )  # fmt: skip


@preset
def best() -> Config:
    """For a low error of a single network within an hour on two cores: three branches after a shared trunk,
    3,600,544 parameters, averaged weights, a heavier reconstruction, and besides shifts every second digit turned,
    scaled, slanted and bent. Three seeds had 0.25 % of the test digits wrong on average; one takes about 37
    minutes where the processor has bfloat16.

    `capsnet train --preset best`
    """
    return Config(
        validation=0, epochs=24, optimizer="adamw", lr=0.004, schedule="one-cycle", warmup=0.1, weight_decay=0.05,
        average=0.999, precision="bf16",
        model=CapsNetConfig(
            stem_channels=(32, 32, 32, 192, 288, 384, 384), stem_kernels=(3, 3, 3, 3, 3, 3, 3),
            stem_strides=(1, 1, 1, 2, 1, 1, 1), stem_norm=True, branches=3, trunk=3, primary_types=96,
            primary_kernel=3, primary_stride=1, class_dim=24, routing_bias=True,
        ),
        loss=LossConfig(reconstruction=0.004),
        augment=Augment(shift=2, rotate=12, scale=0.12, shear=0.15, elastic=0.8, share=0.5, until=0.85),
    )  # fmt: skip


@preset
def own_images() -> Config:
    """The quick network for a folder of your own images: small batches, a lower learning rate and more epochs. What
    `--data folder:PATH` and `csv:PATH` take by default. Its time and error are your data's and not measured here.

    `capsnet train --data folder:PATH`
    """
    return replace(quick(), validation=10_000, epochs=30, batch_size=16, lr=0.001, precision="fp32")


@preset
def paper() -> Config:
    """The paper's text: 8,215,568 parameters, Adam, margin loss summed, shifts up to 2 px. 0.3 s a step of 128 on two
    cores with the fast path: two to three minutes an epoch, an hour in all. Error not measured yet.

    `capsnet train --preset paper`
    """
    return Config(epochs=30, schedule="exponential", augment=Augment(shift=2))


@preset
def official() -> Config:
    """The authors' code, with every choice that the paper does not mention; as costly as `paper`, two to three
    minutes an epoch on two cores. Error not measured yet.

    `capsnet train --preset official`, with `--epochs 769` for their 300,000 steps: about a day.
    """
    return Config(
        epochs=30, schedule="exponential", validation_choice="first",
        model=CapsNetConfig(primary_factor=True, routing_bias=True, init="official"),
        loss=LossConfig(margin_reduction="half-mean"),
        augment=Augment(shift=2),
    )  # fmt: skip


@preset
def multimnist() -> Config:
    """Two overlapping digits on 36×36, both to be named: a compact capsule network of 2,988,944 parameters with a deep
    stem, on new pairs in every epoch. One seed, with 5,000 pairs held back, had 6.68 % of the 100,000 test pairs wrong
    after 30 epochs (114 minutes on two cores that did much other work besides).

    `capsnet train --preset multimnist`
    """
    return Config(
        data="multimnist", epochs=30, optimizer="adamw", lr=0.004, schedule="one-cycle", weight_decay=0.01,
        model=CapsNetConfig(
            (1, 36, 36), stem_channels=(32, 64, 128, 128, 128), stem_kernels=(5, 3, 3, 3, 3),
            stem_strides=(2, 1, 1, 1, 1), stem_norm=True, primary_types=32, primary_kernel=3, primary_stride=2,
            routing_bias=True,
        ),
    )  # fmt: skip


@preset
def expanded() -> Config:
    """A compact capsule network of 3,926,592 parameters for digits anywhere on 40×40, trained until 99.2 % of the
    validation digits are right, to be tested on transformed ones. One seed took 7 epochs (8.5 minutes on two cores
    that did other work besides) and had 0.51 % of the test digits wrong.

    `capsnet train --preset expanded`, then `capsnet evaluate RUN --data affine-mnist`
    """
    model = replace(quick().model, image_shape=(1, 40, 40))
    return Config(
        data="expanded-mnist", epochs=8, optimizer="adamw", lr=0.004, schedule="one-cycle", weight_decay=0.01,
        stop_at=0.8, model=model,
    )  # fmt: skip


@preset
def expanded_cnn() -> Config:
    """What `expanded` is compared with: convolutions with max-pooling and dropout, 3,908,520 parameters, trained to the
    same validation error. One seed took 8 epochs (12 minutes on two cores that did other work besides) and had
    0.61 % of the test digits wrong.

    `capsnet train --preset expanded-cnn`, then `capsnet evaluate RUN --data affine-mnist`
    """
    model = CNNConfig((1, 40, 40), 10, (32, 64, 128), (5, 5, 3), (2, 2, 2), (1178,))
    return replace(expanded(), lr=0.002, model=model)


@preset
def baseline_mnist() -> Config:
    """The paper's MNIST baseline: 35,445,522 parameters and ten times the arithmetic of the capsule network, so better
    on a GPU. Neither time nor error measured yet.

    `capsnet train --preset baseline-mnist`
    """
    return Config(epochs=10, model=CNNConfig(), augment=Augment(shift=2))


@preset
def baseline_multimnist() -> Config:
    """The paper's MultiMNIST baseline at 36×36: 24,563,978 parameters, a sigmoid for each class. Neither time nor error
    measured yet.

    `capsnet train --preset baseline-multimnist`
    """
    model = CNNConfig((1, 36, 36), 10, (512, 256), (9, 5), (2, 2), (1024,), dropout=0.0)
    return Config(data="multimnist", epochs=10, model=model)


def to_dict(config: Any) -> dict[str, Any]:
    """A config as plain JSON types, with the kind of the model by name."""
    record = dataclasses.asdict(config)
    if isinstance(config, Config):
        record["model"] = model_to_dict(config.model)
    return record


def model_to_dict(config: ModelConfig) -> dict[str, Any]:
    return {"kind": "capsnet" if isinstance(config, CapsNetConfig) else "cnn", **dataclasses.asdict(config)}


def from_dict(record: dict[str, Any]) -> Config:
    """The config back from JSON; fields that this version does not know are named in the error."""
    parts = dict(record)
    if missing := [name for name in ("model", "loss", "augment") if not isinstance(parts.get(name), dict)]:
        raise UserError(f"the file's Config has no {missing[0]}: it is damaged, or no config at all.")
    parts["model"] = model_from_dict(record["model"])
    parts["loss"] = _build(LossConfig, record["loss"])
    parts["augment"] = _build(Augment, record["augment"])
    return _build(Config, parts)


def model_from_dict(record: dict[str, Any]) -> ModelConfig:
    kinds: dict[str, Any] = {"capsnet": CapsNetConfig, "cnn": CNNConfig}
    parts = dict(record)
    kind = parts.pop("kind", "capsnet")
    if kind not in kinds:
        raise unknown("kind of model", str(kind), kinds)
    return typing.cast(ModelConfig, _build(kinds[kind], parts))


def _build(cls: type, record: dict[str, Any]) -> Any:
    """A frozen dataclass from JSON types: lists become tuples again, and every field is checked."""
    hints = typing.get_type_hints(cls)
    if strange := sorted(set(record) - set(hints)):
        raise UserError(
            f"the file's {cls.__name__} has fields that this version does not know: {', '.join(strange)}; "
            f"install the version of capsnet that wrote it."
        )
    values = {name: _tuples(value) for name, value in record.items()}
    for name, value in values.items():
        if not _fits(value, hints[name]):
            raise UserError(f"the file's {cls.__name__}.{name} is {value!r}, which is no {hints[name]}: it is damaged.")
    return cls(**values)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list | tuple) else value


def _fits(value: Any, hint: Any) -> bool:
    """Whether a JSON value has the type that the field asks for (the few kinds of types used in this file)."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return value in args
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, arg) for arg in args)
    if origin is tuple:
        inner = [args[0]] * len(value) if isinstance(value, tuple) and args[-1] is Ellipsis else args
        return isinstance(value, tuple) and len(value) == len(inner) and all(map(_fits, value, inner))
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)
