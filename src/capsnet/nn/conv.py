"""Convolutional capsule layers: an upper capsule sees the lower capsules of a window (Hinton, Sabour and Frosst 2018).

Capsules lie on a grid, (b, h, w, types, dim), with activations (b, h, w, types) where a routing has its own. One set of
transformations serves all positions, as in a convolution. A lower capsule belongs to several windows, and its couplings
sum to one over ALL its parents, including those at other positions (`GridParents`); normalising each window separately
would count capsules at the border and in overlaps wrongly. `ConvCaps` routes a grid to a smaller grid and `ClassCaps`
routes all of it to the class capsules.

Memory is bounded. Where a routing has a kernel for grids (`capsnet.kernels.grid`), votes are never stored. Otherwise
examples are routed in chunks whose votes fit into `VOTE_BYTES`, and in training each chunk is recomputed in the
backward pass instead of stored.
"""

from __future__ import annotations

import math
from itertools import repeat
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from capsnet.errors import UserError
from capsnet.kernels import dispatch
from capsnet.nn.functional import Capsules, at_least_float32
from capsnet.nn.layers import DenseCaps, matrix_side, routing_of
from capsnet.routing.base import Parents, Routed, Routing, Sizes, lower_activations
from capsnet.routing.options import RoutingOptions

VOTE_BYTES = 1 << 28  # of one chunk of examples
UPPER_BYTES = 1 << 24  # of upper poses; above this, the backward pass recomputes those of every iteration, too


class GridParents(Parents):
    """Parents of the lower capsules on a grid: the upper capsules of every window that contains them.

    Windows lie in the batch axis: x is (b·o, k·n, j) with o output positions, k window offsets and n lower types.
    `size` includes the padding, whose cells hold no capsules: their couplings are zero.
    """

    partial = True

    def __init__(self, size: tuple[int, int], kernel: int, stride: int, types: int, padding: int = 0) -> None:
        self.cells, self.types, self.padding = size[0] * size[1], types, padding
        rows, columns = ((torch.arange(0, side - kernel + 1, stride)) for side in size)
        offset = torch.arange(kernel)
        y, x = rows[:, None] + offset, columns[:, None] + offset  # (out, k)
        cell = y[:, None, :, None] * size[1] + x[None, :, None, :]  # oy ox ky kx
        self.outputs = (len(rows), len(columns))
        self.cell = cell.flatten(2).flatten(0, 1)  # (o, k): the position that each window's offset reads
        filled = F.pad(torch.ones(size[0] - 2 * padding, size[1] - 2 * padding, dtype=torch.bool), (padding,) * 4)
        self.filled = filled.flatten()[self.cell]  # (o, k): whether there are capsules

    def windows(self) -> Any:
        """The windows that see each cell, in the form that the kernels take."""
        return dispatch.windows_of(self.cell, self.filled, self.cells)

    def gather(self, per_child: Tensor) -> Tensor:
        """(b, cells, n) → (b·o, k·n, 1): each child's number at every place where a window sees it."""
        seen = per_child[:, self.cell.to(per_child.device)]  # b o k n
        return seen.flatten(2).flatten(0, 1).unsqueeze(-1)

    def _children(self, x: Tensor) -> Tensor:
        """(b·o, k·n) → (b, o·k, n)."""
        o, k = self.cell.shape
        return x.unflatten(0, (-1, o)).unflatten(2, (k, self.types)).flatten(1, 2)

    def sum(self, x: Tensor) -> Tensor:
        parts = self._children(x.sum(-1))
        total = parts.new_zeros(parts.shape[0], self.cells, self.types)
        return self.gather(total.index_add(1, self.cell.flatten().to(x.device), parts))

    def amax(self, x: Tensor) -> Tensor:
        return self._extreme(x.amax(-1), "amax", -torch.inf)

    def amin(self, x: Tensor) -> Tensor:
        return self._extreme(x.amin(-1), "amin", torch.inf)

    def _extreme(self, x: Tensor, reduce: str, start: float) -> Tensor:
        parts = self._children(x)
        index = self.cell.flatten().to(x.device)[None, :, None].expand_as(parts)
        extreme = parts.new_full((parts.shape[0], self.cells, self.types), start)
        return self.gather(extreme.scatter_reduce(1, index, parts, reduce))

    def softmax(self, b_ij: Tensor) -> Tensor:
        weight = (b_ij - self.amax(b_ij).detach()).exp()
        return self._only_filled(weight / self.sum(weight))

    def _only_filled(self, c_ij: Tensor) -> Tensor:
        if not self.padding:
            return c_ij
        filled = self.filled.repeat_interleave(self.types, 1).to(c_ij)  # (o, k·n)
        return (c_ij.unflatten(0, (-1, len(filled))) * filled.unsqueeze(-1)).flatten(0, 1)


class ConvCaps(nn.Module):
    """Capsules on a grid, routed to capsules on a smaller grid. (b, h, w, n, p) → (b, h', w', j, q).

    `routing` is a name, options or a `Routing`, as for `DenseCaps`; options of a named algorithm may follow as
    keywords. A routing with activations of its own returns `Capsules(poses, activations)`.

    >>> layer = ConvCaps(8, 4, 16, 6, kernel=3, stride=2)
    >>> layer(torch.randn(2, 7, 7, 8, 4)).shape
    torch.Size([2, 3, 3, 16, 6])
    """

    def __init__(
        self,
        lower_types: int,
        lower_dim: int,
        upper_types: int,
        upper_dim: int,
        kernel: int = 3,
        stride: int = 1,
        padding: int = 0,
        *,
        routing: str | RoutingOptions | Routing = "dynamic",
        matrix: bool = False,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.lower_types, self.lower_dim, self.upper_types, self.upper_dim = (
            lower_types, lower_dim, upper_types, upper_dim,
        )  # fmt: skip
        self.kernel, self.stride, self.padding, self.matrix = kernel, stride, padding, matrix
        side = matrix_side(lower_dim, upper_dim) if matrix else 0
        transform = (side, side) if matrix else (upper_dim, lower_dim)
        lower = kernel * kernel * lower_types
        check_windows(kernel, stride, padding)
        self.weight = nn.Parameter(torch.empty(lower, upper_types, *transform, device=device, dtype=dtype))
        self.routing = routing_of(routing, options)
        sizes = Sizes(lower, lower_dim, upper_types, upper_dim, lower, matrix)
        self.routing.build(sizes, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As for `DenseCaps`: s_j starts with entries of about 0.1, unless the routing asks for something else."""
        windows = (self.kernel / self.stride) ** 2  # how many windows see a child
        assert self.routing.sizes is not None
        couplings = self.routing.initial_coupling(self.routing.sizes) / max(1.0, windows)
        std = self.routing.initial_std() or min(1.0, 1 / (3 * couplings * len(self.weight) ** 0.5))
        nn.init.normal_(self.weight, std=std)
        self.routing.reset_parameters()

    def forward(self, capsules: Tensor | Capsules) -> Tensor | Capsules:
        poses, a = (capsules, None) if isinstance(capsules, Tensor) else capsules
        routed = self.route(poses, a)
        return Capsules(routed.poses, routed.activations) if self.routing.own_activations else routed.poses

    def route(self, poses: Tensor, a: Tensor | None = None, **options: Any) -> Routed:
        """Route a grid of poses (b, h, w, n, p) with activations (b, h, w, n).

        `options` replace those of the routing for this call only.
        """
        self.check(poses)
        routing = self.routing.with_options(**options) if options else self.routing
        poses, a = self.pad(poses, a)
        size = (poses.shape[1], poses.shape[2])
        parents = GridParents(size, self.kernel, self.stride, self.lower_types, self.padding)
        if (fast := self._without_votes(routing, poses, a, parents)) is not None:
            return fast
        parts = [self._chunk(routing, *chunk, parents) for chunk in self.chunks(poses, a, len(parents.cell))]
        poses, activations = (torch.cat(column) for column in zip(*parts, strict=True))
        return Routed(poses, routing.over_batch(activations))

    def _without_votes(self, routing: Routing, poses: Tensor, a: Tensor | None, parents: GridParents) -> Routed | None:
        """The layer by a kernel, or None where the plain form is as good."""
        if torch.compiler.is_compiling() or not dispatch.enabled():
            return None
        inputs = (poses.flatten(1, 3), self.weight, None if a is None else a.flatten(1, 3), parents.windows())
        grid = (poses.shape[0], *parents.outputs)
        upper = dispatch.tiled_examples(len(poses)) * math.prod(parents.outputs) * self.upper_types * self.upper_dim
        if torch.is_grad_enabled() and 4 * upper > UPPER_BYTES:
            routed = checkpoint(routing.on_grid, *inputs, use_reentrant=False, preserve_rng_state=False)
        else:
            routed = routing.on_grid(*inputs)
        if routed is None:
            return None
        return Routed(routed.poses.unflatten(0, grid), routing.over_batch(routed.activations.unflatten(0, grid)))

    def chunks(self, poses: Tensor, a: Tensor | None, positions: int) -> list[tuple[Tensor, Tensor | None]]:
        """Examples in chunks whose votes fit into `VOTE_BYTES`; an exported program takes batches of any size."""
        if torch.compiler.is_exporting():
            return [(poses, a)]
        votes = 4 * positions * self.weight.shape[0] * self.upper_types * self.upper_dim
        size = max(1, VOTE_BYTES // votes)
        return list(zip(poses.split(size), repeat(None) if a is None else a.split(size), strict=False))

    def _chunk(self, routing: Routing, poses: Tensor, a: Tensor | None, parents: GridParents) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled() and not torch.compiler.is_exporting():
            return checkpoint(self._route, routing, poses, a, parents, use_reentrant=False, preserve_rng_state=False)
        return self._route(routing, poses, a, parents)

    def _route(self, routing: Routing, poses: Tensor, a: Tensor | None, parents: GridParents) -> tuple[Tensor, Tensor]:
        b, cell = poses.shape[0], parents.cell.to(poses.device)
        windows = poses.flatten(1, 2)[:, cell].flatten(2, 3).flatten(0, 1)  # (b·o, k·n, p)
        seen = None if a is None else a.flatten(1, 2)[:, cell].flatten(2, 3).flatten(0, 1)
        routed = routing(windows, self.weight, seen, parents=parents)
        grid = (b, *parents.outputs)
        return routed.poses.unflatten(0, grid), routed.activations.unflatten(0, grid)

    def pad(self, poses: Tensor, a: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if not self.padding:
            return poses, a
        side = (self.padding,) * 2
        return F.pad(poses, (0, 0, 0, 0, *side, *side)), None if a is None else F.pad(a, (0, 0, *side, *side))

    def check(self, poses: Tensor) -> None:
        """Report a wrong shape more clearly than the routing would."""
        wanted = (self.lower_types, self.lower_dim)
        if poses.dim() != 5 or poses.shape[3:] != wanted or min(poses.shape[1:3]) + 2 * self.padding < self.kernel:
            raise UserError(
                f"ConvCaps expects (b, h, w, {wanted[0]}, {wanted[1]}) with h and w of at least "
                f"{self.kernel - 2 * self.padding} and got {tuple(poses.shape)}: set lower_types and lower_dim to what "
                f"the layer below gives (PrimaryCaps with grid=True), or use a smaller kernel."
            )

    def extra_repr(self) -> str:
        return (
            f"{self.lower_types}×{self.lower_dim} → {self.upper_types}×{self.upper_dim}, kernel={self.kernel}, "
            f"stride={self.stride}, padding={self.padding}{', matrix' if self.matrix else ''}"
        )


class ClassCaps(DenseCaps):
    """A grid of capsules, routed to one capsule per class: (b, h, w, n, p) → (b, j, q).

    The transformations are shared over the positions of the grid. With `coordinates`, the row and column of the centre
    of a capsule's position, scaled to the range from 0 to 1, are added to two entries of each of its votes: the first
    two, or for `matrix` poses to the first two of the right-hand column, where a matrix has its translation.

    The addition is a linear map: a pose is extended by its row and column, and the transformations by constants that
    carry them to the two entries. So any routing and its kernels work on such votes. The gate of self-routing, which is
    a function of the pose, sees the position as well.

    >>> stack = nn.Sequential(ConvCaps(8, 16, 4, 16, matrix=True, routing="em"),
    ...                       ClassCaps(4, 16, 5, 16, grid=(3, 3), matrix=True, routing="em"))
    >>> poses, activations = stack(torch.randn(2, 5, 5, 8, 16))
    >>> poses.shape, activations.shape
    (torch.Size([2, 5, 16]), torch.Size([2, 5]))
    """

    places: Tensor

    def __init__(
        self,
        lower_types: int,
        lower_dim: int,
        upper: int,
        upper_dim: int,
        grid: tuple[int, int],
        *,
        coordinates: bool = True,
        matrix: bool = False,
        **rest: Any,
    ) -> None:
        if coordinates and upper_dim < 2:
            raise UserError(
                "coordinates need votes of at least two dimensions: set upper_dim to 2, or coordinates=False."
            )
        self.coordinates, self.grid = coordinates, grid  # before the layer asks for `voting_dim`
        super().__init__(
            grid[0] * grid[1] * lower_types, lower_dim, upper, upper_dim, shared=lower_types, matrix=matrix, **rest
        )
        places = centres(grid).repeat_interleave(lower_types, 0).to(self.weight)  # (i, 2)
        self.register_buffer("places", places, persistent=False)

    def route(self, u: Tensor, a: Tensor | None = None, trace: bool = False, **options: Any) -> Routed:
        """As in `DenseCaps`; capsules on a grid must lie on this layer's."""
        if u.dim() == 5 and u.shape[1:4] != (*self.grid, self.shared):
            h, w = self.grid
            raise UserError(
                f"ClassCaps expects (b, {h}, {w}, {self.shared}, {self.lower_dim}) and got {tuple(u.shape)}: "
                f"set grid and lower_types to what the layer below gives."
            )
        return super().route(u, a, trace, **options)

    def voting_dim(self) -> int:
        return self.lower_dim + self.coordinates * (matrix_side(self.lower_dim, self.upper_dim) if self.matrix else 2)

    def voters(self, u: Tensor, a: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Poses with their row and column, and transformations that add them to two entries of the vote."""
        if not self.coordinates:
            return super().voters(u, a)
        if self.routing.own_activations:
            a = lower_activations(u, a)  # the lengths of the poses without their coordinates
        extend = extended_matrices if self.matrix else extended_vectors
        return *extend(at_least_float32(u), self.weight, self.places), a


def centres(grid: tuple[int, int]) -> Tensor:
    """Row and column of the centre of every cell of a grid, from 0 to 1: (h·w, 2).

    >>> centres((1, 2))
    tensor([[0.5000, 0.2500],
            [0.5000, 0.7500]])
    """
    rows, columns = ((torch.arange(side) + 0.5) / side for side in grid)
    return torch.cartesian_prod(rows, columns)


def extended_vectors(u: Tensor, W: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """[u, y, x] and [W, e_1, e_2], with which the votes are W u + y e_1 + x e_2."""
    carried = torch.eye(W.shape[2], 2, dtype=W.dtype, device=W.device).expand(*W.shape[:3], 2)
    return torch.cat([u, places.to(u).expand(u.shape[0], -1, -1)], -1), torch.cat([W, carried], -1)


def extended_matrices(u: Tensor, W: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """[M, (y, x, 0 …)ᵀ] and W with one row more, (0 … 0, 1), with which y and x are added to the right-hand column."""
    d = W.shape[-1]
    M, column = u.unflatten(-1, (d, d)), F.pad(places.to(u), (0, d - 2)).unsqueeze(-1)  # (i, d, 1)
    carried = F.pad(W.new_ones(*W.shape[:2], 1, 1), (d - 1, 0))
    return torch.cat([M, column.expand(u.shape[0], -1, -1, -1)], -1).flatten(-2), torch.cat([W, carried], 2)


def check_windows(kernel: int, stride: int, padding: int) -> None:
    """Refuse windows without a size, and padding that could fill a window."""
    if kernel < 1 or stride < 1 or not 0 <= padding < kernel:
        raise UserError(
            f"kernel and stride should be at least 1 and padding from 0 to kernel - 1, and they are {kernel}, "
            f"{stride} and {padding}."
        )
