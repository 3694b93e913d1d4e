"""Choices of layers and losses by name. No torch here: configs stand on this module."""

from __future__ import annotations

from typing import Literal, get_args

Init = Literal["default", "official"]
INITS = get_args(Init)
MarginReduction = Literal["sum", "half-mean"]
MARGIN_REDUCTIONS = get_args(MarginReduction)
