"""capsnet evaluate, predict and reconstruct: what a trained model is for."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import arg

from capsnet import checkpoint, data, training
from capsnet.cli.flags import ImageNames, MaybeFloat, MaybeInt, MaybePath, MaybeStr, ModelName, parse
from capsnet.config import Config, from_dict
from capsnet.errors import UserError, unknown
from capsnet.evaluation import evaluate, name_classes
from capsnet.models import CapsNet, Model
from capsnet.terminal import Counter, print_table, say


@dataclass(frozen=True)
class Evaluate:
    """Count a model's errors on a data set it has not been trained on.

    Examples:
      capsnet evaluate runs/demo
      capsnet evaluate runs/demo --data mnist --json
    """

    model: ModelName
    """A run's folder or a .safetensors file."""
    data: MaybeStr = None
    """mnist, fashion-mnist, cifar10, folder:PATH or csv:PATH (default: what the model was trained on)."""
    split: Literal["test", "validation", "train"] = "test"
    """Which part of it."""
    top: MaybeInt = None
    """With several labels an image: name this many longest classes (default: all above the threshold)."""
    threshold: float = 0.5
    """With several labels an image: the length from which a class counts as there."""
    batch_size: int = 250
    """Images in a batch; of no consequence for the result."""
    device: str = "auto"
    """auto, cpu, cuda or mps."""
    json: bool = False
    """Print JSON: n, errors, error_percent and more."""


def evaluate_verb(argv: list[str]) -> int:
    flags = parse(Evaluate, "evaluate", argv)
    model = checkpoint.load(flags.model, training.choose_device(flags.device))
    dataset = getattr(splits_for(flags.model, flags.data), flags.split)
    if not len(dataset):
        raise UserError(f"{dataset.name} has no {flags.split} part here; choose another --split.")
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


def training_config(model: str) -> Config | None:
    """The config that a model was trained with, from its own header."""
    _, record = checkpoint.read_tensors(checkpoint.model_file(model))
    config = record.get("certificate", {}).get("config")
    return from_dict(config) if config else None


def splits_for(model: str, name: str | None) -> data.Splits:
    """The data set asked for, or the one a model was trained on, split as it was then."""
    config = training_config(model) or Config()
    if name and name != config.data:
        return data.load(name, seed=config.seed, image_size=config.model.image_shape[1])
    return data.load(
        config.data, validation=config.validation, validation_choice=config.validation_choice,
        seed=config.seed, image_size=config.image_size or None,
    )  # fmt: skip


IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".gif", ".bmp", ".webp", ".tif", ".tiff", ".pgm", ".ppm"}


@dataclass(frozen=True)
class Predict:
    """Say what is in images: files, folders, or - for one image on stdin.

    For a model of MNIST a photo or drawing is prepared as MNIST was made: grey, inverted if it is dark on light,
    cropped to the ink, scaled into 20×20 and centred by its mass in 28×28. --raw only scales it.

    Examples:
      capsnet predict runs/demo photo.png
      capsnet predict runs/demo scans/ --json
    """

    model: ModelName
    """A run's folder or a .safetensors file."""
    images: ImageNames
    """Image files, folders of them, or - for stdin."""
    raw: bool = False
    """Do not prepare images as MNIST was made; only scale them to the model's size."""
    top: int = 1
    """Name this many longest classes."""
    threshold: MaybeFloat = None
    """Name all classes that are at least this long instead."""
    device: str = "auto"
    """auto, cpu, cuda or mps."""
    json: bool = False
    """Print JSON, one object with a list of predictions."""


def predict(argv: list[str]) -> int:
    flags = parse(Predict, "predict", argv)
    model = checkpoint.load(flags.model, training.choose_device(flags.device))
    config = training_config(flags.model)
    like_mnist = not flags.raw and config is not None and config.data == "mnist"
    names = list_images(flags.images)
    rows, failures = [], []
    with Counter("predicting") as counter:
        for done, name in enumerate(names, 1):
            try:
                rows.append(predict_one(model, name, like_mnist, flags))
            except UserError as error:
                failures.append(str(error))
            counter(done, len(names))
    for failure in failures:
        say(f"capsnet: {failure}")
    if flags.json:
        print(json.dumps({"model": flags.model, "predictions": rows, "errors": failures}))
    elif rows:
        print_table(
            ["image", "is", "length", "next", "length"],
            [(r["file"], " ".join(r["labels"]) or "nothing", *r["shown"]) for r in rows],
        )
        notes = {row["prepared"] for row in rows}
        if like_mnist:
            say(f"prepared as MNIST was made ({'; '.join(sorted(notes))}); --raw turns that off.")
    return 2 if failures else 0


def list_images(names: Sequence[str]) -> list[str]:
    """Files as they are, folders as the images in them."""
    if not names:
        raise UserError("predict needs at least one image: a file, a folder, or - for stdin.")
    found: list[str] = []
    for name in names:
        if name != "-" and Path(name).is_dir():
            inside = sorted(str(p) for p in Path(name).rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES)
            if not inside:
                raise UserError(f"the folder {name} holds no images.")
            found += inside
        else:
            found.append(name)
    return found


def predict_one(model: Model, name: str, like_mnist: bool, flags: Predict) -> dict[str, Any]:
    """Prepare one image, run the model, and say what it saw."""
    image, note = prepare_image(model, name, like_mnist)
    lengths = model.predict(image[None]).lengths
    top = None if flags.threshold is not None else min(flags.top, len(model.classes))
    named = name_classes(lengths, top, flags.threshold or 0.0)[0]
    order = lengths[0].argsort(descending=True).tolist()
    first, second = order[0], order[1] if len(order) > 1 else order[0]
    return {
        "file": name,
        "labels": [model.classes[j] for j in order if named[j]],
        "label": model.classes[first],
        "length": round(float(lengths[0, first]), 4),
        "lengths": {c: round(float(x), 4) for c, x in zip(model.classes, lengths[0], strict=True)},
        "prepared": note,
        "shown": [f"{lengths[0, first]:.3f}", model.classes[second], f"{lengths[0, second]:.3f}"],
    }


def prepare_image(model: Model, name: str, like_mnist: bool) -> tuple[Any, str]:
    """An image file (or - for stdin) as the model's input."""
    from capsnet.data import photo

    picture = photo.read_image(io.BytesIO(sys.stdin.buffer.read()) if name == "-" else name)
    channels, height, width = model.config.image_shape
    if like_mnist:
        prepared = photo.prepare_like_mnist(picture, height)
        return prepared.image, prepared.note
    return photo.fit(picture, channels, height, width), "scaled"


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
    """A run's folder or a .safetensors file."""
    images: ImageNames = ()
    """Image files or folders; none for test images."""
    what: Literal["reconstructions", "tweaks"] = "reconstructions"
    """Which picture."""
    label: Annotated[str | None, arg(name="class", metavar="NAME", help_behavior_hint="")] = None
    """Class to decode (default: the longest capsule; without images also: the first test image of that class)."""
    out: MaybePath = None
    """File to write, .png or .svg (default: WHAT.png in the run's folder or here)."""
    raw: bool = False
    """Do not prepare images as MNIST was made."""
    force: bool = False
    """Overwrite the file if it exists."""


def reconstruct(argv: list[str]) -> int:
    import torch

    from capsnet import figures

    flags = parse(Reconstruct, "reconstruct", argv)
    model = checkpoint.load(flags.model)
    if not isinstance(model, CapsNet) or model.decoder is None:
        raise UserError(f"{flags.model} has no decoder, so there is nothing to paint: train one with a decoder.")
    label = class_index(model, flags.label)
    out = flags.out or (Path(flags.model) if Path(flags.model).is_dir() else Path()) / f"{flags.what}.png"
    if out.exists() and not flags.force:
        raise UserError(f"{out} exists already: choose another name with --out, or overwrite it with --force.")
    if out.suffix not in (".png", ".svg"):
        raise UserError(f"{out} is neither .png nor .svg, and no other kind of picture is written.")
    config = training_config(flags.model)
    if flags.images:
        like_mnist = not flags.raw and config is not None and config.data == "mnist"
        images = torch.stack([prepare_image(model, n, like_mnist)[0] for n in list_images(flags.images)])
        true = None
    else:
        test = splits_for(flags.model, None).test
        rows = (test.targets[:, label] > 0).nonzero()[:, 0] if label is not None else torch.arange(len(test))
        images, true = test.images[rows[:64]], test.targets[rows[:64]].argmax(1)
    if flags.what == "tweaks":
        figure = figures.tweak_grid(model, images[0], label)
    else:
        figure = figures.reconstructions(model, images, true)
    figures.save(figure, out)
    print(out)
    return 0


def class_index(model: Model, name: str | None) -> int | None:
    """A class by its name."""
    if name is not None and name not in model.classes:
        raise unknown("class", name, model.classes)
    return None if name is None else model.classes.index(name)
