"""Routing between the capsules of a grid without storing the votes: the fast form of `ConvCaps` and `ClassCaps`.

A lower capsule i of a cell is seen by several windows o, and its parents are the upper capsules j of all of them. Poses
are r×k matrices M_i, transformations k×c matrices W, and votes V = M_i W; a vector is a matrix with one row. Two sums
over the children of each parent are all that an iteration of routing needs, with softmax over ALL parents of a child:

    moments   R = softmax(k_j − ½ Σ_q P_j^q (d^q)²) with d = V − μ_j, r = R a_i:  S = Σ r,  one = Σ r d,  two = Σ r d²
    attend    c = softmax(V · U_j):                                               s = Σ c V

EM and variational Bayes routing are made of the first, as in `capsnet.kernels.moments`, and dynamic routing of the
second, as in `capsnet.kernels.routing`: its logits are agreements with the sum U of all outputs so far. Votes are
recomputed for each sum, forward and backward, so memory grows with the number of capsules and not with that of the
votes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from capsnet.kernels.operators import LANES, differentiable_once, optional


@dataclass(frozen=True)
class Windows:
    """Which windows see the cells of a grid: entries starts[cell] … starts[cell + 1] − 1 of the other two."""

    starts: Tensor  # (cells + 1,)
    window: Tensor  # number of a window
    block: Tensor  # number of the transformations with which the cell votes in that window
    count: int  # of windows

    @classmethod
    def of(cls, cell: Tensor, filled: Tensor, cells: int) -> Windows:
        """cell (o, k) is what a window's offset sees, and `filled` (o, k) whether there are capsules."""
        o, k = cell.shape
        order = cell[filled].argsort(stable=True)
        starts = torch.bincount(cell[filled], minlength=cells).cumsum(0)
        window, block = (x.expand(o, k)[filled][order] for x in (torch.arange(o)[:, None], torch.arange(k)))
        return cls(torch.cat([starts.new_zeros(1), starts]), window.contiguous(), block.contiguous(), o)

    @classmethod
    def one(cls, cells: int) -> Windows:
        """A single window that sees every cell with the same transformations."""
        nothing = torch.zeros(cells, dtype=torch.long)
        return cls(torch.arange(cells + 1), nothing, nothing.clone(), 1)

    def shares(self) -> Tensor:
        """(o,): for how many cells a window would count, if every cell were divided equally among its windows."""
        seen = self.starts.diff()
        each = (1 / seen.clamp(min=1)).repeat_interleave(seen)
        return each.new_zeros(self.count).index_add(0, self.window, each)


class GridVotes:
    """The votes of a grid, seen through the sums above.

    As the loops take sixteen examples at a time, b is divided into (tile, lane), and what passes between iterations is
    (tile, lane, o, j, …) with the lanes last in memory, so that poses are not rearranged on the way if their columns
    are a multiple of four. `tiled` and `untiled` convert from (b, …) and back. Fewer than sixteen examples are one tile
    with as many lanes, which is filled up inside the loops only.
    """

    def __init__(self, u: Tensor, W: Tensor, windows: Windows) -> None:
        """u (b, cells·n, r·k) and W (blocks·n, j, k, c)."""
        self.b, self.i, p = u.shape
        self.lanes = min(self.b, LANES)
        (self.n, self.j, k, self.c), self.windows = W.shape, windows
        self.rows = p // k
        # zeros up to multiples of four change nothing
        self.W = F.pad(W, (0, -self.c % 4, 0, -k % 4)) if self.c % 4 or k % 4 else W.contiguous()
        u = u.unflatten(-1, (self.rows, k))
        self.u = in_lanes(self.tiled(F.pad(u, (0, -k % 4)) if k % 4 else u))
        self.places = (windows.starts, windows.window, windows.block)

    def tiled(self, x: Tensor) -> Tensor:
        """(b, …) → (tile, lane, …); the last tile is filled up with zeros."""
        missing = -self.b % self.lanes
        x = torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x
        return x.unflatten(0, (-1, self.lanes))

    def untiled(self, x: Tensor) -> Tensor:
        """(tile, lane, o, …) → (b·o, …)."""
        return x.flatten(0, 1)[: self.b].flatten(0, 1)

    def zeros(self) -> Tensor:
        """(tile, lane, o, j, q)."""
        zeros = self.u.new_zeros(len(self.u), self.windows.count, self.j, self.rows * self.c, self.lanes)
        return zeros.movedim(-1, 1)

    def capacity(self) -> Tensor:
        """(o, 1): what a parent receives when all children are active and divide themselves equally."""
        types = self.i / (len(self.windows.starts) - 1)
        return (self.windows.shares() * (types / self.j)).to(self.u).unsqueeze(-1)

    def moments(self, a: Tensor, k: Tensor | None, mean: Tensor, P: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """a (b, i), k (tile, lane, o, j), μ and P (tile, lane, o, j, q) → S like k, one and two like μ.

        Without k, all parents have equal shares: μ counts as zero, and P does not matter.
        """
        known = (mean[..., 0] if k is None else k, self._filled(mean), self._filled(P))
        found = moments(self.u, self.W, in_lanes(self.tiled(a)), *map(in_lanes, known), *self.places, k is None)
        S, one, two = (x.movedim(-1, 1) for x in found)
        return S, self._cut(one), self._cut(two)

    def attend(self, V: Tensor | None) -> Tensor:
        """V and s are (tile, lane, o, j, q); without V, all parents have equal shares."""
        known = in_lanes(self._filled(self.zeros() if V is None else V))
        return self._cut(attend(self.u, self.W, known, *self.places, V is None).movedim(-1, 1))

    def _filled(self, x: Tensor) -> Tensor:
        """Columns of poses filled up to a multiple of four."""
        return F.pad(x.unflatten(-1, (-1, self.c)), (0, -self.c % 4)).flatten(-2) if self.c % 4 else x

    def _cut(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.rows, -1))[..., : self.c].flatten(-2) if self.c % 4 else x


def in_lanes(x: Tensor) -> Tensor:
    """(tile, lane, …) → (tile, …, lane), contiguous."""
    return x.movedim(1, -1).contiguous()


@optional("grids of capsules are routed more slowly")
def fused() -> Any:
    """The compiled loops, after one forward and backward pass."""
    from capsnet.kernels.grid_numba import FusedGrid

    windows, u = Windows.one(1), torch.ones(1, 1, 1, 4, LANES, dtype=torch.float32, device="cpu")
    a, k, V, W = u[:, :, 0, 0], u[:, :, 0, :1], u[:, :, 0, None], torch.ones(1, 1, 4, 4, dtype=u.dtype, device="cpu")
    grid = FusedGrid(u, W, windows.starts, windows.window, windows.block, 1)
    grid.moments(a, k, V, V, False)
    grid.gradients_of_moments(a, k, V, V, False, k, V, V)
    return FusedGrid


@torch.library.custom_op("capsnet::grid_moments", mutates_args=())
def moments(
    u: Tensor, W: Tensor, a: Tensor, k: Tensor, mean: Tensor, P: Tensor, starts: Tensor, window: Tensor, block: Tensor,
    equal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """With the layouts of `grid_numba`: a (tile, i, lane), k (tile, o, j, lane), mean and P (tile, o, j, q, lane) →
    S like k, one and two like mean."""
    return fused()(u, W, starts, window, block, k.shape[1]).moments(a, k, mean, P, equal)


@torch.library.custom_op("capsnet::grid_moments_backward", mutates_args=())
def _moments_backward(
    u: Tensor, W: Tensor, a: Tensor, k: Tensor, mean: Tensor, P: Tensor, starts: Tensor, window: Tensor, block: Tensor,
    g_S: Tensor, g_one: Tensor, g_two: Tensor, equal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients on the first six; those on k, mean and P are empty if shares are equal."""
    grid = fused()(u, W, starts, window, block, k.shape[1])
    return grid.gradients_of_moments(a, k, mean, P, equal, g_S, g_one, g_two)


@torch.library.custom_op("capsnet::grid_attend", mutates_args=())
def attend(u: Tensor, W: Tensor, V: Tensor, starts: Tensor, window: Tensor, block: Tensor, equal: bool) -> Tensor:
    """V (tile, o, j, q, lane) → s (tile, o, j, q, lane)."""
    return fused()(u, W, starts, window, block, V.shape[1]).attend(V, equal)


@torch.library.custom_op("capsnet::grid_attend_backward", mutates_args=())
def _attend_backward(
    u: Tensor, W: Tensor, V: Tensor, starts: Tensor, window: Tensor, block: Tensor, g_s: Tensor, equal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return fused()(u, W, starts, window, block, V.shape[1]).gradients_of_attend(V, equal, g_s)


@moments.register_fake
def _(u, W, a, k, mean, P, starts, window, block, equal):  # type: ignore[no-untyped-def]
    return torch.empty_like(k), torch.empty_like(mean), torch.empty_like(mean)


@_moments_backward.register_fake
def _(u, W, a, k, mean, P, starts, window, block, g_S, g_one, g_two, equal):  # type: ignore[no-untyped-def]
    of_windows = [x.new_empty(0) if equal else torch.empty_like(x) for x in (k, mean, P)]
    return *(torch.empty_like(x) for x in (u, W, a)), *of_windows


@attend.register_fake
def _(u, W, V, starts, window, block, equal):  # type: ignore[no-untyped-def]
    return torch.empty_like(V)


@_attend_backward.register_fake
def _(u, W, V, starts, window, block, g_s, equal):  # type: ignore[no-untyped-def]
    return torch.empty_like(u), torch.empty_like(W), V.new_empty(0) if equal else torch.empty_like(V)


def _keep(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, ctx.equal = inputs
    ctx.save_for_backward(*tensors)


def _moments_gradients(ctx, *given):  # type: ignore[no-untyped-def]
    full = [x.contiguous() for x in given]
    g_u, g_W, g_a, *of_windows = _moments_backward(*ctx.saved_tensors, *full, ctx.equal)
    return g_u, g_W, g_a, *([None] * 3 if ctx.equal else of_windows), *[None] * 4


def _attend_gradients(ctx, g_s):  # type: ignore[no-untyped-def]
    g_u, g_W, g_V = _attend_backward(*ctx.saved_tensors, g_s.contiguous(), ctx.equal)
    return g_u, g_W, None if ctx.equal else g_V, *[None] * 4


moments.register_autograd(_moments_gradients, setup_context=_keep)
attend.register_autograd(_attend_gradients, setup_context=_keep)
differentiable_once(_moments_backward, "EM or VB routing")
differentiable_once(_attend_backward, "routing")
