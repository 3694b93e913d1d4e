"""The results of an experiment on disk: one JSON file per experiment and budget, written row by row.

    results/reproduce/NAME-BUDGET.json      the records, each with its certificate
    results/reproduce/NAME-BUDGET/*.png     its pictures

Rows of different versions of capsnet are never mixed: an older file is renamed, and the report marks it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from capsnet import __version__
from capsnet.errors import UserError
from capsnet.experiments.core.plan import Record
from capsnet.group.base import current
from capsnet.io import checkpoint

FORMAT = 1
REQUIRED = ("name", "method", "outcome", "shown", "paper", "less", "made")


@dataclass(frozen=True)
class Place:
    """Folders of the results and of the runs behind them."""

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
    rows: list[Record] = field(default_factory=list)
    version: str = __version__
    format: int = FORMAT

    @property
    def current(self) -> bool:
        """Whether this version wrote it."""
        return (self.version, self.format) == (__version__, FORMAT)

    def find(self, name: str) -> Record | None:
        return next((row for row in self.rows if row.name == name), None)

    def put(self, record: Record) -> None:
        """Add or replace a record and write the file."""
        self.rows = [row for row in self.rows if row.name != record.name] + [record]
        self.write()

    def sort(self, names: Sequence[str]) -> None:
        """Sort the records by the order of these names, and write the file."""
        place = {name: k for k, name in enumerate(names)}
        self.rows.sort(key=lambda row: place.get(row.name, len(place)))
        self.write()

    def write(self) -> None:
        if not current().leads:
            return
        content = {"experiment": self.experiment, "budget": self.budget, "format": self.format,
                   "capsnet": self.version, "rows": [row.to_json() for row in self.rows]}  # fmt: skip
        checkpoint.write_json(self.path, content)


def read(path: Path) -> Results:
    """Read a results file of any version."""
    content = checkpoint.read_json(path)
    try:
        if content["format"] == FORMAT:
            _ = [row[key] for row in content["rows"] for key in REQUIRED]  # a missing one is a KeyError
        rows = [Record.from_json(row) for row in content["rows"]]
        names = str(content["experiment"]), str(content["budget"])
        return Results(*names, path, rows, str(content["capsnet"]), content["format"])
    except (KeyError, TypeError, AttributeError, UserError):
        raise UserError(f"{path} does not contain results of an experiment: restore it, or move it away.") from None


def opened(path: Path, name: str, budget: str) -> tuple[Results, Path | None]:
    """The results to continue with, and the new name of a file of another version, if there was one."""
    fresh = Results(name, budget, path)
    if not path.exists():
        return fresh, None
    found = read(path)
    if found.current:
        return found, None
    return fresh, set_aside(path, found)


def set_aside(path: Path, found: Results) -> Path:
    """Rename a file of another version."""
    kept = path.with_suffix(f".by-{found.version}.json")
    number = 2
    while kept.exists():
        kept = path.with_suffix(f".by-{found.version}-{number}.json")
        number += 1
    path.rename(kept)
    return kept


def everything(place: Place) -> list[Results]:
    """All results, including those of other versions."""
    return [read(path) for path in sorted(place.results.glob("*.json"))]
