"""Overlapping digits (section 6): the error against how much two digits overlap, for CapsNet and a CNN.

On the paper's canvas (36×36, shifts up to 4 px) two digits never overlap by less than 36 %; on a larger one, with
shifts up to 10 px, the curve reaches from no overlap to full. Each pair is made when it is asked for, so how fast
pairs are made is measured here too: it must never be what training waits for.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from capsnet import runs
from capsnet.config import Config
from capsnet.experiments.networks import capsule_training, cnn_training, parameters
from capsnet.experiments.plan import Budget, Experiment, Record, Row, average, by_method, tiny
from capsnet.experiments.table1 import config_of, less
from capsnet.training import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDE, SHIFT = 48, 10  # shifts that take two boxes of 20 px just apart
WIDE_EPOCHS = 4  # at `hour`
NAMES = {"capsnet": "CapsNet", "cnn": "CNN"}
LITTLE, MUCH = 0.04, 0.8  # the overlaps that talks quote


class MultiMnist(Experiment):
    name = "multimnist"
    title = "Overlapping digits: error against overlap"
    question = (
        "Two digits of different classes on one canvas, added and clipped: are both named? A pair is right when the "
        "two longest capsules are exactly its two digits. The overlap is the area that the digits' boxes of 20×20 "
        "share, over 400. Beside the paper's canvas of 36×36 a larger one with larger shifts, whose overlaps reach "
        "from none to full; a CNN with a sigmoid for each class is trained on the same pairs."
    )
    columns = {  # noqa: RUF012
        "error_percent": "pairs wrong, %",
        "missed_label_percent": "digits missed, %",
        "mean_overlap_percent": "mean overlap, %",
        "pairs_per_second": "pairs made a second",
        "times_as_fast": "× as fast as learnt from",
    }
    decimals = {"pairs_per_second": 0, "mean_overlap_percent": 1, "times_as_fast": 0}  # noqa: RUF012

    def rows(self, budget: Budget, seed: int) -> list[Row]:
        return [row_of(kind, wide, budget, seed) for wide in (False, True) for kind in NAMES]

    def measure(self, row: Row, result: Result) -> dict[str, Any]:
        summary = result.evaluation.summary()
        bins = summary["errors_by_overlap"]
        overlaps = result.evaluation.measures["overlap"]
        made = pairs_per_second(result)
        learnt = runs.read_metrics(result.folder)[-2][
            "images_per_second"
        ]  # the last step's; then comes the epoch's end
        return {
            **summary,
            "mean_overlap_percent": 100 * float(overlaps.nanmean()),
            "overlap_curve": curve(bins),
            "pairs_per_second": made,
            "learnt_per_second": learnt,
            "times_as_fast": made / learnt,
        }

    def pictures(self, records: Sequence[Record]) -> dict[str, Figure]:
        from capsnet.figures import Panel, lines

        panels = []
        for canvas in dict.fromkeys(r["shown"]["canvas"] for r in records):
            own = [group[0] for group in by_method(records) if group[0]["shown"]["canvas"] == canvas]
            drawn = [line_of(record) for record in own]
            panels.append(Panel(canvas, "overlap, %", "pairs wrong, %", drawn, from_zero=True))
        note = "A pair counts as wrong unless exactly its two digits are named."
        return {"multimnist": lines(self.title, note, panels)}

    def captions(self) -> Mapping[str, str]:
        return {
            "multimnist": "Each point: all test pairs whose overlap lies within 5 points, where there are 50 or more."
        }

    def findings(self, records: Sequence[Record]) -> list[str]:
        said = []
        for group in by_method(records):
            shown, points = group[0]["shown"], dict(map(tuple, group[0]["outcome"]["overlap_curve"]))
            ends = [(x, y) for x, y in points.items() if y is not None]
            if ends:
                (low, first), (high, last) = ends[0], ends[-1]
                said.append(
                    f"{shown['network']}, {shown['canvas']}: {first:.1f} % wrong around {low:.0f} % overlap, "
                    f"{last:.1f} % around {high:.0f} %; {average(group, 'error_percent'):.2f} % in all."
                )
        slowest = min((r["outcome"]["times_as_fast"] for r in records), default=None)
        if slowest is not None:
            said.append(f"Pairs are made at least {slowest:.0f} times as fast as the network learns from them.")
        return said


def row_of(kind: str, wide: bool, budget: Budget, seed: int) -> Row:
    """One network on one canvas."""
    config = (
        wide_config(kind, budget, seed)
        if wide
        else config_of("multimnist", 3 * (kind == "capsnet"), kind == "capsnet", budget, seed)
    )
    canvas = f"{WIDE}×{WIDE}, shifts to {SHIFT}" if wide else "36×36, shifts to 4"
    theirs = {} if wide else {"error_percent": 5.2 if kind == "capsnet" else 8.1}
    short = less("multimnist", config, budget)
    if wide and budget != "smoke":
        short = (f"{parameters(config.model):,} parameters, {config.epochs} epochs; the paper has no such canvas",)
    return Row(
        f"{'wide' if wide else 'paper'}-{kind}", config, {"canvas": canvas, "network": NAMES[kind]}, theirs, short
    )


def wide_config(kind: str, budget: Budget, seed: int) -> Config:
    data = f"multimnist:canvas={WIDE},shift={SHIFT}"
    config = capsule_training(budget, WIDE_EPOCHS, WIDE, data, seed)
    if kind == "cnn":
        config = cnn_training("hour", config)  # the paper's baselines are for 28×28 and 36×36
    return replace(tiny(config), data=f"{data},test=300") if budget == "smoke" else config


def curve(bins: Mapping[str, Sequence[float]], least: int = 50) -> list[list[float | None]]:
    """Middle of each bin in per cent, and the error there; None where there are too few pairs to say."""
    edges = bins["edges"]
    return [
        [50 * (edges[k] + edges[k + 1]), 100 * wrong / n if n >= least else None]
        for k, (n, wrong) in enumerate(zip(bins["n"], bins["errors"], strict=True))
    ]


def line_of(record: Record) -> Any:
    from capsnet.figures import BLUE, VERMILLION, Line

    points = [(x, y) for x, y in record["outcome"]["overlap_curve"] if y is not None]
    name = record["shown"]["network"]
    return Line(name, [x for x, _ in points], [y for _, y in points], BLUE if name == "CapsNet" else VERMILLION)


def pairs_per_second(result: Result, batches: int = 20, size: int = 128) -> float:
    """How fast training pairs are made here, by the fastest of three turns."""
    pairs, seconds = result.splits.train, []
    for turn in range(3):
        began = time.perf_counter()
        for k in range(batches):
            pairs.gather(torch.arange(size) + (turn * batches + k) * size)
        seconds.append(time.perf_counter() - began)
    return batches * size / min(seconds)
