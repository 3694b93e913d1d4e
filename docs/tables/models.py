"""How good the networks are: the presets, the models that come with the package, and what they are a beginning for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from capsnet.config import PRESETS, Config, from_dict, get_preset
from capsnet.evaluation import mean_and_std
from capsnet.experiments.conduct import same_training
from capsnet.search.report import command
from capsnet.search.space import train_flags
from tables import ROOT, error_of, read, table

PRECISIONS = {
    "half": "half precision",
    "stem-full": "half precision, the stem in full",
    "mixed": "the decoder in half precision, all else in full",
}


def summary() -> str:
    """The README's table: what is promised, what was measured."""
    runs = read("quick")
    errors = [run["test"]["error_percent"] for run in runs]
    seconds = [run["certificate"]["seconds"] for run in runs]
    config = runs[0]["certificate"]["config"]
    card = read("models/best-mnist")
    lowest = [row["test_error_percent"] for row in card["seeds"]]
    bench = read("bench")
    public = bench["train_seconds"]["public"]["median"]
    fast = bench["train_seconds"]["fast"]["median"]
    rows = [
        (
            f"`quick` on MNIST, {len(runs)} seeds, {config['epochs']} epochs",
            f"{sum(errors) / len(errors):.2f} % mean test error ({min(errors):.2f} to {max(errors):.2f} %)",
            f"{sum(seconds) / len(seconds):.0f} s of training",
        ),
        (
            f"`best` on MNIST, {len(lowest)} seeds, {card['epochs']} epochs",
            f"{sum(lowest) / len(lowest):.2f} % mean test error ({min(lowest):.2f} to {max(lowest):.2f} %)",
            f"about {minutes_alone(card['epochs']):.0f} minutes of training, by the time of a step",
        ),
        (
            "paper's network, a training step of 128 images",
            f"{bench['train_ratio_fp32']:.1f}× as fast as public-style code",
            f"{fast:.2f} s instead of {public:.2f} s",
        ),
        (
            "the same, beside our own plain version",
            f"{bench['train_ratio_fp32_same_allocator']:.1f}× as fast",
            f"{bench['peak_mb_fast']:,} MB instead of {bench['peak_mb_plain']:,} MB",
        ),
        (
            "paper's network, inference, 128 images",
            f"{bench['inference_ratio_batch128']:.1f}× as fast as public-style code",
            f"{bench['inference_images_per_second']['fast']:,.0f} images/s",
        ),
    ]
    return table(["what", "result", "cost on two cores"], rows)


def minutes_alone(epochs: int) -> float:
    """How long the best preset trains with two cores of its own, by the time of a step."""
    steps = epochs * (60_000 // get_preset("best").batch_size)
    return float(steps * read("search/best-stems")["seconds_a_step"]["branches"] / 60)


def demo(name: str = "quick") -> str:
    """What `make demo` reached (or another training of all digits): one row for each seed that was run."""
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


def cards() -> list[dict[str, Any]]:
    """What docs/ship.py wrote about each model that comes with the package."""
    return [json.loads(path.read_text()) for path in sorted((ROOT / "results" / "models").glob("*.json"))]


def models(page: str = "") -> str:
    """The models that come with the package, one a row; each links to its card on a page."""
    rows = [
        (
            f"[`{card['name']}`]({page}#{card['name']})",
            card["title"].rstrip("."),
            f"{card['parameters']:,}",
            error_of(card["test"]),
            f"{card['weights']['bytes'] / 1e6:.1f} MB",
        )
        for card in cards()
    ]
    return table(["name", "what", "parameters", "test error (95 % interval)", "size"], rows)


def model_cards() -> str:
    """A section for each model."""
    return "\n".join(map(model_card, cards()))


def model_card(card: dict[str, Any]) -> str:
    """What it is, how it came about, how good it is and what it is not good at."""
    channels, height, width = card["image_shape"]
    birth, weights, trained = card["certificate"], card["weights"], by_its_preset(card["config"])
    held_back = error_of(card["validation"]) if card["validation"] else "none held back: it was trained on all of them"
    facts = {
        "data": f"{card['data']}, {card['training_images']:,} training images",
        "input": f"{height}×{width}, {'grey' if channels == 1 else 'colour'}",
        "classes": ", ".join(card["classes"]),
        "parameters": f"{card['parameters']:,}",
        "training": f"preset `{trained.preset}`, {card['epochs']} epochs{in_legs(card)}, "
        f"{card['training_seconds']:,.0f} s ({birth['machine']}), torch {birth['torch']}",
        "validation error": held_back,
        "test error": error_of(card["test"]),
        "seed": f"{card['seed']} ({card['chosen_by']})",
        **({} if card["legs"] else {"command": f"`{command(trained)}`"}),
        "weights": f"{PRECISIONS[weights['precision']]}, {weights['bytes'] / 1e6:.1f} MB",
        "sha256": f"`{weights['sha256']}`",
    }
    listed = "".join(f"- {weakness}\n" for weakness in card["weaknesses"])
    return (
        f"## {card['name']}\n\n{card['title']}\n\n```\ncapsnet predict {card['name']} photo.png\n```\n\n"
        f"{table(['', ''], facts.items())}\nWhat it is not good at:\n\n{listed}\n{seeds_table(card['seeds'])}"
    )


def by_its_preset(config: dict[str, Any]) -> Config:
    """A training's config under the name of the preset that it equals, where one does."""
    trained = from_dict(config)
    alike = (name for name in PRESETS if same_training(config, replace(get_preset(name), seed=trained.seed)))
    return replace(trained, preset=next(alike, trained.preset))


def in_legs(card: dict[str, Any]) -> str:
    """How the epochs were divided, where a training went on from another's weights."""
    epochs = [str(leg["epochs"]) for leg in card["legs"]]
    return f" in legs of {' + '.join(epochs)}, each with fresh optimiser moments" if epochs else ""


def seeds_table(seeds: list[dict[str, Any]]) -> str:
    """Every seed that was trained, the one that is shipped among them."""
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
    card, before = read("models/best-mnist"), read("best-before")[-1]
    mean, deviation = mean_and_std([row["test_error_percent"] for row in card["seeds"]])
    former, _ = mean_and_std([row["test_error_percent"] for row in before["seeds"]])
    return seeds_table(card["seeds"]) + (
        f"\nMean test error of {len(card['seeds'])} seeds: {mean:.3f} %, deviation {deviation:.3f} (the paper reports "
        f"0.25 % for its own network, with shifts alone, over three trials). They were trained "
        f"at the same time, each on one thread of two cores; one alone on both takes about "
        f"{minutes_alone(card['epochs']):.0f} minutes, by the time of a step. The `best` before had {former:.3f} %.\n"
    )


def best_before() -> str:
    """The trainings that were the best preset's before, each by what it has other than today's."""
    rows = []
    for card in read("best-before"):
        flags = train_flags(from_dict(card["config"]), get_preset("best"))
        held_back = "–" if card["validation"] is None else f"{card['validation']['error_percent']:.2f} %"
        errors = [row["test_error_percent"] for row in card["seeds"]]
        each, mean = ", ".join(f"{error:.2f}" for error in errors), mean_and_std(errors)[0]
        rows.append((f"`{' '.join(flags)}`", held_back, f"{mean:.3f} % ({each})" if errors[1:] else f"{each} %"))
    return table(["settings", "validation error", "test error, each seed's in brackets"], rows)


def fine_tuning() -> str:
    """Sixty images of one's own, with a trained model as their beginning and without."""
    found = read("fine-tuning")
    rows = []
    for row in found["rows"]:
        errors = [", ".join(f"{error:.1f}" for error in row[side]) for side in ("fresh", "begun")]
        means = [f"{sum(row[side]) / len(row[side]):.1f} %" for side in ("fresh", "begun")]
        rows.append((row["what"], *(f"{mean} ({each})" for mean, each in zip(means, errors, strict=True))))
    note = (
        f"Measured on {found['images']} images, equally many of each of six classes (or as the row says), tested on "
        f"{found['test_images']} others: mean test error (and that of each seed), by "
        f"[docs/finetune.py](finetune.py).\n\n"
    )
    return note + table(["images", "from the beginning", f"`--init {found['init']}`"], rows)


def paper_legs() -> str:
    """A training of the paper's network that was carried on in other ways."""
    found = read("legs")
    columns = ["training", "epochs", "validation error", "test error", "of the first layer's output, zero"]
    rows = [
        (
            row["what"],
            str(row["epochs"]),
            f"{row['validation']['error_percent']:.2f} %",
            error_of(row["test"]),
            f"{row['stem_zero_percent']:.0f} %",
        )
        for row in found["rows"]
    ]
    return f"{found['note']}\n\n{table(columns, rows)}"


TABLES: dict[str, Callable[[], str]] = {
    "summary": summary,
    "demo": demo,
    "minute-best": lambda: demo("search/minute-best"),
    "models": models,
    "models-linked": lambda: models("docs/models.md"),
    "model-cards": model_cards,
    "best": best,
    "best-before": best_before,
    "fine-tuning": fine_tuning,
    "legs": paper_legs,
}
