"""capsnet models and capsnet data: what there is."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from capsnet import checkpoint, data, zoo
from capsnet.cli.flags import Switch, parse
from capsnet.config import PROMISES
from capsnet.data import sources
from capsnet.data.datasets import MADE
from capsnet.errors import UserError, unknown
from capsnet.evaluation import few
from capsnet.terminal import clock, print_table


@dataclass(frozen=True)
class Models:
    """List the trained models that come with capsnet, your own runs and the presets; or show one model's card.

    Examples:
      capsnet models
      capsnet models quick-mnist
    """

    name: Annotated[Positional[str], arg(metavar="NAME", help_behavior_hint="")] = ""
    """A shipped model whose card to show (default: list everything)."""
    runs: Path = Path("runs")
    """Folder in which to look for runs."""
    json: Switch = False
    """Print JSON."""


def models(argv: list[str]) -> int:
    flags = parse(Models, "models", argv)
    if flags.name:
        return show_card(zoo.card(flags.name), flags.json)
    shipped = [zoo.card(name) for name in zoo.names()]
    runs = [describe_run(path.parent) for path in sorted(flags.runs.glob(f"*/{checkpoint.MODEL_FILE}"))]
    if flags.json:
        print(json.dumps({"models": shipped, "runs": runs, "presets": PROMISES}))
        return 0
    columns = ["name", "what", "input", "parameters", "test error", "size"]
    print_table(columns, map(card_row, shipped), title="Trained models that come with capsnet")
    if runs:
        columns = ["run", "preset", "data", "parameters", "test error", "training time"]
        print_table(columns, map(run_row, runs), title="\nTrained here")
    else:
        print(f"\nNo finished run in {flags.runs}/ yet; `capsnet train` makes one.")
    print_table(["preset", "promise"], PROMISES.items(), title="\nPresets, to train from the beginning")
    return 0


def card_row(card: dict[str, Any]) -> list[str]:
    """A shipped model in a line of the list."""
    error, size = f"{card['test']['error_percent']:.2f} %", f"{card['weights']['bytes'] / 1e6:.1f} MB"
    return [card["name"], card["title"], shape_in_words(card["image_shape"]), f"{card['parameters']:,}", error, size]


def run_row(run: dict[str, Any]) -> list[str]:
    """A run in a line of the list; one that cannot be read has its name alone."""
    if "preset" not in run:
        return [run["run"], *["?"] * 5]
    error, took = f"{run['error_percent']:.2f} %", clock(run["seconds"])
    return [run["run"], run["preset"], run["data"], f"{run['parameters']:,}", error, took]


def shape_in_words(shape: list[int]) -> str:
    """
    >>> shape_in_words([1, 28, 28]), shape_in_words([3, 32, 48])
    ('28×28 grey', '32×48 colour')
    """
    channels, height, width = shape
    return f"{height}×{width} {'grey' if channels == 1 else 'colour'}"


def show_card(card: dict[str, Any], as_json: bool) -> int:
    """All that there is to know about a shipped model."""
    if as_json:
        print(json.dumps(card))
        return 0
    print(f"{card['name']}: {card['title']}\n")
    print_table(["", ""], card_lines(card))
    print("\nWhat it is not good at:")
    for weakness in card["weaknesses"]:
        print(f"  - {weakness}")
    print(f"\nUse it:\n  capsnet predict {card['name']} photo.png\n  capsnet evaluate {card['name']}")
    return 0


def card_lines(card: dict[str, Any]) -> list[tuple[str, str]]:
    """A card's facts, each with its name in words."""
    seeds = [f"{row['test_error_percent']:.2f} % (seed {row['seed']})" for row in card["seeds"]]
    held_back = in_words(card["validation"]) if card["validation"] else "none: trained on every training image"
    threads = re.sub(r"\b1 threads", "1 thread", card["certificate"]["machine"].rpartition(", ")[2])
    took = f"{card['epochs']} epochs, {clock(card['training_seconds'])} on {threads}, "
    took += f"seed {card['seed']} ({card['chosen_by']})"
    return [
        ("data", f"{card['data']}, {card['training_images']:,} training images"),
        ("input", shape_in_words(card["image_shape"])),
        ("classes", few(set(card["classes"])) if len(card["classes"]) > 12 else ", ".join(card["classes"])),
        ("parameters", f"{card['parameters']:,}"),
        ("training", took),
        ("validation error", held_back),
        ("test error", in_words(card["test"])),
        ("of every seed", ", ".join(seeds)),
        ("size", f"{card['weights']['bytes'] / 1e6:.1f} MB"),
    ]


def in_words(found: dict[str, Any]) -> str:
    """An error with its interval.

    >>> in_words({"error_percent": 0.47, "errors": 47, "n": 10_000, "error_percent_interval_95": [0.3537, 0.6244]})
    '0.47 % (47 of 10,000 wrong, 95 % interval 0.35 to 0.62 %)'
    """
    low, high = found["error_percent_interval_95"]
    wrong = f"{found['errors']:,} of {found['n']:,} wrong"
    return f"{found['error_percent']:.2f} % ({wrong}, 95 % interval {low:.2f} to {high:.2f} %)"


def describe_run(folder: Path) -> dict[str, Any]:
    """One line about a run, from its results.json; a damaged run is listed all the same."""
    try:
        results = checkpoint.read_json(folder / "results.json")
        birth, test = results["certificate"], results["test"]
        return {
            "run": str(folder),
            "preset": birth["config"]["preset"],
            "data": birth["config"]["data"],
            "parameters": birth["parameters"],
            "error_percent": test["error_percent"],
            "seconds": birth["seconds"],
        }
    except (UserError, KeyError, TypeError):
        return {"run": str(folder)}


@dataclass(frozen=True)
class Data:
    """List the data sets, fetch them into the cache, or verify what is there.

    Examples:
      capsnet data list
      capsnet data fetch mnist
      capsnet data verify
    """

    action: Annotated[Positional[Literal["list", "fetch", "verify"]], arg(metavar="list|fetch|verify")] = "list"
    """What to do: list what there is, fetch into the cache, or verify checksums."""
    names: Annotated[Positional[tuple[str, ...]], arg(metavar="NAME…", help_behavior_hint="")] = ()
    """Which data sets (default: all for list and verify)."""
    json: Switch = False
    """Print JSON."""


def data_verb(argv: list[str]) -> int:
    flags = parse(Data, "data", argv)
    if flags.action == "list":
        rows = [about_data(name) for name in flags.names or data.NAMES]
    else:
        names = dict.fromkeys(published(name).name for name in flags.names) or sources.SOURCES
        if flags.action == "fetch" and not flags.names:
            raise UserError(f"fetch which data set? The choices are: {', '.join(names)}.")
        rows = [check_data(name, fetch=flags.action == "fetch") for name in names]
    if flags.json:
        print(json.dumps({"cache": str(data.cache_folder()), "data": rows}))
    else:
        print_table(list(rows[0]), [[YES_NO.get(v) or str(v) for v in row.values()] for row in rows])
        print(f"cache: {data.cache_folder()}")
    return 0 if all(row.get("good", True) for row in rows) else 2


YES_NO: dict[Any, str] = {True: "yes", False: "no", None: "–"}  # your own images are never cached


def published(name: str) -> sources.Source:
    """The data set to fetch for a name: MNIST for what is made out of its digits."""
    return sources.find("mnist" if name.partition(":")[0] in MADE else name)


def about_data(name: str) -> dict[str, Any]:
    """What a name means, whatever options or path stand behind its colon, and whether its bytes are here."""
    kind = name.partition(":")[0]
    about = next((said for known, said in data.NAMES.items() if known.partition(":")[0] == kind), None)
    if about is None:
        raise unknown("data set", name, data.NAMES)
    cached = sources.is_cached(published(kind).name) if kind in MADE or kind in sources.SOURCES else None
    return {"name": name, "about": about, "cached": cached}


def check_data(name: str, fetch: bool) -> dict[str, Any]:
    """Fetch a data set if it is missing or damaged, or only verify the checksums of what is there."""
    if fetch:
        splits = data.load(name, validation=0)
        return {
            "name": name,
            "good": True,
            "training": f"{len(splits.train):,}",
            "test": f"{len(splits.test):,}",
        }
    state = sources.verify(name)
    return {"name": name, "good": state in ("good", "not fetched"), "state": state}
