"""MultiMNIST (section 6): two overlapping digits of different classes, generated on the fly.

Both digits come from the same split of MNIST. Each is placed at the centre of a 36×36 canvas and shifted by up to 4
pixels in each direction; the two images are added and clipped. The first digit cycles through the split, so that n
consecutive pairs have each of the n digits once as their first; the second is a random digit of another class.

A pair is a function of (stream, index) alone: it is the same in any batch, in any order and after any interruption. An
epoch has as many pairs as there are training digits, and every epoch has new pairs. Validation and test pairs are
fixed: the test set has 100,000 pairs of test digits (the paper has 10 million), the same for every seed.

Overlap: the digits of MNIST were scaled into a box of 20×20 at the centre of their 28×28 pixels. The overlap of a pair
is the area that the boxes of its two digits share, divided by 400. Shifts of up to 4 pixels give 0.73 on average (the
paper says about 80 %) and never less than 0.36; `multimnist:canvas=56,shift=14` covers the whole range.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from capsnet.data import seeds
from capsnet.data.examples import Batch, MadeOf
from capsnet.data.registry import DatasetInfo, Request, register
from capsnet.data.splits import Splits
from capsnet.errors import UserError

BOX = 20  # side of the box into which the digits of MNIST were scaled
TEST_PAIRS = 100_000
SECOND, ALONE, SHIFTS = 0, 1, 2  # draws of a pair: second digit, whether there is one, four shifts


@dataclass(frozen=True)
class Layout:
    """How pairs are placed on their canvas; the fields are the options after `multimnist:`."""

    canvas: int = 36
    """Side of the image in pixels."""
    shift: int = 4
    """Largest shift from the centre, in each direction."""
    single: float = 0.0
    """Fraction of images with only one digit."""
    test: int = TEST_PAIRS
    """Number of test pairs: the first ones of the full test set."""

    def __post_init__(self) -> None:
        if not 28 <= self.canvas <= 512:
            raise UserError(f"multimnist:canvas={self.canvas} should be between 28 and 512 pixels.")
        if not 0 <= self.shift <= (self.canvas - 28) // 2:
            raise UserError(
                f"multimnist:shift={self.shift} should be between 0 and {(self.canvas - 28) // 2} to keep digits on "
                f"the canvas of {self.canvas} pixels: choose a smaller shift or a larger canvas."
            )
        if not 0 <= self.single <= 1:
            raise UserError(f"multimnist:single={self.single} should be a fraction of the images, between 0 and 1.")
        if not 1 <= self.test <= TEST_PAIRS:
            raise UserError(f"multimnist:test={self.test} should be between 1 and {TEST_PAIRS:,} pairs.")

    @property
    def sizes(self) -> tuple[int, int]:
        return 60_000, self.test

    @property
    def labels_per_image(self) -> int | None:
        return None if self.single else 2


@dataclass(frozen=True, eq=False)
class Pairs(MadeOf):
    """Overlapping pairs of single digits; see the top of this file."""

    layout: Layout
    stream: int
    pairs: int
    name: str = "multimnist"
    endless: bool = False

    def __post_init__(self) -> None:
        if self.pairs and len(self.class_counts.nonzero()) < 2:
            raise UserError(
                f"{self.name} needs digits of at least two classes to pair and has only {self.source.n} of one: "
                f"set --validation to 0 or to a larger number."
            )

    def __len__(self) -> int:
        return self.pairs

    @property
    def image_shape(self) -> tuple[int, int, int]:
        return self.source.image_shape[0], self.layout.canvas, self.layout.canvas

    @property
    def labels_per_image(self) -> int | None:
        return self.layout.labels_per_image

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
        """Indices of the two digits of each pair, int64 (b, 2), and whether each is present, bool (b, 2)."""
        first = index % max(1, self.source.n)
        c = self.source.labels[first]
        others = self.source.n - self.class_counts[c]
        place = seeds.integers(self.stream, index, SECOND, others)
        # digits are sorted by class; skip the class of the first digit
        place = place + self.class_counts[c] * (place >= self.class_starts[c])
        single = seeds.uniform(self.stream, index, ALONE) < self.layout.single
        return torch.stack([first, self.by_class[place]], 1), torch.stack([torch.ones_like(single), ~single], 1)

    def shifts(self, index: Tensor) -> Tensor:
        """Shift of each digit from the centre, (down, right): int64 (b, 2, 2)."""
        width = 2 * self.layout.shift + 1
        drawn = [seeds.integers(self.stream, index, SHIFTS + k, width) for k in range(4)]
        return torch.stack(drawn, 1).view(-1, 2, 2) - self.layout.shift

    def labels_of(self, chosen: Tensor, present: Tensor) -> Tensor:
        """bool (b, j): the classes of the digits that are present."""
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


def load(request: Request) -> Splits[Pairs]:
    """The splits of `multimnist:OPTIONS`, each made of the same split of MNIST."""
    digits, layout, name = request.load_base(), request.spec.options, request.spec.text
    train, validation, test = digits.train, digits.validation, digits.test
    return Splits(
        Pairs(train, layout, seeds.key(request.seed, "multimnist training"), train.n, name, endless=True),
        Pairs(validation, layout, seeds.key(0, "multimnist validation"), validation.n, name),
        Pairs(test, layout, seeds.key(0, "multimnist test"), layout.test, name),
    )


def lay(images: Tensor, shifts: Tensor, canvas: int) -> Tensor:
    """Place images (n, c, 28, 28) on black canvases (n, c, canvas, canvas), shifted (down, right) by shifts (n, 2).

    With an odd margin the centre is rounded up and left.
    """
    n, c, h, w = images.shape
    high, wide = canvas - h, canvas - w
    padded = F.pad(images, (wide, wide, high, high))
    # a view of every window of canvas × canvas that contains the whole image; each shift selects one
    s = padded.stride()
    windows = padded.as_strided((n, high + 1, wide + 1, c, canvas, canvas), (s[0], s[2], s[3], s[1], s[2], s[3]))
    down, right = shifts[:, 0] + high // 2, shifts[:, 1] + wide // 2
    return windows[torch.arange(n, device=images.device), high - down, wide - right]


def overlap(shifts: Tensor) -> Tensor:
    """Shared area of the boxes of two digits, divided by the area of one: (b, 2, 2) → (b,).

    >>> overlap(torch.tensor([[[0, 0], [0, 0]], [[4, 4], [-4, -4]], [[0, 0], [0, 10]]]))
    tensor([1.0000, 0.3600, 0.5000])
    """
    apart = (shifts[:, 0] - shifts[:, 1]).abs()
    return (BOX - apart).clamp(min=0).prod(1).float() / BOX**2


register(
    DatasetInfo(
        "multimnist",
        "pairs of overlapping MNIST digits, 36×36, generated on the fly; multimnist:canvas=56,shift=14,single=0.3",
        load,
        classes=tuple("0123456789"),
        image_shape=(1, 36, 36),
        options=Layout,
        preset="multimnist",
        measures={"overlap": tuple(k / 20 for k in range(21))},
        made_of="mnist",
        digit_side=28,
    )
)
