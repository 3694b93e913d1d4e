"""How good the networks are: presets, shipped models and fine-tuning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from capsnet.bench.network import PUBLIC
from capsnet.evaluate import mean_and_std
from capsnet.experiments.core.conduct import same_training
from capsnet.io.records import Card
from capsnet.search.report import command
from capsnet.train.config import Config
from capsnet.train.config_records import from_dict
from capsnet.train.presets import PRESETS, get_preset
from tables import card, cards, error_of, read, table

PRECISIONS = {
    "half": "half precision",
    "stem-full": "half precision, stem in full precision",
    "mixed": "decoder in half precision, everything else in full",
}


def summary() -> str:
    """The README's table: what is promised, what was measured."""
    found = card("best-mnist")
    lowest = [row["test_error_percent"] for row in found.seeds]
    photos = card("cifar10")
    benches = [read(name) for name in ("bench-amd", "bench-bf16")]
    public = [min(bench["train_seconds"][side]["median"] for side in PUBLIC) for bench in benches]
    rows = [
        quick_row("quick"),
        quick_row("quick-bf16"),
        (
            f"`best` on MNIST, {len(lowest)} seeds, {found.epochs} epochs",
            f"{sum(lowest) / len(lowest):.2f} % mean test error ({min(lowest):.2f} to {max(lowest):.2f} %)",
            f"about {minutes_alone(found.epochs):.0f} minutes of training",
        ),
        (
            f"`cifar10`, 1 seed, {photos.epochs} epochs (the paper's seven networks: 10.6 %)",
            f"{photos.test['error_percent']:.2f} % test error",
            f"{photos.training_seconds / 60:.0f} minutes of training on one core",
        ),
        (
            "training step, paper's network, batch 128",
            f"{times('train_ratio_fp32', benches)} faster than typical public code",
            f"{between([b['train_seconds']['fast']['median'] for b in benches])} s instead of {between(public)} s",
        ),
        (
            "the same in bfloat16",
            f"{times('train_ratio_bf16', benches)} faster than typical public code",
            f"{between([b['train_seconds']['fast-bf16']['median'] for b in benches])} s",
        ),
        (
            "the same in float32, compared with our readable version",
            f"{times('train_ratio_fp32_same_allocator', benches)} faster",
            f"{between([b['peak_mb_fast'] for b in benches], 0)} MB instead of "
            f"{between([b['peak_mb_plain'] for b in benches], 0)} MB",
        ),
        (
            "inference, paper's network, batch 128",
            f"{times('inference_ratio_batch128', benches)} faster than typical public code",
            f"{between([b['inference_images_per_second']['fast'] for b in benches], 0)} images/s",
        ),
    ]
    return table(["what", "result", "cost on two cores"], rows)


def quick_row(name: str) -> tuple[str, str, str]:
    """Error and time of several trainings of the quick preset on one machine."""
    runs = read(name)
    errors = [run["test"]["error_percent"] for run in runs]
    seconds = [run["certificate"]["seconds"] for run in runs]
    hardware = " with bfloat16 in hardware" if name.endswith("bf16") else ""
    return (
        f"`quick` on MNIST, {len(runs)} seeds, {runs[0]['certificate']['config']['epochs']} epochs",
        f"{sum(errors) / len(errors):.2f} % mean test error ({min(errors):.2f} to {max(errors):.2f} %)",
        f"{sum(seconds) / len(seconds):.0f} s of training{hardware}",
    )


def times(ratio: str, benches: Sequence[dict[str, Any]]) -> str:
    """The range of a ratio over benchmarks of several processors, such as 5.2 to 7.9×."""
    return f"{between([bench[ratio] for bench in benches], 1)}×"


def between(values: Sequence[float], decimals: int = 2) -> str:
    return f"{min(values):,.{decimals}f} to {max(values):,.{decimals}f}"


def minutes_alone(epochs: float) -> float:
    """Minutes that the best preset trains on two idle cores, from the time per step."""
    steps = epochs * (60_000 // get_preset("best").batch_size)
    return float(steps * read("search/best-stems")["seconds_a_step"]["branches"] / 60)


def demo(name: str = "quick") -> str:
    """Test errors of `make demo`, or of another training on all digits: one row per seed."""
    rows = []
    for run in read(name):
        test, birth = run["test"], run["certificate"]
        low, high = test["error_percent_interval_95"]
        rows.append(
            (
                str(birth["config"]["seed"]),
                f"{test['error_percent']:.2f} % ({test['errors']} of {test['n']:,})",
                f"{low:.2f} to {high:.2f} %",
                str(birth["config"]["epochs"]),
                f"{birth['seconds']:.0f} s",
            )
        )
    return table(["seed", "test error", "95 % interval", "epochs", "training time, two cores"], rows)


def models() -> str:
    """The shipped models, one per row, each linked to its card."""
    rows = [
        (
            f"[`{found.name}`](#{found.name})",
            found.title.rstrip("."),
            f"{found.parameters:,}",
            error_of(found.test),
            f"{found.weights.bytes / 1e6:.1f} MB",
        )
        for found in cards()
    ]
    return table(["name", "what", "parameters", "test error (95 % interval)", "size"], rows)


def model_cards() -> str:
    """A section for each model."""
    return "\n".join(map(model_card, cards()))


def model_card(found: Card) -> str:
    """One model: what it is, how it was trained, its errors and its limitations."""
    channels, height, width = found.image_shape
    birth, weights, trained = found.certificate, found.weights, by_its_preset(found.config)
    held_back = error_of(found.validation) if found.validation else "none: trained on all training images"
    facts = {
        "data": f"{found.data}, {found.training_images:,} training images",
        "input": f"{height}×{width}, {'grey' if channels == 1 else 'colour'}",
        "classes": ", ".join(found.classes),
        "parameters": f"{found.parameters:,}",
        "training": f"preset `{trained.preset}`, {found.epochs} epochs{in_legs(found)}, "
        f"{found.training_seconds:,.0f} s ({birth.machine}), torch {birth.torch}",
        "validation error": held_back,
        "test error": error_of(found.test),
        "seed": f"{found.seed} ({found.chosen_by})",
        **({} if found.legs else {"command": f"`{command(trained)}`"}),
        "weights": f"{PRECISIONS[weights.precision]}, {weights.bytes / 1e6:.1f} MB",
        "sha256": f"`{weights.sha256}`",
    }
    listed = "".join(f"- {weakness}\n" for weakness in found.weaknesses)
    return (
        f"## {found.name}\n\n{found.title}\n\n```\ncapsnet predict {found.name} photo.png\n```\n\n"
        f"{table(['', ''], facts.items())}\nLimitations:\n\n{listed}\n{seeds_table(found.seeds)}"
    )


def by_its_preset(config: dict[str, Any]) -> Config:
    """A training's config, named after the preset that it equals, if there is one."""
    trained = from_dict(config)
    alike = (name for name in PRESETS if same_training(config, replace(get_preset(name), seed=trained.seed)))
    return replace(trained, preset=next(alike, trained.preset))


def in_legs(found: Card) -> str:
    """How the epochs were divided, if the training continued from other weights."""
    epochs = [str(leg["epochs"]) for leg in found.legs]
    return f" in stages of {' + '.join(epochs)}, each with a fresh optimiser state" if epochs else ""


def seeds_table(seeds: Sequence[dict[str, Any]]) -> str:
    """Every seed that was trained, including the shipped one."""
    rows = []
    for row in seeds:
        held_back = row["validation_error_percent"]
        judged = "–" if held_back is None else f"{held_back:.2f} %"
        shipped = "shipped" if row["shipped"] else ""
        rows.append(
            (str(row["seed"]), judged, f"{row['test_error_percent']:.2f} %", f"{row['seconds']:,.0f} s", shipped)
        )
    return table(["seed", "validation error", "test error", "training time", ""], rows)


def best() -> str:
    """Every seed of the best preset, and their mean."""
    found = card("best-mnist")
    mean, deviation = mean_and_std([row["test_error_percent"] for row in found.seeds])
    return seeds_table(found.seeds) + (
        f"\nMean test error over {len(found.seeds)} seeds: {mean:.3f} ± {deviation:.3f} %. The paper reports 0.25 % "
        f"for its own network, trained with shifts only. The three seeds were trained at the same time, one thread "
        f"each; a single run on two cores takes about {minutes_alone(found.epochs):.0f} minutes, estimated from the "
        f"time per step.\n"
    )


def fine_tuning() -> str:
    """Training on sixty images, from scratch and from a trained model."""
    found = read("fine-tuning")
    rows = []
    for row in found["rows"]:
        errors = [", ".join(f"{error:.1f}" for error in row[side]) for side in ("fresh", "begun")]
        means = [f"{sum(row[side]) / len(row[side]):.1f} %" for side in ("fresh", "begun")]
        rows.append((row["what"], *(f"{mean} ({each})" for mean, each in zip(means, errors, strict=True))))
    note = (
        f"Test error on {found['test_images']} images after training on {found['images']}, balanced over six classes "
        f"unless the row says otherwise: mean over three seeds, and each seed in brackets "
        f"(`python research/finetune.py`).\n\n"
    )
    return note + table(["images", "from scratch", f"`--init {found['init']}`"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "summary": summary,
    "demo": demo,
    "models": models,
    "model-cards": model_cards,
    "best": best,
    "fine-tuning": fine_tuning,
}
