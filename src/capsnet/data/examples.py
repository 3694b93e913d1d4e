"""What every data set is, whether it lies in memory or is made on the fly: a number of examples, asked for by index."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

Self = TypeVar("Self", bound="Examples")


@dataclass(frozen=True, eq=False)
class Batch:
    """images float (b, c, h, w) in [0, 1]; targets float (b, j); labels as in the data set; index (b,) in it.

    Of images with two digits also: `parts` (b, 2, c, h, w), each digit alone as it lies in the image; `digits` (b, 2),
    their classes; `present` bool (b, 2), whether it is there. `measures`: what is known about how each example was
    made, (b,) by name, for instance the overlap of its two digits.
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
    """A data set. `gather` is all that batches need; what it gives depends on the index alone."""

    classes: tuple[str, ...]
    name: str
    endless: bool = False
    """Whether any index is an example, and each epoch goes on where the last one ended (only with made images)."""

    @abstractmethod
    def __len__(self) -> int:
        """Examples in an epoch, or in all."""

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
        """How many, where all images have as many as each other."""
        return 1

    @property
    @abstractmethod
    def targets(self) -> Tensor:
        """float (n, j): 1 where the class is there."""

    @abstractmethod
    def gather(self, index: Tensor) -> Batch:
        """The examples of these numbers (b,), as a batch on the data set's device."""

    @abstractmethod
    def to(self: Self, device: torch.device | str) -> Self:
        """The same on another device; all of it, so that a batch costs an index and not a copy."""

    def numbers(self) -> Tensor:
        """0 … n − 1, where the data are."""
        return torch.arange(len(self), device=self.device)
