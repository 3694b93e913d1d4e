"""Claims about capsule networks, and whether our measurements support them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from capsnet.evaluate import mean_interval

if TYPE_CHECKING:
    from capsnet.experiments.core.plan import Record

Verdict = Literal["reproduced", "not reproduced", "too close to call"]


@dataclass(frozen=True)
class Claim:
    """A claim, the paper's figure, ours with its 95 % interval, and the verdict."""

    claim: str
    paper: str
    ours: str
    seeds: int
    verdict: Verdict


class Measured(NamedTuple):
    """A mean over seeds, the 95 % interval around it (from the lowest to the highest end), and the number of seeds."""

    mean: float
    low: float
    high: float
    seeds: int
    unit: str = " %"
    decimals: int = 2

    def __str__(self) -> str:
        mean, low, high = (f"{value:.{self.decimals}f}" for value in self[:3])
        return f"{mean}{self.unit} [{low}, {high}]" if math.isfinite(self.high) else f"{mean}{self.unit}"

    @property
    def complement(self) -> Measured:
        """An error as an accuracy, or vice versa."""
        return self._replace(mean=100 - self.mean, low=100 - self.high, high=100 - self.low)


def measured(records: Sequence[Record], name: str = "error_percent", test: str = "") -> Measured:
    """A figure of several seeds; `test` names one of several tests in an outcome."""
    outcomes: list[dict[str, Any]] = [r.outcome[test] if test else r.outcome for r in records]
    lows, highs = zip(*(each[f"{name}_interval_95"] for each in outcomes), strict=True)
    mean = sum(each[name] for each in outcomes) / len(outcomes)
    return Measured(mean, min(lows), max(highs), len(outcomes))


class Paired(NamedTuple):
    """Differences from a control with the same seed; below zero is better."""

    differences: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.differences)

    @property
    def half(self) -> float:
        """Half of Student's 95 % interval of the mean; infinite for a single seed."""
        return mean_interval(self.differences)

    @property
    def verdict(self) -> Literal["better", "worse", "too close to call"]:
        if abs(self.mean) <= self.half:
            return "too close to call"
        return "better" if self.mean < 0 else "worse"

    def __str__(self) -> str:
        """
        >>> str(Paired((1.0, 1.2))), str(Paired((0.5,))), str(Paired(()))
        ('+1.10 (-0.17 to +2.37)', '+0.50', '–')
        """
        if len(self.differences) < 2:
            return f"{self.mean:+.2f}" if self.differences else "–"
        return f"{self.mean:+.2f} ({self.mean - self.half:+.2f} to {self.mean + self.half:+.2f})"


def paired(group: Sequence[Record], control: Sequence[Record]) -> Paired:
    """Test errors of a group minus those of the control, for the seeds of both."""
    errors = {r.seed: r.outcome["error_percent"] for r in control}
    return Paired(tuple(r.outcome["error_percent"] - errors[r.seed] for r in group if r.seed in errors))


def overlap(a: Measured, b: Measured) -> bool:
    return a.low <= b.high and b.low <= a.high


def too_close(a: Sequence[Record], b: Sequence[Record], test: str = "") -> str:
    """The end of a sentence about two methods whose 95 % intervals overlap."""
    close = overlap(measured(a, test=test), measured(b, test=test))
    return " (too close to call: the 95 % intervals overlap)" if close else ""


def lower(claim: str, paper: str, a: Measured, b: Measured) -> Claim:
    """The claim that `a` is lower than `b`."""
    verdict: Verdict = "too close to call"
    if not overlap(a, b):
        verdict = "reproduced" if a.mean < b.mean else "not reproduced"
    return Claim(claim, paper, f"{a} vs. {b}", min(a.seeds, b.seeds), verdict)


def higher(claim: str, paper: str, a: Measured, b: Measured) -> Claim:
    """The claim that `a` is higher than `b`."""
    found = lower(claim, paper, b, a)
    return Claim(claim, paper, f"{a} vs. {b}", found.seeds, found.verdict)


def at_most(claim: str, paper: float, a: Measured) -> Claim:
    """The claim that an error is as low as the paper's, which may lie above our interval, below it or inside."""
    outside: Verdict = "reproduced" if a.high <= paper else "not reproduced"
    verdict: Verdict = "too close to call" if a.low <= paper < a.high else outside
    return Claim(claim, f"{paper:g}{a.unit}", str(a), a.seeds, verdict)
