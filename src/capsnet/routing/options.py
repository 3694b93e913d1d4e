"""Options of routing algorithms: one frozen dataclass per algorithm, so that they become flags, JSON and help text.

This module imports no torch, because configs import it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from numbers import Integral
from typing import ClassVar

from capsnet.errors import UserError

MOST_ITERATIONS = 1000
TRAINING = {"training": True}  # metadata of an option that cannot be changed, or has no effect, after training


@dataclass(frozen=True)
class RoutingOptions:
    """Base class of all options. `algorithm` is the name under which the algorithm is registered."""

    algorithm: ClassVar[str] = ""

    def describe(self) -> str:
        """The algorithm in words, for the description of a network."""
        return f"{self.algorithm} routing"


@dataclass(frozen=True)
class IterativeOptions(RoutingOptions):
    """Options of an algorithm that runs a number of iterations."""

    iterations: int = 3
    """Routing iterations."""

    def describe(self) -> str:
        """
        >>> DynamicOptions().describe()
        'dynamic routing, 3 iterations'
        """
        return f"{super().describe()}, {self.iterations} iteration{'s' if self.iterations > 1 else ''}"

    def __post_init__(self) -> None:
        if not isinstance(self.iterations, Integral):
            raise UserError(f"iterations={self.iterations!r} should be an integer, and 3 is the paper's choice.")
        if not 1 <= self.iterations <= MOST_ITERATIONS:
            raise UserError(
                f"iterations={self.iterations} is out of range: routing takes between 1 and {MOST_ITERATIONS} "
                f"iterations, and 3 is the paper's choice."
            )


@dataclass(frozen=True)
class DynamicOptions(IterativeOptions):
    """Options of dynamic routing."""

    algorithm: ClassVar[str] = "dynamic"

    iterations: int = 3
    """Routing iterations; 1 means uniform couplings."""
    leaky: bool = False
    """Leaky routing: an extra zero logit takes what fits no upper capsule."""
    bias: bool = field(default=False, metadata=TRAINING)
    """Add a learnt bias to s_j in every iteration, as the authors' code does."""
    detach: bool = field(default=False, metadata=TRAINING)
    """Backpropagate through the last iteration only."""
