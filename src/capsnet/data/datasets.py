"""Data sets as whole tensors, cut into training, validation and test parts.

The paper trains on MNIST's 60,000 images and tests on its 10,000; its authors' code holds back the first
10,000 training images for validation (`validation_choice="first"`). We hold back 10,000 drawn by the seed
unless told otherwise, so that no choice is ever made on the test set.
"""

from __future__ import annotations

import importlib
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from capsnet.data import sources
from capsnet.data.examples import Batch, Examples, Self
from capsnet.data.seeds import generator
from capsnet.errors import UserError, unknown

NAMES = {
    "mnist": "70,000 handwritten digits, 28×28 grey, 10 classes",
    "fashion-mnist": "70,000 articles of clothing, 28×28 grey, 10 classes",
    "cifar10": "60,000 small photographs, 32×32 colour, 10 classes",
    "multimnist": "pairs of overlapping MNIST digits, 36×36, made on the fly; multimnist:canvas=56,shift=14,single=0.3",
    "parts": "drawn houses, boats and faces at known poses, 40×40, made on the fly; parts:train=20000,test=5000",
    "expanded-mnist": "MNIST digits at random places of a 40×40 field, made on the fly",
    "affine-mnist": "the same to train on; test: a re-creation of affNIST, 320,000 images; affine-mnist:per_digit=2",
    "affnist:PATH": "the original affNIST, a .mat file or a folder of them: a test part only (needs scipy)",
    "folder:PATH": "your images, one subfolder a class (or PATH/train and PATH/test with one each)",
    "csv:PATH": "your images and their labels, a table of file,labels; several labels apart by ; or |",
}
CLASSES = {
    "mnist": tuple("0123456789"),
    "fashion-mnist": (
        *("T-shirt/top", "trouser", "pullover", "dress", "coat"),
        *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
    ),
    "cifar10": (
        *("airplane", "automobile", "bird", "cat", "deer"),
        *("dog", "frog", "horse", "ship", "truck"),
    ),
}
# made out of MNIST's digits, by the module of that name
MADE = {"multimnist": "multimnist", "expanded-mnist": "affine", "affine-mnist": "affine"}
DEFAULT_VALIDATION = 10_000
Choice = Literal["seeded", "first"]
Size = int | tuple[int, int] | None  # side, or (h, w); None keeps what there is


@dataclass(frozen=True, eq=False)
class Dataset(Examples):
    """Images with their labels.

    `images` uint8 (n, c, h, w); `labels` int64 (n,), or bool (n, j) when an image may have several or none.
    """

    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    name: str

    def __post_init__(self) -> None:
        _check_images(self.images, self.name)
        _check_labels(self.labels, len(self.images), self.classes, self.name)

    def __len__(self) -> int:
        return len(self.images)

    @property
    def device(self) -> torch.device:
        return self.images.device

    @property
    def labels_per_image(self) -> int | None:
        return None if self.labels.dtype == torch.bool else 1

    @property
    def image_shape(self) -> tuple[int, int, int]:
        c, h, w = self.images.shape[1:]
        return c, h, w

    @property
    def targets(self) -> Tensor:
        return multi_hot(self.labels, len(self.classes))

    def to(self, device: torch.device | str) -> Dataset:
        return replace(self, images=self.images.to(device), labels=self.labels.to(device))

    def gather(self, index: Tensor) -> Batch:
        index = index.to(self.device)
        labels = self.labels[index]
        images = self.images[index].float().div_(255)
        return Batch(images, multi_hot(labels, len(self.classes)), labels, index)

    def subset(self, indices: Tensor) -> Dataset:
        indices = indices.to(self.images.device)
        return replace(self, images=self.images[indices], labels=self.labels[indices])


@dataclass(frozen=True, eq=False)
class MadeOf(Examples):
    """Images that are made on the fly, out of those of a data set."""

    source: Dataset

    @property
    def classes(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.source.classes

    @property
    def device(self) -> torch.device:
        return self.source.device

    def to(self: Self, device: torch.device | str) -> Self:
        return replace(self, source=self.source.to(device))  # type: ignore[type-var,attr-defined]


Part = TypeVar("Part", bound=Examples)


@dataclass(frozen=True, eq=False)
class Splits(Generic[Part]):
    """The three parts; no image is in two of them. The validation part may be empty."""

    train: Part
    validation: Part
    test: Part

    def to(self, device: torch.device | str) -> Splits[Part]:
        return Splits(self.train.to(device), self.validation.to(device), self.test.to(device))


def load(
    name: str,
    *,
    validation: int = DEFAULT_VALIDATION,
    validation_choice: Choice = "seeded",
    seed: int = 0,
    train_limit: int = 0,
    image_size: Size = None,
    channels: int | None = None,
    progress: bool | None = None,
) -> Splits:
    """A data set by its name (see `NAMES`), fetched on first use.

    `validation` images are taken out of the training part, drawn by `seed` or the first ones; 0 leaves them.
    `train_limit` then keeps so many of them, drawn by `seed`, equally many of each class; 0 keeps all.
    `image_size` (the side, or height and width) and `channels` (1 or 3) convert. For your own images see
    `capsnet.data.folder`.
    """
    _check_options(validation, validation_choice, image_size, channels)
    kind, colon, path = name.partition(":")
    if colon and kind in ("folder", "csv"):
        from capsnet.data import folder

        read = folder.load_folder if kind == "folder" else folder.load_csv
        options = folder.Options(validation, validation_choice, seed, image_size, channels, progress)
        return _limited(read(Path(path).expanduser(), options), train_limit, seed)
    if kind == "parts":
        from capsnet.data import parts

        return _unchanged(parts.load(name, validation, seed, train_limit), image_size, channels)
    if colon and kind == "affnist":
        from capsnet.data import affine

        original = affine.load_original(Path(path).expanduser())
        three = (original.train, original.validation, original.test)
        return Splits(*(_convert(part, image_size, channels) for part in three))
    if kind in MADE:
        train, test = _published("mnist", progress)
        digits = _hold_back(train, test, validation, validation_choice, seed)
        digits = _limited(digits, train_limit, seed)
        return _made(name, digits, seed, image_size, channels)
    if name not in CLASSES:
        if Path(name).is_dir():
            raise UserError(f"there is no data set '{name}', but a folder of that name: did you mean folder:{name}?")
        raise unknown("data set", name, NAMES)
    train, test = (_convert(part, image_size, channels) for part in _published(name, progress))
    return _limited(_hold_back(train, test, validation, validation_choice, seed), train_limit, seed)


def fingerprint(splits: Splits, name: str) -> dict[str, int]:
    """A checksum of each part of one's own images, for they may change and are then cut apart in another way."""
    if not name.startswith(("folder:", "csv:")):
        return {}
    parts = {"train": splits.train, "validation": splits.validation, "test": splits.test}
    return {
        which: zlib.crc32(part.labels.numpy(), zlib.crc32(part.images.contiguous().numpy()))
        for which, part in parts.items()
    }


def listing(name: str) -> int | None:
    """A checksum of the files of one's own images, by name, size and label; of published ones there is none."""
    kind, _, path = name.partition(":")
    if kind not in ("folder", "csv"):
        return None
    from capsnet.data import folder

    place = Path(path).expanduser()
    if kind == "folder":
        return folder.checksum(folder.entries_of_folder(place), place)
    return folder.checksum(folder.entries_of_table(place), place.parent)


def same_images(name: str) -> str:
    """What the names of data sets have in common that are made of the same images.

    >>> same_images("multimnist:easy"), same_images("folder:a/../b") == same_images("folder:b")
    ('mnist', True)
    """
    kind, colon, place = name.partition(":")
    if kind in MADE:
        return "mnist"
    return f"{kind}:{Path(place).expanduser().resolve()}" if colon else name


def _made(name: str, digits: Splits[Dataset], seed: int, image_size: Size, channels: int | None) -> Splits:
    """A set that is made out of MNIST's digits; its size is its own."""
    module = importlib.import_module(f"capsnet.data.{MADE[name.partition(':')[0]]}")
    return _unchanged(module.load(name, digits, seed), image_size, channels)


def _unchanged(splits: Splits, image_size: Size, channels: int | None) -> Splits:
    """Refuse another size than the one that images are made in."""
    name = splits.train.name
    c, h, w = splits.train.image_shape
    wanted = channels or c, *(height_and_width(image_size) or (h, w))
    if wanted != (c, h, w):
        raise UserError(
            f"{name} makes images of (channels, height, width) {(c, h, w)} and {wanted} were asked for: "
            f"leave the image size out, or choose data of that size."
        )
    return splits


def split_indices(n: int, held_back: int, choice: Choice, seed: int) -> tuple[Tensor, Tensor]:
    """The indices that stay and those that are held back, both in their old order."""
    order = torch.arange(n)
    if choice == "seeded":
        order = torch.randperm(n, generator=generator(seed, "validation"))
    return order[held_back:].sort().values, order[:held_back].sort().values


def multi_hot(labels: Tensor, classes: int) -> Tensor:
    """float (n, j) from int64 (n,) or bool (n, j).

    >>> multi_hot(torch.tensor([2, 0]), 3)
    tensor([[0., 0., 1.],
            [1., 0., 0.]])
    """
    if labels.dtype == torch.bool:
        return labels.float()
    return torch.nn.functional.one_hot(labels, classes).float()


def _published(name: str, progress: bool | None) -> tuple[Dataset, Dataset]:
    arrays = sources.read(sources.SOURCES[name], progress=progress)
    parts = []
    for images, labels in (arrays[:2], arrays[2:]):
        pixels = torch.from_numpy(images if images.ndim == 4 else images[:, None])
        parts.append(Dataset(pixels, torch.from_numpy(labels.astype(np.int64)), CLASSES[name], name))
    return parts[0], parts[1]


def _hold_back(train: Dataset, test: Dataset, validation: int, choice: Choice, seed: int) -> Splits[Dataset]:
    if validation >= train.n:
        raise UserError(
            f"validation={validation} leaves nothing to train on: {train.name} has {train.n} training images."
        )
    if validation == 0:
        return Splits(train, train.subset(torch.arange(0)), test)
    stay, held_back = split_indices(train.n, validation, choice, seed)
    return Splits(train.subset(stay), train.subset(held_back), test)


def _limited(splits: Splits[Dataset], limit: int, seed: int) -> Splits[Dataset]:
    """The same with fewer training images, where a limit is set: as many of each class as can be had equally."""
    train = splits.train
    if not limit:
        return splits
    if not 0 < limit <= train.n:
        raise UserError(f"a training limit of {limit} does not fit the {train.n} training images of {train.name}.")
    shuffled = torch.randperm(train.n, generator=generator(seed, "limit"))
    chosen = shuffled[:limit]
    if not train.multi_label:
        labels = train.labels.cpu()[shuffled]
        turn = torch.empty(train.n, dtype=torch.long)  # each image's place among those of its class
        for j in range(len(train.classes)):
            turn[labels == j] = torch.arange(int((labels == j).sum()))
        chosen = shuffled[turn.argsort(stable=True)[:limit]]
    return replace(splits, train=train.subset(chosen.sort().values))


def height_and_width(size: Size) -> tuple[int, int] | None:
    return (size, size) if isinstance(size, int) else size


def _convert(part: Dataset, image_size: Size, channels: int | None) -> Dataset:
    """Another size or number of channels; a thousand images at a time, because they pass through floats."""
    c, h, w = part.image_shape
    size = height_and_width(image_size) or (h, w)
    if (size, channels or c) == ((h, w), c):
        return part
    chunks = [_convert_images(chunk, size, channels) for chunk in part.images.split(1000)]
    return replace(part, images=torch.cat(chunks))


def _convert_images(images: Tensor, size: tuple[int, int], channels: int | None) -> Tensor:
    result = images.float()
    if channels == 1 and images.shape[1] == 3:
        grey = torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)  # ITU-R 601, as Pillow weighs them
        result = (result * grey).sum(1, keepdim=True)
    if size != tuple(images.shape[2:]):
        result = torch.nn.functional.interpolate(result, size, mode="bilinear", antialias=True)
    result = result.round().clamp(0, 255).to(torch.uint8)
    return result.repeat(1, 3, 1, 1) if channels == 3 and result.shape[1] == 1 else result


def _check_options(validation: int, choice: str, image_size: Size, channels: int | None) -> None:
    if validation < 0:
        raise UserError(f"validation is a number of images, 0 or more, and not {validation}.")
    if choice not in ("seeded", "first"):
        raise unknown("validation choice", choice, ("seeded", "first"))
    if not all(1 <= side <= 1024 for side in height_and_width(image_size) or ()):
        raise UserError(f"image_size is the side in pixels, from 1 to 1024, and not {image_size}.")
    if channels not in (None, 1, 3):
        raise UserError(f"channels is 1 (grey) or 3 (colour) and not {channels}.")


def _check_images(images: Tensor, name: str) -> None:
    if images.dtype != torch.uint8 or images.ndim != 4:
        came = f"{images.dtype} {tuple(images.shape)}"
        raise UserError(f"{name}: images should be uint8 (n, c, h, w) and are {came}.")


def _check_labels(labels: Tensor, n: int, classes: tuple[str, ...], name: str) -> None:
    j = len(classes)
    if labels.dtype == torch.bool:
        if tuple(labels.shape) != (n, j):
            raise UserError(f"{name}: labels should be bool ({n}, {j}) and are {tuple(labels.shape)}.")
        return
    if labels.dtype != torch.int64 or tuple(labels.shape) != (n,):
        came = f"{labels.dtype} {tuple(labels.shape)}"
        raise UserError(f"{name}: labels should be int64 ({n},) or bool ({n}, {j}) and are {came}.")
    if n and not (labels.min() >= 0 and labels.max() < j):
        raise UserError(
            f"{name}: labels should be 0 to {j - 1} for {j} classes and are {labels.min()} to {labels.max()}."
        )
