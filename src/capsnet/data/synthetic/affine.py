"""MNIST on a 40×40 field (section 5.1): digits at random positions for training, transformed digits for testing.

`expanded-mnist` is what the paper trains on: each 28×28 digit at a random position of a black 40×40 field, at a new
position in every epoch. Validation and test digits have one position each, the same for every seed.

`affine-mnist` has the same training split. Its test split re-creates affNIST: each of the 10,000 test digits of MNIST
under 32 random affine transformations (`affine-mnist:per_digit=2` for the first two of each). Digits are rotated by up
to 20° in either direction, sheared by up to 0.2, scaled by 0.8 to 1.2 along each axis, and placed anywhere that cuts
off no ink. The random numbers differ from those of the original; `affnist:PATH` reads the original files.

As in MultiMNIST, an example is a function of (stream, index) alone and is generated on the fly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from capsnet.data import seeds
from capsnet.data.examples import Batch, MadeOf, multi_hot
from capsnet.data.registry import DatasetInfo, Request, register
from capsnet.data.splits import Splits
from capsnet.data.synthetic.multimnist import lay
from capsnet.errors import UserError

FIELD, DIGIT = 40, 28  # sides of the images and of a digit
ROTATION, SHEAR, SCALE = 20.0, 0.2, 0.2  # maxima: degrees, pixels per row, fraction
PER_DIGIT = 32


@dataclass(frozen=True, eq=False)
class OnField(MadeOf):
    """Single digits of MNIST on fields of 40×40."""

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
        """Images of the chosen digits (b,) as the examples at these indices (b,), and their measures."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Placed(OnField):
    """Each 28×28 digit, unchanged, at a random position of a 40×40 field, up to `room` / 2 pixels from the centre."""

    room: int = FIELD - DIGIT

    def make(self, chosen: Tensor, index: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        room = self.room
        corner = torch.stack([seeds.integers(self.stream, index, draw, room + 1) for draw in (0, 1)], 1)
        images = lay(self.source.images[chosen], corner - room // 2, FIELD).float().div_(255)
        return images, {"shift": (corner - room / 2).norm(dim=1)}


@dataclass(frozen=True, eq=False)
class Transformed(OnField):
    """Each digit under `per_digit` affine transformations, as in affNIST."""

    per_digit: int = PER_DIGIT

    def __len__(self) -> int:
        return self.source.n * self.per_digit

    def make(self, chosen: Tensor, index: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        rotation, shear, across, down = self.draw(index)
        matrix = linear(rotation, shear, across, down)
        move = self.place(matrix, self.ink[chosen], index)
        grey_levels = transform(self.source.images[chosen].float(), matrix, move).round_()  # as in a file
        measures = {"rotation": rotation, "shear": shear, "scale_across": across, "scale_down": down}
        return grey_levels.div_(255), measures | {"shift": move.norm(dim=1)}

    def draw(self, index: Tensor) -> list[Tensor]:
        """Rotation, shear and both scales of each example, (b,) each."""
        middles, spans = (0.0, 0.0, 1.0, 1.0), (ROTATION, SHEAR, SCALE, SCALE)
        signed = [seeds.uniform(self.stream, index, k) * 2 - 1 for k in range(4)]
        return [middle + span * x for middle, span, x in zip(middles, spans, signed, strict=True)]

    def place(self, matrix: Tensor, ink: Tensor, index: Tensor) -> Tensor:
        """Offset of each digit from the centre, (b, 2) as (right, down): uniform where no ink is cut off."""
        low, high = ink_range(matrix, ink)
        # bilinear ink extends one pixel beyond the pixel centres, and the next centre outside is half a pixel away
        first, last = -(FIELD + 1) / 2 - low, (FIELD + 1) / 2 - high
        drawn = torch.stack([seeds.uniform(self.stream, index, draw) for draw in (4, 5)], 1)
        return first + drawn * (last - first)

    @cached_property
    def ink(self) -> Tensor:
        """(n, 4): left, top, right and bottom of the area that may contain ink, in pixels from the centre."""
        dark = self.source.images.amax(1) > 0
        edges = []
        for line in (dark.any(1), dark.any(2)):  # columns, rows
            number = torch.arange(line.shape[1], device=line.device) - (line.shape[1] - 1) / 2
            edges.append((number.where(line, math.inf).amin(1) - 1, number.where(line, -math.inf).amax(1) + 1))
        (left, right), (top, bottom) = edges
        return torch.stack([left, top, right, bottom], 1)


@dataclass(frozen=True)
class Options:
    """Options after `affine-mnist:`."""

    per_digit: int = PER_DIGIT
    """Transformations of each test digit."""

    def __post_init__(self) -> None:
        if not 1 <= self.per_digit <= PER_DIGIT:
            raise UserError(f"affine-mnist:per_digit={self.per_digit} should be between 1 and {PER_DIGIT}.")

    @property
    def sizes(self) -> tuple[int, int]:
        return 60_000, 10_000 * self.per_digit


@dataclass(frozen=True)
class Shift:
    """Options after `expanded-mnist:`."""

    shift: int = (FIELD - DIGIT) // 2
    """Largest shift of a digit from the centre, in pixels."""

    def __post_init__(self) -> None:
        if not 0 <= self.shift <= (FIELD - DIGIT) // 2:
            raise UserError(f"expanded-mnist:shift={self.shift} should be between 0 and {(FIELD - DIGIT) // 2}.")


def load_expanded(request: Request) -> Splits[OnField]:
    """The splits of `expanded-mnist:OPTIONS`."""
    return placed(request, 2 * request.spec.options.shift)


def placed(request: Request, room: int) -> Splits[OnField]:
    """Digits at random positions, each split made of the same split of MNIST."""
    digits, name = request.load_base(), request.spec.text
    return Splits(
        Placed(digits.train, seeds.key(request.seed, "expanded training"), name, endless=True, room=room),
        Placed(digits.validation, seeds.key(0, "expanded validation"), name, room=room),
        Placed(digits.test, seeds.key(0, "expanded test"), name, room=room),
    )


def load_affine(request: Request) -> Splits[OnField]:
    """The splits of `affine-mnist:OPTIONS`: expanded-mnist with transformed test digits."""
    splits, per_digit = placed(request, FIELD - DIGIT), request.spec.options.per_digit
    digits, stream = splits.test.source, seeds.key(0, "affine test")
    return replace(splits, test=Transformed(digits, stream, request.spec.text, per_digit=per_digit))


# --- Affine transformations ----------------------------------------------------------------------------------


def linear(rotation: Tensor, shear: Tensor, across: Tensor, down: Tensor) -> Tensor:
    """(b, 2, 2) on (right, down): scale, then shear to the right, then rotate counter-clockwise by degrees."""
    angle = torch.deg2rad(rotation)
    cos, sin, one, zero = angle.cos(), angle.sin(), torch.ones_like(angle), torch.zeros_like(angle)
    turn = torch.stack([cos, sin, -sin, cos], 1).view(-1, 2, 2)
    slant = torch.stack([one, -shear, zero, one], 1).view(-1, 2, 2)
    return turn @ slant * torch.stack([across, down], 1)[:, None]


def ink_range(matrix: Tensor, ink: Tensor) -> tuple[Tensor, Tensor]:
    """Minimum and maximum (right, down) of the transformed corners of boxes (b, 4): (b, 2) each."""
    corners = ink[:, [0, 1, 2, 1, 0, 3, 2, 3]].view(-1, 4, 2)
    moved = corners @ matrix.mT
    return moved.amin(1), moved.amax(1)


def transform(images: Tensor, matrix: Tensor, move: Tensor) -> Tensor:
    """Images (b, c, h, h) on fields of 40×40: x ↦ matrix x + move, relative to the centres, bilinear."""
    inverse = torch.linalg.inv(matrix)  # maps output pixels to input pixels
    shift = inverse @ -move.unsqueeze(2)
    # coordinates run from −1 to 1 in both images: FIELD/2 pixels in the output, h/2 in the input
    theta = torch.cat([inverse * FIELD, shift * 2], 2) / images.shape[-1]
    grid = F.affine_grid(theta, [len(images), 1, FIELD, FIELD], align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


SHIFTS = tuple(float(k) for k in range(0, 29, 2))  # pixels from the centre; the last bin includes larger ones

register(
    DatasetInfo(
        "expanded-mnist",
        "MNIST digits at random positions of a 40×40 field, generated on the fly",
        load_expanded,
        classes=tuple("0123456789"),
        image_shape=(1, FIELD, FIELD),
        sizes=(60_000, 10_000),
        preset="expanded",
        options=Shift,
        measures={"shift": SHIFTS},
        made_of="mnist",
        digit_side=28,
    )
)
register(
    DatasetInfo(
        "affine-mnist",
        "expanded-mnist, tested on a re-creation of affNIST with 320,000 images; affine-mnist:per_digit=2",
        load_affine,
        classes=tuple("0123456789"),
        image_shape=(1, FIELD, FIELD),
        options=Options,
        preset="expanded",
        measures={
            "rotation": tuple(float(k) for k in range(-20, 21, 4)),  # degrees
            "shear": tuple(k / 25 for k in range(-5, 6)),
            "scale_across": tuple(k / 25 for k in range(20, 31)),
            "scale_down": tuple(k / 25 for k in range(20, 31)),
            "shift": SHIFTS,
        },
        made_of="mnist",
        digit_side=28,
    )
)
