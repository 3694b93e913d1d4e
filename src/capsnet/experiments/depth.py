"""How deep can capsules be stacked? One to four capsule layers on Fashion-MNIST, with two initialisations.

Squash shortens: capsules of length 0.1 vote with a tenth of the strength, and the next layer is shorter still, so that
lengths can vanish with every layer, and gradients with them. What counts is how large the transformations are at the
start. The authors' standard deviation of 0.1 was made for one layer with 1,152 lower capsules; ours depends on the
sizes of each layer (`DenseCaps.reset_parameters`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from capsnet.data import Augment, in_order
from capsnet.experiments.core.networks import compact_capsules
from capsnet.experiments.core.plan import Budget, Experiment, Record, Row, average, by_method, tiny, values
from capsnet.models.base import Model
from capsnet.nn.options import Init
from capsnet.report.tables import Table, over_seeds, plain, whole
from capsnet.timing import clock
from capsnet.train.config import Config
from capsnet.train.loop import Result
from capsnet.train.presets import get_preset

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEEPEST = 4
HIDDEN = (32, 8)  # capsules of a hidden layer, and their dimension
ALIVE = 0.1  # a capsule is alive if its activation exceeds this for at least one examined image
EXAMINED = 500  # test images
EPOCHS = {"hour": 1, "day": 5}
STACKS = {"ours": "by the sizes of each layer", "authors": "as the authors do, with 0.1 in every layer"}


class Depth(Experiment):
    name = "depth"
    title = "Depth: stacks of capsule layers"
    question = (
        f"How many capsule layers can be stacked? One to {DEEPEST} layers are trained on Fashion-MNIST with dynamic "
        f"routing; hidden layers have {HIDDEN[0]} capsules of {HIDDEN[1]} dimensions. The transformations start with "
        "the standard deviation that suits the sizes of a layer, or with the authors' 0.1 in every layer. A capsule is "
        f"alive if its activation exceeds {ALIVE:g} for at least one of {EXAMINED} test images; the last layer "
        "contains the class capsules."
    )
    budgets = ("smoke", "hour", "day")

    def rows(self, budget: Budget, seed: int) -> list[Row]:
        return [
            Row(f"{stack}-{depth}", config_of(stack, depth, budget, seed), shown(stack, depth))
            for depth in ((1, DEEPEST) if budget == "smoke" else range(1, DEEPEST + 1))
            for stack in STACKS
        ]

    def measure(self, row: Row, result: Result) -> dict[str, Any]:
        layers = activations_by_layer(result)
        return result.evaluation.summary() | {
            "alive_percent": [100 * alive_share(a) for a in layers],
            "mean_activation": [float(a.mean()) for a in layers],
        }

    def table(self, records: Sequence[Record]) -> Table:
        header = [
            "layers", "initialisation", "test error, %", "alive by layer, %", "mean activation by layer", "parameters",
            "epochs", "seeds", "time",
        ]  # fmt: skip
        return Table(header, [line_of(group) for group in by_method(records)])

    def findings(self, records: Sequence[Record]) -> list[str]:
        groups = {group[0].method: group for group in by_method(records)}
        return [sentence(depth, groups) for depth in range(1, DEEPEST + 1) if f"ours-{depth}" in groups]

    def pictures(self, records: Sequence[Record]) -> dict[str, Figure]:
        from capsnet.report import figures

        bars = []
        for group in by_method(records):
            colour = figures.BLUE if group[0].method.startswith("ours") else figures.VERMILLION
            label = f"{group[0].shown['layers']} {group[0].method.partition('-')[0]}"
            bars.append(figures.Bar.over_seeds(label, values(group, "error_percent"), colour))
        note = "Test error in percent by capsule layers and initialisation, mean and standard deviation over seeds."
        return {"depth": figures.bars(self.title, note, {"Fashion-MNIST": bars})}


def shown(stack: str, depth: int) -> dict[str, str]:
    return {"layers": str(depth), "initialisation": STACKS[stack]}


def config_of(stack: str, depth: int, budget: Budget, seed: int) -> Config:
    """The quick preset's network and training with more capsule layers, without a decoder."""
    init: Init = "official" if stack == "authors" else "default"
    model = replace(compact_capsules(), hidden_caps=(HIDDEN,) * (depth - 1), init=init, decoder=())
    config = replace(
        get_preset("quick"), data="fashion-mnist", model=model, seed=seed, precision="fp32",
        epochs=EPOCHS.get(budget, 1), augment=Augment(shift=2, flip=True),
    )  # fmt: skip
    return replace(tiny(config), data="mnist") if budget == "smoke" else config


@torch.inference_mode()
def activations_by_layer(result: Result) -> list[Tensor]:
    """The activations (n, j) of every capsule layer for some test images."""
    model, found = result.model, list[list[Tensor]]()
    for batch in in_order(result.splits.test, 50):
        found.append(stacked_activations(model, batch.images.to(model.device)))
        if 50 * len(found) >= EXAMINED:
            break
    return [torch.cat(layer) for layer in zip(*found, strict=True)]


def stacked_activations(model: Model, images: Tensor) -> list[Tensor]:
    """The activations (b, j) of every capsule layer."""
    parts = model.divided()
    assert parts is not None
    (poses,), (layers,) = parts.primary(images), parts.branches
    a, found = None, list[Tensor]()
    for layer in layers:
        routed = layer.route(poses, a)
        found.append(routed.activations)
        poses, a = routed.poses, routed.activations if layer.routing.own_activations else None
    return found


def alive_share(activations: Tensor) -> float:
    """The share of capsules whose activation exceeds the threshold for some image: (n, j) → a number.

    >>> alive_share(torch.tensor([[0.9, 0.0], [0.0, 0.05]]))
    0.5
    """
    return float((activations.amax(0) > ALIVE).double().mean())


def line_of(group: Sequence[Record]) -> list[str]:
    first = group[0]
    return [
        first.shown["layers"],
        first.shown["initialisation"] + (" *" if first.less else ""),
        over_seeds(values(group, "error_percent")),
        by_layer(group, "alive_percent", 0),
        by_layer(group, "mean_activation", 2),
        whole(first.made.get("parameters")),
        plain(first.made.get("epochs")),
        str(len(group)),
        clock(sum(r.seconds for r in group)),
    ]


def by_layer(group: Sequence[Record], name: str, decimals: int) -> str:
    """The mean over seeds for each layer, the lowest layer first."""
    layers = zip(*(r.outcome[name] for r in group), strict=True)
    return ", ".join(f"{sum(values) / len(values):.{decimals}f}" for values in layers)


def sentence(depth: int, groups: dict[str, list[Record]]) -> str:
    """Error and living capsules of a depth, with both initialisations."""
    parts = [
        f"initialised {STACKS[stack]}: {average(group, 'error_percent'):.2f} % error, "
        f"alive by layer {by_layer(group, 'alive_percent', 0)} %"
        for stack in STACKS
        if (group := groups.get(f"{stack}-{depth}"))
    ]
    return f"{depth} capsule layer{'s' if depth > 1 else ''}, {'; '.join(parts)}."
