"""Turn a trained run into a shipped model.

    python tools/ship.py runs/quick-0 quick-mnist --others runs/quick-1 runs/quick-2
    python tools/ship.py runs/paper-b paper-mnist --earlier runs/paper-a        b continued from a

Of several runs that differ only in their seed, the one with the lowest validation error is shipped (the lowest seed
breaks ties, and decides if there were no validation images). Its matrices are stored in half precision if no prediction
on the validation and test images changes; otherwise the stem stays in full precision, and if that is not enough only
the decoder is halved, which makes no predictions. Weights and card go to src/capsnet/weights.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from capsnet.cli.inputs import splits_for
from capsnet.data import Dataset, Examples, Splits
from capsnet.errors import UserError, unknown
from capsnet.evaluate import Evaluation, evaluate
from capsnet.files import sha256, write_bytes
from capsnet.io import checkpoint, zoo
from capsnet.io.records import Card, Certificate, Weights
from capsnet.models.base import Model
from capsnet.train.config import Config
from capsnet.train.config_records import from_dict

MOST_MISTAKES = 2000
STRESSED = 2000  # test images on which a change is tried
LARGEST_HALF = 60_000.0  # half precision ends at 65,504
PRECISIONS = {  # tried in this order; what is halved, by how its name begins
    "half": ("",),
    "stem-full": ("primary.", "caps.", "decoder."),
    "mixed": ("decoder.",),
}


@dataclass(frozen=True)
class About:
    """What the card says about a model beyond what was measured."""

    title: str
    weaknesses: tuple[str, ...]
    decoder: bool = True
    """Whether the decoder is shipped; without it a model cannot reconstruct, and predicts the same."""


ONE_OF_TEN = "It always predicts one of its ten classes, even for a blank image; only short capsules indicate doubt."
LIKE_MNIST = (
    "It was trained on upright, centred digits, light on dark. `capsnet predict` prepares photos that way; the Python "
    "interface does not."
)
ABOUT = {
    "quick-mnist": About(
        "Compact capsule network for handwritten digits: the quick preset, trained in float32 on 55,000 digits.",
        (ONE_OF_TEN, LIKE_MNIST),
    ),
    "best-mnist": About(
        "Capsule network with three branches for handwritten digits: the best preset.",
        (
            ONE_OF_TEN,
            LIKE_MNIST,
            "It never saw digits rotated by more than 12° or scaled by more than 12 %.",
        ),
    ),
    "paper-mnist": About(
        "The paper's network with a routing bias, trained on two cores.",
        (
            ONE_OF_TEN,
            LIKE_MNIST,
            "It was not trained as in the paper: it also learnt from the outputs of an earlier best-mnist, with "
            "one-cycle AdamW, averaged weights, a reconstruction loss four times as strong, and besides shifts with "
            "rotation up to 10°, scaling up to 10 %, shear and elastic distortion.",
            "Nearly all of its primary capsules have a length close to 1 and encode presence in their direction, so "
            "maps of their lengths show little.",
        ),
    ),
    "multimnist": About(
        "Capsule network that separates two overlapping digits.",
        (
            "It was trained on images with exactly two different digits.",
            "A prediction counts as correct only if both digits are right; which digit is on top is not predicted.",
            "Its digits were light on black, about 20 pixels each.",
            "`capsnet predict` returns the two longest classes. In Python use `predict(images, top=2)`; without `top` "
            "all classes with a length of at least 0.5 are returned.",
        ),
    ),
    "sync-multimnist": About(
        "Synchronisation network for two overlapping digits: units with amplitude and phase, guided by pixels.",
        (
            "It was trained on images with exactly two different digits, light on black, about 20 pixels each, and saw "
            "which pixels belong to which digit.",
            "Its phases separate the two digits only in part: see `docs/synchrony.md`.",
            "It is meant to be looked at. The most accurate model for two digits is multimnist.",
        ),
    ),
    "expanded-mnist": About(
        "Capsule network trained on digits anywhere in a larger field, to be tested on transformed digits.",
        (ONE_OF_TEN, "It is one half of a comparison with expanded-cnn and not the most accurate model for digits."),
    ),
    "expanded-cnn": About(
        "The CNN that expanded-mnist is compared with: the same digits, no capsules.",
        (ONE_OF_TEN, "It has no poses, no reconstruction and no routing."),
    ),
    "efficient-mnist": About(
        "Efficient-CapsNet for handwritten digits: 161,824 parameters, self-attention routing.",
        (
            ONE_OF_TEN,
            LIKE_MNIST,
            "It cannot reconstruct: the decoder regularised the training and is left out, because it has nine times as "
            "many parameters as the network.",
            "Published figures of this network (99.74 %) kept the best epoch on the test set. Nothing was chosen on "
            "the test set here; the learning rate was chosen on validation digits, after a first training with larger "
            "initial weights had learnt nothing (88.65 % error).",
        ),
        decoder=False,
    ),
    "cifar10": About(
        "Capsules on a residual stem for ten kinds of photographs: the cifar10 preset.",
        (
            ONE_OF_TEN,
            "It was trained on photographs of 32×32 pixels that one object fills; larger photos are reduced to that "
            "size.",
        ),
    ),
    "viewpoints-matrix": About(
        "Matrix capsules with EM routing for five kinds of rendered toys, in stereo: the EM paper's small network.",
        (
            "It always predicts one of its five classes, even for a blank image.",
            "It was trained on rendered toys before a plain background, seen from 30° to 70° above the ground. Its "
            "input is a stereo pair reduced to 32×32 pixels, so it cannot classify photographs.",
            "The validation images show the toys that it was trained on, five of each category; the test images show "
            "other toys, which is much harder.",
        ),
    ),
    "fashion": About(
        "Capsules on a small residual stem for ten kinds of clothing: the cifar10 preset with fewer channels.",
        (
            ONE_OF_TEN,
            "It was trained on single items, light on black, 28 pixels wide; it fails on photos.",
        ),
    ),
}


@dataclass(frozen=True)
class Trained:
    """A finished run with its data and errors."""

    folder: Path
    config: Config
    birth: Certificate
    model: Model
    splits: Splits
    test: Evaluation
    validation: Evaluation | None

    @property
    def rank(self) -> tuple[float, int]:
        """The run with the lowest rank is shipped."""
        return self.validation.error_percent if self.validation else math.inf, self.config.seed


def open_run(folder: Path) -> Trained:
    """Load a run (or the best trial of a search), split its data as in training, and evaluate it."""
    print(f"{folder}: opening", file=sys.stderr)
    model, birth = checkpoint.load(folder), checkpoint.birth_of(folder)
    splits = splits_for(model, str(folder), None)
    held_back = evaluate(model, splits.validation) if len(splits.validation) else None
    test = evaluate(model, splits.test)
    return Trained(folder, from_dict(birth.config), birth, model, splits, test, held_back)


def check_alike(runs: list[Trained]) -> None:
    """Refuse runs that differ in more than their seed."""
    for run in runs[1:]:
        if replace(run.config, seed=0, device="") != replace(runs[0].config, seed=0, device=""):
            raise UserError(f"{run.folder} differs from {runs[0].folder} in more than its seed: ship them separately.")
    if len({run.config.seed for run in runs}) < len(runs):
        raise UserError("two of these runs have the same seed: list each run once.")


def halve(tensors: dict[str, Tensor], begin: tuple[str, ...] = ("",)) -> dict[str, Tensor]:
    """Convert matrices and kernels to half precision; biases, norms and values beyond its range stay as they are."""
    matrices = {n: t for n, t in tensors.items() if n.startswith(begin) and t.is_floating_point() and t.dim() > 1}
    small = {name for name, tensor in matrices.items() if tensor.abs().max() < LARGEST_HALF}
    return {name: tensor.half() if name in small else tensor for name, tensor in tensors.items()}


def write_weights(run: Trained, path: Path, precision: str, decoder: bool = True) -> Model:
    """Write the run's weights in a precision, with its decoder or without, and load them again."""
    tensors, record = checkpoint.read_tensors(checkpoint.model_file(run.folder))
    if not decoder:
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("decoder.")}
        record = record | {"model": record["model"] | {"decoder": []}}
    checkpoint.write_tensors(path, halve(tensors, PRECISIONS[precision]), record)
    if path.stat().st_size > zoo.MOST_BYTES:
        raise UserError(
            f"the weights take {path.stat().st_size:,} bytes, more than the {zoo.MOST_BYTES:,} to be shipped."
        )
    return checkpoint.load(path)


def changed(before: Evaluation | None, after: Evaluation | None) -> int:
    """Number of images whose predicted classes differ."""
    return int((before.predicted != after.predicted).any(1).sum()) if before and after else 0


def stress(model: Model, test: Examples) -> str | None:
    """A sentence with the errors on images that the model was not trained for."""
    if test.multi_label:
        return None
    batch = test.gather(torch.arange(min(STRESSED, len(test))))
    some = Dataset((255 * batch.images).round().to(torch.uint8), batch.labels, test.classes, test.name)
    changes: dict[str, Callable[[Tensor], Tensor]] = {
        "unchanged": lambda x: x,
        "rotated by 30°": lambda x: rotate(x, 30),
        "at half size": lambda x: rotate(x, 0, scale=2.0),
        "dark on light" if batch.images.shape[1] == 1 else "with inverted colours": lambda x: 255 - x,
    }
    found = [
        f"{evaluate(model, replace(some, images=change(some.images))).error_percent:.1f} % {how}"
        for how, change in changes.items()
    ]
    return f"Error on the first {len(some):,} test images: {', '.join(found)}."


def rotate(images: Tensor, degrees: float, scale: float = 1.0) -> Tensor:
    """Rotate uint8 images (n, c, h, w), and shrink them by `scale`."""
    a = math.radians(degrees)
    matrix = scale * torch.tensor([[math.cos(a), -math.sin(a), 0.0], [math.sin(a), math.cos(a), 0.0]])
    grid = torch.nn.functional.affine_grid(matrix.expand(len(images), 2, 3), list(images.shape), align_corners=False)
    moved = torch.nn.functional.grid_sample(images.float(), grid, align_corners=False)
    return moved.round().clamp(0, 255).to(torch.uint8)


def confusions(test: Evaluation) -> str | None:
    """A sentence with the most frequent confusions."""
    if test.multi_label or not test.errors:
        return None
    off = test.confusion - test.confusion.diag().diag()
    worst = off.flatten().topk(min(3, int((off > 0).sum()))).indices.tolist()
    pairs = [(test.classes[k // len(off)], test.classes[k % len(off)], int(off.flatten()[k])) for k in worst]
    said = ", ".join(f"{true} as {named} ({times}×)" for true, named, times in pairs)
    return f"Most frequent confusions: {said}, of {test.errors} errors on {test.n:,} images."


def seeds(runs: list[Trained], chosen: Trained) -> list[dict[str, Any]]:
    """Every seed with its errors; the time is that of its last stage."""
    return [
        {
            "seed": run.config.seed,
            "validation_error_percent": round(run.validation.error_percent, 4) if run.validation else None,
            "test_error_percent": round(run.test.error_percent, 4),
            "seconds": run.birth.seconds,
            "shipped": run is chosen,
        }
        for run in sorted(runs, key=lambda run: run.config.seed)
    ]


def legs(earlier: Sequence[Path], last: Trained) -> list[dict[str, Any]]:
    """The stages of a training, each from the weights of the one before, with a fresh optimiser state."""
    births = [*(checkpoint.birth_of(folder) for folder in earlier), last.birth]
    return [{name: getattr(birth, name) for name in ("epochs", "steps", "seconds", "config")} for birth in births]


def make_card(
    name: str,
    runs: list[Trained],
    chosen: Trained,
    model: Model,
    parts: dict[str, Any],
    earlier: Sequence[Path],
    weights: Weights,
) -> Card:
    """The card: what `capsnet models NAME`, docs/models.md and the Lab show."""
    trained = legs(earlier, chosen)
    birth, test, validation = chosen.birth, parts["test"], parts["validation"]
    measured = [sentence for sentence in (confusions(test), stress(model, chosen.splits.test)) if sentence]
    return Card(
        name=name,
        title=ABOUT[name].title,
        data=chosen.config.data,
        image_shape=model.config.image_shape,
        classes=model.classes,
        multi_label=model.multi_label,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        training_images=birth.training_images or 0,
        seed=chosen.config.seed,
        epochs=round(sum(leg["epochs"] for leg in trained), 4),
        training_seconds=round(sum(leg["seconds"] for leg in trained), 1),
        legs=tuple(trained) if earlier else (),
        validation=validation.summary() if validation else None,  # None: trained on all training images
        test=test.summary(),
        mistakes=tuple(test.wrong.nonzero()[:MOST_MISTAKES, 0].tolist()),
        weaknesses=(*ABOUT[name].weaknesses, *measured),
        chosen_by=chosen_by(len(runs), validation is not None),
        seeds=tuple(seeds(runs, chosen)),
        certificate=birth,
        weights=weights,
    )


def chosen_by(runs: int, validated: bool) -> str:
    if runs == 1:
        return "the only seed"
    return "lowest validation error" if validated else "lowest seed: no validation images"


def stored(run: Trained, file: Path, decoder: bool) -> tuple[str, Model, dict[str, Evaluation | None]]:
    """Store the weights in the smallest precision that changes no prediction: precision, model and evaluations."""
    before = {"test": run.test, "validation": run.validation}
    for precision in PRECISIONS:
        model = write_weights(run, file, precision, decoder)
        after = {n: evaluate(model, getattr(run.splits, n)) if was else None for n, was in before.items()}
        differ = sum(changed(before[n], after[n]) for n in before)
        if not differ:
            return precision, model, after
        print(f"{run.folder}: {precision} precision changes {differ} predictions", file=sys.stderr)
    raise UserError(f"{run.folder} changes its predictions when stored, in every precision: investigate that first.")


def ship(folders: list[Path], name: str, earlier: Sequence[Path] = ()) -> Card:
    """Select, halve, check and write. The card is written last, so a listed model always has its weights."""
    if name not in ABOUT:
        raise unknown("model to ship", name, ABOUT)
    runs = [open_run(folder) for folder in folders]
    check_alike(runs)
    chosen = min(runs, key=lambda run: run.rank)
    print(f"{chosen.folder}: selected from {len(runs)}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "weights.safetensors"
        precision, model, parts = stored(chosen, file, ABOUT[name].decoder)
        weights = Weights(sha256(file), file.stat().st_size, precision)
        card = make_card(name, runs, chosen, model, parts, earlier, weights)
        write_bytes(zoo.FOLDER / f"{name}.safetensors", file.read_bytes())
    checkpoint.write_json(zoo.FOLDER / f"{name}.json", card.to_json())
    return card


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a finished run")
    parser.add_argument("name", help=", ".join(ABOUT))
    parser.add_argument("--others", type=Path, nargs="*", default=[], help="the same training with other seeds")
    parser.add_argument("--earlier", type=Path, nargs="*", default=[], help="runs that it continued from")
    flags = parser.parse_args()
    try:
        card = ship([flags.run, *flags.others], flags.name, flags.earlier)
    except UserError as error:
        print(f"ship: {error}", file=sys.stderr)
        return 2
    test, weights = card.test, card.weights
    print(
        f"{card.name}: seed {card.seed}, {test['errors']} of {test['n']:,} test images wrong, "
        f"{weights.bytes:,} bytes in {weights.precision} precision"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
