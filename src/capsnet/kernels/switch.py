"""One switch for every fast path: on by default, off inside `with plain():` and where PyTorch wants to look inside."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.autograd import forward_ad

_lock, _plain_blocks = threading.Lock(), 0  # of all threads


def enabled() -> bool:
    """Whether a layer may take a fast path."""
    return _plain_blocks == 0 and not taken_apart()


def taken_apart() -> bool:
    """Whether `torch.func` or forward-mode differentiation is at work: they know PyTorch's own operators alone."""
    if torch.compiler.is_compiling():
        return False
    transformed = getattr(torch._C, "_are_functorch_transforms_active", bool)()
    return transformed or getattr(forward_ad, "_current_level", -1) >= 0


@contextmanager
def plain() -> Iterator[None]:
    """Compute everything the readable way, for tests, benchmarks and exports.

    >>> with plain():
    ...     enabled()
    False
    """
    global _plain_blocks
    with _lock:
        _plain_blocks += 1
    try:
        yield
    finally:
        with _lock:
            _plain_blocks -= 1
