"""How long a step of the best preset takes with each of the stems that it has had.

    python docs/stems.py        a minute, on a machine that does nothing else

The networks take their steps in turn, so that whatever slows the machine down slows all of them. Written is
results/search/best-stems.json, from which docs/generate.py makes a sentence.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch

from capsnet import checkpoint, training
from capsnet.config import Config, get_preset, to_dict
from capsnet.kernels.allocator import keep_memory

RESULT = Path(__file__).resolve().parent.parent / "results" / "search" / "best-stems.json"
STEMS = {  # channels, strides, stride of the primary capsules; all kernels are 3×3
    "five": ((32, 64, 64, 128, 128), (1, 2, 1, 1, 1), 2),
    "smaller-first": ((16, 64, 64, 128, 128), (1, 2, 1, 1, 1), 2),
    "seven": ((16, 32, 32, 64, 96, 128, 128), (1, 1, 1, 2, 1, 1, 1), 1),
}
ROUNDS, STEPS = 20, 3


def with_stem(config: Config, name: str) -> Config:
    channels, strides, primary = STEMS[name]
    kernels = (3,) * len(channels)
    stem = {"stem_channels": channels, "stem_kernels": kernels, "stem_strides": strides, "primary_stride": primary}
    return replace(config, model=replace(config.model, **stem))


def seconds_a_step(config: Config, rounds: int = ROUNDS) -> dict[str, float]:
    """The median over rounds, in each of which every stem takes a few steps; the first round does not count."""
    runs = {name: training.prepare(with_stem(config, name), Path()) for name in STEMS}
    taken: dict[str, list[float]] = {name: [] for name in STEMS}
    for _ in range(rounds + 1):
        for name, run in runs.items():
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
