"""Phases as hues and couplings as colours, over the steps, for good and bad cases."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from capsnet.data import Batch
from capsnet.experiments.synchrony.binding import (
    adjusted_rand,
    centres_of,
    groups_over_time,
    objects_of,
    phases_of,
    routed_cells,
)
from capsnet.models.base import Model, Output
from capsnet.train.loop import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CANDIDATES, MOST_LINES = 200, 5


@torch.inference_mode()
def grouping(title: str, result: Result) -> Figure:
    """The image, the groups at some steps and the true objects, for six test images."""
    from capsnet.report.figures.gallery import Caption, gallery

    model, test = result.model.eval(), result.splits.test
    batch = test.gather(torch.arange(min(CANDIDATES, len(test))))
    output, (truth, alone) = model(batch.images, trace=True), objects_of(batch)
    index = adjusted_rand(truth, groups_over_time(model, output, batch)[-1], alone)
    chosen = cases(index)
    coloured = colours_over_time(model, output, batch)[:, chosen]
    images = batch.images[chosen]
    lines: dict[str, tuple[Tensor, Sequence[Caption]]] = {"image": (images.expand(-1, 3, -1, -1), [])}
    for step in some(len(coloured)):
        words = [Caption(f"{value:.2f}") for value in index[chosen].tolist()] if step == len(coloured) - 1 else []
        lines[f"step {step}" if output.oscillations else f"iteration {step + 1}"] = (coloured[step], words)
    lines["objects"] = (hues(truth[chosen] * math.pi, batch.parts.amax((1, 2))[chosen]), [])
    return gallery(title, "Good and bad cases of the test set.", lines)


def cases(index: Tensor) -> Tensor:
    """The first two images, the two with the highest index and the two with the lowest."""
    order = index.argsort(descending=True)
    return torch.cat([torch.arange(2), order[:2], order[-2:]])


def some(steps: int) -> list[int]:
    """At most five steps, the first and the last among them."""
    lines = min(steps, MOST_LINES)
    return sorted({round(k * (steps - 1) / max(1, lines - 1)) for k in range(lines)})


def colours_over_time(model: Model, output: Output, batch: Batch) -> Tensor:
    """Images in the colours of their phases or couplings: (t, b, 3, H, W)."""
    centres = centres_of(model)
    assert centres is not None
    shape = (batch.images.shape[2], batch.images.shape[3])
    if output.oscillations is not None:
        re, im = centres.at_pixels(phases_of(output), shape).unbind(2)
        angles = torch.atan2(im, re)
    else:
        angles = centres.at_pixels(routed_cells(model, output), shape) * math.pi
    return torch.stack([hues(step, batch.images[:, 0]) for step in angles])


def hues(angle: Tensor, brightness: Tensor) -> Tensor:
    """Angles (b, h, w) as hues, 0 red and π cyan, with brightness (b, h, w) in [0, 1]: (b, 3, h, w)."""
    third = 2 * math.pi / 3
    channels = [0.5 + 0.5 * torch.cos(angle - k * third) for k in range(3)]
    return torch.stack(channels, 1) * brightness[:, None]
