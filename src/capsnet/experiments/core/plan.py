"""An experiment: the rows to train, what is measured on each, and the table, claims and pictures that follow.

Subclass `Experiment` and define a name, a title, a question and `rows`; override `measure`, `claims`, `draw` and
`pictures` where needed. `conduct.py` does the rest: it trains each row in its own folder, resumes after interruptions
and stores what was measured. Tables, claims and curves use only those records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from capsnet.errors import unknown
from capsnet.evaluate import mean_and_std
from capsnet.experiments.core.claims import Claim
from capsnet.io.records import Certificate
from capsnet.records import from_json
from capsnet.report.tables import Table, over_seeds, plain, whole
from capsnet.timing import clock
from capsnet.train.config import Config
from capsnet.train.loop import Result

if TYPE_CHECKING:  # pictures need matplotlib, which only some installations have
    from matplotlib.figure import Figure

    from capsnet.experiments.core.results import Place

Budget = Literal["smoke", "hour", "day", "full"]
BUDGETS: dict[str, str] = {
    "smoke": "under 30 seconds, to check that it runs; the numbers are meaningless",
    "hour": "at most an hour on two cores, with compact networks and a few epochs instead of the paper's 640 or so",
    "day": "hours or days on two cores: several seeds, and larger networks or more epochs than `hour`",
    "full": "the paper's networks and sizes; days on a CPU",
}


@dataclass(frozen=True, kw_only=True)
class Record:
    """A finished row of the results file."""

    name: str = ""
    method: str = ""
    seed: int = 0
    shown: dict[str, str] = field(default_factory=dict)
    outcome: dict[str, Any] = field(default_factory=dict)
    """What was measured; each experiment has its own measures."""
    paper: dict[str, float] = field(default_factory=dict)
    less: tuple[str, ...] = ()
    also: str = ""
    made: dict[str, Any] = field(default_factory=dict)
    """Network, parameters, epochs and data; empty if nothing was trained."""
    pictures: tuple[str, ...] = ()
    seconds: float = 0.0
    certificate: Certificate = field(default_factory=Certificate)
    more: dict[str, Any] = field(default_factory=dict)
    """Other keys of the JSON object, such as what an ablation depends on."""

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Record:
        names = {each.name for each in fields(cls)} - {"more"}
        known = {name: value for name, value in row.items() if name in names}
        birth = Certificate.from_json(row.get("certificate", {}))
        more = {name: value for name, value in row.items() if name not in names}
        return from_json(cls, known | {"certificate": birth, "more": more})

    def to_json(self) -> dict[str, Any]:
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "more"}
        return values | {"certificate": self.certificate.to_json()} | self.more


def check_budget(name: str) -> Budget:
    if name not in BUDGETS:
        raise unknown("budget", name, BUDGETS)
    return name  # type: ignore[return-value]


@dataclass(frozen=True)
class Row:
    """One training (or, without a config, one measurement) of an experiment."""

    method: str
    """A short name of letters, digits and dashes; rows of one method differ only in their seed."""
    config: Config | None
    """What is trained; None if nothing is."""
    shown: Mapping[str, str] = field(default_factory=dict)
    """The cells of the table that describe the row, by column."""
    paper: Mapping[str, float] = field(default_factory=dict)
    """The paper's figures, by the names that `measure` gives ours."""
    less: tuple[str, ...] = ()
    """What it has less of than the paper: network, epochs, data."""
    also: str = ""
    """Another dataset that it is tested on."""
    validated: bool = False
    """Evaluate on the validation split and never on the test set: for rows that choose a setting."""

    @property
    def seed(self) -> int:
        return self.config.seed if self.config else 0

    @property
    def name(self) -> str:
        """Its folder and its key in the results."""
        return f"{self.method}-seed{self.seed}" if self.config else self.method


class Experiment:
    """An experiment; see the top of this file."""

    name: str
    title: str
    question: str
    """What is asked and how it is measured, as a paragraph."""
    columns: Mapping[str, str] = {"error_percent": "test error, %"}
    """The measured numbers in the table: name in the outcome → heading."""
    decimals: Mapping[str, int] = {}
    """Decimals per column; 2 by default."""
    budgets: Sequence[Budget] = ("smoke", "hour", "full")
    """The budgets that it supports."""
    requires: Sequence[str] = ()
    """Experiments whose results at the same budget this one needs; they run first."""

    def prepare(self, place: Place, budget: Budget) -> None:
        """Create the files that the rows need."""

    def consult(self, place: Place, budget: Budget) -> None:
        """Read the results of other experiments that the rows or the table use."""

    def rows(self, budget: Budget, seed: int) -> list[Row]:
        """The rows of one seed."""
        raise NotImplementedError

    def measure(self, row: Row, result: Result) -> dict[str, Any]:
        """Measure a trained row, as JSON types; by default the summary of the test."""
        return result.evaluation.summary()

    def observe(self, row: Row) -> dict[str, Any]:
        """Measure a row that trains nothing."""
        raise NotImplementedError

    def draw(self, row: Row, result: Result | None) -> dict[str, Figure]:
        """Pictures that need the model, drawn when the row is finished: name → figure."""
        return {}

    def pictures(self, records: Sequence[Record]) -> dict[str, Figure]:
        """Pictures drawn from the records: name → figure."""
        return {}

    def captions(self) -> Mapping[str, str]:
        """A sentence below a picture, by its name (for a row's picture: by the part after the row's name)."""
        return {}

    def chapters(self) -> Mapping[str, tuple[str, str]]:
        """The name of a picture → heading and text of the section that starts with it."""
        return {}

    def findings(self, records: Sequence[Record]) -> list[str]:
        """What the records show, in sentences."""
        return []

    def claims(self, records: Sequence[Record], budget: str) -> list[Claim]:
        """Claims about capsule networks that the records support or contradict."""
        return []

    def table(self, records: Sequence[Record]) -> Table:
        """One line per method: our figure as mean ± std over seeds, the paper's figure, and the cost."""
        groups = by_method(records)
        kinds = list(dict.fromkeys(name for group in groups for name in group[0].shown))
        told = [name for name in self.columns if any(name in group[0].paper for group in groups)]
        header = [*kinds]
        for name, heading in self.columns.items():
            header += [heading, "paper"] if name in told else [heading]
        header += ["parameters", "epochs", "training images", "seeds", "time"]
        lines = [self._line(group, kinds, told) for group in groups]
        return Table(header, lines, [f"{'; '.join(what)}." for what in reductions(groups)])

    def _line(self, group: Sequence[Record], kinds: Sequence[str], told: Sequence[str]) -> list[str]:
        first = group[0]
        line = [str(first.shown.get(name, "")) for name in kinds]
        line[-1] += " *" if first.less else ""
        for name in self.columns:
            line.append(over_seeds([r.outcome.get(name) for r in group], self.decimals.get(name, 2)))
            if name in told:
                value = first.paper.get(name)
                line.append("–" if value is None else f"{value:g}")
        made = first.made
        cost = [whole(made.get("parameters")), plain(made.get("epochs")), whole(made.get("training_images"))]
        return [*line, *cost, str(len(group)), clock(sum(r.seconds for r in group))]


def reductions(groups: Sequence[Sequence[Record]]) -> list[list[str]]:
    """What rows had less of than the paper: each list once."""
    return [list(what) for what in dict.fromkeys(tuple(group[0].less) for group in groups if group[0].less)]


def by_method(records: Sequence[Record]) -> list[list[Record]]:
    """Records grouped by method, in the order of their first one."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record.method, []).append(record)
    return list(groups.values())


def values(records: Sequence[Record], name: str) -> list[float]:
    """One measured number of several records, without missing ones."""
    return [r.outcome[name] for r in records if r.outcome.get(name) is not None]


def average(records: Sequence[Record], name: str) -> float | None:
    """The mean of one measured number over seeds."""
    found = values(records, name)
    return mean_and_std(found)[0] if found else None


# --- Configurations that several experiments share -------------------------------------------------------------------


def with_model(config: Config, **changes: Any) -> Config:
    """A config with some fields of its network changed."""
    return replace(config, model=replace(config.model, **changes))


def tiny(config: Config, images: int = 256, batch: int = 64) -> Config:
    """For `smoke`: a few steps of a toy network."""
    return replace(config, model=config.model.tiny(), train_limit=images, batch_size=batch, epochs=1, validation=0)
