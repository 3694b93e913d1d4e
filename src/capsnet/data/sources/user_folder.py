"""Published files in a folder of the user's: what is missing is downloaded into it and verified."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from capsnet.data.sources.cache import File
from capsnet.data.sources.places import PlaceFailed, Report, bound, download_url
from capsnet.errors import UserError
from capsnet.files import sha256


def fetch_missing(title: str, folder: Path, files: Sequence[File], address: str) -> None:
    """Download the files that a folder lacks; a file ending in .gz may also be there unpacked."""
    from capsnet.terminal import Counter

    if not folder.is_dir():
        raise UserError(
            f"{folder} is not a folder: check the path, or create the folder, and {title} is downloaded into it from "
            f"{address}."
        )
    missing = [file for file in files if not has(folder, file.name)]
    try:
        with Counter(title, sum(file.size for file in missing), in_bytes=True) as report:
            for k, file in enumerate(missing):
                fetch(file, folder, address, sum(each.size for each in missing[:k]), report)
    except (PlaceFailed, OSError) as error:
        names = ", ".join(file.name for file in missing)
        raise UserError(
            f"{folder} lacks files of {title}, and they could not be downloaded ({error}): put {names} from {address} "
            f"into it."
        ) from None


def has(folder: Path, name: str) -> bool:
    return any((folder / each).is_file() for each in {name, name.removesuffix(".gz")})


def fetch(file: File, folder: Path, address: str, before: int, report: Report) -> None:
    """Download a file under another name and rename it once it is verified."""
    partial = folder / f".partial-{os.getpid()}-{file.name}"
    try:
        download_url(f"{address}/{file.name}", partial, bound(file.size), before, report)
        if sha256(partial) != file.sha256:
            raise PlaceFailed(f"{file.name} does not have the expected SHA-256")
        os.replace(partial, folder / file.name)
    finally:
        partial.unlink(missing_ok=True)
