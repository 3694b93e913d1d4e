"""capsnet bench."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from typing import Any

from capsnet.bench import network as measured
from capsnet.cli.flags import MaybePath, MaybeStr, Switch, parse
from capsnet.errors import UserError, unknown
from capsnet.io import checkpoint
from capsnet.models.config import ModelConfig
from capsnet.models.registry import MODELS
from capsnet.terminal import Counter, print_table
from capsnet.train.presets import PRESETS, get_preset


@dataclass(frozen=True)
class Bench:
    """Compare the speed and memory of the fast kernels with plain PyTorch, in training and inference.

    Variants: public and public-stopped (two styles of public implementations: gradients flow through all routing
    iterations, or through the last one only), plain (this package without its kernels), fast (the default) and
    fast-bf16 (the same in bfloat16). Ratios to public code are relative to the faster of the two styles.

    Examples:
      capsnet bench --quick
      capsnet bench --image-size 36
      capsnet bench --routing all
      capsnet bench --large
      capsnet bench --data
      capsnet bench --processes 1,2
      capsnet bench --sweep --plot sweep.png
    """

    quick: Switch = False
    """Finish within 90 seconds: fewer repetitions, no breakdown by part, no GEMM peak."""
    sweep: Switch = False
    """Measure how the cost grows with batch size, image size, capsules, classes and routing iterations."""
    precision: Switch = False
    """Compare accuracy instead: train the quick preset for one epoch in float32 and bfloat16, with three seeds each."""
    routing: MaybeStr = None
    """Compare routing algorithms instead, by a layer of the paper's size: one name, or all."""
    grid: Switch = False
    """Measure a training step of the 68,754-parameter matrix network instead, plain and fast (batch 64 by default)."""
    large: Switch = False
    """Measure a training step on 3×227×227 images with 196 classes and batch 8 instead, and how the cost grows."""
    data: Switch = False
    """Train on a large folder of drawn images instead, in memory and from the cache, and compare speed and memory.
    With 200,000 images it needs 3.3 GB on the disk and 6 GB of memory."""
    images: int = 200_000
    """Images that --data draws."""
    processes: MaybeStr = None
    """Measure training steps by these numbers of processes instead, such as 1,2: images per second, bytes exchanged and
    the share of time spent waiting, for the presets paper, best and cifar10. Each process has a batch of its own."""
    plot: MaybePath = None
    """Write a figure to this file (.png or .svg): the sweep, or the time of a step by part."""
    network: str = "paper"
    """Network to measure: that of a preset, or a model by its name, such as a plugin's. The public variants only exist
    for the paper's."""
    image_size: int = 28
    """Side of the images in pixels (MultiMNIST has 36)."""
    batch: int = 128
    """Images per training step."""
    repeats: int = 7
    """Repetitions per variant."""
    json: Switch = False
    """Print JSON."""

    @property
    def rounds(self) -> int:
        """How often each variant is measured."""
        return 3 if self.quick else self.repeats


def bench(argv: list[str]) -> int:
    flags = parse(Bench, "bench", argv)
    if min(flags.image_size, flags.batch, flags.repeats) < 1:
        raise UserError("--image-size, --batch and --repeats should be above 0.")
    if flags.plot:
        check_plot(flags)
    mode = next((name for name in IGNORED if getattr(flags, name)), "")
    refuse_what_would_be_ignored(flags, mode)
    modes: dict[str, Callable[[Bench], None]] = {
        "precision": compare_precision, "sweep": measure_sweep, "routing": compare_routings, "grid": compare_grids,
        "large": measure_large, "data": compare_data, "processes": compare_processes,
    }  # fmt: skip
    modes.get(mode, measure_network)(flags)
    return 0


def measure_network(flags: Bench) -> None:
    """Print a table of the variants of one network, then ratios and memory."""
    shape = (1, flags.image_size, flags.image_size)
    case = measured.Case(replace(network_of(flags.network), image_shape=shape), flags.batch)
    with Counter("measuring") as counter:
        result = measured.measure(case, repeats=flags.rounds, details=not flags.quick, on_tick=counter)
    if flags.plot:
        from capsnet.report import figures

        figures.save(figures.step_bill(result), flags.plot)
    if flags.json:
        print_record(flags, result)
        return
    print(result["case"])
    columns = ["variant", "training step s", "training images/s", "inference images/s", "one image ms"]
    rows = []
    for side, seconds in result["train_seconds"].items():
        steps = f"{seconds['median']:.3f} ({seconds['quartile_low']:.3f} to {seconds['quartile_high']:.3f})"
        one = 1e3 * result["single_image_seconds"][side]["median"]
        rates = (result["train_images_per_second"][side], result["inference_images_per_second"][side])
        rows.append((side, steps, *(f"{rate:,.0f}" for rate in rates), f"{one:.1f}"))
    print_table(columns, rows)
    for name, value in result.items():
        if name.startswith(("train_ratio", "inference_ratio", "peak", "gemm", "share", "breakdown")):
            print(f"  {name.replace('_', ' ')}: {value}")


def network_of(name: str) -> ModelConfig:
    """The network of a preset, or a model with its default sizes."""
    if name in PRESETS:
        return get_preset(name).model
    if name in MODELS:
        return MODELS.get(name).Config()
    raise unknown("network", name, [*PRESETS, *MODELS.names()])


def compare_precision(flags: Bench) -> None:
    """Print one line per precision."""
    with Counter("training") as counter:
        result = measured.precision(on_tick=counter)
    if flags.json:
        print_record("precision", result)
        return
    rows = [(kind, f"{result[kind]['mean']:.3f} ± {result[kind]['std']:.3f}") for kind in ("fp32", "bf16")]
    print_table(["precision", "validation error %"], rows)


def measure_sweep(flags: Bench) -> None:
    """Print one line per case of the sweep."""
    with Counter("measuring") as counter:
        found = measured.sweep(flags.rounds, on_tick=counter)
    if flags.plot:
        from capsnet.report import figures

        figures.save(figures.sweep(found), flags.plot)
    if flags.json:
        print_record(flags, {"sweep": found})
        return
    rows = []
    for case in found:
        plain, fast = case["seconds"]["plain"], case["seconds"]["fast"]
        memory = [str(case["peak_mb"][side]) for side in ("plain", "fast")]
        rows.append((case["quantity"], case["value"], f"{plain:.3f}", f"{fast:.3f}", f"{plain / fast:.2f}", *memory))
    print_table(["quantity", "value", "plain s", "fast s", "ratio", "plain MB", "fast MB"], rows)


def compare_routings(flags: Bench) -> None:
    """Print one line per algorithm, the fastest first."""
    from capsnet.bench.routing import compare, names_of

    assert flags.routing
    names_of(flags.routing)  # an unknown name is refused before anything is measured
    with Counter("measuring") as counter:
        found = compare(flags.routing, flags.batch, flags.rounds, counter)
    found.sort(key=lambda speed: speed.fast_seconds)
    if flags.json:
        print_record(flags, {"routings": [asdict(speed) for speed in found]})
        return
    columns = ["routing", "plain ms", "fast ms", "ratio", "plain MB", "fast MB", "network step ms", "share of a step"]
    rows = [
        (
            speed.routing,
            *(f"{1e3 * seconds:.0f}" for seconds in (speed.plain_seconds, speed.fast_seconds)),
            f"{speed.ratio:.2f}",
            *(f"{megabytes:.0f}" for megabytes in (speed.plain_mb, speed.fast_mb)),
            f"{1e3 * speed.step_seconds:.0f}",
            f"{speed.share_percent:.0f} %",
        )
        for speed in found
    ]
    print_table(columns, rows, title=f"a training step of the layer 1152×8 → 10×16, batch {flags.batch}")


def compare_grids(flags: Bench) -> None:
    """Print one line per routing that has a kernel for grids of capsules."""
    from capsnet.bench.grid import compare

    batch = 64 if flags.batch == Bench.batch else flags.batch
    with Counter("measuring") as counter:
        found = compare(batch, flags.rounds, counter)
    if flags.json:
        print_record(flags, {"batch": batch, "grids": [asdict(speed) for speed in found]})
        return
    rows = [
        (speed.routing, f"{speed.plain_seconds:.3f}", f"{speed.fast_seconds:.3f}", f"{speed.ratio:.2f}")
        for speed in found
    ]
    title = f"a training step of the matrix network, 68,754 parameters, batch {batch}"
    print_table(["routing", "plain s", "fast s", "ratio"], rows, title=title)


def measure_large(flags: Bench) -> None:
    """Print the cost of the large network, and a line per case of the sweep."""
    from capsnet.bench.grid import large

    with Counter("measuring") as counter:
        network, growths = large(1 if flags.quick else min(flags.repeats, 3), counter)
    if flags.json:
        print_record(flags, {"large": asdict(network), "growth": [asdict(growth) for growth in growths]})
        return
    print(
        f"A training step of matrix capsules on 3×227×227 images, 196 classes, batch 8: {network.seconds:.1f} s, "
        f"peak memory {network.megabytes:,.0f} MB."
    )
    rows = [
        (growth.quantity, f"{value:,}", f"{cost.seconds:.3f}", f"{cost.megabytes:,.0f}", f"{growth.exponent:.2f}")
        for growth in growths
        for value, cost in zip(growth.values, growth.costs, strict=True)
    ]
    print_table(["quantity", "value", "seconds", "peak MB", "exponent (1: linear)"], rows, title="one capsule layer")


def compare_data(flags: Bench) -> None:
    """Print one line per way to read the data."""
    from capsnet.bench.data import STEPS, compare

    found = compare(flags.images, flags.batch, flags.rounds)
    if flags.json:
        print_record(flags, {"data": asdict(found)})
        return
    columns = ["images", "training images/s", "ratio", "batches alone images/s", "peak MB", "above the network MB"]
    rows = [
        (
            way.way,
            "{median:,.0f} ({quartile_low:,.0f} to {quartile_high:,.0f})".format(**way.training),
            f"{way.ratio:.3f}",
            *(f"{value:,.0f}" for value in (way.batches, way.peak_mb, way.above_network_mb)),
        )
        for way in found.ways
    ]
    c, h, w = found.shape
    print_table(columns, rows, title=f"{found.images:,} images of {c}×{h}×{w}, turns of {STEPS} steps of {found.batch}")
    print(f"the cache has {found.cache_gb:.2f} GB and opens in {found.reopening_seconds:.1f} s")


def compare_processes(flags: Bench) -> None:
    """Print one line per network and number of processes."""
    from capsnet.bench.processes import NETWORKS, compare

    sizes = numbers_of(flags.processes or "")
    with Counter("measuring") as counter:
        found = compare(sizes, NETWORKS, flags.batch, flags.rounds, counter)
    if flags.json:
        print_record(flags, {"processes": [asdict(step) for step in found]})
        return
    columns = [
        "network",
        "processes",
        "images/s",
        "step, s",
        "waiting",
        "gradients, MB",
        "sums",
        "statistics, MB",
        "sums",
    ]
    rows = [
        (
            *(step.network, str(step.processes), f"{step.images_per_second:,.0f}", f"{step.seconds:.3f}"),
            *(f"{step.waiting_percent:.0f} %", f"{step.gradient_bytes / 1e6:.1f}", str(step.buckets)),
            *(f"{step.other_bytes / 1e6:.2f}", str(step.other_exchanges)),
        )
        for step in found
    ]
    print_table(columns, rows, title=f"a training step with {flags.batch} images per process")


def numbers_of(text: str) -> list[int]:
    """
    >>> numbers_of("1,2")
    [1, 2]
    """
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise UserError(f"--processes is '{text}': give numbers of processes, such as 1,2.")
    return numbers


def print_record(settings: Bench | str, record: dict[str, Any]) -> None:
    """Print a result as JSON, with its certificate."""
    bench = settings if isinstance(settings, str) else vars(settings)
    birth = checkpoint.certificate({"bench": bench}, 0.0, cpu=measured.cpu_name())
    print(json.dumps({**record, "certificate": birth.to_json()}, default=str))


IGNORED = {  # by each mode of the benchmark, besides the modes after it
    "precision": ("network", "image_size", "batch", "quick", "repeats"),
    "sweep": ("network", "image_size", "batch"),
    "routing": ("network", "image_size", "plot"),
    "grid": ("network", "image_size", "plot"),
    "large": ("network", "image_size", "plot", "batch"),
    "data": ("network", "image_size", "plot"),
    "processes": ("network", "image_size", "plot"),
}


def refuse_what_would_be_ignored(flags: Bench, mode: str) -> None:
    """Refuse flags that another kind of benchmark would silently ignore."""
    modes = list(IGNORED)
    for name in (*IGNORED[mode], *modes[modes.index(mode) + 1 :]) if mode else ():
        if getattr(flags, name) != getattr(Bench, name):
            raise UserError(f"--{mode} does not use --{name.replace('_', '-')}: leave one of the two out.")


def check_plot(flags: Bench) -> None:
    """Refuse a figure that cannot be drawn before measuring for minutes."""
    if find_spec("matplotlib") is None:
        raise UserError("figures need matplotlib: pip install 'capsnet[train]'.")
    if flags.quick and not flags.sweep:
        raise UserError("--quick skips the breakdown that --plot draws: leave one of the two out.")
    if flags.precision or (flags.network != "paper" and not flags.sweep):
        raise UserError("--plot needs --sweep or --network paper: leave --plot out.")
    if flags.plot and flags.plot.suffix not in (".png", ".svg"):
        raise UserError(f"{flags.plot} should end in .png or .svg.")
