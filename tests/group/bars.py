"""Bars, upright or lying: a dataset for tests of several processes, also as a plugin (`--plugin bars.py`)."""

from __future__ import annotations

from dataclasses import replace

import torch

from capsnet.data import Augment, Dataset, DatasetInfo, Request, Splits, register, split
from capsnet.models.config import CapsNetConfig, CNNConfig
from capsnet.routing import options_for
from capsnet.train.config import Config

TINY = CapsNetConfig(
    (1, 12, 12), 2, stem_channels=(4,), stem_kernels=(3,), stem_norm=True, primary_types=2, primary_dim=4,
    primary_kernel=3, class_dim=4, decoder=(8,),
)  # fmt: skip
PLAIN = Config(preset="tiny", data="bars", epochs=34, batch_size=8, lr=0.002, validation=16, model=TINY, device="cpu")
RESIDUAL = replace(TINY, stem="residual", stem_channels=(4, 4), stem_kernels=(3, 3), stem_strides=(2, 1))
CNN = CNNConfig((1, 12, 12), 2, channels=(4, 4), kernels=(3, 3), pool=(2, 1), hidden=(8,), norm=True)
CONFIGS = {  # of trainings that are the same in one process and in several
    "capsnet": replace(PLAIN, augment=Augment(shift=1, rotate=10, elastic=1.0, share=0.5, erase=2, contrast=0.2)),
    "residual": replace(PLAIN, model=RESIDUAL, clip=1.0, average=0.9, epochs=4),
    "vb": replace(PLAIN, model=replace(TINY, routing=options_for("vb")), epochs=4),
    "em": replace(PLAIN, model=replace(TINY, routing=options_for("em")), epochs=4),
    "cnn with dropout": replace(PLAIN, model=CNN, optimizer="adamw", epochs=4),
    "in parts": replace(PLAIN, model=CNN, accumulate=2, epochs=4),
    "uneven": replace(PLAIN, batch_size=7, epochs=4),
}


def toy_set(n: int, seed: int) -> Dataset:
    draw = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % 2
    images = torch.randint(0, 60, (n, 1, 12, 12), generator=draw)
    for image, label in zip(images, labels, strict=True):
        image[0, 2:10, 5:7] += 150 * int(label == 0)
        image[0, 5:7, 2:10] += 150 * int(label == 1)
    return Dataset(images.to(torch.uint8), labels, ("upright", "lying"), "bars")


def toy_splits() -> Splits:
    return Splits(toy_set(48, 0), toy_set(16, 1), toy_set(21, 2))


def load(request: Request) -> Splits:
    return split(toy_set(64, 0), toy_set(21, 2), request)


register(DatasetInfo("bars", "bars, upright or lying", load, ("upright", "lying"), (1, 12, 12), (64, 21)))
