"""Errors: the confusion matrix and the most confident mistakes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, PowerNorm, to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from capsnet.evaluate import Evaluation
from capsnet.report.figures.names import short_name, short_names
from capsnet.report.figures.style import (
    BLUE,
    FAINT,
    INK,
    MUTED,
    PAPER,
    SMALL,
    TEXT,
    TINY,
    VERMILLION,
    WIDTH,
    heading,
    sheet,
    styled,
)
from capsnet.report.figures.tiles import as_pixels, put, snap, tile_size

HEAT = LinearSegmentedColormap.from_list("errors", ["#fdebdc", "#f4a56a", VERMILLION, "#8c2d04"])
NUMBERED = 30  # classes: with more, the confusion matrix has colours and no numbers


def confusions(evaluation: Evaluation) -> Tensor:
    """(j + 1, j + 1) counts: missed classes (rows) against wrongly predicted ones; the diagonal counts correct ones.

    With one label per image this is the confusion matrix. With several, every missed class is counted with every
    wrongly predicted class; the last column counts missed classes without a wrong prediction, the last row the reverse.
    """
    there, named = evaluation.targets.bool(), evaluation.predicted.bool()
    missed, invented = (there & ~named).float(), (named & ~there).float()
    missed = torch.cat([missed, (missed.sum(1, keepdim=True) == 0).float()], 1)
    invented = torch.cat([invented, (invented.sum(1, keepdim=True) == 0).float()], 1)
    counts = missed.T @ invented
    counts[-1, -1] = 0  # correct examples
    return (counts + torch.diag(torch.cat([(there & named).sum(0), torch.zeros(1)]))).round().long()


@styled
def confusion_matrix(evaluation: Evaluation) -> Figure:
    """True classes in rows, predicted ones in columns; only errors are coloured."""
    counts, names = confusions(evaluation), short_names(evaluation.classes)
    if int(counts[-1].sum() + counts[:, -1].sum()):
        names.append("none")
    else:
        counts = counts[:-1, :-1]
    figure, axes, cell = _square(names, f"{evaluation.errors:,} of {evaluation.n:,} examples are wrong")
    axes.imshow(_error_colours(counts), extent=(0, len(names), len(names), 0), aspect="auto", interpolation="nearest")
    if len(names) <= NUMBERED:
        _numbers(axes, counts.tolist(), min(TEXT, 0.42 * cell))
    _error_rates(axes, evaluation, min(SMALL, 0.7 * cell))
    return figure


def _square(names: Sequence[str], note: str) -> tuple[Figure, Axes, float]:
    """Axes with one unit per class and class names on two sides; also returns the size of a cell in points."""
    j, longest = len(names), max(map(len, names))
    cell = min(34.0, (WIDTH - 160) / j)
    size = max(5.0, min(TEXT, 0.72 * cell))
    words = 0.62 * size * longest  # the widest name in points, about
    margin, right, rotated = 36 + words, 52.0, words > cell
    cell = min(34.0, (WIDTH - margin - right) / j)
    top, side = 72 + (words if rotated else size), j * cell
    height, left = top + side + 14, margin + (WIDTH - margin - right - side) / 2
    figure, page = sheet(WIDTH, height)
    heading(page, "Confusion matrix", note)
    axes = figure.add_axes((left / WIDTH, 14 / height, side / WIDTH, side / height))
    axes.set(xlim=(0, j), ylim=(j, 0), xlabel="predicted", ylabel="true")
    every = range(0, j, math.ceil(1.2 * size / cell))  # names that would overlap are left out
    places, shown_names = [k + 0.5 for k in every], [names[k] for k in every]
    axes.set_xticks(places, shown_names, size=size, color=INK, rotation=90 if rotated else 0)
    axes.set_yticks(places, shown_names, size=size, color=INK)
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    axes.spines[:].set_visible(False)
    axes.grid(False)
    return figure, axes, cell


def _error_colours(counts: Tensor) -> np.ndarray:
    """(j, j, 4): paper where nothing happened, grey on the diagonal, heat by the count elsewhere."""
    errors = counts.clone().fill_diagonal_(0).numpy()
    colours = HEAT(PowerNorm(0.5, 0, max(4, errors.max()))(errors))
    colours[errors == 0] = to_rgba("#f3f2ef")
    colours[np.eye(len(errors), dtype=bool)] = to_rgba("#e2e5e8")
    return colours


def _numbers(axes: Axes, counts: Sequence[Sequence[int]], size: float) -> None:
    most = max(max(n for k, n in enumerate(row) if k != r) if len(row) > 1 else 0 for r, row in enumerate(counts))
    for r, row in enumerate(counts):
        for k, n in enumerate(row):
            if n:
                colour = MUTED if k == r else ("white" if n > 0.35 * max(4, most) else INK)
                strong = "normal" if k == r else "bold"
                # four figures fit a cell a size smaller
                fit = size * min(1.0, 3.4 / len(str(n))) if k == r else size
                axes.text(k + 0.5, r + 0.5, str(n), size=fit, color=colour, weight=strong, ha="center", va="center")
    axes.set_xticks(range(len(counts) + 1), minor=True)
    axes.set_yticks(range(len(counts) + 1), minor=True)
    axes.grid(True, which="minor", color=PAPER, linewidth=1.5)
    axes.set_axisbelow(False)
    axes.tick_params(which="minor", length=0)


def _error_rates(axes: Axes, evaluation: Evaluation, size: float) -> None:
    """The error rate of each class, to the right of its row."""
    where, there = axes.get_xlim()[1] + 0.25, evaluation.targets.bool()
    if size < 4:
        return
    axes.text(where, -0.2, "missed", size=size, color=MUTED, va="bottom")
    missed, total = (there & ~evaluation.predicted.bool()).sum(0).tolist(), there.sum(0).tolist()
    for r, (few, all_of_them) in enumerate(zip(missed, total, strict=True)):
        share = f"{100 * few / all_of_them:.1f} %" if all_of_them else "–"
        axes.text(where, r + 0.5, share, size=size, color=INK if few else MUTED, va="center")


def confidence_of_mistakes(evaluation: Evaluation) -> Tensor:
    """(n,) confidence of each mistake; −1 for correct examples.

    The highest activation of a wrongly predicted class or, without one, 1 minus the lowest one of a missed class.
    """
    there, named = evaluation.targets.bool(), evaluation.predicted.bool()
    invented = torch.where(named & ~there, evaluation.activations, -1.0).amax(1)
    missed = torch.where(there & ~named, 1 - evaluation.activations, -1.0).amax(1)
    return torch.where(invented >= 0, invented, missed)


def worst_mistakes(evaluation: Evaluation, most: int) -> list[int]:
    """The wrong examples, the most confident first."""
    order = confidence_of_mistakes(evaluation).argsort(descending=True, stable=True)
    return [int(k) for k in order[: min(most, evaluation.errors)]]


@styled
def mistakes(
    images: Tensor | Mapping[int, Tensor],
    evaluation: Evaluation,
    most: int = 24,
    title: str = "The most confident mistakes",
) -> Figure:
    """The most confident mistakes: each image with the activations of its true and its predicted class.

    images (n, c, h, w), the evaluation's examples in its order; or the (c, h, w) of its worst mistakes by number.
    """
    worst, names, columns = worst_mistakes(evaluation, most), short_names(evaluation.classes, 10), 6
    space = (WIDTH - 28 + 14) / columns
    width, height = tile_size(images[worst[0]].shape if worst else (1, 1), space - 14)
    down = height + 46
    figure, axes = sheet(WIDTH, snap(56 + max(0.2, math.ceil(len(worst) / columns)) * down))
    count = f"{len(worst)} of {evaluation.errors:,}" if len(worst) < evaluation.errors else f"All {len(worst)}"
    note = f"{count}. Blue: activation of the true class; vermillion: of the predicted class."
    heading(axes, title, note if worst else f"None: all {evaluation.n:,} are correct.")
    for k, example in enumerate(worst):
        left, top = snap(14 + k % columns * space), snap(50 + k // columns * down)
        put(axes, as_pixels(images[example]), left, top, width, height)
        _two_bars(axes, evaluation, example, names, left, top + height + 5, max(width, 64.0))
    return figure


def _two_bars(
    axes: Axes, evaluation: Evaluation, example: int, names: Sequence[str], left: float, top: float, width: float
) -> None:
    """The true and the predicted classes, each with its activation as a number and a bar."""
    there, named = evaluation.targets[example].bool(), evaluation.predicted[example].bool()
    for row, (only, colour) in enumerate([(there & ~named, BLUE), (named & ~there, VERMILLION)]):
        y = top + 14 * row
        which = [int(k) for k in only.nonzero()]
        label = short_name("+".join(names[k] for k in which) or "none", most=int((width - 24) / (0.72 * TINY)))
        axes.text(left, y + 5, label, size=TINY if len(label) > 6 else SMALL, color=colour, weight="bold", va="center")
        axes.add_patch(Rectangle((left, y + 10.5), width, 2, color=FAINT, linewidth=0))
        if which:
            length = max(float(evaluation.activations[example, k]) for k in which)
            axes.text(left + width, y + 5, f"{length:.2f}", size=TINY, color=MUTED, ha="right", va="center")
            axes.add_patch(Rectangle((left, y + 10.5), width * min(1.0, length), 2, color=colour, linewidth=0))
