"""The tables of README.md and docs/*.md, each a function that reads its numbers from results/*.json."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent


def read(name: str) -> Any:
    return json.loads((ROOT / "results" / f"{name}.json").read_text())


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def error_of(found: dict[str, Any]) -> str:
    low, high = found["error_percent_interval_95"]
    return f"{found['error_percent']:.2f} % ({found['errors']:,} of {found['n']:,}; {low:.2f} to {high:.2f} %)"
