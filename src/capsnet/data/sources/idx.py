"""The idx format, in which MNIST is published and every downloaded dataset is cached.

An idx file is 0, 0, 8 (unsigned bytes), the number of axes, the big-endian size of each axis, then the bytes. Archives
are opened in memory, one named member at a time and up to a maximum size, so that a malicious archive can neither write
files nor exhaust memory.
"""

from __future__ import annotations

import gzip
import tarfile
from pathlib import Path
from typing import IO

import numpy as np

from capsnet.errors import UserError

MNIST_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
GZ_NAMES = tuple(f"{name}.gz" for name in MNIST_FILES)
MOST_BYTES = 200_000_000  # of one member; the largest that we need has 154 MB


def to_idx(array: np.ndarray) -> bytes:
    """The idx file of an array of bytes.

    >>> to_idx(np.array([7, 9], np.uint8))
    b'\\x00\\x00\\x08\\x01\\x00\\x00\\x00\\x02\\x07\\t'
    """
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    return header + np.ascontiguousarray(array, np.uint8).tobytes()


def from_idx(data: np.ndarray, name: str) -> np.ndarray:
    """The array in an idx file, given as an array of bytes; shares its memory."""
    if data.size < 4 or data[:3].tolist() != [0, 0, 8] or data.size < 4 + 4 * int(data[3]):
        raise UserError(f"{name} is not an idx file of unsigned bytes: it does not begin with 0, 0, 8.")
    start = 4 + 4 * int(data[3])
    shape = tuple(int(size) for size in data[4:start].view(">u4"))
    expected = start + int(np.prod(shape, dtype=object))
    if data.size != expected:
        raise UserError(f"{name} should have {expected} bytes for its shape {shape} and has {data.size}.")
    return data[start:].reshape(shape)


def gzipped_idx(folder: Path) -> dict[str, bytes]:
    """The four .gz files of MNIST, and of datasets in the same format."""
    files = {}
    for name in MNIST_FILES:
        with gzip.open(folder / f"{name}.gz") as file:
            files[name] = read_bounded(file, name)
    return files


def read_bounded(file: IO[bytes] | gzip.GzipFile, name: str) -> bytes:
    data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"{name} is larger than {MOST_BYTES} bytes")
    return data


def read_member(archive: tarfile.TarFile, name: str) -> bytes:
    file = archive.extractfile(name)  # None for a folder or a device
    if file is None:
        raise ValueError(f"{name} is not a file")
    return read_bounded(file, name)
