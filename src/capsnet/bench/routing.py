"""The benchmark of routing algorithms: one layer, 1152×8 → 10×16, and its share of a step of the paper's network.

Plain and fast versions of a layer alternate in one process, so noise affects both alike. Peak memory is measured in a
separate process for each version.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from capsnet import kernels, plugins
from capsnet.bench.network import peak_megabytes, printed_by
from capsnet.kernels.allocator import keep_memory
from capsnet.models.capsnet import CapsNet
from capsnet.models.config import CapsNetConfig
from capsnet.nn.functional import squash
from capsnet.nn.layers import DenseCaps
from capsnet.routing.base import ROUTINGS, options_for
from capsnet.timing import alternate, timed

LOWER, LOWER_DIM, UPPER, UPPER_DIM = 1152, 8, 10, 16  # DigitCaps of the paper
VERSIONS = ("plain", "fast")


@dataclass(frozen=True)
class LayerSpeed:
    """One algorithm: a training step of the layer, plain and fast, and a step of the paper's network with it."""

    routing: str
    plain_seconds: float
    fast_seconds: float
    ratio: float
    plain_mb: float
    fast_mb: float
    step_seconds: float
    share_percent: float


def names_of(routing: str) -> list[str]:
    """`all`, or one registered name."""
    if routing == "all":
        return ROUTINGS.names()
    ROUTINGS.get(routing)
    return [routing]


def compare(routing: str, batch: int, repeats: int, on_tick: Callable[[int, int], None]) -> list[LayerSpeed]:
    """Measure one algorithm, or all of them; `on_tick(done, n)` is called after each."""
    names, found = names_of(routing), list[LayerSpeed]()
    for name in names:
        found.append(measure(name, batch, repeats))
        on_tick(len(found), len(names))
    return found


def measure(name: str, batch: int, repeats: int) -> LayerSpeed:
    steps = {version: layer_step(name, batch, version) for version in VERSIONS}
    seconds = alternate(list(steps.values()), repeats)
    plain, fast = (statistics.median(times) for times in seconds)
    plain_mb, fast_mb = (peak_of(name, batch, version) for version in VERSIONS)
    whole = statistics.median(timed(network_step(name, batch), max(2, repeats // 2), warmup=1))
    return LayerSpeed(name, plain, fast, plain / fast, plain_mb, fast_mb, whole, 100 * fast / whole)


def layer_step(name: str, batch: int, version: str) -> Callable[[], None]:
    """A forward and a backward pass of the layer."""
    torch.manual_seed(0)
    layer = DenseCaps(LOWER, LOWER_DIM, UPPER, UPPER_DIM, routing=name)
    u = squash(torch.randn(batch, LOWER, LOWER_DIM)).requires_grad_()

    def step() -> None:
        u.grad = None
        layer.zero_grad(set_to_none=True)
        with kernels.plain() if version == "plain" else nullcontext():
            routed = layer.route(u)
            (routed.poses.square().sum() + routed.activations.sum()).backward()

    return step


def network_step(name: str, batch: int) -> Callable[[], None]:
    """A forward and a backward pass of the paper's network."""
    torch.manual_seed(0)
    model = CapsNet(CapsNetConfig(routing=options_for(name)))
    images = torch.rand(batch, 1, 28, 28)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(images).activations.sum().backward()

    return step


def peak_of(name: str, batch: int, version: str) -> float:
    """Megabytes that two steps of the layer add to the peak memory of a new process."""
    return printed_by("capsnet.bench.routing", name, str(batch), version)


def main(words: Sequence[str]) -> None:
    """The process behind `peak_of`: print the megabytes."""
    name, batch, version, *rest = words
    plugins.load_flags(rest)
    keep_memory()
    step = layer_step(name, int(batch), version)
    before = peak_megabytes()
    step()
    step()
    print(round(peak_megabytes() - before, 1))


if __name__ == "__main__":
    main(sys.argv[1:])
