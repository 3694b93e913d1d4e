"""The arena: every routing algorithm on the same compact network, the same seeds and an honest protocol.

Nothing changes between rows but the routing. The learning rate of each algorithm is chosen on validation images, from
one small grid and with one seed (`Rates`); then the network is trained on all training images, and each test figure is
drawn once (`Arena`). `uniform` is the control: the same network without any routing decision. A claim for an algorithm
is a claim against it, made from differences paired by seed.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from capsnet.data import Augment, in_order
from capsnet.evaluate import mean_and_std, mean_interval
from capsnet.experiments.core.networks import compact_capsules
from capsnet.experiments.core.plan import Budget, Experiment, Record, Row, by_method, tiny, values, with_model
from capsnet.experiments.core.results import Place, read
from capsnet.report.tables import Table, over_seeds, whole
from capsnet.routing.base import options_for
from capsnet.routing.measures import agreement, entropy
from capsnet.train.config import Config
from capsnet.train.loop import Result
from capsnet.train.presets import get_preset

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CONTROL = "uniform"
ALGORITHMS = (
    *(CONTROL, "dynamic", "max-min", "self-attention"),
    *("inverted-attention", "self-routing", "em", "vb"),
)
RATES = (0.0015, 0.003, 0.006)
EXAMINED = 500  # test images whose routing is traced
MANY_SEEDS = ("mnist", "fashion-mnist")  # five seeds there, three elsewhere


@dataclass(frozen=True)
class Task:
    """A dataset of the arena: its images, and the epochs that a training gets at each budget."""

    name: str
    data: str
    side: int
    channels: int
    epochs: Mapping[str, float]
    shift: int = 0
    flip: bool = False


TASKS = {
    task.name: task
    for task in (
        Task("mnist", "mnist", 28, 1, {"hour": 1, "day": 5}, shift=2),
        Task("fashion-mnist", "fashion-mnist", 28, 1, {"hour": 1, "day": 10}, shift=2, flip=True),
        Task("multimnist", "multimnist", 36, 1, {"day": 8}),
        Task("affine-mnist", "affine-mnist:per_digit=4", 40, 1, {"day": 6}),
        Task("cifar10", "cifar10", 32, 3, {"day": 12}, shift=4, flip=True),
    )
}
LABELS = {
    "mnist": "MNIST",
    "fashion-mnist": "Fashion-MNIST",
    "multimnist": "MultiMNIST",
    "affine-mnist": "affine MNIST",
    "cifar10": "CIFAR-10",
}


def algorithms_of(budget: Budget) -> Sequence[str]:
    return ALGORITHMS[:2] if budget == "smoke" else ALGORITHMS


def tasks_of(budget: Budget) -> list[Task]:
    return [task for task in TASKS.values() if budget in task.epochs or (budget == "smoke" and task.name == "mnist")]


def config_of(task: Task, algorithm: str, rate: float, budget: Budget, seed: int) -> Config:
    """The quick preset's network and training with another routing; all in float32."""
    model = replace(compact_capsules(task.side, task.channels), routing=options_for(algorithm))
    config = replace(
        get_preset("quick"), data=task.data, model=model, lr=rate, precision="fp32", seed=seed,
        epochs=task.epochs.get(budget, 1), augment=Augment(shift=task.shift, flip=task.flip),
    )  # fmt: skip
    return with_model(tiny(config), routing=options_for(algorithm)) if budget == "smoke" else config


def less(budget: Budget) -> tuple[str, ...]:
    return ("a few steps of a toy network",) if budget == "smoke" else ()


class Rates(Experiment):
    name = "arena-rates"
    title = "Learning rates for the arena"
    question = (
        "Which learning rate suits each routing algorithm? Each rate of a small grid trains the same network for half "
        "the epochs and is judged on 10,000 held-back training images. The test set is not used."
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
        note = "Validation error after half the epochs, one seed; the lowest rate of each curve is used in the arena."
        return {"arena-rates": figures.lines(self.title, note, panels)}


def rates_panel(data: str, records: Sequence[Record]) -> Any:
    """Validation error against the learning rate, a curve per algorithm."""
    from capsnet.report.figures import PALETTE, Line, Panel

    drawn: dict[str, list[tuple[float, float]]] = {}
    for record in records:
        if record.shown["data"] == data:
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
        config = replace(config, epochs=config.epochs / 2, validation=10_000)
    shown = {"data": LABELS[task.name], "routing": algorithm, "learning rate": f"{rate:g}"}
    return Row(f"{task.name}-{algorithm}-{round(1e4 * rate)}e-4", config, shown, less=less(budget), validated=True)


def best_rates(records: Sequence[Record]) -> dict[tuple[str, str], float]:
    """(data, routing) → the learning rate with the lowest validation error."""
    errors: dict[tuple[str, str], dict[float, float]] = {}
    for record in records:
        shown = record.shown
        key = shown["data"], shown["routing"]
        errors.setdefault(key, {})[float(shown["learning rate"])] = record.outcome["error_percent"]
    return {key: min(found, key=lambda rate: found[rate]) for key, found in errors.items()}


class Arena(Experiment):
    name = "arena"
    title = "The arena: routing algorithms on the same network"
    question = (
        "Which routing helps, and does any? One compact network is trained with every algorithm and nothing else "
        "changes. Learning rates were chosen on validation images (arena-rates). Differences are paired by seed "
        "against uniform couplings, the network without routing."
    )
    budgets = ("smoke", "hour", "day")
    requires = ("arena-rates",)

    place = Place()

    def prepare(self, place: Place) -> None:
        self.place = place

    def rates(self, budget: Budget) -> dict[tuple[str, str], float]:
        """The chosen learning rates; none before they have been measured."""
        file = self.place.file(Rates.name, budget)
        return best_rates(read(file).rows) if file.exists() else {}

    def rows(self, budget: Budget, seed: int) -> list[Row]:
        rates = self.rates(budget)
        tasks = [task for task in tasks_of(budget) if seed < 3 or task.name in MANY_SEEDS]
        return [
            Row(
                f"{task.name}-{algorithm}",
                config_of(task, algorithm, rates.get((LABELS[task.name], algorithm), RATES[1]), budget, seed),
                {"data": LABELS[task.name], "routing": algorithm},
                less=less(budget),
            )
            for task in tasks
            for algorithm in algorithms_of(budget)
        ]

    def measure(self, row: Row, result: Result) -> dict[str, Any]:
        birth = result.certificate
        return {
            **result.evaluation.summary(),
            **examine(result),
            "seconds_per_step": birth.seconds / (birth.steps or 1),
            "learning_rate": birth.config["lr"],
        }

    def table(self, records: Sequence[Record]) -> Table:
        header = [
            "data", "routing", "test error, %", f"minus {CONTROL} (95 % interval)", "digits missed, %", "entropy, %",
            "agreement", "ms per step", "parameters", "learning rate", "seeds",
        ]  # fmt: skip
        return Table(header, [line_of(group, records) for group in by_method(records)])

    def findings(self, records: Sequence[Record]) -> list[str]:
        return [verdict(data, records) for data in dict.fromkeys(r.shown["data"] for r in records)]

    def pictures(self, records: Sequence[Record]) -> dict[str, Figure]:
        from capsnet.report import figures

        panels: dict[str, list[figures.Bar]] = {}
        for group in by_method(records):
            shown, (mean, std) = group[0].shown, mean_and_std(values(group, "error_percent"))
            colour = figures.VERMILLION if shown["routing"] == CONTROL else figures.BLUE
            panels.setdefault(shown["data"], []).append(figures.Bar(shown["routing"], mean, colour, std))
        note = "Test error, mean and standard deviation over seeds; the control without routing is vermillion."
        return {"arena": figures.bars(self.title, note, panels)}


@torch.inference_mode()
def examine(result: Result) -> dict[str, float]:
    """How decided the last couplings are, and how well votes agree with the capsule that they were routed to."""
    entropies, agreements = list[float](), list[float]()
    for batch in in_order(result.splits.test, 50):
        output = result.model(batch.images.to(result.model.device), trace=True)
        trace = output.trace
        assert trace is not None
        entropies.append(100 * float(entropy(trace.couplings[-1]).mean()))
        for example, label in enumerate(output.activations.argmax(1).tolist()):
            step = trace.couplings[-1:, example], trace.votes[example], trace.outputs[-1:, example]
            agreements.append(float(agreement(*step)[0, label]))
        if len(agreements) >= EXAMINED:
            break
    return {"entropy_percent": statistics.fmean(entropies), "agreement": statistics.fmean(agreements)}


def differences(group: Sequence[Record], records: Sequence[Record]) -> list[float]:
    """Error minus that of the control with the same seed."""
    data = group[0].shown["data"]
    control = {r.seed: r.outcome["error_percent"] for r in records if r.shown == {"data": data, "routing": CONTROL}}
    return [r.outcome["error_percent"] - control[r.seed] for r in group if r.seed in control]


def line_of(group: Sequence[Record], records: Sequence[Record]) -> list[str]:
    shown, outcome = group[0].shown, group[0].outcome
    apart = differences(group, records) if shown["routing"] != CONTROL else []
    return [
        shown["data"],
        shown["routing"],
        over_seeds(values(group, "error_percent")),
        against_control(apart),
        over_seeds(values(group, "missed_label_percent")),
        over_seeds(values(group, "entropy_percent"), 1),
        over_seeds(values(group, "agreement")),
        f"{1000 * statistics.median(values(group, 'seconds_per_step')):.0f}",
        whole(group[0].made.get("parameters")),
        f"{outcome['learning_rate']:g}",
        str(len(group)),
    ]


def against_control(apart: Sequence[float]) -> str:
    if not apart:
        return "–"
    mean, half = statistics.fmean(apart), mean_interval(apart)
    return f"{mean:+.2f} ({mean - half:+.2f} to {mean + half:+.2f})" if len(apart) > 1 else f"{mean:+.2f}"


def verdict(data: str, records: Sequence[Record]) -> str:
    """Which routings beat the control on a dataset beyond chance, made from the paired intervals."""
    better, worse, open_ = list[str](), list[str](), list[str]()
    for group in by_method([r for r in records if r.shown["data"] == data]):
        name, apart = group[0].shown["routing"], differences(group, records)
        if name == CONTROL:
            continue
        mean, half = statistics.fmean(apart), mean_interval(apart)
        (better if mean + half < 0 else worse if mean - half > 0 else open_).append(name)
    parts = [f"{', '.join(names)} {what}" for names, what in (
        (better, f"beat{'s' * (len(better) == 1)} {CONTROL} beyond chance"),
        (worse, f"{'is' if len(worse) == 1 else 'are'} worse than {CONTROL} beyond chance"),
        (open_, "not significantly different from it"),
    ) if names]  # fmt: skip
    return f"{data}: {'; '.join(parts)}."
