"""The cache of decoded images: what is decoded once is read from a memory map afterwards.

A set of files that would need more than `IN_MEMORY` bytes is decoded into a folder of the user's cache, by several
processes:

    decoded/SOURCE-FILES/   SOURCE: a hash of the path and the format; FILES: of the name, size and times of every file
      about.json            the dataset
      files                 these facts, sorted by name; an image has the number of its file
      size.json             height and width of every image
      pixels-C, marks-C     the images with C channels; the kind and the CRC-32 of each (0: still to be decoded)
      done.json             written last: the number of channels, and what is wrong with files that were left out

A killed process leaves a cache that the next one completes: it checks the images that are there and decodes the others.
A changed file makes another cache, into which everything else is copied, and the old one is deleted. At most
`MOST_BYTES` are kept; the caches that were not used for the longest time are deleted first.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from capsnet.data.decode import Decoded, Kind, common_size, nothing_readable, tell
from capsnet.data.decoders import CHUNK, Decoders
from capsnet.data.mapped import Mapped
from capsnet.data.registry import Request, Spec, parse
from capsnet.data.sources.cache import MAKE_SPACE, cache_folder, stored_in
from capsnet.errors import UserError
from capsnet.files import Lock, Taken, write_bytes
from capsnet.notice import say

IN_MEMORY = 2**28  # bytes: about 22,000 colour images of 64×64
MOST_BYTES = 100 * 2**30
FORMAT = 1
DONE, FILES, SIZE, ABOUT = "done.json", "files", "size.json", "about.json"


@dataclass(frozen=True)
class ImageCache:
    """The cache of some files; `paths` in the order of their numbers."""

    folder: Path
    request: Request
    paths: Sequence[str]
    facts: bytes
    """Name, size and times of each file, separated by zeros."""

    @property
    def source(self) -> str:
        return self.folder.name.partition("-")[0]

    def pixels(self, channels: int) -> Path:
        return self.folder / f"pixels-{channels}"

    def marks(self, channels: int) -> Path:
        return self.folder / f"marks-{channels}"


def fits_in_memory(n: int, request: Request) -> bool:
    """Whether n images are few enough to be decoded at every start; a bound, because their sizes are not known yet."""
    h, w = request.size or (64, 64)
    return n * (request.channels or 3) * h * w <= IN_MEMORY


def decode_into_cache(paths: Sequence[Path], request: Request) -> Decoded:
    """The images in a memory map; decoded first unless they are in the cache."""
    facts = [fact(path) for path in paths]
    order = sorted(range(len(paths)), key=facts.__getitem__)
    content = b"\0".join(facts[k] for k in order)
    folder = caches() / f"{source_of(request)}-{hashlib.sha256(content).hexdigest()[:16]}"
    cache = ImageCache(folder, request, [str(paths[k]) for k in order], content)
    with stored_in(folder):
        if not is_complete(cache):
            folder.mkdir(parents=True, exist_ok=True)
            with Lock(folder, lambda: say(f"Another process is decoding {request.spec.text}; waiting for it.")):
                if not is_complete(cache):
                    build(cache)
        return opened(cache, np.argsort(order))


def caches() -> Path:
    return cache_folder() / "decoded"


def fact(path: Path) -> bytes:
    """Name, size and times of a file: what tells whether it has changed. The time of a change cannot be set by hand."""
    name = os.path.abspath(path)
    try:
        found = os.stat(path)
    except OSError:
        return os.fsencode(f"{name}\tmissing")
    return os.fsencode(f"{name}\t{found.st_size}\t{found.st_mtime_ns}\t{found.st_ctime_ns}")


def source_of(request: Request) -> str:
    """A hash of what the images are made from, and how: another size or version of Pillow makes other images."""
    import PIL

    what = (place_of(request.spec), request.size, request.channels, PIL.__version__, FORMAT)
    return hashlib.sha256(repr(what).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def place_of(spec: Spec) -> str:
    """A dataset with its full path, such as that of folder:photos."""
    return f"{spec.info.name}:{os.path.abspath(spec.path)}"


# --------------------------------------------------------------------------------------------------------- reading


def is_complete(cache: ImageCache) -> bool:
    """Whether everything is decoded, and no file was deleted or cut since."""
    if not (cache.folder / DONE).is_file():
        return False
    c, h, w = json.loads((cache.folder / DONE).read_text())["shape"]
    n = len(cache.paths)
    sizes = {cache.pixels(c): n * c * h * w, cache.marks(c): 8 * n}
    return all(path.is_file() and path.stat().st_size == size for path, size in sizes.items())


def opened(cache: ImageCache, row_of: np.ndarray) -> Decoded:
    """A complete cache; `row_of` says which row belongs to each file."""
    with suppress(OSError):  # somebody else's cache, which we may only read
        os.utime(cache.folder / DONE)  # used just now
    done = json.loads((cache.folder / DONE).read_text())
    tell(done["problems"])
    marks = np.fromfile(cache.marks(done["shape"][0]), np.int64)
    kinds = (marks >> 32)[row_of]
    fine = (kinds == Kind.GREY) | (kinds == Kind.COLOUR)
    if not fine.any():
        raise nothing_readable(len(fine), cache.request)
    images = Mapped(cache.pixels(done["shape"][0]), tuple(done["shape"]), marks & 0xFFFFFFFF)
    readable = kinds != Kind.UNREADABLE
    return Decoded(images, torch.from_numpy(row_of[fine]), readable.tolist(), fine.tolist())


# -------------------------------------------------------------------------------------------------------- decoding


def build(cache: ImageCache) -> None:
    """Decode what is not there yet, and write `done.json`."""
    (cache.folder / DONE).unlink(missing_ok=True)
    write_bytes(cache.folder / ABOUT, json.dumps(place_of(cache.request.spec)).encode())
    write_bytes(cache.folder / FILES, cache.facts)
    images, marks, problems = decode_all(cache)
    if not cache.request.channels and not (marks >> 32 == Kind.COLOUR).any():
        images, marks = without_colour(cache, images, marks)
    images.flush()
    marks.flush()
    write_bytes(cache.folder / DONE, json.dumps({"shape": images.shape[1:], "problems": problems}).encode())
    for other in {1, 3} - {images.shape[1]}:
        for path in (cache.pixels(other), cache.marks(other)):
            path.unlink(missing_ok=True)
    make_room(cache)


def decode_all(cache: ImageCache) -> tuple[np.memmap, np.memmap, list[str]]:
    """The images, their marks, and what is wrong with some files."""
    n, c = len(cache.paths), cache.request.channels or 3
    with Decoders() as decoders:
        h, w = size_of_all(cache, decoders)
        check_space(cache, size := n * c * h * w)
        say(f"Decoding {n:,} images of {cache.request.spec.text}, once, into {cache.folder} ({size / 1e9:.1f} GB).")
        images, marks = writable(cache, (n, c, h, w))
        keep_what_is_right(images, marks)
        copy_unchanged(cache, images, marks)
        return images, marks, decode_others(cache, decoders, images, marks)


def size_of_all(cache: ImageCache, decoders: Decoders) -> tuple[int, int]:
    """(h, w) of every image: as requested, or their common size. It is found as soon as two of them differ."""
    from capsnet.terminal import Counter

    path = cache.folder / SIZE
    if cache.request.size:
        return cache.request.size
    if path.exists():
        h, w = json.loads(path.read_text())
        return h, w
    sizes: set[tuple[int, int]] = set()
    with Counter("reading image headers", len(cache.paths)) as report:
        for number, found in enumerate(decoders.sizes(cache.paths), 1):
            sizes |= found
            report(min(number * CHUNK, len(cache.paths)))
            if len(sizes) > 1:
                break
    h, w = common_size(sizes) if sizes else (1, 1)  # nothing can be read, which `opened` reports
    write_bytes(path, json.dumps((h, w)).encode())
    return h, w


def check_space(cache: ImageCache, needed: int) -> None:
    """Refuse what the disk cannot hold; the parts that are there already count."""
    path = cache.pixels(cache.request.channels or 3)
    free = shutil.disk_usage(cache.folder).free
    if needed - occupied(path) > free:
        raise UserError(
            f"the decoded images of {cache.request.spec.text} need {needed / 1e9:.1f} GB and {cache.folder.parent} has "
            f"{free / 1e9:.1f} GB: {MAKE_SPACE}."
        )


def writable(cache: ImageCache, shape: tuple[int, int, int, int]) -> tuple[np.memmap, np.memmap]:
    """The images and the marks, to be written; new ones are zero."""
    n, c = shape[:2]
    arrays = []
    for path, kind, form in ((cache.pixels(c), np.uint8, shape), (cache.marks(c), np.int64, (n,))):
        with path.open("ab") as file:
            file.truncate(int(np.prod(form)) * np.dtype(kind).itemsize)
        arrays.append(np.memmap(path, kind, "r+", shape=form))
    return arrays[0], arrays[1]


def keep_what_is_right(images: np.ndarray, marks: np.ndarray) -> None:
    """Of an interrupted build, keep the images whose checksum is right: after a power cut some may be missing."""
    kinds = marks >> 32
    marks[(kinds == Kind.UNREADABLE) | (kinds == Kind.DAMAGED)] = 0  # to say again what is wrong with them
    for row in np.flatnonzero(marks):
        if zlib.crc32(images[row]) != marks[row] & 0xFFFFFFFF:
            marks[row] = 0


def copy_unchanged(cache: ImageCache, images: np.ndarray, marks: np.ndarray) -> None:
    """Copy the images of files that have not changed from the caches that this one replaces."""
    for old in known(cache.source):
        if not (old / DONE).exists():
            continue
        shape = json.loads((old / DONE).read_text())["shape"]
        if tuple(shape[1:]) != images.shape[2:]:
            continue
        number = {line: row for row, line in enumerate((old / FILES).read_bytes().split(b"\0"))}
        old_images = np.memmap(old / f"pixels-{shape[0]}", np.uint8, "r").reshape(-1, *shape)
        kinds = np.fromfile(old / f"marks-{shape[0]}", np.int64) >> 32
        for row, line in enumerate(cache.facts.split(b"\0")):
            before = number.get(line)
            if not marks[row] and before is not None and kinds[before] in (Kind.GREY, Kind.COLOUR):
                images[row] = old_images[before]
                marks[row] = int(kinds[before]) << 32 | zlib.crc32(images[row])


def decode_others(cache: ImageCache, decoders: Decoders, images: np.memmap, marks: np.ndarray) -> list[str]:
    """Decode every image without a mark; what is wrong with those that cannot be decoded."""
    from capsnet.terminal import Counter

    missing = np.flatnonzero(marks == 0)
    problems: list[str] = []
    begun = len(marks) - len(missing)
    if begun and len(missing):
        say(f"{begun:,} of {len(marks):,} images are in the cache already; decoding the others.")
    into = cache.pixels(images.shape[1])
    with Counter("decoding images", len(marks)) as report:
        report(begun)
        answers = decoders.decode(into, missing, cache.paths, images.shape[1:], cache.request.channels)
        for rows, found in answers:
            for row, (kind, value) in zip(rows, found, strict=True):
                problems += [value] if isinstance(value, str) else []
                marks[row] = kind << 32 | (0 if isinstance(value, str) else value)
            begun += len(rows)
            report(begun)
    return problems


def without_colour(cache: ImageCache, images: np.ndarray, marks: np.ndarray) -> tuple[np.memmap, np.memmap]:
    """One channel of images that are all grey."""
    n, _, h, w = images.shape
    grey, new = writable(cache, (n, 1, h, w))
    for start in range(0, n, CHUNK):
        part = slice(start, start + CHUNK)
        grey[part] = images[part, :1]
        kinds = marks[part] >> 32
        new[part] = kinds << 32 | [zlib.crc32(image) for image in grey[part]]
    return grey, new


# -------------------------------------------------------------------------------------------------------- deleting


@dataclass(frozen=True)
class Pruned:
    """A cache that was deleted, or is being written."""

    images: str
    bytes: int
    deleted: bool


def known(source: str = "*") -> list[Path]:
    """The folders of caches, those that were used last first, also if they are not complete."""
    found = [path.parent for path in caches().glob(f"{source}-*/{ABOUT}")]
    return sorted(found, key=last_use, reverse=True)


def last_use(folder: Path) -> float:
    done = folder / DONE
    return (done if done.exists() else folder).stat().st_mtime


def make_room(cache: ImageCache) -> None:
    """Delete older versions of this cache, and others that are too much."""
    kept = bytes_of(cache.folder)
    for other in known():
        if other != cache.folder:
            kept += (size := bytes_of(other))
            if kept > MOST_BYTES or other.name.startswith(f"{cache.source}-"):
                kept -= size
                delete(other)


def bytes_of(folder: Path) -> int:
    """What the files of a cache occupy."""
    return sum(occupied(path) for path in folder.iterdir())


def occupied(path: Path) -> int:
    """Bytes of a file on the disk, fewer than its size if it has holes; 0 if it is missing."""
    try:
        found = path.stat()
    except OSError:
        return 0
    return min(found.st_size, 512 * getattr(found, "st_blocks", found.st_size))


def delete(folder: Path) -> bool:
    """Delete a cache unless a process is writing it; a process that reads it keeps its map."""
    try:
        with Lock(folder):
            (folder / DONE).unlink(missing_ok=True)  # first: what is half deleted is not complete
            shutil.rmtree(folder, ignore_errors=True)
    except (Taken, OSError):
        return False
    return not folder.exists()


def prune(names: Sequence[str] = ()) -> list[Pruned]:
    """Delete the caches of these datasets, such as folder:photos, or all of them."""
    wanted = {place_of(parse(name)) for name in names}
    found = []
    for folder in sorted(path for path in caches().glob("*-*") if path.is_dir()):
        about = folder / ABOUT
        images = json.loads(about.read_text()) if about.exists() else "unknown"
        if not names or images in wanted:
            found.append(Pruned(images, bytes_of(folder), delete(folder)))
    return found
