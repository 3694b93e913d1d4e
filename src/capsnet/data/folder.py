"""Your own images: a folder with one subfolder a class, or a table of files and labels.

    PATH/cat/*.jpg  PATH/dog/*.png              split 80/10/10 by the seed, each class alike
    PATH/train/cat/…  PATH/test/cat/…           taken as given; PATH/validation (or val, valid) too
    labels.csv: file,labels[,split]             "a.png,cat;dog": labels apart by ; or |, or in rows of their own; with
                                                a first row of names (file, labels, perhaps split) other columns do
                                                not count; paths start at the table's own folder

Pictures of any size, mode and common format. They become grey when all are grey and colour otherwise. They keep
their size when all have the same, no side over 64; else each is scaled to fit 64×64 (or `image_size`), its
aspect kept, centred, the rest zero. What cannot be read is named on stderr and left out. A validation part of the
user's own stays one, even where `validation` is 0 and none would be held back.
"""

from __future__ import annotations

import csv
import os
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from capsnet.data.datasets import DEFAULT_VALIDATION, Choice, Dataset, Size, Splits, height_and_width
from capsnet.data.progress import bar, notice
from capsnet.data.seeds import generator
from capsnet.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = frozenset(
    (
        *(".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".bmp", ".dib", ".gif", ".webp", ".tif", ".tiff"),
        *(".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".tga", ".ico", ".avif"),
    )
)
VALIDATION_NAMES = ("validation", "val", "valid")
PARTS = {"train": "train", "test": "test"} | dict.fromkeys(VALIDATION_NAMES, "validation")
FILE_COLUMNS = frozenset(("file", "filename", "path", "image"))
LARGEST_DEFAULT = 64


@dataclass(frozen=True)
class Options:
    """What `load` passes on."""

    validation: int = DEFAULT_VALIDATION
    validation_choice: Choice = "seeded"
    seed: int = 0
    image_size: Size = None
    channels: int | None = None
    progress: bool | None = None


DEFAULTS = Options()


@dataclass(frozen=True)
class Entry:
    """One picture of the user's: where it is, what it shows, and which part it was put into ("" for none)."""

    path: Path
    labels: tuple[str, ...]
    part: str = ""


def load_folder(root: Path, options: Options = DEFAULTS) -> Splits:
    """The splits of a folder with one subfolder a class."""
    return _splits(entries_of_folder(root), f"folder:{root}", options, multi_label=False)


def load_csv(table: Path, options: Options = DEFAULTS) -> Splits:
    """The splits of a table of files and labels; several labels (or none) in any row make it multi-label."""
    entries = entries_of_table(table)
    return _splits(entries, f"csv:{table}", options, any(len(entry.labels) != 1 for entry in entries))


def entries_of_folder(root: Path) -> list[Entry]:
    """The pictures of a folder with one subfolder a class; without any it is refused."""
    if not root.is_dir():
        raise UserError(f"there is no folder {root}: check its path.")
    entries = list(_entries_of_parts(root)) or list(_entries_of_classes(root, root))
    if not entries:
        raise UserError(
            f"no images in {root}: it should have one subfolder a class with pictures in it, such as "
            f"{root / 'cat' / '1.png'}."
        )
    return entries


def entries_of_table(table: Path) -> list[Entry]:
    """The pictures that a table names, each once; without any it is refused."""
    if not table.is_file():
        raise UserError(f"there is no file {table}: check its path.")
    entries = _once(_rows(table), table)
    if not entries:
        raise UserError(f"{table} has no rows: each should be file,labels, such as 1.png,cat;dog.")
    return entries


def checksum(entries: Iterable[Entry], root: Path) -> int:
    """Of the files' names, sizes, labels and parts, without a look inside; the same on every machine."""
    told = []
    for entry in entries:
        size = entry.path.stat().st_size if entry.path.exists() else -1
        told.append((os.path.relpath(entry.path, root), size, entry.labels, entry.part))
    return zlib.crc32(repr(sorted(told)).encode())


def _entries_of_parts(root: Path) -> Iterator[Entry]:
    """The pictures under train, test and validation, if that is how the folder is laid out.

    A class may be called "train" too; subfolders inside it, and nothing beside the parts, tell.
    """
    folders = {path.name: path for path in _subfolders(root)}
    if "train" not in folders or not set(folders) <= set(PARTS) or not any(_subfolders(folders["train"])):
        return
    for name, path in folders.items():
        yield from _entries_of_classes(path, root, PARTS[name])


def _entries_of_classes(folder: Path, root: Path, part: str = "") -> Iterator[Entry]:
    """The pictures of each class's folder; a link back to where we came from is no class."""
    above = {root.resolve(), *root.resolve().parents, folder.resolve()}
    for path in _subfolders(folder):
        if path.resolve() not in above:
            yield from (Entry(file, (path.name,), part) for file in pictures(path))


def _subfolders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def pictures(folder: Path) -> Iterator[Path]:
    """Picture files at any depth, by name; hidden ones and linked folders are passed over."""
    for where, folders, names in os.walk(folder, followlinks=False):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith(".") and Path(name).suffix.lower() in SUFFIXES:
                yield Path(where, name)


def _rows(table: Path) -> Iterator[Entry]:
    """The rows of a table; a cell for the split may be missing, one for the labels may only be empty."""
    lines = _lines(table)
    columns = _columns(lines[0][1], table) if lines else {}
    if lines and columns:
        lines.pop(0)
    columns = columns or {"file": 0, "labels": 1, "split": 2}
    for number, row in lines:
        if len(row) <= max(columns["file"], columns["labels"]):
            raise UserError(f"line {number} of {table} is {','.join(row)!r} and has no labels: write file,labels.")
        part = "".join(row[columns["split"] :][:1]).lower() if "split" in columns else ""
        if part and part not in PARTS:
            raise UserError(
                f"line {number} of {table} has split {part!r}: write train, validation or test, or say what the "
                f"columns are in a first line such as file,labels,width."
            )
        yield Entry(table.parent / row[columns["file"]], _labels(row[columns["labels"]]), PARTS.get(part, ""))


def _once(rows: Iterable[Entry], table: Path) -> list[Entry]:
    """Each file once, with the labels of all its rows: twice, it might be trained on and tested on."""
    found: dict[str, Entry] = {}
    several: dict[str, None] = {}
    for entry in rows:
        key = os.path.abspath(entry.path)
        before = found.get(key, entry)
        if before.part != entry.part:
            raise UserError(f"{table} has {entry.path.name} in two splits: leave it in one of them.")
        found[key] = Entry(before.path, tuple(sorted({*before.labels, *entry.labels})), entry.part)
        if before is not entry:
            several[key] = None
    if several:
        first = Path(next(iter(several))).name
        notice(f"{table} has {len(several)} files in several rows ({first}): each counts once, with all its labels.")
    return list(found.values())


def _lines(table: Path) -> list[tuple[int, list[str]]]:
    """The rows that are not empty, with the number of the line that each ends on."""
    try:
        with table.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            return [(reader.line_num, [cell.strip() for cell in row]) for row in reader if any(row)]
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{table} is not a comma-separated table in UTF-8 ({error}): save it as one.") from error


def _columns(row: list[str], table: Path) -> dict[str, int]:
    """Where a header has file, labels and split; nothing when the row is no header."""
    names = ["labels" if cell.lower() == "label" else cell.lower() for cell in row]
    named = [name for name in names if name in FILE_COLUMNS]
    if not named or not (names[0] in FILE_COLUMNS or "labels" in names):
        return {}
    if "labels" not in names:
        raise UserError(f"the first line of {table} names {', '.join(row)} and no labels: call that column labels.")
    columns = {"file": names.index(named[0]), "labels": names.index("labels")}
    return columns | ({"split": names.index("split")} if "split" in names else {})


def _labels(cell: str) -> tuple[str, ...]:
    return tuple(sorted({label.strip() for label in cell.replace("|", ";").split(";")} - {""}))


def _splits(entries: list[Entry], name: str, options: Options, multi_label: bool) -> Splits:
    readable, sizes = _readable(entries, name, options.progress)
    classes = _classes(readable, name)
    images, decoded = _decode(readable, _target_size(sizes, options), name, options)
    kept = [entry for entry, fine in zip(readable, decoded, strict=True) if fine]
    labels = _label_tensor(kept, classes, multi_label)
    whole = Dataset(images, labels, classes, name)
    train, validation, test = (whole.subset(part) for part in _part_indices(kept, labels, options, name))
    return Splits(train, validation, test)


def _classes(entries: list[Entry], name: str) -> tuple[str, ...]:
    trained = {label for entry in entries if entry.part in ("", "train") for label in entry.labels}
    everywhere = {label for entry in entries for label in entry.labels}
    if strange := sorted(everywhere - trained):
        raise UserError(f"{name} has {', '.join(strange)} in its validation or test part but not in train.")
    if len(everywhere) < 2:
        found = f"only '{everywhere.pop()}'" if everywhere else "none"
        raise UserError(f"{name} needs at least two classes with readable images and has {found}: add others.")
    return tuple(sorted(everywhere))


def _label_tensor(entries: list[Entry], classes: tuple[str, ...], multi_label: bool) -> Tensor:
    number = {label: j for j, label in enumerate(classes)}
    if not multi_label:
        return torch.tensor([number[entry.labels[0]] for entry in entries])
    labels = torch.zeros(len(entries), len(classes), dtype=torch.bool)
    for row, entry in zip(labels, entries, strict=True):
        row[[number[label] for label in entry.labels]] = True
    return labels


def _readable(entries: list[Entry], name: str, progress: bool | None) -> tuple[list[Entry], list[tuple[int, int]]]:
    """The entries whose header can be read, with their sizes; in this thread, for warnings are per process."""
    from capsnet.data.photo import open_bounded

    fine, sizes, problems = [], [], []
    with bar("looking at the images", len(entries), progress) as report:
        for done, entry in enumerate(entries, 1):
            try:
                with open_bounded(entry.path, str(entry.path)) as image:
                    width, height = image.size[::-1] if _lies_on_its_side(image) else image.size
                    sizes.append((height, width))
                fine.append(entry)
            except UserError as error:
                problems.append(str(error))
            report(done)
    _tell(problems)
    if not fine:
        raise UserError(f"none of the {len(entries)} images of {name} can be read: see above what is wrong with them.")
    return fine, sizes


def _lies_on_its_side(image: Image) -> bool:
    """Whether the camera was turned, by the EXIF tag; one that is broken says nothing."""
    from PIL.Image import Exif

    try:
        tags = Exif() if image.format == "PNG" else image.getexif()
        if image.format == "PNG":  # whose own getexif would decode the picture
            tags.load(image.info.get("exif", b""))
        return tags.get(0x0112, 1) in (5, 6, 7, 8)
    except Exception:
        return False


def _target_size(sizes: list[tuple[int, int]], options: Options) -> tuple[int, int]:
    """(h, w) of every image."""
    if size := height_and_width(options.image_size):
        return size
    common = set(sizes)
    if len(common) == 1 and max(sizes[0]) <= LARGEST_DEFAULT:
        return sizes[0]
    return LARGEST_DEFAULT, LARGEST_DEFAULT


def _decode(entries: list[Entry], size: tuple[int, int], name: str, options: Options) -> tuple[Tensor, list[bool]]:
    """uint8 (n, c, h, w) of those that decode, and which do."""
    images = torch.empty(len(entries), options.channels or 1, *size, dtype=torch.uint8)
    problems: list[str] = []
    decoded: list[bool] = []
    with bar("decoding the images", len(entries), options.progress) as report, ThreadPoolExecutor() as pool:
        results = pool.map(lambda entry: _decode_one(entry.path, size, options.channels), entries)
        for done, result in enumerate(results, 1):
            if isinstance(result, str):
                problems.append(result)
            else:
                if len(result) > images.shape[1]:  # the first one in colour
                    images = images.expand(-1, len(result), -1, -1).clone()
                images[sum(decoded)] = result
            decoded.append(not isinstance(result, str))
            report(done)
    _tell(problems)
    if not any(decoded):
        raise UserError(f"none of the {len(entries)} images of {name} can be read: see above what is wrong with them.")
    return images[: sum(decoded)], decoded


def _decode_one(path: Path, size: tuple[int, int], channels: int | None) -> Tensor | str:
    """One picture (c, h, w), or what is wrong with it. Colour whose three channels agree is grey."""
    from PIL import Image

    from capsnet.data.photo import fit, formats, upright_on_white

    try:
        with Image.open(path, formats=formats()) as file:
            file.draft(None, (2 * max(size), 2 * max(size)))  # JPEG decodes large photos smaller, and faster
            image = upright_on_white(file)
        pixels = fit(image, channels or (1 if image.mode == "L" else 3), *size)
    except Exception as error:  # decoders raise whatever they like at broken data
        return f"{path} is damaged ({error}): save or copy it again."
    grey = channels is None and len(pixels) == 3 and bool((pixels == pixels[:1]).all())
    return pixels[:1] if grey else pixels


def _tell(problems: Iterable[str]) -> None:
    """Name the pictures that are left out: the first five, and how many more."""
    problems = list(problems)
    for problem in problems[:5]:
        notice(f"Left out: {problem}")
    if len(problems) > 5:
        notice(f"Left out: {len(problems) - 5} more that cannot be read.")


def _part_indices(entries: list[Entry], labels: Tensor, options: Options, name: str) -> list[Tensor]:
    """Indices of train, validation, test: as the user put them, else cut out of train."""
    parts = [entry.part or "train" for entry in entries]
    train, validation, test = (
        torch.tensor([k for k, part in enumerate(parts) if part == wanted], dtype=torch.int64)
        for wanted in ("train", "validation", "test")
    )
    strata = _strata(labels)
    tenth = max(1, len(train) // 10)  # of what may be cut: a large test part of the user's own takes nothing away
    if not len(test):
        train, test = _cut(train, strata, tenth, "seeded", options.seed, "test")
    if not len(validation) and options.validation:
        wanted = _validation_size(len(train), tenth, options.validation)
        train, validation = _cut(train, strata, wanted, options.validation_choice, options.seed, "validation")
    if not len(train) or not len(test):
        raise UserError(f"{name} has {len(entries)} images, too few to train on some and test on others.")
    if len(validation) and not options.validation:
        notice(f"validation=0 holds back no images, but {name} has {len(validation)} of its own: they stay apart.")
    return [train, validation, test]


def _validation_size(available: int, tenth: int, asked: int) -> int:
    """What was asked for when it is at most a quarter of the training images, else a tenth."""
    if asked <= available // 4:
        return asked
    if asked != DEFAULT_VALIDATION:
        notice(f"validation={asked} is over a quarter of {available} training images; holding back {tenth}.")
    return min(tenth, available - 1)


def _strata(labels: Tensor) -> Tensor:
    """The groups that are split alike: classes, or for multi-label data all images together."""
    return labels if labels.ndim == 1 else torch.zeros(len(labels), dtype=torch.int64)


def _cut(indices: Tensor, strata: Tensor, size: int, choice: Choice, seed: int, purpose: str) -> tuple[Tensor, Tensor]:
    """Take about `size` of the indices out, each stratum in proportion and none of them wholly."""
    order = indices
    if choice == "seeded":
        order = indices[torch.randperm(len(indices), generator=generator(seed, f"folder {purpose}"))]
    quota = _quotas(Counter(strata[indices].tolist()), size)
    taken = torch.zeros(len(strata), dtype=torch.bool)
    for k in order.tolist():
        stratum = int(strata[k])
        if quota[stratum]:
            quota[stratum] -= 1
            taken[k] = True
    return indices[~taken[indices]], indices[taken[indices]]


def _quotas(counts: Counter[int], size: int) -> dict[int, int]:
    """`size` shared out in proportion, the largest remainders rounded up; every stratum keeps one at home.

    >>> _quotas(Counter({0: 30, 1: 10}), 5)
    {0: 4, 1: 1}
    """
    exact = {stratum: size * count / counts.total() for stratum, count in counts.items()}
    quota = {stratum: int(share) for stratum, share in exact.items()}
    by_remainder = sorted(exact, key=lambda stratum: (int(exact[stratum]) - exact[stratum], stratum))
    for stratum in by_remainder[: size - sum(quota.values())]:
        quota[stratum] += 1
    return {stratum: min(share, counts[stratum] - 1) for stratum, share in quota.items()}
