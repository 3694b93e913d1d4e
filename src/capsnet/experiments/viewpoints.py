"""Novel viewpoints (section 5.1 of Hinton, Sabour and Frosst, 2018, with rendered toys in place of smallNORB).

Every network is trained twice: on azimuths of 300° to 40°, and on the three lowest elevations. Training stops at the
first epoch with at most STOP_AT % errors on familiar views of the training toys that are held out for validation, so
that all networks are compared at about the same familiar-view error. Then they are tested on novel views of the toys
that they know, and, as in the paper, on familiar and novel views of toys that they have never seen. Test images play no
part in the stop.

Novel views of known toys differ from the training images in the view alone. New toys differ in their shape as well.

Since all poses are known, a linear read-out also measures how much of azimuth and elevation the capsule of the true
class contains. It is fitted on training images and judged on the toys for testing, at familiar views.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from capsnet import data
from capsnet.data import Augment, in_order
from capsnet.data.views import FAMILIAR, FIELDS, Views, seen
from capsnet.evaluate import evaluate
from capsnet.experiments.core.claims import Claim, lower, measured, too_close
from capsnet.experiments.core.networks import compact_capsules
from capsnet.experiments.core.plan import Budget, Experiment, Record, Row, average, by_method, tiny
from capsnet.experiments.core.readout import Reading, features, r_squared
from capsnet.models.base import Model, evaluating
from capsnet.models.config import CNNConfig, ModelConfig
from capsnet.models.matrix import MatrixConfig
from capsnet.routing.base import options_for
from capsnet.train.config import Config
from capsnet.train.loop import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIDE, CLASSES = 32, 5
VALIDATION = 1000  # of 8,100 familiar views
STOP_AT = 8.0  # % validation error; chosen with the learning rates by research/viewpoints_pilots.py
RATES = {"cnn": 0.001}  # with the rate of the others, 0.003, its loss stays that of chance for some seeds
NETWORKS = {
    "cnn": "CNN, max-pooling",
    "dynamic": "CapsNet, dynamic routing",
    "self-attention": "CapsNet, self-attention",
    "em": "matrix capsules, EM routing",
    "vb": "matrix capsules, VB routing",
}
COLOURS = {"cnn": 1, "dynamic": 0, "self-attention": 5, "em": 2, "vb": 4}  # of the palette
# % errors on familiar and novel views of smallNORB
PAPER = {
    ("cnn", "azimuth"): (3.7, 20.0),
    ("em", "azimuth"): (3.7, 13.5),
    ("cnn", "elevation"): (4.3, 17.8),
    ("em", "elevation"): (4.3, 12.3),
}
EPOCHS = {"smoke": 1, "hour": 12, "day": 40}
TOYS = {"known": "known", "new": "novel"}  # and the name of the test with novel views of them
TARGETS = {"azimuth": (0, 1), "elevation": (2,)}  # columns of `pose_targets`


class Viewpoints(Experiment):
    name = "viewpoints"
    title = "Novel viewpoints"
    question = (
        "Does a network that knows toys from some directions recognise them from others? All networks are trained on "
        "azimuths of 300° to 40°, or on the three lowest elevations, until at the end of an epoch at most "
        f"{STOP_AT:g} % of held-out familiar views are wrong; networks that learn fast end below that. They are then "
        "tested on novel views of these toys, and on familiar and novel views of other toys. The images are rendered "
        "(`viewpoints`); the paper's figures are for smallNORB. "
        "A linear read-out of azimuth (as sine and cosine) and elevation, fitted on training images and judged on "
        "familiar views of the toys for testing, measures how much of the pose the capsule of the true class "
        "contains, or for the CNN its last hidden layer."
    )
    columns = {  # noqa: RUF012
        "validation_error_percent": "known toys, familiar views, error %",
        "known_error_percent": "known toys, novel views, error %",
        "familiar_error_percent": "new toys, familiar views, error %",
        "novel_error_percent": "new toys, novel views, error %",
        "r2_azimuth": "R² azimuth",
        "r2_elevation": "R² elevation",
        "numbers_read": "features read",
    }
    decimals = {"numbers_read": 0}  # noqa: RUF012
    budgets = ("smoke", "hour", "day")

    def rows(self, budget: Budget, seed: int) -> list[Row]:
        kinds = ("cnn", "em") if budget == "smoke" else NETWORKS
        return [row_of(kind, what, budget, seed) for what in FAMILIAR for kind in kinds]

    def measure(self, row: Row, result: Result) -> dict[str, Any]:
        familiar = result.evaluation.summary()
        novel = evaluate(result.model, data.load(row.also, validation=0).test).summary()
        known = evaluate(result.model, known_toys(row)).summary()
        return {
            "known_error_percent": known["error_percent"],
            "familiar_error_percent": familiar["error_percent"],
            "novel_error_percent": novel["error_percent"],
            "validation_error_percent": result.certificate.validation_error_percent,
            **read_out(result),
            "known": known,
            "familiar": familiar,
            "novel": novel,
        }

    def pictures(self, records: Sequence[Record]) -> dict[str, Figure]:
        from capsnet.report.figures import lines

        firsts = [group[0] for group in by_method(records)]
        panels = [panel(what, [r for r in firsts if r.method.endswith(what)]) for what in FAMILIAR]
        note = "Error on toys for testing against the direction that they are seen from."
        return {"viewpoints": lines(self.title, note, panels)}

    def captions(self) -> Mapping[str, str]:
        return {
            "viewpoints": "Left: networks trained on azimuths of −60° to 40°. Right: networks trained on elevations of "
            "30° to 40°. Each point covers the test images of one azimuth or elevation, of the first seed."
        }

    def findings(self, records: Sequence[Record]) -> list[str]:
        groups = {group[0].method: group for group in by_method(records)}
        trained = [what for what in FAMILIAR if any(method.endswith(f"-{what}") for method in groups)]
        return [finding(what, groups, toys) for what in trained for toys in TOYS] + early_ends(groups)

    def claims(self, records: Sequence[Record], budget: str) -> list[Claim]:
        groups = {group[0].method: group for group in by_method(records)}
        both = [what for what in FAMILIAR if {f"cnn-{what}", f"em-{what}"} <= set(groups)]
        return [claim(what, groups, toys) for what in both for toys in TOYS]


# --- Rows --------------------------------------------------------------------------------------------------------


def row_of(kind: str, what: str, budget: Budget, seed: int) -> Row:
    theirs = dict(zip(("familiar_error_percent", "novel_error_percent"), PAPER.get((kind, what), ()), strict=False))
    shown = {"trained on a part of the": f"{what}s", "network": NETWORKS[kind]}
    return Row(
        f"{kind}-{what}", config_of(kind, what, budget, seed), shown, theirs, less(budget),
        views(f"novel-{what}", budget),
    )  # fmt: skip


def views(kind: str, budget: Budget) -> str:
    """The dataset with these views, in pairs reduced to 32×32, so that the whole toy is visible."""
    thinned = ",every=6" if budget == "smoke" else ""
    return f"viewpoints:size={SIDE},views={kind}{thinned}"


def known_toys(row: Row) -> Views:
    """Novel views of the training toys; none of these images was trained on."""
    assert row.config is not None
    what = row.method.rpartition("-")[2]
    toys = data.load(row.config.data.replace(f"familiar-{what}", "all"), validation=0).train
    assert isinstance(toys, Views)
    return seen(toys, f"novel-{what}")


def config_of(kind: str, what: str, budget: Budget, seed: int) -> Config:
    """The same training for all networks, but for the learning rate of the CNN."""
    config = Config(
        data=views(f"familiar-{what}", budget), epochs=EPOCHS[budget], batch_size=64, optimizer="adamw",
        lr=RATES.get(kind, 0.003), weight_decay=0.01, average=0.99, validation=VALIDATION, stop_at=STOP_AT, seed=seed,
        model=model_of(kind), augment=Augment(shift=2),
    )  # fmt: skip
    if budget != "smoke":
        return config
    small: ModelConfig = (
        MatrixConfig((2, SIDE, SIDE), CLASSES, 8, 2, (2, 2), options_for(kind))
        if kind in ("em", "vb")
        else tiny(config).model
    )
    return replace(config, model=small, batch_size=16, validation=10)


def model_of(kind: str) -> ModelConfig:
    """The EM paper's CNN (4.2 million parameters), the compact capsule network, or the EM paper's small network."""
    if kind == "cnn":
        return CNNConfig((2, SIDE, SIDE), CLASSES, (32, 64), (5, 5), (2, 2), (1024,))
    if kind in ("em", "vb"):
        return MatrixConfig((2, SIDE, SIDE), CLASSES, routing=options_for(kind))
    return replace(compact_capsules(SIDE, 2, CLASSES), routing=options_for(kind), decoder=())


def less(budget: Budget) -> tuple[str, ...]:
    return ("rendered toys instead of smallNORB", f"at most {EPOCHS[budget]} epochs")


# --- Read-out ------------------------------------------------------------------------------------------------------


def read_out(result: Result) -> dict[str, Any]:
    """R² of azimuth and elevation at familiar views, and how many features they were read from."""
    splits = result.splits
    assert isinstance(splits.train, Views)
    assert isinstance(splits.test, Views)
    fitted = reading(result.model, splits.train)
    judged = reading(result.model, splits.test)
    found = {f"r2_{name}": defined(value) for name, value in r_squared(fitted, judged, TARGETS).items()}
    return found | {"numbers_read": fitted.numbers.shape[-1]}


def defined(value: float) -> float | None:
    """None for the R² of a target that does not vary."""
    return round(value, 4) if math.isfinite(value) else None


@torch.inference_mode()
def reading(model: Model, part: Views) -> Reading:
    """The features of all images, and their poses."""
    parts = []
    with evaluating(model):
        for batch in in_order(part, 250):
            images = batch.images.to(model.device)
            parts.append(features(model, images, model(images).poses).double().cpu())
    return Reading(torch.cat(parts), part.labels.cpu(), pose_targets(part.poses.cpu()))


def pose_targets(poses: Tensor) -> Tensor:
    """Sine and cosine of the azimuth, and the elevation: int64 (n, 4) → (n, 3). The azimuth itself is discontinuous."""
    azimuth, elevation = (torch.deg2rad(poses[:, FIELDS.index(name)].double()) for name in ("azimuth", "elevation"))
    return torch.stack([azimuth.sin(), azimuth.cos(), elevation], 1)


# --- What the records show -------------------------------------------------------------------------------------------


def panel(what: str, records: Sequence[Record]) -> Any:
    """Error against azimuth or elevation, a curve per network."""
    from capsnet.report.figures import PALETTE, Line, Panel

    drawn = []
    for record in records:
        kind = record.method.removesuffix(f"-{what}")
        x, y = error_curve(record.outcome, what)
        drawn.append(Line(kind, x, y, PALETTE[COLOURS[kind]]))
    return Panel(what.capitalize(), "degrees", "error, %" if what == "azimuth" else "", drawn, from_zero=True)


def error_curve(outcome: Mapping[str, Any], what: str) -> tuple[list[float], list[float]]:
    """Degrees, azimuths between −180 and 180, and the error there in per cent: of familiar and of novel views."""
    points = {}
    for test in ("familiar", "novel"):
        bins = outcome[test][f"errors_by_{what}"]
        for start, n, errors in zip(bins["edges"], bins["n"], bins["errors"], strict=False):
            if n:
                points[math.remainder(start, 360)] = 100 * errors / n
    return sorted(points), [points[x] for x in sorted(points)]


def finding(what: str, groups: Mapping[str, Sequence[Record]], toys: str) -> str:
    """The errors of all networks on novel views of known or new toys, and which differences are within chance."""
    said, test = [], TOYS[toys]
    for kind in [kind for kind in NETWORKS if f"{kind}-{what}" in groups]:
        group = groups[f"{kind}-{what}"]
        close = too_close(groups[f"cnn-{what}"], group, test) if kind != "cnn" and f"cnn-{what}" in groups else ""
        said.append(f"{NETWORKS[kind]} {average(group, f'{test}_error_percent'):.1f} %{close}")
    paper = f"; the paper reports {theirs(what)} on smallNORB" if test == "novel" else ""
    return f"Errors on novel {what}s of {toys} toys: {', '.join(said)}{paper}."


def theirs(what: str) -> str:
    return f"{PAPER['cnn', what][1]:g} % for a CNN and {PAPER['em', what][1]:g} % for EM routing"


def early_ends(groups: Mapping[str, Sequence[Record]]) -> list[str]:
    """The networks that ended before they reached the familiar-view error at which all should be compared."""
    said = []
    for method, group in groups.items():
        reached = average(group, "validation_error_percent")
        if reached is not None and reached > STOP_AT:
            said.append(f"{method} ended with a validation error of {reached:.1f} %, short of {STOP_AT:g} %.")
    return said


def claim(what: str, groups: Mapping[str, Sequence[Record]], toys: str) -> Claim:
    ours, baseline = (measured(groups[f"{kind}-{what}"], test=TOYS[toys]) for kind in ("em", "cnn"))
    figures = f"{PAPER['em', what][1]:g} % vs. {PAPER['cnn', what][1]:g} %" if toys == "new" else "–"
    return lower(f"Error on novel {what}s of {toys} toys: matrix capsules beat a CNN", figures, ours, baseline)
