"""capsnet predict."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from capsnet.cli.evaluate import check_naming
from capsnet.cli.flags import ImageNames, MaybeFloat, MaybeInt, ModelName, Switch, parse
from capsnet.cli.inputs import labels_per_image, list_images, prepare_image, training_config
from capsnet.data.photo import RESIZED
from capsnet.errors import UserError
from capsnet.evaluate import name_classes
from capsnet.io import checkpoint
from capsnet.models.base import PRESENT, Model
from capsnet.notice import say
from capsnet.terminal import Counter, print_table
from capsnet.train import loop
from capsnet.train.config import Config


@dataclass(frozen=True)
class Predict:
    """Classify images: files, folders, or - for one image on stdin.

    For a model trained on MNIST digits, a photo or drawing is preprocessed as MNIST was: converted to grey, inverted
    if it is dark on light, cropped to the ink, scaled into 20×20 and centred by mass in 28×28. --raw only resizes it.
    For a model trained on overlapping pairs, a photo shows two digits, and two classes are predicted.

    Examples:
      capsnet predict runs/demo photo.png
      capsnet predict runs/demo scans/ --json
    """

    model: ModelName
    """Model name (see `capsnet models`), run folder or .safetensors file."""
    images: ImageNames
    """Image files, folders of them, or - for stdin."""
    raw: Switch = False
    """Only resize images to the model's input; skip the MNIST preprocessing."""
    top: MaybeInt = None
    """Predict this many classes per image (default: 1, or 2 for a model trained on pairs)."""
    threshold: MaybeFloat = None
    """Predict all classes with at least this activation (default for multi-label models: 0.5)."""
    device: str = "auto"
    """auto, cpu, cuda or mps."""
    json: Switch = False
    """Print one JSON object with a list of predictions."""


def predict(argv: list[str]) -> int:
    flags = parse(Predict, "predict", argv)
    model = checkpoint.load(flags.model, loop.choose_device(flags.device))
    config = training_config(flags.model)
    top, threshold = naming(model, config, flags)
    names = list_images(flags.images)
    rows, failures = [], []
    with Counter("predicting") as counter:
        for done, name in enumerate(names, 1):
            try:
                rows.append(predict_one(model, name, None if flags.raw else config, top, threshold))
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
            ["image", "prediction", "activations"],
            [(r["file"], ", ".join(r["labels"]) or "none", highest(r["activations"])) for r in rows],
        )
        if rows[0]["prepared"] != RESIZED:
            how = rows[0]["prepared"].rstrip(".") if len(rows) == 1 else "see --json for each image"
            say(f"preprocessed like MNIST ({how}); --raw disables this.")
    return 2 if failures else 0


def naming(model: Model, config: Config | None, flags: Predict) -> tuple[int | None, float]:
    """How many classes to predict, or the threshold; the defaults are those of `evaluate`."""
    check_naming(flags.top, flags.threshold)
    if flags.threshold is not None:
        return None, flags.threshold
    if flags.top is None and model.multi_label:
        return (2, 0.0) if labels_per_image(config) == 2 else (None, PRESENT)
    return flags.top or 1, 0.0


def highest(activations: dict[str, float]) -> str:
    """The three classes with the highest activations, as text."""
    order = sorted(activations, key=lambda name: -activations[name])[:3]
    return ", ".join(f"{name} {activations[name]:.3f}" for name in order)


def predict_one(model: Model, name: str, config: Config | None, top: int | None, threshold: float) -> dict[str, Any]:
    """Preprocess one image, run the model and return the record that --json prints."""
    prepared = prepare_image(model, name, config)
    activations = model.predict(prepared.image[None]).activations
    named = name_classes(activations, top, threshold)[0]
    order = activations[0].argsort(descending=True).tolist()
    return {
        "file": name,
        "labels": [model.classes[j] for j in order if named[j]],
        "label": model.classes[order[0]],
        "activation": round(float(activations[0, order[0]]), 4),
        "activations": {c: round(float(x), 4) for c, x in zip(model.classes, activations[0], strict=True)},
        "prepared": prepared.note,
    }
