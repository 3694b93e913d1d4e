"""What an experiment is: rows to train, what is measured on each, and the table and pictures that come out.

Subclass `Experiment`, give it a name, a title, a question and `rows`; override `measure`, `draw`, `cells` and
`pictures` where the defaults do not say enough. `conduct.py` does the rest: it trains each row in a folder of its own,
goes on after any interruption and keeps what was measured. Tables and curves are drawn from those records alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from capsnet.config import CapsNetConfig, Config, ModelConfig
from capsnet.errors import unknown
from capsnet.evaluation import mean_and_std
from capsnet.training import Result

if TYPE_CHECKING:  # pictures need matplotlib, which only some installations have
    from matplotlib.figure import Figure

    from capsnet.experiments.results import Place

Budget = Literal["smoke", "hour", "full"]
BUDGETS: dict[str, str] = {
    "smoke": "under 30 seconds: does it run? Its numbers mean nothing",
    "hour": "an hour at most on two cores: narrowed networks, fewer epochs; one seed shows large differences only",
    "full": "the paper's networks and sizes, row by row: days on a CPU",
}
Record = Mapping[str, Any]  # a finished row as it stands in the results file


def check_budget(name: str) -> Budget:
    if name not in BUDGETS:
        raise unknown("budget", name, BUDGETS)
    return name  # type: ignore[return-value]


@dataclass(frozen=True)
class Row:
    """One training (or, without a config, one measurement) of an experiment."""

    method: str
    """What it is, as a short name of letters, digits and dashes; rows of one method differ by their seed only."""
    config: Config | None
    """What is trained; None where nothing is."""
    shown: Mapping[str, str] = field(default_factory=dict)
    """The cells of the table that say what it is, by column."""
    paper: Mapping[str, float] = field(default_factory=dict)
    """The paper's own figures, under the names that `measure` gives ours."""
    less: tuple[str, ...] = ()
    """In what it has less than the paper: network, epochs, data. Said beside the row."""
    also: str = ""
    """Another data set that it is measured on, besides the test part of its own."""

    @property
    def seed(self) -> int:
        return self.config.seed if self.config else 0

    @property
    def name(self) -> str:
        """Its folder, and its key in the results."""
        return f"{self.method}-seed{self.seed}" if self.config else self.method


class Table(NamedTuple):
    """Words in rows and columns, with sentences below."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


class Experiment:
    """One experiment of the paper; see the top of this file."""

    name: str
    title: str
    question: str
    """What is asked and how it is measured, in a paragraph."""
    columns: Mapping[str, str] = {"error_percent": "test error, %"}
    """The measured numbers that the table shows: name in the outcome → heading."""
    decimals: Mapping[str, int] = {}
    """With how many decimals; 2 unless it says otherwise."""

    def prepare(self, place: Place) -> None:
        """Before anything else: make what the rows need on disk."""

    def rows(self, budget: Budget, seed: int) -> list[Row]:
        """The rows of one seed."""
        raise NotImplementedError

    def measure(self, row: Row, result: Result) -> dict[str, Any]:
        """What comes out of a trained row, as JSON types; the summary of the test by default."""
        return result.evaluation.summary()

    def observe(self, row: Row) -> dict[str, Any]:
        """What comes out of a row that trains nothing."""
        raise NotImplementedError

    def draw(self, row: Row, result: Result | None) -> dict[str, Figure]:
        """Pictures that need the model, drawn once when the row is finished: name → figure."""
        return {}

    def pictures(self, records: Sequence[Record]) -> dict[str, Figure]:
        """Pictures drawn from the records alone, anew whenever results are shown: name → figure."""
        return {}

    def captions(self) -> Mapping[str, str]:
        """A sentence below a picture, by its name (of a row's own picture: by the part after the row's name)."""
        return {}

    def finish(self, records: Sequence[Record], folder: Path) -> None:
        """After the last row: write what else belongs beside the pictures."""

    def findings(self, records: Sequence[Record]) -> list[str]:
        """What the records say, in sentences made from their numbers."""
        return []

    def table(self, records: Sequence[Record]) -> Table:
        """One line a method: what it is, our figure as mean ± std over seeds, the paper's beside it, and its cost."""
        groups = by_method(records)
        kinds = list(dict.fromkeys(name for group in groups for name in group[0]["shown"]))
        told = [name for name in self.columns if any(name in group[0]["paper"] for group in groups)]
        header = [*kinds]
        for name, heading in self.columns.items():
            header += [heading, "the paper's"] if name in told else [heading]
        header += ["parameters", "epochs", "training images", "seeds", "time"]
        lines = [self._line(group, kinds, told) for group in groups]
        return Table(header, lines, [f"* less than the paper: {'; '.join(what)}." for what in shortfalls(groups)])

    def _line(self, group: Sequence[Record], kinds: Sequence[str], told: Sequence[str]) -> list[str]:
        first = group[0]
        line = [str(first["shown"].get(name, "")) for name in kinds]
        line[-1] += " *" if first["less"] else ""
        for name in self.columns:
            line.append(spread([r["outcome"].get(name) for r in group], self.decimals.get(name, 2)))
            if name in told:
                value = first["paper"].get(name)
                line.append("–" if value is None else f"{value:g}")
        made = first["made"]
        return [*line, whole(made.get("parameters")), plain(made.get("epochs")), whole(made.get("training_images")),
                str(len(group)), clock(sum(r["seconds"] for r in group))]  # fmt: skip


def shortfalls(groups: Sequence[Sequence[Record]]) -> list[list[str]]:
    """In what rows had less than the paper: each different list once."""
    return [list(what) for what in dict.fromkeys(tuple(group[0]["less"]) for group in groups if group[0]["less"])]


def by_method(records: Sequence[Record]) -> list[list[Record]]:
    """Records of the same method together, in the order of their first one."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record["method"], []).append(record)
    return list(groups.values())


def values(records: Sequence[Record], name: str) -> list[float]:
    """One measured number of several records, where they have it."""
    return [r["outcome"][name] for r in records if r["outcome"].get(name) is not None]


def average(records: Sequence[Record], name: str) -> float | None:
    """The mean over seeds of one measured number."""
    found = values(records, name)
    return mean_and_std(found)[0] if found else None


def too_close(a: Sequence[Record], b: Sequence[Record], test: str = "") -> str:
    """Words for two methods that cannot be told apart: 95 % intervals overlap, those of one's seeds taken together."""
    (low, high), (other_low, other_high) = (reach(group, test) for group in (a, b))
    return "" if high < other_low or other_high < low else "; too close to call, their 95 % intervals overlap"


def reach(group: Sequence[Record], test: str = "") -> tuple[float, float]:
    """From the lowest to the highest end of the seeds' 95 % intervals; `test` names one of several in an outcome."""
    tests = [r["outcome"][test] if test else r["outcome"] for r in group]
    lows, highs = zip(*(each["error_percent_interval_95"] for each in tests), strict=True)
    return min(lows), max(highs)


def spread(found: Sequence[float | None], decimals: int = 2) -> str:
    """Numbers of several seeds as one cell: mean ± std.

    >>> spread([0.25, 0.27, 0.26]), spread([0.25]), spread([None])
    ('0.26 ± 0.01', '0.25', '–')
    """
    known = [value for value in found if value is not None]
    if not known:
        return "–"
    mean, std = mean_and_std(known)
    return f"{mean:.{decimals}f}" + (f" ± {std:.{decimals}f}" if len(known) > 1 else "")


def whole(number: float | None) -> str:
    return "–" if number is None else f"{number:,.0f}"


def plain(number: float | None) -> str:
    return "–" if number is None else f"{number:g}"


def clock(seconds: float) -> str:
    """Seconds in words for a table.

    >>> clock(42), clock(160), clock(9000)
    ('42 s', '2.7 min', '2.5 h')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


# --- Networks that several experiments share -------------------------------------------------------------------


def with_model(config: Config, **changes: Any) -> Config:
    """A config whose network differs in some fields."""
    return replace(config, model=replace(config.model, **changes))


def tiny(config: Config, images: int = 256, batch: int = 64) -> Config:
    """For `smoke`: a few steps of a network that is hardly one."""
    if isinstance(config.model, CapsNetConfig):
        small: ModelConfig = replace(
            config.model, stem_channels=(8,), stem_kernels=(9,), stem_strides=(2,), primary_types=4, primary_dim=4,
            primary_kernel=5, primary_stride=2, class_dim=8, decoder=(16,) if config.model.decoder else (),
        )  # fmt: skip
    else:
        small = replace(config.model, channels=(8,), kernels=(5,), pool=(4,), hidden=(16,))
    return replace(config, model=small, train_limit=images, batch_size=batch, epochs=1, validation=0)
