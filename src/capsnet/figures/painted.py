"""What a model paints from its poses: reconstructions (the paper's Fig. 3) and the tweak grid (Fig. 4)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from capsnet.errors import UserError
from capsnet.figures.names import shown
from capsnet.figures.style import BLUE, INK, MUTED, TEXT, TINY, VERMILLION, WIDTH, heading, sheet, styled
from capsnet.figures.tiles import as_pixels, mosaic, put, snap, tile_size
from capsnet.models import CapsNet


@torch.inference_mode()
def reconstructions(model: CapsNet, images: Tensor, true: Tensor | None = None, label: int | None = None) -> Figure:
    """What a model paints from its poses, beside its inputs (Fig. 3): right ones, and wrong ones if `true` is given.

    images (n, c, h, w), uint8 or 0 to 1; true (n,) labels. `label` paints all from this class's pose instead of from
    the predicted one's, and then nothing is right or wrong.
    """
    prediction = model.predict(images, top=1)
    if prediction.reconstructions is None or prediction.poses is None:
        raise UserError("this model has no decoder, so it cannot paint reconstructions: train one with a decoder.")
    names = [shown(name, number, 8) for number, name in enumerate(model.classes)]
    if label is not None:
        whose = torch.full((len(images),), label, device=model.device)
        painted = model.reconstruct(prediction.poses.to(model.device), whose)
        assert painted is not None  # there is a decoder
        return painted_beside(images, painted.cpu(), None, [names[label]] * len(images), whose="chosen")
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
    whose: str = "predicted",
) -> Figure:
    """Inputs above what was painted from the predicted class, right ones and wrong ones (Fig. 3).

    images, painted, painted_true (n, c, h, w); true, predicted: n names. An example is wrong where they differ; it
    then has a third tile, painted from the class that is there. (l, p, r): label, prediction, and the class that
    the reconstruction was painted from. Without `true` nothing is right or wrong; `whose` class it was painted from is
    then said above.
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
    heading(axes, "Reconstructions", f"painted from the pose of the {whose} class" if true is None else triple)
    rows = ("input", "painted") if true is None else ("input", "from prediction", "from label")
    for k, (name, line) in enumerate(lines):
        top = 54.0 + sum(downs[:k])
        colour = VERMILLION if name == "wrong" else BLUE
        axes.text(14, top + height / 2 - 12, name, size=TEXT, weight="bold", color=colour, va="center")
        _tiles(axes, line, rows, left, top, width, height, (WIDTH - left - 6) / columns)
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
    axes: Axes, line: Sequence[Stack], rows: Sequence[str],
    left: float, top: float, width: float, height: float, space: float,
) -> None:  # fmt: skip
    """A line of stacks, with what each row is at its left and the words under each tile."""
    for row, said in enumerate(rows[: len(line[0])]):
        axes.text(14, top + row * (height + 15) + height / 2, said, size=TINY, color=MUTED, va="center")
    for k, stack in enumerate(line):
        for row, (pixels, words, colour) in enumerate(stack):
            x, y = snap(left + k * space), snap(top + row * (height + 15))
            put(axes, pixels, x, y, width, height)
            size = min(TINY, 1.6 * space / max(1, len(words)))
            axes.text(x + width / 2, y + height + 6.5, words, size=size, color=colour, ha="center", va="center")


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
