"""Writers of MNIST's training digits, as far as their order shows, and the effect on validation errors.

    python research/writers.py        twenty minutes on two cores; run it again to resume

MNIST was assembled from two collections. Almost to the end its training digits alternate between them, and one of the
two is still in the order of its writers, so neighbours have similar slants. A random validation digit therefore has
about a hundred neighbours by the same writer among the training digits. This script compares networks that have seen
half of the surrounding digits with networks that have seen as many digits from elsewhere, and tests networks on the
collection that they have not seen. It writes results/writers.json and a picture of misclassified digits of the other
collection; research/mnist.md discusses them.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from capsnet.data import Batches, Dataset, Splits, load
from capsnet.data.seeds import generator
from capsnet.evaluate import evaluate
from capsnet.io import checkpoint
from capsnet.kernels.allocator import keep_memory
from capsnet.models.base import Model
from capsnet.notice import say
from capsnet.report import figures
from capsnet.timing import clock
from capsnet.train import loop
from capsnet.train.config import Config
from capsnet.train.config_records import to_dict
from capsnet.train.presets import get_preset

ROOT = Path(__file__).resolve().parent.parent
RESULT, PICTURE = ROOT / "results" / "writers.json", ROOT / "research" / "images" / "other-collection.png"
APART = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)  # distances at which the similarity of slants is measured
HALVES = {"even": 0, "odd": 1}  # by position
END = 58_000  # a little later all positions belong to the ordered collection
BLOCK = 5_000  # test digits of each half: its last ones
GAP = 200  # digits between test and training, so that no writer is on both sides
SEEDS = (0, 1, 2)


def places_of(half: str) -> Tensor:
    return torch.arange(HALVES[half], END, 2)


# --- Similarity of neighbours --------------------------------------------------------------------------------------


def slants(images: Tensor) -> Tensor:
    """Slant of each digit in uint8 images (n, 1, h, w), in pixels per row: covariance of x and y over variance of y."""
    ink = images[:, 0].float()
    ink = ink / ink.sum((1, 2), keepdim=True)
    y, x = torch.arange(ink.shape[1]).float(), torch.arange(ink.shape[2]).float()
    y = y - (ink.sum(2) @ y).unsqueeze(1)
    x = x - (ink.sum(1) @ x).unsqueeze(1)
    return torch.einsum("nij,ni,nj->n", ink, y, x) / torch.einsum("nij,ni,ni->n", ink, y, y)


def standardised(values: Tensor, labels: Tensor) -> Tensor:
    """Each value relative to its class: a 7 has more slant than a 0, whoever writes it."""
    told = values.clone()
    for label in labels.unique():
        of = values[labels == label]
        told[labels == label] = (of - of.mean()) / of.std()
    return told


def likeness(values: Tensor, apart: int) -> float:
    """Correlation of digits at a distance."""
    return float(torch.corrcoef(torch.stack([values[:-apart], values[apart:]]))[0, 1])


def order(digits: Dataset) -> dict[str, dict[str, float]]:
    """Similarity of the slants in each half, by distance."""
    lean = standardised(slants(digits.images), digits.labels)
    return {half: {str(apart): round(likeness(lean[places_of(half)], apart), 4) for apart in APART} for half in HALVES}


# --- Effect on the validation error --------------------------------------------------------------------------


def cuts(half: str, seed: int) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """Training and test positions, twice: half of the last block is tested, then the other half.

    In addition to the common digits, training includes 2,500 digits: the rest of that block ("with") or as many of
    another block ("without").
    """
    places = places_of(half)
    block, elsewhere = places[-BLOCK:], places[-2 * BLOCK - GAP : -BLOCK - GAP]
    all_see = places[: -2 * BLOCK - 2 * GAP]
    shuffled = torch.randperm(BLOCK, generator=generator(seed, "writers"))
    (one, two), others = block[shuffled].chunk(2), elsewhere[shuffled].chunk(2)
    return {
        "with": [(torch.cat([all_see, one]), two), (torch.cat([all_see, two]), one)],
        "without": [(torch.cat([all_see, others[0]]), two), (torch.cat([all_see, others[1]]), one)],
    }


def trained(config: Config, digits: Dataset, places: Tensor) -> Model:
    """A network trained on these digits only."""
    with TemporaryDirectory() as folder:
        run = loop.prepare(config, Path(folder))
        run.splits = Splits(digits.subset(places), digits.subset(places[:0]), digits.subset(places[:0]))
        seen = run.splits.train.to(run.device)
        run.batches = Batches(seen, config.batch_size, config.seed, config.augment, epochs=config.epochs)
        loop.loop(run, [], lambda: False)
        return run.finished_model().eval()


def measure(config: Config, digits: Dataset, half: str) -> dict[str, Any]:
    """Errors of one seed on the block of a half, and on that of the other half, which it has never seen."""
    began = time.perf_counter()
    found: dict[str, Any] = {"half": half, "seed": config.seed, "with": 0, "without": 0, "other_half": 0}
    other = next(name for name in HALVES if name != half)
    for way, parts in cuts(half, config.seed).items():
        for i, (places, judged) in enumerate(parts):
            model = trained(config, digits, places)
            found[way] += evaluate(model, digits.subset(judged)).errors
            found["trained_on"] = len(places)
            if way == "without":  # each network tests one half, so that every digit counts once
                strange = places_of(other)[-BLOCK:].chunk(2)[i]
                found["other_half"] += evaluate(model, digits.subset(strange)).errors
    birth = checkpoint.certificate(
        to_dict(config), time.perf_counter() - began, trainings=4, training_images=found["trained_on"]
    )
    return found | {"certificate": birth.to_json()}


def draw(config: Config, digits: Dataset) -> None:
    """Draw the errors at even positions of a network trained on odd positions."""
    model = trained(config, digits, cuts("odd", config.seed)["without"][0][0])
    strange = digits.subset(places_of("even")[-BLOCK:])
    figures.save(
        figures.mistakes(strange.images, evaluate(model, strange), 24, "Digits of a collection that it has not seen"),
        PICTURE,
    )


def main() -> None:
    keep_memory()
    digits, config = load("mnist", validation=0).train, get_preset("quick")
    design = json.loads(json.dumps({"end": END, "judged": BLOCK, "gap": GAP, "preset": to_dict(config)}))
    known = checkpoint.read_json(RESULT) if RESULT.exists() else design | {"trainings": []}
    if {name: known.get(name) for name in design} != design:
        sys.exit(f"writers: {RESULT} was measured with other settings: move it away to measure again.")
    known["likeness"] = order(digits)
    done = {(each["seed"], each["half"]) for each in known["trainings"]}
    todo = [(seed, half) for seed in SEEDS for half in HALVES if (seed, half) not in done]
    began = time.perf_counter()
    for i, (seed, half) in enumerate(todo):
        left = clock((time.perf_counter() - began) / i * (len(todo) - i)) if i else "?"
        say(f"{i + 1} of {len(todo)}: four trainings on {half} places, seed {seed}; about {left} left")
        known["trainings"].append(measure(replace(config, seed=seed), digits, half))
        checkpoint.write_json(RESULT, known)
    if todo or not PICTURE.exists():
        say("one more training, for the picture")
        draw(config, digits)
    print(RESULT, PICTURE)


if __name__ == "__main__":
    main()
