"""Tables of text, and numbers as their cells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from capsnet.evaluate import mean_and_std


class Table(NamedTuple):
    """A table of text, with notes below."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def markdown(self) -> str:
        lines = [list(self.columns), ["---"] * len(self.columns), *(list(row) for row in self.rows)]
        return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def over_seeds(found: Sequence[float | None], decimals: int = 2) -> str:
    """Numbers of several seeds as a table cell: mean ± std.

    >>> over_seeds([0.25, 0.27, 0.26]), over_seeds([0.25]), over_seeds([None])
    ('0.26 ± 0.01', '0.25', '–')
    """
    known = [value for value in found if value is not None]
    if not known:
        return "–"
    mean, std = mean_and_std(known)
    return f"{mean:.{decimals}f}" + (f" ± {std:.{decimals}f}" if len(known) > 1 else "")


def whole(number: float | None) -> str:
    return "–" if number is None else f"{number:,.0f}"


def plain(number: float | None) -> str:
    return "–" if number is None else f"{number:g}"
