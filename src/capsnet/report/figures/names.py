"""Class names in pictures: they come from the user, in any length and script."""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Iterable

from matplotlib import font_manager


@functools.cache
def _has_glyph(letter: str) -> bool:
    font = font_manager.get_font(font_manager.findfont("DejaVu Sans"))
    return font.get_char_index(ord(letter)) > 0


def short_name(name: str, number: int | None = None, most: int = 12) -> str:
    """A class's name as a picture can show it: on one line, shortened in the middle, or #number.

    >>> short_name("domestic short-haired cat"), short_name("猫", 3)
    ('domest…d cat', '#3')
    """
    line = " ".join("".join(c if unicodedata.category(c)[0] != "C" else " " for c in name).split())
    if number is not None and not (line and all(map(_has_glyph, line))):
        return f"#{number}"
    line = "".join(c if _has_glyph(c) else "□" for c in line)
    tail = (most - 1) // 2
    return line if len(line) <= most else f"{line[: most - 1 - tail]}…{line[-tail:]}"


def short_names(classes: Iterable[str], most: int = 12) -> list[str]:
    """The names of all classes, shortened for pictures."""
    return [short_name(name, number, most) for number, name in enumerate(classes)]
