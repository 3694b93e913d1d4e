"""Fashion-MNIST: 70,000 images of clothing (Xiao, Rasul and Vollgraf, 2017)."""

from __future__ import annotations

import gzip
import io
import subprocess
import tarfile
from pathlib import Path

from capsnet.data.registry import DatasetInfo, register
from capsnet.data.sources.cache import File, Source
from capsnet.data.sources.idx import GZ_NAMES, MNIST_FILES, gzipped_idx, read_bounded, read_member
from capsnet.data.sources.places import DebianPackage, LocalFolder, WebFolder
from capsnet.data.splits import load_published


def fashion_debian(folder: Path) -> dict[str, bytes]:
    """The four .gz files in a Debian package."""
    command = ["dpkg-deb", "--fsys-tarfile", str(next(folder.glob("dataset-fashion-mnist_*.deb")))]
    files = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        contents = read_bounded(process.stdout, "the package")
    with tarfile.open(fileobj=io.BytesIO(contents)) as archive:
        for name in MNIST_FILES:
            packed = read_member(archive, f"./usr/share/datasets/fashion-mnist/{name}.gz")
            files[name] = read_bounded(gzip.GzipFile(fileobj=io.BytesIO(packed)), name)
    return files


SOURCE = Source(
    "fashion-mnist",
    "Fashion-MNIST",
    (
        File(MNIST_FILES[0], 47040016, "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888"),
        File(MNIST_FILES[1], 60008, "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9"),
        File(MNIST_FILES[2], 7840016, "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b"),
        File(MNIST_FILES[3], 10008, "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34"),
    ),
    (
        LocalFolder(
            "the installed Debian package dataset-fashion-mnist",
            GZ_NAMES,
            30_878_551,
            gzipped_idx,
            folder="/usr/share/datasets/fashion-mnist",
        ),
        DebianPackage(
            "the Debian package dataset-fashion-mnist",
            ("dataset-fashion-mnist_*.deb",),
            30_900_652,
            fashion_debian,
            package="dataset-fashion-mnist",
        ),
        WebFolder(
            "the mirror storage.googleapis.com",
            GZ_NAMES,
            30_878_645,
            gzipped_idx,
            url="https://storage.googleapis.com/tensorflow/tf-keras-datasets",
        ),
        WebFolder(
            "the authors' repository on github.com",
            GZ_NAMES,
            30_878_645,
            gzipped_idx,
            url="https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion",
        ),
    ),
)

register(
    DatasetInfo(
        "fashion-mnist",
        "70,000 articles of clothing, 28×28 grey, 10 classes",
        load_published,
        classes=(
            *("T-shirt/top", "trouser", "pullover", "dress", "coat"),
            *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
        ),
        image_shape=(1, 28, 28),
        sizes=(60_000, 10_000),
        source=SOURCE,
    )
)
