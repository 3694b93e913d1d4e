"""The benchmark of capsules on grids: the speed of the matrix network, and what large images and many classes cost.

`compare` measures a training step of the 68,754-parameter network (32×32×2 images, five classes), plain and fast in
turns in one process. `large` measures a training step on images of 3×227×227 with 196 classes, and how the cost of a
layer grows when one quantity doubles; every case runs in a separate process, which reports its seconds and its peak
memory.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

from capsnet import kernels
from capsnet.bench.network import peak_megabytes, printed_by
from capsnet.data import Batch, multi_hot
from capsnet.kernels.allocator import keep_memory
from capsnet.models.config import LossConfig
from capsnet.models.matrix import MatrixCapsNet, MatrixConfig
from capsnet.nn.conv import ClassCaps, ConvCaps
from capsnet.routing.base import options_for
from capsnet.timing import alternate, timed

Tick = Callable[[int, int], None]
ROUTINGS = ("em", "dynamic")
LARGE_IMAGE, LARGE_CLASSES, LARGE_BATCH = (3, 227, 227), 196, 8
POSE = 16


@dataclass(frozen=True)
class GridSpeed:
    """A training step of the matrix network with one routing."""

    routing: str
    plain_seconds: float
    fast_seconds: float
    ratio: float


@dataclass(frozen=True)
class Case:
    """A layer on a grid of `side`×`side` cells, or a whole network (`layer="network"`, whose side is the image's)."""

    layer: str
    side: int
    types: int
    upper: int

    @property
    def positions(self) -> int:
        return self.side**2


@dataclass(frozen=True)
class Cost:
    """What a training step costs."""

    seconds: float
    megabytes: float  # peak memory of the process


@dataclass(frozen=True)
class Growth:
    """How the cost of a layer grows with one quantity: cost ∝ quantity^exponent, so an exponent of 1 is linear."""

    quantity: str
    values: tuple[int, ...]
    costs: tuple[Cost, ...]
    exponent: float


SWEEP: dict[str, tuple[Case, ...]] = {
    "positions": tuple(Case("conv", side, 8, 16) for side in (18, 34, 66)),  # 16², 32² and 64² windows
    "lower types": tuple(Case("conv", 34, types, 16) for types in (4, 8, 16)),
    "upper types": tuple(Case("conv", 34, 8, types) for types in (8, 16, 32)),
    "classes": tuple(Case("class", 32, 16, classes) for classes in (49, 98, 196)),
}
LARGE = Case("network", LARGE_IMAGE[1], 0, LARGE_CLASSES)


# ---- The speed of the matrix network ----


def compare(batch: int, repeats: int, on_tick: Tick) -> list[GridSpeed]:
    """A training step of the matrix network with each routing that has a kernel for grids."""
    found = []
    for name in ROUTINGS:
        config = MatrixConfig((2, 32, 32), 5, routing=options_for(name))
        step = network_step(config, batch)
        plain, fast = (statistics.median(x) for x in alternate([in_plain(step), step], repeats))
        found.append(GridSpeed(name, plain, fast, plain / fast))
        on_tick(len(found), len(ROUTINGS))
    return found


def in_plain(step: Callable[[], None]) -> Callable[[], None]:
    def plain() -> None:
        with kernels.plain():
            step()

    return plain


def network_step(config: MatrixConfig, batch: int) -> Callable[[], None]:
    """Forward, spread loss, backward and Adam."""
    torch.manual_seed(0)
    model = MatrixCapsNet(config)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    labels = torch.arange(batch) % config.num_classes
    examples = Batch(torch.rand(batch, *config.image_shape), multi_hot(labels, config.num_classes), labels, labels)

    def step() -> None:
        loss = model.loss(model(examples.images), examples, LossConfig()).total
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return step


# ---- Large images and many classes ----


def large(repeats: int, on_tick: Tick) -> tuple[Cost, list[Growth]]:
    """The cost of the large network, and the growth of a layer's cost in each quantity of the sweep."""
    total, done = 1 + sum(map(len, SWEEP.values())), 0

    def cost(case: Case, times: int) -> Cost:
        nonlocal done
        found = measured(case, times)
        done += 1
        on_tick(done, total)
        return found

    network = cost(LARGE, 1)
    growths = []
    for quantity, cases in SWEEP.items():
        costs = tuple(cost(case, repeats) for case in cases)
        values = tuple(value_of(quantity, case) for case in cases)
        growths.append(Growth(quantity, values, costs, exponent(values, [c.seconds for c in costs])))
    return network, growths


def value_of(quantity: str, case: Case) -> int:
    if quantity == "positions":
        return (case.side - 2) ** 2  # windows
    return case.types if quantity == "lower types" else case.upper


def exponent(values: Sequence[float], costs: Sequence[float]) -> float:
    """The slope of the line through the logarithms.

    >>> round(exponent([1, 2, 4], [3, 6, 12]), 6)
    1.0
    """
    return statistics.linear_regression([math.log(x) for x in values], [math.log(y) for y in costs]).slope


def measured(case: Case, repeats: int) -> Cost:
    """The cost of a case, in a new process."""
    return Cost(**printed_by("capsnet.bench.grid", json.dumps({**asdict(case), "repeats": repeats})))


def layer_step(case: Case) -> Callable[[], None]:
    """A forward and a backward pass of a layer with EM routing of matrix poses."""
    torch.manual_seed(0)
    sizes = (case.types, POSE, case.upper, POSE)
    layer: ConvCaps | ClassCaps
    if case.layer == "class":
        layer = ClassCaps(*sizes, (case.side, case.side), routing="em", matrix=True)
    else:
        layer = ConvCaps(*sizes, routing="em", matrix=True)
    grid = (LARGE_BATCH, case.side, case.side, case.types)
    poses, a = torch.randn(*grid, POSE).requires_grad_(), torch.rand(*grid)

    def step() -> None:
        routed = layer.route(poses, a)
        (routed.poses.sum() + routed.activations.sum()).backward()

    return step


def main(words: Sequence[str]) -> None:
    """The process behind `measured`: print seconds and peak memory; a network takes its first step, compiled before."""
    record = json.loads(words[0])
    repeats, case = record.pop("repeats"), Case(**record)
    keep_memory()
    if case.layer == "network":
        layer_step(Case("conv", 5, 1, 1))()
        step = network_step(MatrixConfig(LARGE_IMAGE, LARGE_CLASSES), LARGE_BATCH)
        seconds = timed(step, repeats)
    else:
        seconds = timed(layer_step(case), repeats, warmup=1)
    print(json.dumps(asdict(Cost(statistics.median(seconds), peak_megabytes()))))


if __name__ == "__main__":
    main(sys.argv[1:])
