"""Routing by iteration (after Fig. A.1), from its trace."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from capsnet.report.figures.names import short_names
from capsnet.report.figures.style import BLUE, GREEN, MUTED, VERMILLION, row_of_panels, styled
from capsnet.report.figures.tiles import as_pixels
from capsnet.routing import Trace
from capsnet.routing.measures import entropy


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
    """The routing of one example by iteration: couplings, activations, entropy.

    Blue is the true class (by default the most active one), vermillion the runner-up, grey the others.
    With the example's `image` (c, h, w), and the `grid` of the primary capsules if those are routed, a first panel
    shows which positions of the image contribute to the blue class.
    """
    active = trace.activations[:, example].detach().cpu()  # t j
    received = trace.couplings[:, example].mean(1).detach().cpu()  # t j: the share of all lower capsules' output
    order = active[-1].argsort(descending=True).tolist()
    blue = order[0] if true is None else true
    marked = {blue: BLUE, **dict.fromkeys([k for k in order if k != blue][:1], VERMILLION)}
    names = short_names(classes, 10)
    title, note = f"Routing of one “{names[blue]}”", f"blue: “{names[blue]}”"
    note += "".join(f"; vermillion: the runner-up, “{names[k]}”" for k in marked if k != blue)
    figure, panels = row_of_panels(3 + (image is not None), 190, title, note)
    if image is not None:
        _sources(panels.pop(0), image, contributions(trace, example, blue), grid)
    _class_lines(panels[0], 100 * received, names, marked, "Coupling received", "% of all")
    _class_lines(panels[1], active, names, marked, "Activation", "")
    panels[1].set_ylim(0, 1)
    _entropy(panels[2], trace.couplings[:, example].detach().cpu())
    return figure


def contributions(trace: Trace, example: int, label: int) -> Tensor:
    """(i,) what each lower capsule adds to an upper capsule at the end: c_ij û_{j|i} along the direction of v_j."""
    direction = torch.nn.functional.normalize(trace.outputs[-1, example, label], dim=0)
    added = trace.couplings[-1, example, :, label] * (trace.votes[example, :, label] @ direction)
    return added.detach().cpu()


def _sources(axes: Axes, image: Tensor, added: Tensor, grid: tuple[int, int] | None) -> None:
    """The image with a disc at each grid position for the contribution of its capsules; hollow if negative."""
    height, width = image.shape[-2:]
    axes.imshow(as_pixels(image), extent=(0, width, height, 0), interpolation="auto")
    axes.set(title="Source of votes" if grid else "Input", xlim=(0, width), ylim=(height, 0))
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
    """One line per class over the iterations (t, j); marked classes in colour, with names."""
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
    """Entropy of the couplings: 100 % for equal couplings to all classes, 0 for all of them to one."""
    every = entropy(couplings)  # t i
    marks = torch.tensor([0.0, 0.1, 0.5, 0.9], dtype=every.dtype)
    least, low, middle, high = (100 * torch.quantile(every, marks, dim=1)).numpy()
    t = np.arange(1, len(every) + 1)
    axes.fill_between(t, low, high, color=GREEN, alpha=0.18, linewidth=0)
    axes.plot(t, least, color=GREEN, linewidth=1, linestyle=(0, (3, 2)), label="most decided")
    axes.plot(t, middle, color=GREEN, marker="o", markersize=4.5, label="median")
    _iterations(axes, t, "Entropy", "% of log j")
    axes.set_ylim(min(99.0, float(least.min()) - 0.2), 100.05 if least.min() > 98 else 101)
    axes.legend(loc="best", handlelength=1.4, borderaxespad=0, labelcolor=MUTED)
