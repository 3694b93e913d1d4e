"""Frozen dataclasses from JSON: every field is checked, and lists become tuples again. Imports no torch."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, Literal, TypeVar

from capsnet.errors import UserError

Record = TypeVar("Record")


def from_json(cls: type[Record], record: dict[str, Any]) -> Record:
    """A frozen dataclass from JSON types: lists become tuples again, and every field is checked."""
    hints = typing.get_type_hints(cls)
    hints = {field.name: hints[field.name] for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    if strange := sorted(set(record) - set(hints)):
        raise UserError(
            f"the file's {cls.__name__} has fields unknown to this version: {', '.join(strange)}; "
            f"install the version of capsnet that wrote it."
        )
    values = {name: _tuples(value) for name, value in record.items()}
    for name, value in values.items():
        if not _fits(value, hints[name]):
            raise UserError(
                f"the file's {cls.__name__}.{name} is {value!r}, which is not of type {hints[name]}: "
                f"the file is damaged."
            )
    return cls(**values)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list | tuple) else value


def _fits(value: Any, hint: Any) -> bool:
    """Whether a JSON value has the type that the field asks for; types that are none of ours are not checked."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return value in args
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, arg) for arg in args)
    if origin is dict:
        return isinstance(value, dict)
    if origin is tuple:
        inner = [args[0]] * len(value) if isinstance(value, tuple) and args[-1] is Ellipsis else args
        return isinstance(value, tuple) and len(value) == len(inner) and all(map(_fits, value, inner))
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if origin is not None or hint in (list, Any) or not isinstance(hint, type):  # of a plugin, such as list[int]
        return True
    return isinstance(value, hint)
