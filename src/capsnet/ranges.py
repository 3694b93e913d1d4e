"""Ranges of config fields: values out of range are refused when a config is created."""

from __future__ import annotations

import sys
from typing import Any

from capsnet.errors import UserError

MOST = sys.float_info.max  # JSON has no infinity
WIDEST = 1_000_000  # for any size in a network: far beyond what a machine holds, and nothing overflows below it


def check_range(config: Any, low: float, high: float, *names: str) -> None:
    """Refuse fields with a value outside [low, high]; in a tuple every number is checked."""
    for name in names:
        value = getattr(config, name)
        if wrong := [x for x in _numbers(value) if not low <= x <= high]:
            how = "too small" if wrong[0] < low else "too large" if wrong[0] > high else "not a number"
            wanted = f"{low:,} or more" if high == MOST else f"between {low:,} and {high:,}"
            raise UserError(f"{name}={value} is {how}: it should be {wanted}.")


def _numbers(value: Any) -> list[float]:
    return [x for part in value for x in _numbers(part)] if isinstance(value, tuple) else [value]
