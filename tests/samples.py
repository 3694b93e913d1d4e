"""Samples of large grids of settings: far fewer combinations, and still every value of every axis."""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import cycle, islice
from typing import Any


def sample(n: int, *axes: Iterable[Any], seed: int = 0) -> list[tuple[Any, ...]]:
    """n combinations, drawn by a seed, in which every value of an axis occurs equally often, give or take one."""
    chosen = []
    for k, axis in enumerate(axes):
        values = list(axis)
        assert len(values) <= n, f"{n} combinations cannot hold {len(values)} values of axis {k}"
        column = list(islice(cycle(values), n))
        random.Random(seed + k).shuffle(column)
        chosen.append(column)
    return list(zip(*chosen, strict=True))
