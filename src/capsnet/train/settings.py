"""Settings: the fields of a config by dotted name, as searches and ablations vary them and `train` takes them as flags.

    lr=0.002                     a name may be shortened if only one field ends in it (class_dim for model.class_dim)
    routing=em                   another routing algorithm, with its own options
    model.decoder=512-1024       lists: numbers joined by dashes, pairs by x (20x12-10x8), none for empty

Every value is checked against the type of its field; the config checks its limits.
"""

from __future__ import annotations

import dataclasses
import math
import re
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import is_dataclass, replace
from typing import Any

from capsnet.errors import UserError, unknown
from capsnet.routing import RoutingOptions, options_for
from capsnet.train.config import Config

# the data decide these, or all trainings have to share them to be comparable
FIXED = {
    "preset", "data", "init", "teacher", "validation", "validation_choice", "seed", "device", "save_every", "stop_at",
    "patience", "model.image_shape", "model.num_classes",
}  # fmt: skip
BOOLEANS = {"true": True, "yes": True, "false": False, "no": False}


def leaves(part: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every field of nested dataclasses that can be searched: its dotted name and its type."""
    hints = typing.get_type_hints(type(part))
    for name in (field.name for field in dataclasses.fields(part)):
        value = getattr(part, name)
        if is_dataclass(value):
            yield from leaves(value, f"{prefix}{name}.")
        if prefix + name not in FIXED and (hints[name] is RoutingOptions or not is_dataclass(value)):
            yield prefix + name, hints[name]


def resolve(name: str, known: Iterable[str]) -> str:
    """The full name of a field from its last part or parts.

    >>> resolve("primary-dim", ["lr", "model.primary_dim"])
    'model.primary_dim'
    """
    name = name.strip().replace("-", "_")
    if any(f".{fixed}".endswith(f".{name}") for fixed in FIXED):
        raise UserError(f"{name} is the same for all trainings: set it with its own flag.")
    found = [full for full in known if full == name] or [full for full in known if full.endswith(f".{name}")]
    if len(found) > 1:
        raise UserError(f"{name} is ambiguous: write one of {', '.join(found)}.")
    if not found:
        raise unknown("field", name, known)
    return found[0]


def value_of(config: Any, name: str) -> Any:
    """The value of a field by its dotted name (for a routing: its name); None if there is no such field."""
    for part in name.split("."):
        config = getattr(config, part, None)
    return config.algorithm if isinstance(config, RoutingOptions) else config


def with_values(base: Any, values: Mapping[str, Any]) -> Any:
    """A config with fields changed, by dotted name.

    >>> with_values(Config(), {"lr": 0.01, "model.class_dim": 8}).model.class_dim
    8
    """
    changes: dict[str, Any] = {}
    nested: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        part, _, rest = name.partition(".")
        if rest:
            nested.setdefault(part, {})[rest] = value
        elif isinstance(old := getattr(base, part, None), RoutingOptions):  # the same algorithm keeps its options
            changes[part] = old if old.algorithm == value else options_for(value)
        else:
            changes[part] = value
    for part, inner in nested.items():
        changes[part] = with_values(changes.get(part, getattr(base, part)), inner)
    return replace(base, **changes)


# --- Reading ---------------------------------------------------------------------------------------------------


def read_values(text: str, base: Config) -> dict[str, Any]:
    """The values that words such as `batch_size=64+lr=0.002` assign, by full name.

    >>> read_values("model.decoder=none+lr=2e-3", Config())
    {'lr': 0.002, 'model.decoder': ()}
    """
    known, values = dict(leaves(base)), {}
    for word in re.split(r"\+(?=[^+=]+=)", text):
        name, equals, value = word.partition("=")
        if not equals:
            raise UserError(f"{word} in {text} is not FIELD=VALUE: pass a named variant as a separate word.")
        name = resolve(name, known)
        if name in values:
            raise UserError(f"{text} sets {name} twice: remove one of them.")
        values[name] = read_value(name, value.strip(), known[name])
        known |= dict(leaves(with_values(base, values)))  # the config checks limits; each routing has its own options
    return dict(sorted(values.items()))


def read_value(name: str, word: str, hint: Any) -> Any:
    """A value from its word, by the type of its field."""
    try:
        return parsed(word, hint)
    except UserError:
        raise
    except (ValueError, KeyError):
        if typing.get_origin(hint) is typing.Literal:
            raise unknown(f"value of {name}", word, typing.get_args(hint)) from None
    kinds = {int: "an integer", float: "a number", bool: "true or false"}
    kind = kinds.get(hint, "numbers, or pairs such as 16x8, joined by dashes, or none")
    raise UserError(f"{name} takes {kind}, got '{word}'.")


def parsed(word: str, hint: Any) -> Any:
    arguments = typing.get_args(hint)
    if hint is bool:
        return BOOLEANS[word.lower()]
    if hint in (int, float):
        if not math.isfinite(number := hint(word)):
            raise ValueError(word)
        return number
    if typing.get_origin(hint) is typing.Literal and word not in arguments:
        raise ValueError(word)
    if hint is RoutingOptions:
        return options_for(word).algorithm
    if typing.get_origin(hint) is tuple:
        longer = arguments[-1] is Ellipsis
        parts = [] if word == "none" else word.split("-" if longer else "x")
        hints = arguments[:1] * len(parts) if longer else arguments
        return tuple(parsed(part, inner) for part, inner in zip(parts, hints, strict=True))
    return word


# --- Writing ---------------------------------------------------------------------------------------------------


def written(value: Any) -> str:
    """A value as it is typed in a space.

    >>> written((32, 64)), written(((20, 12), (10, 8))), written(()), written(True), written(0.00005)
    ('32-64', '20x12-10x8', 'none', 'true', '0.00005')
    """
    if isinstance(value, tuple):
        return "-".join("x".join(map(written, v)) if isinstance(v, tuple) else written(v) for v in value) or "none"
    if isinstance(value, bool):
        return str(value).lower()
    small = isinstance(value, float) and 1e-9 < abs(value) < 1
    return f"{value:.12f}".rstrip("0").rstrip(".") if small else str(value)


def train_flags(config: Any, base: Any, prefix: str = "--") -> list[str]:
    """The flags of `capsnet train` that lead from one config to another, without what the data decide.

    >>> train_flags(with_values(Config(), {"lr": 0.01, "model.stem_norm": True, "model.decoder": ()}), Config())
    ['--lr', '0.01', '--model.stem-norm', '--model.decoder']
    """
    flags: list[str] = []
    for field in dataclasses.fields(config):
        name, new, old = field.name.replace("_", "-"), getattr(config, field.name), getattr(base, field.name)
        if is_dataclass(new):
            kind: Any = type(new)
            if kind is not type(old):  # another routing or model, which starts from its own defaults
                flags += [prefix + name, kind.algorithm if isinstance(new, RoutingOptions) else kind.kind]
                old = kind()
            flags += train_flags(new, old, f"{prefix}{name}.")
        elif new != old and prefix + name not in ("--preset", "--model.image-shape", "--model.num-classes"):
            flags += [f"{prefix}no-{name}" if new is False else prefix + name]
            flags += [] if isinstance(new, bool) else words_of(new)
    return flags


def words_of(value: Any) -> list[str]:
    """A value as the words of a flag."""
    return [word for part in value for word in words_of(part)] if isinstance(value, tuple) else [str(value)]
