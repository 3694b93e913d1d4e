"""Frames: a JSON header and named float32 arrays in one body, which a page can use without parsing numbers.

    uint32 LE length of the header | header: UTF-8 JSON, padded with spaces | arrays in order, float32 LE

Header and arrays are padded so that each array starts at a multiple of 8 bytes. "arrays" in the header lists names
and shapes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

ALIGNED = 8


def pack(header: Mapping[str, Any], arrays: Mapping[str, Tensor]) -> bytes:
    """Build a frame.

    >>> import torch
    >>> header, arrays = unpack(pack({"t": 3}, {"activations": torch.tensor([0.5, 1.0])}))
    >>> header["t"], arrays["activations"].tolist()
    (3, [0.5, 1.0])
    """
    listed = [{"name": name, "shape": list(array.shape)} for name, array in arrays.items()]
    text = json.dumps({**header, "arrays": listed}, allow_nan=False).encode()
    text += b" " * (-(4 + len(text)) % ALIGNED)
    bodies = (_padded(array.detach().cpu().numpy().astype("<f4").tobytes()) for array in arrays.values())
    return b"".join([len(text).to_bytes(4, "little"), text, *bodies])


def _padded(body: bytes) -> bytes:
    return body + bytes(-len(body) % ALIGNED)


def unpack(frame: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The header and the arrays of a frame, as the page reads them."""
    start = 4 + int.from_bytes(frame[:4], "little")
    header = json.loads(frame[4:start])
    arrays = {}
    for entry in header.pop("arrays"):
        n = math.prod(entry["shape"])
        arrays[entry["name"]] = np.frombuffer(frame, "<f4", n, start).reshape(entry["shape"])
        start += -(-4 * n // ALIGNED) * ALIGNED
    return header, arrays
