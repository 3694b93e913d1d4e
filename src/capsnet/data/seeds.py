"""Randomness that can be asked for again: one independent stream for each (seed, purpose, counter).

The generators live on the CPU whatever the device, so that a shuffle or a shift is the same everywhere.
"""

from __future__ import annotations

import zlib

import numpy as np
import torch


def generator(seed: int, purpose: str, counter: int = 0) -> torch.Generator:
    """A CPU generator of its own for one purpose, for instance ("shuffle", epoch).

    >>> a, b = generator(0, "shuffle", 3), generator(0, "shuffle", 3)
    >>> bool((torch.randperm(9, generator=a) == torch.randperm(9, generator=b)).all())
    True
    """
    # Adding the numbers up would make seed 1, epoch 0 the same stream as seed 0, epoch 1
    entropy = [seed & (2**64 - 1), zlib.crc32(purpose.encode()), counter]
    mixed = int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0])
    return torch.Generator().manual_seed(mixed >> 1)
