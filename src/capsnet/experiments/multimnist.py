"""Overlapping digits (section 6): error against overlap for CapsNet and a CNN.

On the paper's canvas (36×36, shifts up to 4 px) two digits overlap by at least 36 %; on a larger one with shifts up to
10 px the overlap ranges from none to full. Pairs are generated on demand, so their rate is measured too: training must
never wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from capsnet.evaluate import wilson_interval
from capsnet.experiments.core.claims import Claim, Measured, at_most
from capsnet.experiments.core.networks import capsule_training, cnn_training
from capsnet.experiments.core.plan import Budget, Experiment, Record, Row, average, by_method, tiny
from capsnet.experiments.table1 import config_of, less
from capsnet.models.registry import parameters
from capsnet.timing import timed
from capsnet.train import runs
from capsnet.train.config import Config
from capsnet.train.loop import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDE, SHIFT = 48, 10  # shifts that just separate two boxes of 20 px
WIDE_EPOCHS = 4  # at `hour`
NAMES = {"capsnet": "CapsNet", "cnn": "CNN"}
FEWEST = 50  # pairs per point of a curve
HIGH, PAPER_HIGH = (0.75, 0.85), 5.0  # overlap around 80 %, and the paper's error there


class MultiMnist(Experiment):
    name = "multimnist"
    title = "Overlapping digits"
    question = (
        "Are both digits recognised when two digits of different classes overlap? A pair is correct only if the two "
        "longest capsules are its two digits. The overlap is the area shared by the 20×20 boxes of the digits, divided "
        "by 400. In addition to the paper's 36×36 canvas, a 48×48 canvas with larger shifts covers overlaps from none "
        "to full. A CNN with a sigmoid per class is trained on the same pairs."
    )
    columns = {  # noqa: RUF012
        "error_percent": "error, %",
        "missed_label_percent": "missed digits, %",
        "mean_overlap_percent": "mean overlap, %",
        "pairs_per_second": "pairs generated per second",
        "times_as_fast": "× the training rate",
    }
    decimals = {"pairs_per_second": 0, "mean_overlap_percent": 1, "times_as_fast": 0}  # noqa: RUF012

    def rows(self, budget: Budget, seed: int) -> list[Row]:
        return [row_of(kind, wide, budget, seed) for wide in (False, True) for kind in NAMES]

    def measure(self, row: Row, result: Result) -> dict[str, Any]:
        summary = result.evaluation.summary()
        bins = summary["errors_by_overlap"]
        overlaps = result.evaluation.measures["overlap"]
        made = pairs_per_second(result)
        last_step = runs.read_metrics(result.folder)[-2]  # the last record is the end of the epoch
        learnt = last_step["images_per_second"]
        return {
            **summary,
            "mean_overlap_percent": 100 * float(overlaps.nanmean()),
            "overlap_curve": curve(bins),
            "pairs_per_second": made,
            "learnt_per_second": learnt,
            "times_as_fast": made / learnt,
        }

    def pictures(self, records: Sequence[Record]) -> dict[str, Figure]:
        from capsnet.report.figures import Panel, lines

        panels = []
        for canvas in dict.fromkeys(r.shown["canvas"] for r in records):
            own = [group[0] for group in by_method(records) if group[0].shown["canvas"] == canvas]
            drawn = [line_of(record) for record in own]
            panels.append(Panel(canvas, "overlap, %", "error, %", drawn, from_zero=True))
        note = "A pair is correct only if both of its digits are recognised."
        return {"multimnist": lines(self.title, note, panels)}

    def captions(self) -> Mapping[str, str]:
        return {"multimnist": f"Each point covers 5 points of overlap with at least {FEWEST} test pairs."}

    def findings(self, records: Sequence[Record]) -> list[str]:
        said = []
        for group in by_method(records):
            shown, points = group[0].shown, dict(map(tuple, group[0].outcome["overlap_curve"]))
            ends = [(x, y) for x, y in points.items() if y is not None]
            if ends:
                (low, first), (high, last) = ends[0], ends[-1]
                said.append(
                    f"{shown['network']}, {shown['canvas']}: error {first:.1f} % at {low:.0f} % overlap, {last:.1f} % "
                    f"at {high:.0f} % overlap, {average(group, 'error_percent'):.2f} % overall."
                )
        slowest = min((r.outcome["times_as_fast"] for r in records), default=None)
        if slowest is not None:
            said.append(f"Pairs are generated at least {slowest:.0f} times as fast as the network trains on them.")
        return said

    def claims(self, records: Sequence[Record], budget: str) -> list[Claim]:
        group = next((g for g in by_method(records) if g[0].method == "paper-capsnet"), None)
        claim = "Overlapping digits: error of CapsNet at 80 % overlap"
        return [at_most(claim, PAPER_HIGH, high_overlap(group))] if group else []


def high_overlap(group: Sequence[Record]) -> Measured:
    """The error on pairs that overlap by about 80 %, all seeds together."""
    n = errors = 0
    for record in group:
        bins = record.outcome["errors_by_overlap"]
        for start, pairs, wrong in zip(bins["edges"], bins["n"], bins["errors"], strict=False):
            if HIGH[0] <= start + 1e-9 < HIGH[1]:
                n, errors = n + pairs, errors + wrong
    low, high = wilson_interval(errors, n) if n else (0.0, 1.0)
    return Measured(100 * errors / max(n, 1), 100 * low, 100 * high, len(group))


def row_of(kind: str, wide: bool, budget: Budget, seed: int) -> Row:
    """One network on one canvas."""
    config = (
        wide_config(kind, budget, seed)
        if wide
        else config_of("multimnist", 3 if kind == "capsnet" else 0, kind == "capsnet", budget, seed)
    )
    canvas = f"{WIDE}×{WIDE}, shifts to {SHIFT}" if wide else "36×36, shifts to 4"
    theirs = {} if wide else {"error_percent": 5.2 if kind == "capsnet" else 8.1}
    short = less("multimnist", config, budget)
    if wide:
        short = (f"{parameters(config.model):,} parameters, {config.epochs} epochs; not in the paper",)
    return Row(
        f"{'wide' if wide else 'paper'}-{kind}", config, {"canvas": canvas, "network": NAMES[kind]}, theirs, short
    )


def wide_config(kind: str, budget: Budget, seed: int) -> Config:
    data = f"multimnist:canvas={WIDE},shift={SHIFT}"
    config = capsule_training(budget, WIDE_EPOCHS, WIDE, data, seed)
    if kind == "cnn":
        config = cnn_training("hour", config)  # the paper's baselines are for 28×28 and 36×36
    return replace(tiny(config), data=f"{data},test=300") if budget == "smoke" else config


def curve(bins: Mapping[str, Sequence[float]]) -> list[list[float | None]]:
    """Centre of each bin and the error there, in per cent; None if the bin has too few pairs."""
    edges = bins["edges"]
    return [
        [50 * (edges[k] + edges[k + 1]), 100 * wrong / n if n >= FEWEST else None]
        for k, (n, wrong) in enumerate(zip(bins["n"], bins["errors"], strict=True))
    ]


def line_of(record: Record) -> Any:
    from capsnet.report.figures import BLUE, VERMILLION, Line

    points = [(x, y) for x, y in record.outcome["overlap_curve"] if y is not None]
    name = record.shown["network"]
    return Line(name, [x for x, _ in points], [y for _, y in points], BLUE if name == "CapsNet" else VERMILLION)


def pairs_per_second(result: Result) -> float:
    """Training pairs generated per second in 20 batches of 128, the fastest of three repetitions."""
    pairs, numbers = result.splits.train, torch.arange(20 * 128).split(128)
    return 20 * 128 / min(timed(lambda: [pairs.gather(index) for index in numbers]))
