"""capsnet models."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from capsnet.cli.flags import Switch, parse
from capsnet.errors import UserError
from capsnet.evaluate import few
from capsnet.io import checkpoint, zoo
from capsnet.io.records import Card, Certificate
from capsnet.terminal import error_text, print_table
from capsnet.timing import clock
from capsnet.train.presets import PROMISES


@dataclass(frozen=True)
class Models:
    """List the trained models shipped with capsnet, your runs and the presets, or show one model's card.

    Use a model name anywhere a run folder is accepted.

    Examples:
      capsnet models
      capsnet models quick-mnist
    """

    name: Annotated[Positional[str], arg(metavar="NAME", help_behavior_hint="")] = ""
    """Model whose card to show (default: list everything)."""
    runs: Path = Path("runs")
    """Folder that contains your runs."""
    json: Switch = False
    """Print JSON."""


def models(argv: list[str]) -> int:
    flags = parse(Models, "models", argv)
    if flags.name and not zoo.is_shipped(flags.name) and Path(flags.name).is_dir():
        raise UserError(f"{flags.name} is a run, and only shipped models have a card: see results.json in the run.")
    if flags.name:
        return show_card(zoo.card(flags.name), flags.json)
    shipped = [zoo.card(name) for name in zoo.names()]
    runs = [describe_run(path.parent) for path in sorted(flags.runs.glob(f"*/{checkpoint.MODEL_FILE}"))]
    if flags.json:
        print(json.dumps({"models": [card.to_json() for card in shipped], "runs": runs, "presets": PROMISES}))
        return 0
    columns = ["name", "description", "input", "parameters", "test error", "size"]
    print_table(columns, map(card_row, shipped), title="Shipped models")
    if runs:
        columns = ["run", "preset", "data", "parameters", "test error", "training time"]
        print_table(columns, map(run_row, runs), title="\nYour runs")
    else:
        print(f"\nNo finished runs in {flags.runs}/ yet; start one with `capsnet train`.")
    print_table(["preset", "description"], PROMISES.items(), title="\nPresets for training")
    return 0


def card_row(card: Card) -> list[str]:
    """The table row of a shipped model."""
    error, size = f"{card.test['error_percent']:.2f} %", f"{card.weights.bytes / 1e6:.1f} MB"
    return [card.name, card.title, shape_in_words(card.image_shape), f"{card.parameters:,}", error, size]


def run_row(run: dict[str, Any]) -> list[str]:
    """The table row of a run; only the name is known of one that cannot be read."""
    if "preset" not in run:
        return [run["run"], *["?"] * 5]
    error, took = f"{run['error_percent']:.2f} %", clock(run["seconds"])
    return [run["run"], run["preset"], run["data"], f"{run['parameters']:,}", error, took]


def shape_in_words(shape: Sequence[int]) -> str:
    """
    >>> shape_in_words([1, 28, 28]), shape_in_words([3, 32, 48])
    ('28×28 grey', '32×48 colour')
    """
    channels, height, width = shape
    return f"{height}×{width} {'grey' if channels == 1 else 'colour'}"


def show_card(card: Card, as_json: bool) -> int:
    """Print the card of a shipped model."""
    if as_json:
        print(json.dumps(card.to_json()))
        return 0
    print(f"{card.name}: {card.title}\n")
    print_table(["", ""], card_lines(card))
    print("\nKnown weaknesses:")
    for weakness in card.weaknesses:
        print(f"  - {weakness}")
    print(f"\nUsage:\n  capsnet predict {card.name} photo.png\n  capsnet evaluate {card.name}")
    return 0


def card_lines(card: Card) -> list[tuple[str, str]]:
    """The facts on a card, each with a caption."""
    seeds = [f"{row['test_error_percent']:.2f} % (seed {row['seed']})" for row in card.seeds]
    held_back = error_text(card.validation) if card.validation else "none (trained on all training images)"
    threads = re.sub(r"\b1 threads", "1 thread", card.certificate.machine.rpartition(", ")[2])
    took = f"{card.epochs} epochs, {clock(card.training_seconds)} on {threads}, "
    took += f"seed {card.seed} ({card.chosen_by})"
    return [
        ("data", f"{card.data}, {card.training_images:,} training images"),
        ("input", shape_in_words(card.image_shape)),
        ("classes", few(set(card.classes)) if len(card.classes) > 12 else ", ".join(card.classes)),
        ("parameters", f"{card.parameters:,}"),
        ("training", took),
        ("validation error", held_back),
        ("test error", error_text(card.test)),
        ("test error by seed", ", ".join(seeds)),
        ("size", f"{card.weights.bytes / 1e6:.1f} MB"),
    ]


def describe_run(folder: Path) -> dict[str, Any]:
    """A run's entry in the list, from its results.json; a damaged run has only its name."""
    try:
        results = checkpoint.read_json(folder / "results.json")
        birth, test = Certificate.from_json(results["certificate"]), results["test"]
        return {
            "run": str(folder),
            "preset": birth.config["preset"],
            "data": birth.config["data"],
            "parameters": birth.parameters,
            "error_percent": test["error_percent"],
            "seconds": birth.seconds,
        }
    except (UserError, KeyError, TypeError, AttributeError):
        return {"run": str(folder)}
