"""Examples by index: the interface of every dataset.

Images are in memory (`Dataset`), in a file (`capsnet.data.mapped.Stored`), or generated on the fly (`MadeOf`).
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from capsnet.errors import UserError


@dataclass(frozen=True, eq=False)
class Batch:
    """images float (b, c, h, w) in [0, 1]; targets float (b, j); labels as in the dataset; index (b,) into it.

    Images of several objects also have `parts` (b, k, c, h, w), each object alone at its place in the image; `digits`
    (b, k), their classes; and `present` bool (b, k), whether each is there. `measures` describes how each example was
    made, (b,) by name: for instance the overlap of its two digits.
    """

    images: Tensor
    targets: Tensor
    labels: Tensor
    index: Tensor
    parts: Tensor | None = None
    digits: Tensor | None = None
    present: Tensor | None = None
    measures: dict[str, Tensor] = field(default_factory=dict)


class Examples(ABC):
    """Examples that `gather` returns by index; the result depends on the index alone."""

    classes: tuple[str, ...]
    name: str
    endless: bool = False
    """Whether every index is an example, so that each epoch has new ones (generated images only)."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of examples, per epoch if they are endless."""

    @property
    def n(self) -> int:
        return len(self)

    @property
    @abstractmethod
    def device(self) -> torch.device: ...

    @property
    @abstractmethod
    def image_shape(self) -> tuple[int, int, int]:
        """(c, h, w)"""

    @property
    def multi_label(self) -> bool:
        """Whether an image may have several labels or none."""
        return self.labels_per_image != 1

    @property
    def labels_per_image(self) -> int | None:
        """Number of labels of every image; None if it varies."""
        return 1

    @property
    @abstractmethod
    def targets(self) -> Tensor:
        """float (n, j): 1 for the classes that are present."""

    @abstractmethod
    def gather(self, index: Tensor) -> Batch:
        """The examples at these indices (b,), as a batch on the dataset's device."""

    @abstractmethod
    def to(self, device: torch.device | str) -> Self:
        """The whole dataset on another device, so that a batch costs no transfer."""

    def expect(self, index: Tensor) -> None:  # noqa: B027 (what is in memory needs no preparation)
        """The examples at these indices are needed next."""

    def numbers(self) -> Tensor:
        """0 … n − 1, on the dataset's device."""
        return torch.arange(len(self), device=self.device)

    def sample(self, limit: int) -> Tensor:
        """Indices of at most `limit` examples, evenly spaced: files are often sorted by class."""
        n = len(self)
        return self.numbers() if limit >= n else torch.arange(limit, device=self.device) * n // limit

    def in_memory(self) -> Dataset:
        """All examples as tensors, generated once."""
        batches = [self.gather(index) for index in self.numbers().split(1000)]
        images = torch.cat([batch.images.mul(255).round_().to(torch.uint8) for batch in batches])
        return Dataset(images, torch.cat([batch.labels for batch in batches]), self.classes, self.name)

    def checksum(self) -> int:
        """CRC-32 of all images, then of all labels."""
        return self.in_memory().checksum()


@dataclass(frozen=True, eq=False)
class Dataset(Examples):
    """Images and labels in memory.

    `images` uint8 (n, c, h, w); `labels` int64 (n,), or bool (n, j) if an image may have several or none.
    """

    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    name: str

    def __post_init__(self) -> None:
        if self.images.dtype != torch.uint8 or self.images.ndim != 4:
            came = f"{self.images.dtype} {tuple(self.images.shape)}"
            raise UserError(f"{self.name}: images should be uint8 (n, c, h, w), not {came}.")
        check_labels(self.labels, len(self.images), len(self.classes), self.name)

    def __len__(self) -> int:
        return len(self.images)

    @property
    def device(self) -> torch.device:
        return self.images.device

    @property
    def labels_per_image(self) -> int | None:
        return None if self.labels.dtype == torch.bool else 1

    @property
    def image_shape(self) -> tuple[int, int, int]:
        c, h, w = self.images.shape[1:]
        return c, h, w

    @property
    def targets(self) -> Tensor:
        return multi_hot(self.labels, len(self.classes))

    def to(self, device: torch.device | str) -> Self:
        return replace(self, images=self.images.to(device), labels=self.labels.to(device))

    def gather(self, index: Tensor) -> Batch:
        index = index.to(self.device)
        labels = self.labels[index]
        images = self.images[index].float().div_(255)
        return Batch(images, multi_hot(labels, len(self.classes)), labels, index)

    def in_memory(self) -> Dataset:
        return self

    def checksum(self) -> int:
        return zlib.crc32(self.labels.cpu().numpy().data, zlib.crc32(self.images.cpu().contiguous().numpy().data))

    def subset(self, indices: Tensor) -> Self:
        indices = indices.to(self.images.device)
        return replace(self, images=self.images[indices], labels=self.labels[indices])


@dataclass(frozen=True, eq=False)
class MadeOf(Examples):
    """Images generated on the fly from those of another dataset."""

    source: Dataset

    @property
    def classes(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.source.classes

    @property
    def device(self) -> torch.device:
        return self.source.device

    def to(self, device: torch.device | str) -> Self:
        return replace(self, source=self.source.to(device))


def multi_hot(labels: Tensor, classes: int) -> Tensor:
    """float (n, j) from int64 (n,) or bool (n, j).

    >>> multi_hot(torch.tensor([2, 0]), 3)
    tensor([[0., 0., 1.],
            [1., 0., 0.]])
    """
    if labels.dtype == torch.bool:
        return labels.float()
    return torch.nn.functional.one_hot(labels, classes).float()


def check_labels(labels: Tensor, n: int, j: int, name: str) -> None:
    """Refuse labels of the wrong type, shape or range."""
    came = f"{labels.dtype} {tuple(labels.shape)}"
    if labels.dtype == torch.bool and tuple(labels.shape) == (n, j):
        return
    if labels.dtype != torch.int64 or tuple(labels.shape) != (n,):
        raise UserError(f"{name}: labels should be int64 ({n},) or bool ({n}, {j}), not {came}.")
    if n and not (labels.min() >= 0 and labels.max() < j):
        raise UserError(
            f"{name}: labels should be 0 to {j - 1} for {j} classes and range from {labels.min()} to {labels.max()}."
        )
