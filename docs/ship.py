"""Make a trained run into a model that comes with the package.

    python docs/ship.py runs/quick-0 quick-mnist --others runs/quick-1 runs/quick-2
    python docs/ship.py runs/paper-b paper-mnist --earlier runs/paper-a        b began with the weights of a

Of the run and the others, which differ in their seed alone, the one with the lowest validation error is shipped (ties,
and where nothing was held back to validate on: the lowest seed). Its matrices are stored in half precision, once it is
certain that not one prediction on the validation and test parts changes; where one does, those of the stem stay as they
are, and where that does not help only the decoder's are halved, from which nothing is predicted. Written are the
weights and the card under src/capsnet/weights, and the card again as results/models/NAME.json, from which the tables
are made.
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

from capsnet import checkpoint, zoo
from capsnet.cli.use import birth_of, splits_for
from capsnet.config import Config, from_dict
from capsnet.data import Dataset, Examples, Splits
from capsnet.errors import UserError, unknown
from capsnet.evaluation import Evaluation, evaluate
from capsnet.models.registry import Model

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results" / "models"
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
    """What a person should know about a model before using it, and no run's file says."""

    title: str
    weaknesses: tuple[str, ...]


ONE_OF_TEN = "It names one of its ten classes whatever it is shown, blank paper included; only its lengths can warn."
LIKE_MNIST = "Its digits were upright, light on dark and centred; `predict` prepares photos so, Python does not."
ABOUT = {
    "quick-mnist": About(
        "A compact capsule network that reads handwritten digits: the quick preset, in float32 and on 55,000 digits.",
        (ONE_OF_TEN, LIKE_MNIST),
    ),
    "best-mnist": About(
        "A capsule network of three branches that reads handwritten digits: the best preset.",
        (
            ONE_OF_TEN,
            LIKE_MNIST,
            "It has seen no digit turned by more than 12° or scaled by more than 12 %.",
        ),
    ),
    "paper-mnist": About(
        "The paper's network with a routing bias, trained on two cores.",
        (
            ONE_OF_TEN,
            LIKE_MNIST,
            "Its training is not the paper's: it learnt from the lengths of an earlier best-mnist besides the "
            "labels, by one-cycle AdamW with averaged weights and a reconstruction four times as heavy, and besides "
            "shifts from rotations of up to 10°, scalings of up to 10 %, slants and bends.",
            "Its primary capsules are nearly all close to length 1: whether a part is there they tell by their "
            "directions, so that maps of their lengths show little.",
        ),
    ),
    "multimnist": About(
        "A capsule network that takes two digits apart which lie on top of each other.",
        (
            "It was shown two different digits in every image, never one, three or a pair of the same.",
            "Counted as right is only the exact pair; which digit lies on top it does not say.",
            "Its digits were light on black, about 20 pixels each; photos of pairs are only scaled, not prepared.",
            "`capsnet predict` names the two longest classes; in Python that is `predict(images, top=2)`, and without "
            "it all that are at least 0.5 long.",
        ),
    ),
    "expanded-mnist": About(
        "A capsule network trained on digits anywhere in a larger field, to be tried on digits bent as it never saw.",
        (ONE_OF_TEN, "It is one half of a comparison (with expanded-cnn), not the best reader of digits."),
    ),
    "expanded-cnn": About(
        "The convolutional network beside expanded-mnist: the same digits, no capsules.",
        (ONE_OF_TEN, "It has no poses, no reconstruction and no routing to look into."),
    ),
    "fashion": About(
        "A compact capsule network that tells ten kinds of clothing apart.",
        (ONE_OF_TEN, "It knows single articles, light on black, 28 pixels wide: no photos with a background."),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Trained:
    """A finished run, with what is needed to judge and to ship it."""

    folder: Path
    config: Config
    birth: dict[str, Any]
    model: Model
    splits: Splits
    test: Evaluation
    validation: Evaluation | None

    @property
    def rank(self) -> tuple[float, int]:
        """Runs are chosen by this, the lowest first."""
        return self.validation.error_percent if self.validation else math.inf, self.config.seed


def open_run(folder: Path) -> Trained:
    """A run's model (or that of a search's best trial), its data as they were split then, and its errors."""
    print(f"{folder}: opening", file=sys.stderr)
    model, birth = checkpoint.load(folder), birth_of(str(folder))
    splits = splits_for(model, str(folder), None)
    held_back = evaluate(model, splits.validation) if len(splits.validation) else None
    test = evaluate(model, splits.test)
    return Trained(folder, from_dict(birth["config"]), birth, model, splits, test, held_back)


def check_alike(runs: list[Trained]) -> None:
    """Seeds of one and the same training, or nothing that could be chosen among."""
    for run in runs[1:]:
        if replace(run.config, seed=0, device="") != replace(runs[0].config, seed=0, device=""):
            raise UserError(f"{run.folder} differs from {runs[0].folder} in more than its seed: ship them apart.")
    if len({run.config.seed for run in runs}) < len(runs):
        raise UserError("two of these runs have the same seed: name each training once.")


def halve(tensors: dict[str, Tensor], begin: tuple[str, ...] = ("",)) -> dict[str, Tensor]:
    """Matrices and kernels in half precision; biases, norms and what would not fit its range as they are."""
    matrices = {n: t for n, t in tensors.items() if n.startswith(begin) and t.is_floating_point() and t.dim() > 1}
    small = {name for name, tensor in matrices.items() if tensor.abs().max() < LARGEST_HALF}
    return {name: tensor.half() if name in small else tensor for name, tensor in tensors.items()}


def write_weights(run: Trained, path: Path, precision: str) -> Model:
    """The run's model in a precision, and that model as it is read back."""
    tensors, record = checkpoint.read_tensors(checkpoint.model_file(run.folder))
    checkpoint.write_tensors(path, halve(tensors, PRECISIONS[precision]), record)
    if path.stat().st_size > zoo.MOST_BYTES:
        raise UserError(
            f"the weights take {path.stat().st_size:,} bytes, more than the {zoo.MOST_BYTES:,} to be shipped."
        )
    return checkpoint.load(path)


def changed(before: Evaluation | None, after: Evaluation | None) -> int:
    """On how many images the named classes differ."""
    return int((before.predicted != after.predicted).any(1).sum()) if before and after else 0


def stress(model: Model, test: Examples) -> str | None:
    """A sentence with the errors on changed images: what a model was not trained for costs how much."""
    if test.multi_label:
        return None
    batch = test.gather(torch.arange(min(STRESSED, len(test))))
    some = Dataset((255 * batch.images).round().to(torch.uint8), batch.labels, test.classes, test.name)
    changes: dict[str, Callable[[Tensor], Tensor]] = {
        "as they are": lambda x: x,
        "turned by 30°": lambda x: turn(x, 30),
        "half as large": lambda x: turn(x, 0, scale=2.0),
        "dark on light": lambda x: 255 - x,
    }
    found = [
        f"{evaluate(model, replace(some, images=change(some.images))).error_percent:.1f} % {how}"
        for how, change in changes.items()
    ]
    return f"Error on the first {len(some):,} test images: {', '.join(found)}."


def turn(images: Tensor, degrees: float, scale: float = 1.0) -> Tensor:
    """uint8 images (n, c, h, w) turned and made smaller by `scale`."""
    a = math.radians(degrees)
    matrix = scale * torch.tensor([[math.cos(a), -math.sin(a), 0.0], [math.sin(a), math.cos(a), 0.0]])
    grid = torch.nn.functional.affine_grid(matrix.expand(len(images), 2, 3), list(images.shape), align_corners=False)
    moved = torch.nn.functional.grid_sample(images.float(), grid, align_corners=False)
    return moved.round().clamp(0, 255).to(torch.uint8)


def confusions(test: Evaluation) -> str | None:
    """A sentence with what is most often taken for what."""
    if test.multi_label or not test.errors:
        return None
    off = test.confusion - test.confusion.diag().diag()
    worst = off.flatten().topk(min(3, int((off > 0).sum()))).indices.tolist()
    pairs = [(test.classes[k // len(off)], test.classes[k % len(off)], int(off.flatten()[k])) for k in worst]
    said = ", ".join(f"{true} for {named} ({times}×)" for true, named, times in pairs)
    return f"Most often it takes {said}, of {test.errors} mistakes in {test.n:,}."


def seeds(runs: list[Trained], chosen: Trained) -> list[dict[str, Any]]:
    """Every seed that was trained, with its errors; the time is that of its last leg."""
    return [
        {
            "seed": run.config.seed,
            "validation_error_percent": round(run.validation.error_percent, 4) if run.validation else None,
            "test_error_percent": round(run.test.error_percent, 4),
            "seconds": run.birth["seconds"],
            "shipped": run is chosen,
        }
        for run in sorted(runs, key=lambda run: run.config.seed)
    ]


def legs(earlier: Sequence[Path], last: Trained) -> list[dict[str, Any]]:
    """The trainings that followed each other, each from the weights of the one before, with fresh optimiser moments."""
    births = [*(birth_of(str(folder)) for folder in earlier), last.birth]
    return [{name: birth[name] for name in ("epochs", "steps", "seconds", "config")} for birth in births]


def make_card(
    name: str, runs: list[Trained], chosen: Trained, model: Model, parts: dict[str, Any], earlier: Sequence[Path]
) -> dict[str, Any]:
    """The card: what `capsnet models NAME`, docs/models.md and the Lab show."""
    trained = legs(earlier, chosen)
    birth, test, validation = chosen.birth, parts["test"], parts["validation"]
    measured = [sentence for sentence in (confusions(test), stress(model, chosen.splits.test)) if sentence]
    return {
        "name": name,
        "title": ABOUT[name].title,
        "data": chosen.config.data,
        "image_shape": list(model.config.image_shape),
        "classes": list(model.classes),
        "multi_label": model.multi_label,
        "parameters": birth["parameters"],
        "training_images": birth["training_images"],
        "seed": chosen.config.seed,
        "epochs": round(sum(leg["epochs"] for leg in trained), 4),
        "training_seconds": round(sum(leg["seconds"] for leg in trained), 1),
        "legs": trained if earlier else [],
        "validation": validation.summary() if validation else None,  # None: it was trained on all training images
        "test": test.summary(),
        "mistakes": test.wrong.nonzero()[:MOST_MISTAKES, 0].tolist(),
        "weaknesses": [*ABOUT[name].weaknesses, *measured],
        "chosen_by": chosen_by(len(runs), validation is not None),
        "seeds": seeds(runs, chosen),
        "config": birth["config"],
        "certificate": birth,
    }


def chosen_by(runs: int, validated: bool) -> str:
    if runs == 1:
        return "the only one trained"
    return "lowest validation error" if validated else "lowest seed: no image was held back"


def stored(run: Trained, file: Path) -> tuple[str, Model, dict[str, Evaluation | None]]:
    """The run's weights in the smallest precision in which no prediction changes: which, the model, and its tests."""
    before = {"test": run.test, "validation": run.validation}
    for precision in PRECISIONS:
        model = write_weights(run, file, precision)
        after = {n: evaluate(model, getattr(run.splits, n)) if was else None for n, was in before.items()}
        differ = sum(changed(before[n], after[n]) for n in before)
        if not differ:
            return precision, model, after
        print(f"{run.folder}: {precision} precision changes {differ} predictions", file=sys.stderr)
    raise UserError(f"{run.folder} predicts otherwise once it is stored, whatever the precision: look into that first.")


def ship(folders: list[Path], name: str, earlier: Sequence[Path] = ()) -> dict[str, Any]:
    """Choose, halve, check, write; the card comes last, so that a name is never there without its weights."""
    if name not in ABOUT:
        raise unknown("model to ship", name, ABOUT)
    runs = [open_run(folder) for folder in folders]
    check_alike(runs)
    chosen = min(runs, key=lambda run: run.rank)
    print(f"{chosen.folder}: chosen, of {len(runs)}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "weights.safetensors"
        precision, model, parts = stored(chosen, file)
        card = make_card(name, runs, chosen, model, parts, earlier)
        content = file.read_bytes()
    weights = zoo.FOLDER / f"{name}.safetensors"
    checkpoint.write_bytes(weights, content)
    card["weights"] = {"sha256": zoo.sha256(weights), "bytes": len(content), "precision": precision}
    checkpoint.write_json(RESULTS / f"{name}.json", card)
    checkpoint.write_json(zoo.FOLDER / f"{name}.json", card)
    return card


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a finished run")
    parser.add_argument("name", help=", ".join(ABOUT))
    parser.add_argument("--others", type=Path, nargs="*", default=[], help="the same training with other seeds")
    parser.add_argument("--earlier", type=Path, nargs="*", default=[], help="what the run began with, the first first")
    flags = parser.parse_args()
    try:
        card = ship([flags.run, *flags.others], flags.name, flags.earlier)
    except UserError as error:
        print(f"ship: {error}", file=sys.stderr)
        return 2
    test, weights = card["test"], card["weights"]
    print(
        f"{card['name']}: seed {card['seed']}, {test['errors']} of {test['n']:,} test images wrong, "
        f"{weights['bytes']:,} bytes in {weights['precision']} precision"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
