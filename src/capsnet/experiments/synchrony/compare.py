"""Do phases bind better than routing, and do they help to classify? Networks of one size on two overlapping objects.

The networks: `sync`, a synchronisation network; its real-valued control with the same parameters; and a capsule
network with dynamic, EM and Kuramoto routing. They see labels only. One more, `sync` with guidance, also sees the
pixels of both objects and shows what its oscillators could do. All have the same training (Adam, one-cycle learning
rate). The initial phases and coupling of the oscillators, and the weight of the guidance, were chosen on validation
pairs after trainings of one epoch; nothing else was tuned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from capsnet.experiments.core.claims import too_close
from capsnet.experiments.core.plan import Budget, Experiment, Record, Row, average, by_method, tiny
from capsnet.experiments.synchrony.binding import measured_binding
from capsnet.models.config import CapsNetConfig, ModelConfig
from capsnet.models.sync import SyncConfig
from capsnet.routing.base import options_for
from capsnet.train.config import Config
from capsnet.train.loop import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIDE, RATE, JUDGED = 36, 0.003, 1000  # pixels, peak learning rate, test images whose groups are measured
DATA = {"digits": ("multimnist", 10), "shapes": ("digits-and-shapes", 13)}
SCENES = {"digits": "two digits", "shapes": "digit and shape"}
EPOCHS = {"smoke": 1, "hour": 1, "day": 3}  # of 58,000 pairs; half as many with shapes
GUIDANCE = 5.0  # weight of the loss that sees the pixels
NETWORKS = {
    "sync": "sync",
    "real": "sync without phases",
    "guided": "sync guided by pixels",
    "dynamic": "capsules, dynamic",
    "em": "capsules, EM",
    "kuramoto": "capsules, Kuramoto",
}
ON_SHAPES = ("sync", "real", "guided", "dynamic")
COLOURS = {name: k for k, name in enumerate(NETWORKS)}  # of the palette


class Synchrony(Experiment):
    name = "synchrony"
    title = "Binding by phase and by routing"
    question = (
        "Two objects overlap in an image. Do the phases of a synchronisation network separate their pixels better "
        "than the couplings of a capsule network, and do phases help to classify? All networks have 150,000 to "
        "188,000 parameters and the same training. The initial phases and coupling of the oscillators were chosen on "
        "validation images; nothing else was tuned. All are trained on labels alone, except "
        "`sync guided by pixels`, which also sees which pixels belong to which object. The error counts images in "
        "which not exactly the two objects are named. The adjusted Rand index compares two groups of pixels (2-means "
        "of the phases, or the class that primary capsules send more to) with the two objects, without background "
        "and overlap: 1 is perfect, 0 is chance. The limit is what the true groups reach on the grid of the network."
    )
    columns = {  # noqa: RUF012
        "error_percent": "error, %",
        "missed_label_percent": "objects missed, %",
        "index": "Rand index",
        "index_above_half_percent": "index above ½, % of images",
        "index_limit": "limit of the grid",
    }
    budgets = ("smoke", "hour", "day")

    def rows(self, budget: Budget, seed: int) -> list[Row]:
        return [
            Row(
                f"{scene}-{kind}",
                config_of(scene, kind, budget, seed),
                {"image": SCENES[scene], "network": NETWORKS[kind]},
            )
            for scene in DATA
            for kind in kinds_of(scene, budget)
        ]

    def measure(self, row: Row, result: Result) -> dict[str, Any]:
        judged = result.splits.test.gather(torch.arange(min(JUDGED, len(result.splits.test))))
        return {**result.evaluation.summary(), **measured_binding(result.model.eval(), judged)}

    def draw(self, row: Row, result: Result | None) -> dict[str, Figure]:
        from capsnet.experiments.synchrony.pictures import grouping

        if result is None or row.seed or "real" in row.method:
            return {}
        return {"grouping": grouping(f"{row.shown['network']}: {row.shown['image']}", result)}

    def pictures(self, records: Sequence[Record]) -> dict[str, Figure]:
        from capsnet.report.figures import lines

        note = "Adjusted Rand index of the pixels' groups, mean over the test images and seeds; 0 is chance."
        return {"synchrony": lines(self.title, note, [panel(scene, records) for scene in DATA], height=300, share=True)}

    def captions(self) -> Mapping[str, str]:
        return {
            "synchrony": "Synchronisation networks: steps of the oscillators. Capsule networks: routing iterations.",
            "grouping": "Columns: the first two test images, then the two best and the two worst of the first 200. "
            "Colour: the phase of each position as a hue, or the class that it is routed to; brightness: the image. "
            "Below: the adjusted Rand index at the last step.",
        }

    def findings(self, records: Sequence[Record]) -> list[str]:
        groups = {group[0].method: group for group in by_method(records)}
        return [
            sentence(scene, groups)
            for scene in DATA
            if {f"{scene}-{kind}" for kind in ON_SHAPES} <= set(groups)
            for sentence in (binding, helping, guiding)
        ]


# --- Rows --------------------------------------------------------------------------------------------------------


def kinds_of(scene: str, budget: Budget) -> Sequence[str]:
    """The networks that are trained on a kind of images."""
    if budget == "smoke":
        return ON_SHAPES if scene == "digits" else ON_SHAPES[:1]
    return tuple(NETWORKS) if scene == "digits" else ON_SHAPES


def config_of(scene: str, kind: str, budget: Budget, seed: int) -> Config:
    """The same training for all networks."""
    data, classes = DATA[scene]
    config = Config(
        data=f"{data}:test=10000", epochs=EPOCHS[budget] / (1 if scene == "digits" else 2), lr=RATE,
        schedule="one-cycle", validation=2000, seed=seed, model=model_of(kind, classes),
    )  # fmt: skip
    return replace(tiny(config), data=f"{data}:test=64") if budget == "smoke" else config


def model_of(kind: str, classes: int = 10) -> ModelConfig:
    """Networks of about 150,000 parameters with 10 classes."""
    shape = (1, SIDE, SIDE)
    if kind in ("sync", "real", "guided"):
        return SyncConfig(shape, classes, phases=kind != "real", guidance=GUIDANCE if kind == "guided" else 0.0)
    return CapsNetConfig(
        shape, classes, (24, 32, 32), (5, 3, 3), (2, 1, 1), stem_norm=True, primary_types=4, primary_dim=4,
        primary_kernel=3, primary_stride=1, class_dim=8, decoder=(), routing=options_for(kind),
    )  # fmt: skip


# --- What the records show -------------------------------------------------------------------------------------------


def panel(scene: str, records: Sequence[Record]) -> Any:
    """Index against steps, a curve per network."""
    from capsnet.report.figures import PALETTE, Line, Panel

    drawn = []
    for group in by_method([r for r in records if r.method.startswith(scene) and "index" in r.outcome]):
        kind = group[0].method.removeprefix(f"{scene}-")
        curves = [record.outcome["index_by_step"] for record in group]
        y = [sum(points) / len(points) for points in zip(*curves, strict=True)]
        first = 0 if kind in ("sync", "guided") else 1  # the first phases are before the first step
        x = [float(first + step) for step in range(len(y))]
        drawn.append(Line(NETWORKS[kind], x, y, PALETTE[COLOURS[kind] % len(PALETTE)]))
    return Panel(SCENES[scene], "step", "adjusted Rand index", drawn, from_zero=True)


def binding(scene: str, groups: Mapping[str, Sequence[Record]]) -> str:
    """A sentence about who separates the pixels of the objects."""
    capsules = [kind for kind in ("dynamic", "em", "kuramoto") if f"{scene}-{kind}" in groups]
    phases = average(groups[f"{scene}-sync"], "index")
    routed = {kind: average(groups[f"{scene}-{kind}"], "index") for kind in capsules}
    best = max(routed, key=lambda kind: routed[kind] or 0.0)
    verdict = compared(groups[f"{scene}-sync"], groups[f"{scene}-{best}"], "index")
    said = ", ".join(f"{value:.2f} ({NETWORKS[kind]})" for kind, value in routed.items())
    return (
        f"{SCENES[scene].capitalize()}, do phases bind better than routing? Rand index {phases:.2f} for phases, "
        f"{said} for couplings: {verdict} than the best couplings."
    )


def helping(scene: str, groups: Mapping[str, Sequence[Record]]) -> str:
    """A sentence about whether phases help to classify."""
    sync, real, capsules = (groups[f"{scene}-{kind}"] for kind in ("sync", "real", "dynamic"))
    errors = [average(group, "error_percent") for group in (sync, real, capsules)]
    verdict = compared(real, sync, "error_percent")
    missed = [average(group, "missed_label_percent") for group in (sync, real, capsules)]
    return (
        f"{SCENES[scene].capitalize()}, do phases help to classify? Error {errors[0]:.1f} % with phases, "
        f"{errors[1]:.1f} % without{too_close(sync, real)} and {errors[2]:.1f} % with capsules (objects missed: "
        f"{missed[0]:.1f}, {missed[1]:.1f} and {missed[2]:.1f} %). With phases it is {verdict} than without."
    )


def guiding(scene: str, groups: Mapping[str, Sequence[Record]]) -> str:
    """A sentence about what the oscillators can do when they are told the pixels."""
    guided, sync = groups[f"{scene}-guided"], groups[f"{scene}-sync"]
    reached, limit = average(guided, "index") or 0.0, average(guided, "index_limit") or 0.0
    separated = (
        "They hardly separate the objects even then, so the other figures say how this small network does after a "
        "short training, not what phases can do."
        if reached < limit / 4
        else "They separate the objects in part."
    )
    return (
        f"{SCENES[scene].capitalize()}, what could the oscillators do? Guided by the pixels of both objects they "
        f"reach {reached:.2f} (limit of their grid: {limit:.2f}), with "
        f"an error of {average(guided, 'error_percent'):.1f} % against {average(sync, 'error_percent'):.1f} %. "
        f"{separated}"
    )


def compared(one: Sequence[Record], other: Sequence[Record], name: str) -> str:
    """How a measure of `one` compares with that of `other` over the seeds that both have."""
    there = {record.seed: record.outcome[name] for record in other}
    differences = [record.outcome[name] - there[record.seed] for record in one if record.seed in there]
    if not differences:
        return "not comparable"
    n = len(differences)
    over = "in the one seed that both have" if n == 1 else f"in all {n} seeds"
    way = "better" if min(differences) > 0 else "worse" if max(differences) < 0 else ""
    return f"{way} {over}" if way else f"better in some of the {n} seeds and worse in others"
