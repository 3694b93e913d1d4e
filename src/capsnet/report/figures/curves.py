"""Training curves, from the records of metrics.jsonl."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from capsnet.report.figures.style import (
    BLUE,
    GREEN,
    INK,
    MUTED,
    PAPER,
    SMALL,
    VERMILLION,
    decimal,
    row_of_panels,
    styled,
)


@styled
def training_curves(history: Sequence[Mapping[str, Any]]) -> Figure:
    """The course of a training, from metrics.jsonl: loss, reconstruction error, validation error, learning rate.

    Quantities that were not recorded have no panel; steps that were repeated after a resume appear once.
    """
    steps = {r["step"]: r for r in history if r.get("kind") == "train"}
    epochs = {r["step"]: r for r in history if r.get("kind") == "epoch"}
    draws: list[Callable[[Axes], None]] = [lambda axes: _losses(axes, list(steps.values()))]
    if any(_series(steps.values(), "reconstruction")):
        draws.append(lambda axes: _line(axes, steps.values(), "reconstruction", "Reconstruction error"))
    if any(_series(epochs.values(), "validation_error_percent")):
        draws.append(lambda axes: _validation(axes, list(epochs.values())))
    draws.append(lambda axes: _learning_rate(axes, list(steps.values())))
    figure, panels = row_of_panels(len(draws), 200, "Training", _pace(list(steps.values())))
    for draw, axes in zip(draws, panels, strict=True):
        draw(axes)
        axes.set_xlabel("epoch")
    return figure


def _series(records: Iterable[Mapping[str, Any]], key: str) -> tuple[list[float], list[float]]:
    """Epochs and finite values of a key; both empty if it was never recorded."""
    points = [(float(r["epoch"]), float(r[key])) for r in records if r.get(key) is not None]
    points = [(x, y) for x, y in points if math.isfinite(y)]
    return [x for x, _ in points], [y for _, y in points]


def _smooth(values: Sequence[float]) -> list[float]:
    """A moving average over about a twentieth of the curve, unbiased at the start."""
    decay = 1 - 1 / max(1.0, len(values) / 20)
    smoothed, total, weight = [], 0.0, 0.0
    for value in values:
        total, weight = decay * total + value, decay * weight + 1
        smoothed.append(total / weight)
    return smoothed


def _line(
    axes: Axes, records: Iterable[Mapping[str, Any]], key: str, title: str, colour: str = BLUE, label: str = ""
) -> None:
    """One quantity: every record and its moving average."""
    x, y = _series(records, key)
    axes.plot(x, y, color=colour, alpha=0.25, linewidth=0.8)
    axes.plot(x, _smooth(y), color=colour, label=label, marker="o" if len(x) == 1 else None, markersize=4)
    axes.set_title(title)
    if y and min(y) > 0 and max(y) > 3 * min(y):
        axes.set_yscale("log")
        narrow = max(y) < 100 * min(y)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if narrow else (1,)))
        axes.yaxis.set_major_formatter(decimal)
        axes.yaxis.set_minor_locator(NullLocator())


def _losses(axes: Axes, train: Sequence[Mapping[str, Any]]) -> None:
    _line(axes, train, "loss", "Loss", INK, "total")
    if any(_series(train, "classification")):
        _line(axes, train, "classification", "Loss", VERMILLION, "classification")
        axes.legend(loc="upper right", handlelength=1.2, borderaxespad=0)


def _validation(axes: Axes, epochs: Sequence[Mapping[str, Any]]) -> None:
    x, y = _series(epochs, "validation_error_percent")
    best = y.index(min(y))
    axes.plot(x, y, color=GREEN, marker="o", markersize=3.5 if len(x) < 30 else 0)
    axes.plot(x[best], y[best], "o", color=GREEN, markersize=7, markerfacecolor=PAPER, markeredgewidth=1.6)
    axes.set(ylim=(0, None), title="Validation error", ylabel="%")
    axes.annotate(
        f"best {y[best]:.2f} %", (x[best], y[best]), (0, -12), textcoords="offset points", size=SMALL,
        ha="right" if x[best] > (x[0] + x[-1]) / 2 else "left", va="top", color=INK,
    )  # fmt: skip


def _learning_rate(axes: Axes, train: Sequence[Mapping[str, Any]]) -> None:
    x, y = _series(train, "lr")
    axes.plot(x, y, color=MUTED)
    axes.set(ylim=(0, 1.15 * max(y, default=1.0) or 1.0), title="Learning rate")
    axes.yaxis.set_major_formatter(decimal)


def _pace(train: Sequence[Mapping[str, Any]]) -> str:
    speeds = sorted(_series(train, "images_per_second")[1])
    if not train:
        return "nothing was recorded"
    pace = f", {speeds[len(speeds) // 2]:,.0f} images/s" if speeds else ""
    return f"{train[-1]['step']:,} steps{pace}"
