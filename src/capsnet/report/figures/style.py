"""The style of all figures: palette, font sizes, empty pages with a title, and files.

The style is set while a figure is drawn and restored afterwards, so draw in one thread at a time.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from capsnet.errors import UserError
from capsnet.files import write_bytes

INK, MUTED, FAINT, PAPER = "#1f2733", "#66707d", "#dfe1e3", "#fbfaf8"
BLUE, VERMILLION, GREEN = "#0072b2", "#d55e00", "#009e73"  # Okabe and Ito's

TITLE, TEXT, SMALL, TINY = 11.0, 9.0, 8.0, 7.0  # points
HEADING = 42.0  # points: the title and the note above the panels
WIDTH = 518.0  # points: the same for all figures, so that their type has one size on a page
PER_POINT = 3  # pixels per point in a PNG
STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": TEXT,
    "text.color": INK,
    "text.parse_math": False,  # a class may be named "$5"
    "figure.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.labelsize": SMALL,
    "axes.titlesize": TEXT,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.formatter.use_mathtext": False,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
    "legend.frameon": False,
    "legend.fontsize": SMALL,
    "image.cmap": "gray",
    "svg.hashsalt": "capsnet",  # the same picture gives the same bytes
}

P = ParamSpec("P")
R = TypeVar("R")


def styled(draw: Callable[P, R]) -> Callable[P, R]:
    """Run a function in the style of the package, independent of the user's matplotlibrc."""

    @functools.wraps(draw)
    def in_style(*args: P.args, **kwargs: P.kwargs) -> R:
        with matplotlib.style.context(STYLE, after_reset=True):
            return draw(*args, **kwargs)

    return in_style


@styled
def render(figure: Figure, kind: str = "png", per_point: int = PER_POINT) -> bytes:
    """A picture as the bytes of a PNG or SVG file; the same picture gives the same bytes."""
    nothing = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}
    if kind not in nothing:
        raise UserError(f"a picture can be written as .png or .svg, not as '.{kind}': change the suffix of the file.")
    content = io.BytesIO()
    figure.savefig(content, format=kind, dpi=72 * per_point, metadata=nothing[kind])
    return content.getvalue()


def save(figure: Figure, path: str | Path) -> Path:
    """Write a picture atomically, as PNG or SVG by the suffix of its path."""
    path = Path(path)
    write_bytes(path, render(figure, path.suffix.lstrip(".").lower()))
    return path


def sheet(width: float, height: float) -> tuple[Figure, Axes]:
    """An empty figure for tiles and text, measured in points from its upper left corner."""
    figure = Figure(figsize=(width / 72, height / 72))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0), autoscale_on=False)
    axes.axis("off")
    return figure, axes


def heading(axes: Axes, title: str, note: str) -> None:
    """A sheet's title, and a sentence below it."""
    axes.text(14, 16, title, size=TITLE, weight="bold", va="center")
    axes.text(14, 32, note, size=SMALL, color=MUTED, va="center")


def row_of_panels(n: int, height: float, title: str, note: str) -> tuple[Figure, list[Axes]]:
    """A row of n axes under a title."""
    return rows_of_panels(n, height, title, note, across=n)


def rows_of_panels(n: int, height: float, title: str, note: str, across: int = 3) -> tuple[Figure, list[Axes]]:
    """n axes under a title, at most `across` in a row and rows of one length if possible.

    `height` is that of a picture with one row.
    """
    rows = -(-n // min(n, across))
    across = -(-n // rows)
    height += (rows - 1) * (height - HEADING)
    figure = Figure(figsize=(WIDTH / 72, height / 72), layout="constrained")
    figure.get_layout_engine().set(w_pad=9 / 72, h_pad=6 / 72, wspace=0.02, rect=(0, 0, 1, 1 - HEADING / height))  # type: ignore[union-attr, call-arg]
    figure.text(14 / WIDTH, 1 - 16 / height, title, size=TITLE, weight="bold", va="center")
    figure.text(14 / WIDTH, 1 - 32 / height, note, size=SMALL, color=MUTED, va="center")
    panels = list(figure.subplots(rows, across, squeeze=False).flat)
    for unused in panels[n:]:
        unused.remove()
    return figure, panels[:n]


def decimal(value: float, _: float = 0) -> str:
    """A tick label: 0.002 instead of 2e-3."""
    return f"{value:.10f}".rstrip("0").rstrip(".")
