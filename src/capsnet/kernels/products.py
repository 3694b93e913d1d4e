"""Float32 matrix products by the faster of the two libraries in PyTorch.

PyTorch multiplies float32 matrices with MKL. On AMD processors with AVX-512, MKL uses vectors of half the width: a
product of 1024 × 1024 matrices reaches 100 GFLOP/s on one thread, and 230 with oneDNN, which PyTorch uses for
convolutions. There these functions call oneDNN; everywhere else they are `torch.mm` and `torch.bmm`. The two libraries
add in different orders, so results differ in the last bits, but they depend on the kind of processor alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from capsnet.kernels.private import constant, onednn_is_faster, onednn_linear
from capsnet.kernels.threads import run

MANY, PART = 32, 8  # the least number of products that is divided among threads, and how many are one job
LONGEST = 4096  # rows or columns of a product that a thread computes at a time


@constant
def by_onednn() -> bool:
    """Whether float32 products are computed by oneDNN."""
    return onednn_is_faster()


def takes(x: Tensor) -> bool:
    plain = x.dtype == torch.float32 and x.device.type == "cpu" and x.numel() > 0
    return plain and not torch.compiler.is_compiling() and by_onednn()


def mm(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    """a (m, k) times b (k, n), in `out` if that is given.

    >>> mm(torch.eye(2), torch.ones(2, 3))
    tensor([[1., 1., 1.],
            [1., 1., 1.]])
    """
    if not takes(a):
        return torch.mm(a, b) if out is None else torch.mm(a, b, out=out)
    return onednn_linear(a, b.T) if out is None else _into(out, a, b)


def _into(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """a times b in `out`, by parts: oneDNN only returns new tensors, and small ones are copied while in the cache."""
    rows, columns = out.shape

    def by_rows(start: int, stop: int) -> None:
        out[start:stop].copy_(onednn_linear(a[start:stop], b.T))

    def by_columns(start: int, stop: int) -> None:  # a strided factor would be slow
        out[:, start:stop].copy_(onednn_linear(a, b[:, start:stop].contiguous().T))

    size = max(rows, columns)
    parts = [(start, min(start + LONGEST, size)) for start in range(0, size, LONGEST)]
    run(by_rows if rows > columns else by_columns, parts)
    return out


def bmm(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """a (n, m, k) times b (n, k, o), product by product."""
    if not takes(a):
        return torch.bmm(a, b, out=out)
    return _each(a, b, None, out)


def baddbmm_(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """total (n, m, o) plus a (n, m, k) times b (n, k, o), in place."""
    if not takes(a):
        return total.baddbmm_(a, b)
    return _each(a, b, total, total)


def _each(a: Tensor, b: Tensor, plus: Tensor | None, out: Tensor) -> Tensor:
    """The products one by one, in several threads if they are many: each is too small to be divided well."""
    pairs = list(zip(a.contiguous().unbind(), b.transpose(1, 2).unbind(), strict=True))
    given = [None] * len(pairs) if plus is None else plus.unbind()
    places = out.unbind()

    def work(start: int, stop: int) -> None:
        for k in range(start, stop):
            places[k].copy_(onednn_linear(*pairs[k], given[k]))

    if len(pairs) < MANY:
        work(0, len(pairs))
    else:
        run(work, [(start, min(start + PART, len(pairs))) for start in range(0, len(pairs), PART)])
    return out
