"""Benchmarks: time per step, cost of bfloat16, and what did not help."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tables import read, table

RATIOS = {
    "train_ratio_fp32": "training, `fast` and {public}",
    "train_ratio_bf16": "training, `fast-bf16` and {public}",
    "train_ratio_fp32_same_allocator": "training, `fast` and `plain`",
    "train_ratio_bf16_same_allocator": "training, `fast-bf16` and `plain`",
    "inference_ratio_batch128": "inference, batch 128, `fast` and {public}",
    "inference_ratio_bf16": "inference, batch 128, `fast-bf16` and {public}",
    "inference_ratio_batch128_same_allocator": "inference, batch 128, `fast` and `plain`",
    "inference_ratio_batch1": "inference, one image, `fast` and `plain`",
}


def bench(name: str) -> str:
    """The variants of a benchmark, and the ratios between them."""
    result = read(name)
    sides = table(
        [
            "variant",
            "training step, s",
            "training, images/s",
            "inference, images/s",
            "one image, ms",
            "peak memory, MB",
        ],
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
        ["compared", "key", "speed-up"],
        ((compared(key, result), f"`{key}`", f"{result[key]:.2f}") for key in RATIOS if key in result),
    )
    return f"{result['case']}; {machine(result)}\n\n{sides}\n{ratios}"


def compared(ratio: str, *results: dict[str, Any]) -> str:
    """What a ratio compares; results from before `public-stopped` existed have a single public style."""
    both = all("public-stopped" in result["train_seconds"] for result in results)
    return RATIOS[ratio].format(public="the faster public style" if both else "`public`")


def bench_twice() -> str:
    """The ratios of the last two runs of the same code, which vary on a shared machine."""
    last, before = read("bench"), read("bench-before")
    rows = [
        (compared(key, last, before), f"{last[key]:.2f}", f"{before[key]:.2f}")
        for key in RATIOS
        if key in last and key in before
    ]
    return table(["compared", "last run", "run before"], rows)


def breakdown() -> str:
    """Time of a training step by part."""
    result = read("bench")
    parts = result["breakdown_ms"]
    sides = [side for side in ("plain", "fast", "fast-bf16") if side in parts]
    rows = [(part, *(f"{parts[side][part]:.0f}" for side in sides)) for part in parts["plain"]]
    share = result["share_of_gemm_peak"]
    return table(["forward + backward, ms", *sides], rows) + (
        f"\nThe fastest float32 matrix product in the same run reached {result['gemm_gflops']:.0f} GFLOP/s. Counting "
        f"the arithmetic of the paper's equations, the plain step reaches {100 * share['plain']:.0f} % of that and the "
        f"fast step {100 * share['fast']:.0f} %.\n"
    )


def presets() -> str:
    """Time per epoch and inference speed of the quick and best presets."""
    rows = []
    for name in ("quick", "best"):
        result = read(f"bench-{name}")
        steps = 60_000 // result["batch"]
        for side, seconds in result["train_seconds"].items():
            step, images = seconds["median"], f"{result['inference_images_per_second'][side]:,.0f}"
            single = f"{1e3 * result['single_image_seconds'][side]['median']:.1f} ms"
            rows.append((f"`{name}`", f"`{side}`", f"{1e3 * step:.0f} ms", f"{steps * step:.0f} s", images, single))
    columns = [
        "preset",
        "variant",
        "training step, batch 128",
        f"epoch of {steps} steps",
        "inference, images/s",
        "one image",
    ]
    return f"{result['certificate']['cpu']}, {result['certificate']['machine']}\n\n" + table(columns, rows)


def sweep() -> str:
    """How the cost grows, one quantity at a time."""
    rows = []
    for row in read("sweep")["sweep"]:
        plain, fast = row["seconds"]["plain"], row["seconds"]["fast"]
        memory = f"{row['peak_mb']['plain']:,} → {row['peak_mb']['fast']:,}"
        rows.append((row["quantity"], row["value"], f"{plain:.3f}", f"{fast:.3f}", f"{plain / fast:.2f}", memory))
    return table(["quantity", "value", "plain, s", "fast, s", "ratio", "peak MB"], rows)


def routings() -> str:
    """A training step of the paper's class capsule layer with each routing algorithm."""
    result = read("bench-routing")
    rows = [
        (
            f"`{row['routing']}`",
            f"{1e3 * row['plain_seconds']:.0f}",
            f"{1e3 * row['fast_seconds']:.0f}",
            f"{row['ratio']:.1f}",
            f"{row['plain_mb']:,.0f} → {row['fast_mb']:,.0f}",
            f"{row['share_percent']:.0f} %",
        )
        for row in result["routings"]
    ]
    columns = ["routing", "plain, ms", "fast, ms", "ratio", "memory, MB", "share of a step"]
    return f"{machine(result)}\n\n{table(columns, rows)}"


def grids() -> str:
    """A training step of the small matrix capsule network."""
    result = read("bench-grid")
    rows = [
        (f"`{row['routing']}`", f"{row['plain_seconds']:.2f}", f"{row['fast_seconds']:.2f}", f"{row['ratio']:.1f}")
        for row in result["grids"]
    ]
    return f"{machine(result)}\n\n{table(['routing', 'plain, s', 'fast, s', 'ratio'], rows)}"


def large() -> str:
    """A training step on large images, and how its cost grows."""
    result = read("bench-large")
    step = result["large"]
    rows = [
        (
            growth["quantity"],
            ", ".join(f"{value:,}" for value in growth["values"]),
            ", ".join(f"{cost['seconds']:.2f}" for cost in growth["costs"]),
            ", ".join(f"{cost['megabytes']:,.0f}" for cost in growth["costs"]),
            f"{growth['exponent']:.2f}",
        )
        for growth in result["growth"]
    ]
    return (
        f"{machine(result)}\n\nThe step takes {step['seconds']:.1f} s and at most {step['megabytes']:,.0f} MB.\n\n"
        + table(["quantity", "values", "seconds", "peak MB", "exponent of the time"], rows)
    )


def data() -> str:
    """Training on images in memory, and from the cache."""
    result = read("bench-data")
    found = result["data"]
    rows = [
        (
            f"`{way['way']}`",
            "{median:,.0f} ({quartile_low:,.0f} to {quartile_high:,.0f})".format(**way["training"]),
            f"{way['ratio']:.3f}",
            f"{way['batches']:,.0f}",
            *(f"{way[key]:,.0f}" for key in ("start_seconds", "peak_mb", "above_network_mb", "own_mb", "file_mb")),
        )
        for way in found["ways"]
    ]
    columns = ["", "training, images/s", "ratio", "batches alone, images/s", "start, s", "peak, MB"]
    columns += ["above the network, MB", "own, MB", "of files, MB"]
    what = (
        f"{found['images']:,} images of {'×'.join(map(str, found['shape']))}, batch {found['batch']}; {machine(result)}"
    )
    cache = f"The cache has {found['cache_gb']:.2f} GB; a new process opens it in {found['reopening_seconds']:.1f} s."
    return f"{what}\n\n{table(columns, rows)}\n{cache}\n"


def machine(result: dict[str, Any]) -> str:
    where = result["certificate"]
    return f"{where['cpu']}, {where['machine']}, torch {where['torch']}"


def precision() -> str:
    """Validation errors of short trainings in float32 and bfloat16, per seed."""
    runs = read("precision")
    rows = []
    for kind in ("fp32", "bf16"):
        errors, mean, std = (runs[kind][key] for key in ("errors", "mean", "std"))
        rows.append((kind, ", ".join(f"{error:.2f}" for error in errors), f"{mean:.3f} ± {std:.3f}"))
    how = "emulated" if runs["emulated"] else "in hardware"
    note = f"{runs['epochs']} epoch, {runs['data']}; bfloat16 {how}.\n\n"
    return note + table(["precision", "validation error per seed, %", "mean ± std, %"], rows)


def between() -> str:
    """Time saved by bfloat16 activations in the stem."""
    steps = read("search/best-stems")["seconds_a_step"]
    half, full = steps["branches"], steps["branches-float32"]
    return (
        f"A training step of `best` takes {1000 * half:.0f} ms with bfloat16 activations in its stem and "
        f"{1000 * full:.0f} ms with float32, {full / half:.2f} times as long (two cores).\n"
    )


def tried() -> str:
    """What did not help: notes from development."""
    notes = read("tried")
    rows = [(row["what"], row["measured"], row["why_not"]) for row in notes["tried"]]
    return f"{notes['note']}\n\n{table(['what', 'measured', 'why it was rejected'], rows)}"


def lab() -> str:
    """Response times of the Lab, measured in the browser."""
    result = read("lab")
    rows = [
        (what, f"{result[key]['median']:.1f} ms", f"{result[key]['p95']:.1f} ms", str(result[key]["n"]))
        for what, key in (
            ("pose slider to reconstruction", "slider_to_painted_ms"),
            ("changed input to prediction", "input_to_answer_ms"),
        )
    ]
    return table([f"`{result['model']}`", "median", "95th percentile", "measurements"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "data": data,
    "bench": lambda: bench("bench"),
    "bench-twice": bench_twice,
    "bench-36": lambda: bench("bench-36"),
    "bench-bf16": lambda: bench("bench-bf16"),
    "bench-amd": lambda: bench("bench-amd"),
    "breakdown": breakdown,
    "presets": presets,
    "sweep": sweep,
    "routings": routings,
    "grids": grids,
    "large": large,
    "precision": precision,
    "between": between,
    "tried": tried,
    "lab": lab,
}
