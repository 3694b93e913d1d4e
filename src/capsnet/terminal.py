"""Terminal output: progress bars with the time left, status lines and tables.

Status goes to stderr, so stdout holds results and `--json` only. Without a terminal there are no bars.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Table
from rich.text import Text

from capsnet.timing import clock

LOG_SECONDS = 15.0  # between two status lines without a terminal
console = Console(stderr=True, highlight=False)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None) -> None:
    """Print a table on stdout: coloured on a terminal, never truncated in a file."""
    out = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    table = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # not markup: a file may be called m[/b].png
    out.print(table)


def error_text(summary: Mapping[str, Any]) -> str:
    """The error of an evaluation with its confidence interval.

    >>> error_text({"error_percent": 0.47, "errors": 47, "n": 10_000, "error_percent_interval_95": [0.3537, 0.6244]})
    '0.47 % (47 of 10,000 wrong, 95 % interval 0.35 to 0.62 %)'
    """
    low, high = summary["error_percent_interval_95"]
    wrong = f"{summary['errors']:,} of {summary['n']:,} wrong"
    return f"{summary['error_percent']:.2f} % ({wrong}, 95 % interval {low:.2f} to {high:.2f} %)"


class TimeLeft(ProgressColumn):
    """The time left; once finished, the time it took."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        if task.finished:
            return Text(f"in {clock(task.finished_time or 0.0)}", style="progress.elapsed")
        left = "…" if task.time_remaining is None else clock(task.time_remaining)
        return Text(f"{left} left", style="progress.remaining")


def bar(*columns: Any, in_bytes: bool = False) -> Progress:
    """A progress bar with the time left; not drawn without a terminal."""
    return Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=28),
        DownloadColumn() if in_bytes else MofNCompleteColumn(),
        *columns,
        TimeLeft(),
        console=console,
        disable=not console.is_terminal,
    )


class Counter:
    """A progress bar for a loop that reports how much is done, and perhaps of how much.

    >>> with Counter("evaluating") as counter:
    ...     counter(250, 10_000)
    """

    def __init__(self, description: str, total: int | None = None, *, in_bytes: bool = False) -> None:
        self.progress = bar(in_bytes=in_bytes)
        self.task = self.progress.add_task(description, total=total)

    def __enter__(self) -> Counter:
        self.progress.start()
        return self

    def __call__(self, done: int, total: int | None = None) -> None:
        self.progress.update(self.task, completed=done, total=total)

    def __exit__(self, *error: object) -> None:
        self.progress.stop()
