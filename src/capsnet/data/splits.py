"""Training, validation and test splits.

The paper trains on the 60,000 images of MNIST and tests on its 10,000. Its authors' code holds out the first 10,000
training images for validation (`validation_choice="first"`). Here 10,000 images drawn by the seed are held out by
default, or a tenth of a smaller dataset, so that no choice is made on the test set.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from capsnet.data.examples import Dataset, Examples
from capsnet.data.mapped import Stored
from capsnet.data.registry import DEFAULT_VALIDATION, Choice, Request, parse
from capsnet.data.seeds import generator
from capsnet.data.sources import cache
from capsnet.errors import UserError

Part = TypeVar("Part", bound=Examples)
Own = TypeVar("Own", Dataset, Stored)


@dataclass(frozen=True, eq=False)
class Splits(Generic[Part]):
    """The three splits, which share no image. The validation split may be empty."""

    train: Part
    validation: Part
    test: Part

    def to(self, device: torch.device | str) -> Splits[Part]:
        return Splits(self.train.to(device), self.validation.to(device), self.test.to(device))


def fingerprint(splits: Splits, data: str) -> dict[str, int]:
    """Checksums of each split of the user's images, which may change; empty for other datasets."""
    if parse(data).info.checksum is None:
        return {}
    parts = {"train": splits.train, "validation": splits.validation, "test": splits.test}
    return {name: part.checksum() for name, part in parts.items()}


def split(train: Dataset, test: Dataset, request: Request) -> Splits[Dataset]:
    """The requested splits of training and test images: converted, validation images held out, training limited."""
    train, test = convert(train, request), convert(test, request)
    if request.validation == DEFAULT_VALIDATION >= train.n:
        request = replace(request, validation=train.n // 10)
    if request.validation >= train.n:
        raise UserError(
            f"validation={request.validation} leaves no images to train on: {train.name} has {train.n} training images."
        )
    if not request.validation:
        return limit_training(Splits(train, train.subset(torch.arange(0)), test), request)
    stay, held_out = split_indices(train.n, request.validation, request.validation_choice, request.seed)
    return limit_training(Splits(train.subset(stay), train.subset(held_out), test), request)


def load_published(request: Request) -> Splits[Dataset]:
    """The splits of a dataset that consists of four published files."""
    info = request.spec.info
    assert info.source is not None
    arrays = cache.read(info.source)
    parts = []
    for images, labels in (arrays[:2], arrays[2:]):
        pixels = torch.from_numpy(images if images.ndim == 4 else images[:, None])
        parts.append(Dataset(pixels, torch.from_numpy(labels.astype(np.int64)), info.classes, info.name))
    return split(parts[0], parts[1], request)


def split_indices(n: int, held_out: int, choice: Choice, seed: int) -> tuple[Tensor, Tensor]:
    """Indices of the remaining and of the held-out images, both in ascending order."""
    order = torch.arange(n)
    if choice == "seeded":
        order = torch.randperm(n, generator=generator(seed, "validation"))
    return order[held_out:].sort().values, order[:held_out].sort().values


def limit_training(splits: Splits[Own], request: Request) -> Splits[Own]:
    """The splits with at most `train_limit` training images, balanced over the classes."""
    train, limit = splits.train, request.train_limit
    if not limit:
        return splits
    if not 0 < limit <= train.n:
        raise UserError(f"train_limit={limit} should be between 1 and the {train.n} training images of {train.name}.")
    shuffled = torch.randperm(train.n, generator=generator(request.seed, "limit"))
    chosen = shuffled[:limit]
    if not train.multi_label:
        labels = train.labels.cpu()[shuffled]
        rank = torch.empty(train.n, dtype=torch.long)  # of each image among those of its class
        for j in range(len(train.classes)):
            rank[labels == j] = torch.arange(int((labels == j).sum()))
        chosen = shuffled[rank.argsort(stable=True)[:limit]]
    return replace(splits, train=train.subset(chosen.sort().values))


def convert(part: Dataset, request: Request) -> Dataset:
    """Images in the requested size and channels, 1,000 at a time to save memory."""
    c, h, w = part.image_shape
    size = request.size or (h, w)
    if (size, request.channels or c) == ((h, w), c):
        return part
    chunks = [_convert_images(chunk, size, request.channels) for chunk in part.images.split(1000)]
    return replace(part, images=torch.cat(chunks))


def _convert_images(images: Tensor, size: tuple[int, int], channels: int | None) -> Tensor:
    result = images.float()
    if channels == 1 and images.shape[1] == 3:
        grey = torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)  # ITU-R 601, as in Pillow
        result = (result * grey).sum(1, keepdim=True)
    if size != tuple(images.shape[2:]):
        result = torch.nn.functional.interpolate(result, size, mode="bilinear", antialias=True)
    result = result.round().clamp(0, 255).to(torch.uint8)
    return result.repeat(1, 3, 1, 1) if channels == 3 and result.shape[1] == 1 else result
