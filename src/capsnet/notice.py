"""One-line notices on stderr, which keeps them out of the output of a command."""

from __future__ import annotations

import sys
from collections.abc import Callable

Notice = Callable[[str], None]


def say(text: str) -> None:
    """Print a status line on stderr, above a progress bar if there is one."""
    print(text, file=sys.stderr, flush=True)
