"""MATLAB 5 files (.mat), read with scipy after a look at how large they claim to be."""

from __future__ import annotations

import importlib
import struct
import zlib
from pathlib import Path
from typing import Any

from capsnet.errors import UserError

MOST_BYTES = 2**30  # of one unpacked variable, unless a dataset has larger ones


class NotReadable(Exception):
    """The file is not a MATLAB 5 file of a plausible size; the message says why."""


def read_mat(file: Path, names: list[str], title: str, most: int = MOST_BYTES) -> dict[str, Any]:
    """The named variables of a file; those that it lacks are left out."""
    try:
        loadmat = importlib.import_module("scipy.io").loadmat
    except ImportError:
        raise UserError(f"{title} needs scipy, which is not installed: pip install 'capsnet[affnist]'.") from None
    check_size(file, most)
    try:
        return loadmat(file, variable_names=names)
    except Exception as error:  # scipy raises many kinds of errors for damaged files
        raise NotReadable(f"{type(error).__name__}: {error}") from None


def check_size(file: Path, most: int) -> None:
    """Refuse a file whose unpacked size is implausible; a few kB can claim gigabytes."""
    if file.stat().st_size > most:
        raise NotReadable(f"it has {file.stat().st_size:,} bytes")
    with file.open("rb") as content:
        content.seek(128)  # the header; then each variable has its kind, its size and its bytes
        while len(tag := content.read(8)) == 8:
            kind, size = struct.unpack("<II", tag)
            start = content.tell()
            if kind == 15:  # compressed
                try:
                    inside = zlib.decompressobj().decompress(content.read(min(size, 4096)), 8)
                except zlib.error as error:
                    raise NotReadable(str(error)) from None
                if len(inside) < 8 or struct.unpack("<II", inside)[1] > most:
                    raise NotReadable("a variable is truncated or too large")
            content.seek(start + size)
