"""The original smallNORB (https://cs.nyu.edu/~ylclab/data/norb-v1.0-small/): photographed toys at known poses.

`smallnorb:PATH` reads the six files of a folder, packed (.gz) or unpacked. Files that an existing folder lacks are
downloaded into it. Three files make up each half: images (dat), categories (cat) and poses (info: instance, elevation
0 to 8, azimuth 0 to 34 in tens of degrees, lighting). A file is a magic number that names the type of its entries, the
number of axes, the size of each axis (three are written even if there are fewer), then the entries; all numbers are
little-endian.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import IO

import numpy as np
import torch

from capsnet.data.registry import DatasetInfo, Request, register
from capsnet.data.sources.cache import File
from capsnet.data.sources.user_folder import fetch_missing
from capsnet.data.splits import Splits
from capsnet.data.views import CATEGORIES, MEASURES, Views, splits_of
from capsnet.errors import UserError

SIDE = 96
MOST_BYTES = 2**30  # of one unpacked file; the largest original has 0.45 GB
BYTES, INTEGERS = 0x1E3D4C55, 0x1E3D4C54
TYPES: dict[int, np.dtype] = {BYTES: np.dtype("u1"), INTEGERS: np.dtype("<i4")}
TRAIN, TEST = "smallnorb-5x46789x9x18x6x2x96x96-training", "smallnorb-5x01235x9x18x6x2x96x96-testing"
ADDRESS = "https://cs.nyu.edu/~ylclab/data/norb-v1.0-small"
FILES = (
    File(f"{TRAIN}-dat.mat.gz", 131_896_188, "5ffd6272a07d32695ee1082a26a41a93a37aab8c28da047f8c34ed348d214873"),
    File(f"{TRAIN}-cat.mat.gz", 348, "2784e542c1922060691090952b6cd6278879a216c90f81476f0f00256d42cdaa"),
    File(f"{TRAIN}-info.mat.gz", 71_052, "de7eb932ebe7a4ee16217fead60660d0eb3d23632c2f4d1c51f88c501c17bf32"),
    File(f"{TEST}-dat.mat.gz", 130_799_817, "cf7104eed3e51174d2f65b66d1e5878b9da233b886f161b0d88f4510ba2c7474"),
    File(f"{TEST}-cat.mat.gz", 347, "ecaf6d5bb8c3bc5eab9cf0258f6d2198dd474e016e374836fc097f2e5ff509ff"),
    File(f"{TEST}-info.mat.gz", 10_428, "16adf314226327ee006d1a44db8cfef52773c06c829951d5653a9f6f310248a2"),
)


def load(request: Request) -> Splits[Views]:
    """The splits of the files in a folder."""
    folder, name = request.spec.path, f"smallnorb:{request.spec.path.name}"
    fetch_missing("smallNORB", folder, FILES, ADDRESS)
    train, test = (read_half(folder, half, name) for half in (TRAIN, TEST))
    return splits_of(train, test, request)


def read_half(folder: Path, half: str, name: str) -> Views:
    """Images, labels and poses of the training or the test half."""
    files = [find(folder, f"{half}-{part}.mat") for part in ("dat", "cat", "info")]
    images, labels, info = (
        read_array(path, kind, shape)
        for path, kind, shape in zip(
            files, (BYTES, INTEGERS, INTEGERS), ((None, 2, SIDE, SIDE), (None,), (None, 4)), strict=True
        )
    )
    if not len(images) == len(labels) == len(info):
        raise UserError(
            f"{folder} has {len(images)} images, {len(labels)} categories and {len(info)} poses in its files "
            f"{half}-…: download the three files again."
        )
    check_values(files[1], labels[:, None], (len(CATEGORIES),))
    check_values(files[2], info, (10, 9, 35, 6))
    poses = torch.from_numpy(info.astype(np.int64)) * torch.tensor([1, 5, 10, 1]) + torch.tensor([0, 30, 0, 0])
    return Views(torch.from_numpy(images), torch.from_numpy(labels.astype(np.int64)), CATEGORIES, name, poses)


def find(folder: Path, name: str) -> Path:
    """A file, unpacked if it is there, else packed."""
    return folder / name if (folder / name).is_file() else folder / f"{name}.gz"


def check_values(path: Path, values: np.ndarray, below: tuple[int, ...]) -> None:
    if len(values) and ((values < 0).any() or (values >= np.array(below)).any()):
        raise not_smallnorb(path, "a category or pose is out of range")


def read_array(path: Path, kind: int, shape: tuple[int | None, ...]) -> np.ndarray:
    """The array in a file, of the given type and shape; None stands for any size."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return parse_array(file, path, kind, shape)
    except (OSError, EOFError, zlib.error) as error:
        raise not_smallnorb(path, str(error)) from None


def parse_array(file: IO[bytes] | gzip.GzipFile, path: Path, kind: int, shape: tuple[int | None, ...]) -> np.ndarray:
    head = file.read(8)
    magic, axes = struct.unpack("<Ii", head) if len(head) == 8 else (0, 0)
    if magic != kind or axes != len(shape):
        raise not_smallnorb(path, f"it begins with {magic:#x} and {axes} axes")
    written = 4 * max(axes, 3)
    sizes = struct.unpack(f"<{axes}i", file.read(written).ljust(written, b"\0")[: 4 * axes])
    if any(size < 0 or wanted not in (None, size) for size, wanted in zip(sizes, shape, strict=True)):
        raise not_smallnorb(path, f"its shape is {sizes}")
    expected = math.prod(sizes) * TYPES[kind].itemsize
    if expected > MOST_BYTES:
        raise not_smallnorb(path, f"its shape is {sizes}")
    data = file.read(expected + 1)
    if len(data) != expected:
        raise not_smallnorb(path, f"{expected:,} bytes should follow its header and {len(data):,} do")
    return np.frombuffer(bytearray(data), TYPES[kind]).reshape(sizes)


def not_smallnorb(path: Path, why: str) -> UserError:
    return UserError(f"{path} is not an intact file of smallNORB ({why}): delete it, so that it is downloaded again.")


register(
    DatasetInfo(
        "smallnorb",
        "the original smallNORB, a folder with its six files: stereo pairs of toys, 96×96",
        load,
        classes=CATEGORIES,
        image_shape=(2, SIDE, SIDE),
        sizes=(24_300, 24_300),
        takes_path=True,
        measures=MEASURES,
    )
)
