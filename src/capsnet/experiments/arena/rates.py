"""The learning rate of each algorithm, chosen on validation images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from capsnet.experiments.arena.tasks import LABELS, Task, algorithms_of, config_of, tasks_of
from capsnet.experiments.core.plan import Budget, Experiment, Record, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RATES = (0.0015, 0.003, 0.006)


class Rates(Experiment):
    name = "arena-rates"
    title = "Learning rates for the arena"
    question = (
        "Which learning rate suits each routing algorithm? Each rate of a small grid trains the same network for one "
        "epoch of 20,000 images and is judged on 10,000 held-out training images. The test set is not used."
    )
    columns = {"error_percent": "validation error, %"}  # noqa: RUF012
    budgets = ("smoke", "hour", "day")

    def rows(self, budget: Budget, seed: int) -> list[Row]:
        rates = RATES[:2] if budget == "smoke" else RATES
        return [
            rate_row(task, algorithm, rate, budget)
            for task in tasks_of(budget)
            for algorithm in algorithms_of(budget)
            for rate in rates
        ]

    def pictures(self, records: Sequence[Record]) -> dict[str, Figure]:
        from capsnet.report import figures

        panels = [rates_panel(data, records) for data in dict.fromkeys(r.shown["data"] for r in records)]
        note = "Validation error after 20,000 images, one seed; the lowest rate of each curve is used in the arena."
        return {"arena-rates": figures.lines(self.title, note, panels)}


def rates_panel(data: str, records: Sequence[Record]) -> Any:
    """Validation error against the learning rate, a curve per algorithm."""
    from capsnet.report.figures import PALETTE, Line, Panel

    drawn: dict[str, list[tuple[float, float]]] = {}
    for record in records:
        if record.shown["data"] == data and "diverged" not in record.outcome:
            point = float(record.shown["learning rate"]), record.outcome["error_percent"]
            drawn.setdefault(record.shown["routing"], []).append(point)
    lines = [
        Line(name, [x for x, _ in points], [y for _, y in points], PALETTE[k % len(PALETTE)])
        for k, (name, points) in enumerate(drawn.items())
    ]
    return Panel(data, "learning rate", "validation error, %", lines, log_x=True)


def rate_row(task: Task, algorithm: str, rate: float, budget: Budget) -> Row:
    config = config_of(task, algorithm, rate, budget, seed=0)
    if budget == "smoke":
        config = replace(config, validation=500)
    else:
        config = replace(config, epochs=1, train_limit=20_000, validation=10_000)
    shown = {"data": LABELS[task.name], "routing": algorithm, "learning rate": f"{rate:g}"}
    return Row(f"{task.name}-{algorithm}-{round(1e4 * rate)}e-4", config, shown, validated=True)


def best_rates(records: Sequence[Record]) -> dict[tuple[str, str], float]:
    """(data, routing) → the learning rate with the lowest validation error; one that diverged is not chosen."""
    errors: dict[tuple[str, str], dict[float, float]] = {}
    for record in records:
        key, rate = (record.shown["data"], record.shown["routing"]), float(record.shown["learning rate"])
        if "diverged" not in record.outcome:
            errors.setdefault(key, {})[rate] = record.outcome["error_percent"]
    return {key: min(found, key=lambda rate: found[rate]) for key, found in errors.items()}
