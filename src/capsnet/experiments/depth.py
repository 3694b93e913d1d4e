"""How deep can capsules be stacked? One to four capsule layers on Fashion-MNIST.

Squash shortens: capsules of length 0.1 vote with a tenth of the strength, and the next layer is shorter still. Before
training, lengths therefore vanish with every layer of a stack. Training recovers them if the transformations start
large enough: their standard deviation depends on the sizes of each layer (`DenseCaps.reset_parameters`), where the
authors' 0.1 was made for one layer with 1,152 lower capsules.
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


class Depth(Experiment):
    name = "depth"
    title = "Depth: stacks of capsule layers"
    question = (
        f"How many capsule layers can be stacked? One to {DEEPEST} layers are trained on Fashion-MNIST with dynamic "
        f"routing; hidden layers have {HIDDEN[0]} capsules of {HIDDEN[1]} dimensions. A capsule is "
        f"alive if its activation exceeds {ALIVE:g} for at least one of {EXAMINED} test images; the last layer "
        "contains the class capsules."
    )
    budgets = ("smoke", "hour", "day")

    def rows(self, budget: Budget, seed: int) -> list[Row]:
        return [
            Row(f"layers-{depth}", config_of(depth, budget, seed), {"layers": str(depth)})
            for depth in ((1, DEEPEST) if budget == "smoke" else range(1, DEEPEST + 1))
        ]

    def measure(self, row: Row, result: Result) -> dict[str, Any]:
        layers = activations_by_layer(result)
        return result.evaluation.summary() | {
            "alive_percent": [100 * alive_share(a) for a in layers],
            "mean_activation": [float(a.mean()) for a in layers],
        }

    def table(self, records: Sequence[Record]) -> Table:
        header = [
            "layers", "test error, %", "alive by layer, %", "mean activation by layer", "parameters",
            "epochs", "seeds", "time",
        ]  # fmt: skip
        return Table(header, [line_of(group) for group in by_method(records)])

    def findings(self, records: Sequence[Record]) -> list[str]:
        return [sentence(group) for group in by_method(records)]

    def pictures(self, records: Sequence[Record]) -> dict[str, Figure]:
        from capsnet.report import figures

        bars = [
            figures.Bar.over_seeds(group[0].shown["layers"], values(group, "error_percent"), figures.BLUE)
            for group in by_method(records)
        ]
        note = "Test error in percent by number of capsule layers, mean and standard deviation over seeds."
        return {"depth": figures.bars(self.title, note, {"Fashion-MNIST": bars})}


def config_of(depth: int, budget: Budget, seed: int) -> Config:
    """The quick preset's network and training with more capsule layers, without a decoder."""
    model = replace(compact_capsules(), hidden_caps=(HIDDEN,) * (depth - 1), decoder=())
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
        first.shown["layers"] + (" *" if first.less else ""),
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


def sentence(group: Sequence[Record]) -> str:
    """Error and living capsules of a depth."""
    depth = group[0].shown["layers"]
    return (
        f"{depth} capsule layer{'s' if depth != '1' else ''}: {average(group, 'error_percent'):.2f} % error, "
        f"alive by layer {by_layer(group, 'alive_percent', 0)} %."
    )
