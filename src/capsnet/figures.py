"""Pictures: each is a function from data to a `matplotlib.figure.Figure`; `save` writes one as PNG or SVG.

The paper's Fig. 3 (`reconstructions`) and Fig. 4 (`tweak_grid`), how routing went (after the appendix's Fig. A.1),
and what a person wants to see after a training: its curves, what is confused with what, the worst mistakes.

One palette, safe for colour-blind eyes, means the same everywhere: blue is what is there, vermillion what was named
wrongly, grey the rest. Pictures keep their light paper, so they look the same on a light page, a dark one and a
slide. No pyplot and no figure that outlives its caller; the style is set while a picture is drawn and taken back
afterwards, so draw in one thread at a time. Class names are the user's: they are never read as mathematics, and
where DejaVu lacks their letters the picture shows the class's number instead.
"""

from __future__ import annotations

import functools
import io
import math
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import matplotlib.style
import numpy as np
import torch
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import LogLocator, NullLocator
from torch import Tensor

from capsnet.checkpoint import write_bytes
from capsnet.errors import UserError
from capsnet.evaluation import Evaluation
from capsnet.functional import lengths
from capsnet.models import CapsNet
from capsnet.routing import Trace

INK, MUTED, FAINT, PAPER = "#1f2733", "#66707d", "#dfe1e3", "#fbfaf8"
BLUE, VERMILLION, GREEN = "#0072b2", "#d55e00", "#009e73"  # Okabe and Ito's
HEAT = LinearSegmentedColormap.from_list("errors", ["#fdebdc", "#f4a56a", VERMILLION, "#8c2d04"])

TITLE, TEXT, SMALL, TINY = 11.0, 9.0, 8.0, 7.0  # points
WIDTH = 518.0  # points: all pictures are as wide, so that their type is of one size on a page
NUMBERED = 30  # classes: with more, the confusion matrix has colours and no numbers
PER_POINT = 3  # dots a point when saved as PNG
STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": TEXT,
    "text.color": INK,
    "text.parse_math": False,  # a class may be called "$5"
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
    """Run a function in the house style, whatever the user's matplotlibrc says, and take it back afterwards."""

    @functools.wraps(draw)
    def in_style(*args: P.args, **kwargs: P.kwargs) -> R:
        with matplotlib.style.context(STYLE, after_reset=True):
            return draw(*args, **kwargs)

    return in_style


# --- Files ---------------------------------------------------------------------------------------------------


@styled
def render(figure: Figure, kind: str = "png", per_point: int = PER_POINT) -> bytes:
    """A picture as the bytes of a PNG or SVG file; the same picture gives the same bytes."""
    nothing = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}
    if kind not in nothing:
        raise UserError(f"a picture can be written as .png or .svg and not as '.{kind}': change the file's suffix.")
    content = io.BytesIO()
    figure.savefig(content, format=kind, dpi=72 * per_point, metadata=nothing[kind])
    return content.getvalue()


def save(figure: Figure, path: str | Path) -> Path:
    """Write a picture as PNG or SVG, by the suffix of its path; a kill leaves the old file or the new one, whole."""
    path = Path(path)
    write_bytes(path, render(figure, path.suffix.lstrip(".").lower()))
    return path


# --- What pictures are put together from ---------------------------------------------------------------------


def as_pixels(images: Tensor) -> np.ndarray:
    """Images (…, c, h, w), uint8 or 0 to 1, grey, RGB or with more channels → (…, h, w, 3) uint8."""
    x = torch.as_tensor(images).detach().cpu()
    if x.dtype != torch.uint8:
        x = (x.float().nan_to_num().clamp(0, 1) * 255).round().to(torch.uint8)
    if x.shape[-3] != 3:  # RGBA and multispectral: the first three; grey, with or without alpha: the first
        x = x[..., :3, :, :] if x.shape[-3] > 3 else x[..., :1, :, :].expand(*x.shape[:-3], 3, *x.shape[-2:])
    return x.movedim(-3, -1).numpy()


def in_colours(painted: Tensor, colours: Sequence[str] = (VERMILLION, BLUE, GREEN)) -> Tensor:
    """Several images on one, each in its colour, added as light is (Fig. 5): (…, k, c, h, w) → (…, 3, h, w)."""
    light = painted.float().mean(-3, keepdim=True)  # k 1 h w
    # full brightness, or a dark blue would hide a stroke that the decoder painted in full
    chosen = [matplotlib.colors.to_rgb(colours[k % len(colours)]) for k in range(painted.shape[-4])]
    rgb = torch.tensor(chosen, device=light.device).view(-1, 3)
    rgb = rgb / rgb.amax(1, keepdim=True)
    return (light * rgb[:, :, None, None]).sum(-4).clamp(0, 1)


@functools.cache
def _has_glyph(letter: str) -> bool:
    font = font_manager.get_font(font_manager.findfont("DejaVu Sans"))
    return font.get_char_index(ord(letter)) > 0


def shown(name: str, number: int | None = None, most: int = 12) -> str:
    """A class's name as a picture can show it: on one line, shortened in the middle, or #number.

    >>> shown("domestic short-haired cat"), shown("猫", 3)
    ('domest…d cat', '#3')
    """
    line = " ".join("".join(c if unicodedata.category(c)[0] != "C" else " " for c in name).split())
    if number is not None and not (line and all(map(_has_glyph, line))):
        return f"#{number}"
    line = "".join(c if _has_glyph(c) else "□" for c in line)
    tail = (most - 1) // 2
    return line if len(line) <= most else f"{line[: most - 1 - tail]}…{line[-tail:]}"


def shown_all(classes: Iterable[str], most: int = 12) -> list[str]:
    """The names of all classes as pictures show them."""
    return [shown(name, number, most) for number, name in enumerate(classes)]


def sheet(width: float, height: float) -> tuple[Figure, Axes]:
    """An empty figure to lay tiles and words on, measured in points from its upper left corner."""
    figure = Figure(figsize=(width / 72, height / 72))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0), autoscale_on=False)
    axes.axis("off")
    return figure, axes


def put(axes: Axes, image: np.ndarray, left: float, top: float, width: float, height: float) -> None:
    """A tile on a sheet; nearest neighbours where it grows, smoothed where it shrinks."""
    extent = (left, left + width, top + height, top)
    axes.imshow(image, extent=extent, aspect="auto", interpolation="auto")
    side = [axes.figure.get_figwidth() * 72, axes.figure.get_figheight() * 72]  # type: ignore[union-attr]
    axes.set(xlim=(0, side[0]), ylim=(side[1], 0))


def snap(points: float) -> float:
    """To a whole dot of the PNG, lest pixels come out unequal."""
    return round(points * PER_POINT) / PER_POINT


def tile_size(shape: Sequence[int], most: float) -> tuple[float, float]:
    """Width and height in points of an image (…, h, w) in a square of `most` points: whole dots a pixel if it grows."""
    h, w = shape[-2:]
    scale = most / max(h, w)
    if scale * PER_POINT >= 1:
        scale = math.floor(scale * PER_POINT + 1e-6) / PER_POINT
    return snap(w * scale), snap(h * scale)


def heading(axes: Axes, title: str, note: str = "", left: float = 14.0) -> None:
    """A sheet's title, and a sentence below it."""
    axes.text(left, 16, title, size=TITLE, weight="bold", va="center")
    axes.text(left, 32, note, size=SMALL, color=MUTED, va="center")


def _panels(n: int, height: float, title: str, note: str = "") -> tuple[Figure, list[Axes]]:
    """A row of n axes under a title."""
    figure = Figure(figsize=(WIDTH / 72, height / 72), layout="constrained")
    figure.get_layout_engine().set(w_pad=9 / 72, h_pad=6 / 72, wspace=0.02, rect=(0, 0, 1, 1 - 42 / height))  # type: ignore[union-attr, call-arg]
    figure.text(14 / WIDTH, 1 - 16 / height, title, size=TITLE, weight="bold", va="center")
    figure.text(14 / WIDTH, 1 - 32 / height, note, size=SMALL, color=MUTED, va="center")
    return figure, list(figure.subplots(1, n, squeeze=False)[0])


# --- Training ------------------------------------------------------------------------------------------------


@styled
def training_curves(history: Sequence[Mapping[str, Any]]) -> Figure:
    """How a training went, from the records of metrics.jsonl: loss, reconstruction, validation error, learning rate.

    What was not recorded has no panel; steps that a resumed training repeated show once.
    """
    steps = {r["step"]: r for r in history if r.get("kind") == "train"}
    epochs = {r["step"]: r for r in history if r.get("kind") == "epoch"}
    draws: list[Callable[[Axes], None]] = [lambda axes: _losses(axes, list(steps.values()))]
    if any(_series(steps.values(), "reconstruction")):
        draws.append(lambda axes: _line(axes, steps.values(), "reconstruction", "Reconstruction error"))
    if any(_series(epochs.values(), "validation_error_percent")):
        draws.append(lambda axes: _validation(axes, list(epochs.values())))
    draws.append(lambda axes: _learning_rate(axes, list(steps.values())))
    figure, panels = _panels(len(draws), 200, "Training", _pace(list(steps.values())))
    for draw, axes in zip(draws, panels, strict=True):
        draw(axes)
        axes.set_xlabel("epoch")
    return figure


def _series(records: Iterable[Mapping[str, Any]], key: str) -> tuple[list[float], list[float]]:
    """Epochs and the finite values of a key there: two lists, both empty where it was never recorded."""
    points = [(float(r["epoch"]), float(r[key])) for r in records if r.get(key) is not None]
    points = [(x, y) for x, y in points if math.isfinite(y)]
    return [x for x, _ in points], [y for _, y in points]


def plain(value: float, _: float = 0) -> str:
    """A tick as people write it: 0.002 and not 2e-3."""
    return f"{value:.10f}".rstrip("0").rstrip(".")


def _smooth(values: Sequence[float]) -> list[float]:
    """A moving average over about a twentieth of the curve; it starts unbiased."""
    decay = 1 - 1 / max(1.0, len(values) / 20)
    smoothed, total, weight = [], 0.0, 0.0
    for value in values:
        total, weight = decay * total + value, decay * weight + 1
        smoothed.append(total / weight)
    return smoothed


def _line(
    axes: Axes, records: Iterable[Mapping[str, Any]], key: str, title: str, colour: str = BLUE, label: str = ""
) -> None:
    """One quantity: every record faintly, its moving average strongly."""
    x, y = _series(records, key)
    axes.plot(x, y, color=colour, alpha=0.25, linewidth=0.8)
    axes.plot(x, _smooth(y), color=colour, label=label, marker="o" if len(x) == 1 else None, markersize=4)
    axes.set_title(title)
    if y and min(y) > 0 and max(y) > 3 * min(y):
        axes.set_yscale("log")
        narrow = max(y) < 100 * min(y)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if narrow else (1,)))
        axes.yaxis.set_major_formatter(plain)
        axes.yaxis.set_minor_locator(NullLocator())


def _losses(axes: Axes, train: Sequence[Mapping[str, Any]]) -> None:
    _line(axes, train, "loss", "Loss", INK, "total")
    if any(_series(train, "margin")):
        _line(axes, train, "margin", "Loss", VERMILLION, "margin")
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
    axes.yaxis.set_major_formatter(plain)


def _pace(train: Sequence[Mapping[str, Any]]) -> str:
    speeds = sorted(_series(train, "images_per_second")[1])
    if not train:
        return "nothing was recorded"
    pace = f", {speeds[len(speeds) // 2]:,.0f} images a second" if speeds else ""
    return f"{train[-1]['step']:,} steps{pace}"


# --- What is confused with what ------------------------------------------------------------------------------


def confusions(evaluation: Evaluation) -> Tensor:
    """(j + 1, j + 1) counts: class missed (rows) against class named instead; the diagonal counts what was right.

    With one label an image this is the confusion matrix. Where an image has several, each missed class meets each
    class that was named wrongly; last column: missed, and nothing named instead; last row: named, nothing missed.
    """
    there, named = evaluation.targets.bool(), evaluation.predicted.bool()
    missed, invented = (there & ~named).float(), (named & ~there).float()
    missed = torch.cat([missed, (missed.sum(1, keepdim=True) == 0).float()], 1)
    invented = torch.cat([invented, (invented.sum(1, keepdim=True) == 0).float()], 1)
    counts = missed.T @ invented
    counts[-1, -1] = 0  # nothing missed, nothing invented: that is being right
    return (counts + torch.diag(torch.cat([(there & named).sum(0), torch.zeros(1)]))).round().long()


@styled
def confusion_matrix(evaluation: Evaluation) -> Figure:
    """True classes in rows, named ones in columns; only the errors have colour, for 99.5 % lie on the diagonal."""
    counts, names = confusions(evaluation), shown_all(evaluation.classes)
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
    """Axes with one unit a class and the classes' names on two sides; gives the side of a cell in points too."""
    j, longest = len(names), max(map(len, names))
    cell = min(34.0, (WIDTH - 160) / j)
    size = max(5.0, min(TEXT, 0.72 * cell))
    words = 0.62 * size * longest  # the widest name in points, about
    margin, right, rotated = 36 + words, 52.0, words > cell
    cell = min(34.0, (WIDTH - margin - right) / j)
    top, side = 72 + (words if rotated else size), j * cell
    height, left = top + side + 14, margin + (WIDTH - margin - right - side) / 2
    figure, page = sheet(WIDTH, height)
    heading(page, "What is confused with what", note)
    axes = figure.add_axes((left / WIDTH, 14 / height, side / WIDTH, side / height))
    axes.set(xlim=(0, j), ylim=(j, 0), xlabel="named by the model", ylabel="there in truth")
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
    colours[errors == 0] = matplotlib.colors.to_rgba("#f3f2ef")
    colours[np.eye(len(errors), dtype=bool)] = matplotlib.colors.to_rgba("#e2e5e8")
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
    """To the right of each row, the share of that class that was missed."""
    where, there = axes.get_xlim()[1] + 0.25, evaluation.targets.bool()
    if size < 4:
        return
    axes.text(where, -0.2, "missed", size=size, color=MUTED, va="bottom")
    missed, total = (there & ~evaluation.predicted.bool()).sum(0).tolist(), there.sum(0).tolist()
    for r, (few, all_of_them) in enumerate(zip(missed, total, strict=True)):
        share = f"{100 * few / all_of_them:.1f} %" if all_of_them else "–"
        axes.text(where, r + 0.5, share, size=size, color=INK if few else MUTED, va="center")


# --- Tiles ---------------------------------------------------------------------------------------------------


def confidence_of_mistakes(evaluation: Evaluation) -> Tensor:
    """(n,) how sure the model was where it is wrong, −1 where it is right.

    The length of the longest class that is not there though it was named; where none was, how short the shortest
    missed class is.
    """
    there, named = evaluation.targets.bool(), evaluation.predicted.bool()
    invented = torch.where(named & ~there, evaluation.lengths, -1.0).amax(1)
    missed = torch.where(there & ~named, 1 - evaluation.lengths, -1.0).amax(1)
    return torch.where(invented >= 0, invented, missed)


def worst_mistakes(evaluation: Evaluation, most: int) -> list[int]:
    """Which examples are wrong, the most confident first."""
    order = confidence_of_mistakes(evaluation).argsort(descending=True, stable=True)
    return [int(k) for k in order[: min(most, evaluation.errors)]]


@styled
def mistakes(images: Tensor, evaluation: Evaluation, most: int = 24) -> Figure:
    """The most confident mistakes: the image, and how long the class that is there and the one named were.

    images (n, c, h, w), the evaluation's examples in its order.
    """
    worst, names, columns = worst_mistakes(evaluation, most), shown_all(evaluation.classes, 10), 6
    space = (WIDTH - 28 + 14) / columns
    width, height = tile_size(images.shape, space - 14)
    down = height + 46
    figure, axes = sheet(WIDTH, snap(56 + max(0.2, math.ceil(len(worst) / columns)) * down))
    count = f"{len(worst)} of {evaluation.errors:,}" if len(worst) < evaluation.errors else f"All {len(worst)}"
    note = f"{count}. Blue: length of the class that is there; vermillion: of the one that was named."
    heading(axes, "The most confident mistakes", note if worst else f"None: all {evaluation.n:,} are right.")
    for k, example in enumerate(worst):
        left, top = snap(14 + k % columns * space), snap(50 + k // columns * down)
        put(axes, as_pixels(images[example]), left, top, width, height)
        _two_bars(axes, evaluation, example, names, left, top + height + 5, max(width, 64.0))
    return figure


def _two_bars(
    axes: Axes, evaluation: Evaluation, example: int, names: Sequence[str], left: float, top: float, width: float
) -> None:
    """What is there and what was named instead, each with its length as a number and a bar."""
    there, named = evaluation.targets[example].bool(), evaluation.predicted[example].bool()
    for row, (only, colour) in enumerate([(there & ~named, BLUE), (named & ~there, VERMILLION)]):
        y = top + 14 * row
        which = [int(k) for k in only.nonzero()]
        label = shown("+".join(names[k] for k in which) or "none", most=int((width - 24) / (0.72 * TINY)))
        axes.text(left, y + 5, label, size=TINY if len(label) > 6 else SMALL, color=colour, weight="bold", va="center")
        axes.add_patch(Rectangle((left, y + 10.5), width, 2, color=FAINT, linewidth=0))
        if which:
            length = max(float(evaluation.lengths[example, k]) for k in which)
            axes.text(left + width, y + 5, f"{length:.2f}", size=TINY, color=MUTED, ha="right", va="center")
            axes.add_patch(Rectangle((left, y + 10.5), width * min(1.0, length), 2, color=colour, linewidth=0))


@torch.inference_mode()
def reconstructions(model: CapsNet, images: Tensor, true: Tensor | None = None) -> Figure:
    """What a model paints from its poses, beside its inputs (Fig. 3): right ones, and wrong ones if `true` is given.

    images (n, c, h, w), uint8 or 0 to 1; true (n,) labels.
    """
    prediction = model.predict(images)
    if prediction.reconstructions is None or prediction.poses is None:
        raise UserError("this model has no decoder, so it cannot paint reconstructions: train one with a decoder.")
    names = [shown(name, number, 8) for number, name in enumerate(model.classes)]
    predicted = [names[k] for k in prediction.labels.tolist()]
    if true is None:
        return painted_beside(images, prediction.reconstructions, None, predicted)
    truly = model.reconstruct(prediction.poses.to(model.device), true.to(model.device))
    return painted_beside(images, prediction.reconstructions, [names[k] for k in true.tolist()], predicted, truly)


@styled
def painted_beside(
    images: Tensor,
    painted: Tensor,
    true: Sequence[str] | None,
    predicted: Sequence[str],
    painted_true: Tensor | None = None,
) -> Figure:
    """Inputs above what was painted from the predicted class, right ones and wrong ones (Fig. 3).

    images, painted, painted_true (n, c, h, w); true, predicted: n names. An example is wrong where they differ; it
    then has a third tile, painted from the class that is there. (l, p, r): label, prediction, and the class that
    the reconstruction was painted from. Without `true` nothing is right or wrong.
    """
    stacks = [
        _stack(k, images, painted, None if true is None else true[k], predicted[k], painted_true)
        for k in range(len(images))
    ]
    columns, left = 10, 82.0
    width, height = tile_size(images.shape, (WIDTH - left - 6) / columns - 5)
    lines = _in_lines(stacks, columns, judged=true is not None)
    downs = [len(line[0]) * (height + 15) + 14 for _, line in lines]  # room for words under each tile
    figure, axes = sheet(WIDTH, snap(58 + sum(downs)))
    triple = "(l, p, r): label, prediction, class that was painted"
    heading(axes, "Reconstructions", "painted from the pose of the predicted class" if true is None else triple)
    for k, (name, line) in enumerate(lines):
        top = 54.0 + sum(downs[:k])
        colour = VERMILLION if name == "wrong" else BLUE
        axes.text(14, top + height / 2 - 12, name, size=TEXT, weight="bold", color=colour, va="center")
        _tiles(axes, line, left, top, width, height, (WIDTH - left - 6) / columns)
    return figure


Stack = list[tuple[np.ndarray, str, str]]  # tiles from top to bottom: pixels, words, colour of the words


def _stack(k: int, images: Tensor, painted: Tensor, l: str | None, p: str, painted_true: Tensor | None) -> Stack:
    """One example's tiles: input, painted from the prediction and, where that is wrong, from the label."""
    image, tile = as_pixels(images[k]), as_pixels(painted[k])
    if l is None:
        return [(image, "", INK), (tile, p, MUTED)]
    said = (lambda r: f"({l}, {p}, {r})") if len(l) + len(p) <= 4 else str  # names would not fit three times
    if l == p:
        return [(image, l, INK), (tile, said(p), MUTED)]
    stack = [(image, l, BLUE), (tile, said(p), VERMILLION)]
    return stack if painted_true is None else [*stack, (as_pixels(painted_true[k]), said(l), BLUE)]


def _in_lines(stacks: Sequence[Stack], columns: int, judged: bool) -> list[tuple[str, list[Stack]]]:
    """Right ones first, then wrong ones, so many a line; the first line of each kind has its name."""
    right = [s for s in stacks if s[1][2] == MUTED]
    wrong = [s for s in stacks if s[1][2] != MUTED]
    lines = []
    for name, group in (("right" if judged else "", right), ("wrong", wrong)):
        for k in range(0, len(group), columns):
            lines.append(("" if k else name, group[k : k + columns]))
    return lines


def _tiles(
    axes: Axes, line: Sequence[Stack], left: float, top: float, width: float, height: float, space: float
) -> None:
    """A line of stacks, with what each row is at its left and the words under each tile."""
    for row, said in enumerate(("input", "from prediction", "from label")[: len(line[0])]):
        axes.text(14, top + row * (height + 15) + height / 2, said, size=TINY, color=MUTED, va="center")
    for k, stack in enumerate(line):
        for row, (pixels, words, colour) in enumerate(stack):
            x, y = snap(left + k * space), snap(top + row * (height + 15))
            put(axes, pixels, x, y, width, height)
            size = min(TINY, 1.6 * space / max(1, len(words)))
            axes.text(x + width / 2, y + height + 6.5, words, size=size, color=colour, ha="center", va="center")


def mosaic(tiles: Tensor, gap: int) -> np.ndarray:
    """Tiles (rows, columns, c, h, w) as one picture with `gap` pixels of paper between them, (H, W, 3) uint8."""
    pixels = as_pixels(tiles)
    paper = (np.array(matplotlib.colors.to_rgb(PAPER)) * 255).round().astype(np.uint8)
    framed = np.empty((*pixels.shape[:2], pixels.shape[2] + gap, pixels.shape[3] + gap, 3), np.uint8)
    framed[...] = paper
    framed[:, :, : pixels.shape[2], : pixels.shape[3]] = pixels
    rows, columns, h, w, _ = framed.shape
    return framed.swapaxes(1, 2).reshape(rows * h, columns * w, 3)


@torch.inference_mode()
def pose_of(model: CapsNet, image_or_pose: Tensor, label: int | None = None) -> tuple[Tensor, int]:
    """The pose (q,) of one class in an image (c, h, w), by default of the predicted one; a pose is taken as it is."""
    if image_or_pose.dim() == 1:
        if label is None:
            raise UserError("a pose alone does not say whose it is: pass its label too.")
        return image_or_pose.to(model.device), label
    prediction = model.predict(image_or_pose[None])
    assert prediction.poses is not None  # a capsule network has them
    label = int(prediction.lengths[0].argmax()) if label is None else label
    return prediction.poses[0, label].to(model.device), label


@styled
@torch.inference_mode()
def tweak_grid(
    model: CapsNet, image_or_pose: Tensor, label: int | None = None, *, span: float = 0.25, steps: int = 11
) -> Figure:
    """Each dimension of one class capsule's pose moved over [−span, span] and painted: a row a dimension (Fig. 4).

    An image (c, h, w), uint8 or 0 to 1, whose pose is found first (label: the predicted class by default); or a
    pose (q,) with its label. The bars to the right show how much the picture changes along a row.
    """
    pose, label = pose_of(model, image_or_pose, label)
    painted = model.tweaks(pose, label, span, steps).cpu()  # q steps c h w
    q, w = len(painted), painted.shape[-1]
    width, height = tile_size(painted.shape, min(34.0, (WIDTH - 130) / steps))
    gap = max(1, round(2 * w / width))  # about two points, in pixels of the tiles
    across, down = width * (1 + gap / w), height + width * gap / w
    left, top = snap((WIDTH - steps * across - 22) / 2), 64.0
    figure, axes = sheet(WIDTH, snap(top + q * down + 12))
    note = f"One of its {q} numbers moved at a time; the framed column is as found."
    heading(axes, f"What the pose of “{shown(model.classes[label], label, 24)}” knows", note)
    put(axes, mosaic(painted, gap), left, top, steps * across, q * down)
    _steps(axes, np.linspace(-span, span, steps), left + width / 2, top, across, q * down)
    _rows(axes, painted, left, top, down, left + steps * across)
    return figure


def _steps(axes: Axes, moves: np.ndarray, first: float, top: float, across: float, height: float) -> None:
    """How far each column moved, from the middle of the first one on; a frame around the one that did not."""
    for k, move in enumerate(moves):
        x, still = first + k * across, abs(move) < 1e-9
        axes.text(x, top - 9, signed(move), size=TINY, color=BLUE if still else MUTED, ha="center", va="center")
        if still:
            corner = (x - across / 2, top - 1)
            axes.add_patch(Rectangle(corner, across, height, fill=False, edgecolor=BLUE, linewidth=1.6))


def signed(move: float) -> str:
    """A step with its sign, as the paper writes it: −0.25, 0, +0.25."""
    return "0" if abs(move) < 1e-9 else f"{move:+.2f}".replace("-", "−")


def _rows(axes: Axes, painted: Tensor, left: float, top: float, down: float, right: float) -> None:
    """The number of each dimension, and a bar for how far its first and last picture are from each other."""
    change = (painted[:, -1] - painted[:, 0]).abs().flatten(1).sum(1)
    share = (change / change.max().clamp(min=1e-9)).tolist()
    for row, part in enumerate(share):
        middle = top + (row + 0.5) * down - 1
        axes.text(left - 8, middle, str(row + 1), size=TINY, color=MUTED, ha="right", va="center")
        axes.add_patch(Rectangle((right + 6, middle - 2), 40 * part, 4, color=BLUE, alpha=0.55, linewidth=0))
    axes.text(right + 6, top - 9, "change", size=TINY, color=MUTED, va="center")


# --- Routing -------------------------------------------------------------------------------------------------


@styled
def routing(
    trace: Trace,
    classes: Sequence[str],
    *,
    example: int = 0,
    true: int | None = None,
    image: Tensor | None = None,
    grid: tuple[int, int] | None = None,
) -> Figure:
    """How one example's routing went, iteration by iteration: couplings, lengths, entropy.

    Blue is the class that is there (`true`, by default the longest), vermillion its strongest rival, grey the rest.
    With the example's `image` (c, h, w), and the `grid` of primary capsules if those are what is routed, a first
    panel shows where in the image the votes for the blue class come from.
    """
    sizes = lengths(trace.outputs[:, example]).detach().cpu()  # t j
    received = trace.couplings[:, example].mean(1).detach().cpu()  # t j: the share of all lower capsules' output
    order = sizes[-1].argsort(descending=True).tolist()
    blue = order[0] if true is None else true
    marked = {blue: BLUE, **dict.fromkeys([k for k in order if k != blue][:1], VERMILLION)}
    names = shown_all(classes, 10)
    title, note = f"Routing of one “{names[blue]}”", f"blue: “{names[blue]}”"
    note += "".join(f"; vermillion: its strongest rival, “{names[k]}”" for k in marked if k != blue)
    figure, panels = _panels(3 + (image is not None), 190, title, note)
    if image is not None:
        _sources(panels.pop(0), image, contributions(trace, example, blue), grid)
    _class_lines(panels[0], 100 * received, names, marked, "Coupling received", "% of all")
    _class_lines(panels[1], sizes, names, marked, "Length", "‖v‖")
    panels[1].set_ylim(0, 1)
    _entropy(panels[2], trace.couplings[:, example].detach().cpu())
    return figure


def contributions(trace: Trace, example: int, label: int) -> Tensor:
    """(i,) what each lower capsule adds to an upper capsule at the end: c_ij û_{j|i} along the direction of v_j."""
    direction = torch.nn.functional.normalize(trace.outputs[-1, example, label], dim=0)
    added = trace.couplings[-1, example, :, label] * (trace.votes[example, :, label] @ direction)
    return added.detach().cpu()


def _sources(axes: Axes, image: Tensor, added: Tensor, grid: tuple[int, int] | None) -> None:
    """The image, and over each place of the grid a disc as large as what its capsules add; hollow: against."""
    height, width = image.shape[-2:]
    axes.imshow(as_pixels(image), extent=(0, width, height, 0), interpolation="auto")
    axes.set(title="Votes from" if grid else "Input", xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    axes.set_anchor("NW")
    if grid is None or added.numel() % math.prod(grid):
        return
    places = added.view(*grid, -1).sum(-1)  # h w
    rows, columns = np.indices(grid)
    strongest = float(places.abs().max()) or 1.0
    area = (places.abs() / strongest).numpy().ravel() * (0.8 * 92 / max(grid)) ** 2
    against = (places < 0).numpy().ravel()
    axes.scatter(
        (columns.ravel() + 0.5) * width / grid[1], (rows.ravel() + 0.5) * height / grid[0], area, alpha=0.6,
        facecolors=["none" if no else BLUE for no in against], linewidths=1.2,
        edgecolors=[VERMILLION if no else BLUE for no in against],
    )  # fmt: skip


def _class_lines(
    axes: Axes, values: Tensor, names: Sequence[str], marked: Mapping[int, str], title: str, unit: str
) -> None:
    """One line a class over the iterations (t, j); the marked ones in colour, with their names."""
    t = np.arange(1, len(values) + 1)
    others = [k for k in range(values.shape[1]) if k not in marked]
    dot = "o" if len(t) < 8 else None
    if others:
        axes.plot(t, values[:, others].numpy(), color="#b9bfc6", linewidth=0.9, marker=dot, markersize=2.5)
    for k, colour in marked.items():
        axes.plot(t, values[:, k].numpy(), color=colour, marker=dot, markersize=4.5)
    _iterations(axes, t, title, unit)


def _iterations(axes: Axes, t: np.ndarray, title: str, unit: str) -> None:
    axes.set(title=title, ylabel=unit, xlabel="iteration", xlim=(t[0] - 0.25, t[-1] + 0.25))
    axes.set_xticks(t[:: max(1, len(t) // 8)])


def _entropy(axes: Axes, couplings: Tensor) -> None:
    """How undecided the lower capsules are: 100 % when one sends everywhere alike, 0 when to a single class."""
    leak = (1 - couplings.sum(-1, keepdim=True)).clamp(min=0)  # 0 unless the routing is leaky
    choices = couplings.shape[-1] + int(bool(leak.max() > 1e-4))
    every = torch.special.entr(torch.cat([couplings, leak], -1)).sum(-1) / math.log(max(2, choices))  # t i
    marks = torch.tensor([0.0, 0.1, 0.5, 0.9], dtype=every.dtype)
    least, low, middle, high = (100 * torch.quantile(every, marks, dim=1)).numpy()
    t = np.arange(1, len(every) + 1)
    axes.fill_between(t, low, high, color=GREEN, alpha=0.18, linewidth=0)
    axes.plot(t, least, color=GREEN, linewidth=1, linestyle=(0, (3, 2)), label="most decided")
    axes.plot(t, middle, color=GREEN, marker="o", markersize=4.5, label="median")
    _iterations(axes, t, "Entropy", "% of log j")
    axes.set_ylim(min(99.0, float(least.min()) - 0.2), 100.05 if least.min() > 98 else 101)
    axes.legend(loc="best", handlelength=1.4, borderaxespad=0, labelcolor=MUTED)
