"""Do branches help on a kind of digits of which a network has seen few?

    python docs/branches.py        ten minutes on two cores; killed, it goes on

MNIST's training digits alternate between two collections (docs/writers.py). The network of the best preset and the one
that it had before, without branches and narrower, are trained for a few epochs on one collection and on a tenth of the
other, and judged on the rest of that: enough errors to compare, by digits of a kind that is new to them. Written is
results/search/best-branches.json, from which docs/generate.py makes a table.
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
from capsnet.config import Config, ModelConfig, from_dict, get_preset, to_dict
from capsnet.data import Batches, Dataset, load
from capsnet.data.seeds import generator
from capsnet.evaluation import evaluate
from capsnet.experiments.conduct import same_training
from capsnet.kernels.allocator import keep_memory
from capsnet.terminal import say

RESULTS = Path(__file__).resolve().parent.parent / "results"
RESULT, BEFORE = RESULTS / "search" / "best-branches.json", RESULTS / "best-before.json"
EPOCHS, FEW = 8, 2_900
END = 58_000  # from a little later on both places are of one collection: docs/writers.py


def networks() -> dict[str, ModelConfig]:
    """The network of the preset, and that of the last one without branches."""
    before = [from_dict(card["config"]).model for card in checkpoint.read_json(BEFORE)]
    return {"one": next(m for m in reversed(before) if m.branches == 1), "branches": get_preset("best").model}


def places(seed: int, n: int = END, few: int = FEW) -> tuple[Tensor, Tensor]:
    """Which digits to train on, all at odd places and a few at even ones, and which to judge: the other even ones."""
    even = torch.arange(0, n, 2)
    even = even[torch.randperm(len(even), generator=generator(seed, "branches"))]
    return torch.cat([torch.arange(1, n, 2), even[:few]]), even[few:].sort().values


def measure(config: Config, digits: Dataset, few: int = FEW) -> dict[str, Any]:
    """Train on the one part and count the errors on the other."""
    seen, judged = places(config.seed, min(END, len(digits)), few)
    with TemporaryDirectory() as folder:
        run = training.prepare(config, Path(folder))
        run.batches = Batches(digits.subset(seen), config.batch_size, config.seed, config.augment, epochs=config.epochs)
        began = time.perf_counter()
        while run.step < run.steps:
            training.train_step(run)
        seconds = time.perf_counter() - began
        found = evaluate(run.averaged_model().eval(), digits.subset(judged))
    parameters = sum(p.numel() for p in run.model.parameters())
    birth = checkpoint.certificate(to_dict(config), seconds, training_images=len(seen), parameters=parameters)
    return {"judged": len(judged), "errors": found.errors, "certificate": birth}


def main() -> None:
    keep_memory()
    digits, best = load("mnist", validation=0).train, replace(get_preset("best"), epochs=EPOCHS)
    known = checkpoint.read_json(RESULT) if RESULT.exists() else {}
    for name, model in networks().items():
        config = replace(best, model=model)
        if name not in known or not same_training(known[name]["certificate"]["config"], config):
            known[name] = measure(config, digits)
            checkpoint.write_json(RESULT, known)
        say(f"{name}: {known[name]['errors']} of {known[name]['judged']:,} wrong")


if __name__ == "__main__":
    main()
