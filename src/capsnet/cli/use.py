"""capsnet evaluate, predict and reconstruct: what a trained model is for."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import Tensor
from tyro.conf import arg

from capsnet import checkpoint, data, training, zoo
from capsnet.cli.flags import ImageNames, MaybeFloat, MaybeInt, MaybePath, MaybeStr, ModelName, Switch, parse
from capsnet.config import Config, from_dict
from capsnet.data import multimnist, options
from capsnet.data.datasets import DEFAULT_VALIDATION, fingerprint, same_images
from capsnet.data.folder import pictures
from capsnet.errors import UserError, unknown
from capsnet.evaluation import check_names, evaluate, name_classes
from capsnet.models import CapsNet, Model
from capsnet.models.base import PRESENT
from capsnet.terminal import Counter, print_table, say


@dataclass(frozen=True)
class Evaluate:
    """Count a model's errors on a data set it has not been trained on.

    Examples:
      capsnet evaluate runs/demo
      capsnet evaluate runs/demo --data mnist --json
    """

    model: ModelName
    """A shipped model's name (see `capsnet models`), a run's folder or a .safetensors file."""
    data: MaybeStr = None
    """A name from `capsnet data list`, with its options (default: what the model was trained on)."""
    split: Literal["test", "validation", "train"] = "test"
    """Which part of it."""
    top: MaybeInt = None
    """With several labels an image: name this many longest classes (default: as many as every image has)."""
    threshold: MaybeFloat = None
    """With several labels an image: name all classes that are at least this long (default: 0.5 where no top is)."""
    batch_size: int = 250
    """Images in a batch; of no consequence for the result."""
    device: str = "auto"
    """auto, cpu, cuda or mps."""
    json: Switch = False
    """Print JSON: n, errors, error_percent and more."""


def evaluate_verb(argv: list[str]) -> int:
    flags = parse(Evaluate, "evaluate", argv)
    check_naming(flags.top, flags.threshold)
    model = checkpoint.load(flags.model, training.choose_device(flags.device))
    dataset = getattr(splits_for(model, flags.model, flags.data), flags.split)
    if not len(dataset):
        raise UserError(f"{dataset.name} has no {flags.split} part here; choose another --split.")
    check_names(model, dataset)
    with Counter("evaluating") as counter:
        found = evaluate(
            model,
            dataset,
            batch_size=flags.batch_size,
            top=flags.top,
            threshold=flags.threshold,
            on_batch=counter,
        )
    summary = {"model": flags.model, "split": flags.split, **found.summary()}
    if flags.json:
        print(json.dumps(summary))
        return 0
    low, high = summary["error_percent_interval_95"]
    print(
        f"{flags.model} on {summary['data']} ({flags.split}): {summary['errors']} of {summary['n']:,} wrong, "
        f"error {summary['error_percent']:.2f} % (95 % interval {low:.2f} to {high:.2f} %)"
    )
    if "error_percent_by_class" in summary and len(found.classes) <= 30:
        print_table(["class", "error %"], [(k, f"{v:.2f}") for k, v in summary["error_percent_by_class"].items()])
    return 0


def birth_of(model: str) -> dict[str, Any]:
    """A model's birth certificate, from its own header."""
    _, record = checkpoint.read_tensors(checkpoint.model_file(model))
    birth = record.get("certificate")
    return birth if isinstance(birth, dict) else {}


def training_config(model: str) -> Config | None:
    """The config that a model was trained with."""
    config = birth_of(model).get("config")
    return from_dict(config) if isinstance(config, dict) else None


def splits_for(model: Model, path: str, name: str | None) -> data.Splits:
    """The data set asked for, or the one a model was trained on, split as it was then, in the model's image size."""
    config = training_config(path)
    if config is None and name is None:
        raise UserError(f"{path} does not say what it was trained on: name a data set with --data, or pass images.")
    channels, height, width = model.config.image_shape
    config = config or Config()
    name = name or config.data
    same = same_images(name) == same_images(config.data)  # a digit is held back in whatever is made of it
    splits = data.load(
        name, validation=config.validation if same else DEFAULT_VALIDATION, validation_choice=config.validation_choice,
        seed=config.seed, train_limit=config.train_limit if same else 0, image_size=(height, width), channels=channels,
    )  # fmt: skip
    then = birth_of(path).get("images")
    if then and same and fingerprint(splits, name) != then:
        say(f"{name} has changed since {path} was trained: some of the images may be among those it has learnt from")
    return splits


@dataclass(frozen=True)
class Predict:
    """Say what is in images: files, folders, or - for one image on stdin.

    For a model of MNIST's digits, one in an image, a photo or drawing is prepared as MNIST was made: grey, inverted if
    it is dark on light, cropped to the ink, scaled into 20×20 and centred by its mass in 28×28. --raw only scales it.
    A model of overlapping pairs names its two longest classes, and takes images that are light on black already.

    Examples:
      capsnet predict runs/demo photo.png
      capsnet predict runs/demo scans/ --json
    """

    model: ModelName
    """A shipped model's name (see `capsnet models`), a run's folder or a .safetensors file."""
    images: ImageNames
    """Image files, folders of them, or - for stdin."""
    raw: Switch = False
    """Do not prepare images as MNIST was made; only scale them to the model's size."""
    top: MaybeInt = None
    """Name this many longest classes (default: 1; 2 for a model that was shown two in every image)."""
    threshold: MaybeFloat = None
    """Name all classes that are at least this long instead (default, where the number of labels differs: 0.5)."""
    device: str = "auto"
    """auto, cpu, cuda or mps."""
    json: Switch = False
    """Print JSON, one object with a list of predictions."""


def predict(argv: list[str]) -> int:
    flags = parse(Predict, "predict", argv)
    model = checkpoint.load(flags.model, training.choose_device(flags.device))
    config = training_config(flags.model)
    side = 0 if flags.raw else digit_side(config)
    top, threshold = naming(model, config, flags)
    names = list_images(flags.images)
    rows, failures = [], []
    with Counter("predicting") as counter:
        for done, name in enumerate(names, 1):
            try:
                rows.append(predict_one(model, name, side, top, threshold))
            except UserError as error:
                named = "stdin" if name == "-" else name
                failures.append(str(error) if named in str(error) else f"{named}: {error}")
            counter(done, len(names))
    for failure in failures:
        say(f"capsnet: {failure}")
    if flags.json:
        print(json.dumps({"model": flags.model, "predictions": rows, "errors": failures}))
    elif rows:
        print_table(
            ["image", "is", "lengths"],
            [(r["file"], ", ".join(r["labels"]) or "nothing", longest(r["lengths"])) for r in rows],
        )
        if side:
            how = rows[0]["prepared"].rstrip(".") if len(rows) == 1 else "--json says how each"
            say(f"prepared as MNIST was made ({how}); --raw turns that off.")
        elif pairs_in(config):
            say("only scaled: a model of pairs was shown two light digits of about 20 pixels each on black.")
    return 2 if failures else 0


def digit_side(config: Config | None) -> int:
    """Side of the field that a photo of a digit is prepared in, as MNIST was made; 0 for a model of other images."""
    kind = config.data.partition(":")[0] if config else ""
    if config and kind == "mnist":
        return config.model.image_shape[1]
    return 28 if kind in ("expanded-mnist", "affine-mnist") else 0  # and then laid in the middle of a larger one


def pairs_in(config: Config | None) -> bool:
    """Whether a model was shown two digits in every image."""
    if config is None or config.data.partition(":")[0] != "multimnist":
        return False
    return not options.read(multimnist.Layout, config.data).single


def check_naming(top: int | None, threshold: float | None) -> None:
    if top is not None and threshold is not None:
        raise UserError("--top names a number of classes and --threshold all that are long enough: choose one of them.")
    if top is not None and top < 1:
        raise UserError(f"--top is how many classes to name, at least 1, and is {top}.")


def naming(model: Model, config: Config | None, flags: Predict) -> tuple[int | None, float]:
    """How many classes to name, or from which length on; by default as `evaluate` counts them."""
    check_naming(flags.top, flags.threshold)
    if flags.threshold is not None:
        return None, flags.threshold
    if flags.top is None and model.multi_label:
        return (2, 0.0) if pairs_in(config) else (None, PRESENT)
    return flags.top or 1, 0.0


def longest(lengths: dict[str, float], n: int = 3) -> str:
    """The longest classes of a prediction, in words."""
    order = sorted(lengths, key=lambda name: -lengths[name])[:n]
    return ", ".join(f"{name} {lengths[name]:.3f}" for name in order)


def list_images(names: Sequence[str]) -> list[str]:
    """Files as they are, folders as the images in them."""
    if not names:
        raise UserError("predict needs at least one image: a file, a folder, or - for stdin.")
    found: list[str] = []
    for name in names:
        if name != "-" and Path(name).is_dir():
            inside = [str(path) for path in pictures(Path(name))]
            if not inside:
                raise UserError(f"the folder {name} holds no images (.png, .jpg, …): choose another one.")
            found += inside
        else:
            found.append(name)
    return found


def predict_one(model: Model, name: str, side: int, top: int | None, threshold: float) -> dict[str, Any]:
    """Prepare one image, run the model, and say what it saw."""
    image, note = prepare_image(model, name, side)
    lengths = model.predict(image[None]).lengths
    named = name_classes(lengths, top, threshold)[0]
    order = lengths[0].argsort(descending=True).tolist()
    return {
        "file": name,
        "labels": [model.classes[j] for j in order if named[j]],
        "label": model.classes[order[0]],
        "length": round(float(lengths[0, order[0]]), 4),
        "lengths": {c: round(float(x), 4) for c, x in zip(model.classes, lengths[0], strict=True)},
        "prepared": note,
    }


def prepare_image(model: Model, name: str, side: int) -> tuple[Tensor, str]:
    """An image file (or - for stdin) as the model's input; a digit in a field of this side, or 0: see `digit_side`."""
    from capsnet.data import photo

    stdin = name == "-"
    picture = photo.read_image(io.BytesIO(sys.stdin.buffer.read()) if stdin else name, "stdin" if stdin else name)
    channels, height, width = model.config.image_shape
    if side:
        prepared = photo.prepare_like_mnist(picture, side)
        if side == height:
            return prepared.image, prepared.note
        laid = multimnist.lay(prepared.image[None], torch.zeros(1, 2, dtype=torch.long), height)[0]
        return laid, f"{prepared.note.rstrip('.')}, laid in the middle of {height}×{width}."
    return photo.fit(picture, channels, height, width), "scaled"


MOST_PAINTED = 64  # images on one sheet


@dataclass(frozen=True)
class Reconstruct:
    """Paint what a model sees: reconstructions beside their inputs (Fig. 3), or the tweak grid of a pose (Fig. 4).

    Without images it takes test images of the data that the model was trained on.

    Examples:
      capsnet reconstruct runs/demo
      capsnet reconstruct runs/demo --what tweaks --class 5
      capsnet reconstruct runs/demo photo.png --what tweaks --out tweaks.svg
    """

    model: ModelName
    """A shipped model's name (see `capsnet models`), a run's folder or a .safetensors file."""
    images: ImageNames = ()
    """Image files or folders; none for test images."""
    what: Literal["reconstructions", "tweaks"] = "reconstructions"
    """Which picture."""
    label: Annotated[str | None, arg(name="class", metavar="NAME", help_behavior_hint="")] = None
    """Class whose capsule is decoded (default: the longest); without images, test images of that class are taken."""
    out: MaybePath = None
    """File to write, .png or .svg (default: WHAT.png in the run's folder or here)."""
    raw: Switch = False
    """Do not prepare images as MNIST was made."""
    force: Switch = False
    """Overwrite the file if it exists."""


def reconstruct(argv: list[str]) -> int:
    flags = parse(Reconstruct, "reconstruct", argv)
    if find_spec("matplotlib") is None:
        raise UserError("pictures need matplotlib, which is not installed: pip install 'capsnet[train]'.")
    from capsnet import figures

    model = checkpoint.load(flags.model)
    if not isinstance(model, CapsNet) or model.decoder is None:
        raise UserError(f"{flags.model} has no decoder, so there is nothing to paint: train one with a decoder.")
    label = class_index(model, flags.label)
    out = picture_file(flags)
    images, true = images_to_paint(model, flags)
    if flags.what == "tweaks":
        figure = figures.tweak_grid(model, images[0], label)
    else:
        figure = figures.reconstructions(model, images, true, label if true is None else None)
    figures.save(figure, out)
    print(out)
    return 0


def picture_file(flags: Reconstruct) -> Path:
    """Where the picture goes; nothing is overwritten unasked."""
    folder = Path(flags.model) if Path(flags.model).is_dir() and not zoo.is_shipped(flags.model) else Path()
    out = flags.out or folder / f"{flags.what}.png"
    if out.suffix not in (".png", ".svg"):
        raise UserError(f"{out} is neither .png nor .svg, and no other kind of picture is written.")
    if out.exists() and not flags.force:
        raise UserError(f"{out} exists already: choose another name with --out, or overwrite it with --force.")
    return out


def images_to_paint(model: Model, flags: Reconstruct) -> tuple[Tensor, Tensor | None]:
    """The images of a picture, and their labels where each has one."""
    if flags.images:
        names = list_images(flags.images)
        if flags.what == "tweaks" and len(names) > 1:
            raise UserError(f"tweaks are painted from one image and {len(names)} came: choose one of them.")
        if len(names) > MOST_PAINTED:
            say(f"painting the first {MOST_PAINTED} of {len(names)} images.")
        side = 0 if flags.raw else digit_side(training_config(flags.model))
        return torch.stack([prepare_image(model, name, side)[0] for name in names[:MOST_PAINTED]]), None
    test = splits_for(model, flags.model, None).test
    rows = torch.arange(len(test))
    if flags.label is not None:
        here = flags.label in test.classes
        rows = (test.targets[:, test.classes.index(flags.label)] > 0).nonzero()[:, 0] if here else rows[:0]
    if not len(rows):
        raise UserError(f"{test.name} has no test image of {flags.label}: pass an image of your own.")
    chosen = test.gather(rows[:MOST_PAINTED])
    if test.multi_label or test.classes != model.classes:
        return chosen.images, None
    return chosen.images, chosen.labels


def class_index(model: Model, name: str | None) -> int | None:
    """A class by its name."""
    if name is not None and name not in model.classes:
        raise unknown("class", name, model.classes)
    return None if name is None else model.classes.index(name)
