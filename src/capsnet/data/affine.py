"""MNIST on a 40×40 field (section 5.1): placed at random to train on, transformed to test on.

`expanded-mnist` is what the paper trains on: each digit's 28×28 field at a random place of a black 40×40 one, at a new
place in every epoch; validation and test digits have one place each, the same for every seed.

`affine-mnist` has the same to train on, and for its test set a re-creation of affNIST: each of MNIST's 10,000 test
digits under 32 random affine transformations (`affine-mnist:per_digit=2` for the first two of each). Rotation up to
20° either way, shear up to 0.2, scale 0.8 to 1.2 in each axis, then a place anywhere where no ink is lost. The
original's exact numbers are not in it; `affnist:PATH` reads the original files.

Like MultiMNIST's pairs, an example is a function of (stream, index) alone and is made when it is asked for.
"""

from __future__ import annotations

import importlib
import math
import struct
import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from capsnet.data import options, seeds
from capsnet.data.datasets import CLASSES, Dataset, MadeOf, Splits, multi_hot
from capsnet.data.examples import Batch
from capsnet.data.multimnist import lay
from capsnet.errors import UserError

FIELD = 40  # side of the images
ROTATION, SHEAR, SCALE = 20.0, 0.2, 0.2  # the largest: degrees, pixels a row, share
PER_DIGIT = 32
MOST_BYTES = 2**30  # of one file, unpacked: the original's largest has 0.1 GB


@dataclass(frozen=True, eq=False)
class OnField(MadeOf):
    """Single digits of MNIST, each somewhere on a field of 40×40."""

    stream: int
    name: str
    endless: bool = False

    def __len__(self) -> int:
        return self.source.n

    @property
    def image_shape(self) -> tuple[int, int, int]:
        return self.source.image_shape[0], FIELD, FIELD

    @property
    def targets(self) -> Tensor:
        return multi_hot(self.source.labels[self.numbers() % max(1, self.source.n)], len(self.classes))

    def gather(self, index: Tensor) -> Batch:
        index = index.to(self.device)
        chosen = index % max(1, self.source.n)
        images, measures = self.make(chosen, index)
        labels = self.source.labels[chosen]
        return Batch(images, multi_hot(labels, len(self.classes)), labels, index, measures=measures)

    def make(self, chosen: Tensor, index: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Digits of the source (b,) as the examples of these numbers (b,): images and how they were made."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Placed(OnField):
    """Each digit as it is, its 28×28 field anywhere inside the 40×40 one."""

    def make(self, chosen: Tensor, index: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        room = FIELD - self.source.image_shape[1]
        corner = torch.stack([seeds.integers(self.stream, index, draw, room + 1) for draw in (0, 1)], 1)
        images = lay(self.source.images[chosen], corner - room // 2, FIELD).float().div_(255)
        return images, {"shift": (corner - room / 2).norm(dim=1)}


@dataclass(frozen=True, eq=False)
class Transformed(OnField):
    """Each digit under `per_digit` affine transformations: a re-creation of affNIST."""

    per_digit: int = PER_DIGIT

    def __len__(self) -> int:
        return self.source.n * self.per_digit

    def make(self, chosen: Tensor, index: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        rotation, shear, across, down = self.draw(index)
        matrix = linear(rotation, shear, across, down)
        move = self.place(matrix, self.ink[chosen], index)
        grey_levels = transform(self.source.images[chosen].float(), matrix, move).round_()  # as files hold them
        measures = {"rotation": rotation, "shear": shear, "scale_across": across, "scale_down": down}
        return grey_levels.div_(255), measures | {"shift": move.norm(dim=1)}

    def draw(self, index: Tensor) -> list[Tensor]:
        """Rotation, shear and the two scales of each example, (b,) each."""
        middles, spans = (0.0, 0.0, 1.0, 1.0), (ROTATION, SHEAR, SCALE, SCALE)
        signed = [seeds.uniform(self.stream, index, k) * 2 - 1 for k in range(4)]
        return [middle + span * x for middle, span, x in zip(middles, spans, signed, strict=True)]

    def place(self, matrix: Tensor, ink: Tensor, index: Tensor) -> Tensor:
        """Where the transformed middle goes, (b, 2) as (right, down) from the field's: uniform where no ink is lost."""
        low, high = ink_range(matrix, ink)
        # bilinear ink reaches one pixel beyond its pixels' centres, and the next centre outside is half a pixel off
        first, last = -(FIELD + 1) / 2 - low, (FIELD + 1) / 2 - high
        drawn = torch.stack([seeds.uniform(self.stream, index, draw) for draw in (4, 5)], 1)
        return first + drawn * (last - first)

    @cached_property
    def ink(self) -> Tensor:
        """(n, 4): left, top, right and bottom of what each digit may leave ink on, in pixels from its middle."""
        dark = self.source.images.amax(1) > 0
        edges = []
        for line in (dark.any(1), dark.any(2)):  # columns, rows
            number = torch.arange(line.shape[1], device=line.device) - (line.shape[1] - 1) / 2
            edges.append((number.where(line, math.inf).amin(1) - 1, number.where(line, -math.inf).amax(1) + 1))
        (left, right), (top, bottom) = edges
        return torch.stack([left, top, right, bottom], 1)


@dataclass(frozen=True)
class Expanded:
    """Options after `expanded-mnist:`: none."""


@dataclass(frozen=True)
class Affine:
    """Options after `affine-mnist:`."""

    per_digit: int = PER_DIGIT
    """Transformations of each test digit."""

    def __post_init__(self) -> None:
        if not 1 <= self.per_digit <= PER_DIGIT:
            raise UserError(f"affine-mnist:per_digit={self.per_digit} should be between 1 and {PER_DIGIT}.")


def load(name: str, digits: Splits[Dataset], seed: int) -> Splits[OnField]:
    """The three parts of `expanded-mnist` or `affine-mnist:OPTIONS`, each out of the same part of MNIST."""
    train = Placed(digits.train, seeds.key(seed, "expanded training"), name, endless=True)
    validation = Placed(digits.validation, seeds.key(0, "expanded validation"), name)
    if name.partition(":")[0] == "expanded-mnist":
        options.read(Expanded, name)
        return Splits(train, validation, Placed(digits.test, seeds.key(0, "expanded test"), name))
    per_digit = options.read(Affine, name).per_digit
    return Splits(train, validation, Transformed(digits.test, seeds.key(0, "affine test"), name, per_digit=per_digit))


# --- Affine transformations ----------------------------------------------------------------------------------


def linear(rotation: Tensor, shear: Tensor, across: Tensor, down: Tensor) -> Tensor:
    """(b, 2, 2) on (right, down): scale, then slant to the right, then turn counter-clockwise by degrees."""
    angle = torch.deg2rad(rotation)
    cos, sin, one, zero = angle.cos(), angle.sin(), torch.ones_like(angle), torch.zeros_like(angle)
    turn = torch.stack([cos, sin, -sin, cos], 1).view(-1, 2, 2)
    slant = torch.stack([one, -shear, zero, one], 1).view(-1, 2, 2)
    return turn @ slant * torch.stack([across, down], 1)[:, None]


def ink_range(matrix: Tensor, ink: Tensor) -> tuple[Tensor, Tensor]:
    """Least and greatest (right, down) that the corners of boxes (b, 4) come to under matrices: (b, 2) each."""
    corners = ink[:, [0, 1, 2, 1, 0, 3, 2, 3]].view(-1, 4, 2)
    moved = corners @ matrix.mT
    return moved.amin(1), moved.amax(1)


def transform(images: Tensor, matrix: Tensor, move: Tensor) -> Tensor:
    """Images (b, c, h, h) on fields of 40×40: x ↦ matrix x + move, from middle to middle, bilinear."""
    inverse = torch.linalg.inv(matrix)  # each output pixel asks where it comes from
    shift = inverse @ -move.unsqueeze(2)
    # positions run from −1 to 1 on both sides: FIELD/2 pixels there, h/2 here
    theta = torch.cat([inverse * FIELD, shift * 2], 2) / images.shape[-1]
    grid = F.affine_grid(theta, [len(images), 1, FIELD, FIELD], align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


# --- The original affNIST --------------------------------------------------------------------------------------


def load_original(path: Path) -> Splits[Dataset]:
    """affNIST's own .mat file, or a folder of them in the order of their numbers, as a test part."""
    files = sorted(path.glob("*.mat"), key=lambda file: (len(file.name), file.name)) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise UserError(f"{path} is neither one of affNIST's .mat files nor a folder of them: check the path.")
    images, labels = zip(*(read_original(file) for file in files), strict=True)
    whole = Dataset(upright(torch.cat(images)), torch.cat(labels), CLASSES["mnist"], f"affnist:{path.name}")
    nothing = whole.subset(torch.arange(0))
    return Splits(nothing, nothing, whole)


def read_original(file: Path) -> tuple[Tensor, Tensor]:
    """One file's images, uint8 (n, 1, 40, 40), and labels (n,)."""
    try:
        loadmat = importlib.import_module("scipy.io").loadmat
    except ImportError:
        raise UserError("reading affNIST's files needs scipy, which is not installed: pip install scipy.") from None
    check_size(file)
    try:
        data = loadmat(file, variable_names=["affNISTdata"])["affNISTdata"]
        images, labels = (np.asarray(data[field][0, 0]) for field in ("image", "label_int"))
    except Exception as error:  # a damaged file shows itself in many ways
        raise not_affnist(file, f"{type(error).__name__}: {error}") from None
    labels = labels.ravel()
    if images.dtype != np.uint8 or images.ndim != 2 or images.shape != (FIELD * FIELD, len(labels)):
        raise not_affnist(file, f"image is {images.dtype} {images.shape} with {len(labels)} labels")
    if labels.dtype.kind not in "iuf" or not np.isin(labels, range(10)).all():
        raise not_affnist(file, "label_int has other values than 0 to 9")
    pixels = torch.from_numpy(np.ascontiguousarray(images.T)).view(-1, 1, FIELD, FIELD)
    return pixels, torch.from_numpy(labels.astype(np.int64))


def not_affnist(file: Path, why: str) -> UserError:
    return UserError(
        f"{file} is not in affNIST's layout ({' '.join(why.split())[:200]}): expected a MATLAB 5 file with a structure "
        f"affNISTdata that has image, uint8 (1600, n), and label_int (1, n)."
    )


def check_size(file: Path) -> None:
    """Refuse a file that says it unpacks to more than any of affNIST's; a few kB can claim gigabytes."""
    if file.stat().st_size > MOST_BYTES:
        raise not_affnist(file, f"it has {file.stat().st_size:,} bytes")
    with file.open("rb") as content:
        content.seek(128)  # the header, behind which each variable has its kind, its size and its bytes
        while len(tag := content.read(8)) == 8:
            kind, size = struct.unpack("<II", tag)
            start = content.tell()
            if kind == 15:  # packed
                try:
                    inside = zlib.decompressobj().decompress(content.read(min(size, 4096)), 8)
                except zlib.error as error:
                    raise not_affnist(file, str(error)) from None
                if len(inside) < 8 or struct.unpack("<II", inside)[1] > MOST_BYTES:
                    raise not_affnist(file, "a variable is cut off or too large")
            content.seek(start + size)


def upright(images: Tensor) -> Tensor:
    """Images as they are, or mirrored at their diagonal where digits lie on their side.

    Published readers disagree on whether a column of the file runs along rows or columns of the image. Digits are
    taller than wide, all ones and most others, so the files themselves can say.
    """
    some = images[:: max(1, len(images) // 1000), 0].float()
    tall, wide = (spread(some.sum(axis)) for axis in (2, 1))
    return images if tall >= wide else images.mT.contiguous()


def spread(profile: Tensor) -> float:
    """Mean over images of the standard deviation of their ink along one axis: (n, side) → ()."""
    share = profile / profile.sum(1, keepdim=True).clamp(min=1)
    place = torch.arange(profile.shape[1], dtype=torch.float32)
    mean = (share * place).sum(1, keepdim=True)
    return float((share * (place - mean).square()).sum(1).sqrt().mean())
