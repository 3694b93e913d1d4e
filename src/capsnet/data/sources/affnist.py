"""The original affNIST (https://www.cs.toronto.edu/~tijmen/affNIST/): MATLAB files with transformed MNIST digits.

`affnist:PATH` reads one .mat file, or a folder of them, as a test split; the other splits are empty. Reading the files
needs scipy.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from capsnet.data.examples import Dataset
from capsnet.data.registry import DatasetInfo, Request, register
from capsnet.data.sources.matlab import NotReadable, read_mat
from capsnet.data.splits import Splits, convert
from capsnet.errors import UserError

SIDE = 40


def load(request: Request) -> Splits[Dataset]:
    """The images of a .mat file, or of a folder of them in numerical order, as a test split."""
    path = request.spec.path
    files = sorted(path.glob("*.mat"), key=lambda file: (len(file.name), file.name)) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise UserError(f"{path} is neither a .mat file of affNIST nor a folder of such files: check the path.")
    images, labels = zip(*(read_file(file) for file in files), strict=True)
    digits = Dataset(upright(torch.cat(images)), torch.cat(labels), request.spec.info.classes, f"affnist:{path.name}")
    digits = convert(digits, request)
    empty = digits.subset(torch.arange(0))
    return Splits(empty, empty, digits)


def read_file(file: Path) -> tuple[Tensor, Tensor]:
    """Images uint8 (n, 1, 40, 40) and labels (n,) of one file."""
    try:
        data = read_mat(file, ["affNISTdata"], "affNIST")["affNISTdata"]
        images, labels = (np.asarray(data[field][0, 0]) for field in ("image", "label_int"))
    except NotReadable as error:
        raise not_affnist(file, str(error)) from None
    except (KeyError, IndexError, ValueError) as error:
        raise not_affnist(file, f"{type(error).__name__}: {error}") from None
    labels = labels.ravel()
    if images.dtype != np.uint8 or images.ndim != 2 or images.shape != (SIDE * SIDE, len(labels)):
        raise not_affnist(file, f"image is {images.dtype} {images.shape} with {len(labels)} labels")
    if labels.dtype.kind not in "iuf" or not np.isin(labels, range(10)).all():
        raise not_affnist(file, "label_int has values other than 0 to 9")
    pixels = torch.from_numpy(np.ascontiguousarray(images.T)).view(-1, 1, SIDE, SIDE)
    return pixels, torch.from_numpy(labels.astype(np.int64))


def not_affnist(file: Path, why: str) -> UserError:
    return UserError(
        f"{file} does not have the format of affNIST ({' '.join(why.split())[:200]}): expected a MATLAB 5 file with a "
        f"structure affNISTdata that has image, uint8 (1600, n), and label_int (1, n)."
    )


def upright(images: Tensor) -> Tensor:
    """The images, transposed if the digits lie on their side.

    Published readers disagree on whether a column of the file contains rows or columns of an image. Most digits are
    taller than wide, which tells the two apart.
    """
    some = images[:: max(1, len(images) // 1000), 0].float()
    tall, wide = (ink_deviation(some.sum(axis)) for axis in (2, 1))
    return images if tall >= wide else images.mT.contiguous()


def ink_deviation(profile: Tensor) -> float:
    """Standard deviation of the ink along one axis, averaged over images: (n, side) → ()."""
    share = profile / profile.sum(1, keepdim=True).clamp(min=1)
    place = torch.arange(profile.shape[1], dtype=torch.float32)
    mean = (share * place).sum(1, keepdim=True)
    return float((share * (place - mean).square()).sum(1).sqrt().mean())


register(
    DatasetInfo(
        "affnist",
        "the original affNIST, a .mat file or a folder of them: a test split only (needs scipy)",
        load,
        classes=tuple("0123456789"),
        image_shape=(1, SIDE, SIDE),
        takes_path=True,
        digit_side=28,
    )
)
