"""The tables of README.md, docs/ and research/: each is a function that reads its numbers from JSON files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from capsnet.io.records import Card
from capsnet.io.zoo import card, names

ROOT = Path(__file__).resolve().parent.parent.parent


def read(name: str) -> Any:
    return json.loads((ROOT / "results" / f"{name}.json").read_text())


def cards() -> list[Card]:
    """The model cards that tools/ship.py wrote."""
    return [card(name) for name in names()]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def error_of(found: dict[str, Any]) -> str:
    low, high = found["error_percent_interval_95"]
    return f"{found['error_percent']:.2f} % ({found['errors']:,} of {found['n']:,}; {low:.2f} to {high:.2f} %)"
