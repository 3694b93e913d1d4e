"""What do capsules add to a residual network, and what do they cost? CIFAR-10, one stem, five heads.

The training and the learning rate are those of the `cifar10` preset and the same for every row; the stem has fewer
channels than the preset's, so that all rows take hours instead of a day. What follows the stem differs: class capsules
by four routing algorithms, or average pooling and a linear layer with cross-entropy. The capsule networks have no
decoder, so that a row is a head and nothing else.

One more row trains nothing. It measures a training step of each network in turns in one process, because trainings take
hours, during which other programs may run.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from capsnet.experiments.core.claims import paired
from capsnet.experiments.core.conduct import training_step
from capsnet.experiments.core.plan import Budget, Experiment, Record, Row, average, by_method, check_budget, values
from capsnet.models.config import CapsNetConfig, LossConfig, ModelConfig
from capsnet.models.resnet import ResNetConfig
from capsnet.report.tables import Table, over_seeds, whole
from capsnet.routing.base import options_for
from capsnet.timing import alternate, clock
from capsnet.train.config import Config
from capsnet.train.presets import get_preset

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LINEAR, COST = "linear", "cost"
ROUTINGS = ("uniform", "dynamic", "self-attention", "inverted-attention")
EPOCHS = {"hour": 1, "day": 6}
REPEATS = 9  # of a training step
CHANNELS = (32, 64, 64, 128, 128)  # of the stem
TOY_BLOCKS: Mapping[str, Any] = {"stem_channels": (4, 8), "stem_kernels": (3, 3), "stem_strides": (4, 2)}


class Cifar10(Experiment):
    name = "cifar10"
    title = "CIFAR-10: capsules on a residual stem"
    question = (
        "What do capsules add to a residual network on photographs, and what do they cost? One residual stem is "
        "trained with class capsules by each of four routing algorithms, and with average pooling and a linear layer "
        "instead. Data, augmentation, epochs and learning rate are the same for all rows; the learning rate was "
        "chosen for capsules with dynamic routing. Differences from the linear layer are paired by seed."
    )
    budgets = ("smoke", "hour", "day")

    def rows(self, budget: Budget, seed: int) -> list[Row]:
        trained = [Row(head, config_of(head, budget, seed), {"head": described(head)}) for head in heads_of(budget)]
        return [*trained, Row(f"{COST}-{budget}", None)]

    def observe(self, row: Row) -> dict[str, Any]:
        """Seconds of a training step of each network."""
        budget = check_budget(row.method.removeprefix(f"{COST}-"))
        steps = [training_step(config_of(head, budget, 0)) for head in heads_of(budget)]
        seconds = alternate(steps, 1 if budget == "smoke" else REPEATS)
        return {head: statistics.median(times) for head, times in zip(heads_of(budget), seconds, strict=True)}

    def table(self, records: Sequence[Record]) -> Table:
        header = [
            "head", "test error, %", "minus linear (95 % interval)", "parameters", "ms per step", "epochs", "seeds",
            "time",
        ]  # fmt: skip
        return Table(header, [line_of(group, records) for group in trained(records)])

    def findings(self, records: Sequence[Record]) -> list[str]:
        groups = {group[0].method: group for group in trained(records)}
        if LINEAR not in groups or len(groups) < 2:
            return []
        linear = groups.pop(LINEAR)
        said = [compared(group, linear) for group in groups.values()]
        return [*said, *cost(groups.values(), linear, step_costs(records))]

    def pictures(self, records: Sequence[Record]) -> dict[str, Figure]:
        from capsnet.report import figures

        bars = []
        for group in trained(records):
            colour = figures.VERMILLION if group[0].method == LINEAR else figures.BLUE
            bars.append(figures.Bar.over_seeds(group[0].method, values(group, "error_percent"), colour))
        note = "Test error in percent, mean and standard deviation over seeds; the linear layer is vermillion."
        return {"cifar10": figures.bars(self.title, note, {"CIFAR-10": bars})}


def heads_of(budget: Budget) -> tuple[str, ...]:
    return (LINEAR, "dynamic") if budget == "smoke" else (LINEAR, *ROUTINGS)


def trained(records: Sequence[Record]) -> list[list[Record]]:
    """The records of each head; not those of the costs."""
    return by_method([record for record in records if record.made])


def step_costs(records: Sequence[Record]) -> Mapping[str, float]:
    """Seconds per training step by head, if they have been measured."""
    return next((record.outcome for record in records if record.method.startswith(COST)), {})


def described(head: str) -> str:
    return "average pooling and a linear layer" if head == LINEAR else f"capsules, {head} routing"


def config_of(head: str, budget: Budget, seed: int) -> Config:
    """The preset's training with another head; at `smoke` a few steps of a toy stem on digits, which are small."""
    preset = get_preset("cifar10")
    assert isinstance(preset.model, CapsNetConfig)
    model = model_of(head, replace(preset.model, stem_channels=CHANNELS))
    config = replace(preset, seed=seed, epochs=EPOCHS.get(budget, 1), model=model, loss=LossConfig())
    if budget != "smoke":
        return config
    toy = replace(config.model, image_shape=(1, 28, 28), **TOY_BLOCKS)
    return replace(config, data="mnist", model=toy, train_limit=256, batch_size=64)


def model_of(head: str, like: CapsNetConfig) -> ModelConfig:
    """The stem with a routing algorithm, or with a linear layer."""
    if head != LINEAR:
        return replace(like, routing=options_for(head), decoder=())
    blocks = like.stem_channels, like.stem_kernels, like.stem_strides
    return ResNetConfig(like.image_shape, like.num_classes, *blocks)


def line_of(group: Sequence[Record], records: Sequence[Record]) -> list[str]:
    first, linear = group[0], [r for r in records if r.method == LINEAR]
    apart = paired([] if first.method == LINEAR else group, linear)
    seconds = step_costs(records).get(first.method)
    return [
        first.shown["head"] + (" *" if first.less else ""),
        over_seeds(values(group, "error_percent")),
        str(apart),
        whole(first.made.get("parameters")),
        "–" if seconds is None else whole(1000 * seconds),
        f"{first.made.get('epochs'):g}",
        str(len(group)),
        clock(sum(r.seconds for r in group)),
    ]


def compared(group: Sequence[Record], linear: Sequence[Record]) -> str:
    """A head compared with the linear layer, by differences paired by seed."""
    apart = paired(group, linear)
    errors = f"{average(group, 'error_percent'):.2f} % against {average(linear, 'error_percent'):.2f} %"
    if apart.verdict == "too close to call":
        seeds = len(apart.differences)
        return f"{group[0].method}: {errors}, too close to call over {seeds} seed{'s' if seeds > 1 else ''}."
    return f"{group[0].method}: {errors}, {apart.verdict} than the linear layer beyond chance."


def cost(groups: Iterable[Sequence[Record]], linear: Sequence[Record], seconds: Mapping[str, float]) -> list[str]:
    """What the capsules cost in time and parameters, from the cheapest to the most expensive head."""
    if LINEAR not in seconds:
        return []
    ratios = [value / max(seconds[LINEAR], 1e-9) for head, value in seconds.items() if head != LINEAR]
    more = [group[0].made["parameters"] / linear[0].made["parameters"] - 1 for group in groups]
    return [
        f"A training step with capsules takes {ranged(ratios, '.2f')} times as long as with the linear layer, measured "
        f"in one run; they have {ranged([100 * each for each in more], '.1f')} % more parameters."
    ]


def ranged(numbers: Sequence[float], form: str) -> str:
    """The least and the greatest of some numbers, or the one that all of them are.

    >>> ranged([1, 2, 3], ".1f"), ranged([2, 2], ".1f")
    ('1.0 to 3.0', '2.0')
    """
    low, high = format(min(numbers), form), format(max(numbers), form)
    return low if low == high else f"{low} to {high}"
