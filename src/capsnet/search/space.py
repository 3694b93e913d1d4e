"""Search spaces: config fields by dotted name, each with choices or a range.

    lr=0.001..0.01:log           a range, sampled by orders of magnitude
    augment.shift=0..3           a range of integers, because the field is one
    class_dim=8,16,24            choices; a name may be shortened if only one field ends in it (model.class_dim)
    routing=dynamic,em           algorithms; fields that only some of them have are searched with those
    model.decoder=512-1024,none  choices of lists: numbers joined by dashes, pairs by x (20x12-10x8), none for empty

The names of `SPACES` stand for several such entries. Every value is checked against the field's type and limits.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import TYPE_CHECKING, Any

from capsnet.errors import UserError, unknown
from capsnet.routing import RoutingOptions, options_for
from capsnet.train.config import Config

if TYPE_CHECKING:
    from optuna.trial import BaseTrial

SPACES = {
    "compact": (
        "model.primary_types=8,16,24,32,48", "model.primary_dim=4,8,16", "model.primary_kernel=3,5",
        "model.class_dim=8,16,24", "model.decoder=256-512,512-1024",
    ),
    "training": (
        "lr=0.001..0.02:log", "schedule=exponential,one-cycle", "warmup=0.05..0.4", "optimizer=adam,adamw",
        "weight_decay=0.001..0.1:log", "batch_size=64,128,256", "average=0,0.99,0.998",
    ),
    "augmentation": (
        "augment.shift=0..3", "augment.rotate=0..15", "augment.scale=0..0.2", "augment.shear=0..0.3",
        "augment.elastic=0..1", "augment.erase=0..8", "augment.share=0.25..1", "augment.until=0.5..1",
    ),
    "routing": (
        "model.routing.iterations=1..4", "model.routing.leaky=false,true", "model.routing.bias=false,true",
        "model.routing.detach=false,true",
    ),
    "loss": (
        "loss.reconstruction=0.00005..0.02:log", "loss.margin_reduction=sum,half-mean", "loss.down_weight=0.25..1",
        "loss.absent=0.02..0.2",
    ),
}  # fmt: skip
# the data decide these, or all trials have to share them to be comparable
FIXED = {
    "preset", "data", "init", "teacher", "validation", "validation_choice", "seed", "device", "save_every", "stop_at",
    "patience", "model.image_shape", "model.num_classes",
}  # fmt: skip
FEW = 50  # a space of at most this many combinations is searched exhaustively
BOOLEANS = {"true": True, "yes": True, "false": False, "no": False}


@dataclass(frozen=True)
class Range:
    """Choices, or the numbers between two ends, both included; `log` samples by orders of magnitude."""

    values: tuple[Any, ...]
    """The choices, or the two ends."""
    kind: typing.Literal["choice", "int", "float"] = "choice"
    log: bool = False

    def suggest(self, trial: BaseTrial, name: str) -> Any:
        if self.kind == "choice":
            words = {written(value): value for value in self.values}  # storages accept strings, not tuples
            return words[trial.suggest_categorical(name, list(words))]
        if self.kind == "int":
            return trial.suggest_int(name, *self.values, log=self.log)
        value = float(f"{trial.suggest_float(name, *self.values, log=self.log):.4g}")  # short enough for a command
        return min(max(value, self.values[0]), self.values[1])

    def stored(self, value: Any) -> Any:
        """A value as the storage keeps it; None if it is not in the range."""
        if self.kind == "choice":
            return written(value) if written(value) in map(written, self.values) else None
        return value if self.values[0] <= value <= self.values[1] else None

    def all(self) -> Sequence[Any]:
        """Every value as the storage keeps it; empty for real numbers."""
        if self.kind == "int":
            return range(self.values[0], self.values[1] + 1)
        return [written(value) for value in self.values] if self.kind == "choice" else ()

    def __str__(self) -> str:
        words = map(written, self.values)
        return ",".join(words) if self.kind == "choice" else "..".join(words) + (":log" if self.log else "")


Space = Mapping[str, Range]


# --- Fields by name --------------------------------------------------------------------------------------------


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
    """The value of a field by its dotted name, of a routing its name; None if there is no such field."""
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


def read(words: Iterable[str], base: Config) -> Space:
    """The space that command-line words declare; a later entry for the same field replaces an earlier one."""
    known, space, bases = dict(leaves(base)), {}, [base]
    for word in words:
        if "=" not in word and word not in SPACES:
            raise unknown("space", word, [*SPACES, "FIELD=VALUES"])
        for entry in SPACES.get(word, (word,)):
            name, _, text = entry.partition("=")
            name = resolve(name, known)
            space[name] = read_range(name, text.strip(), known[name])
            if known[name] is RoutingOptions:
                bases = [with_values(base, {name: value}) for value in space[name].values]
                known |= {field: hint for each in bases for field, hint in leaves(each)}
    if not space:
        raise UserError(
            f"the space is empty: --space takes fields with their values, such as lr=0.001..0.01:log, or names: "
            f"{', '.join(SPACES)}."
        )
    for each, (name, choices) in itertools.product(bases, space.items()):
        for value in choices.values if name in dict(leaves(each)) else ():
            with_values(each, {name: value})  # the config refuses what is out of its limits
    return space


def read_values(text: str, base: Config) -> dict[str, Any]:
    """The values that words such as `batch_size=64+lr=0.002` assign, by full name.

    >>> read_values("model.decoder=none+lr=2e-3", Config())
    {'lr': 0.002, 'model.decoder': ()}
    """
    known, values = dict(leaves(base)), {}
    for word in re.split(r"\+(?=[^+=]+=)", text):
        name, equals, value = word.partition("=")
        if not equals:
            raise UserError(f"{word} in {text} is not FIELD=VALUE: pass a named variant as a word of its own.")
        name = resolve(name, known)
        if name in values:
            raise UserError(f"{text} sets {name} twice: remove one of them.")
        values[name] = read_value(name, value.strip(), known[name])
        known |= dict(leaves(with_values(base, values)))  # the config checks limits; a routing has options of its own
    return dict(sorted(values.items()))


def read_range(name: str, text: str, hint: Any) -> Range:
    if ".." not in text:
        values = tuple(dict.fromkeys(read_value(name, word.strip(), hint) for word in text.split(",")))
        if len(values) < 2:
            raise UserError(f"--space {name}={text} leaves nothing to choose: give two or more values, with commas.")
        return Range(values)
    if hint not in (int, float):
        raise UserError(f"--space {name}={text} is a range, but {name} is not a number: list its values, with commas.")
    numbers, _, scale = text.partition(":")
    low, high = [read_value(name, word, hint) for word in numbers.split("..", 1)]
    if scale not in ("", "log") or not low < high or (scale and low <= 0):
        raise UserError(
            f"--space {name}={text} is not a range: write LOW..HIGH, or LOW..HIGH:log with LOW above 0, LOW below HIGH."
        )
    return Range((low, high), "int" if hint is int else "float", scale == "log")


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


# --- Sampling --------------------------------------------------------------------------------------------------


def combinations(space: Space, base: Config) -> list[dict[str, Any]]:
    """Every combination of a space's values if there are at most `FEW`, otherwise none."""
    values = [choices.all() for choices in space.values()]
    if not 0 < math.prod(map(len, values)) <= FEW:
        return []
    made = (applicable(dict(zip(space, chosen, strict=True)), base) for chosen in itertools.product(*values))
    return list({tuple(each.items()): each for each in made}.values())


def applicable(values: dict[str, Any], base: Config) -> dict[str, Any]:
    """The values without options that the chosen routing does not have."""
    routings = {name: value for name, value in values.items() if dict(leaves(base)).get(name) is RoutingOptions}
    known = dict(leaves(with_values(base, routings)))
    return {name: value for name, value in values.items() if name in known}


def own_values(space: Space, base: Config) -> dict[str, Any]:
    """The base's values that lie in the space, as the storage keeps them."""
    own = {name: choices.stored(value_of(base, name)) for name, choices in space.items() if name in dict(leaves(base))}
    return {name: value for name, value in own.items() if value is not None}


def suggest(trial: BaseTrial, space: Space, base: Config) -> Config:
    """The config of a trial, the routing before its options."""
    for name in sorted(space, key=lambda name: name.count(".")):
        if name in dict(leaves(base)):
            base = with_values(base, {name: space[name].suggest(trial, name)})
    return base


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
