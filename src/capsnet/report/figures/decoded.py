"""What a model reconstructs from its poses: reconstructions (Fig. 3) and the tweak grid (Fig. 4)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from capsnet.errors import UserError
from capsnet.models.base import Model
from capsnet.report.figures.names import short_name
from capsnet.report.figures.style import BLUE, INK, MUTED, TEXT, TINY, VERMILLION, WIDTH, heading, sheet, styled
from capsnet.report.figures.tiles import as_pixels, mosaic, put, snap, tile_size


@torch.inference_mode()
def reconstructions(model: Model, images: Tensor, true: Tensor | None = None, label: int | None = None) -> Figure:
    """Inputs and their reconstructions (Fig. 3); with `true`, correct and wrong examples are separated.

    images (n, c, h, w), uint8 or 0 to 1; true (n,) labels. With `label`, all images are decoded from the pose of that
    class instead of the predicted one.
    """
    prediction = model.predict(images, top=1)
    if prediction.reconstructions is None or prediction.poses is None:
        raise UserError("this model has no decoder, so it cannot reconstruct images: choose a model with a decoder.")
    names = [short_name(name, number, 8) for number, name in enumerate(model.classes)]
    if label is not None:
        whose = torch.full((len(images),), label, device=model.device)
        decoded = model.reconstruct(prediction.poses.to(model.device), whose)
        assert decoded is not None
        return reconstruction_rows(images, decoded.cpu(), None, [names[label]] * len(images), whose="chosen")
    predicted = [names[k] for k in prediction.labels.tolist()]
    if true is None:
        return reconstruction_rows(images, prediction.reconstructions, None, predicted)
    truly = model.reconstruct(prediction.poses.to(model.device), true.to(model.device))
    return reconstruction_rows(images, prediction.reconstructions, [names[k] for k in true.tolist()], predicted, truly)


@styled
def reconstruction_rows(
    images: Tensor,
    decoded: Tensor,
    true: Sequence[str] | None,
    predicted: Sequence[str],
    decoded_true: Tensor | None = None,
    whose: str = "predicted",
) -> Figure:
    """Inputs above their reconstructions from the predicted class: correct examples, then wrong ones (Fig. 3).

    images, decoded, decoded_true (n, c, h, w); true, predicted: n names. An example is wrong if they differ; it then
    has a third tile, decoded from the true class. (l, p, r): label, prediction, and the class of the reconstruction.
    Without `true`, examples are not judged, and the heading says which (`whose`) class was decoded.
    """
    stacks = [
        _stack(k, images, decoded, None if true is None else true[k], predicted[k], decoded_true)
        for k in range(len(images))
    ]
    columns, left = 10, 82.0
    width, height = tile_size(images.shape, (WIDTH - left - 6) / columns - 5)
    lines = _in_lines(stacks, columns, judged=true is not None)
    downs = [len(line[0]) * (height + 15) + 14 for _, line in lines]  # room for words under each tile
    figure, axes = sheet(WIDTH, snap(58 + sum(downs)))
    triple = "(l, p, r): label, prediction, class that was decoded"
    heading(axes, "Reconstructions", f"decoded from the pose of the {whose} class" if true is None else triple)
    rows = ("input", "decoded") if true is None else ("input", "from prediction", "from label")
    for k, (name, line) in enumerate(lines):
        top = 54.0 + sum(downs[:k])
        colour = VERMILLION if name == "wrong" else BLUE
        axes.text(14, top + height / 2 - 12, name, size=TEXT, weight="bold", color=colour, va="center")
        _tiles(axes, line, rows, left, top, width, height, (WIDTH - left - 6) / columns)
    return figure


Stack = list[tuple[np.ndarray, str, str]]  # tiles from top to bottom: pixels, words, colour of the words


def _stack(k: int, images: Tensor, decoded: Tensor, l: str | None, p: str, decoded_true: Tensor | None) -> Stack:
    """One example's tiles: input, decoded from the prediction and, if that is wrong, from the label."""
    image, tile = as_pixels(images[k]), as_pixels(decoded[k])
    if l is None:
        return [(image, "", INK), (tile, p, MUTED)]
    said = (lambda r: f"({l}, {p}, {r})") if len(l) + len(p) <= 4 else str  # names would not fit three times
    if l == p:
        return [(image, l, INK), (tile, said(p), MUTED)]
    stack = [(image, l, BLUE), (tile, said(p), VERMILLION)]
    return stack if decoded_true is None else [*stack, (as_pixels(decoded_true[k]), said(l), BLUE)]


def _in_lines(stacks: Sequence[Stack], columns: int, judged: bool) -> list[tuple[str, list[Stack]]]:
    """Correct examples, then wrong ones, in lines; the first line of each kind is labelled."""
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
    """A line of tile stacks with row labels on the left and captions under each tile."""
    for row, said in enumerate(rows[: len(line[0])]):
        axes.text(14, top + row * (height + 15) + height / 2, said, size=TINY, color=MUTED, va="center")
    for k, stack in enumerate(line):
        for row, (pixels, words, colour) in enumerate(stack):
            x, y = snap(left + k * space), snap(top + row * (height + 15))
            put(axes, pixels, x, y, width, height)
            size = min(TINY, 1.6 * space / max(1, len(words)))
            axes.text(x + width / 2, y + height + 6.5, words, size=size, color=colour, ha="center", va="center")


@torch.inference_mode()
def pose_of(model: Model, image_or_pose: Tensor, label: int | None = None) -> tuple[Tensor, int]:
    """The pose (q,) of one class in an image (c, h, w), by default the predicted class."""
    if image_or_pose.dim() == 1:
        if label is None:
            raise UserError("a pose needs the label of its class: pass label too.")
        return image_or_pose.to(model.device), label
    prediction = model.predict(image_or_pose[None])
    assert prediction.poses is not None  # a capsule network has them
    label = int(prediction.activations[0].argmax()) if label is None else label
    return prediction.poses[0, label].to(model.device), label


@styled
@torch.inference_mode()
def tweak_grid(
    model: Model, image_or_pose: Tensor, label: int | None = None, *, span: float = 0.25, steps: int = 11
) -> Figure:
    """Each dimension of one class capsule's pose varied over [−span, span] and decoded, one row per dimension (Fig. 4).

    An image (c, h, w), uint8 or 0 to 1, whose pose is found first (label: the predicted class by default); or a
    pose (q,) with its label. The bars to the right show how much the picture changes along a row.
    """
    pose, label = pose_of(model, image_or_pose, label)
    decoded = model.tweaks(pose, label, span, steps).cpu()  # q steps c h w
    q, w = len(decoded), decoded.shape[-1]
    width, height = tile_size(decoded.shape, min(34.0, (WIDTH - 130) / steps))
    gap = max(1, round(2 * w / width))  # about two points, in pixels of the tiles
    across, down = width * (1 + gap / w), height + width * gap / w
    left, top = snap((WIDTH - steps * across - 22) / 2), 64.0
    figure, axes = sheet(WIDTH, snap(top + q * down + 12))
    note = f"Each row changes one of the {q} pose dimensions; the framed column is unchanged."
    heading(axes, f"Pose dimensions of “{short_name(model.classes[label], label, 24)}”", note)
    put(axes, mosaic(decoded, gap), left, top, steps * across, q * down)
    _steps(axes, np.linspace(-span, span, steps), left + width / 2, top, across, q * down)
    _rows(axes, decoded, left, top, down, left + steps * across)
    return figure


def _steps(axes: Axes, moves: np.ndarray, first: float, top: float, across: float, height: float) -> None:
    """The step of each column, and a frame around the unchanged one."""
    for k, move in enumerate(moves):
        x, still = first + k * across, abs(move) < 1e-9
        axes.text(x, top - 9, signed(move), size=TINY, color=BLUE if still else MUTED, ha="center", va="center")
        if still:
            corner = (x - across / 2, top - 1)
            axes.add_patch(Rectangle(corner, across, height, fill=False, edgecolor=BLUE, linewidth=1.6))


def signed(move: float) -> str:
    """A step with its sign, as the paper writes it: −0.25, 0, +0.25."""
    return "0" if abs(move) < 1e-9 else f"{move:+.2f}".replace("-", "−")


def _rows(axes: Axes, decoded: Tensor, left: float, top: float, down: float, right: float) -> None:
    """The number of each dimension, and a bar for the difference between its first and last picture."""
    change = (decoded[:, -1] - decoded[:, 0]).abs().flatten(1).sum(1)
    share = (change / change.max().clamp(min=1e-9)).tolist()
    for row, part in enumerate(share):
        middle = top + (row + 0.5) * down - 1
        axes.text(left - 8, middle, str(row + 1), size=TINY, color=MUTED, ha="right", va="center")
        axes.add_patch(Rectangle((right + 6, middle - 2), 40 * part, 4, color=BLUE, alpha=0.55, linewidth=0))
    axes.text(right + 6, top - 9, "change", size=TINY, color=MUTED, va="center")
