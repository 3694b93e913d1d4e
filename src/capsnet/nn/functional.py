"""The paper's equations as functions of tensors (Sabour, Frosst and Hinton 2017, sections 2 to 4).

One alphabet everywhere: `b` batch, `i` lower capsule, `j` upper capsule, `p` lower pose dimension, `q` upper pose
dimension, `t` routing iteration. Deliberate deviation: an epsilon under the square root of `squash` and `lengths`,
because the gradient of ‖s‖ does not exist at s = 0 and silent capsules are common.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

EPS = 1e-9


class Capsules(NamedTuple):
    """Capsules whose activations are not the lengths of their poses."""

    poses: Tensor  # (b, i, p), or (b, h, w, n, p) on a grid
    activations: Tensor  # (b, i) or (b, h, w, n), in [0, 1]


def at_least_float32(x: Tensor) -> Tensor:
    """Widen half precision and leave everything else: sums of squares and agreements do not survive in bfloat16."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def without_autocast(x: Tensor) -> AbstractContextManager:
    """A context with autocast disabled on the device of x; the meta device has no autocast."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


def squash(s: Tensor, dim: int = -1) -> Tensor:
    """Squash (Eq. 1): keep the direction, map the length into [0, 1).

        v = ‖s‖² / (1 + ‖s‖²) · s / ‖s‖

    >>> lengths(squash(torch.tensor([3.0, 4.0])))
    tensor(0.9615)
    """
    squared = at_least_float32(s).square().sum(dim, keepdim=True)
    # sqrt is infinitely steep at 0: the epsilon keeps a silent capsule's gradient finite;
    # ‖s‖/(1+‖s‖²) = √‖s‖²/(1+‖s‖²) needs no division by a length that may be 0; the square of a length of 1e19 is
    # the largest that float32 holds, beyond that comes NaN, which training notices
    return (s * (torch.sqrt(squared + EPS) / (1 + squared))).to(s.dtype)


def lengths(v: Tensor, dim: int = -1) -> Tensor:
    """‖v‖: the probability that the capsule's entity is present. (…, q) → (…).

    >>> lengths(torch.tensor([[0.6, 0.8], [0.0, 0.0]]))
    tensor([1.0000e+00, 3.1623e-05])
    """
    return torch.sqrt(at_least_float32(v).square().sum(dim) + EPS)  # the same epsilon, for the same reason


def votes(u: Tensor, W: Tensor) -> Tensor:
    """û_{j|i} = W_ij u_i (Eq. 2): what lower capsule i predicts for upper capsule j.

    u (b, i, p) and W (n, j, q, p) → (b, i, j, q). Where n < i the transformations are shared over the positions
    of a grid: lower capsules lie as (h w n) and capsule i uses W[i % n].

    >>> votes(torch.ones(2, 6, 8), torch.ones(3, 10, 16, 8)).shape
    torch.Size([2, 6, 10, 16])
    """
    grid = u.unflatten(1, (-1, W.shape[0]))
    return torch.einsum("bgip,ijqp->bgijq", grid, W).flatten(1, 2)


def matrix_votes(M: Tensor, W: Tensor) -> Tensor:
    """V_ij = M_i W_ij: votes of capsules whose poses are square matrices (Hinton, Sabour and Frosst 2018).

    M (b, i, p) with p = d · d, row by row, and W (n, j, d, d) → (b, i, j, p). Sharing works as for `votes`. Poses need
    not be square: M of r · k numbers and W (n, j, k, c) give votes of r · c numbers.

    >>> matrix_votes(torch.ones(2, 6, 16), torch.ones(3, 10, 4, 4)).shape
    torch.Size([2, 6, 10, 16])
    """
    grid = M.unflatten(1, (-1, W.shape[0])).unflatten(-1, (-1, W.shape[2]))
    return torch.einsum("bgirk,ijkc->bgijrc", grid, W).flatten(-2).flatten(1, 2)


def mask(poses: Tensor, classes: Tensor) -> Tensor:
    """Keep the poses of the chosen classes, set all others to zero: what the decoder sees (section 4.1).

    poses (b, j, q); classes (b, j), 1 for a class that is kept → (b, j, q).

    >>> mask(torch.ones(1, 3, 2), torch.tensor([[0.0, 1.0, 0.0]]))
    tensor([[[0., 0.],
             [1., 1.],
             [0., 0.]]])
    """
    return poses * classes.to(poses.dtype).unsqueeze(-1)
