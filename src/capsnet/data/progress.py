"""Progress bars and one-line notices, on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Notice = Callable[[str], None]
Report = Callable[[int], None]  # called with the amount done so far


def notice(message: str) -> None:
    """Print a message to stderr, which keeps it out of the output of a command."""
    print(message, file=sys.stderr, flush=True)


@contextmanager
def bar(title: str, total: int, shown: bool | None = None, *, in_bytes: bool = False) -> Iterator[Report]:
    """A progress bar on stderr; with `shown=None` only if stderr is a terminal.

    >>> with bar("decoding", 3, shown=False) as report:
    ...     report(1)
    """
    if not (sys.stderr.isatty() if shown is None else shown):
        yield lambda done: None
        return
    from rich import progress as rich
    from rich.console import Console

    amount = rich.DownloadColumn() if in_bytes else rich.MofNCompleteColumn()
    columns = (rich.TextColumn("{task.description}"), rich.BarColumn(), amount, rich.TimeRemainingColumn())
    with rich.Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(title, total=total)
        yield lambda done: progress.update(task, completed=min(done, total))
