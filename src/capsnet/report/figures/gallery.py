"""A gallery: lines of images, each line with its name on the left and a caption below every image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.figure import Figure
from torch import Tensor

from capsnet.report.figures.style import MUTED, SMALL, TINY, WIDTH, heading, sheet, styled
from capsnet.report.figures.tiles import as_pixels, put, snap, tile_size

LEFT, TOP, GAP = 76.0, 46.0, 3.0  # points: for the names of the lines, the title, and between images


class Caption(NamedTuple):
    """Words below an image; each line of them takes ten points."""

    words: str
    colour: str = MUTED


@styled
def gallery(title: str, note: str, lines: Mapping[str, tuple[Tensor, Sequence[Caption]]]) -> Figure:
    """Lines of images (n, c, h, w), with a caption for each image or none at all."""
    most = max(len(images) for images, _ in lines.values())
    room = (WIDTH - LEFT - 14 + GAP) / most - GAP
    width, height = tile_size(next(iter(lines.values()))[0].shape, room)
    below = [10 * max((1 + c.words.count("\n") for c in captions), default=0) for _, captions in lines.values()]
    steps = [height + GAP + each for each in below]
    figure, axes = sheet(WIDTH, TOP + sum(steps) + 4)
    heading(axes, title, note)
    for row, (name, (images, captions)) in enumerate(lines.items()):
        top = TOP + sum(steps[:row])
        axes.text(14, top + height / 2, name, size=SMALL, va="center")
        for column, tile in enumerate(as_pixels(images)):
            left = snap(LEFT + column * (room + GAP))
            put(axes, tile, left, snap(top), width, height)
            if captions:
                words, colour = captions[column]
                axes.text(
                    left + width / 2, top + height + 1, words, size=TINY, ha="center", va="top", color=colour,
                    linespacing=1.05,
                )  # fmt: skip
    return figure
