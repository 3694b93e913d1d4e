"""capsnet models and capsnet data: what there is."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from capsnet import checkpoint, data
from capsnet.cli.flags import parse
from capsnet.config import PROMISES
from capsnet.data import sources
from capsnet.errors import UserError
from capsnet.terminal import print_table


@dataclass(frozen=True)
class Models:
    """List what can be loaded (runs in a folder) and what can be trained (presets).

    Example:
      capsnet models
    """

    runs: Path = Path("runs")
    """Folder in which to look for runs."""
    json: bool = False
    """Print JSON."""


def models(argv: list[str]) -> int:
    flags = parse(Models, "models", argv)
    runs = [describe_run(path.parent) for path in sorted(flags.runs.glob(f"*/{checkpoint.MODEL_FILE}"))]
    if flags.json:
        print(json.dumps({"runs": runs, "presets": PROMISES}))
        return 0
    if runs:
        columns = ["run", "preset", "data", "parameters", "error_percent", "seconds"]
        print_table(columns, [[str(r.get(c, "?")) for c in columns] for r in runs], title="Trained here")
    else:
        print(f"No finished run in {flags.runs}/ yet; `capsnet train` makes one.")
    print_table(["preset", "promise"], PROMISES.items(), title="\nPresets")
    return 0


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
    json: bool = False
    """Print JSON."""


def data_verb(argv: list[str]) -> int:
    flags = parse(Data, "data", argv)
    for name in flags.names:
        sources.find(name)
    names = flags.names or tuple(sources.SOURCES)
    if flags.action == "list":
        rows = [
            {"name": n, "about": data.NAMES[n], "cached": sources.is_cached(n) if n in sources.SOURCES else None}
            for n in flags.names or data.NAMES
        ]
    else:
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
