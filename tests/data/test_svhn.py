"""`svhn:PATH`: small files in the original layout, and files that are not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from capsnet import data
from capsnet.errors import UserError


def write(file: Path, n: int, seed: int, packed: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """A file with n images; returns them as (n, 3, 32, 32) with their digits."""
    random = np.random.default_rng(seed)
    images, digits = random.integers(0, 256, (n, 3, 32, 32), np.uint8), random.integers(0, 10, n)
    labels = np.where(digits == 0, 10, digits).astype(np.uint8)[:, None]
    savemat(file, {"X": images.transpose(2, 3, 1, 0), "y": labels}, do_compression=packed)
    return images, digits


@pytest.mark.parametrize("packed", [True, False])
def test_files_in_svhns_layout_give_upright_images_and_digits(tmp_path: Path, packed: bool) -> None:
    train, test = (write(tmp_path / f"{half}_32x32.mat", 20, k, packed) for k, half in enumerate(("train", "test")))
    splits = data.load(f"svhn:{tmp_path}", validation=0)
    for part, (images, digits) in ((splits.train, train), (splits.test, test)):
        assert np.array_equal(part.images, images)
        assert np.array_equal(part.labels, digits)
    assert splits.test.classes == tuple("0123456789")
    assert data.load(f"svhn:{tmp_path}", validation=5, channels=1).train.image_shape == (1, 32, 32)


def test_extra_images_are_trained_on_if_they_are_there(tmp_path: Path) -> None:
    for k, half in enumerate(("train", "test", "extra")):
        write(tmp_path / f"{half}_32x32.mat", 10 + k, k)
    assert data.load(f"svhn:{tmp_path}", validation=0).train.n == 22


def test_other_files_are_refused_in_a_sentence(tmp_path: Path) -> None:
    write(tmp_path / "test_32x32.mat", 5, 1)
    file = tmp_path / "train_32x32.mat"
    write(file, 20, 0)
    whole = file.read_bytes()
    for content in (b"", b"no matrix at all " * 30, whole[: len(whole) // 2]):
        file.write_bytes(content)
        with pytest.raises(UserError, match="does not have the format of SVHN"):
            data.load(f"svhn:{tmp_path}")
    images, labels = np.zeros((32, 32, 3, 4), np.uint8), np.ones((4, 1), np.uint8)
    for wrong in (
        {"X": images},
        {"X": images[:28], "y": labels},
        {"X": images, "y": 0 * labels},
        {"X": 1.0 * images, "y": labels},
    ):
        savemat(file, wrong)
        with pytest.raises(UserError, match="does not have the format of SVHN"):
            data.load(f"svhn:{tmp_path}")
