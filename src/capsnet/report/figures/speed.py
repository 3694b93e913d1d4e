"""The numbers of `capsnet bench` as figures: the time of a training step by part, and how its cost grows.

Blue is the fast version, grey the one that it is compared with; in the bill each part of a step has its own colour.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Polygon, Rectangle
from matplotlib.ticker import LogLocator, NullLocator

from capsnet.errors import UserError
from capsnet.report.figures.style import (
    BLUE,
    FAINT,
    GREEN,
    INK,
    MUTED,
    PAPER,
    SMALL,
    TEXT,
    TINY,
    WIDTH,
    decimal,
    heading,
    row_of_panels,
    sheet,
    styled,
)

GREY = "#b9bfc6"
PARTS = {"convolutions": BLUE, "routing": "#e69f00", "decoder": GREEN, "Adam": "#cc79a7", "rest": GREY}
SIDES = {
    "public": "typical public code",
    "public-stopped": "typical public code",
    "plain": "plain version",
    "fast": "float32",
    "fast-bf16": "bfloat16",
}
LEFT, RIGHT, BAR = 110.0, 74.0, 26.0  # of the bill, in points: margins and the height of a bar


# --- How cost grows ------------------------------------------------------------------------------------------


@styled
def sweep(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Time of a training step against one quantity at a time, plain and fast, from `capsnet bench --sweep`.

    rows: quantity, value, and the seconds of both sides. Both axes are logarithmic and the vertical one is shared:
    a steeper line grows faster, and the same gap is the same ratio everywhere.
    """
    quantities = list(dict.fromkeys(row["quantity"] for row in rows))
    if not quantities:
        raise UserError("the sweep is empty: pass the output of `capsnet bench --sweep --json`.")
    note = "Seconds against one quantity; logarithmic axes. Numbers: speed-up at the largest value."
    figure, panels = row_of_panels(len(quantities), 210, "Cost of a training step", note)
    curves = [_points([row for row in rows if row["quantity"] == quantity]) for quantity in quantities]
    for quantity, points, axes in zip(quantities, curves, panels, strict=True):
        _two_sides(axes, points)
        axes.set_title(quantity)
    _share_seconds(panels, [seconds for points in curves for _, *both in points for seconds in both])
    _name_the_sides(panels[0], curves[0][len(curves[0]) // 2])
    return figure


Point = tuple[float, float, float]  # a quantity's value, and the seconds of plain and fast there


def _points(rows: Sequence[Mapping[str, Any]]) -> list[Point]:
    return sorted((float(row["value"]), row["seconds"]["plain"], row["seconds"]["fast"]) for row in rows)


def _two_sides(axes: Axes, points: Sequence[Point]) -> None:
    """Both versions against one quantity, with the gap between them and its size at the end."""
    x, plain, fast = zip(*points, strict=True)
    axes.set(xscale="log", yscale="log")
    axes.fill_between(x, fast, plain, color=BLUE, alpha=0.08, linewidth=0)
    axes.plot(x, plain, color=MUTED, marker="o", markersize=3.5)
    axes.plot(x, fast, color=BLUE, marker="o", markersize=3.5)
    _label(axes, f"{plain[-1] / fast[-1]:.1f}×", (x[-1], math.sqrt(plain[-1] * fast[-1])), (5, 0), BLUE, TINY)
    axes.set_xticks(x, [decimal(value) for value in x], size=TINY)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.margins(x=0.15)


def _label(
    axes: Axes, text: str, point: tuple[float, float], away: tuple[float, float], colour: str, size: float
) -> None:
    """A label to the left or right of a point."""
    axes.annotate(
        text, point, away, textcoords="offset points", size=size, weight="bold", color=colour,
        ha="right" if away[0] < 0 else "left", va="center",
    )  # fmt: skip


def _share_seconds(panels: Sequence[Axes], seconds: Sequence[float]) -> None:
    """One vertical scale for all panels, written at the first."""
    for axes in panels[1:]:
        axes.sharey(panels[0])
        axes.tick_params(labelleft=False)
    panels[0].set_ylim(min(seconds) / 1.3, 1.3 * max(seconds))
    panels[0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panels[0].yaxis.set_major_formatter(decimal)
    panels[0].yaxis.set_minor_locator(NullLocator())


def _name_the_sides(axes: Axes, point: Point) -> None:
    """Names of the lines, where rising lines leave room."""
    value, plain, fast = point
    _label(axes, "plain", (value, plain), (-5, 5), MUTED, SMALL)
    _label(axes, "fast", (value, fast), (5, -5), BLUE, SMALL)


# --- Where the time goes -------------------------------------------------------------------------------------


@styled
def step_bill(result: Mapping[str, Any]) -> Figure:
    """Time of a training step by part, from `capsnet bench --json`: plain, fast and bfloat16.

    A band connects a part with the same part in the bar below. Parts are timed separately: the remainder of the step is
    "rest", and if the parts add up to more than the step, the bar is longer than its total. Marks show the machine's
    limit for direct convolutions: the arithmetic of the equations at the speed of its fastest matrix product in the
    precision of the bar.
    """
    if "breakdown_ms" not in result:
        raise UserError("this benchmark has no breakdown: run `capsnet bench --json` without --quick.")
    medians = {side: float(taken["median"]) for side, taken in result["train_seconds"].items()}
    public = min((side for side in medians if side.startswith("public")), key=lambda side: medians[side])
    bills = {side: _bill(parts, medians[side]) for side, parts in result["breakdown_ms"].items()}
    ends = {public: medians[public]} | {side: sum(bill.values()) for side, bill in bills.items()}
    limits = {side: share * medians[side] for side, share in result.get("share_of_gemm_peak", {}).items()}
    scale = (WIDTH - LEFT - RIGHT) / max(*ends.values(), *(limits[side] for side in bills if side in limits))
    tops = {public: 56.0} | {side: 98.0 + 58.0 * k for k, side in enumerate(bills)}
    below = max(tops.values()) + BAR
    figure, axes = sheet(WIDTH, below + 70 + 16 * bool(limits))
    case = f"{result['case']}. " if "case" in result else ""
    heading(axes, "Time of a training step", f"{case}Below: {' → '.join(bills)}, each part timed separately.")
    for upper, lower in pairwise(bills):
        _bands(axes, bills[upper], bills[lower], (tops[upper] + BAR, tops[lower]), scale)
    _bar(axes, LEFT, tops[public], scale * medians[public], FAINT)
    for side, bill in bills.items():
        _stacked(axes, bill, tops[side], scale)
    for side, top in tops.items():
        mark = limits.get(side, 0.0) if side in bills else 0.0
        _words(axes, side, top, LEFT + scale * max(ends[side], mark), medians, medians[public])
        _limit(axes, LEFT + scale * mark, top)
    _price_list(axes, list(bills.values()), below + 22)
    if limits:
        note = "Black marks: the equations' arithmetic at the speed of the machine's fastest matrix product"
        axes.text(14, below + 72, f"{note}; algorithms with fewer products can be faster.", size=TINY, color=MUTED)
    return figure


def _limit(axes: Axes, x: float, top: float) -> None:
    """A mark above and below a bar, unless it would lie at its start."""
    for start in (top - 7, top + BAR + 1) if x > LEFT else ():
        axes.plot([x, x], [start, start + 6], color=INK, linewidth=1.6)


def _bill(milliseconds: Mapping[str, float], total: float) -> dict[str, float]:
    """Seconds of each part, the rest last."""
    parts = {name: milliseconds.get(name, 0.0) / 1e3 for name in PARTS}
    return {**parts, "rest": max(0.0, total - sum(parts.values()))}


def _starts(bill: Mapping[str, float]) -> dict[str, float]:
    """Where each part begins in its bar, in seconds."""
    return dict(zip(bill, accumulate(bill.values(), initial=0.0), strict=False))


def _bar(axes: Axes, left: float, top: float, width: float, colour: str) -> None:
    axes.add_patch(Rectangle((left, top), width, BAR, facecolor=colour, edgecolor=PAPER, linewidth=0.6))


def _stacked(axes: Axes, bill: Mapping[str, float], top: float, scale: float) -> None:
    """The parts of one version from left to right; wide parts contain their name."""
    for name, start in _starts(bill).items():
        left, width = LEFT + scale * start, scale * bill[name]
        _bar(axes, left, top, width, PARTS[name])
        if width > 0.7 * SMALL * len(name) + 6:
            ink = "white" if name in ("convolutions", "decoder") else INK
            axes.text(left + width / 2, top + BAR / 2, name, size=SMALL, color=ink, ha="center", va="center")


def _bands(
    axes: Axes, plain: Mapping[str, float], fast: Mapping[str, float], between: tuple[float, float], scale: float
) -> None:
    """From each part of one bar to the same part of the one below."""
    above, below = _starts(plain), _starts(fast)
    upper, lower = between
    for name, colour in PARTS.items():
        corners = [
            (LEFT + scale * above[name], upper),
            (LEFT + scale * (above[name] + plain[name]), upper),
            (LEFT + scale * (below[name] + fast[name]), lower),
            (LEFT + scale * below[name], lower),
        ]
        axes.add_patch(Polygon(corners, facecolor=colour, alpha=0.16, linewidth=0))


def _words(axes: Axes, side: str, top: float, end: float, seconds: Mapping[str, float], public: float) -> None:
    """The name of a bar on the left; its time and speed-up over public code on the right."""
    axes.text(14, top + 8, side, size=TEXT, weight="bold", va="center")
    axes.text(14, top + 20, SIDES[side], size=TINY, color=MUTED, va="center")
    alone = side.startswith("public")
    middle = top + (BAR / 2 if alone else 8)
    total = f"{seconds[side]:.2f} s" if seconds[side] >= 0.1 else f"{_milliseconds(seconds[side])} ms"
    axes.text(end + 7, middle, total, size=TEXT, weight="bold", va="center")
    if not alone:
        ratio = f"{public / seconds[side]:.1f}× as fast"
        axes.text(end + 7, top + 20, ratio, size=SMALL, color=MUTED if side == "plain" else BLUE, va="center")


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.{0 if seconds >= 0.01 else 1}f}"


def _price_list(axes: Axes, bills: Sequence[Mapping[str, float]], top: float) -> None:
    """Each part with its colour, milliseconds in each version, and the ratios to the first."""
    for k, (name, colour) in enumerate(PARTS.items()):
        left = 14 + k * (WIDTH - 28) / len(PARTS)
        axes.add_patch(Rectangle((left, top - 4), 8, 8, facecolor=colour, linewidth=0))
        axes.text(left + 13, top, name, size=SMALL, weight="bold", va="center")
        prices = " → ".join(_milliseconds(bill[name]) for bill in bills) + " ms"
        axes.text(left + 13, top + 14, prices, size=SMALL, color=MUTED, va="center")
        if name != "rest" and all(bill[name] > 0 for bill in bills):  # a ratio of two differences would say little
            ratios = [bills[0][name] / bill[name] for bill in bills[1:]]
            colour = INK if max(ratios) >= 1.5 else MUTED
            words = ", ".join(f"{ratio:.1f}×" for ratio in ratios) + " as fast"
            axes.text(left + 13, top + 28, words, size=SMALL, color=colour, va="center")
