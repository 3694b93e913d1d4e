"""The comparison itself: test errors paired by seed, what the couplings look like, and what each algorithm costs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from capsnet.data import in_order
from capsnet.experiments.arena.cost import Costs
from capsnet.experiments.arena.rates import RATES, Rates, best_rates
from capsnet.experiments.arena.tasks import CONTROL, LABELS, MANY_SEEDS, algorithms_of, config_of, tasks_of
from capsnet.experiments.core.claims import Claim, Paired, Verdict, paired
from capsnet.experiments.core.plan import Budget, Experiment, Record, Row, by_method, values
from capsnet.experiments.core.results import Place, read
from capsnet.report.tables import Table, over_seeds, whole
from capsnet.routing.measures import agreement, entropy
from capsnet.train.loop import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EXAMINED = 500  # test images whose routing is traced
VERDICTS: dict[str, Verdict] = {"better": "reproduced", "worse": "not reproduced"}


class Arena(Experiment):
    name = "arena"
    title = "The arena: routing algorithms on the same network"
    question = (
        "Which routing helps, and does any? One compact network is trained with every algorithm and nothing else "
        "changes: 144 to 256 lower capsules, no decoder, two epochs (one on affine MNIST and at the budget hour). "
        "Learning rates were chosen on validation images (arena-rates). Differences are paired by seed "
        "against uniform couplings, the network without routing."
    )
    budgets = ("smoke", "hour", "day")
    requires = ("arena-rates",)

    def __init__(self) -> None:
        self.rates: dict[tuple[str, str], float] = {}
        self.costs: dict[str, Any] = {}

    def consult(self, place: Place, budget: Budget) -> None:
        """Read the chosen learning rates, and the costs where they have been measured."""
        rates, costs = (place.file(name, budget) for name in (Rates.name, Costs.name))
        self.rates = best_rates(read(rates).rows) if rates.exists() else {}
        self.costs = {r.shown["data"]: r.outcome for r in read(costs).rows} if costs.exists() else {}

    def rows(self, budget: Budget, seed: int) -> list[Row]:
        tasks = [task for task in tasks_of(budget) if seed < 3 or task.name in MANY_SEEDS]
        return [
            Row(
                f"{task.name}-{algorithm}",
                config_of(task, algorithm, self.rates.get((LABELS[task.name], algorithm), RATES[1]), budget, seed),
                {"data": LABELS[task.name], "routing": algorithm},
            )
            for task in tasks
            for algorithm in algorithms_of(budget)
        ]

    def measure(self, row: Row, result: Result) -> dict[str, Any]:
        return {**result.evaluation.summary(), **examine(result), "learning_rate": result.certificate.config["lr"]}

    def table(self, records: Sequence[Record]) -> Table:
        header = [
            "data", "routing", "test error, %", f"minus {CONTROL} (95 % interval)", "digits missed, %", "entropy, %",
            "agreement", "ms per step", "peak memory, MB", "parameters", "learning rate", "seeds",
        ]  # fmt: skip
        return Table(header, [self.line_of(group, records) for group in by_method(records)])

    def line_of(self, group: Sequence[Record], records: Sequence[Record]) -> list[str]:
        shown, outcome = group[0].shown, group[0].outcome
        cost = self.costs.get(shown["data"], {}).get(shown["routing"], {})
        return [
            shown["data"],
            shown["routing"],
            over_seeds(values(group, "error_percent")),
            str(against_control(group, records)),
            over_seeds(values(group, "missed_label_percent")),
            over_seeds(values(group, "entropy_percent"), 1),
            over_seeds(values(group, "agreement")),
            whole(1000 * cost["seconds_per_step"] if cost else None),
            whole(cost.get("peak_mb")),
            whole(group[0].made.get("parameters")),
            f"{outcome['learning_rate']:g}",
            str(len(group)),
        ]

    def claims(self, records: Sequence[Record], budget: str) -> list[Claim]:
        """On each dataset: does the paper's routing beat equal couplings, by the differences paired by seed?"""
        groups = [group for group in by_method(records) if group[0].shown["routing"] == "dynamic"]
        return [claim(group, records) for group in groups if against_control(group, records).differences]

    def findings(self, records: Sequence[Record]) -> list[str]:
        verdicts = [verdict(data, records) for data in dict.fromkeys(r.shown["data"] for r in records)]
        return [*verdicts, caution(records), *rates_at_the_edge(records)]

    def pictures(self, records: Sequence[Record]) -> dict[str, Figure]:
        from capsnet.report import figures

        panels: dict[str, list[figures.Interval]] = {}
        for group in by_method(records):
            apart = against_control(group, records)
            if apart.differences:
                interval = figures.Interval(group[0].shown["routing"], apart.differences, apart.half)
                panels.setdefault(group[0].shown["data"], []).append(interval)
        note = f"Test error minus that of {CONTROL} with the same seed, left is better: mean, 95 % interval, seeds."
        return {"arena": figures.intervals(self.title, note, panels, "percentage points")} if panels else {}


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


def against_control(group: Sequence[Record], records: Sequence[Record]) -> Paired:
    """A group compared with the control on the same dataset; the control itself is compared with nothing."""
    shown = {"data": group[0].shown["data"], "routing": CONTROL}
    return paired(group if group[0].shown != shown else [], [r for r in records if r.shown == shown])


def claim(group: Sequence[Record], records: Sequence[Record]) -> Claim:
    """The claim that an algorithm has a lower error than the control."""
    shown, apart = group[0].shown, against_control(group, records)
    seeds = {record.seed for record in group}
    same = {"data": shown["data"], "routing": CONTROL}
    control = [r for r in records if r.shown == same and r.seed in seeds]
    ours = " vs. ".join(f"{over_seeds(values(each, 'error_percent'))} %" for each in (group, control))
    verdict = VERDICTS.get(apart.verdict, "too close to call")
    return Claim(f"{shown['data']}: dynamic routing beats equal couplings", "–", ours, len(apart.differences), verdict)


def verdict(data: str, records: Sequence[Record]) -> str:
    """Which routings differ from the control on a dataset beyond chance, by the paired intervals."""
    found: dict[str, list[str]] = {"better": [], "worse": [], "too close to call": []}
    for group in by_method([r for r in records if r.shown["data"] == data]):
        apart = against_control(group, records)
        if apart.differences:
            found[apart.verdict].append(group[0].shown["routing"])
    than = {"better": f" than {CONTROL} beyond chance", "worse": f" than {CONTROL} beyond chance"}
    parts = [f"{kind}{than.get(kind, '')}: {', '.join(names)}" for kind, names in found.items() if names]
    return f"{data}. {parts[0][0].upper()}{'; '.join(parts)[1:]}." if parts else f"{data}. Nothing to compare yet."


def caution(records: Sequence[Record]) -> str:
    """How many of the intervals would exclude zero by chance alone."""
    return by_chance(len({r.method for r in records if r.shown["routing"] != CONTROL}))


def by_chance(intervals: int) -> str:
    return f"Of {intervals} intervals at 95 %, about {0.05 * intervals:.1f} would exclude zero by chance alone."


def rates_at_the_edge(records: Sequence[Record]) -> list[str]:
    """How often the chosen learning rate is the largest of the grid, so that a larger one might have been better."""
    chosen = {r.method: r.outcome["learning_rate"] for r in records}
    largest = sum(rate == max(RATES) for rate in chosen.values())
    return (
        [f"In {largest} of {len(chosen)} cases the chosen learning rate is the largest of the grid."] if largest else []
    )
