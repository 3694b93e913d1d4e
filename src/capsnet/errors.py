"""The exception for mistakes that the user can fix: the command line prints its message and exits with code 2."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


class UserError(ValueError):
    """An input is wrong; the message says what was given, what was expected and how to fix it."""


def explained(error: OSError) -> str:
    """What the operating system refuses, in one line without a traceback."""
    return f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"


def unknown(kind: str, name: str, choices: Iterable[str]) -> UserError:
    """The error for an unknown name, with the nearest name and all choices.

    >>> str(unknown("preset", "papr", ["paper", "quick"]))
    "there is no preset 'papr'; did you mean 'paper'? The choices are: paper, quick."
    >>> str(unknown("field", "learning_rate", ["lr", "share"]))  # by its initials
    "there is no field 'learning_rate'; did you mean 'lr'? The choices are: lr, share."
    """
    names = sorted(set(choices))
    initials = "".join(word[:1] for word in re.split("[-_ ]", name))
    near = (
        [initials]
        if len(initials) > 1 and initials in names
        else difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    )
    hint = f"; did you mean '{near[0]}'?" if near else "."
    return UserError(f"there is no {kind} '{name}'{hint} The choices are: {', '.join(names) or 'none yet'}.")
