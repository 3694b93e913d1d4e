"""Do sharper couplings come with a lower error? Their entropy and the test error, with one thing varied at a time.

Dynamic routing leaves the couplings close to equal: 99 % of their maximum entropy. The network of the arena is trained
on Fashion-MNIST with more or fewer iterations, for less or more time, with fewer and larger lower capsules, and with
routings whose couplings are sharper. Each row changes one of these, and is compared with the unchanged network of the
same seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from capsnet.experiments.arena.compare import by_chance, examine
from capsnet.experiments.arena.tasks import LABELS, TASKS, config_of
from capsnet.experiments.core.claims import Paired, paired
from capsnet.experiments.core.plan import Budget, Experiment, Record, Row, average, by_method, values, with_model
from capsnet.report.tables import Table, over_seeds, whole
from capsnet.routing.options import DynamicOptions
from capsnet.train.loop import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DATA = "fashion-mnist"
EPOCHS = 6
RATE = 0.006  # what arena-rates chose for each of these routings on these images
SAME = 0.1  # percentage points of entropy within which couplings count as equally sharp


@dataclass(frozen=True)
class Change:
    """What a row changes: one of the network, the routing and the training time."""

    kind: str
    label: str
    routing: str = "dynamic"
    model: Mapping[str, Any] = field(default_factory=dict)
    epochs: int = EPOCHS


BASE = "base"
CHANGES = {
    BASE: Change("nothing", f"3 iterations, {EPOCHS} epochs, 16 types of 8-D"),
    "iterations-2": Change("iterations", "2 iterations", model={"routing": DynamicOptions(iterations=2)}),
    "iterations-5": Change("iterations", "5 iterations", model={"routing": DynamicOptions(iterations=5)}),
    "epochs-2": Change("training time", "2 epochs", epochs=2),
    "epochs-18": Change("training time", "18 epochs", epochs=18),
    "types-8": Change("lower capsules", "8 types of 16-D", model={"primary_types": 8, "primary_dim": 16}),
    "types-4": Change("lower capsules", "4 types of 32-D", model={"primary_types": 4, "primary_dim": 32}),
    "types-2": Change("lower capsules", "2 types of 64-D", model={"primary_types": 2, "primary_dim": 64}),
    "uniform": Change("routing", "uniform", "uniform"),
    "max-min": Change("routing", "max-min", "max-min"),
    "em": Change("routing", "em", "em"),
    "self-attention": Change("routing", "self-attention", "self-attention"),
}


class Couplings(Experiment):
    name = "couplings"
    title = "Sharper couplings"
    question = (
        "Dynamic routing leaves couplings almost equal. Do sharper ones come with a lower error? The arena's network "
        f"is trained on {LABELS[DATA]} for {EPOCHS} epochs at a learning rate of {RATE:g}, and each row changes one "
        "thing: routing iterations, training time, number and size of the lower capsules (with as many numbers in "
        "all), or the routing. Entropy is that of the last couplings of 500 test images; 100 % means equal couplings "
        "to all classes. Errors are paired by seed with those of the unchanged network."
    )
    budgets = ("smoke", "day")

    def rows(self, budget: Budget, seed: int) -> list[Row]:
        names = list(CHANGES) if budget != "smoke" else [BASE, "types-4"]
        return [row_of(name, budget, seed) for name in names]

    def measure(self, row: Row, result: Result) -> dict[str, Any]:
        return {**result.evaluation.summary(), **examine(result)}

    def table(self, records: Sequence[Record]) -> Table:
        header = [
            "changed", "to", "entropy, %", "test error, %", "minus unchanged (95 % interval)", "agreement",
            "parameters", "epochs", "seeds",
        ]  # fmt: skip
        return Table(header, [line_of(group, records) for group in by_method(records)])

    def findings(self, records: Sequence[Record]) -> list[str]:
        base = average([r for r in records if r.method == BASE], "entropy_percent")
        compared = [group for group in by_method(records) if from_base(group, records).differences]
        if base is None or not compared:
            return []
        sharper = [group for group in compared if sharpened(group, records) > SAME]
        less = [group for group in compared if sharpened(group, records) < -SAME]
        return [
            f"The unchanged network's couplings have {base:.1f} % of the maximum entropy.",
            *listed("Changes with sharper couplings", sharper, records),
            *listed("Changes with less sharp couplings", less, records),
            by_chance(len(compared)),
        ]

    def pictures(self, records: Sequence[Record]) -> dict[str, Figure]:
        from capsnet.report import figures

        drawn = []
        for group in by_method(records):
            if (apart := from_base(group, records)).differences:
                label = f"{group[0].shown['to']}: {average(group, 'entropy_percent'):.1f} %"
                drawn.append(figures.Interval(label, apart.differences, apart.half))
        note = "Error minus that of the unchanged network, left is better: 95 % interval, seeds. In %: entropy."
        panels = {LABELS[DATA]: drawn}
        return {"couplings": figures.intervals(self.title, note, panels, "percentage points")} if drawn else {}


def row_of(name: str, budget: Budget, seed: int) -> Row:
    change = CHANGES[name]
    task = TASKS[DATA] if budget != "smoke" else TASKS["mnist"]
    config = with_model(config_of(task, change.routing, RATE, budget, seed), **change.model)
    if budget != "smoke":
        config = replace(config, epochs=change.epochs)
    return Row(name, config, {"changed": change.kind, "to": change.label})


def from_base(group: Sequence[Record], records: Sequence[Record]) -> Paired:
    """A group compared with the unchanged network; that one is compared with nothing."""
    return paired(group if group[0].method != BASE else [], [r for r in records if r.method == BASE])


def sharpened(group: Sequence[Record], records: Sequence[Record]) -> float:
    """Percentage points of entropy below the unchanged network, for the seeds of both."""
    base = {r.seed: r.outcome["entropy_percent"] for r in records if r.method == BASE}
    apart = [base[r.seed] - r.outcome["entropy_percent"] for r in group if r.seed in base]
    return sum(apart) / len(apart)


def listed(what: str, groups: Sequence[Sequence[Record]], records: Sequence[Record]) -> list[str]:
    """How the errors of some changes compare, as a sentence; none for no changes."""
    found: dict[str, list[str]] = {"better": [], "worse": [], "too close to call": []}
    for group in groups:
        name = f"{group[0].shown['to']} ({average(group, 'entropy_percent'):.1f} %)"
        found[from_base(group, records).verdict].append(name)
    said = {"better": "a lower error beyond chance", "worse": "a higher error beyond chance"}
    parts = [f"{said.get(verdict, verdict)}: {', '.join(names)}" for verdict, names in found.items() if names]
    text = "; ".join(parts)
    return [f"{what}, with their entropy. {text[0].upper()}{text[1:]}."] if parts else []


def line_of(group: Sequence[Record], records: Sequence[Record]) -> list[str]:
    first = group[0]
    return [
        first.shown["changed"],
        first.shown["to"],
        over_seeds(values(group, "entropy_percent"), 1),
        over_seeds(values(group, "error_percent")),
        str(from_base(group, records)),
        over_seeds(values(group, "agreement")),
        whole(first.made.get("parameters")),
        whole(first.made.get("epochs")),
        str(len(group)),
    ]
