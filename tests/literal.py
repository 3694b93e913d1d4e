"""What the literal loops of the routing tests share: NumPy in float64, one number at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from capsnet import kernels
from capsnet.kernels import dispatch
from capsnet.kernels import routing as kernel
from capsnet.nn.layers import DenseCaps

Array = np.ndarray


def literal_votes(u: Array, W: Array) -> Array:
    """û_{j|i} of one example: u (i, p), W (n, j, q, p) → (i, j, q)."""
    lower, (types, upper, dim, _) = len(u), W.shape
    u_hat = np.zeros((lower, upper, dim))
    for i in range(lower):
        for j in range(upper):
            u_hat[i, j] = W[i % types, j] @ u[i]
    return u_hat


def literal_softmax(logits: Array) -> Array:
    exponentials = np.exp(logits - logits.max())
    return exponentials / exponentials.sum()


def literal_squash(s: Array) -> Array:
    length = np.sqrt((s * s).sum())
    return length**2 / (1 + length**2) * s / length


def layer_and_poses(
    routing: str, shared: bool = False, dtype: torch.dtype = torch.float64, b: int = 3, **options: object
) -> tuple[DenseCaps, Tensor]:
    """12 lower capsules of 4 dimensions, 3 upper ones of 5; all parameters are random, also those that start at 0."""
    torch.manual_seed(0)
    layer = DenseCaps(12, 4, 3, 5, routing=routing, shared=4 if shared else None, dtype=dtype, **options)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return layer, torch.randn(b, 12, 4, dtype=dtype)


def array(x: Tensor) -> Array:
    return x.detach().double().numpy()


def assert_equal(found: Tensor, expected: list[Array], tolerance: float = 1e-6) -> None:
    """The epsilon in `squash` and `lengths` is the only difference."""
    np.testing.assert_allclose(array(found), np.stack(expected), rtol=tolerance, atol=tolerance)


PATHS = ["plain", "torch", "fused"]


@contextlib.contextmanager
def taking(path: str) -> Iterator[None]:
    """One way to compute: the readable form, or a kernel even for sizes too small for it to pay.

    "torch" are the kernels for any dtype; "fused" are the compiled loops, for float32.
    """
    if path == "plain":
        with kernels.plain():
            yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "routing_pays", lambda u, W: True)
        if path == "torch":
            patch.setattr(kernel, "_fused", lambda: None)
        else:
            patch.setattr(kernel, "choose", kernel._fused())
        yield


def dtype_of(path: str) -> torch.dtype:
    """The compiled loops know float32 only."""
    return torch.float32 if path == "fused" else torch.float64


def assert_kernel_is_its_plain_twin(layer: DenseCaps, u: Tensor, path: str, tolerance: float = 1e-5) -> None:
    """Poses, activations and the gradients of the input and of every parameter."""
    u.requires_grad_()
    inputs = [u, *layer.parameters()]
    found = []
    for way in ("plain", path):
        with taking(way):
            routed = layer.route(u)
        towards = torch.arange(routed.poses.numel(), dtype=u.dtype).view_as(routed.poses).sin()
        total = (routed.poses * towards).sum() + (routed.activations * towards[..., 0]).sum()
        found.append([routed.poses, routed.activations, *torch.autograd.grad(total, inputs)])
    for plain, fast in zip(*found, strict=True):
        torch.testing.assert_close(fast, plain, rtol=tolerance, atol=tolerance * float(plain.detach().abs().max()))
