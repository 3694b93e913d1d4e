"""The networks that the experiments compare at each budget: the paper's, and compact ones.

The compact capsule network is that of the `quick` preset. The CNN that it is compared with has max-pooling and dropout;
the width of its fully connected layer is chosen to match the number of parameters, including the decoder as in the
paper.
"""

from __future__ import annotations

from dataclasses import replace

from capsnet.data import Augment
from capsnet.experiments.core.plan import Budget
from capsnet.models.config import CapsNetConfig, CNNConfig, LossConfig, ModelConfig
from capsnet.models.registry import parameters
from capsnet.train.config import Config
from capsnet.train.presets import QUICK_NETWORK, get_preset

CNN_LR = 0.004  # for a compact CNN: the best of 0.001, 0.002 and 0.004 on validation images
AUTHORS_EPOCHS = 640  # 300,000 steps of 128 of 60,000 images
PAPER_SIZES = {28: 8_215_568, 36: 11_361_808}


def compact_capsules(side: int = 28, channels: int = 1, classes: int = 10) -> CapsNetConfig:
    """The quick preset's network for images of any size; one more stride of 2 from 45 pixels on."""
    model = replace(QUICK_NETWORK, image_shape=(channels, side, side), num_classes=classes)
    return replace(model, stem_strides=(2, 2, 1), primary_stride=1) if 45 <= side < 60 else model


def compact_cnn(like: ModelConfig) -> CNNConfig:
    """A CNN for the same images and about as many parameters; with batch norm if `like` has it."""
    side = max(like.image_shape[1:])
    pool = (2, 2, 1) if side < 45 else (2, 2, 2)
    norm = getattr(like, "stem_norm", False)
    shape = CNNConfig(like.image_shape, like.num_classes, (32, 64, 64), (5, 3, 3), pool, (1,), dropout=0.5, norm=norm)
    return with_width(shape, parameters(like))


def with_width(model: CNNConfig, wanted: int) -> CNNConfig:
    """Set the width of the first fully connected layer so that the CNN has about the wanted number of parameters."""
    one, two = (parameters(replace(model, hidden=(width, *model.hidden[1:]))) for width in (1, 2))
    width = max(1, round((wanted - one) / (two - one)) + 1)
    return replace(model, hidden=(width, *model.hidden[1:]))


def capsule_training(budget: Budget, epochs: int, side: int = 28, data: str = "mnist", seed: int = 0) -> Config:
    """Training of a capsule network on digits: the paper's network and schedule at `full`, else the quick preset.

    All in float32, which varies least between processors, except at `day`: bfloat16 to save time, and a one-cycle
    learning rate.
    """
    if budget == "full":
        paper = get_preset("paper")
        config = replace(paper, validation=0, epochs=AUTHORS_EPOCHS, model=sized(paper.model, side))
    elif budget == "day":
        config = replace(
            get_preset("paper"), validation=0, epochs=epochs, schedule="one-cycle", warmup=0.1, precision="bf16",
            model=sized(get_preset("paper").model, side),
        )  # fmt: skip
    else:
        config = replace(get_preset("quick"), epochs=epochs, precision="fp32", model=compact_capsules(side))
    shifted = Augment(shift=2) if data == "mnist" else Augment()  # the other datasets place digits at random
    return replace(config, data=data, seed=seed, augment=shifted)


def cnn_training(budget: Budget, like: Config, paper: str = "baseline-mnist", epochs: int = 100) -> Config:
    """Training of the CNN that a capsule network is compared with: the paper's at `day` and `full`, else compact."""
    if budget in ("day", "full"):
        return replace(
            get_preset(paper), data=like.data, seed=like.seed, augment=like.augment, validation=0, epochs=epochs
        )
    return replace(like, model=compact_cnn(like.model), lr=cnn_lr(like), loss=LossConfig())


def cnn_lr(like: Config) -> float:
    """The learning rate of a compact CNN with a one-cycle schedule, or the usual one."""
    return CNN_LR if like.schedule == "one-cycle" else 0.001


def sized(model: ModelConfig, side: int) -> ModelConfig:
    return replace(model, image_shape=(model.image_shape[0], side, side))


def shortfalls(budget: Budget, config: Config, side: int = 28) -> tuple[str, ...]:
    """What a capsule network's training has less of than the paper's."""
    if budget == "full":
        return ()
    if budget == "day":
        return (f"{config.epochs} epochs instead of about {AUTHORS_EPOCHS}",)
    size, theirs = parameters(config.model), PAPER_SIZES.get(side)
    return (
        f"{size:,} instead of {theirs:,} parameters" if theirs else f"{size:,} parameters",
        f"{config.epochs} epochs instead of about {AUTHORS_EPOCHS}",
    )
