"""Image files to tensors: the common size of a set, single images, and a whole set in memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from capsnet.data.registry import Request
from capsnet.errors import UserError
from capsnet.notice import say

if TYPE_CHECKING:
    from PIL.Image import Image

    from capsnet.data.mapped import Mapped

LARGEST_DEFAULT = 64


@dataclass(frozen=True, eq=False)
class Decoded:
    """The images of some files."""

    images: Tensor | Mapped
    """uint8 (n, c, h, w)"""
    rows: Tensor
    """int64: which of these is the image of each file that is `fine`."""
    readable: list[bool]
    """Which files have a header that can be read."""
    fine: list[bool]
    """Which files can be decoded."""


class Kind(IntEnum):
    """What is known about a file."""

    UNKNOWN = 0
    GREY = 1
    COLOUR = 2
    UNREADABLE = 3
    DAMAGED = 4


def decode_in_memory(paths: Sequence[Path], request: Request) -> Decoded:
    """The images as one tensor."""
    sizes, problems = _sizes(paths)
    tell(problems)
    readable = [size is not None for size in sizes]
    known = [size for size in sizes if size]
    if not known:
        raise nothing_readable(len(paths), request)
    size = request.size or common_size(known)
    chosen = [path for path, fine in zip(paths, readable, strict=True) if fine]
    images, decoded = _decode(chosen, size, request)
    answers = iter(decoded)
    fine = [there and next(answers) for there in readable]
    return Decoded(images, torch.arange(len(images)), readable, fine)


def nothing_readable(n: int, request: Request) -> UserError:
    return UserError(f"none of the {n} images of {request.spec.text} can be read: see the messages above.")


def tell(problems: Iterable[str]) -> None:
    """Report skipped images: the first five, and the number of others."""
    problems = list(problems)
    for problem in problems[:5]:
        say(f"Skipped: {problem}")
    if len(problems) > 5:
        say(f"Skipped: {len(problems) - 5} more images that cannot be read.")


def common_size(sizes: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """The size (h, w) that all images have if it is small, else the default."""
    common = set(sizes)
    first = next(iter(common))
    return first if len(common) == 1 and max(first) <= LARGEST_DEFAULT else (LARGEST_DEFAULT, LARGEST_DEFAULT)


def _sizes(paths: Sequence[Path]) -> tuple[list[tuple[int, int] | None], list[str]]:
    """The size of each image by its header, and what is wrong with others.

    In one thread, because warning filters are global.
    """
    from capsnet.terminal import Counter

    sizes, problems = list[tuple[int, int] | None](), list[str]()
    with Counter("reading image headers", len(paths)) as report:
        for done, path in enumerate(paths, 1):
            found = size_of(path)
            if isinstance(found, str):
                problems.append(found)
            sizes.append(None if isinstance(found, str) else found)
            report(done)
    return sizes, problems


def size_of(path: Path) -> tuple[int, int] | str:
    """(h, w) of an image as its header says, or what is wrong with the file."""
    from capsnet.data.photo import open_bounded

    try:
        with open_bounded(path, str(path)) as image:
            return upright_size(image)
    except UserError as error:
        return str(error)


def upright_size(image: Image) -> tuple[int, int]:
    width, height = image.size[::-1] if _is_rotated(image) else image.size
    return height, width


def _is_rotated(image: Image) -> bool:
    """Whether the EXIF tag swaps width and height; a broken tag is ignored."""
    from PIL.Image import Exif

    try:
        tags = Exif() if image.format == "PNG" else image.getexif()
        if image.format == "PNG":  # its getexif would decode the image
            tags.load(image.info.get("exif", b""))
        return tags.get(0x0112, 1) in (5, 6, 7, 8)
    except Exception:
        return False


def _decode(paths: Sequence[Path], size: tuple[int, int], request: Request) -> tuple[Tensor, list[bool]]:
    """uint8 (n, c, h, w) of the files that can be decoded, and which ones can."""
    from capsnet.terminal import Counter

    images = torch.empty(len(paths), request.channels or 1, *size, dtype=torch.uint8)
    problems: list[str] = []
    decoded: list[bool] = []
    n = 0
    with Counter("decoding images", len(paths)) as report, ExitStack() as at_the_end:
        pool = ThreadPoolExecutor()
        at_the_end.callback(pool.shutdown, cancel_futures=True)  # Ctrl-C does not wait for images that have not begun
        results = pool.map(lambda path: _open_and_decode(path, size, request.channels), paths)
        for done, result in enumerate(results, 1):
            if isinstance(result, str):
                problems.append(result)
            else:
                if len(result) > images.shape[1]:  # the first colour image
                    images = images.expand(-1, len(result), -1, -1).clone()
                images[n] = result
                n += 1
            decoded.append(not isinstance(result, str))
            report(done)
    tell(problems)
    if not n:
        raise nothing_readable(len(paths), request)
    return images[:n], decoded


def _open_and_decode(path: Path, size: tuple[int, int], channels: int | None) -> Tensor | str:
    """One image (c, h, w) whose header is fine, or what is wrong with it."""
    from PIL import Image

    from capsnet.data.photo import formats

    try:
        with Image.open(path, formats=formats()) as file:
            return pixels_of(file, size, channels)
    except Exception as error:  # decoders raise many kinds of errors for broken data
        return damaged(path, error)


def damaged(path: Path, error: Exception) -> str:
    return f"{path} is damaged ({error}): save or copy it again."


def pixels_of(file: Image, size: tuple[int, int], channels: int | None) -> Tensor:
    """uint8 (c, h, w) of an opened image. An image with three equal channels is grey."""
    from capsnet.data.photo import fit, upright_on_white

    file.draft(None, (2 * max(size), 2 * max(size)))  # decodes large JPEG files at a lower resolution
    image = upright_on_white(file)
    pixels = fit(image, channels or (1 if image.mode == "L" else 3), *size)
    grey = channels is None and len(pixels) == 3 and bool((pixels == pixels[:1]).all())
    return pixels[:1] if grey else pixels
