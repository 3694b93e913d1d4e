"""MultiMNIST (section 6): two overlapping digits of different classes, made as they are needed.

Both digits come from the same part of MNIST. Each lies in the middle of a 36×36 canvas and is then shifted by up to 4
pixels in each direction; the two are added and clipped. The first digit goes round through all of them, so that n
pairs in a row have each of the n digits once as their first; the second is any digit of another class.

A pair is a function of (stream, index) and nothing else: it comes out the same in any batch, in any order and after
any interruption. An epoch is as many pairs as there are training digits, and the next one goes on from there, so that
training sees new pairs all the time (by chance two digits may meet again, seldom in the same places). Validation and
test pairs are fixed; the test set is 100,000 pairs of test digits (the paper has 10 million), the same for every seed.

Overlap: MNIST's digits were scaled into a box of 20×20 in the middle of their 28×28. That box moves with its digit;
the overlap of a pair is the area that the two boxes have in common, over 400. Shifts of up to 4 give 0.73 on average
(the paper says about 80 %) and never less than 0.36, hence `multimnist:canvas=56,shift=14` for the whole range.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from capsnet.data import options, seeds
from capsnet.data.datasets import Dataset, MadeOf, Splits
from capsnet.data.examples import Batch
from capsnet.errors import UserError

BOX = 20  # side of the box that MNIST's digits were scaled into
TEST_PAIRS = 100_000
SECOND, ALONE, SHIFTS = 0, 1, 2  # the draws of a pair: its second digit, whether there is one, four shifts


@dataclass(frozen=True)
class Layout:
    """How a pair lies on its canvas; the fields are the options after `multimnist:`."""

    canvas: int = 36
    """Side of the image in pixels."""
    shift: int = 4
    """Largest shift from the middle, in each direction."""
    single: float = 0.0
    """Share of images with one digit only."""
    test: int = TEST_PAIRS
    """How many pairs the test set has: the first so many of it."""

    def __post_init__(self) -> None:
        if not 28 <= self.canvas <= 512:
            raise UserError(f"multimnist:canvas={self.canvas} should be between 28 and 512 pixels.")
        if not 0 <= self.shift <= (self.canvas - 28) // 2:
            raise UserError(
                f"multimnist:shift={self.shift} should be between 0 and {(self.canvas - 28) // 2}, lest a digit leave "
                f"the canvas of {self.canvas} px: choose a smaller shift or a larger canvas."
            )
        if not 0 <= self.single <= 1:
            raise UserError(f"multimnist:single={self.single} is a share of the images, from 0 to 1.")
        if not 1 <= self.test <= TEST_PAIRS:
            raise UserError(f"multimnist:test={self.test} should be between 1 and {TEST_PAIRS:,} pairs.")


@dataclass(frozen=True, eq=False)
class Pairs(MadeOf):
    """Overlapping pairs out of single digits; see the top of this file."""

    layout: Layout
    stream: int
    pairs: int
    name: str = "multimnist"
    endless: bool = False

    def __post_init__(self) -> None:
        if self.pairs and len(self.class_counts.nonzero()) < 2:
            raise UserError(
                f"{self.name} needs digits of at least two classes to pair and has {self.source.n} digits of one here: "
                f"hold back more (or no) images for validation."
            )

    def __len__(self) -> int:
        return self.pairs

    @property
    def image_shape(self) -> tuple[int, int, int]:
        return self.source.image_shape[0], self.layout.canvas, self.layout.canvas

    @property
    def labels_per_image(self) -> int | None:
        return None if self.layout.single else 2

    @property
    def targets(self) -> Tensor:
        return self.labels_of(*self.choose(self.numbers())).float()

    def gather(self, index: Tensor) -> Batch:
        index = index.to(self.device)
        chosen, present = self.choose(index)
        shifts = self.shifts(index)
        parts = lay(self.source.images[chosen.flatten()], shifts.flatten(0, 1), self.layout.canvas)
        parts = parts.view(len(index), 2, *self.image_shape).float().div_(255)
        if self.layout.single:
            parts = parts * present[:, :, None, None, None]
        labels = self.labels_of(chosen, present)
        images = (parts[:, 0] + parts[:, 1]).clamp_(max=1)
        return Batch(
            images, labels.float(), labels, index, parts, self.source.labels[chosen], present,
            {"overlap": overlap(shifts).where(present.all(1), torch.nan)},
        )  # fmt: skip

    def choose(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Which two digits of the source each pair has, int64 (b, 2), and whether each is there, bool (b, 2)."""
        first = index % max(1, self.source.n)
        c = self.source.labels[first]
        others = self.source.n - self.class_counts[c]
        place = seeds.integers(self.stream, index, SECOND, others)
        # digits in the order of their classes: the first one's own class is stepped over
        place = place + self.class_counts[c] * (place >= self.class_starts[c])
        single = seeds.uniform(self.stream, index, ALONE) < self.layout.single
        return torch.stack([first, self.by_class[place]], 1), torch.stack([torch.ones_like(single), ~single], 1)

    def shifts(self, index: Tensor) -> Tensor:
        """How far each digit lies (down, right) of the middle: int64 (b, 2, 2)."""
        width = 2 * self.layout.shift + 1
        drawn = [seeds.integers(self.stream, index, SHIFTS + k, width) for k in range(4)]
        return torch.stack(drawn, 1).view(-1, 2, 2) - self.layout.shift

    def labels_of(self, chosen: Tensor, present: Tensor) -> Tensor:
        """bool (b, j): the classes of the digits that are there."""
        labels = torch.zeros(len(chosen), len(self.classes), dtype=torch.bool, device=self.device)
        digits = self.source.labels[chosen]
        labels.scatter_(1, digits[:, 1:], present[:, 1:])
        return labels.scatter_(1, digits[:, :1], True)

    @cached_property
    def class_counts(self) -> Tensor:
        return torch.bincount(self.source.labels, minlength=len(self.classes))

    @cached_property
    def class_starts(self) -> Tensor:
        return self.class_counts.cumsum(0) - self.class_counts

    @cached_property
    def by_class(self) -> Tensor:
        return self.source.labels.argsort(stable=True)


def load(name: str, digits: Splits[Dataset], seed: int) -> Splits[Pairs]:
    """The three parts of `multimnist:OPTIONS`, each out of the same part of MNIST."""
    layout = options.read(Layout, name)
    train, validation, test = digits.train, digits.validation, digits.test
    return Splits(
        Pairs(train, layout, seeds.key(seed, "multimnist training"), train.n, name, endless=True),
        Pairs(validation, layout, seeds.key(0, "multimnist validation"), validation.n, name),
        Pairs(test, layout, seeds.key(0, "multimnist test"), layout.test, name),
    )


def lay(images: Tensor, shifts: Tensor, canvas: int) -> Tensor:
    """Images (n, c, 28, 28) on black canvases (n, c, canvas, canvas), (down, right) of the middle by shifts (n, 2).

    The middle of an odd margin is rounded up and left.
    """
    n, c, h, w = images.shape
    high, wide = canvas - h, canvas - w
    padded = F.pad(images, (wide, wide, high, high))
    # every window of canvas × canvas that holds the whole image, as a view: laying is choosing one of them
    s = padded.stride()
    windows = padded.as_strided((n, high + 1, wide + 1, c, canvas, canvas), (s[0], s[2], s[3], s[1], s[2], s[3]))
    down, right = shifts[:, 0] + high // 2, shifts[:, 1] + wide // 2
    return windows[torch.arange(n, device=images.device), high - down, wide - right]


def overlap(shifts: Tensor) -> Tensor:
    """Shared area of the two digits' boxes over the area of one: (b, 2, 2) → (b,).

    >>> overlap(torch.tensor([[[0, 0], [0, 0]], [[4, 4], [-4, -4]], [[0, 0], [0, 10]]]))
    tensor([1.0000, 0.3600, 0.5000])
    """
    apart = (shifts[:, 0] - shifts[:, 1]).abs()
    return (BOX - apart).clamp(min=0).prod(1).float() / BOX**2
