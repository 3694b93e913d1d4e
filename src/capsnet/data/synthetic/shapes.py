"""Digits with shapes: an MNIST digit and the outline of a shape in one image, generated on the fly.

A square, a triangle or a disc, drawn with lines of 2 pixels in a box of 20×20, is placed with a digit on a 36×36
canvas; both are shifted by up to 4 pixels in each direction, and the two images are added and clipped. There are
thirteen classes: ten digits and three shapes, one of each kind in every image. As in `multimnist`, an image is a
function of (stream, index) alone, and the pixels of both objects are known.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from capsnet.data import seeds
from capsnet.data.examples import Batch, MadeOf
from capsnet.data.registry import DatasetInfo, Request, register
from capsnet.data.splits import Splits
from capsnet.data.synthetic.multimnist import TEST_PAIRS, lay
from capsnet.errors import UserError

CANVAS, SHIFT, FIELD = 36, 4, 28
SHAPES = ("square", "triangle", "disc")
WHICH, SHIFTS = 0, 1  # draws of an image: the shape, four shifts


@dataclass(frozen=True)
class ShapesOptions:
    """The options after `digits-and-shapes:`."""

    test: int = 10_000
    """Number of test images."""

    def __post_init__(self) -> None:
        if not 1 <= self.test <= TEST_PAIRS:
            raise UserError(f"digits-and-shapes:test={self.test} should be between 1 and {TEST_PAIRS:,} images.")

    @property
    def sizes(self) -> tuple[int, int]:
        return 60_000, self.test


@dataclass(frozen=True, eq=False)
class DigitsAndShapes(MadeOf):
    """A digit and a shape in every image; see the top of this file."""

    stream: int
    images: int
    name: str = "digits-and-shapes"
    endless: bool = False

    @property
    def classes(self) -> tuple[str, ...]:  # type: ignore[override]
        return (*self.source.classes, *SHAPES)

    def __len__(self) -> int:
        return self.images

    @property
    def image_shape(self) -> tuple[int, int, int]:
        return 1, CANVAS, CANVAS

    @property
    def labels_per_image(self) -> int | None:
        return 2

    @property
    def targets(self) -> Tensor:
        return self.labels_of(self.objects(self.numbers())).float()

    def gather(self, index: Tensor) -> Batch:
        index = index.to(self.device)
        objects = self.objects(index)
        digits = self.source.images[index % max(1, self.source.n)]
        drawn = outlines().to(self.device)[objects[:, 1] - len(self.source.classes)]
        both = torch.stack([digits, drawn], 1).flatten(0, 1)
        parts = lay(both, self.shifts(index).flatten(0, 1), CANVAS)
        parts = parts.view(len(index), 2, *self.image_shape).float().div_(255)
        images, labels = parts.sum(1).clamp_(max=1), self.labels_of(objects)
        return Batch(images, labels.float(), labels, index, parts, objects, torch.ones_like(objects, dtype=torch.bool))

    def objects(self, index: Tensor) -> Tensor:
        """Classes of the digit and the shape of each image: int64 (b, 2)."""
        shape = seeds.integers(self.stream, index, WHICH, len(SHAPES))
        return torch.stack([self.source.labels[index % max(1, self.source.n)], len(self.source.classes) + shape], 1)

    def shifts(self, index: Tensor) -> Tensor:
        """Shift of each object from the centre, (down, right): int64 (b, 2, 2)."""
        drawn = [seeds.integers(self.stream, index, SHIFTS + k, 2 * SHIFT + 1) for k in range(4)]
        return torch.stack(drawn, 1).view(-1, 2, 2) - SHIFT

    def labels_of(self, objects: Tensor) -> Tensor:
        """bool (b, j): the two classes that are present."""
        labels = torch.zeros(len(objects), len(self.classes), dtype=torch.bool, device=self.device)
        return labels.scatter_(1, objects, True)


def outlines() -> Tensor:
    """The shapes at the centre of a digit's field: uint8 (3, 1, 28, 28), lines of 2 pixels.

    >>> outlines().shape, int(outlines().max())
    (torch.Size([3, 1, 28, 28]), 255)
    """
    place = torch.arange(FIELD) - (FIELD - 1) / 2
    y, x = torch.meshgrid(place, place, indexing="ij")
    square = torch.maximum(x.abs(), y.abs()) - 9  # distances to the middle of the lines
    triangle = torch.maximum((2 * x.abs() - y - 9.5) / 5**0.5, y - 8.5) + 1
    disc = torch.sqrt(x.square() + y.square()) - 9
    edges = torch.stack([square, triangle, disc])
    return (edges.abs() <= 1).to(torch.uint8)[:, None] * 255


def load(request: Request) -> Splits[DigitsAndShapes]:
    """The splits, each made of the same split of MNIST."""
    digits, options, name = request.load_base(), request.spec.options, request.spec.text
    train, validation, test = digits.train, digits.validation, digits.test
    return Splits(
        DigitsAndShapes(train, seeds.key(request.seed, "shapes training"), train.n, name, endless=True),
        DigitsAndShapes(validation, seeds.key(0, "shapes validation"), validation.n, name),
        DigitsAndShapes(test, seeds.key(0, "shapes test"), options.test, name),
    )


register(
    DatasetInfo(
        "digits-and-shapes",
        "an MNIST digit and the outline of a square, triangle or disc, 36×36, generated on the fly",
        load,
        classes=(*"0123456789", *SHAPES),
        image_shape=(1, CANVAS, CANVAS),
        labels_per_image=2,
        options=ShapesOptions,
        preset="multimnist",
        made_of="mnist",
    )
)
