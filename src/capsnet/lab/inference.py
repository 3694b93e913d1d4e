"""What the page shows of a network: its capsules and how they were routed.

The numbers come from the model itself and from the trace of its routing. A request may choose other routing options;
they apply to that one call, so the shared model never changes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from capsnet.errors import UserError
from capsnet.lab.models import routing_options
from capsnet.lab.options import chosen, controls
from capsnet.models.base import Model
from capsnet.nn.decoder import Decoder
from capsnet.routing.base import Trace
from capsnet.routing.measures import agreement, coherence, entropy
from capsnet.sync import Oscillations

ROUNDING = 1e-3  # float32 arithmetic in the page may exceed the range from 0 to 1 slightly

Answer = tuple[dict[str, Any], dict[str, Tensor]]  # header and arrays


def read_pixels(body: bytes, shape: Sequence[int]) -> Tensor:
    """Little-endian float32 bytes as an image (c, h, w)."""
    n = math.prod(shape)
    if len(body) != 4 * n:
        sizes = "×".join(map(str, shape))
        raise UserError(f"this model expects {sizes} float32 pixels ({4 * n} bytes) and got {len(body)} bytes.")
    pixels = torch.frombuffer(bytearray(body), dtype=torch.float32).view(*shape)
    if not pixels.isfinite().all():
        raise UserError("every pixel must be a finite number from 0 to 1.")
    if pixels.min() < -ROUNDING or pixels.max() > 1 + ROUNDING:
        raise UserError(
            f"pixels must be from 0 to 1 and these range from {pixels.min():g} to {pixels.max():g}: divide by 255?"
        )
    return pixels.clamp(0, 1)


@torch.inference_mode()
def encode(model: Model, pixels: Tensor, routing: str = "{}", focus: int | None = None) -> Answer:
    """One image (c, h, w) through the network, with everything that the page shows of it.

    `routing` is a JSON object with routing options for this call; the others are the model's own. `focus` is the class
    whose votes are returned (default: the most active one).
    """
    options = routing_options(model.shown())
    changes = chosen(options, routing)
    start = time.perf_counter()
    output = model(pixels[None], trace=True, routing=changes)
    header: dict[str, Any] = {"ranking": output.activations[0].argsort(descending=True).tolist()}
    found = {"activations": output.activations, "poses": output.poses, "primary": output.primary}
    arrays = {name: tensor[0] for name, tensor in found.items() if tensor is not None}
    if output.trace is not None:
        header["focus"] = header["ranking"][0] if focus is None else focus
        arrays |= traced(output.trace, header["focus"])
    if output.oscillations is not None:
        arrays["field"] = field_of(output.oscillations)
    header["routing"] = {one.name: one.value for one in controls(options)} | changes
    header["milliseconds"] = round(1e3 * (time.perf_counter() - start), 3)
    return header, arrays


def field_of(oscillations: Oscillations) -> Tensor:
    """The mean field of each position after every step, as (re, im): (t, 2, h, w)."""
    field = oscillations.mean_field()
    assert field.im is not None
    return torch.stack([field.re[:, 0], field.im[:, 0]], 1)


def traced(trace: Trace, focus: int) -> dict[str, Tensor]:
    """Every step of the routing for the first image: couplings (t, i, j), outputs (t, j, q), activations (t, j) …"""
    couplings, outputs, votes = trace.couplings[:, 0], trace.outputs[:, 0], trace.votes[0]
    measured = {}
    if trace.variances is not None:
        measured["deviation"] = trace.variances[:, 0].sqrt().mean(-1)  # t j
    if trace.oscillators is not None:
        measured["coherence"] = coherence(couplings, trace.oscillators[:, 0])  # t j
    return {
        "couplings": couplings,
        "outputs": outputs,
        "step_activations": trace.activations[:, 0],
        "entropy": entropy(couplings).mean(-1),
        "agreement": agreement(couplings, votes, outputs),
        **measured,
        **votes_for(focus, couplings, votes, outputs),
    }


def votes_for(focus: int, couplings: Tensor, votes: Tensor, outputs: Tensor) -> dict[str, Tensor]:
    """The votes for one class, their projection onto their principal plane, and the weight of each.

    votes (i, q), votes2d (i, 2), outputs2d (t, 2), origin2d (2,), weight (t, i)
    """
    votes, outputs = votes[:, focus], outputs[:, focus]
    centre, plane = principal_plane(votes)
    return {
        "votes": votes,
        "votes2d": (votes - centre) @ plane,
        "outputs2d": (outputs - centre) @ plane,
        "origin2d": -centre @ plane,
        "weight": couplings[:, :, focus] * votes.norm(dim=-1),
    }


def principal_plane(points: Tensor) -> tuple[Tensor, Tensor]:
    """Centre (q,) and the two principal directions (q, 2) of points (i, q), with signs that do not flip at random."""
    centre = points.mean(0)
    spread = (points - centre).double()
    _, directions = torch.linalg.eigh(spread.T @ spread)  # ascending
    plane = directions[:, -2:].flip(-1)
    if plane.shape[1] < 2:  # a pose with one dimension has one direction
        plane = torch.nn.functional.pad(plane, (0, 1))
    largest = plane.gather(0, plane.abs().argmax(0, keepdim=True))
    return centre, (plane * torch.where(largest < 0, -1.0, 1.0)).to(points.dtype)


def decoder_weights(model: Model) -> Answer:
    """The decoder's layers w0, b0, w1, … in the layout of torch.nn.Linear, so that the page can run the decoder."""
    decoder = model.decoder
    if not isinstance(decoder, Decoder):
        raise UserError("this model has no decoder that the page can run.")
    arrays: dict[str, Tensor] = {}
    for number, linear in enumerate(decoder.linears):
        assert isinstance(linear, torch.nn.Linear)
        arrays[f"w{number}"], arrays[f"b{number}"] = linear.weight, linear.bias
    shape = {"classes": decoder.upper, "pose": decoder.upper_dim, "image_shape": list(decoder.image_shape)}
    return {"layers": len(decoder.linears), **shape}, arrays
