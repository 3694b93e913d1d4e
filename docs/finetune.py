"""Does it help to begin with a trained model, when there are only a few images of one's own?

    python docs/finetune.py        writes results/fine-tuning.json, from which a table of docs/models.md is made

Sixty images in a folder, ten of each of six classes, and 240 more to test on: digits on their side, which the trained
model has only been shown upright, and articles of clothing, which it has never been shown. Trained with the settings
of `capsnet train --data folder:…`, with --init and without.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from capsnet import checkpoint, data, training
from capsnet.config import get_preset
from capsnet.pretrained import starting_from

ROOT = Path(__file__).resolve().parent.parent
SOURCES = {"digits on their side": "mnist", "clothing": "fashion-mnist"}
CLASSES = (0, 2, 3, 4, 7, 9)
SEEDS = (0, 1, 2)
BEGINNING = "quick-mnist"


def write_images(root: Path, source: str, each: int = 10, each_test: int = 40) -> Path:
    """The first images of six classes as files, one subfolder a class, turned by a quarter if they are digits."""
    splits = data.load(source, validation=0)
    for part, dataset, n in (("train", splits.train, each), ("test", splits.test, each_test)):
        for label in CLASSES:
            folder = root / part / f"class {label}"
            folder.mkdir(parents=True)
            for number in (dataset.labels == label).nonzero()[:n, 0].tolist():
                image = np.rot90(dataset.images[number, 0].numpy(), 1 if source == "mnist" else 0)
                Image.fromarray(np.ascontiguousarray(image)).save(folder / f"{number}.png")
    return root


def error_percent(folder: Path, seed: int, beginning: str | None) -> float:
    """The test error of a training on the folder, by the settings that the command line takes for one."""
    config = replace(get_preset("own-images"), data=f"folder:{folder}", seed=seed)
    config = starting_from(config, beginning) if beginning else config
    with tempfile.TemporaryDirectory() as scratch:
        return training.train(training.start(config, Path(scratch) / "run")).evaluation.error_percent


def compare(source: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_images(Path(scratch), source)
        fresh = [error_percent(folder, seed, None) for seed in SEEDS]
        begun = [error_percent(folder, seed, BEGINNING) for seed in SEEDS]
    return {"source": source, "fresh": [round(e, 4) for e in fresh], "begun": [round(e, 4) for e in begun]}


def main() -> int:
    rows = [{"what": what, **compare(source)} for what, source in SOURCES.items()]
    certificate = checkpoint.certificate({"init": BEGINNING, "preset": "own-images", "seeds": list(SEEDS)}, 0.0)
    record = {"images": 60, "test_images": 240, "init": BEGINNING, "rows": rows, "certificate": certificate}
    checkpoint.write_json(ROOT / "results" / "fine-tuning.json", record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
