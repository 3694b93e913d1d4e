"""Table 1 of the paper: CapsNet with 1 and 3 routing iterations, with and without reconstruction, beside a CNN."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from capsnet.config import CapsNetConfig, Config
from capsnet.evaluation import mean_and_std
from capsnet.experiments.networks import AUTHORS_EPOCHS, capsule_training, cnn_training, parameters, shortfalls
from capsnet.experiments.plan import (
    Budget,
    Experiment,
    Record,
    Row,
    average,
    by_method,
    tiny,
    too_close,
    values,
    with_model,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from capsnet.figures import Bar

# routing iterations, reconstruction → the paper's error on MNIST and on MultiMNIST; 0 iterations: the baseline
PAPER: dict[tuple[int, bool], tuple[float, float | None]] = {
    (0, False): (0.39, 8.1),
    (1, False): (0.34, None),
    (1, True): (0.29, 7.5),
    (3, False): (0.35, None),
    (3, True): (0.25, 5.2),
}
NAMES = {"mnist": "MNIST", "multimnist": "MultiMNIST"}
EPOCHS = {"mnist": 3, "multimnist": 6}  # at `hour`


class Table1(Experiment):
    name = "table1"
    title = "Table 1: test error on MNIST and MultiMNIST"
    question = (
        "Do three routing iterations beat one, and does the reconstruction help? CapsNet with and without either, "
        "beside a CNN, on MNIST (up to 2 px of shift) and on MultiMNIST (a pair counts as right only when exactly its "
        "two digits are named). Mean ± standard deviation over seeds."
    )

    def rows(self, budget: Budget, seed: int) -> list[Row]:
        return [row_of(data, r, painted, budget, seed) for data in NAMES for r, painted in PAPER]

    def pictures(self, records: Sequence[Record]) -> dict[str, Figure]:
        from capsnet import figures

        panels = {
            name: [bar_of(group) for group in by_method(records) if group[0]["shown"]["data"] == name]
            for name in NAMES.values()
        }
        note = "Bars: ours, as measured; the line across each: what the paper reports."
        return {"table1": figures.bars(self.title, note, {k: v for k, v in panels.items() if v})}

    def findings(self, records: Sequence[Record]) -> list[str]:
        said = []
        for name in NAMES.values():
            groups = {g[0]["method"]: g for g in by_method(records) if g[0]["shown"]["data"] == name}
            one, three = (next((g for m, g in groups.items() if m.endswith(f"r{r}-rec")), None) for r in (1, 3))
            if one and three:
                a, b = average(one, "error_percent"), average(three, "error_percent")
                said.append(
                    f"{name}, with reconstruction: {a:.2f} % with one iteration, {b:.2f} % with three "
                    f"(the paper: {one[0]['paper']['error_percent']:g} and {three[0]['paper']['error_percent']:g} %)"
                    f"{too_close(one, three)}."
                )
        return said

    def captions(self) -> Mapping[str, str]:
        return {"table1": "Lower is better. Where a bar had less than the paper, the list below says in what."}


def row_of(data: str, iterations: int, painted: bool, budget: Budget, seed: int) -> Row:
    """One row of the table, trained with one seed."""
    config = config_of(data, iterations, painted, budget, seed)
    name = f"CapsNet, routing {iterations}" if iterations else "CNN"
    kind = f"r{iterations}-{'rec' if painted else 'norec'}" if iterations else "cnn"
    shown = {"data": NAMES[data], "method": name, "reconstruction": ("yes" if painted else "no") if iterations else "–"}
    theirs = PAPER[iterations, painted][data == "multimnist"]
    return Row(
        f"{data}-{kind}", config, shown, {} if theirs is None else {"error_percent": theirs}, less(data, config, budget)
    )


def config_of(data: str, iterations: int, painted: bool, budget: Budget, seed: int) -> Config:
    """How a row is trained; other experiments ask for the same, and then share its run."""
    side = 28 if data == "mnist" else 36
    capsules = capsule_training(budget, EPOCHS[data], side, data, seed)
    if not iterations:
        config = cnn_training(budget, capsules, f"baseline-{data}")
    else:
        config = with_model(capsules, iterations=iterations)
        if not painted:
            config = with_model(replace(config, loss=replace(config.loss, reconstruction=0.0)), decoder=())
    if budget != "smoke":
        return config
    return replace(tiny(config), data="multimnist:test=300" if data == "multimnist" else data)


def less(data: str, config: Config, budget: Budget) -> tuple[str, ...]:
    pairs = ("100,000 test pairs instead of 10 million",) if data == "multimnist" and budget != "smoke" else ()
    if budget == "smoke":
        return ("a few steps of a toy network: only to see that it runs",)
    if not isinstance(config.model, CapsNetConfig):
        if budget == "full":
            return (f"{config.epochs} epochs (the paper does not say how many)", *pairs)
        theirs = {"mnist": 35_445_522, "multimnist": 24_563_978}[data]
        size = parameters(config.model)
        return (f"a CNN of {size:,} parameters instead of the paper's {theirs:,}", f"{config.epochs} epochs", *pairs)
    if budget == "full":
        return pairs
    if config.model.decoder:
        return (*shortfalls(budget, config, 28 if data == "mnist" else 36), *pairs)
    size = parameters(config.model)
    epochs = f"{config.epochs} epochs instead of about {AUTHORS_EPOCHS}"
    return (f"a compact network of {size:,} parameters", epochs, *pairs)


def bar_of(group: Sequence[Record]) -> Bar:
    """A method as a bar, the paper's figure as its mark."""
    from capsnet import figures

    first = group[0]
    mean, std = mean_and_std(values(group, "error_percent"))
    shown = first["shown"]
    label = shown["method"] + ({"yes": ", rec.", "no": ""}.get(shown["reconstruction"], ""))
    colour = figures.VERMILLION if shown["method"] == "CNN" else figures.BLUE
    return figures.Bar(label, mean, colour, std, first["paper"].get("error_percent"))
