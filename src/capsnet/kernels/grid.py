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
from torch import Tensor

from capsnet.kernels.operators import differentiable_once, optional


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
    """The votes of a grid, seen through the sums above. Windows lie in the batch axis: results are (b·o, j, …)."""

    def __init__(self, u: Tensor, W: Tensor, windows: Windows) -> None:
        """u (b, cells·n, r·k) and W (blocks·n, j, k, c)."""
        self.u, self.W, self.count = u, W, windows.count
        self.types = u.shape[1] // (len(windows.starts) - 1)
        self.windows, self.places = windows, (windows.starts, windows.window, windows.block)

    def zeros(self) -> Tensor:
        """(b·o, j, q)."""
        rows = self.u.shape[2] // self.W.shape[2]
        return self.u.new_zeros(len(self.u) * self.count, self.W.shape[1], rows * self.W.shape[3])

    def capacity(self) -> Tensor:
        """(b·o, 1): what a parent receives when all children are active and divide themselves equally."""
        shares = self.windows.shares() * (self.types / self.W.shape[1])
        return shares.to(self.u).repeat(len(self.u)).unsqueeze(-1)

    def moments(self, a: Tensor, k: Tensor, mean: Tensor, P: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        S, one, two = moments(self.u, self.W, a, *map(self._apart, (k, mean, P)), *self.places)
        return S.flatten(0, 1), one.flatten(0, 1), two.flatten(0, 1)

    def attend(self, V: Tensor) -> Tensor:
        return attend(self.u, self.W, self._apart(V), *self.places).flatten(0, 1)

    def _apart(self, x: Tensor) -> Tensor:
        return x.unflatten(0, (-1, self.count))


@optional("grids of capsules are routed more slowly")
def fused() -> Any:
    """The compiled loops, after one forward and backward pass."""
    from capsnet.kernels.grid_numba import FusedGrid

    one = torch.ones(1, 1, 1, 1, dtype=torch.float32, device="cpu")
    windows = Windows.one(1)
    grid = FusedGrid(one[0], one, windows.starts, windows.window, windows.block, 1)
    grid.moments(one[0, 0], one[0], one, one)
    grid.gradients_of_moments(one[0, 0], one[0], one, one, one[0], one, one)
    return FusedGrid


@torch.library.custom_op("capsnet::grid_moments", mutates_args=())
def moments(
    u: Tensor, W: Tensor, a: Tensor, k: Tensor, mean: Tensor, P: Tensor, starts: Tensor, window: Tensor, block: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """a (b, cells·n), k (b, o, j), mean and P (b, o, j, q) → S (b, o, j), one and two (b, o, j, q)."""
    return fused()(u, W, starts, window, block, k.shape[1]).moments(a, k, mean, P)


@torch.library.custom_op("capsnet::grid_moments_backward", mutates_args=())
def _moments_backward(
    u: Tensor, W: Tensor, a: Tensor, k: Tensor, mean: Tensor, P: Tensor, starts: Tensor, window: Tensor, block: Tensor,
    g_S: Tensor, g_one: Tensor, g_two: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    grid = fused()(u, W, starts, window, block, k.shape[1])
    return grid.gradients_of_moments(a, k, mean, P, g_S, g_one, g_two)


@torch.library.custom_op("capsnet::grid_attend", mutates_args=())
def attend(u: Tensor, W: Tensor, V: Tensor, starts: Tensor, window: Tensor, block: Tensor) -> Tensor:
    """V (b, o, j, q) → s (b, o, j, q)."""
    return fused()(u, W, starts, window, block, V.shape[1]).attend(V)


@torch.library.custom_op("capsnet::grid_attend_backward", mutates_args=())
def _attend_backward(
    u: Tensor, W: Tensor, V: Tensor, starts: Tensor, window: Tensor, block: Tensor, g_s: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return fused()(u, W, starts, window, block, V.shape[1]).gradients_of_attend(V, g_s)


@moments.register_fake
def _(u, W, a, k, mean, P, starts, window, block):  # type: ignore[no-untyped-def]
    return torch.empty_like(k), torch.empty_like(mean), torch.empty_like(mean)


@_moments_backward.register_fake
def _(u, W, a, k, mean, P, starts, window, block, g_S, g_one, g_two):  # type: ignore[no-untyped-def]
    return tuple(torch.empty_like(x) for x in (u, W, a, k, mean, P))


@attend.register_fake
def _(u, W, V, starts, window, block):  # type: ignore[no-untyped-def]
    return torch.empty_like(V)


@_attend_backward.register_fake
def _(u, W, V, starts, window, block, g_s):  # type: ignore[no-untyped-def]
    return torch.empty_like(u), torch.empty_like(W), torch.empty_like(V)


def _keep(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs)


def _moments_gradients(ctx, *given):  # type: ignore[no-untyped-def]
    return *_moments_backward(*ctx.saved_tensors, *given), None, None, None


def _attend_gradients(ctx, g_s):  # type: ignore[no-untyped-def]
    return *_attend_backward(*ctx.saved_tensors, g_s), None, None, None


moments.register_autograd(_moments_gradients, setup_context=_keep)
attend.register_autograd(_attend_gradients, setup_context=_keep)
differentiable_once(_moments_backward, "EM or VB routing")
differentiable_once(_attend_backward, "routing")
