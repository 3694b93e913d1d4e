"""Scenes and what a network says to them: a line of tiles for each kind, the answer below every tile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from torch import Tensor

from capsnet.figures.names import shown_all
from capsnet.figures.style import MUTED, SMALL, TINY, VERMILLION, WIDTH, heading, sheet, styled
from capsnet.figures.tiles import as_pixels, put, snap, tile_size

LEFT, TOP, GAP, BELOW = 76.0, 46.0, 6.0, 20.0  # points: for the names of the lines, the title, between, for answers


@styled
def answers(title: str, classes: Sequence[str], lines: Mapping[str, tuple[Tensor, Tensor, Tensor]]) -> Figure:
    """Lines of images (n, c, h, w) with the classes that are there and those that are named, both bool (n, j).

    Below each tile stands what is named, in vermillion where that is not exactly what is there.
    """
    most = max(len(images) for images, _, _ in lines.values())
    room = (WIDTH - LEFT - 14 + GAP) / most - GAP
    width, height = tile_size(next(iter(lines.values()))[0].shape, room)
    step = height + GAP + BELOW
    figure, axes = sheet(WIDTH, TOP + step * len(lines) + 4)
    heading(axes, title, "Below each scene the classes that it names; in vermillion where they are not exactly right.")
    names = shown_all(classes)
    for row, (kind, (images, there, named)) in enumerate(lines.items()):
        top = TOP + row * step
        axes.text(14, top + height / 2, kind, size=SMALL, va="center")
        for column, tile in enumerate(as_pixels(images)):
            left = snap(LEFT + column * (room + GAP))
            put(axes, tile, left, snap(top), width, height)
            said = [name for name, yes in zip(names, named[column].tolist(), strict=True) if yes]
            right = bool((there[column] == named[column]).all())
            axes.text(
                left + width / 2, top + height + 2, "\n".join(_pairs(said)) or "nothing", size=TINY - 0.5, ha="center",
                va="top", color=MUTED if right else VERMILLION, linespacing=1.05,
            )  # fmt: skip
    return figure


def _pairs(words: Sequence[str]) -> list[str]:
    """Words two to a line, which is what fits below a tile."""
    return [" ".join(words[k : k + 2]) for k in range(0, len(words), 2)]
