"""Routing options as controls: each field of a routing algorithm's options dataclass becomes a control on the page.

`controls` describes the fields (name, type, value, help, bounds, choices). `chosen` checks the values that a request
asks for and rejects a wrong one in a sentence. A field with `metadata={"training": True}` only matters in training, or
shapes the trained weights, so the page does not offer it.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, fields, is_dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from capsnet.errors import UserError, unknown

BOUNDS: dict[str, tuple[float, float]] = {"iterations": (1, 10)}  # the most work that one request may ask for
MOST = 10  # of any other integer without a maximum, which may count steps too
LARGEST = sys.float_info.max  # excludes infinity, and integers that do not fit into a float


@dataclass(frozen=True)
class Control:
    """One option of a routing algorithm, as the page shows it."""

    name: str
    type: Literal["bool", "int", "float", "choice"]
    value: Any
    help: str = ""
    min: float | None = None
    max: float | None = None
    choices: tuple[str, ...] = ()

    def check(self, value: object) -> None:
        """Reject a value of the wrong type or outside of the bounds."""
        if self.type == "choice" and value not in self.choices:
            raise unknown(self.name, str(value), self.choices)
        kinds: dict[str, tuple[type, ...]] = {"bool": (bool,), "int": (int,), "float": (int, float), "choice": (str,)}
        right = isinstance(value, kinds[self.type]) and (self.type == "bool" or not isinstance(value, bool))
        if right and isinstance(value, int | float) and self.type != "bool":
            low, high = (-LARGEST if self.min is None else self.min), (LARGEST if self.max is None else self.max)
            right = low <= value <= high
        if not right:
            raise UserError(f"{self.name} must be {self.expected()}, got {json.dumps(value)[:60]}.")

    def expected(self) -> str:
        if self.type == "bool":
            return "true or false"
        kind = "an integer" if self.type == "int" else "a number"
        if self.min is None and self.max is None:
            return kind
        if self.max is None:
            return f"{kind} of at least {self.min:g}"
        return f"{kind} from {self.min:g} to {self.max:g}" if self.min is not None else f"{kind} up to {self.max:g}"


def controls(options: object) -> list[Control]:
    """The options that can be changed after training, in the order in which the dataclass declares them."""
    if not is_dataclass(options) or isinstance(options, type):
        return []
    hints, helps = get_type_hints(type(options)), help_texts(type(options))
    found = (control(field, hints[field.name], getattr(options, field.name), helps) for field in fields(options))
    return [one for one in found if one is not None]


def control(field: Field[Any], hint: Any, value: Any, helps: Mapping[str, str]) -> Control | None:
    """A field as a control; None if it is for training or of a type that the page has no control for."""
    names = {bool: "bool", int: "int", float: "float"}
    kind = "choice" if get_origin(hint) is Literal else names.get(hint)
    if kind is None or field.metadata.get("training"):
        return None
    most = max(MOST, value) if kind == "int" else None
    low, high = BOUNDS.get(field.name, (field.metadata.get("min"), field.metadata.get("max", most)))
    choices = tuple(map(str, get_args(hint))) if kind == "choice" else ()
    return Control(field.name, kind, value, helps.get(field.name, ""), low, high, choices)  # type: ignore[arg-type]


def help_texts(options: type) -> dict[str, str]:
    """The string below each field of a dataclass, as the command line shows it; empty without the source."""
    texts: dict[str, str] = {}
    for owner in reversed(options.__mro__[:-1]):
        try:
            body, *_ = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
        except (OSError, TypeError, SyntaxError, ValueError):
            continue
        if isinstance(body, ast.ClassDef) and body.name == owner.__name__:  # not so for code that is not in a file
            texts |= dict(documented(body))
    return texts


def documented(body: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, text in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            yield ast.unparse(field.target), " ".join(str(text.value.value).split())


def chosen(options: object, wanted: str) -> dict[str, Any]:
    """The options that a JSON object such as {"iterations": 5} asks for, once they are valid.

    >>> @dataclass
    ... class Dynamic:
    ...     iterations: int = 3
    >>> chosen(Dynamic(), '{"iterations": 5}')
    {'iterations': 5}
    """
    try:
        values = json.loads(wanted)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise UserError('routing must be a JSON object such as {"iterations": 3}.')
    return checked(options, values)


def checked(options: object, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values, once every name and every value is valid."""
    known = {one.name: one for one in controls(options)}
    for name, value in values.items():
        if name not in known:
            raise unknown("routing option", name[:60], known)
        known[name].check(value)
    return dict(values)
