"""The tables of docs/synchrony.md: what `capsnet reproduce synchrony` measured."""

from __future__ import annotations

from collections.abc import Callable

from capsnet.experiments.core.plan import Record, by_method
from capsnet.experiments.synchrony.compare import Synchrony
from capsnet.report.tables import over_seeds
from tables import read, table


def records() -> list[Record]:
    return [Record.from_json(row) for row in read("reproduce/synchrony-day")["rows"]]


def synchrony() -> str:
    """One row per image and network: mean over the seeds, with the standard deviation."""
    rows = []
    for group in by_method(records()):
        first = group[0]
        measured = [over_seeds([r.outcome.get(name) for r in group], 2) for name in Synchrony.columns]
        rows.append((first.shown["image"], first.shown["network"], *measured, str(len(group))))
    return table(["image", "network", *Synchrony.columns.values(), "seeds"], rows)


def found() -> str:
    """What the records show, in sentences."""
    return "".join(f"- {sentence}\n" for sentence in Synchrony().findings(records()))


TABLES: dict[str, Callable[[], str]] = {"synchrony": synchrony, "synchrony-found": found}
