"""The benchmark of several processes: training steps of three networks by 1, 2, … processes under torchrun.

Every process keeps its batch, so N processes take a step of N times as many images, as N machines would. What is
measured of a step: its seconds, the seconds in which a process waits for the others, the bytes that it gives to them,
and the number of exchanges.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from capsnet.data import Dataset, Splits
from capsnet.errors import UserError
from capsnet.group.base import current
from capsnet.group.launch import launch
from capsnet.group.member import take_part
from capsnet.kernels.allocator import keep_memory
from capsnet.timing import timed
from capsnet.train import loop, steps
from capsnet.train.presets import get_preset

NETWORKS = ("paper", "best", "cifar10")


@dataclass(frozen=True)
class Step:
    """A training step of one network by several processes, as rank 0 sees it."""

    network: str
    processes: int
    batch: int
    """Images of one process."""
    parameters: int
    seconds: float
    images_per_second: float
    waiting_percent: float
    gradient_bytes: int
    """That a process gives to the others in a step."""
    buckets: int
    last_bucket_bytes: int
    other_bytes: int
    """Of statistics and losses."""
    other_exchanges: int


def compare(
    processes: Sequence[int], networks: Sequence[str], batch: int, repeats: int, on_tick: Callable[[int, int], None]
) -> list[Step]:
    """A training step of each network by each number of processes, with as many threads in each of them."""
    cases = [(network, size) for network in networks for size in processes]
    threads = max(1, (os.cpu_count() or 1) // max(processes))
    found = []
    for network, size in cases:
        found.append(measured(network, size, batch, repeats, threads))
        on_tick(len(found), len(cases))
    return found


def measured(network: str, size: int, batch: int, repeats: int, threads: int) -> Step:
    """One case, in new processes that torchrun starts."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    command += ["-m", "capsnet.bench.processes", network, str(batch), str(repeats)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "NUMBA_NUM_THREADS": str(threads)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise UserError(f"{network} cannot be measured in {size} processes: {last_error(done.stderr)}")
    return Step(**json.loads(done.stdout.splitlines()[-1]))


def last_error(text: str) -> str:
    """Our own sentence among what torchrun says.

    >>> last_error("W1 torch/x.py\\ncapsnet: there is no preset 'a'.\\nTraceback")
    "there is no preset 'a'."
    """
    ours = [line.removeprefix("capsnet: ") for line in text.splitlines() if line.startswith("capsnet: ")]
    return (ours or text.splitlines()[-1:] or ["it ended without a message."])[0]


def measure(network: str, batch: int, repeats: int) -> int:
    """What every process of a case does: train steps on random images; rank 0 prints the result."""
    group = current()
    run = run_of(network, batch * group.size)
    for _ in range(2):
        steps.train_step(run)
    bytes_before, exchanges_before, waited_before = group.bytes, group.exchanges, group.waited
    group.barrier()
    seconds = timed(lambda: steps.train_step(run), repeats)
    waited = (group.waited - waited_before) / sum(seconds)
    buckets = [bucket.flat.nbytes for bucket in run.gradients.buckets] if run.gradients else []
    told = {
        "other_bytes": (group.bytes - bytes_before) // repeats - sum(buckets),
        "other_exchanges": (group.exchanges - exchanges_before) // repeats - len(buckets),
    }
    step = statistics.median(seconds)
    result = Step(
        network, group.size, batch, sum(p.numel() for p in run.model.parameters()), step,
        round(group.size * batch / step, 1), round(100 * waited, 1), sum(buckets), len(buckets),
        buckets[-1] if buckets else 0, **told,
    )  # fmt: skip
    if group.leads:
        print(json.dumps(asdict(result)))
    return 0


def run_of(network: str, batch: int) -> loop.Run:
    """A training of a preset on random images, as many as a batch has."""
    config = get_preset(network)
    config = replace(config, batch_size=batch, epochs=1000, validation=0, device="cpu", patience=0, stop_at=0.0)
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (batch, *config.model.image_shape), dtype=torch.uint8, generator=draw)
    classes = tuple(map(str, range(config.model.num_classes)))
    data = Dataset(images, torch.arange(batch) % len(classes), classes, "random images")
    return loop.assemble(config, Path(), Splits(data, data.subset(torch.arange(0)), data))


if __name__ == "__main__":
    keep_memory()
    place = launch()
    assert place is not None
    name, size, times = sys.argv[1:]
    sys.exit(take_part(place, lambda: measure(name, int(size), int(times))))
