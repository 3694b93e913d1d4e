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


@constant
def by_onednn() -> bool:
    """Whether float32 products are computed by oneDNN."""
    return onednn_is_faster()


def takes(x: Tensor) -> bool:
    plain = x.dtype == torch.float32 and x.device.type == "cpu" and x.numel() > 0
    return plain and not torch.compiler.is_compiling() and by_onednn()


def mm(a: Tensor, b: Tensor, *, out: Tensor | None = None, room: Tensor | None = None) -> Tensor:
    """a (m, k) times b (k, n); oneDNN reads b in either order of its axes.

    The result is in `out`, if given. It may be in `room`: MKL writes there, and oneDNN, which only returns new tensors,
    saves a copy by leaving it alone.

    >>> mm(torch.eye(2), torch.ones(2, 3))
    tensor([[1., 1., 1.],
            [1., 1., 1.]])
    """
    if takes(a):
        product = onednn_linear(a, b.T)
        return product if out is None else out.copy_(product)
    place = room if out is None else out
    return torch.mm(a, b) if place is None else torch.mm(a, b, out=place)


def bmm(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """a (n, m, k) times b (n, k, o), product by product."""
    if not takes(a):
        return torch.bmm(a, b, out=out)
    pairs = zip(a.contiguous().unbind(), b.transpose(1, 2).unbind(), strict=True)
    return torch.stack([onednn_linear(*pair) for pair in pairs], out=out)


def baddbmm_(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """total (n, m, o) plus a (n, m, k) times b (n, k, o), in place."""
    if not takes(a):
        return total.baddbmm_(a, b)
    triples = zip(total.unbind(), a.contiguous().unbind(), b.transpose(1, 2).unbind(), strict=True)
    return torch.stack([onednn_linear(x, y, plus) for plus, x, y in triples], out=total)
