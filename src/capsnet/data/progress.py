"""What a long wait tells the one who waits: a bar with the time left, and one-line notices; on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Notice = Callable[[str], None]
Report = Callable[[int], None]  # called with how much is done so far


def notice(message: str) -> None:
    """Say something in passing, where it cannot get into the output of a command."""
    print(message, file=sys.stderr, flush=True)


@contextmanager
def bar(title: str, total: int, shown: bool | None = None, *, in_bytes: bool = False) -> Iterator[Report]:
    """A progress bar on stderr; `shown` None means only when stderr is a terminal.

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
