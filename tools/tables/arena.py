"""The tables of docs/routings.md: what `capsnet reproduce arena` measured."""

from __future__ import annotations

from collections.abc import Callable

from capsnet.experiments.arena.compare import Arena, against_control
from capsnet.experiments.core.plan import Record, by_method, values
from capsnet.report.tables import over_seeds
from tables import read, table

MARKS = {"better": " ▼", "worse": " ▲", "too close to call": ""}


def records() -> list[Record]:
    return [Record.from_json(row) for row in read("reproduce/arena-day")["rows"]]


def arena() -> str:
    """Test errors, a row per algorithm and a column per dataset."""
    found = records()
    cells = {(group[0].shown["routing"], group[0].shown["data"]): cell(group, found) for group in by_method(found)}
    routings, datasets = (list(dict.fromkeys(r.shown[what] for r in found)) for what in ("routing", "data"))
    rows = [[f"`{name}`", *(cells.get((name, data), "–") for data in datasets)] for name in routings]
    return table(["test error, %", *datasets], rows)


def cell(group: list[Record], found: list[Record]) -> str:
    apart = against_control(group, found)
    mark = MARKS[apart.verdict] if apart.differences else ""
    return over_seeds(values(group, "error_percent")) + mark


def verdicts() -> str:
    """What the records show, in sentences."""
    return "".join(f"- {sentence}\n" for sentence in Arena().findings(records()))


TABLES: dict[str, Callable[[], str]] = {"arena": arena, "arena-found": verdicts}
