"""Who wrote MNIST's training digits, as far as their order tells, and what that does to a validation error.

    python docs/writers.py        a quarter of an hour on two cores; interrupted, it goes on

MNIST was put together from two collections. Its training digits alternate between them, and one of the two is still in
the order of its writers: neighbours lean alike. So a digit that is held back at random has a hundred neighbours by the
same hand among the training digits, as no test digit has. How much that flatters is measured: networks that have seen
other digits of the same writers, against networks that have not, on the same digits.

Written is results/writers.json, from which docs/generate.py makes two tables.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from capsnet import checkpoint, training
from capsnet.config import Config, get_preset, to_dict
from capsnet.data import Batches, Dataset, Splits, load
from capsnet.data.seeds import generator
from capsnet.evaluation import evaluate
from capsnet.kernels.allocator import keep_memory
from capsnet.models.registry import Model
from capsnet.terminal import clock, say

RESULT = Path(__file__).resolve().parent.parent / "results" / "writers.json"
APART = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)  # digits of one collection between which likeness is measured
HALVES = {"even": 0, "odd": 1}  # by a digit's place among the 60,000
BLOCK = 5_000  # digits of each half that are judged: its last ones
SEEDS = (0, 1, 2)


# --- Likeness of neighbours --------------------------------------------------------------------------------------


def slants(images: Tensor) -> Tensor:
    """How far each digit of uint8 images (n, 1, h, w) leans, in pixels a row: its ink's covariance of x and y by y."""
    ink = images[:, 0].float()
    ink = ink / ink.sum((1, 2), keepdim=True)
    y, x = torch.arange(ink.shape[1]).float(), torch.arange(ink.shape[2]).float()
    y = y - (ink.sum(2) @ y).unsqueeze(1)
    x = x - (ink.sum(1) @ x).unsqueeze(1)
    return torch.einsum("nij,ni,nj->n", ink, y, x) / torch.einsum("nij,ni,ni->n", ink, y, y)


def beside_its_class(values: Tensor, labels: Tensor) -> Tensor:
    """In deviations from the mean of the digit's class: a 7 leans more than a 0, whoever writes it."""
    told = values.clone()
    for label in labels.unique():
        of = values[labels == label]
        told[labels == label] = (of - of.mean()) / of.std()
    return told


def likeness(values: Tensor, apart: int) -> float:
    """The correlation of digits so many places apart."""
    return float(torch.corrcoef(torch.stack([values[:-apart], values[apart:]]))[0, 1])


def order(digits: Dataset) -> dict[str, dict[str, float]]:
    """Of each half: the likeness of its digits, by how far apart they are in it."""
    lean = beside_its_class(slants(digits.images), digits.labels)
    return {
        half: {str(apart): round(likeness(lean[first::2], apart), 4) for apart in APART}
        for half, first in HALVES.items()
    }


# --- What it does to a validation error --------------------------------------------------------------------------


def cuts(n: int, half: str, seed: int) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """Places to train on and places to judge: without any digit of the last block, and with the other half of it.

    All trainings are on equally many digits, and both ways judge every digit of the block once.
    """
    places = torch.arange(HALVES[half], n, 2)
    before, block = places[:-BLOCK], places[-BLOCK:]
    one, two = block[torch.randperm(BLOCK, generator=generator(seed, "writers"))].chunk(2)
    return {
        "without": [(before, block)],
        "with": [(torch.cat([before[BLOCK // 2 :], seen]), judged) for seen, judged in ((one, two), (two, one))],
    }


def trained(config: Config, digits: Dataset, places: Tensor) -> Model:
    """A network that has seen these digits alone."""
    with TemporaryDirectory() as folder:
        run = training.prepare(config, Path(folder))
        run.splits = Splits(digits.subset(places), digits.subset(places[:0]), digits.subset(places[:0]))
        run.batches = Batches(run.splits.train, config.batch_size, config.seed, config.augment, epochs=config.epochs)
        training.loop(run, [], lambda: False)
        return run.finished_model().eval()


def measure(config: Config, digits: Dataset, half: str) -> dict[str, Any]:
    """One seed's errors on the block of a half, and of the other half by the network that saw none of its digits."""
    found: dict[str, Any] = {"half": half, "seed": config.seed, "trained_on": 0}
    other = next(name for name in HALVES if name != half)
    for way, parts in cuts(digits.n, half, config.seed).items():
        errors = 0
        for places, judged in parts:
            model = trained(config, digits, places)
            errors += evaluate(model, digits.subset(judged)).errors
            found["trained_on"] = len(places)
            if way == "without":
                elsewhere = torch.arange(HALVES[other], digits.n, 2)[-BLOCK:]
                found["other_half"] = evaluate(model, digits.subset(elsewhere)).errors
        found[way] = errors
    return found


def main() -> None:
    keep_memory()
    digits = load("mnist", validation=0).train
    config = get_preset("quick")
    known = checkpoint.read_json(RESULT) if RESULT.exists() else {"judged": BLOCK, "trainings": []}
    known["likeness"] = order(digits)
    done = {(each["seed"], each["half"]) for each in known["trainings"]}
    todo = [(seed, half) for seed in SEEDS for half in HALVES if (seed, half) not in done]
    began = time.perf_counter()
    for i, (seed, half) in enumerate(todo):
        left = clock((time.perf_counter() - began) / i * (len(todo) - i)) if i else "?"
        say(f"{i + 1} of {len(todo)}: three trainings on {half} places, seed {seed}; about {left} left")
        started = time.perf_counter()
        found = measure(replace(config, seed=seed), digits, half)
        birth = checkpoint.certificate(to_dict(replace(config, seed=seed)), time.perf_counter() - started)
        known["trainings"].append(found | {"certificate": birth})
        checkpoint.write_json(RESULT, known)
    print(RESULT)


if __name__ == "__main__":
    main()
