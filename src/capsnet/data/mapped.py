"""Examples whose images are in a file that is larger than memory: batches are copied from a memory map.

The map itself needs no memory: the operating system keeps as much of the file as fits, shared by all processes that
read it, and gives it up when others need the space. Pages that this process has touched count towards its resident set,
so they are released now and then.
"""

from __future__ import annotations

import mmap
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from capsnet.data.examples import Batch, Examples, check_labels, multi_hot

CPU = torch.device("cpu")
TOUCHED = 2**25  # bytes to copy before the pages of the map are released: about six times as many, with neighbours


class Mapped:
    """Images uint8 (n, c, h, w) in a file, with the CRC-32 of each."""

    def __init__(self, path: Path, shape: tuple[int, int, int], checksums: np.ndarray) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.shape, self.checksums = shape, checksums
        self._images = np.frombuffer(self._map, np.uint8).reshape(-1, *shape)
        self._copied = 0
        # else a page that is not in memory brings its neighbours, which a batch seldom uses
        self._advise("MADV_RANDOM")

    def take(self, rows: Tensor) -> Tensor:
        """A copy of the images in these rows."""
        self._copied += len(rows) * self._images[0].nbytes
        if self._copied > TOUCHED:
            self.release()
        return torch.from_numpy(self._images.take(rows.numpy(), axis=0))

    def release(self) -> None:
        """Take the pages of the map out of the resident set; the operating system may keep them in memory."""
        self._copied = 0
        self._advise("MADV_DONTNEED")

    def expect(self, rows: Iterable[int]) -> None:
        """Let the operating system read these rows ahead, all at the same time."""
        size = self._images[0].nbytes
        for row in rows:
            start = row * size // mmap.PAGESIZE * mmap.PAGESIZE
            self._advise("MADV_WILLNEED", start, row * size + size - start)

    def _advise(self, name: str, start: int = 0, length: int = 0) -> None:
        advice = getattr(mmap, name, None)  # Windows has none
        if advice is not None:
            self._map.madvise(advice, start, length or len(self._map))


@dataclass(frozen=True, eq=False)
class Stored(Examples):
    """Images in a mapped file, and labels in memory as in `Dataset`."""

    images: Mapped
    rows: Tensor
    """int64 (n,): where in the file each image is."""
    labels: Tensor
    classes: tuple[str, ...]
    name: str
    place: torch.device = CPU
    """Where batches go."""

    def __post_init__(self) -> None:
        check_labels(self.labels, len(self.rows), len(self.classes), self.name)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def device(self) -> torch.device:
        return self.place

    @property
    def labels_per_image(self) -> int | None:
        return None if self.labels.dtype == torch.bool else 1

    @property
    def image_shape(self) -> tuple[int, int, int]:
        return self.images.shape

    @property
    def targets(self) -> Tensor:
        return multi_hot(self.labels, len(self.classes)).to(self.place)

    def to(self, device: torch.device | str) -> Stored:
        return replace(self, place=torch.device(device))

    def gather(self, index: Tensor) -> Batch:
        chosen = index.cpu()
        labels = self.labels[chosen].to(self.place)
        images = self.images.take(self.rows[chosen]).to(self.place).float().div_(255)
        return Batch(images, multi_hot(labels, len(self.classes)), labels, index.to(self.place))

    def expect(self, index: Tensor) -> None:
        self.images.expect(self.rows[index.cpu()].tolist())

    def subset(self, indices: Tensor) -> Stored:
        indices = indices.cpu()
        return replace(self, rows=self.rows[indices], labels=self.labels[indices])

    def checksum(self) -> int:
        c, h, w = self.image_shape
        return zlib.crc32(self.labels.numpy().data, joined(self.images.checksums[self.rows.numpy()], c * h * w))


def joined(checksums: np.ndarray, length: int) -> int:
    """The CRC-32 of blocks of `length` bytes one after another, from the CRC-32 of each.

    With start value x, the CRC of a block is linear in the bits of x, up to the CRC of the block alone: M x ⊕ crc. M
    depends on the length only, so the CRC of zeros shows each of its columns.

    >>> blocks = [bytes([k] * 5) for k in range(9)]
    >>> joined(np.array([zlib.crc32(block) for block in blocks]), 5) == zlib.crc32(b"".join(blocks))
    True
    """
    zeros = bytes(length)
    columns = [zlib.crc32(zeros, 1 << bit) ^ zlib.crc32(zeros) for bit in range(32)]
    bytewise = [[_product(columns[place : place + 8], byte) for byte in range(256)] for place in (0, 8, 16, 24)]
    low, second, third, high = bytewise
    crc = 0
    for each in checksums.tolist():
        crc = low[crc & 255] ^ second[crc >> 8 & 255] ^ third[crc >> 16 & 255] ^ high[crc >> 24] ^ each
    return crc


def _product(columns: list[int], byte: int) -> int:
    """The sum, bit by bit, of the columns that the bits of a byte choose."""
    result = 0
    for bit, column in enumerate(columns):
        result ^= column if byte >> bit & 1 else 0
    return result
