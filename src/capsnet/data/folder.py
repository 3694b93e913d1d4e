"""Your own images: a folder with one subfolder per class, or a table of files and labels.

    PATH/cat/*.jpg  PATH/dog/*.png              split 80/10/10 by the seed, stratified by class
    PATH/train/cat/…  PATH/test/cat/…           used as given; PATH/validation (or val, valid) too
    labels.csv: file,labels[,split]             "a.png,cat;dog": labels separated by ; or |, or in several rows

Paths in a table are relative to its folder. A table with a header (file, labels, optionally split) may have other
columns, which are ignored.

Images may have any size, mode and common format. They are converted to grey if all of them are grey, else to colour.
If all have the same size with no side over 64 pixels, they keep it; otherwise each is scaled to fit 64×64 (or
`image_size`), keeping its aspect ratio, centred and padded with zeros. Files that cannot be read are reported on stderr
and skipped. An existing validation split is kept, even with `validation=0`.

Small sets are decoded at every start and stay in memory. Larger ones are decoded once, into the user's cache, and read
from there (`capsnet.data.image_cache`); the batches are the same.
"""

from __future__ import annotations

import csv
import os
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from capsnet.data.decode import decode_in_memory
from capsnet.data.examples import Dataset
from capsnet.data.image_cache import decode_into_cache, fits_in_memory
from capsnet.data.mapped import Stored
from capsnet.data.registry import DEFAULT_VALIDATION, Choice, DatasetInfo, Request, register
from capsnet.data.seeds import generator
from capsnet.data.splits import Own, Splits, limit_training
from capsnet.errors import UserError
from capsnet.notice import say

SUFFIXES = frozenset(
    (
        *(".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".bmp", ".dib", ".gif", ".webp", ".tif", ".tiff"),
        *(".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".tga", ".ico", ".avif"),
    )
)
VALIDATION_NAMES = ("validation", "val", "valid")
PARTS = {"train": "train", "test": "test"} | dict.fromkeys(VALIDATION_NAMES, "validation")
FILE_COLUMNS = frozenset(("file", "filename", "path", "image"))


@dataclass(frozen=True)
class Entry:
    """One image file, its labels, and the split that the user assigned ("" for none)."""

    path: Path
    labels: tuple[str, ...]
    part: str = ""


def load_folder(request: Request) -> Splits[Dataset] | Splits[Stored]:
    """The splits of a folder with one subfolder per class."""
    return _splits(entries_of_folder(request.spec.path), request, multi_label=False)


def load_csv(request: Request) -> Splits[Dataset] | Splits[Stored]:
    """The splits of a table of files and labels: multi-label if any file has several labels or none."""
    entries = entries_of_table(request.spec.path)
    return _splits(entries, request, any(len(entry.labels) != 1 for entry in entries))


def entries_of_folder(root: Path) -> list[Entry]:
    """The images of a folder with one subfolder per class; a folder without images is refused."""
    if not root.is_dir():
        raise UserError(f"there is no folder {root}: check the path.")
    entries = list(_entries_of_parts(root)) or list(_entries_of_classes(root, root))
    if not entries:
        raise UserError(
            f"there are no images in {root}: it should have one subfolder per class that contains images, such as "
            f"{root / 'cat' / '1.png'}."
        )
    return entries


def entries_of_table(table: Path) -> list[Entry]:
    """The files of a table, each once; a table without rows is refused."""
    if not table.is_file():
        raise UserError(f"there is no file {table}: check the path.")
    entries = _once(_rows(table), table)
    if not entries:
        raise UserError(f"{table} has no rows: write one per image as file,labels, such as 1.png,cat;dog.")
    return entries


def checksum_of_folder(root: Path) -> int:
    return _checksum(entries_of_folder(root), root)


def checksum_of_table(table: Path) -> int:
    return _checksum(entries_of_table(table), table.parent)


def _checksum(entries: Iterable[Entry], root: Path) -> int:
    """Checksum of names, sizes, labels and splits, without reading the files; the same on every machine."""
    facts = []
    for entry in entries:
        size = entry.path.stat().st_size if entry.path.exists() else -1
        facts.append((os.path.relpath(entry.path, root), size, entry.labels, entry.part))
    return zlib.crc32(repr(sorted(facts)).encode())


def _entries_of_parts(root: Path) -> Iterator[Entry]:
    """The images in train, test and validation, if the folder has that layout.

    A class may be called "train" as well: the layout has subfolders in it, and no other folder next to the splits.
    """
    folders = {path.name: path for path in _subfolders(root)}
    if "train" not in folders or not set(folders) <= set(PARTS) or not any(_subfolders(folders["train"])):
        return
    for name, path in folders.items():
        yield from _entries_of_classes(path, root, PARTS[name])


def _entries_of_classes(folder: Path, root: Path, part: str = "") -> Iterator[Entry]:
    """The images in the folder of each class; a link to a parent folder is not a class."""
    above = {root.resolve(), *root.resolve().parents, folder.resolve()}
    for path in _subfolders(folder):
        if path.resolve() not in above:
            yield from (Entry(file, (path.name,), part) for file in pictures(path))


def _subfolders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def pictures(folder: Path) -> Iterator[Path]:
    """Image files at any depth, sorted by name; hidden files and linked folders are skipped."""
    for where, folders, names in os.walk(folder, followlinks=False):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith(".") and Path(name).suffix.lower() in SUFFIXES:
                yield Path(where, name)


def _rows(table: Path) -> Iterator[Entry]:
    """The rows of a table; the cell for the split may be missing, the cell for the labels may only be empty."""
    lines = _lines(table)
    columns = _columns(lines[0][1], table) if lines else {}
    if lines and columns:
        lines.pop(0)
    columns = columns or {"file": 0, "labels": 1, "split": 2}
    for number, row in lines:
        if len(row) <= max(columns["file"], columns["labels"]):
            raise UserError(f"line {number} of {table} is {','.join(row)!r}, without labels: write file,labels.")
        part = "".join(row[columns["split"] :][:1]).lower() if "split" in columns else ""
        if part and part not in PARTS:
            raise UserError(
                f"line {number} of {table} has the split {part!r}: write train, validation or test, or name the "
                f"columns in a header such as file,labels,width."
            )
        yield Entry(table.parent / row[columns["file"]], _labels(row[columns["labels"]]), PARTS.get(part, ""))


def _once(rows: Iterable[Entry], table: Path) -> list[Entry]:
    """Each file once, with the labels of all its rows, so that no file is in two splits."""
    found: dict[str, Entry] = {}
    several: dict[str, None] = {}
    for entry in rows:
        key = os.path.abspath(entry.path)
        before = found.get(key, entry)
        if before.part != entry.part:
            raise UserError(f"{table} assigns {entry.path.name} to two splits: choose one of them.")
        found[key] = Entry(before.path, tuple(sorted({*before.labels, *entry.labels})), entry.part)
        if before is not entry:
            several[key] = None
    if several:
        first = Path(next(iter(several))).name
        say(f"{table} has {len(several)} files in several rows ({first}): each is used once, with all its labels.")
    return list(found.values())


def _lines(table: Path) -> list[tuple[int, list[str]]]:
    """Non-empty rows, with the number of the line on which each ends."""
    try:
        with table.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            rows = ((reader.line_num, [cell.strip() for cell in row]) for row in reader)
            return [(number, row) for number, row in rows if any(row)]
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{table} is not a comma-separated UTF-8 table ({error}): save it as one.") from error


def _columns(row: list[str], table: Path) -> dict[str, int]:
    """Positions of file, labels and split in a header; empty if the row is not a header."""
    names = ["labels" if cell.lower() == "label" else cell.lower() for cell in row]
    named = [name for name in names if name in FILE_COLUMNS]
    if not named or not (names[0] in FILE_COLUMNS or "labels" in names):
        return {}
    if "labels" not in names:
        raise UserError(f"the header of {table} has no column labels, only {', '.join(row)}: rename one of them.")
    columns = {"file": names.index(named[0]), "labels": names.index("labels")}
    return columns | ({"split": names.index("split")} if "split" in names else {})


def _labels(cell: str) -> tuple[str, ...]:
    return tuple(sorted({label.strip() for label in cell.replace("|", ";").split(";")} - {""}))


def _splits(entries: list[Entry], request: Request, multi_label: bool) -> Splits[Dataset] | Splits[Stored]:
    name, paths = request.spec.text, [entry.path for entry in entries]
    decode = decode_in_memory if fits_in_memory(len(paths), request) else decode_into_cache
    decoded = decode(paths, request)
    classes = _classes([entry for entry, fine in zip(entries, decoded.readable, strict=True) if fine], name)
    kept = [entry for entry, fine in zip(entries, decoded.fine, strict=True) if fine]
    labels = _label_tensor(kept, classes, multi_label)
    parts = _part_indices(kept, labels, request)
    if isinstance(decoded.images, Tensor):
        return _cut_into(Dataset(decoded.images, labels, classes, name), parts, request)
    return _cut_into(Stored(decoded.images, decoded.rows, labels, classes, name), parts, request)


def _cut_into(whole: Own, parts: list[Tensor], request: Request) -> Splits[Own]:
    train, validation, test = (whole.subset(part) for part in parts)
    return limit_training(Splits(train, validation, test), request)


def _classes(entries: list[Entry], name: str) -> tuple[str, ...]:
    trained = {label for entry in entries if entry.part in ("", "train") for label in entry.labels}
    everywhere = {label for entry in entries for label in entry.labels}
    if strange := sorted(everywhere - trained):
        raise UserError(
            f"{name} has {', '.join(strange)} in its validation or test split but not in train: add it there."
        )
    if len(everywhere) < 2:
        found = f"only '{everywhere.pop()}'" if everywhere else "none"
        raise UserError(f"{name} needs at least two classes with readable images and has {found}: add another class.")
    return tuple(sorted(everywhere))


def _label_tensor(entries: list[Entry], classes: tuple[str, ...], multi_label: bool) -> Tensor:
    number = {label: j for j, label in enumerate(classes)}
    if not multi_label:
        return torch.tensor([number[entry.labels[0]] for entry in entries])
    labels = torch.zeros(len(entries), len(classes), dtype=torch.bool)
    for row, entry in zip(labels, entries, strict=True):
        row[[number[label] for label in entry.labels]] = True
    return labels


def _part_indices(entries: list[Entry], labels: Tensor, request: Request) -> list[Tensor]:
    """Indices of train, validation and test: as the user assigned them, else drawn from train."""
    name = request.spec.text
    parts = [entry.part or "train" for entry in entries]
    train, validation, test = (
        torch.tensor([k for k, part in enumerate(parts) if part == wanted], dtype=torch.int64)
        for wanted in ("train", "validation", "test")
    )
    strata = _strata(labels)
    tenth = max(1, len(train) // 10)  # of the images that may be held out, whatever the size of an existing test split
    if not len(test):
        train, test = _cut(train, strata, tenth, "seeded", request.seed, "test")
    if not len(validation) and request.validation:
        wanted = _validation_size(len(train), tenth, request.validation)
        train, validation = _cut(train, strata, wanted, request.validation_choice, request.seed, "validation")
    if not len(train) or not len(test):
        raise UserError(f"{name} has {len(entries)} images, too few for a training and a test split: add more.")
    if len(validation) and not request.validation:
        say(f"validation=0 holds out no images, but {name} has a validation split of {len(validation)}: it is kept.")
    return [train, validation, test]


def _validation_size(available: int, tenth: int, asked: int) -> int:
    """The requested number if it is at most a quarter of the training images, else a tenth."""
    if asked <= available // 4:
        return asked
    if asked != DEFAULT_VALIDATION:
        say(f"validation={asked} is more than a quarter of the {available} training images; holding out {tenth}.")
    return min(tenth, available - 1)


def _strata(labels: Tensor) -> Tensor:
    """Groups to stratify by: the classes, or one group of all images for multi-label data."""
    return labels if labels.ndim == 1 else torch.zeros(len(labels), dtype=torch.int64)


def _cut(indices: Tensor, strata: Tensor, size: int, choice: Choice, seed: int, purpose: str) -> tuple[Tensor, Tensor]:
    """Hold out about `size` of the indices, each stratum in proportion and none of them entirely."""
    order = indices
    if choice == "seeded":
        order = indices[torch.randperm(len(indices), generator=generator(seed, f"folder {purpose}"))]
    quota = _quotas(Counter(strata[indices].tolist()), size)
    taken = torch.zeros(len(strata), dtype=torch.bool)
    for k, stratum in zip(order.tolist(), strata[order].tolist(), strict=True):
        if quota[stratum]:
            quota[stratum] -= 1
            taken[k] = True
    return indices[~taken[indices]], indices[taken[indices]]


def _quotas(counts: Counter[int], size: int) -> dict[int, int]:
    """`size` divided in proportion, largest remainders rounded up; every stratum keeps at least one image.

    >>> _quotas(Counter({0: 30, 1: 10}), 5)
    {0: 4, 1: 1}
    """
    exact = {stratum: size * count / counts.total() for stratum, count in counts.items()}
    quota = {stratum: int(share) for stratum, share in exact.items()}
    by_remainder = sorted(exact, key=lambda stratum: (int(exact[stratum]) - exact[stratum], stratum))
    for stratum in by_remainder[: size - sum(quota.values())]:
        quota[stratum] += 1
    return {stratum: min(share, counts[stratum] - 1) for stratum, share in quota.items()}


OWN_IMAGES: dict[str, Any] = {"takes_path": True, "preset": "own-images", "seeded_test": True}

register(
    DatasetInfo(
        "folder",
        "your images, one subfolder per class (or PATH/train and PATH/test with one each)",
        load_folder,
        checksum=checksum_of_folder,
        **OWN_IMAGES,
    )
)
register(
    DatasetInfo(
        "csv",
        "your images and their labels, a table of file,labels; several labels separated by ; or |",
        load_csv,
        labels_per_image=None,
        checksum=checksum_of_table,
        **OWN_IMAGES,
    )
)
