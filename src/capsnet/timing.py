"""Durations: measuring and formatting them."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence


def clock(seconds: float) -> str:
    """A duration as text.

    >>> clock(9), clock(75), clock(7322)
    ('9 s', '1 min 15 s', '2 h 2 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def timed(action: Callable[[], object], repeats: int = 3, *, warmup: int = 0, at_least: float = 0.0) -> list[float]:
    """Seconds of each call: after `warmup` calls, `repeats` calls or more, until `at_least` seconds have passed.

    >>> len(timed(lambda: None, 5, warmup=2))
    5
    """
    for _ in range(warmup):
        action()
    seconds: list[float] = []
    while len(seconds) < repeats or sum(seconds) < at_least:
        began = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - began)
    return seconds


def alternate(actions: Sequence[Callable[[], object]], repeats: int, at_most: float = math.inf) -> list[list[float]]:
    """Seconds of each action, taken in turns after one call that does not count, so that noise affects all alike.

    Once `at_most` seconds have passed, no further round starts.
    """
    seconds: list[list[float]] = [[] for _ in actions]
    for action in actions:
        action()
    began = time.perf_counter()
    for done in range(repeats):
        if done and time.perf_counter() > began + at_most:
            break
        for action, found in zip(actions, seconds, strict=True):
            found += timed(action, 1)
    return seconds


def mean_seconds(action: Callable[[], object], at_least: float) -> float:
    """Mean seconds of a call within some seconds, after one call that may have to compile something."""
    return statistics.mean(timed(action, 1, warmup=1, at_least=at_least))
