"""Robustness to affine transformations (section 5.1): trained on digits at random places, tested on transformed ones.

All networks are stopped at the first epoch with 99.2 % on expanded validation digits, so that they start alike. The
test set is a re-creation of affNIST from MNIST's test digits (`capsnet.data.affine`); who has the original's files can
measure on them: `capsnet evaluate RUN --data affnist:PATH`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from capsnet import data
from capsnet.config import Config, get_preset
from capsnet.evaluation import evaluate
from capsnet.experiments.networks import parameters, with_width
from capsnet.experiments.plan import Budget, Experiment, Record, Row, average, by_method, tiny, too_close, with_model
from capsnet.training import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STOP_AT = 0.8  # % validation error
PAPER = {"capsnet": (99.23, 79.0), "cnn": (99.22, 66.0)}
NAMES = {"capsnet": "CapsNet", "cnn": "CNN, max-pooling", "cnn-norm": "CNN, max-pooling and batch norm"}
LABELS = {"capsnet": "CapsNet", "cnn": "CNN", "cnn-norm": "CNN, batch norm"}  # where there is little room
COLOURS = {"capsnet": 0, "cnn": 1, "cnn-norm": 2}  # of the palette
CURVES = {
    "rotation": ("Rotation", "degrees"),
    "shear": ("Shear", ""),
    "scale_across": ("Scale across", ""),
    "scale_down": ("Scale down", ""),
    "shift": ("Place", "px from the middle"),
}
NEAR = 8.0  # px from the middle: expanded digits are moved by up to 6 px across and down, 8.5 px in all
FEWEST = 50  # images without which a point of a curve says nothing
PER_DIGIT = {"smoke": 1, "hour": 2, "full": 32}


class Affine(Experiment):
    name = "affine"
    title = "Affine robustness: from digits at random places to transformed ones"
    question = (
        "All networks see digits at random places of a 40×40 field and nothing else, and are stopped at the first "
        "epoch with 99.2 % of expanded validation digits right. Then they are tested on a re-creation of affNIST: "
        "MNIST's test digits rotated up to 20°, sheared up to 0.2 and scaled by 0.8 to 1.2, which they have not seen."
    )
    columns = {  # noqa: RUF012
        "expanded_accuracy_percent": "expanded test digits right, %",
        "affine_accuracy_percent": "re-creation of affNIST right, %",
    }

    def rows(self, budget: Budget, seed: int) -> list[Row]:
        return [row_of(kind, budget, seed) for kind in NAMES]

    def measure(self, row: Row, result: Result) -> dict[str, Any]:
        expanded = result.evaluation.summary()
        affine = evaluate(result.model, data.load(row.also, validation=0).test).summary()
        return {
            "expanded_accuracy_percent": expanded["accuracy_percent"],
            "affine_accuracy_percent": affine["accuracy_percent"],
            "validation_error_percent": result.certificate["validation_error_percent"],
            "expanded": expanded,
            "affine": affine,
        }

    def pictures(self, records: Sequence[Record]) -> dict[str, Figure]:
        from capsnet.figures import lines

        firsts = [group[0] for group in by_method(records)]
        *curves, place = (panel(firsts, measure) for measure in CURVES)
        note = "Accuracy on a re-creation of affNIST against one property of the transformation, whatever the others."
        return {
            "affine": lines(self.title, note, curves, share=True),
            "affine-place": lines("The same against the place of the digit", note, [place], 260),
        }

    def captions(self) -> Mapping[str, str]:
        return {
            "affine": "Each point: all images of the re-creation in one part of that property's range, where there are "
            f"{FEWEST} or more. What is smaller or turned less has more room to be moved, farther from the middle than "
            "any digit in training: hence the dips at no rotation and at small scales.",
            "affine-place": "In training digits stood up to 8.5 px from the middle.",
        }

    def findings(self, records: Sequence[Record]) -> list[str]:
        groups = {g[0]["method"]: g for g in by_method(records)}
        right = {kind: average(group, "affine_accuracy_percent") or 0.0 for kind, group in groups.items()}
        said = []
        for kind in [kind for kind in NAMES if kind in right and kind != "capsnet" and "capsnet" in right]:
            a, b = right["capsnet"], right[kind]
            lead = "CapsNet is ahead" if a > b else "the CNN is ahead" if b > a else "neither is ahead"
            theirs = " (the paper, on affNIST itself: 79 and 66 %)" if kind in PAPER else ""
            said.append(
                f"On the re-creation of affNIST CapsNet has {a:.1f} % right and the {NAMES[kind]}, {b:.1f} %: {lead} "
                f"by {abs(a - b):.1f} points{theirs}{too_close(groups['capsnet'], groups[kind], 'affine')}."
            )
        near, far = (
            ", ".join(f"{LABELS[kind]} {right_of(group, side):.1f} %" for kind, group in groups.items())
            for side in (True, False)
        )
        said.append(
            f"Right of the images up to {NEAR:g} px from the middle, where training digits stood too: {near}; of those "
            f"farther out, most of them where none stood: {far}."
        )
        for kind, group in groups.items():
            reached = average(group, "validation_error_percent")
            if reached is not None and reached > STOP_AT:
                said.append(
                    f"{NAMES[kind]} had not come to 99.2 % on validation when its epochs ended: {100 - reached:.2f} %."
                )
        return said


def panel(records: Sequence[Record], measure: str) -> Any:
    """The curves of all networks against one measure."""
    from capsnet.figures import PALETTE, Line, Panel

    drawn = []
    for record in records:
        x, y = accuracy_curve(record["outcome"]["affine"][f"errors_by_{measure}"])
        drawn.append(Line(LABELS[record["method"]], x, y, PALETTE[COLOURS[record["method"]]]))
    title, unit = CURVES[measure]
    return Panel(title, unit, "right, %" if measure in ("rotation", "shift") else "", drawn)


def right_of(group: Sequence[Record], near: bool) -> float:
    """Per cent right of the images that are moved no farther than digits are in training, or of the others."""
    n = errors = 0
    for record in group:
        bins = record["outcome"]["affine"]["errors_by_shift"]
        for end, images, wrong in zip(bins["edges"][1:], bins["n"], bins["errors"], strict=True):
            counts = (end <= NEAR) == near
            n, errors = n + images * counts, errors + wrong * counts
    return 100 * (1 - errors / max(n, 1))


def row_of(kind: str, budget: Budget, seed: int) -> Row:
    config = config_of(kind, budget, seed)
    theirs = dict(zip(Affine.columns, PAPER[kind], strict=True)) if kind in PAPER else {}
    transformed = f"affine-mnist:per_digit={PER_DIGIT[budget]}"
    return Row(kind, config, {"network": NAMES[kind]}, theirs, less(config, budget), transformed)


def config_of(kind: str, budget: Budget, seed: int) -> Config:
    """The paper's capsule network and a CNN of as many parameters at `full`, else the compact presets."""
    config = get_preset("expanded" if kind == "capsnet" else "expanded-cnn")
    if budget == "full":
        paper = with_model(get_preset("paper"), image_shape=(1, 40, 40))
        if kind == "capsnet":
            config = replace(paper, data=config.data, augment=config.augment, epochs=100)
        else:
            config = replace(config, model=with_width(config.model, parameters(paper.model)), epochs=100)  # type: ignore[arg-type]
    if kind == "cnn-norm":  # the compact capsule network has it, the paper's networks have not
        config = with_model(config, norm=True)
    if budget == "smoke":
        config = replace(tiny(config), validation=300)
    return replace(config, seed=seed, stop_at=STOP_AT)


def less(config: Config, budget: Budget) -> tuple[str, ...]:
    if budget == "smoke":
        return ("a few steps of a toy network: only to see that it runs",)
    made = "a re-creation of affNIST instead of the original"
    if budget == "full":
        return (made,)
    theirs = parameters(replace(get_preset("paper").model, image_shape=(1, 40, 40)))
    size = f"a compact network of {parameters(config.model):,} parameters (the paper's CapsNet on 40×40: {theirs:,})"
    return (size, f"{made}, {PER_DIGIT[budget] * 10_000:,} of its 320,000 images")


def accuracy_curve(bins: Mapping[str, Sequence[float]]) -> tuple[list[float], list[float | None]]:
    """Middles of the bins, and the share that is right there in per cent."""
    edges = bins["edges"]
    middles = [(a + b) / 2 for a, b in itertools.pairwise(edges)]
    right = [100 * (1 - e / n) if n >= FEWEST else None for n, e in zip(bins["n"], bins["errors"], strict=True)]
    return middles, right
