"""Scenes and predictions: a line of tiles per kind of scene, the prediction below every tile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from torch import Tensor

from capsnet.report.figures.names import short_names
from capsnet.report.figures.style import MUTED, SMALL, TINY, VERMILLION, WIDTH, heading, sheet, styled
from capsnet.report.figures.tiles import as_pixels, put, snap, tile_size

LEFT, TOP, GAP, BELOW = 76.0, 46.0, 6.0, 20.0  # points: for the names of the lines, the title, between, for answers


@styled
def answers(title: str, classes: Sequence[str], lines: Mapping[str, tuple[Tensor, Tensor, Tensor]]) -> Figure:
    """Lines of images (n, c, h, w) with their true and predicted classes, both bool (n, j).

    The predicted classes are below each tile, in vermillion if they are wrong.
    """
    most = max(len(images) for images, _, _ in lines.values())
    room = (WIDTH - LEFT - 14 + GAP) / most - GAP
    width, height = tile_size(next(iter(lines.values()))[0].shape, room)
    step = height + GAP + BELOW
    figure, axes = sheet(WIDTH, TOP + step * len(lines) + 4)
    heading(axes, title, "Predicted classes below each scene; errors in orange.")
    names = short_names(classes)
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
    """Two words per line, to fit below a tile."""
    return [" ".join(words[k : k + 2]) for k in range(0, len(words), 2)]
