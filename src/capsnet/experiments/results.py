"""The results of an experiment on disk: one JSON file for each experiment and budget, written row by row.

    results/reproduce/NAME-BUDGET.json      the records, each with its birth certificate
    results/reproduce/NAME-BUDGET/*.png     its pictures, each also as .svg

A file that another version wrote is never mixed with new rows: it is kept under a name that says which version, and
the report marks it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from capsnet import __version__, checkpoint
from capsnet.errors import UserError

FORMAT = 1


@dataclass(frozen=True)
class Place:
    """Where results and the runs behind them lie."""

    results: Path = Path("results/reproduce")
    runs: Path = Path("runs/reproduce")

    def file(self, name: str, budget: str) -> Path:
        return self.results / f"{name}-{budget}.json"

    def pictures(self, name: str, budget: str) -> Path:
        return self.results / f"{name}-{budget}"

    def run(self, name: str, budget: str, row: str) -> Path:
        return self.runs / f"{name}-{budget}" / row


@dataclass
class Results:
    """The records of one experiment at one budget."""

    experiment: str
    budget: str
    path: Path
    rows: list[dict[str, Any]] = field(default_factory=list)
    version: str = __version__
    format: int = FORMAT

    @property
    def current(self) -> bool:
        """Whether this version wrote it."""
        return (self.version, self.format) == (__version__, FORMAT)

    def find(self, name: str) -> dict[str, Any] | None:
        return next((row for row in self.rows if row["name"] == name), None)

    def put(self, record: Mapping[str, Any]) -> None:
        """Add a record, or replace the one of that name, and write the file whole."""
        self.rows = [row for row in self.rows if row["name"] != record["name"]] + [dict(record)]
        self.write()

    def sort(self, names: Sequence[str]) -> None:
        """Bring the records into the order of these names; rows that were run anew have come last until now."""
        place = {name: k for k, name in enumerate(names)}
        self.rows.sort(key=lambda row: place.get(row["name"], len(place)))
        self.write()

    def write(self) -> None:
        content = {"experiment": self.experiment, "budget": self.budget, "format": self.format,
                   "capsnet": self.version, "rows": self.rows}  # fmt: skip
        checkpoint.write_json(self.path, content)


def read(path: Path) -> Results:
    """A results file, whoever wrote it."""
    content = checkpoint.read_json(path)
    try:
        made = Results(
            str(content["experiment"]), str(content["budget"]), path, list(content["rows"]),
            str(content["capsnet"]), content["format"],
        )  # fmt: skip
        if made.format == FORMAT:
            [row[key] for row in made.rows for key in ("name", "method", "outcome", "shown", "paper", "less", "made")]
    except (KeyError, TypeError):
        raise UserError(f"{path} holds no results of an experiment: restore it, or move it away.") from None
    return made


def opened(path: Path, name: str, budget: str) -> tuple[Results, Path | None]:
    """The results to go on with, and where a file of another version was moved, if there was one."""
    fresh = Results(name, budget, path)
    if not path.exists():
        return fresh, None
    found = read(path)
    if found.current:
        return found, None
    return fresh, set_aside(path, found)


def set_aside(path: Path, found: Results) -> Path:
    """Keep a file of another version under a name that says so."""
    kept = path.with_suffix(f".by-{found.version}.json")
    number = 2
    while kept.exists():
        kept = path.with_suffix(f".by-{found.version}-{number}.json")
        number += 1
    path.rename(kept)
    return kept


def everything(place: Place) -> list[Results]:
    """All results there are, those of other versions too."""
    return [read(path) for path in sorted(place.results.glob("*.json"))]
