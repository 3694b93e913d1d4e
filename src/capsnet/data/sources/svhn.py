"""SVHN (http://ufldl.stanford.edu/housenumbers/): house numbers in photographs, cropped to 32×32 around one digit.

`svhn:PATH` reads train_32x32.mat and test_32x32.mat from a folder, and extra_32x32.mat as further training images if
it is there. Files that an existing folder lacks are downloaded into it, except the extra ones (1.3 GB). Reading the
files needs scipy.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from capsnet.data.examples import Dataset
from capsnet.data.registry import DatasetInfo, Request, register
from capsnet.data.sources.cache import File
from capsnet.data.sources.matlab import NotReadable, read_mat
from capsnet.data.sources.user_folder import fetch_missing
from capsnet.data.splits import Splits, split
from capsnet.errors import UserError

SIDE = 32
CLASSES = tuple("0123456789")
MOST_BYTES = 2**31  # of one unpacked file; the extra images have 1.6 GB
ADDRESS = "http://ufldl.stanford.edu/housenumbers"
TRAIN, TEST, EXTRA = "train_32x32.mat", "test_32x32.mat", "extra_32x32.mat"
FILES = (
    File(TRAIN, 182_040_794, "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8"),
    File(TEST, 64_275_384, "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b"),
)


def load(request: Request) -> Splits[Dataset]:
    """The splits of the files in a folder."""
    folder, name = request.spec.path, f"svhn:{request.spec.path.name}"
    fetch_missing("SVHN", folder, FILES, ADDRESS)
    trained_on = [TRAIN, *([EXTRA] if (folder / EXTRA).is_file() else [])]
    parts = []
    for files in (trained_on, [TEST]):
        images, labels = zip(*(read_file(folder / file) for file in files), strict=True)
        digits = np.concatenate(labels).astype(np.int64)
        parts.append(Dataset(torch.from_numpy(np.concatenate(images)), torch.from_numpy(digits), CLASSES, name))
    return split(parts[0], parts[1], request)


def read_file(file: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 (n, 3, 32, 32) and digits (n,) of one file, which has X (32, 32, 3, n), and y with 10 for a zero."""
    try:
        found = read_mat(file, ["X", "y"], "SVHN", MOST_BYTES)
        images, labels = found["X"], found["y"].ravel()
    except NotReadable as error:
        raise not_svhn(file, str(error)) from None
    except KeyError as error:
        raise not_svhn(file, f"it has no variable {error}") from None
    if images.dtype != np.uint8 or images.shape != (SIDE, SIDE, 3, len(labels)):
        raise not_svhn(file, f"X is {images.dtype} {images.shape} with {len(labels)} labels")
    if labels.dtype.kind not in "iuf" or not np.isin(labels, range(1, 11)).all():
        raise not_svhn(file, "y has values other than 1 to 10")
    return np.ascontiguousarray(images.transpose(3, 2, 0, 1)), labels % 10


def not_svhn(file: Path, why: str) -> UserError:
    return UserError(
        f"{file} does not have the format of SVHN ({' '.join(why.split())[:200]}): expected a MATLAB 5 file with X, "
        f"uint8 (32, 32, 3, n), and y (n, 1); delete it to download it again."
    )


register(
    DatasetInfo(
        "svhn",
        "the original SVHN, a folder with its .mat files: house numbers, 32×32 colour, 10 classes (needs scipy)",
        load,
        classes=CLASSES,
        image_shape=(3, SIDE, SIDE),
        takes_path=True,
    )
)
