"""Reproducible randomness: one independent stream for each (seed, purpose, counter).

There are two ways to draw from a stream: a generator, which lives on the CPU whatever the device, so that a shuffle or
a shift is the same everywhere; and `bits`, a hash of the position in a stream, for numbers that must not depend on the
order or the batch in which they are drawn.
"""

from __future__ import annotations

import zlib

import numpy as np
import torch
from torch import Tensor

DRAWS = 16  # numbers reserved for each position of a stream
# splitmix64 (Steele, Lea and Flood, 2014); its constants as signed integers, because PyTorch has no unsigned ones
GOLDEN, FIRST, SECOND = (c - 2**64 for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def key(seed: int, purpose: str, counter: int = 0) -> int:
    """63 bits that identify one stream, for instance ("shuffle", epoch)."""
    # A sum would make seed 1, epoch 0 the same stream as seed 0, epoch 1
    entropy = [seed & (2**64 - 1), zlib.crc32(purpose.encode()), counter]
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0]) >> 1


def generator(seed: int, purpose: str, counter: int = 0) -> torch.Generator:
    """A CPU generator for one purpose.

    >>> a, b = generator(0, "shuffle", 3), generator(0, "shuffle", 3)
    >>> bool((torch.randperm(9, generator=a) == torch.randperm(9, generator=b)).all())
    True
    """
    return torch.Generator().manual_seed(key(seed, purpose, counter))


def bits(stream: int, index: Tensor, draw: int) -> Tensor:
    """63 random bits for each position (any shape, int64) of a stream; `draw` numbers those of one position from 0."""
    if not 0 <= draw < DRAWS:
        raise ValueError(f"draw should be between 0 and {DRAWS - 1}, not {draw}")
    z = stream + (index * DRAWS + (draw + 1)) * GOLDEN  # int64 wraps around, as intended
    z = (z ^ _shifted(z, 30)) * FIRST
    z = (z ^ _shifted(z, 27)) * SECOND
    return (z ^ _shifted(z, 31)) & (2**63 - 1)


def integers(stream: int, index: Tensor, draw: int, below: int | Tensor) -> Tensor:
    """Uniform in 0 … below − 1, one for each position; `below` may be a tensor.

    >>> index = torch.arange(1000)
    >>> whole = integers(7, index, 0, 6)
    >>> sorted(set(whole.tolist())), bool((whole[500:] == integers(7, index[500:], 0, 6)).all())
    ([0, 1, 2, 3, 4, 5], True)
    """
    return bits(stream, index, draw) % below


def uniform(stream: int, index: Tensor, draw: int) -> Tensor:
    """Uniform in [0, 1), float32, one for each position."""
    return (bits(stream, index, draw) >> 39).float() / 2**24


def _shifted(z: Tensor, by: int) -> Tensor:
    """Logical shift to the right; the shift of PyTorch is arithmetic."""
    return (z >> by) & ((1 << (64 - by)) - 1)
