"""The learning rate of each algorithm, chosen on validation images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from capsnet.experiments.arena.tasks import LABELS, Task, algorithms_of, config_of, tasks_of
from capsnet.experiments.core.plan import Budget, Experiment, Record, Row
from capsnet.report.tables import Table

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

    def table(self, records: Sequence[Record]) -> Table:
        rates = sorted({float(r.shown["learning rate"]) for r in records})
        cells: dict[tuple[str, str], dict[float, str]] = {}
        for record in records:
            key, rate = (record.shown["data"], record.shown["routing"]), float(record.shown["learning rate"])
            diverged = "diverged" in record.outcome
            cells.setdefault(key, {})[rate] = "diverged" if diverged else f"{record.outcome['error_percent']:.2f}"
        best = best_rates(records)
        lines = [
            [*key, *(found.get(rate, "–") for rate in rates), f"{best[key]:g}" if key in best else "–"]
            for key, found in cells.items()
        ]
        return Table(["data", "routing", *(f"{rate:g}, error %" for rate in rates), "chosen"], lines)


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
