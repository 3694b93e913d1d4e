"""What a training step costs with each algorithm: time and peak memory, nothing else running.

The algorithms of a dataset take turns in one process, so that noise affects all of them alike. Peak memory is measured
in a separate process for each.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from capsnet import plugins
from capsnet.bench.network import peak_megabytes, printed_by
from capsnet.experiments.arena.tasks import LABELS, TASKS, Task, algorithms_of, config_of, tasks_of
from capsnet.experiments.core.conduct import training_step
from capsnet.experiments.core.plan import Budget, Experiment, Record, Row, check_budget
from capsnet.kernels.allocator import keep_memory
from capsnet.report.tables import Table, whole
from capsnet.timing import alternate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REPEATS = 7
RATE = 0.003  # a step costs the same with any


class Costs(Experiment):
    name = "arena-cost"
    title = "What a training step costs with each routing"
    question = (
        "Seconds and peak memory of a training step of 128 images with each routing algorithm. The algorithms of a "
        "dataset take turns in one process; memory is that of a new process, including the network. Run this on an "
        "idle machine."
    )
    budgets = ("smoke", "hour", "day")

    def rows(self, budget: Budget, seed: int) -> list[Row]:
        return [Row(f"{task.name}-cost-{budget}", None, {"data": LABELS[task.name]}) for task in tasks_of(budget)]

    def observe(self, row: Row) -> dict[str, Any]:
        name, _, budget = row.method.rpartition("-cost-")
        task, size = TASKS[name], check_budget(budget)
        names = algorithms_of(size)
        seconds = alternate([step_of(task, algorithm, size) for algorithm in names], 1 if size == "smoke" else REPEATS)
        return {
            algorithm: {"seconds_per_step": statistics.median(times), "peak_mb": peak_of(task, algorithm, size)}
            for algorithm, times in zip(names, seconds, strict=True)
        }

    def table(self, records: Sequence[Record]) -> Table:
        lines = [
            [record.shown["data"], routing, whole(1000 * cost["seconds_per_step"]), whole(cost["peak_mb"])]
            for record in records
            for routing, cost in record.outcome.items()
        ]
        return Table(["data", "routing", "ms per step", "peak memory, MB"], lines)

    def pictures(self, records: Sequence[Record]) -> dict[str, Figure]:
        from capsnet.report import figures

        panels = {
            record.shown["data"]: [
                figures.Bar(name, 1000 * cost["seconds_per_step"], figures.BLUE)
                for name, cost in record.outcome.items()
            ]
            for record in records
        }
        note = "A training step of 128 images on this machine; the algorithms took turns in one process."
        return {"arena-cost": figures.bars(self.title, note, panels, "ms per step", decimals=0)}


def step_of(task: Task, algorithm: str, budget: Budget) -> Callable[[], None]:
    return training_step(config_of(task, algorithm, RATE, budget, seed=0))


def peak_of(task: Task, algorithm: str, budget: Budget) -> float:
    """Peak memory, in megabytes, of a new process that takes three training steps."""
    return printed_by("capsnet.experiments.arena.cost", task.name, algorithm, budget)


def main(words: Sequence[str]) -> None:
    """The process behind `peak_of`: print the megabytes."""
    name, algorithm, budget, *rest = words
    plugins.load_flags(rest)
    keep_memory()
    step = step_of(TASKS[name], algorithm, check_budget(budget))
    for _ in range(3):
        step()
    print(round(peak_megabytes(), 1))


if __name__ == "__main__":
    main(sys.argv[1:])
