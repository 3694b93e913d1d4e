"""Layers that look at a whole batch, where a process computes only a share of it.

Two kinds of layers do not treat images one by one. Batch normalisation needs the mean and the variance over the batch,
and dropout draws one mask for all of it. Where the batch of a training step is divided among processes, or computed in
parts, `within` says which images this share contains; `batch_moments` then includes those of the other processes,
and dropout takes its rows of the mask of the whole batch. The result is that of a single process, up to rounding.

Outside `within`, every layer computes what PyTorch's layer computes, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Share:
    """Images `start` to `stop` of a batch of `total`; `gather` and `sum` reach the other shares of these statistics.

    `gather` stacks the tensors of all processes, and `sum` adds them; without them, statistics are of this share alone.
    """

    start: int
    stop: int
    total: int
    gather: Callable[[Tensor], Tensor] | None = None
    sum: Callable[[Tensor], Tensor] | None = None

    def __len__(self) -> int:
        return self.stop - self.start


_share: ContextVar[Share | None] = ContextVar("share", default=None)


@contextmanager
def within(share: Share) -> Iterator[None]:
    """Layers inside the context know that they see a share of a batch."""
    before = _share.set(share)
    try:
        yield
    finally:
        _share.reset(before)


def synchronised() -> bool:
    """Whether statistics are taken over several processes here."""
    share = _share.get()
    return share is not None and share.gather is not None


class BatchMoments(torch.autograd.Function):
    """Mean and variance over the rows of all processes: x (n, c) → (c,), (c,), (1,) the number of rows.

    Every process sends its number of rows n_r, mean m_r and sum of squares M_r around it, from which (Chan, Golub and
    LeVeque 1979)

        n = Σ_r n_r    m = Σ_r n_r m_r / n    v = Σ_r (M_r + n_r (m_r − m)²) / n

    and backward, with the gradients of m and v added over the processes, ∂x = (∂m + 2 (x − m) ∂v) / n.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: Share) -> tuple[Tensor, Tensor, Tensor]:
        rows = x.new_full((1,), len(x))
        mean = x.sum(0) / rows.clamp(min=1)  # a process may have no row at all
        assert share.gather is not None
        told = share.gather(torch.cat([rows, mean, (x - mean).square().sum(0)]))  # r, 1 + 2 c
        n_r, m_r, M_r = told[:, :1], *told[:, 1:].chunk(2, 1)
        n = n_r.sum(0)
        m = (n_r * m_r).sum(0) / n
        v = (M_r + n_r * (m_r - m).square()).sum(0) / n
        ctx.save_for_backward(x, m, n)
        ctx.share = share
        ctx.mark_non_differentiable(n)
        return m, v, n

    @staticmethod
    def backward(ctx: Any, dm: Tensor, dv: Tensor, _: Tensor) -> tuple[Tensor, None]:
        x, m, n = ctx.saved_tensors
        dm, dv = ctx.share.sum(torch.cat([dm, dv])).chunk(2)
        return (dm + 2 * (x - m) * dv) / n, None


def batch_moments(x: Tensor) -> tuple[Tensor, Tensor, Tensor | int]:
    """Mean and variance (with 1/n) of the rows of x (n, c), and n; over all processes inside a shared batch.

    >>> mean, var, n = batch_moments(torch.tensor([[1.0], [3.0]]))
    >>> mean.item(), var.item(), n
    (2.0, 1.0, 2)
    """
    share = _share.get()
    if share is not None and share.gather is not None:
        return BatchMoments.apply(x, share)
    return x.mean(0), x.var(0, unbiased=False), len(x)


class SharedNorm(nn.Module):
    """What `prepare` adds to a batch norm: statistics over the processes, wherever there are several."""

    def forward(self: Any, x: Tensor) -> Tensor:
        if not (self.training and synchronised()):
            return super().forward(x)
        rows = x.movedim(1, -1).flatten(0, -2)
        mean, var, n = batch_moments(rows.to(torch.promote_types(x.dtype, torch.float32)))
        self.follow(mean.detach(), var.detach(), n)
        scale = torch.rsqrt(var + self.eps)
        scale = scale if self.weight is None else scale * self.weight
        shape = (1, -1, *[1] * (x.dim() - 2))
        y = (x - mean.view(shape)) * scale.view(shape)
        return (y if self.bias is None else y + self.bias.view(shape)).to(x.dtype)

    @torch.no_grad()
    def follow(self: Any, mean: Tensor, var: Tensor, n: Tensor) -> None:
        """Running statistics, as PyTorch keeps them: of the variance with 1/(n − 1)."""
        if not self.track_running_stats:
            return
        self.num_batches_tracked += 1
        pace = 1 / self.num_batches_tracked if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), float(pace))
        self.running_var.lerp_((var * n / (n - 1).clamp(min=1)).to(self.running_var.dtype), float(pace))


class SharedBatchNorm1d(SharedNorm, nn.BatchNorm1d):
    """`nn.BatchNorm1d` over the processes."""


class SharedBatchNorm2d(SharedNorm, nn.BatchNorm2d):
    """`nn.BatchNorm2d` over the processes."""


class SharedBatchNorm3d(SharedNorm, nn.BatchNorm3d):
    """`nn.BatchNorm3d` over the processes."""


class SharedDropout(nn.Dropout):
    """`nn.Dropout` with the mask that the whole batch would have: the rows of this share."""

    def forward(self, x: Tensor) -> Tensor:
        share = _share.get()
        if share is None or not self.training or len(x) % max(len(share), 1):
            return super().forward(x)
        each = len(x) // max(len(share), 1)  # rows for an image
        whole = F.dropout(x.new_ones(share.total * each, *x.shape[1:]), self.p)
        return x * whole[share.start * each : share.stop * each]


SHARED: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: SharedBatchNorm1d,
    nn.BatchNorm2d: SharedBatchNorm2d,
    nn.BatchNorm3d: SharedBatchNorm3d,
    nn.Dropout: SharedDropout,
}


def prepare(model: nn.Module) -> None:
    """Let the norms and dropouts of a model know about shares; parameters, buffers and their names stay as they are."""
    for module in model.modules():
        if type(module) in SHARED:
            module.__class__ = SHARED[type(module)]
