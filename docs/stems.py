"""How long a step of the best preset takes, with the network that it has and with those that it has had.

    python docs/stems.py        two minutes, on a machine that does nothing else

The networks take their steps in turn, so that whatever slows the machine down slows all of them. Written is
results/search/best-stems.json, from which docs/generate.py makes a sentence and the time of a whole training.
"""

from __future__ import annotations

import statistics
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from capsnet import checkpoint, layers, training
from capsnet.config import Config, get_preset, to_dict
from capsnet.kernels.allocator import keep_memory

RESULT = Path(__file__).resolve().parent.parent / "results" / "search" / "best-stems.json"
ALONE = {"branches": 1, "trunk": 0, "primary_types": 32, "class_dim": 16}
STEMS: dict[str, dict[str, Any]] = {  # all kernels are 3×3; the last two are the preset's own
    "five": ALONE | {"stem_channels": (32, 64, 64, 128, 128), "stem_strides": (1, 2, 1, 1, 1), "primary_stride": 2},
    "smaller-first": ALONE
    | {"stem_channels": (16, 64, 64, 128, 128), "stem_strides": (1, 2, 1, 1, 1), "primary_stride": 2},
    "seven": ALONE | {"stem_channels": (16, 32, 32, 64, 96, 128, 128), "stem_strides": (1, 1, 1, 2, 1, 1, 1)},
    "branches": {},
    "branches-float32": {},  # float32 between the layers of the stem
}
ROUNDS, STEPS = 20, 3


def with_stem(config: Config, name: str) -> Config:
    changes = STEMS[name]
    if channels := changes.get("stem_channels"):
        changes = changes | {"stem_kernels": (3,) * len(channels)}
    return replace(config, model=replace(config.model, **changes))


def seconds_a_step(config: Config, rounds: int = ROUNDS) -> dict[str, float]:
    """The median over rounds, in each of which every network takes a few steps; the first round does not count."""
    runs = {name: training.prepare(with_stem(config, name), Path()) for name in STEMS}
    taken: dict[str, list[float]] = {name: [] for name in STEMS}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            between = patch.object(layers, "in_half", lambda stem, images: stem(images))
            with between if name.endswith("float32") else nullcontext():
                began = time.perf_counter()
                for _ in range(STEPS):
                    training.train_step(run)
            taken[name].append((time.perf_counter() - began) / STEPS)
    return {name: statistics.median(times[1:]) for name, times in taken.items()}


def main() -> None:
    keep_memory()
    config, began = get_preset("best"), time.perf_counter()
    steps = seconds_a_step(config)
    birth = checkpoint.certificate(to_dict(config), time.perf_counter() - began, threads=torch.get_num_threads())
    checkpoint.write_json(RESULT, {"seconds_a_step": steps, "certificate": birth})
    print({name: f"{1000 * step:.0f} ms" for name, step in steps.items()}, RESULT)


if __name__ == "__main__":
    main()
