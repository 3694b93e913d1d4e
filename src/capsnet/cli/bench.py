"""capsnet bench."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, Literal

from capsnet import bench as measured
from capsnet import checkpoint
from capsnet.cli.flags import MaybePath, Switch, parse
from capsnet.config import CapsNetConfig, get_preset
from capsnet.errors import UserError
from capsnet.terminal import Counter, print_table


@dataclass(frozen=True)
class Bench:
    """Measure training and inference, plain beside fast, in one run on this machine.

    Examples:
      capsnet bench --quick
      capsnet bench --image-size 36
      capsnet bench --sweep --plot sweep.png
    """

    quick: Switch = False
    """Inside 90 seconds: fewer repeats, without the breakdown and the machine's own peak."""
    sweep: Switch = False
    """How cost grows with batch, image size, capsules, classes and iterations."""
    precision: Switch = False
    """Instead: train the quick preset for an epoch in float32 and bfloat16, three seeds each, and compare."""
    plot: MaybePath = None
    """Write a picture here (.png or .svg): of the sweep, or of where a step's time goes."""
    network: Literal["paper", "quick", "best"] = "paper"
    """Whose network to measure; the public style exists for the paper's only."""
    image_size: int = 28
    """Side of the images; 36 is MultiMNIST's."""
    batch: int = 128
    """Images in a step."""
    repeats: int = 7
    """Turns of each side."""
    json: Switch = False
    """Print JSON."""


def bench(argv: list[str]) -> int:
    flags = parse(Bench, "bench", argv)
    if min(flags.image_size, flags.batch, flags.repeats) < 1:
        raise UserError("--image-size, --batch and --repeats need numbers above 0.")
    if flags.plot:
        check_plot(flags)
    refuse_what_would_be_ignored(flags)
    if flags.precision:
        return compare_precision(flags.json)
    with Counter("measuring") as counter:
        if flags.sweep:
            rows = measured.sweep(3 if flags.quick else flags.repeats, on_tick=counter)
            birth = checkpoint.certificate({"bench": vars(flags)}, 0.0, cpu=measured.cpu_name())
        else:
            network = get_preset(flags.network).model
            assert isinstance(network, CapsNetConfig)
            shape = (1, flags.image_size, flags.image_size)
            case = measured.Case(replace(network, image_shape=shape), flags.batch)
            repeats = 3 if flags.quick else flags.repeats
            result = measured.measure(case, repeats=repeats, details=not flags.quick, on_tick=counter)
            result["certificate"] = checkpoint.certificate({"bench": vars(flags)}, 0.0, cpu=measured.cpu_name())
    if flags.plot:
        from capsnet import figures

        figures.save(figures.sweep(rows) if flags.sweep else figures.step_bill(result), flags.plot)
    if flags.sweep:
        show_sweep(rows, birth, flags.json)
    elif flags.json:
        print(json.dumps(result, default=str))
    else:
        show_bench(result)
    return 0


def compare_precision(as_json: bool) -> int:
    with Counter("training") as counter:
        result = measured.precision(on_tick=counter)
    result["certificate"] = checkpoint.certificate({"bench": "precision"}, 0.0, cpu=measured.cpu_name())
    if as_json:
        print(json.dumps(result))
        return 0
    rows = [(kind, f"{result[kind]['mean']:.3f} ± {result[kind]['std']:.3f}") for kind in ("fp32", "bf16")]
    print_table(["precision", "validation error %"], rows)
    return 0


def refuse_what_would_be_ignored(flags: Bench) -> None:
    """A sweep has sizes of its own, and the comparison of precisions has everything of its own."""
    what = "--precision" if flags.precision else "--sweep" if flags.sweep else ""
    fixed = ("network", "image_size", "batch", *(("sweep", "quick", "repeats") if flags.precision else ()))
    for name in fixed if what else ():
        if getattr(flags, name) != getattr(Bench, name):
            raise UserError(f"{what} takes no --{name.replace('_', '-')}: leave one of the two out.")


def check_plot(flags: Bench) -> None:
    """Refuse a picture that could not be drawn before measuring for minutes."""
    if find_spec("matplotlib") is None:
        raise UserError("a picture needs matplotlib: pip install 'capsnet[train]'.")
    if flags.quick and not flags.sweep:
        raise UserError("--quick leaves out where the time goes, so there is nothing to draw: drop --quick or --plot.")
    if flags.precision or (flags.network != "paper" and not flags.sweep):
        raise UserError("only a --sweep and the paper's network beside the public style can be drawn: drop --plot.")
    if flags.plot and flags.plot.suffix not in (".png", ".svg"):
        raise UserError(f"{flags.plot} is neither .png nor .svg, and no other kind of picture is written.")


def show_sweep(rows: list[dict[str, Any]], birth: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"sweep": rows, "certificate": birth}, default=str))
        return
    table = []
    for row in rows:
        plain, fast = row["seconds"]["plain"], row["seconds"]["fast"]
        memory = [str(row["peak_mb"][side]) for side in ("plain", "fast")]
        table.append((row["quantity"], row["value"], f"{plain:.3f}", f"{fast:.3f}", f"{plain / fast:.2f}", *memory))
    print_table(["quantity", "value", "plain s", "fast s", "ratio", "plain MB", "fast MB"], table)


def show_bench(result: dict[str, Any]) -> None:
    """The measured sides as a table, the ratios as sentences."""
    print(result["case"])
    columns = ["side", "train s", "train images/s", "inference images/s", "one image ms"]
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
