"""How fast it is: benchmarks, what a step takes, what bfloat16 costs and saves, and what did not help."""

from __future__ import annotations

from collections.abc import Callable

from tables import read, table

RATIOS = {
    "train_ratio_fp32": "training, `fast` beside `public`",
    "train_ratio_bf16": "training, `fast-bf16` beside `public`",
    "train_ratio_fp32_same_allocator": "training, `fast` beside `plain`",
    "train_ratio_bf16_same_allocator": "training, `fast-bf16` beside `plain`",
    "inference_ratio_batch128": "inference of 128 images, `fast` beside `public`",
    "inference_ratio_batch128_same_allocator": "inference of 128 images, `fast` beside `plain`",
    "inference_ratio_batch1": "inference of one image, `fast` beside `plain`",
}


def bench(name: str) -> str:
    """The sides of a benchmark, and the ratios between them."""
    result = read(name)
    sides = table(
        ["side", "training step, s", "training, images/s", "inference, images/s", "one image, ms", "peak memory, MB"],
        (
            (
                side,
                f"{seconds['median']:.3f} ({seconds['quartile_low']:.3f} to {seconds['quartile_high']:.3f})",
                f"{result['train_images_per_second'][side]:,.0f}",
                f"{result['inference_images_per_second'][side]:,.0f}",
                f"{1e3 * result['single_image_seconds'][side]['median']:.1f}",
                f"{result['peak_mb'][side]:,}",
            )
            for side, seconds in result["train_seconds"].items()
        ),
    )
    ratios = table(
        ["times as fast", "", "measured"],
        ((what, f"`{key}`", f"{result[key]:.2f}") for key, what in RATIOS.items() if key in result),
    )
    where = result["certificate"]
    return f"{result['case']}; {where['cpu']}, {where['machine']}, torch {where['torch']}\n\n{sides}\n{ratios}"


def bench_twice() -> str:
    """The ratios of the last two runs of the same code: how far a shared machine moves them."""
    last, before = read("bench"), read("bench-before")
    rows = [(what, f"{last[k]:.2f}", f"{before[k]:.2f}") for k, what in RATIOS.items() if k in last and k in before]
    return table(["times as fast", "last run", "run before"], rows)


def breakdown() -> str:
    """Where a training step's time goes."""
    result = read("bench")
    parts = result["breakdown_ms"]
    rows = [(part, f"{parts['plain'][part]:.0f}", f"{parts['fast'][part]:.0f}") for part in parts["plain"]]
    share = result["share_of_gemm_peak"]
    return table(["forward + backward, ms", "plain", "fast"], rows) + (
        f"\nThe machine's own best float32 matrix product in the same run: {result['gemm_gflops']:.0f} GFLOP/s. "
        f"Counted by the arithmetic of the paper's equations, the plain step uses {100 * share['plain']:.0f} % of it "
        f"and the fast one {100 * share['fast']:.0f} %.\n"
    )


def presets() -> str:
    """What the fast path means for an epoch, and for reading digits, of the quick and the best preset."""
    rows = []
    for name in ("quick", "best"):
        result = read(f"bench-{name}")
        steps = 60_000 // result["batch"]
        for side, seconds in result["train_seconds"].items():
            step, images = seconds["median"], f"{result['inference_images_per_second'][side]:,.0f}"
            single = f"{1e3 * result['single_image_seconds'][side]['median']:.1f} ms"
            rows.append((f"`{name}`", f"`{side}`", f"{1e3 * step:.0f} ms", f"{steps * step:.0f} s", images, single))
    columns = ["preset", "side", "a step of 128 images", f"an epoch, {steps} steps", "images/s read", "one image"]
    return f"{result['certificate']['cpu']}, {result['certificate']['machine']}\n\n" + table(columns, rows)


def sweep() -> str:
    """How cost grows, one quantity at a time."""
    rows = []
    for row in read("sweep")["sweep"]:
        plain, fast = row["seconds"]["plain"], row["seconds"]["fast"]
        memory = f"{row['peak_mb']['plain']:,} → {row['peak_mb']['fast']:,}"
        rows.append((row["quantity"], row["value"], f"{plain:.3f}", f"{fast:.3f}", f"{plain / fast:.2f}", memory))
    return table(["quantity", "value", "plain, s", "fast, s", "ratio", "peak MB"], rows)


def precision() -> str:
    """Short trainings in float32 and bfloat16, seed by seed, on validation."""
    runs = read("precision")
    rows = []
    for kind in ("fp32", "bf16"):
        errors, mean, std = (runs[kind][key] for key in ("errors", "mean", "std"))
        rows.append((kind, ", ".join(f"{error:.2f}" for error in errors), f"{mean:.3f} ± {std:.3f}"))
    how = "emulated, on a processor without it" if runs["emulated"] else "in hardware"
    note = f"{runs['epochs']} epoch, {runs['data']}; bfloat16 {how}.\n\n"
    return note + table(["precision", "validation error of each seed, %", "mean ± std, %"], rows)


def stems() -> str:
    """What a step takes with each of the stems that the best preset has had."""
    steps = read("search/best-stems")["seconds_a_step"]
    five, smaller, seven, branches = (steps[name] for name in ("five", "smaller-first", "seven", "branches"))
    return (
        f"A step with 16 channels takes {100 * smaller / five:.0f} % of the time that it takes with 32; one with seven "
        f"convolutions (below) takes {100 * seven / smaller:.0f} % of that with 16 channels and five, and one with "
        f"three branches ([further below](#branches)) {branches / seven:.1f} times as long as that "
        f"(`python docs/stems.py`, two cores).\n"
    )


def between() -> str:
    """What bfloat16 between the layers of a stem saves."""
    steps = read("search/best-stems")["seconds_a_step"]
    half, full = steps["branches"], steps["branches-float32"]
    return (
        f"A training step of `best` takes {1000 * half:.0f} ms with bfloat16 between the layers of its stem and "
        f"{1000 * full:.0f} ms with float32, {full / half:.2f} times as long (`python docs/stems.py`, two cores).\n"
    )


def tried() -> str:
    """What did not help, as it was written down."""
    notes = read("tried")
    rows = [(row["what"], row["measured"], row["why_not"]) for row in notes["tried"]]
    return f"{notes['note']}\n\n{table(['what', 'measured', 'why it is not here'], rows)}"


def lab() -> str:
    """How fast the Lab's page answers, measured in the browser."""
    result = read("lab")
    rows = [
        (what, f"{result[key]['median']:.1f} ms", f"{result[key]['p95']:.1f} ms", str(result[key]["n"]))
        for what, key in (
            ("a pose slider moves until the reconstruction is painted", "slider_to_painted_ms"),
            ("the input changes until the network's answer is there", "input_to_answer_ms"),
        )
    ]
    return table([f"`{result['model']}`, from", "median", "95 % within", "times"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "bench": lambda: bench("bench"),
    "bench-twice": bench_twice,
    "bench-36": lambda: bench("bench-36"),
    "bench-bf16": lambda: bench("bench-bf16"),
    "breakdown": breakdown,
    "presets": presets,
    "sweep": sweep,
    "precision": precision,
    "best-stems": stems,
    "between": between,
    "tried": tried,
    "lab": lab,
}
