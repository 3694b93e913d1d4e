"""Options after a data set's name: `multimnist:canvas=56,shift=14`."""

from __future__ import annotations

from dataclasses import fields
from typing import TypeVar, get_type_hints

from capsnet.errors import UserError, unknown

T = TypeVar("T")


def read(cls: type[T], name: str) -> T:
    """A frozen dataclass of numbers from what stands behind the colon of a name; nothing there means its defaults."""
    kind, _, text = name.partition(":")
    kinds = get_type_hints(cls)
    values: dict[str, int | float] = {}
    for part in filter(None, text.split(",")):
        option, _, value = (word.strip() for word in part.partition("="))
        if option not in kinds:
            raise unknown(f"option of {kind}", option, [field.name for field in fields(cls)])  # type: ignore[arg-type]
        if option in values:
            raise UserError(f"{name} gives {option} twice: leave one of them out.")
        values[option] = _number(kinds[option], value, f"{kind}:{option}")
    return cls(**values)


def _number(kind: type[int] | type[float], text: str, name: str) -> int | float:
    try:
        return kind(text)
    except ValueError:
        wanted = "a whole number" if kind is int else "a number"
        raise UserError(f"{name} is {wanted} and came as '{text}': write {name}=…, several apart by commas.") from None
