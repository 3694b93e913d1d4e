"""The networks that the experiments compare, for each budget: the paper's own, and compact ones beside them.

The compact capsule network is the `quick` preset's. The CNN beside it has max-pooling and dropout and, by the width of
its fully connected layer, as nearly as many parameters as can be had (the decoder's counted too, as the paper does).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from capsnet.config import CapsNetConfig, CNNConfig, Config, LossConfig, ModelConfig, get_preset
from capsnet.data import Augment
from capsnet.experiments.plan import Budget
from capsnet.models.registry import build

CNN_LR = 0.004  # of a compact CNN: the best of 0.001, 0.002 and 0.004, the largest tried, on validation
AUTHORS_EPOCHS = 640  # their 300,000 steps of 128 over 60,000 images
PAPER_SIZES = {28: 8_215_568, 36: 11_361_808}


def parameters(model: ModelConfig) -> int:
    """Number of parameters, without memory for them."""
    return sum(p.numel() for p in build(model, device=torch.device("meta")).parameters())


def compact_capsules(side: int = 28, channels: int = 1, classes: int = 10) -> CapsNetConfig:
    """The quick preset's network for images of any side; from 45 px on with one more stride of 2."""
    model = get_preset("quick").model
    assert isinstance(model, CapsNetConfig)
    model = replace(model, image_shape=(channels, side, side), num_classes=classes)
    return replace(model, stem_strides=(2, 2, 1), primary_stride=1) if 45 <= side < 60 else model


def compact_cnn(like: ModelConfig) -> CNNConfig:
    """A CNN with max-pooling and dropout of about as many parameters, for the same images; batch norm if it has it."""
    side = max(like.image_shape[1:])
    pool = (2, 2, 1) if side < 45 else (2, 2, 2)
    norm = isinstance(like, CapsNetConfig) and like.stem_norm
    shape = CNNConfig(like.image_shape, like.num_classes, (32, 64, 64), (5, 3, 3), pool, (1,), dropout=0.5, norm=norm)
    return with_width(shape, parameters(like))


def with_width(model: CNNConfig, wanted: int) -> CNNConfig:
    """The width of the first fully connected layer that brings a CNN nearest to a number of parameters."""
    one, two = (parameters(replace(model, hidden=(width, *model.hidden[1:]))) for width in (1, 2))
    width = max(1, round((wanted - one) / (two - one)) + 1)
    return replace(model, hidden=(width, *model.hidden[1:]))


def capsule_training(budget: Budget, epochs: int, side: int = 28, data: str = "mnist", seed: int = 0) -> Config:
    """How a capsule network is trained on digits: the paper's network and schedule at `full`, else the quick one's.

    All in float32, whose numbers differ least from one processor to the next.
    """
    if budget == "full":
        paper = get_preset("paper")
        config = replace(paper, validation=0, epochs=AUTHORS_EPOCHS, model=sized(paper.model, side))
    else:
        config = replace(get_preset("quick"), epochs=epochs, precision="fp32", model=compact_capsules(side))
    shifted = Augment(shift=2) if data == "mnist" else Augment()  # the others are placed at random as they are made
    return replace(config, data=data, seed=seed, augment=shifted)


def cnn_training(budget: Budget, like: Config, paper: str = "baseline-mnist", epochs: int = 100) -> Config:
    """How a CNN is trained beside a capsule network: the paper's baseline at `full`, else a compact one like it."""
    if budget == "full":
        return replace(
            get_preset(paper), data=like.data, seed=like.seed, augment=like.augment, validation=0, epochs=epochs
        )
    return replace(like, model=compact_cnn(like.model), lr=cnn_lr(like), loss=LossConfig())


def cnn_lr(like: Config) -> float:
    """The largest learning rate that did well where it rises and falls again; elsewhere the usual one."""
    return CNN_LR if like.schedule == "one-cycle" else 0.001


def sized(model: ModelConfig, side: int) -> ModelConfig:
    return replace(model, image_shape=(model.image_shape[0], side, side))


def shortfalls(budget: Budget, config: Config, side: int = 28) -> tuple[str, ...]:
    """In what a capsule network's training falls short of the paper's."""
    if budget == "full":
        return ()
    size, theirs = parameters(config.model), PAPER_SIZES.get(side)
    network = f"a compact network of {size:,} parameters"
    return (
        network + (f" instead of the paper's {theirs:,}" if theirs else ""),
        f"{config.epochs} epochs instead of about {AUTHORS_EPOCHS}",
    )
