"""Does it help to begin with a trained model, when there are only a few images of one's own?

    python docs/finetune.py        writes results/fine-tuning.json, from which a table of docs/models.md is made

Sixty images in a folder, as many of each class, and 240 more to test on: six digits on their side, which the trained
model has only been shown upright, and six articles of clothing, which it has never been shown. These two were chosen
after trials; the third is like the first of those: three digits only, dark on light, in colour and larger. Trained
with the settings of `capsnet train --data folder:…`, with --init and without: eighteen trainings in all.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from capsnet import checkpoint, data, training
from capsnet.config import get_preset
from capsnet.pretrained import starting_from

ROOT = Path(__file__).resolve().parent.parent
SEEDS = (0, 1, 2)
BEGINNING = "quick-mnist"
IMAGES, TEST_IMAGES = 60, 240  # equally many of each class


def on_its_side(digit: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(np.rot90(digit))


def on_paper(digit: np.ndarray) -> np.ndarray:
    """(28, 28) → (50, 40, 3): on its side, larger, in dark blue on light yellow."""
    ink = np.asarray(Image.fromarray(on_its_side(digit)).resize((40, 50), Image.Resampling.BILINEAR))[..., None] / 255
    paper, blue = np.array([250.0, 240.0, 200.0]), np.array([20.0, 30.0, 90.0])
    return (paper + ink * (blue - paper)).round().astype(np.uint8)


@dataclass(frozen=True)
class Case:
    """Images to learn: of which data set and classes, and what is done to each."""

    source: str
    change: Callable[[np.ndarray], np.ndarray]
    classes: tuple[int, ...] = (0, 2, 3, 4, 7, 9)


CASES = {
    "digits on their side": Case("mnist", on_its_side),
    "clothing": Case("fashion-mnist", np.asarray),
    "three digits on their side, dark on light, in colour, 40×50": Case("mnist", on_paper, (0, 4, 7)),
}


def write_images(root: Path, case: Case) -> Path:
    """The first images of each class as files, one subfolder a class."""
    splits = data.load(case.source, validation=0)
    for part, dataset, n in (("train", splits.train, IMAGES), ("test", splits.test, TEST_IMAGES)):
        for label in case.classes:
            folder = root / part / f"class {label}"
            folder.mkdir(parents=True)
            for number in (dataset.labels == label).nonzero()[: n // len(case.classes), 0].tolist():
                image = case.change(dataset.images[number, 0].numpy())
                Image.fromarray(image).save(folder / f"{number}.png")
    return root


def error_percent(folder: Path, seed: int, beginning: str | None) -> float:
    """The test error of a training on the folder, by the settings that the command line takes for one."""
    config = replace(get_preset("own-images"), data=f"folder:{folder}", seed=seed)
    config = starting_from(config, beginning) if beginning else config
    with tempfile.TemporaryDirectory() as scratch:
        return training.train(training.start(config, Path(scratch) / "run")).evaluation.error_percent


def compare(case: Case) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_images(Path(scratch), case)
        fresh = [error_percent(folder, seed, None) for seed in SEEDS]
        begun = [error_percent(folder, seed, BEGINNING) for seed in SEEDS]
    found = {"fresh": [round(e, 4) for e in fresh], "begun": [round(e, 4) for e in begun]}
    return {"source": case.source, "classes": list(case.classes), **found}


def main() -> int:
    began = time.monotonic()
    rows = [{"what": what, **compare(case)} for what, case in CASES.items()]
    settings = {"init": BEGINNING, "preset": "own-images", "seeds": list(SEEDS)}
    certificate = checkpoint.certificate(settings, time.monotonic() - began)
    record = {"images": IMAGES, "test_images": TEST_IMAGES, "init": BEGINNING, "rows": rows, "certificate": certificate}
    checkpoint.write_json(ROOT / "results" / "fine-tuning.json", record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
