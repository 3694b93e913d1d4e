"""Overlapping digits, separated (Fig. 5): the input, and both reconstructions in two colours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from capsnet.errors import UserError
from capsnet.models.base import Model
from capsnet.report.figures.names import short_names
from capsnet.report.figures.style import BLUE, INK, MUTED, TEXT, TINY, VERMILLION, WIDTH, heading, sheet, styled
from capsnet.report.figures.tiles import as_pixels, in_colours, put, snap, tile_size

COLUMNS = 8
WORDS = 34.0  # points below a tile: label, prediction, reconstructed


class Told(NamedTuple):
    """One column: an image, the decoded classes, and a caption."""

    image: Tensor  # (c, h, w)
    painted: Tensor  # (2, c, h, w)
    there: tuple[int, int] | None
    named: tuple[int, int]
    decoded: tuple[int, int]


@torch.inference_mode()
def told_apart(model: Model, images: Tensor, true: Tensor | None = None) -> Figure:
    """Fig. 5 for any images: correct ones, wrong ones decoded both ways, and classes that are not present.

    images (n, c, h, w), uint8 or 0 to 1; true (n, 2), the two classes of each, if known.
    """
    seen = model.predict(images, top=2)
    if seen.reconstructions is None or seen.poses is None:
        raise UserError("this model has no decoder, so it cannot reconstruct images: choose a model with a decoder.")
    named = seen.labels.sort(1).values
    if true is None:
        return sheet_of(model, [("predicted", "", tell(model, images, seen.poses, None, named, named)[:COLUMNS])])
    there = true.sort(1).values
    right = (named == there).all(1)
    correct = images[right][:COLUMNS], seen.poses[right], there[right], named[right], named[right]
    groups = [("right", "", tell(model, *correct))]
    some = (~right).nonzero()[: COLUMNS // 2, 0]
    if len(some):
        chosen = images[some], seen.poses[some], there[some], named[some]
        both = zip(tell(model, *chosen, chosen[3]), tell(model, *chosen, chosen[2]), strict=True)
        groups.append(
            ("wrong", "decoded from the\nprediction, then\nfrom the label", [one for pair in both for one in pair])
        )
    first = images[right][:COLUMNS] if right.any() else images[:COLUMNS]
    rows = right.nonzero()[: len(first), 0] if right.any() else torch.arange(len(first))
    absent = stranger(there[rows], len(model.classes))
    strange = tell(model, first, seen.poses[rows], there[rows], named[rows], absent)
    groups.append(("absent", "one label replaced\nby one that is\nnot in the image", strange))
    return sheet_of(model, [group for group in groups if group[2]])


def stranger(there: Tensor, classes: int) -> Tensor:
    """The second label of each pair replaced by the next class that is not in the image: (n, 2) → (n, 2)."""
    other = (there[:, 1] + 1) % classes
    other = torch.where(other == there[:, 0], (other + 1) % classes, other)
    return torch.stack([there[:, 0], other], 1)


def tell(
    model: Model, images: Tensor, poses: Tensor, there: Tensor | None, named: Tensor, decoded: Tensor
) -> list[Told]:
    """Columns of the sheet: each image with two of its capsules decoded."""
    n = len(images)
    if not n:
        return []
    painted = model.reconstruct(poses[:n].to(model.device), decoded[:n].to(model.device))
    assert painted is not None
    return [
        Told(images[k], painted[k].cpu(), None if there is None else pair(there[k]), pair(named[k]), pair(decoded[k]))
        for k in range(n)
    ]


def pair(two: Tensor) -> tuple[int, int]:
    return int(two[0]), int(two[1])


@styled
def sheet_of(model: Model, groups: Sequence[tuple[str, str, Sequence[Told]]]) -> Figure:
    """Groups of columns, one below the other."""
    left = 92.0
    space = (WIDTH - left - 8) / COLUMNS
    width, height = tile_size(groups[0][2][0].image.shape, space - 5)
    lines = [(name, note, told[k : k + COLUMNS]) for name, note, told in groups for k in range(0, len(told), COLUMNS)]
    down = 2 * height + WORDS + 18
    figure, axes = sheet(WIDTH, snap(56 + len(lines) * down))
    heading(
        axes,
        "Overlapping digits, separated",
        "L: labels, P: predicted, R: decoded, the first in orange, the second in blue",
    )
    names = short_names(model.classes, 5)
    for row, (name, note, told) in enumerate(lines):
        top = 52 + row * down
        colour = {"wrong": VERMILLION, "absent": MUTED}.get(name, BLUE)
        axes.text(14, top + 10, name, size=TEXT, weight="bold", color=colour, va="center")
        axes.text(14, top + 22, note, size=TINY, color=MUTED, va="top", linespacing=1.4)
        for k, one in enumerate(told):
            _column(axes, one, names, snap(left + k * space), snap(top), width, height)
    return figure


def _column(axes: Axes, told: Told, names: Sequence[str], x: float, y: float, width: float, height: float) -> None:
    """Input, reconstruction, and three lines of text."""
    put(axes, as_pixels(told.image), x, y, width, height)
    put(axes, as_pixels(in_colours(told.painted)), x, snap(y + height + 3), width, height)
    wrong = told.there is not None and told.there != told.named
    said = [("R", told.decoded, MUTED), ("P", told.named, VERMILLION if wrong else MUTED)]
    said += [("L", told.there, INK)] if told.there is not None else []
    for k, (letter, two, colour) in enumerate(reversed(said)):
        words = f"{letter}: {', '.join(names[j] for j in two)}"
        axes.text(x + width / 2, y + 2 * height + 11 + 10 * k, words, size=TINY, color=colour, ha="center", va="center")
