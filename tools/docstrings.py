"""A Griffe extension for the API reference: doctests in docstrings become code blocks."""

from __future__ import annotations

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"(?:^|\n)((?:>>> .*(?:\n(?!\s*$|>>> ).*)*(?:\n|$))+)")


class Doctests(griffe.Extension):
    """Fence every run of `>>>` lines and their output."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = DOCTEST.sub(fenced, obj.docstring.value)


def fenced(found: re.Match[str]) -> str:
    return f"\n\n```pycon\n{found[1].rstrip()}\n```\n"
