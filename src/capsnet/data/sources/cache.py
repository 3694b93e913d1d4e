"""Download and cache of published datasets.

A source consists of idx files with known SHA-256 checksums, kept in a folder of the user's cache: $CAPSNET_DATA if
set, else $XDG_CACHE_HOME/capsnet, else ~/.cache/capsnet. Every read verifies them (0.1 s for MNIST); missing or damaged
files are downloaded from the first place that has them. A file appears under its name only once it is complete and
verified. If several processes need a file at once, one downloads it and the others wait.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from capsnet.data.sources import idx
from capsnet.data.sources.places import Place, PlaceFailed
from capsnet.errors import UserError
from capsnet.files import Lock, remove_leftovers, write_bytes
from capsnet.notice import Notice, say

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

MAKE_SPACE = "free some space (capsnet data prune) or set CAPSNET_DATA to another folder"


@dataclass(frozen=True)
class File:
    """A published file: its name, size and checksum."""

    name: str
    size: int
    sha256: str

    def problem(self, data: Buffer) -> str:
        """What is wrong with these bytes; empty if nothing is."""
        if (size := memoryview(data).nbytes) != self.size:
            return f"it has {size} bytes instead of {self.size}"
        matches = hashlib.sha256(data).hexdigest() == self.sha256
        return "" if matches else "its SHA-256 is not the expected one"


@dataclass(frozen=True)
class Source:
    """The files of a dataset (training images and labels, test images and labels) and where to download them."""

    name: str
    title: str
    files: tuple[File, ...]
    places: tuple[Place, ...]


def cache_folder() -> Path:
    """The folder of all downloaded data."""
    if chosen := os.environ.get("CAPSNET_DATA"):
        return Path(chosen).expanduser().absolute()
    shared = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (shared if shared.is_absolute() else Path.home() / ".cache") / "capsnet"


@contextmanager
def stored_in(folder: Path) -> Iterator[None]:
    """Turn a disk that is full or cannot be written to into one sentence."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{folder} cannot be written to ({error.strerror or error}): {MAKE_SPACE}.") from error


def is_cached(source: Source) -> bool:
    """Whether all files are there with the right size; `read` checks their content."""
    folder = cache_folder() / source.name
    return all(_size(folder / file.name) == file.size for file in source.files)


def verify(source: Source) -> str:
    """State of the cached files: good, not fetched, or which ones are missing or damaged."""
    folder = cache_folder() / source.name
    problems: list[str] = []
    found = _read_cached(source, folder, problems.append)
    if not folder.is_dir() or (not found and not problems):
        return "not fetched"
    bad = [file.name for file in source.files if file.name not in found]
    return f"missing or damaged: {', '.join(bad)}" if bad else "good"


def read(source: Source, notice: Notice = say) -> list[np.ndarray]:
    """The verified arrays of a source, in the order of `source.files`; downloaded first if necessary."""
    folder = cache_folder() / source.name
    found = _read_cached(source, folder, notice)
    if len(found) < len(source.files):
        found = _fetch(source, folder, notice)
    return [idx.from_idx(found[file.name], file.name) for file in source.files]


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1


def _read_cached(source: Source, folder: Path, notice: Notice) -> dict[str, np.ndarray]:
    """The cached files that are intact; a notice names damaged ones."""
    found = {}
    for file in source.files:
        path = folder / file.name
        if not path.is_file():
            continue
        data = np.fromfile(path, np.uint8)
        if problem := file.problem(data.data):
            notice(f"{path} is damaged ({problem}); downloading it again.")
        else:
            found[file.name] = data
    return found


def _fetch(source: Source, folder: Path, notice: Notice) -> dict[str, np.ndarray]:
    """Download a source into the cache, unless another process did while this one waited for the lock."""
    with stored_in(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with Lock(folder, lambda: notice(f"Another process is downloading {source.title}; waiting for it.")):
            found = _read_cached(source, folder, lambda message: None)
            if len(found) < len(source.files):
                _remove_leftovers(folder)
                for name, data in _from_first_place(source, folder, notice).items():
                    if name not in found:
                        write_bytes(folder / name, data)
                        found[name] = np.frombuffer(bytearray(data), np.uint8)
            return found


def _from_first_place(source: Source, folder: Path, notice: Notice) -> dict[str, bytes]:
    """All files of a source, verified: from archives that the user put into the folder, or the first working place."""
    reasons = []
    for place in source.places:
        try:
            if place.held_by(folder):
                return _checked(source, place.open(folder))
        except PlaceFailed as failed:
            reasons.append(f"{', '.join(place.archives)} in {folder}: {failed}")
    for place in source.places:
        try:
            files = _download(source, place, folder)
            notice(f"Fetched {source.title} from {place.label} into {folder}.")
            return files
        except PlaceFailed as failed:
            reasons.append(f"{place.label}: {failed}")
    raise UserError(_nothing_worked(source, folder, reasons))


def _download(source: Source, place: Place, folder: Path) -> dict[str, bytes]:
    from capsnet.terminal import Counter

    with _scratch(folder) as scratch:
        with Counter(f"{source.title} from {place.label}", place.size, in_bytes=True) as report:
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
            f"{source.title} is not in the cache and could not be downloaded:",
            *(f"  {reason}" for reason in reasons),
            f"Connect to the internet and try again, or put these files into {folder} (name, bytes, SHA-256):",
            *(f"  {file.name}  {file.size}  {file.sha256}" for file in source.files),
            f"or one of these archives: {archives}.",
        ]
    )


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """A temporary folder for a download, on the same disk as the cache."""
    path = Path(tempfile.mkdtemp(prefix=".fetching-", dir=folder))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _remove_leftovers(folder: Path) -> None:
    """Delete what a killed process left behind; called with the lock held."""
    for path in folder.glob(".fetching-*"):
        shutil.rmtree(path, ignore_errors=True)
    remove_leftovers(folder)
