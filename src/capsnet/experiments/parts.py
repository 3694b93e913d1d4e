"""Parts and wholes: does a capsule network represent how parts are arranged, and does a capsule encode the pose?

Houses, boats and faces appear at random positions, angles and sizes (`data.synthetic.parts`). Three networks are
trained on whole objects only: a capsule network, the same without reconstruction, and a max-pooling CNN of similar size
with a sigmoid per class and the same margin loss. They are tested on

- the same parts in a wrong arrangement: how often is a scrambled face classified as a face, at the threshold that
  detects 95 % of the whole ones? The threshold is chosen on validation scenes for each network and class.
- crowded scenes, and crowded scenes with one object upside down: how often is the set of classes not exactly right?
  Thresholds are chosen on validation scenes again.
- the pose: ridge regression from the capsule of the true class to position, angle (as sine and cosine) and size, fitted
  on scenes of one seed and tested by R² on those of another. For the CNN it reads the last hidden layer, which is as
  wide as all class capsules together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from capsnet.data.synthetic.parts import CLASSES, Objects, Scenes, scenes
from capsnet.evaluate import wilson_interval
from capsnet.experiments.core.claims import Claim, lower, measured
from capsnet.experiments.core.networks import compact_capsules
from capsnet.experiments.core.plan import Budget, Experiment, Record, Row, average, by_method, values
from capsnet.experiments.core.readout import Reading, features, r_squared
from capsnet.models.base import Model
from capsnet.models.config import CapsNetConfig, CNNConfig, LossConfig, ModelConfig
from capsnet.train.config import Config
from capsnet.train.loop import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from capsnet.report.figures.gallery import Caption

DETECTION = 0.95  # share of whole validation objects above the threshold
SHAPE = (1, 40, 40)
TARGETS = {"position": (0, 1), "angle": (2, 3), "size": (4,)}  # columns of `pose_targets`
NETWORKS = {
    "capsnet": "CapsNet",
    "capsnet-no-decoder": "CapsNet, no decoder",
    "cnn": "CNN, max-pooling",
}
LABELS = {"capsnet": "CapsNet", "capsnet-no-decoder": "no decoder", "cnn": "CNN"}  # short forms
COLOURS = {"capsnet": 0, "capsnet-no-decoder": 5, "cnn": 1}  # of the palette


@dataclass(frozen=True)
class Plan:
    """Networks and data of a budget."""

    capsnet: CapsNetConfig
    cnn: CNNConfig
    train: int
    test: int
    epochs: int
    batch_size: int = 128
    lr: float = 0.002


# The last hidden layer of the CNN has 3 × 16 units; the other one makes the networks the same size without decoder
PLANS: dict[str, Plan] = {
    "smoke": Plan(
        CapsNetConfig(SHAPE, len(CLASSES), (8,), (9,), (2,), primary_types=4, primary_kernel=5, decoder=(16,)),
        CNNConfig(SHAPE, len(CLASSES), (8, 8), (5, 3), (4, 2), (240, 48), 0.25),
        train=256, test=120, epochs=1, batch_size=64,
    ),
    "hour": Plan(
        replace(compact_capsules(40, classes=len(CLASSES)), primary_types=16, decoder=(256, 512)),
        CNNConfig(SHAPE, len(CLASSES), (32, 64, 64), (5, 3, 3), (2, 2, 2), (176, 48), 0.25, norm=True),
        train=20_000, test=5_000, epochs=10,
    ),
    "full": Plan(
        CapsNetConfig(SHAPE, len(CLASSES)),
        CNNConfig(SHAPE, len(CLASSES), (256, 256, 128), (5, 5, 5), (2, 2, 2), (1400, 48), 0.25),
        train=60_000, test=10_000, epochs=30, lr=0.001,
    ),
}  # fmt: skip


class Parts(Experiment):
    name = "parts"
    title = "Parts and wholes"
    question = (
        "Houses and boats consist of the same rectangle and triangle, faces of eyes, nose and mouth. Networks trained "
        "on whole objects only are tested on the same parts in a wrong arrangement, at the threshold (chosen on "
        "validation scenes) that detects 95 % of the whole objects. Which network classifies a scrambled face as a "
        "face? A crowded scene is correct only if the set of classes is exactly right; objects were never upside down "
        "in training. Since all true poses are known, a linear read-out also measures how much of position, angle and "
        "size the 16 dimensions of a capsule contain, compared with the 48 units of the CNN's last hidden layer. This "
        "experiment is not in the paper; it measures what talks about capsule networks illustrate."
    )
    columns = {  # noqa: RUF012
        "false_alarm_face_percent": "scrambled as face, %",
        "false_alarm_house_percent": "… house, %",
        "false_alarm_boat_percent": "… boat, %",
        "auc": "AUC whole/scrambled",
        "one_error_percent": "one object, error %",
        "crowded_error_percent": "crowded, error %",
        "upside_down_error_percent": "one upside down, error %",
        "r2_position": "R² position",
        "r2_angle": "R² angle",
        "r2_size": "R² size",
    }

    def rows(self, budget: Budget, seed: int) -> list[Row]:
        plan = PLANS[budget]
        capsnet = f"capsule of the true class ({plan.capsnet.class_dim})"
        cnn = f"last hidden layer ({plan.cnn.hidden[-1]})"
        return [
            Row("capsnet", trained_as(plan, plan.capsnet, seed), cells("capsnet", capsnet)),
            Row(
                "capsnet-no-decoder",
                trained_as(plan, replace(plan.capsnet, decoder=()), seed),
                cells("capsnet-no-decoder", capsnet),
            ),
            Row("cnn", trained_as(plan, plan.cnn, seed), cells("cnn", cnn)),
        ]

    def measure(self, row: Row, result: Result) -> dict[str, Any]:
        model, n = result.model, len(result.splits.test)
        whole, chosen = look(model, scenes("one", n)), thresholds(model, n)
        return {
            **alarms(whole, look(model, scenes("scrambled", n)), chosen.detecting),
            **sets(whole, look(model, scenes("crowded", n)), look(model, scenes("upside-down", n)), chosen.deciding),
            **read_out(look(model, scenes("one", n, purpose="fitting the read-out")), whole),
            "threshold_detecting": named(chosen.detecting),
            "threshold_deciding": named(chosen.deciding),
            "parameters_without_decoder": size_without_decoder(model),
            "tested_on": n,
        }

    def draw(self, row: Row, result: Result | None) -> dict[str, Figure]:
        from capsnet.report.figures.gallery import gallery

        assert result is not None
        deciding = thresholds(result.model, len(result.splits.test)).deciding
        lines = {}
        for kind in ("one", "scrambled", "crowded", "upside-down"):
            some = scenes(kind, 9, purpose="shown")
            batch, seen = some.gather(some.numbers()), look(result.model, some)
            lines[kind] = (batch.images, captions_of(seen.lengths >= deciding, batch.labels))
        note = "Predicted classes below each scene; errors in orange."
        return {"scenes": gallery(f"Predictions: {NETWORKS[row.method]}", note, lines)}

    def pictures(self, records: Sequence[Record]) -> dict[str, Figure]:
        from capsnet.report.figures.outcomes import bars, lines

        alarm = {f"“{name}”": as_bars(records, f"false_alarm_{name}_percent") for name in CLASSES}
        error = {
            "one object": as_bars(records, "one_error_percent"),
            "crowded": as_bars(records, "crowded_error_percent"),
            "one upside down": as_bars(records, "upside_down_error_percent"),
        }
        pose = {name: as_bars(records, f"r2_{name}") for name in TARGETS}
        curves = [roc_panel(records, name) for name in CLASSES]
        return {
            "false-alarms": bars("False alarms on scrambled objects", "At 95 % detection of whole objects.", alarm),
            "roc": lines("Detection against false alarms", "Towards the upper left is better.", curves),
            "sets": bars("Scenes with a wrong set of classes", "No object was upside down in training.", error),
            "read-out": bars("Pose recovered by a linear read-out", "R²; 1 is perfect.", pose, unit="R²"),
        }

    def captions(self) -> Mapping[str, str]:
        return {
            "scenes": "Scenes of four kinds with the predicted classes; errors are orange. For scrambled parts, any "
            "prediction is wrong.",
            "false-alarms": "Scrambled objects classified as whole ones, by class; lower is better.",
            "roc": "Detection rate of whole objects against false alarms on scrambled ones, over all thresholds.",
            "sets": "Scenes whose predicted classes are not exactly the true ones.",
            "read-out": "Ridge regression from the capsule of the true class (16 dimensions) or the CNN's last hidden "
            "layer (48 units) to the true pose, on held-out scenes.",
        }

    def findings(self, records: Sequence[Record]) -> list[str]:
        told = {
            "Whole faces detected": ("detection_face_percent", " %"),
            "Scrambled faces classified as faces": ("false_alarm_face_percent", " %"),
            "Scrambled parts classified as houses": ("false_alarm_house_percent", " %"),
            "Scrambled parts classified as boats": ("false_alarm_boat_percent", " %"),
            "Error on crowded scenes": ("crowded_error_percent", " %"),
            "Error on crowded scenes with one object upside down": ("upside_down_error_percent", " %"),
            **{f"R² of the {name}, linear read-out": (f"r2_{name}", "") for name in TARGETS},
        }
        return [f"{what}: {side_by_side(records, name, unit)}." for what, (name, unit) in told.items()]

    def claims(self, records: Sequence[Record], budget: str) -> list[Claim]:
        groups = {group[0].method: group for group in by_method(records)}
        if not {"capsnet", "cnn"} <= set(groups):
            return []
        claimed = {
            "Scrambled faces classified as faces: fewer by CapsNet than by a CNN": "false_alarm_face_percent",
            "Upside-down objects, never seen: CapsNet beats a CNN": "upside_down_error_percent",
        }
        return [
            lower(claim, "–", *(measured(groups[kind], name) for kind in ("capsnet", "cnn")))
            for claim, name in claimed.items()
        ]


def trained_as(plan: Plan, model: ModelConfig, seed: int) -> Config:
    """The training of all networks: margin loss, AdamW, one-cycle learning rate."""
    return Config(
        data=f"parts:train={plan.train},test={plan.test}", validation=plan.test // 5, epochs=plan.epochs, seed=seed,
        batch_size=plan.batch_size, optimizer="adamw", lr=plan.lr, schedule="one-cycle", weight_decay=0.01,
        model=model, loss=LossConfig(kind="margin" if model.kind == "cnn" else "auto"),
    )  # fmt: skip


def cells(method: str, numbers: str) -> dict[str, str]:
    return {"network": NETWORKS[method], "pose read from": numbers}


def captions_of(predicted: Tensor, true: Tensor) -> list[Caption]:
    """The predicted classes of each scene, one per line; both bool (n, j)."""
    from capsnet.report.figures import VERMILLION
    from capsnet.report.figures.gallery import Caption

    captions = []
    for names, present in zip(predicted, true, strict=True):
        words = [name for name, named in zip(CLASSES, names, strict=True) if named] or ["nothing"]
        right = bool((names == present).all())
        captions.append(Caption("\n".join(words)) if right else Caption("\n".join(words), VERMILLION))
    return captions


def side_by_side(records: Sequence[Record], name: str, unit: str) -> str:
    """The mean of a measured number over seeds, for every network."""
    found = [(group[0].method, average(group, name)) for group in by_method(records)]
    return ", ".join(f"{LABELS[method]} {value:.2f}{unit}" for method, value in found if value is not None)


def as_bars(records: Sequence[Record], name: str) -> list[Any]:
    """A bar for each network, with the deviation over seeds."""
    from capsnet.report.figures.outcomes import PALETTE, Bar

    groups = {group[0].method: group for group in by_method(records)}
    return [
        Bar.over_seeds(LABELS[method], values(group, name), PALETTE[COLOURS[method]])
        for method, group in groups.items()
    ]


def roc_panel(records: Sequence[Record], name: str) -> Any:
    """The curves of one class: a line per network, of its first seed."""
    from capsnet.report.figures.outcomes import PALETTE, Line, Panel

    curves = []
    for first, *_ in by_method(records):
        method, curve = first.method, first.outcome[f"roc_{name}"]
        colour = PALETTE[COLOURS[method]]
        curves.append(Line(LABELS[method], curve["false_alarm_percent"], curve["found_percent"], colour))
    return Panel(f"“{name}”", "false alarms, %", "detected, %", curves, from_zero=True)


# --- Predictions -----------------------------------------------------------------------------------------


class Seen(NamedTuple):
    """A network's output for n scenes: lengths (n, j), features to read the pose from, and the true objects.

    numbers: (n, j, q) poses of all class capsules, or (n, h), the last hidden layer of a CNN.
    """

    lengths: Tensor
    numbers: Tensor
    objects: Objects


@torch.inference_mode()
def look(model: Model, shown: Scenes) -> Seen:
    """A network's outputs for scenes, on the CPU."""
    model.eval()
    everything = shown.numbers()
    parts = [answer(model, shown.gather(index).images.to(model.device)) for index in everything.split(250)]
    lengths, numbers = (torch.cat(column).double() for column in zip(*parts, strict=True))
    return Seen(lengths, numbers, shown.objects(everything))


def answer(model: Model, images: Tensor) -> tuple[Tensor, Tensor]:
    """Lengths (b, j), and the features that the pose is read from."""
    output = model(images)
    found = output.activations if output.logits is None else output.logits.sigmoid()
    return found.cpu(), features(model, images, output.poses).cpu()


# --- Thresholds, false alarms, sets ----------------------------------------------------------------------------


class Thresholds(NamedTuple):
    """Lengths (j,) above which a class counts as present, chosen on validation scenes."""

    detecting: Tensor  # detects 95 % of single whole objects
    deciding: Tensor  # fewest errors per class on scenes as in training


def thresholds(model: Model, n: int) -> Thresholds:
    alone = look(model, scenes("one", n, purpose="validation"))
    mixed = look(model, scenes("training", n, purpose="validation"))
    detecting = [torch.quantile(of_class(alone, j), 1 - DETECTION) for j in range(len(CLASSES))]
    deciding = [best_threshold(mixed.lengths[:, j], mixed.objects.labels[:, j]) for j in range(len(CLASSES))]
    return Thresholds(torch.stack(detecting), torch.stack(deciding))


def of_class(seen: Seen, j: int) -> Tensor:
    """Lengths of capsule j in single-object scenes with the parts of class j."""
    return seen.lengths[has_parts(seen.objects, j), j]


def has_parts(objects: Objects, j: int) -> Tensor:
    """bool (n,): the first object has the parts of class j; scrambled boats and houses have the same."""
    same_parts = torch.tensor([[True, True, False], [True, True, False], [False, False, True]])
    kind = objects.kinds[:, 0]
    return torch.where(objects.scrambled, same_parts[j][kind], kind == j)


def best_threshold(lengths: Tensor, present: Tensor) -> Tensor:
    """The threshold with the fewest errors, halfway between two lengths: (n,), bool (n,) → ()."""
    order = lengths.argsort()
    lengths, present = lengths[order], present[order].long()
    missed = torch.cat([present.new_zeros(1), present.cumsum(0)])  # with the threshold before length k
    alarms = torch.cat([(1 - present).flip(0).cumsum(0).flip(0), present.new_zeros(1)])
    wrong = missed + alarms
    padded = torch.cat([lengths.new_zeros(1), lengths, lengths.new_ones(1)])
    least = (wrong == wrong.min()).nonzero().flatten()
    k = least[len(least) // 2]  # the middle one of several equally good ones
    return (padded[k] + padded[k + 1]) / 2


def alarms(whole: Seen, scrambled: Seen, detecting: Tensor) -> dict[str, Any]:
    """Detection of whole objects and false alarms on scrambled ones per class, with AUCs."""
    outcome: dict[str, Any] = {}
    areas = []
    for j, name in enumerate(CLASSES):
        real, fake = of_class(whole, j), of_class(scrambled, j)
        called = int((fake >= detecting[j]).sum())
        areas.append(auc(real, fake))
        low, high = wilson_interval(called, len(fake))
        outcome |= {
            f"detection_{name}_percent": percent((real >= detecting[j]).double().mean()),
            f"false_alarm_{name}_percent": percent(called / len(fake)),
            f"false_alarm_{name}_percent_interval_95": [percent(low), percent(high)],
            f"auc_{name}": round(areas[-1], 4),
            f"roc_{name}": roc(real, fake),
        }
    return outcome | {"auc": round(sum(areas) / len(areas), 4)}


def auc(real: Tensor, fake: Tensor) -> float:
    """The probability that a whole object has a greater length than a scrambled one; ties count half.

    >>> auc(torch.tensor([0.9, 0.8]), torch.tensor([0.1, 0.8]))
    0.875
    """
    fake = fake.sort().values
    below = torch.searchsorted(fake, real.contiguous())
    not_above = torch.searchsorted(fake, real.contiguous(), right=True)
    return float((below + not_above).double().mean() / 2 / len(fake))


def roc(real: Tensor, fake: Tensor) -> dict[str, list[float]]:
    """False alarms, in percent, at evenly spaced shares of whole objects found."""
    found = torch.linspace(0, 1, 41, dtype=torch.double)
    at = torch.quantile(real.double(), 1 - found)
    false = (fake[None, :] >= at[:, None]).double().mean(1)
    return {"found_percent": [percent(x) for x in found], "false_alarm_percent": [percent(x) for x in false]}


def sets(whole: Seen, crowded: Seen, upside_down: Seen, deciding: Tensor) -> dict[str, Any]:
    """Scenes with a wrong set of classes, and the share of upside-down and other objects detected."""
    outcome: dict[str, Any] = {}
    for name, seen in (("one", whole), ("crowded", crowded), ("upside_down", upside_down)):
        wrong = ((seen.lengths >= deciding) != seen.objects.labels).any(1)
        low, high = wilson_interval(int(wrong.sum()), len(wrong))
        outcome[f"{name}_error_percent"] = percent(wrong.double().mean())
        outcome[f"{name}_error_percent_interval_95"] = [percent(low), percent(high)]
    objects = upside_down.objects
    found = (upside_down.lengths >= deciding).gather(1, objects.kinds)  # in the order of the objects
    outcome["found_on_their_head_percent"] = percent(found[:, 0].double().mean())
    outcome["found_beside_them_percent"] = percent(found[:, 1:][objects.present[:, 1:]].double().mean())
    return outcome


def percent(share: float | Tensor) -> float:
    return round(100 * float(share), 3)


def named(each: Tensor) -> dict[str, float]:
    """A number per class, by name."""
    return {name: round(float(value), 4) for name, value in zip(CLASSES, each, strict=True)}


def size_without_decoder(model: Model) -> int:
    return sum(p.numel() for name, p in model.named_parameters() if not name.startswith("decoder."))


# --- Linear read-out of the pose -------------------------------------------------------------------------------


def read_out(fitted_on: Seen, judged_on: Seen) -> dict[str, Any]:
    """R² of position, angle and size; for a capsule network also from all its class capsules."""
    fitted, judged = reading(fitted_on), reading(judged_on)
    outcome = {f"r2_{name}": round(value, 4) for name, value in r_squared(fitted, judged, TARGETS).items()}
    outcome["numbers_read"] = fitted.numbers.shape[-1]
    if fitted.numbers.dim() == 3:
        found = r_squared(fitted.of_all_capsules, judged.of_all_capsules, TARGETS)
        outcome |= {f"r2_{name}_all_capsules": round(value, 4) for name, value in found.items()}
    return outcome


def reading(seen: Seen) -> Reading:
    """What is read from scenes with one object."""
    return Reading(seen.numbers, seen.objects.kinds[:, 0], pose_targets(seen.objects.poses[:, 0].double()))


def pose_targets(poses: Tensor) -> Tensor:
    """x, y, sine and cosine of the angle, size: (m, 4) → (m, 5). The angle itself is discontinuous."""
    x, y, angle, size = poses.unbind(1)
    return torch.stack([x, y, angle.sin(), angle.cos(), size], 1)
