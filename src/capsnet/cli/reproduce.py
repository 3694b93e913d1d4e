"""capsnet reproduce: the paper's experiments, and the page that holds their results."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from capsnet import experiments, training
from capsnet.cli.flags import MaybePath, MaybeStr, Switch, parse
from capsnet.errors import UserError, unknown
from capsnet.experiments.conduct import Show, conduct
from capsnet.experiments.plan import BUDGETS, Experiment, Row, Table, check_budget
from capsnet.experiments.results import Place, Results
from capsnet.terminal import TrainingBar, clock, print_table, say

Name = Annotated[Positional[str], arg(metavar="NAME", help_behavior_hint="")]
Images = Annotated[tuple[str, ...], arg(metavar="IMAGE…", help_behavior_hint="")]


@dataclass(frozen=True)
class Reproduce:
    """Run one of the paper's experiments and put its figures beside the paper's, or gather all results on a page.

    Interrupted at any moment, the same command goes on where it was; rows that are done are not run again. Results go
    to results/reproduce, trained networks to runs/reproduce.

    Examples:
      capsnet reproduce --list
      capsnet reproduce table1 --budget hour
      capsnet reproduce iterations --budget full --seeds 3
      capsnet reproduce figures --model runs/demo           Fig. 3, 4 and 5 of a network of yours
      capsnet reproduce report                              RESULTS.md and docs/results.html from all results
    """

    name: Name = ""
    """The experiment, or report."""
    list: Switch = False
    """Name the experiments, what there is of them, and stop."""
    budget: str = "hour"
    """smoke (does it run?), hour (narrowed networks) or full (the paper's networks and sizes)."""
    seeds: int = 1
    """How often each row is trained, with seeds 0, 1, …"""
    model: MaybeStr = None
    """With figures: draw them of this shipped model, run's folder or .safetensors file."""
    images: Images = ()
    """With --model: of these image files (default: test images)."""
    out: MaybePath = None
    """With --model: folder for the pictures (default: figures, beside the model's file, or here for a shipped one)."""
    json: Switch = False
    """Print the results as JSON."""


def reproduce(argv: list[str]) -> int:
    flags = parse(Reproduce, "reproduce", argv)
    if flags.list or not flags.name:
        return show_list(flags.json)
    if flags.name == "report":
        return write_pages()
    if flags.name not in experiments.EXPERIMENTS:
        raise unknown("experiment", flags.name, [*experiments.EXPERIMENTS, "report"])
    if flags.model or flags.images:
        return figures_of(flags)
    check_budget(flags.budget)
    return run(experiments.get(flags.name), flags)


def show_list(as_json: bool) -> int:
    """The experiments, and which of their results are there."""
    place = Place()
    rows = []
    for name in experiments.EXPERIMENTS:
        there = [budget for budget in BUDGETS if place.file(name, budget).exists()]
        rows.append({"name": name, "title": experiments.get(name).title, "results": there})
    if as_json:
        print(json.dumps({"experiments": rows, "budgets": BUDGETS}))
        return 0
    print_table(
        ["experiment", "what it is", "results"],
        [(str(r["name"]), str(r["title"]), ", ".join(r["results"]) or "–") for r in rows],
    )
    print_table(["budget", "what it means"], list(BUDGETS.items()))
    return 0


def run(experiment: Experiment, flags: Reproduce) -> int:
    """Conduct an experiment, then show its table."""
    show = Shown(experiment, flags.budget)
    try:
        results = conduct(experiment, flags.budget, flags.seeds, show=show)
    except KeyboardInterrupt:
        say(f"stopped; go on with: capsnet reproduce {experiment.name} --budget {flags.budget} --seeds {flags.seeds}")
        return 130
    if flags.json:
        print(json.dumps({"experiment": experiment.name, "budget": flags.budget, "rows": results.rows}))
        return 0
    show_results(experiment, results)
    return 0


def show_results(experiment: Experiment, results: Results) -> None:
    table: Table = experiment.table(results.rows)
    print_table(table.columns, table.rows, title=experiment.title)
    for sentence in [*table.notes, *experiment.findings(results.rows)]:
        print(sentence)
    print(f"\n{results.path}")
    for picture in sorted(Place().pictures(experiment.name, results.budget).glob("*.png")):
        print(f"{picture} (and .svg)")


class Shown(Show):
    """The progress of an experiment: what is left of it in all, and a bar for the row at hand."""

    def __init__(self, experiment: Experiment, budget: str) -> None:
        self.experiment, self.budget = experiment, budget
        self.number, self.rows = 0, 0
        self.expected: float | None = None
        self.began = time.monotonic()

    def planned(self, rows: Sequence[Row], left: Sequence[Row], seconds: float | None) -> None:
        self.rows, self.number, self.expected = len(rows), len(rows) - len(left), seconds
        self.began = time.monotonic()
        say(f"{self.experiment.name}, budget {self.budget}: {len(rows)} rows, {len(left)} of them to do")
        if left and seconds:
            hours = f"{seconds / 3600:,.1f} hours" if seconds > 5400 else f"{seconds / 60:.0f} minutes"
            say(f"expected to take about {hours} here, by a measured step of each network; it can be interrupted")

    def started(self, row: Row) -> list[training.Watcher]:
        self.number += 1
        say(f"row {self.number} of {self.rows}: {row.name}{self.left()}")
        return [RowBar()]

    def left(self) -> str:
        """Time left in all, by what was expected of it."""
        if not self.expected:
            return ""
        return f", {clock(max(0.0, self.expected - (time.monotonic() - self.began)))} left in all"

    def ended(self, row: Row, record: dict[str, Any]) -> None:
        figures = [
            f"{k} {record['outcome'][k]:.4g}"
            for k in self.experiment.columns
            if isinstance(record["outcome"].get(k), float)
        ]
        say(f"  {row.name}: {', '.join(figures) or 'done'}")

    def set_aside(self, kept: Path) -> None:
        say(f"the results there are another version's: kept as {kept}, and begun anew")


class RowBar(TrainingBar):
    """A training's bar, under the line that has named its row."""

    def started(self, run: training.Run) -> None:
        self.began = (run.step, time.monotonic())
        self.progress.start()
        self.progress.update(self.task, total=run.steps, completed=run.step)

    def epoch_ended(self, run: training.Run, record: dict[str, Any]) -> None:
        """Quiet: some rows have hundreds of epochs."""


def write_pages() -> int:
    from capsnet.experiments.page import write

    if find_spec("matplotlib") is None:
        raise UserError("the report's pictures need matplotlib: pip install 'capsnet[train]'.")
    for path in write(Place(), Path()):
        print(path)
    return 0


def figures_of(flags: Reproduce) -> int:
    """Fig. 3, 4 and 5 of any checkpoint and any images."""
    if flags.name != "figures" or not flags.model:
        raise UserError("--model and --images go together with figures: capsnet reproduce figures --model runs/demo.")
    from capsnet.cli.figures import paint

    for path in paint(flags.model, flags.images, flags.out):
        print(path)
    return 0
