"""What the page shows of a network: its capsules, how they were routed, and routing by hand.

The numbers come from the same layers and the same routing as everywhere else; iterations and leaky are the page's to
choose, and are passed to the routing beside the layer's own weights, so that the shared model is never touched.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from capsnet.config import CapsNetConfig
from capsnet.errors import UserError
from capsnet.functional import lengths
from capsnet.layers import DenseCaps
from capsnet.models import CapsNet, Model
from capsnet.routing import Trace
from capsnet.routing.dynamic import procedure_1

MOST_ITERATIONS = 10
ROUNDING = 1e-3  # a page's float32 arithmetic may leave 0 to 1 by a little

Seen = tuple[dict[str, Any], dict[str, Tensor]]  # a frame's header and arrays


def read_pixels(body: bytes, shape: Sequence[int]) -> Tensor:
    """Little-endian float32 bytes as an image (c, h, w), or a sentence that says why they are none."""
    n = math.prod(shape)
    if len(body) != 4 * n:
        sizes = "×".join(map(str, shape))
        raise UserError(f"this model takes {sizes} pixels, {4 * n} bytes of float32, and got {len(body)} bytes.")
    pixels = torch.frombuffer(bytearray(body), dtype=torch.float32).view(*shape)
    if not pixels.isfinite().all():
        raise UserError("a pixel is not a finite number: pixels go from 0 to 1.")
    if pixels.min() < -ROUNDING or pixels.max() > 1 + ROUNDING:
        raise UserError(f"pixels go from 0 to 1 and these from {pixels.min():g} to {pixels.max():g}: divide by 255?")
    return pixels.clamp(0, 1)


@torch.inference_mode()
def encode(
    model: Model, pixels: Tensor, iterations: int | None = None, leaky: bool | None = None, focus: int | None = None
) -> Seen:
    """One image (c, h, w) through the network, with all that the page shows of it.

    `iterations` and `leaky` are the model's own unless given; `focus` is the class whose votes come along (default:
    the longest).
    """
    start = time.perf_counter()
    if isinstance(model, CapsNet):
        header, arrays = _encode_capsules(model, pixels, iterations, leaky, focus)
    else:
        header, arrays = {"kind": "cnn", "iterations": 0}, {"lengths": model(pixels[None]).lengths[0]}
    header["longest"] = arrays["lengths"].argsort(descending=True).tolist()
    header["milliseconds"] = round(1e3 * (time.perf_counter() - start), 3)
    return header, arrays


def _encode_capsules(
    model: CapsNet, pixels: Tensor, iterations: int | None, leaky: bool | None, focus: int | None
) -> Seen:
    iterations = model.config.iterations if iterations is None else iterations
    leaky = model.config.leaky if leaky is None else leaky
    u = primary = model.primary.after(model.stem, pixels[None])
    for layer in model.caps:
        assert isinstance(layer, DenseCaps)
        v, how = layer.route(u, trace=True, iterations=iterations, leaky=leaky)
        u = v
    assert how is not None
    length = lengths(v[0])
    focus = int(length.argmax()) if focus is None else focus
    couplings, outputs, votes = how.couplings[:, 0], how.outputs[:, 0], how.votes[0]
    arrays = {
        "lengths": length, "poses": v[0], "primary": primary[0], "couplings": couplings, "outputs": outputs,
        "entropy": entropy(couplings, leaky), "agreement": agreement(couplings, votes, outputs, model.config.branches),
        **seen_by_class(how, focus),
    }  # fmt: skip
    return {"kind": "capsnet", "iterations": iterations, "leaky": leaky, "focus": focus}, arrays


def entropy(couplings: Tensor, leaky: bool) -> Tensor:
    """How undecided the lower capsules are, 1 for uniform couplings and 0 for decided ones: (t, i, j) → (t,).

    The mean over i of −Σ_j c_ij log c_ij, over the log of the number of choices; leaky routing has one more of them.
    """
    if leaky:
        nowhere = (1 - couplings.sum(-1, keepdim=True)).clamp(min=0)
        couplings = torch.cat([couplings, nowhere], -1)
    choices = couplings.shape[-1]
    return torch.special.entr(couplings).sum(-1).mean(-1) / math.log(max(choices, 2))


def agreement(couplings: Tensor, votes: Tensor, outputs: Tensor, branches: int = 1) -> Tensor:
    """The cosine between votes û_{j|i} and output v_j, averaged over i with the couplings as weights.

    couplings (t, i, j), votes (i, j, q), outputs (t, j, q) → (t, j). A branch's votes speak of a part of the pose
    alone: they are compared with that part.
    """
    parts = votes.unflatten(0, (-1, branches)).unflatten(-1, (branches, -1)).diagonal(dim1=1, dim2=3)  # m j q k
    direction = torch.nn.functional.normalize(parts, dim=2)
    towards = torch.nn.functional.normalize(outputs.unflatten(-1, (branches, -1)), dim=-1)  # t j k q
    cosine = torch.einsum("mjqk,tjkq->tmkj", direction, towards).flatten(1, 2)
    return (couplings * cosine).sum(1) / couplings.sum(1).clamp(min=1e-12)


def seen_by_class(how: Trace, focus: int) -> dict[str, Tensor]:
    """Votes for one class, their picture in the plane of their largest spread, and what each counts for.

    votes (i, q), votes2d (i, 2), outputs2d (t, 2), origin2d (2,), weight (t, i)
    """
    votes, outputs = how.votes[0, :, focus], how.outputs[:, 0, focus]
    centre, plane = principal_plane(votes)
    return {
        "votes": votes,
        "votes2d": (votes - centre) @ plane,
        "outputs2d": (outputs - centre) @ plane,
        "origin2d": -centre @ plane,
        "weight": how.couplings[:, 0, :, focus] * votes.norm(dim=-1),
    }


def principal_plane(points: Tensor) -> tuple[Tensor, Tensor]:
    """Centre (q,) and the two directions (q, 2) in which points (i, q) spread most; turned so as not to flip about."""
    centre = points.mean(0)
    spread = (points - centre).double()
    _, directions = torch.linalg.eigh(spread.T @ spread)  # ascending
    plane = directions[:, -2:].flip(-1)
    if plane.shape[1] < 2:  # poses of one number have a line
        plane = torch.nn.functional.pad(plane, (0, 1))
    largest = plane.gather(0, plane.abs().argmax(0, keepdim=True))
    return centre, (plane * torch.where(largest < 0, -1.0, 1.0)).to(points.dtype)


def decoder_weights(model: Model) -> Seen:
    """The decoder's layers, so that the page can paint by itself: w0, b0, w1, … as torch.nn.Linear has them."""
    if not isinstance(model, CapsNet) or model.decoder is None:
        raise UserError("this model has no decoder, so its poses cannot be painted.")
    arrays: dict[str, Tensor] = {}
    for number, linear in enumerate(model.decoder.linears):
        assert isinstance(linear, torch.nn.Linear)
        arrays[f"w{number}"], arrays[f"b{number}"] = linear.weight, linear.bias
    c = model.config
    layers = len(model.decoder.linears)
    return {"layers": layers, "classes": c.num_classes, "pose": c.class_dim, "image_shape": list(c.image_shape)}, arrays


def receptive_field(config: CapsNetConfig) -> dict[str, int]:
    """The capsule at (y, x) of the grid sees `size` rows from offset + stride·y on, and columns likewise."""
    size, stride = 1, 1
    kernels, strides = [*config.stem_kernels, config.primary_kernel], [*config.stem_strides, config.primary_stride]
    for kernel, step in zip(kernels, strides, strict=True):
        size += (kernel - 1) * stride
        stride *= step
    return {"size": size, "stride": stride, "offset": 0}


@torch.inference_mode()
def by_hand(votes: Sequence[Sequence[Sequence[float]]], iterations: int) -> dict[str, Any]:
    """Procedure 1 on votes (i, j, 2) that somebody has drawn, with every number of every iteration."""
    u_hat = torch.tensor(votes, dtype=torch.float32)[None]
    _, how = procedure_1(u_hat, None, iterations, leaky=False, detach=False, trace=True)
    assert how is not None
    c_ij, v_j = how.couplings[:, 0], how.outputs[:, 0]
    return {
        "logits": how.logits[:, 0].tolist(),
        "couplings": c_ij.tolist(),
        "s": torch.einsum("tij,ijq->tjq", c_ij, u_hat[0]).tolist(),
        "v": v_j.tolist(),
        "agreement": torch.einsum("ijq,tjq->tij", u_hat[0], v_j).tolist(),
    }
