"""capsnet reproduce."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
from tyro.conf import Positional, arg

from capsnet import experiments
from capsnet.cli.flags import MaybePath, MaybeStr, Switch, parse
from capsnet.cli.inputs import list_images, prepare_image, splits_for, training_config
from capsnet.cli.reconstruct import MAX_IMAGES
from capsnet.cli.train import command_in_group
from capsnet.errors import UserError, unknown
from capsnet.experiments.core.conduct import Show, conduct, save_picture
from capsnet.experiments.core.plan import BUDGETS, Experiment, Record, Row, check_budget
from capsnet.experiments.core.results import Place, Results
from capsnet.experiments.figures import looked_at, paper_figures
from capsnet.group.base import current
from capsnet.io import checkpoint
from capsnet.notice import say
from capsnet.terminal import print_table
from capsnet.timing import clock
from capsnet.train import loop
from capsnet.train.callbacks import TrainingBar

Name = Annotated[Positional[str], arg(metavar="NAME", help_behavior_hint="")]
Images = Annotated[tuple[str, ...], arg(metavar="IMAGE…", help_behavior_hint="")]


@dataclass(frozen=True)
class Reproduce:
    """Run one of the paper's experiments and compare with the paper's numbers, or write a page with all results.

    Repeat an interrupted command to resume it; finished rows are not run again. Results are written to
    results/reproduce, trained networks to runs/reproduce.

    Examples:
      capsnet reproduce --list
      capsnet reproduce table1 --budget hour
      capsnet reproduce iterations --budget full --seeds 3
      capsnet reproduce figures --model runs/demo           Figures 3, 4 and 5 of your model
      capsnet reproduce report                              write RESULTS.md and docs/results
    """

    name: Name = ""
    """Experiment to run, or report."""
    list: Switch = False
    """List the experiments and their results, and exit."""
    budget: str = "hour"
    """smoke (only checks that it runs), hour (narrower networks), day (longer trainings, a day or more) or full (the
    paper's networks and training lengths)."""
    seeds: int = 1
    """Repetitions of each row, with seeds 0, 1, …"""
    only: str = ""
    """Run only the rows whose name starts with this, such as mnist-."""
    model: MaybeStr = None
    """With figures: model name, run folder or .safetensors file to draw."""
    images: Images = ()
    """With --model: image files to use (default: test images)."""
    out: MaybePath = None
    """With --model: folder to write to (default: figures/ in the run folder, or in the current folder)."""
    json: Switch = False
    """Print the results as JSON."""


def reproduce(argv: list[str]) -> int:
    flags = parse(Reproduce, "reproduce", argv)
    trains = flags.name in experiments.EXPERIMENTS and not (flags.list or flags.model or flags.images)
    if not (trains or current().leads):
        return 0
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
    """List the experiments and the budgets that have results."""
    place = Place()
    rows = []
    for name in experiments.EXPERIMENTS:
        there = [budget for budget in BUDGETS if place.file(name, budget).exists()]
        rows.append({"name": name, "title": experiments.get(name).title, "results": there})
    if as_json:
        print(json.dumps({"experiments": rows, "budgets": BUDGETS}))
        return 0
    print_table(
        ["experiment", "description", "results"],
        [(str(r["name"]), str(r["title"]), ", ".join(r["results"]) or "–") for r in rows],
    )
    print_table(["budget", "description"], list(BUDGETS.items()))
    return 0


def run(experiment: Experiment, flags: Reproduce) -> int:
    """Run an experiment and print its table."""
    show = Shown(experiment, f"budget {flags.budget}")
    try:
        results = conduct(experiment, flags.budget, flags.seeds, only=flags.only, show=show)
    except KeyboardInterrupt:
        words = ["reproduce", experiment.name, "--budget", flags.budget, "--seeds", str(flags.seeds)]
        words += ["--only", flags.only] if flags.only else []
        say(f"stopped; resume with: {command_in_group(*words)}")
        return 130
    if flags.json:
        rows = [row.to_json() for row in results.rows]
        print(json.dumps({"experiment": experiment.name, "budget": flags.budget, "rows": rows}))
        return 0
    show_results(experiment, results)
    return 0


def show_results(experiment: Experiment, results: Results) -> None:
    table = experiment.table(results.rows)
    print_table(table.columns, table.rows, title=experiment.title)
    for sentence in [*table.notes, *experiment.findings(results.rows)]:
        print(sentence)
    print(f"\n{results.path}")
    for picture in sorted(Place().pictures(experiment.name, results.budget).glob("*.png")):
        print(picture)


class Shown(Show):
    """The progress of an experiment: the total time left, and a bar for the current row."""

    def __init__(self, experiment: Experiment, settings: str) -> None:
        self.experiment, self.settings = experiment, settings
        self.number, self.rows = 0, 0
        self.expected: float | None = None
        self.began = time.monotonic()

    def planned(self, rows: Sequence[Row], left: Sequence[Row], seconds: float | None) -> None:
        self.rows, self.number, self.expected = len(rows), len(rows) - len(left), seconds
        self.began = time.monotonic()
        say(f"{self.experiment.name}, {self.settings}: {len(rows)} rows, {len(left)} to run")
        if left and seconds:
            say(f"estimated time: {clock(seconds)}, from one measured step of each network; interrupt at any time")

    def started(self, row: Row) -> list[loop.Watcher]:
        self.number += 1
        say(f"row {self.number} of {self.rows}: {row.name}{self.left()}")
        return [RowBar()]

    def left(self) -> str:
        """The total time left, from the estimate."""
        if not self.expected:
            return ""
        return f", {clock(max(0.0, self.expected - (time.monotonic() - self.began)))} left in total"

    def ended(self, row: Row, record: Record) -> None:
        figures = [
            f"{k} {record.outcome[k]:.4g}" for k in self.experiment.columns if isinstance(record.outcome.get(k), float)
        ]
        say(f"  {row.name}: {', '.join(figures) or 'done'}")

    def set_aside(self, kept: Path) -> None:
        say(f"the existing results come from another version: they are kept as {kept}, and the experiment starts again")


class RowBar(TrainingBar):
    """A training bar without the heading, because the row has one."""

    def started(self, run: loop.Run) -> None:
        self.began = (run.step, time.monotonic())
        self.progress.start()
        self.progress.update(self.task, total=run.steps, completed=run.step)

    def epoch_ended(self, run: loop.Run, record: dict[str, Any]) -> None:
        """Silent, because some rows have hundreds of epochs."""


def write_pages() -> int:
    from capsnet.experiments.core.page import write

    if find_spec("matplotlib") is None:
        raise UserError("the report needs matplotlib: pip install 'capsnet[train]'.")
    for path in write(Place(), Path()):
        print(path)
    return 0


def figures_of(flags: Reproduce) -> int:
    """Draw Figures 3, 4 and 5 of any checkpoint, from these images or from its test images."""
    if flags.name != "figures" or not flags.model:
        raise UserError("--model and --images belong to figures: capsnet reproduce figures --model runs/demo.")
    if find_spec("matplotlib") is None:
        raise UserError("figures need matplotlib: pip install 'capsnet[train]'.")
    model = checkpoint.load(flags.model)
    if flags.images:
        config, names = training_config(flags.model), list_images(flags.images)[:MAX_IMAGES]
        pictures = paper_figures(model, torch.stack([prepare_image(model, name, config).image for name in names]), None)
    else:
        pictures = paper_figures(model, *looked_at(model, splits_for(model, flags.model, None).test))
    place = Path(flags.model)
    folder = flags.out or (place if place.is_dir() else place.parent) / "figures"
    for name, figure in pictures.items():
        print(folder / f"{save_picture(figure, folder / name)}.png")
    return 0
