"""Which pixels does a network group? Phases or couplings → two groups of pixels → adjusted Rand index.

Only pixels that belong to one object alone count: neither the background nor the overlap. A pixel takes the group of
the unit whose receptive field has its centre nearest to it.

- A synchronisation network: 2-means of the mean phase of each position, as points on the unit circle.
- A capsule network: a position belongs to that one of the two most active classes to which its primary capsules send
  more, Σ_n a_n c_nj over the types n at the position, with a_n the length of the primary capsule.
- The limit of a grid: each position belongs to the object that has most of its pixels.

The adjusted Rand index (Hubert and Arabie 1985) is 1 for the true groups and 0 on average for random ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from capsnet.data import Batch
from capsnet.models.base import Model, Output
from capsnet.models.sync import BRIGHT

STARTS, ROUNDS = 4, 10  # of 2-means: directions of the first two means, and updates


@dataclass(frozen=True)
class Centres:
    """The unit at (y, x) of the grid has its centre at offset + stride · (y, x), in pixels."""

    grid: tuple[int, int]
    stride: int
    offset: float

    def at_pixels(self, cells: Tensor, shape: tuple[int, int]) -> Tensor:
        """Values of the grid (…, h, w) at every pixel (…, H, W), from the nearest unit."""
        rows, columns = (self.nearest(side, units) for side, units in zip(shape, self.grid, strict=True))
        return cells[..., rows, :][..., columns]

    def cell_of_pixels(self, shape: tuple[int, int]) -> Tensor:
        """The number of the nearest unit, row by row, for every pixel row by row: (H · W)."""
        rows, columns = (self.nearest(side, units) for side, units in zip(shape, self.grid, strict=True))
        return (rows[:, None] * self.grid[1] + columns).flatten()

    def sums(self, pixels: Tensor) -> Tensor:
        """Values of pixels (b, H, W), summed for each unit that is nearest to them: (b, h, w)."""
        cells = self.cell_of_pixels((pixels.shape[1], pixels.shape[2])).expand(len(pixels), -1)
        total = torch.zeros(len(pixels), self.grid[0] * self.grid[1])
        return total.scatter_add_(1, cells, pixels.flatten(1).float()).unflatten(1, self.grid)

    def nearest(self, side: int, units: int) -> Tensor:
        return ((torch.arange(side) - self.offset) / self.stride).round().long().clamp(0, units - 1)


def centres_of(model: Model) -> Centres | None:
    """Where the units of a model are whose phases or couplings are measured; None for a model without either."""
    shown = model.shown()
    if "phases" in shown:
        return Centres(tuple(shown["phases"]["grid"]), shown["phases"]["stride"], 0.0)
    if shown["capsules"]:
        field = shown["receptive"]
        return Centres(tuple(shown["grid"]), field["stride"], field["offset"] + (field["size"] - 1) / 2)
    return None


def objects_of(batch: Batch) -> tuple[Tensor, Tensor]:
    """The object that each pixel belongs to, and whether it belongs to one alone: two of (b, H, W)."""
    assert batch.parts is not None
    bright = batch.parts.amax(2) > BRIGHT
    return bright[:, 1].long(), bright.sum(1) == 1


def groups_over_time(model: Model, output: Output, batch: Batch) -> Tensor:
    """The group of each pixel, 0 or 1, at every step: (t, b, H, W)."""
    centres, (_, alone) = centres_of(model), objects_of(batch)
    assert centres is not None
    shape = (batch.images.shape[2], batch.images.shape[3])
    if output.oscillations is not None:
        weight = centres.sums(alone)
        return centres.at_pixels(torch.stack([two_means(one, weight) for one in phases_of(output)]), shape)
    return centres.at_pixels(routed_cells(model, output), shape)


def phases_of(output: Output) -> Tensor:
    """The mean phase of each position as a point on the unit circle: (t, b, 2, h, w)."""
    assert output.oscillations is not None
    field = output.oscillations.mean_field()
    assert field.im is not None
    return torch.nn.functional.normalize(torch.stack([field.re, field.im], 2), dim=2)


def routed_cells(model: Model, output: Output) -> Tensor:
    """Which of the two most active classes each position is routed to: 0 or 1 (t, b, h, w)."""
    assert output.trace is not None
    assert output.primary is not None
    height, width = model.shown()["grid"]
    sent = output.trace.couplings * output.primary.norm(dim=-1)[None, :, :, None]
    cells = sent.unflatten(2, (height, width, -1)).sum(4)  # t b h w j
    best = output.activations.topk(2).indices.sort(1).values
    chosen = best[None, :, None, None, :].expand(*cells.shape[:-1], 2)
    first, second = cells.gather(-1, chosen).unbind(-1)
    return (second > first).long()


def two_means(points: Tensor, weights: Tensor) -> Tensor:
    """Weighted 2-means: points (b, 2, h, w) on the unit circle with weights (b, h, w) → groups 0 or 1 (b, h, w).

    It starts from opposite directions, four times, and keeps the groups with the smallest sum of squared distances.
    """
    x, weight = points.flatten(2), weights.flatten(1).to(points)[:, None]
    best, groups = x.new_full((len(x),), torch.inf), torch.zeros_like(weights.flatten(1), dtype=torch.long)
    for start in range(STARTS):
        angle = torch.tensor(start * torch.pi / STARTS)
        direction = torch.stack([angle.cos(), angle.sin()])
        means = torch.stack([direction, -direction]).expand(len(x), 2, 2)  # b k 2
        for _ in range(ROUNDS):
            distances = (x[:, None] - means[..., None]).square().sum(2)  # b k n
            mine = distances.argmin(1)
            member = torch.stack([mine == 0, mine == 1], 1) * weight
            totals = member.sum(2, keepdim=True)
            means = torch.where(totals > 0, torch.einsum("bkn,bdn->bkd", member, x) / totals.clamp(min=1e-9), means)
        spent = (distances.amin(1) * weight[:, 0]).sum(1)
        better = spent < best - 1e-6
        best, groups = torch.where(better, spent, best), torch.where(better[:, None], mine, groups)
    return groups.view_as(weights)


def limit_of(centres: Centres, batch: Batch) -> Tensor:
    """The index that the true groups have if every position can have only one: (b,)."""
    truth, alone = objects_of(batch)
    for_second = centres.sums((2 * truth - 1) * alone)
    found = centres.at_pixels((for_second > 0).long(), (truth.shape[1], truth.shape[2]))
    return adjusted_rand(truth, found, alone)


def adjusted_rand(truth: Tensor, found: Tensor, counted: Tensor) -> Tensor:
    """The adjusted Rand index of two groupings 0 or 1 of the counted pixels: three of (b, H, W) → (b,).

    >>> truth, all_of_them = torch.tensor([[[0, 0, 1, 1]]]), torch.ones(1, 1, 4, dtype=torch.bool)
    >>> adjusted_rand(truth, 1 - truth, all_of_them), adjusted_rand(truth, torch.zeros_like(truth), all_of_them)
    (tensor([1.]), tensor([0.]))
    """
    one, other = (
        torch.nn.functional.one_hot(each, 2).flatten(1, 2) * counted.flatten(1)[..., None] for each in (truth, found)
    )
    table = torch.einsum("bnk,bnl->bkl", one.double(), other.double())
    both, rows, columns = (pairs(part).flatten(1).sum(1) for part in (table, table.sum(2), table.sum(1)))
    expected = rows * columns / pairs(table.sum((1, 2))).clamp(min=1)
    most = (rows + columns) / 2
    return torch.where(most > expected, (both - expected) / (most - expected).clamp(min=1e-9), 1.0).float()


def pairs(n: Tensor) -> Tensor:
    """The number of pairs of n pixels."""
    return n * (n - 1) / 2


@torch.inference_mode()
def measured_binding(model: Model, batch: Batch) -> dict[str, Any]:
    """Mean index over the images of a batch at every step, at the last step, and the limit of the grid."""
    centres = centres_of(model)
    if centres is None:
        return {}
    output, (truth, alone) = model(batch.images, trace=True), objects_of(batch)
    steps = [adjusted_rand(truth, groups, alone) for groups in groups_over_time(model, output, batch)]
    return {
        "index_by_step": [round(float(step.mean()), 4) for step in steps],
        "index": round(float(steps[-1].mean()), 4),
        "index_above_half_percent": round(100 * float((steps[-1] > 0.5).float().mean()), 2),
        "index_limit": round(float(limit_of(centres, batch).mean()), 4),
    }
