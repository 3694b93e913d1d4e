"""Comparisons around routing: neuron and capsule, sigmoid and squash, dot products, routing and attention.

All numbers come from `capsnet.nn.functional`, or from the trace of the routing that `byhand.py` draws.
"""

from __future__ import annotations

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle
from torch import Tensor

from capsnet.nn.functional import lengths, squash
from capsnet.report.figures.byhand import LOWER, UPPER, Numbers, around_zero, arrow, plane
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
    row_of_panels,
    sheet,
    styled,
)


@styled
def sigmoid_and_squash() -> Figure:
    """The sigmoid of a number and the squash of a vector (Eq. 1)."""
    figure, (left, middle, right) = row_of_panels(
        3,
        220,
        "Sigmoid and squash",
        "The sigmoid maps a number into (0, 1); squash (Eq. 1) maps a length into [0, 1) and keeps the direction.",
    )
    x = torch.linspace(-6, 6, 200)
    left.plot(x, x.sigmoid(), color=VERMILLION)
    left.set(title="Sigmoid of a number", xlabel="a", ylabel="σ(a)", ylim=(-0.05, 1.05))
    size = torch.linspace(0, 6, 200)
    middle.plot(size, lengths(squash(torch.stack([size, torch.zeros(200)], 1))), color=BLUE)
    middle.plot([0, 6], [1, 1], color=FAINT)
    middle.set(title="Length after squash", xlabel="‖s‖", ylabel="‖v‖", ylim=(-0.05, 1.05))
    plane(right, around_zero(2.6))
    right.set_title("Squash of vectors")
    for angle, length in ((0.35, 2.4), (1.35, 1.3), (2.3, 0.6), (3.6, 2.1), (4.9, 1.0)):
        s = torch.tensor([np.cos(angle), np.sin(angle)], dtype=torch.float32) * length
        arrow(right, s.tolist(), MUTED, 1.0, linestyle=(0, (3, 2)))  # type: ignore[arg-type]
        arrow(right, squash(s).tolist(), BLUE, 2.2)
    return figure


@styled
def neuron_and_capsule() -> Figure:
    """The operations of a neuron and of a capsule, step by step, with numbers."""
    rows = list(zip(STEPS, neuron(), capsule(), strict=True))
    figure, axes = sheet(WIDTH, 74 + 44 * len(rows))
    note = "The same steps with vectors instead of numbers; couplings come from agreement, not from learning."
    heading(axes, "Neuron and capsule", note)
    for left, name, colour in ((92, "neuron", VERMILLION), (284, "capsule", BLUE)):
        axes.text(left + 8, 54, name, size=TEXT, weight="bold", color=colour, va="center")
    for k, (step, ours, theirs) in enumerate(rows):
        axes.text(14, 84 + 44 * k, step, size=SMALL, color=MUTED, va="center")
        _operation(axes, 92, 66 + 44 * k, 182, *ours)
        _operation(axes, 284, 66 + 44 * k, 222, *theirs)
    return figure


STEPS = ("input", "transform", "weight", "sum", "nonlinearity", "output")


def neuron() -> list[tuple[str, str]]:
    """Formula and numbers of each step of a neuron."""
    x, w, bias = torch.tensor([0.8, 0.3]), torch.tensor([1.2, -0.7]), 0.1
    a = x @ w + bias
    return [
        ("numbers x_i", written(x)),
        ("–", ""),
        ("w_i x_i, with w learnt", written(x * w)),
        ("a = Σ_i w_i x_i + b", f"{float(a):.2f}"),
        ("h = σ(a)", f"{float(a.sigmoid()):.2f}"),
        ("a number: is it present?", ""),
    ]


def capsule() -> list[tuple[str, str]]:
    """Formula and numbers of each step of a capsule."""
    u, c = torch.tensor([[0.6, 0.2], [-0.3, 0.5]]), torch.tensor([0.7, 0.3])
    W = torch.tensor([[[2.0, -1.0], [1.0, 2.0]], [[0.0, 2.0], [-2.0, 1.0]]])
    u_hat = torch.einsum("iqp,ip->iq", W, u)
    s = torch.einsum("i,iq->q", c, u_hat)
    v = squash(s)
    return [
        ("vectors u_i", vectors(u)),
        ("û_j|i = W_ij u_i, with W learnt", vectors(u_hat)),
        ("c_ij û_j|i, with c by agreement", vectors(c[:, None] * u_hat)),
        ("s_j = Σ_i c_ij û_j|i", vectors(s[None])),
        ("v_j = squash(s_j)", vectors(v[None])),
        ("a vector: is it present, and how?", f"length {float(lengths(v)):.2f} and a direction"),
    ]


def _operation(axes: Axes, left: float, top: float, width: float, formula: str, value: str) -> None:
    shape = "round,pad=0,rounding_size=5"
    axes.add_patch(FancyBboxPatch((left, top), width, 36, boxstyle=shape, facecolor="#ffffff", edgecolor=FAINT))
    axes.text(left + 8, top + (12 if value else 18), formula, size=TINY + 0.5, color=INK, va="center")
    axes.text(left + 8, top + 26, value, size=TINY, color=MUTED, va="center", family="DejaVu Sans Mono")


def written(values: Tensor) -> str:
    return ", ".join(f"{value:.2f}".replace("-", "−") for value in values.tolist())


def vectors(values: Tensor) -> str:
    return "  ".join(f"({written(value)})" for value in values)


@styled
def similarity() -> Figure:
    """The dot product as the similarity of two vectors, from opposite to aligned."""
    figure, panels = row_of_panels(
        7, 176, "Agreement is a dot product: û · v",
        "From opposite to aligned: a negative value lowers the logit, zero leaves it, a positive value raises it.",
    )  # fmt: skip
    v = torch.tensor([1.0, 0.0])
    for axes, degrees in zip(panels, (180, 150, 120, 90, 60, 30, 0), strict=True):
        angle = np.deg2rad(degrees)
        vote = torch.tensor([np.cos(angle), np.sin(angle)], dtype=torch.float32)
        plane(axes, around_zero(1.35))
        arrow(axes, v.tolist(), INK, 2.2)
        dot = float(vote @ v)
        arrow(axes, vote.tolist(), BLUE if dot > 0.01 else VERMILLION if dot < -0.01 else MUTED)
        axes.set_title(f"{dot:+.2f}".replace("-", "−").replace("+0.00", "0").replace("−0.00", "0"), loc="center")
        axes.set_xlabel(f"{degrees}°")
    return figure


@styled
def one_falls(numbers: Numbers, of: int) -> Figure:
    """The two couplings of one lower capsule over the iterations, with the arithmetic."""
    figure, (left, right) = row_of_panels(
        2, 210, f"Capsule {of + 1}: one coupling falls, the other rises",
        "Couplings sum to 1, so agreement with one capsule lowers the coupling to the other.",
    )  # fmt: skip
    t = np.arange(1, len(numbers.couplings) + 1)
    for j, colour in ((0, BLUE), (1, VERMILLION)):
        left.plot(t, numbers.couplings[:, of, j], color=colour, marker="o", markersize=4.5, label=f"c to {UPPER[j]}")
    left.set(title="Couplings", xlabel="iteration", ylim=(0, 1))
    left.set_xticks(t)
    left.legend(loc="best", handlelength=1.4)
    right.axis("off")
    right.set_title("The arithmetic")
    lines = []
    for k in range(len(numbers.logits)):
        b, c, g = (x[k, of].tolist() for x in (numbers.logits, numbers.couplings, numbers.agreement))
        lines.append(f"{k + 1}  b = ({b[0]:+.2f}, {b[1]:+.2f})  →  c = ({c[0]:.2f}, {c[1]:.2f})")
        if k < len(numbers.logits) - 1:
            lines.append(f"   û·v = ({g[0]:+.2f}, {g[1]:+.2f})  is added to b")
    for k, line in enumerate(lines):
        words = line.replace("-", "−")
        right.text(
            0,
            0.92 - 0.16 * k,
            words,
            size=TINY,
            family="DejaVu Sans Mono",
            color=MUTED if "added" in line else INK,
            transform=right.transAxes,
            va="center",
        )
    return figure


@styled
def routing_and_attention(logits: Tensor) -> Figure:
    """The same logits (i, j) with a softmax over the upper capsules (routing) and over the lower ones (attention)."""
    figure, (left, right) = row_of_panels(
        2, 250, "Routing and attention",
        "The same logits. In routing each lower capsule distributes its output; in attention each upper one collects.",
    )  # fmt: skip
    for axes, title, weights, over in (
        (left, "Routing: softmax over j", logits.softmax(1), 1),
        (right, "Attention: softmax over i", logits.softmax(0), 0),
    ):
        _shares(axes, title, weights, over)
    return figure


def _shares(axes: Axes, title: str, weights: Tensor, over: int) -> None:
    """A matrix of shares with the sums of rows and columns; sums that are 1 by construction are dark."""
    i, j = weights.shape
    axes.set(title=title, xlim=(-0.9, j + 0.7), ylim=(i + 0.8, -0.9), xticks=[], yticks=[])
    axes.grid(False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    for r in range(i):
        axes.text(-0.62, r, str(r + 1), size=SMALL, color=LOWER[r], weight="bold", va="center", ha="center")
        for k in range(j):
            share = float(weights[r, k])
            axes.add_patch(
                Rectangle((k - 0.46, r - 0.42), 0.92, 0.84, color=BLUE, alpha=0.1 + 0.85 * share, linewidth=0)
            )
            axes.text(k, r, f"{share:.2f}", size=SMALL, color=PAPER if share > 0.5 else INK, ha="center", va="center")
    for k in range(j):
        axes.text(k, -0.68, UPPER[k] if j == 2 else str(k + 1), size=SMALL, weight="bold", ha="center", va="center")
        axes.text(
            k,
            i - 0.2,
            f"Σ {float(weights[:, k].sum()):.2f}",
            size=TINY,
            ha="center",
            va="center",
            color=INK if over == 0 else MUTED,
            weight="bold" if over == 0 else "normal",
        )
    for r in range(i):
        axes.text(
            j - 0.15,
            r,
            f"Σ {float(weights[r].sum()):.2f}",
            size=TINY,
            va="center",
            color=INK if over == 1 else MUTED,
            weight="bold" if over == 1 else "normal",
        )
