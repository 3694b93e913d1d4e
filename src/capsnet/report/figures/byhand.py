"""Routing by hand: Procedure 1 with a few 2-D capsules, every line drawn with its numbers.

Each lower capsule has its own colour; an upper capsule's input s is dashed, its output v is dark and thick. All
numbers come from a trace (`capsnet.routing.Trace`) of one example with 2-D poses and two upper capsules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, Rectangle
from torch import Tensor

from capsnet.nn.functional import lengths
from capsnet.report.figures.style import (
    BLUE,
    FAINT,
    GREEN,
    INK,
    MUTED,
    SMALL,
    TINY,
    VERMILLION,
    WIDTH,
    heading,
    row_of_panels,
    sheet,
    styled,
)
from capsnet.routing import Trace

LOWER = (BLUE, GREEN, "#e69f00", "#cc79a7", "#56b4e9", VERMILLION)  # a colour for each lower capsule
UPPER = "AB"
PROCEDURE = (
    (1, "procedure Routing(û, r)"),
    (2, "  for all i, j:  b_ij ← 0"),
    (3, "  for r iterations do"),
    (4, "    c_i ← softmax(b_i)"),
    (5, "    s_j ← Σ_i c_ij û_j|i"),
    (6, "    v_j ← squash(s_j)"),
    (7, "    b_ij ← b_ij + û_j|i · v_j"),
    (8, "  return v_j"),
)
HEIGHT = 340.0


class Moment(NamedTuple):
    """One line of Procedure 1 in one iteration."""

    line: int
    iteration: int  # from 1; 0 before the loop
    says: str


class Numbers(NamedTuple):
    """The numbers of one example's routing, from its trace."""

    votes: Tensor  # (i, j, 2)
    logits: Tensor  # (t, i, j)
    couplings: Tensor  # (t, i, j)
    inputs: Tensor  # (t, j, 2) s_j
    outputs: Tensor  # (t, j, 2) v_j
    agreement: Tensor  # (t, i, j) û · v


def numbers_of(trace: Trace) -> Numbers:
    """The first example of a trace, with s_j and the agreements between its steps."""
    votes, couplings, outputs = trace.votes[0], trace.couplings[:, 0], trace.outputs[:, 0]
    inputs = torch.einsum("tij,ijq->tjq", couplings, votes)
    agreement = torch.einsum("ijq,tjq->tij", votes, outputs)
    assert trace.logits is not None
    return Numbers(votes, trace.logits[:, 0], couplings, inputs, outputs, agreement)


def moments(numbers: Numbers) -> list[Moment]:
    """Every executed line in order, with a sentence about its numbers."""
    steps = [Moment(2, 0, "All logits start at zero.")]
    last = len(numbers.logits) - 1
    for t in range(last + 1):
        steps += [Moment(line, t + 1, _says(numbers, line, t)) for line in ((4, 5, 6) if t == last else (4, 5, 6, 7))]
    a, b = lengths(numbers.outputs[-1]).tolist()
    longer = f"{UPPER[0 if a > b else 1]} is present" if abs(a - b) > 0.05 else "Both have the same length"
    return [*steps, Moment(8, last + 1, f"‖v_A‖ = {a:.2f}, ‖v_B‖ = {b:.2f}: {longer}, and its direction says how.")]


def _says(n: Numbers, line: int, t: int) -> str:
    if line == 4:
        c = n.couplings[t, 0].tolist()
        b = n.logits[t, 0].tolist()
        return f"Capsule 1: softmax({b[0]:.2f}, {b[1]:.2f}) = ({c[0]:.2f}, {c[1]:.2f}). The sum over A and B is 1."
    if line == 5:
        s = lengths(n.inputs[t]).tolist()
        return f"Votes scaled by their couplings, tip to tail: ‖s_A‖ = {s[0]:.2f}, ‖s_B‖ = {s[1]:.2f}."
    if line == 6:
        v = lengths(n.outputs[t]).tolist()
        return f"The direction stays, the length falls below 1: ‖v_A‖ = {v[0]:.2f}, ‖v_B‖ = {v[1]:.2f}."
    best = int((n.agreement[t, :, 0] - n.agreement[t, :, 1]).argmin())
    a, b = n.agreement[t, best].tolist()
    return f"Capsule {best + 1} agrees with A by {a:+.2f} and with B by {b:+.2f}; this is added to its logits.".replace(
        "-", "−"
    )


@styled
def by_hand(numbers: Numbers, moment: Moment) -> Figure:
    """One line of Procedure 1: the listing, the vectors of A and B, and all numbers."""
    figure, axes = sheet(WIDTH, HEIGHT)
    when = f"iteration {moment.iteration}" if 4 <= moment.line <= 7 else "before the loop"
    heading(axes, f"Line {moment.line}, {when}" if moment.line < 8 else "Result", moment.says)
    _listing(axes, moment.line)
    corners = window(numbers, moment.line)
    for j in (0, 1):
        panel = figure.add_axes(((190 + 162 * j) / WIDTH, 1 - 212 / HEIGHT, 152 / WIDTH, 152 / HEIGHT))
        plane(panel, corners, f"for {UPPER[j]}")
        _vectors(panel, numbers, moment, j)
    _matrices(axes, numbers, moment)
    return figure


def _listing(axes: Axes, marked: int) -> None:
    for k, (line, text) in enumerate(PROCEDURE):
        y = 64 + 17 * k
        if line == marked:
            axes.add_patch(Rectangle((10, y - 8), 168, 16, color=BLUE, alpha=0.14, linewidth=0))
        number = str(line) if line < 8 else ""
        axes.text(22, y, number, size=TINY, color=MUTED, va="center", ha="right", family="DejaVu Sans Mono")
        weight = "bold" if line == marked else "normal"
        axes.text(28, y, text, size=TINY, color=INK, va="center", family="DejaVu Sans Mono", weight=weight)


Window = tuple[float, float, float]  # left, bottom and side of a square of the plane


def window(numbers: Numbers, line: int) -> Window:
    """The extent of a line's vectors, the same in all iterations."""
    ends = (numbers.inputs if line in (5, 6) else numbers.votes).reshape(-1, 2)
    low, high = ends.amin(0).clamp(max=-1), ends.amax(0).clamp(min=1)
    side = 1.22 * float((high - low).max())
    left, bottom = ((low + high - side) / 2).tolist()
    return left, bottom, side


def around_zero(reach: float) -> Window:
    return -reach, -reach, 2 * reach


def plane(axes: Axes, corners: Window, title: str = "") -> None:
    """A square of the plane with its unit circle, which contains all outputs."""
    left, bottom, side = corners
    axes.set(xlim=(left, left + side), ylim=(bottom, bottom + side), aspect="equal", xticks=[], yticks=[])
    axes.grid(False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_facecolor("#ffffff")
    axes.axhline(0, color=FAINT, linewidth=0.7)
    axes.axvline(0, color=FAINT, linewidth=0.7)
    axes.add_patch(Circle((0, 0), 1, fill=False, color=FAINT, linewidth=0.9, linestyle=(0, (3, 3))))
    axes.text(left + 0.03 * side, bottom + 0.92 * side, title, size=SMALL, weight="bold", color=INK)


def arrow(
    axes: Axes,
    end: Sequence[float],
    colour: str,
    width: float = 1.6,
    start: Sequence[float] = (0, 0),
    **more: float | str,
) -> None:
    """A vector from start to end."""
    style = {
        "arrowstyle": "-|>",
        "color": colour,
        "linewidth": width,
        "shrinkA": 0,
        "shrinkB": 0,
        "mutation_scale": 5 + 2 * width,
        **more,
    }
    axes.annotate("", xy=(float(end[0]), float(end[1])), xytext=(float(start[0]), float(start[1])), arrowprops=style)


def _vectors(axes: Axes, n: Numbers, moment: Moment, j: int) -> None:
    """The effect of a line on the vectors of upper capsule j."""
    t = max(0, moment.iteration - 1)
    if moment.line in (2, 4):
        for i, vote in enumerate(n.votes[:, j].tolist()):
            share = float(n.couplings[t, i, j]) if moment.line == 4 else 0.5
            arrow(axes, vote, LOWER[i], 0.6 + 3.4 * share)
            _at_tip(axes, vote, f"{i + 1}" if moment.line == 2 else f"{share:.2f}", LOWER[i])
    elif moment.line == 5:
        place = np.zeros(2)
        for i in range(len(n.votes)):
            after = place + float(n.couplings[t, i, j]) * n.votes[i, j].numpy()
            arrow(axes, after.tolist(), LOWER[i], 1.6, place.tolist())
            place = after
        arrow(axes, place.tolist(), INK, 1.3, linestyle=(0, (3, 2)))  # type: ignore[arg-type]
        _at_tip(axes, place.tolist(), f"s_{UPPER[j]}", INK)
    else:
        if moment.line == 7:
            for i, vote in enumerate(n.votes[:, j].tolist()):
                arrow(axes, vote, LOWER[i], 1.3)
                _at_tip(axes, vote, f"{float(n.agreement[t, i, j]):+.2f}".replace("-", "−"), LOWER[i])
        if moment.line == 6:
            arrow(axes, n.inputs[t, j].tolist(), MUTED, 1.3, linestyle=(0, (3, 2)))  # type: ignore[arg-type]
            _at_tip(axes, n.inputs[t, j].tolist(), f"s_{UPPER[j]}", MUTED)
        arrow(axes, n.outputs[t, j].tolist(), INK, 2.6)
        if moment.line != 7:
            _at_tip(axes, n.outputs[t, j].tolist(), f"v_{UPPER[j]}", INK, inward=moment.line == 6)


def _at_tip(axes: Axes, end: Sequence[float], words: str, colour: str, inward: bool = False) -> None:
    """A label near the tip of a vector."""
    x, y = float(end[0]), float(end[1])
    size = max(1e-6, float(np.hypot(x, y)))
    dx, dy = (-y / size, x / size) if inward else (x / size, y / size)
    axes.annotate(
        words, (x, y), (9 * dx, 8 * dy), textcoords="offset points", size=TINY, color=colour, ha="center", va="center"
    )


def _matrices(axes: Axes, n: Numbers, moment: Moment) -> None:
    """b_ij, c_ij and û · v after this line; what the line has computed is dark."""
    t = max(0, moment.iteration - 1)
    line = moment.line
    after = n.logits[t] + n.agreement[t] if line == 7 else n.logits[t]
    tables = [
        ("b_ij", after, line in (2, 7), True),
        ("c_ij", n.couplings[t], line == 4, line >= 4),
        ("û_j|i · v_j", n.agreement[t], line == 7, line == 7),
        ("s_j", n.inputs[t], line == 5, line in (5, 6, 7, 8)),
        ("v_j", n.outputs[t], line in (6, 8), line >= 6),
    ]
    for k, (name, values, fresh, known) in enumerate(tables):
        _matrix(axes, 16 + 100 * k, 238, name, values if known else None, fresh, named=k < 3)


def _matrix(axes: Axes, left: float, top: float, name: str, values: Tensor | None, fresh: bool, named: bool) -> None:
    """A small table with a row per lower capsule and columns A, B, or rows A, B and columns x, y."""
    colour = BLUE if fresh else MUTED
    axes.text(left, top, name, size=SMALL, weight="bold", color=colour, va="center")
    across, rows = (UPPER, None) if named else ("xy", UPPER)
    for k, letter in enumerate(across if values is not None else ""):
        axes.text(left + 40 + 34 * k, top + 14, letter, size=TINY, color=MUTED, ha="right", va="center")
    for r, row in enumerate([] if values is None else values.tolist()):
        y = top + 28 + 14 * r
        axes.text(
            left + 4,
            y,
            rows[r] if rows else str(r + 1),
            size=TINY,
            color=INK if rows else LOWER[r],
            weight="bold",
            va="center",
        )
        for k, value in enumerate(row):
            words = f"{value:.2f}".replace("-", "−")
            axes.text(
                left + 40 + 34 * k,
                y,
                words,
                size=TINY,
                color=INK if fresh else MUTED,
                ha="right",
                va="center",
                weight="bold" if fresh else "normal",
            )


@styled
def lower_capsules(u: Tensor, votes: Tensor) -> Figure:
    """The votes û_j|i = W_ij u_i: two predictions from the pose of each lower capsule."""
    figure, panels = row_of_panels(
        3,
        220,
        "The votes: û_j|i = W_ij u_i (Eq. 2)",
        "Each lower capsule predicts the poses of A and B with its own matrices.",
    )
    reach = 1.15 * float(max(lengths(votes).max(), lengths(u).max()))
    for axes, title, ends in zip(
        panels, ("lower capsules u_i", "votes for A", "votes for B"), (u, votes[:, 0], votes[:, 1]), strict=True
    ):
        plane(axes, around_zero(reach))
        axes.set_title(title)
        for i, end in enumerate(ends.tolist()):
            arrow(axes, end, LOWER[i])
            _at_tip(axes, end, str(i + 1), LOWER[i])
    return figure
