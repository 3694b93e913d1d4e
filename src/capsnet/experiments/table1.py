"""Table 1 of the paper: CapsNet with 1 and 3 routing iterations, with and without reconstruction, and a CNN."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from capsnet.experiments.core.claims import Claim, at_most, lower, measured, too_close
from capsnet.experiments.core.networks import AUTHORS_EPOCHS, capsule_training, cnn_training, shortfalls
from capsnet.experiments.core.plan import (
    Budget,
    Experiment,
    Record,
    Row,
    average,
    by_method,
    tiny,
    values,
    with_model,
)
from capsnet.models.registry import parameters
from capsnet.train.config import Config

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from capsnet.report.figures import Bar

# (iterations, reconstruction) → the paper's error on MNIST and MultiMNIST; 0 iterations: the CNN
PAPER: dict[tuple[int, bool], tuple[float, float | None]] = {
    (0, False): (0.39, 8.1),
    (1, False): (0.34, None),
    (1, True): (0.29, 7.5),
    (3, False): (0.35, None),
    (3, True): (0.25, 5.2),
}
NAMES = {"mnist": "MNIST", "multimnist": "MultiMNIST"}
COMPARED = (  # claim, and the two rows that it compares
    ("three routing iterations beat one", (3, True), (1, True)),
    ("reconstruction reduces the error", (3, True), (3, False)),
    ("CapsNet beats a CNN", (3, True), (0, False)),
)
EPOCHS = {"mnist": 3, "multimnist": 6}  # at `hour`
DAY_EPOCHS = {"mnist": 30, "multimnist": 50}  # 50 epochs are 3 million pairs
DAY_CNN_EPOCHS = 3  # an epoch takes more than an hour


class Table1(Experiment):
    name = "table1"
    title = "Table 1: test error on MNIST and MultiMNIST"
    question = (
        "Are three routing iterations better than one, and does the reconstruction loss help? CapsNet with and without "
        "either, and a CNN, on MNIST (shifted by up to 2 pixels) and on MultiMNIST (a pair is correct only if both "
        "digits are). Mean ± standard deviation over seeds."
    )

    budgets = ("smoke", "hour", "day", "full")

    def rows(self, budget: Budget, seed: int) -> list[Row]:
        if budget != "day":
            return [row_of(data, r, decoded, budget, seed) for data in NAMES for r, decoded in PAPER]
        digits = [row_of("mnist", r, decoded, budget, seed) for r, decoded in PAPER if r]
        pairs = [row_of("multimnist", r, True, budget, seed) for r in (1, 3)]
        return [*digits, *pairs, *([row_of("mnist", 0, False, budget, seed)] if seed == 0 else [])]

    def pictures(self, records: Sequence[Record]) -> dict[str, Figure]:
        from capsnet.report import figures

        panels = {
            name: [bar_of(group) for group in by_method(records) if group[0].shown["data"] == name]
            for name in NAMES.values()
        }
        note = "Bars: our test error. Lines across: the paper's."
        return {"table1": figures.bars(self.title, note, {k: v for k, v in panels.items() if v})}

    def findings(self, records: Sequence[Record]) -> list[str]:
        said = []
        for name in NAMES.values():
            groups = {g[0].method: g for g in by_method(records) if g[0].shown["data"] == name}
            one, three = (next((g for m, g in groups.items() if m.endswith(f"r{r}-rec")), None) for r in (1, 3))
            if one and three:
                a, b = average(one, "error_percent"), average(three, "error_percent")
                said.append(
                    f"{name}, with reconstruction: {a:.2f} % with one iteration and {b:.2f} % with three; the paper "
                    f"reports {one[0].paper['error_percent']:g} and {three[0].paper['error_percent']:g} %"
                    f"{too_close(one, three)}."
                )
        return said

    def claims(self, records: Sequence[Record], budget: str) -> list[Claim]:
        groups = {group[0].method: group for group in by_method(records)}
        claims = []
        for data, name in NAMES.items():
            if budget in ("day", "full") and (reached := groups.get(f"{data}-r3-rec")):
                claims.append(
                    at_most(
                        f"{name}: test error of CapsNet", PAPER[3, True][data == "multimnist"] or 0, measured(reached)
                    )
                )
            for what, a, b in COMPARED:
                ours, theirs = (groups.get(f"{data}-{kind_of(*key)}") for key in (a, b))
                figures = [PAPER[key][data == "multimnist"] for key in (a, b)]
                if ours and theirs and None not in figures:
                    paper = f"{figures[0]:g} % vs. {figures[1]:g} %"
                    claims.append(lower(f"{name}: {what}", paper, measured(ours), measured(theirs)))
        return claims

    def captions(self) -> Mapping[str, str]:
        return {"table1": "Test error; lower is better."}


def row_of(data: str, iterations: int, decoded: bool, budget: Budget, seed: int) -> Row:
    """One row of the table, trained with one seed."""
    config = config_of(data, iterations, decoded, budget, seed)
    name = f"CapsNet, routing {iterations}" if iterations else "CNN"
    shown = {"data": NAMES[data], "method": name, "reconstruction": ("yes" if decoded else "no") if iterations else "–"}
    theirs = PAPER[iterations, decoded][data == "multimnist"]
    return Row(
        f"{data}-{kind_of(iterations, decoded)}",
        config,
        shown,
        {} if theirs is None else {"error_percent": theirs},
        less(data, config, budget),
    )


def kind_of(iterations: int, decoded: bool) -> str:
    return f"r{iterations}-{'rec' if decoded else 'norec'}" if iterations else "cnn"


def config_of(data: str, iterations: int, decoded: bool, budget: Budget, seed: int) -> Config:
    """How a row is trained; other experiments with the same config share its run."""
    side = 28 if data == "mnist" else 36
    epochs = (DAY_EPOCHS if budget == "day" else EPOCHS)[data]
    capsules = capsule_training(budget, epochs, side, data, seed)
    if not iterations:
        config = cnn_training(budget, capsules, f"baseline-{data}", DAY_CNN_EPOCHS if budget == "day" else 100)
    else:
        config = with_model(capsules, routing=replace(capsules.model.routing, iterations=iterations))  # type: ignore[attr-defined]
        if not decoded:
            config = with_model(replace(config, loss=replace(config.loss, reconstruction=0.0)), decoder=())
    if budget != "smoke":
        return config
    return replace(tiny(config), data="multimnist:test=300" if data == "multimnist" else data)


def less(data: str, config: Config, budget: Budget) -> tuple[str, ...]:
    pairs = ("100,000 test pairs instead of 10 million",) if data == "multimnist" else ()
    if config.model.kind == "cnn":
        if budget in ("day", "full"):
            return (f"{config.epochs} epochs (the paper gives no number)", *pairs)
        theirs = {"mnist": 35_445_522, "multimnist": 24_563_978}[data]
        size = parameters(config.model)
        return (f"{size:,} instead of {theirs:,} parameters", f"{config.epochs} epochs", *pairs)
    if budget == "full":
        return pairs
    if config.loss.reconstruction or budget == "day":
        return (*shortfalls(budget, config, 28 if data == "mnist" else 36), *pairs)
    size = parameters(config.model)
    epochs = f"{config.epochs} epochs instead of about {AUTHORS_EPOCHS}"
    return (f"{size:,} parameters", epochs, *pairs)


def bar_of(group: Sequence[Record]) -> Bar:
    """A method as a bar, with the paper's figure as a mark."""
    from capsnet.report import figures

    first = group[0]
    shown = first.shown
    label = shown["method"] + ({"yes": ", rec.", "no": ""}.get(shown["reconstruction"], ""))
    colour = figures.VERMILLION if shown["method"] == "CNN" else figures.BLUE
    return figures.Bar.over_seeds(label, values(group, "error_percent"), colour, first.paper.get("error_percent"))
