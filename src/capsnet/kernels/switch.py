"""One switch for every fast path: on by default, off inside `with plain():`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_enabled = True


def enabled() -> bool:
    """Whether a layer may take a fast path."""
    return _enabled


@contextmanager
def plain() -> Iterator[None]:
    """Compute everything the readable way, for tests, benchmarks and exports.

    >>> with plain():
    ...     enabled()
    False
    """
    global _enabled
    before, _enabled = _enabled, False
    try:
        yield
    finally:
        _enabled = before
