"""Results of experiments: line plots, grouped bars and intervals from plain numbers.

Blue is the capsule network and vermillion the convolutional one, in every comparison.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, NullLocator

from capsnet.evaluate import mean_and_std
from capsnet.report.figures.style import (
    BLUE,
    GREEN,
    INK,
    MUTED,
    SMALL,
    TINY,
    VERMILLION,
    decimal,
    rows_of_panels,
    styled,
)

PALETTE = (BLUE, VERMILLION, GREEN, "#e69f00", "#cc79a7", "#56b4e9")  # Okabe and Ito's
FAR = 5.0  # times the median extent: from there on, an interval is an arrow


class Line(NamedTuple):
    """One curve. Points without a value (None or NaN) are gaps."""

    label: str
    x: Sequence[float]
    y: Sequence[float | None]
    colour: str
    dashed: bool = False
    dots: bool = False  # separate points
    thin: bool = False  # thinner and lighter, for many curves
    bare: bool = False  # without markers


class Panel(NamedTuple):
    """One pair of axes with its curves."""

    title: str
    across: str
    up: str
    lines: Sequence[Line]
    log_x: bool = False
    log_y: bool = False
    from_zero: bool = False
    ticks: Sequence[float] = ()


@styled
def lines(title: str, note: str, panels: Sequence[Panel], height: float = 230, share: bool = False) -> Figure:
    """A row of panels with curves; each curve is named once. `share`: one vertical range for all."""
    figure, row = rows_of_panels(len(panels), height, title, note)
    named: set[str] = set()
    for axes, panel in zip(row, panels, strict=True):
        for line in panel.lines:
            _curve(axes, line, "" if line.label in named else line.label)
            named.add(line.label)
        _finish(axes, panel)
    if share:
        ends = [axes.get_ylim() for axes in row]
        for axes in row:
            axes.set_ylim(min(low for low, _ in ends), max(high for _, high in ends))
    return figure


def _curve(axes: Axes, line: Line, label: str) -> None:
    y = [math.nan if value is None else value for value in line.y]
    marker = "o" if line.dots or (len(y) <= 24 and not line.thin and not line.bare) else None
    axes.plot(line.x, y, color=line.colour, label=label or None, marker=marker, markersize=3.5,
              linestyle="none" if line.dots else (0, (4, 2)) if line.dashed else "-",
              linewidth=0.7 if line.thin else None, alpha=0.6 if line.thin else None)  # fmt: skip


def _finish(axes: Axes, panel: Panel) -> None:
    axes.set(title=panel.title, xlabel=panel.across, ylabel=panel.up)
    if panel.log_x:
        _logarithmic(axes, "x", [x for line in panel.lines for x in line.x])
    if panel.log_y:
        _logarithmic(axes, "y", [y for line in panel.lines for y in line.y if y is not None])
    if panel.ticks:
        axes.xaxis.set_major_locator(FixedLocator(list(panel.ticks)))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else decimal(value))
        axes.tick_params("x", labelsize=TINY)
    if panel.from_zero:
        axes.set_ylim(0, 1.12 * axes.get_ylim()[1])
    if axes.get_legend_handles_labels()[1]:
        axes.legend(loc="best", handlelength=1.4, borderaxespad=0.2)


def _logarithmic(axes: Axes, letter: str, numbers: Sequence[float]) -> None:
    """A logarithmic axis, if the range of the numbers is large enough."""
    known = [x for x in numbers if math.isfinite(x)]
    if not known or min(known) <= 0 or max(known) < 3 * min(known):
        return
    axes.set(**{f"{letter}scale": "log"})
    axis = axes.xaxis if letter == "x" else axes.yaxis
    span = max(known) / min(known)
    axis.set_major_locator(LogLocator(subs=(1, 2, 3, 5, 7) if span < 20 else (1, 2, 5) if span < 100 else (1,)))
    axis.set_major_formatter(decimal)
    axis.set_minor_locator(NullLocator())


class Bar(NamedTuple):
    """One bar, its deviation over seeds, and a mark for the paper's figure."""

    label: str
    value: float | None
    colour: str
    std: float = 0.0
    mark: float | None = None

    @classmethod
    def over_seeds(cls, label: str, values: Sequence[float], colour: str, mark: float | None = None) -> Bar:
        """The mean of several seeds with their standard deviation; empty if no seed has a value."""
        mean, std = mean_and_std(values) if values else (None, 0.0)
        return cls(label, mean, colour, std, mark)


@styled
def bars(
    title: str, note: str, panels: Mapping[str, Sequence[Bar]], unit: str = "%", decimals: int = 2, height: float = 0
) -> Figure:
    """Horizontal bars, a panel per group; a tick across a bar marks the paper's figure."""
    most = max(len(group) for group in panels.values())
    alike = len({tuple(bar.label for bar in group) for group in panels.values()}) == 1
    figure, drawn = rows_of_panels(len(panels), height or 90 + 26 * most, title, note)
    for k, (axes, (name, group)) in enumerate(zip(drawn, panels.items(), strict=True)):
        _lying(axes, group, unit, decimals)
        axes.set_title(name)
        if alike and k % 3:
            axes.set_yticklabels([])
    return figure


def _lying(axes: Axes, group: Sequence[Bar], unit: str, decimals: int) -> None:
    places = np.arange(len(group))[::-1]
    reach = max([v for bar in group for v in ((bar.value or 0) + bar.std, bar.mark or 0)] or [1.0]) or 1.0
    for place, bar in zip(places, group, strict=True):
        if bar.value is not None:
            axes.barh(place, bar.value, 0.56, color=bar.colour, alpha=0.85, linewidth=0)
            if bar.std:
                ends = [bar.value - bar.std, bar.value + bar.std]
                axes.plot(ends, [place] * 2, color=INK, linewidth=1)
            end = max(bar.value + bar.std, bar.mark or 0) + 0.02 * reach
            axes.text(end, place, f"{bar.value:.{decimals}f}", size=SMALL, color=INK, va="center")
        if bar.mark is not None:
            axes.plot([bar.mark] * 2, [place - 0.38, place + 0.38], color=INK, linewidth=1.6)
    axes.set_yticks(places, [bar.label for bar in group])
    axes.tick_params("y", labelcolor=INK)
    axes.set(xlim=(min(0, *[bar.value or 0 for bar in group], 0), 1.22 * reach), xlabel=unit)
    axes.grid(False, axis="y")
    axes.spines["left"].set_visible(False)
    axes.yaxis.label.set_color(MUTED)


class Interval(NamedTuple):
    """The values of several seeds, and half the width of the interval of their mean (infinite: not known)."""

    label: str
    values: Sequence[float]
    half: float

    @property
    def mean(self) -> float:
        return sum(self.values) / len(self.values)

    @property
    def colour(self) -> str:
        """Blue if the whole interval is below zero, vermillion if it is above, grey if it includes zero."""
        if abs(self.mean) <= self.half:
            return MUTED
        return BLUE if self.mean < 0 else VERMILLION


@styled
def intervals(title: str, note: str, panels: Mapping[str, Sequence[Interval]], across: str) -> Figure:
    """Means with intervals around a line at zero, a dot per seed; a line has the same label in all panels."""
    labels = list(dict.fromkeys(each.label for group in panels.values() for each in group))
    figure, drawn = rows_of_panels(len(panels), 110 + 24 * len(labels), title, note)
    for k, (axes, (name, group)) in enumerate(zip(drawn, panels.items(), strict=True)):
        _around_zero(axes, {each.label: each for each in group}, labels)
        axes.set(title=name, xlabel=across)
        axes.set_yticks(range(len(labels)), labels[::-1] if k % 3 == 0 else [""] * len(labels))
        axes.tick_params("y", labelcolor=INK)
    return figure


def _around_zero(axes: Axes, group: Mapping[str, Interval], labels: Sequence[str]) -> None:
    """The intervals of a panel. One that is far larger than most is an arrow at the edge with its mean in figures."""
    axes.axvline(0, color=INK, linewidth=1)
    reach = FAR * statistics.median([_extent(each) for each in group.values()])
    shown = [each for each in group.values() if _extent(each) <= reach]
    low, high = (pick([0.0, *(v for each in shown for v in each.values)]) for pick in (min, max))
    space = 0.12 * (high - low or 1.0)
    low, high = low - space, high + space
    for place, label in enumerate(labels[::-1]):
        if (each := group.get(label)) is None:
            continue
        if each not in shown:
            _arrow(axes, each, place, (low, high))
            continue
        axes.plot(each.values, [place] * len(each.values), "o", color=each.colour, markersize=3, alpha=0.35)
        axes.plot(each.mean, place, "o", color=each.colour, markersize=6)
        if math.isfinite(each.half):
            ends = [max(low, each.mean - each.half), min(high, each.mean + each.half)]
            axes.plot(ends, [place] * 2, color=each.colour, linewidth=1.8)
    axes.set(xlim=(low, high), ylim=(-0.6, len(labels) - 0.4))
    axes.grid(False, axis="y")
    axes.spines["left"].set_visible(False)


def _extent(each: Interval) -> float:
    return max(abs(value) for value in each.values)


def _arrow(axes: Axes, each: Interval, place: int, limits: tuple[float, float]) -> None:
    """An arrow from zero to the edge of the panel, with the mean above it."""
    end = limits[each.mean > 0]
    axes.annotate("", (end, place), (0, place), arrowprops={"arrowstyle": "->", "color": each.colour, "linewidth": 1.8})
    side = "right" if each.mean > 0 else "left"
    axes.text(end, place + 0.16, f"{each.mean:+.1f}", size=SMALL, color=each.colour, ha=side, va="bottom")


def shades(n: int) -> list[str]:
    """n blues from light to dark, for ordered categories."""
    light, dark = np.array([0.62, 0.80, 0.92]), np.array([0.0, 0.25, 0.42])
    steps = np.linspace(0, 1, max(1, n))[:, None]
    return ["#" + "".join(f"{round(255 * c):02x}" for c in colour) for colour in light + (dark - light) * steps]
