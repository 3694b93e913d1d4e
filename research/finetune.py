"""Does fine-tuning help when there are only a few images?

    python research/finetune.py        eighteen trainings, results/fine-tuning.json

Sixty training images and 240 test images: six digits rotated by 90°, which the trained model has only seen upright, and
six kinds of clothing, which it has never seen. These two tasks were chosen after trials. The third has three digits
only, dark on light, in colour and larger. All use the settings of `capsnet train --data folder:…`, with and without
`--init`.
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

from capsnet import data
from capsnet.io import checkpoint
from capsnet.io.transfer import starting_from
from capsnet.train import loop
from capsnet.train.presets import get_preset

ROOT = Path(__file__).resolve().parent.parent
SEEDS = (0, 1, 2)
INIT = "quick-mnist"
IMAGES, TEST_IMAGES = 60, 240  # equally many of each class


def rotated(digit: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(np.rot90(digit))


def on_paper(digit: np.ndarray) -> np.ndarray:
    """(28, 28) → (50, 40, 3): rotated, larger, dark blue on light yellow."""
    ink = np.asarray(Image.fromarray(rotated(digit)).resize((40, 50), Image.Resampling.BILINEAR))[..., None] / 255
    paper, blue = np.array([250.0, 240.0, 200.0]), np.array([20.0, 30.0, 90.0])
    return (paper + ink * (blue - paper)).round().astype(np.uint8)


@dataclass(frozen=True)
class Case:
    """A task: dataset, classes, and how the images are changed."""

    source: str
    change: Callable[[np.ndarray], np.ndarray]
    classes: tuple[int, ...] = (0, 2, 3, 4, 7, 9)


CASES = {
    "digits rotated by 90°": Case("mnist", rotated),
    "clothing": Case("fashion-mnist", np.asarray),
    "three digits rotated by 90°, dark on light, in colour, 40×50": Case("mnist", on_paper, (0, 4, 7)),
}


def write_images(root: Path, case: Case) -> Path:
    """Write the first images of each class, one subfolder per class."""
    splits = data.load(case.source, validation=0)
    for part, dataset, n in (("train", splits.train, IMAGES), ("test", splits.test, TEST_IMAGES)):
        for label in case.classes:
            folder = root / part / f"class {label}"
            folder.mkdir(parents=True)
            for number in (dataset.labels == label).nonzero()[: n // len(case.classes), 0].tolist():
                image = case.change(dataset.images[number, 0].numpy())
                Image.fromarray(image).save(folder / f"{number}.png")
    return root


def error_percent(folder: Path, seed: int, init: str | None) -> float:
    """The test error after training on the folder with the default settings of the command line."""
    config = replace(get_preset("own-images"), data=f"folder:{folder}", seed=seed)
    config = starting_from(config, init) if init else config
    with tempfile.TemporaryDirectory() as scratch:
        return loop.train(loop.start(config, Path(scratch) / "run")).evaluation.error_percent


def compare(case: Case) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_images(Path(scratch), case)
        fresh = [error_percent(folder, seed, None) for seed in SEEDS]
        begun = [error_percent(folder, seed, INIT) for seed in SEEDS]
    found = {"fresh": [round(e, 4) for e in fresh], "begun": [round(e, 4) for e in begun]}
    return {"source": case.source, "classes": list(case.classes), **found}


def main() -> int:
    began = time.monotonic()
    rows = [{"what": what, **compare(case)} for what, case in CASES.items()]
    settings = {"init": INIT, "preset": "own-images", "seeds": list(SEEDS)}
    certificate = checkpoint.certificate(settings, time.monotonic() - began).to_json()
    record = {"images": IMAGES, "test_images": TEST_IMAGES, "init": INIT, "rows": rows, "certificate": certificate}
    checkpoint.write_json(ROOT / "results" / "fine-tuning.json", record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
