"""Search spaces: settings (`train.settings`), each with choices or a range.

    lr=0.001..0.01:log           a range, sampled by orders of magnitude
    augment.shift=0..3           a range of integers, because the field is one
    class_dim=8,16,24            choices
    routing=dynamic,em           algorithms; fields that only some of them have are searched with those
    model.decoder=512-1024,none  choices of lists

The names of `SPACES` stand for several such entries.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from capsnet.errors import UserError, unknown
from capsnet.routing import RoutingOptions
from capsnet.train.config import Config
from capsnet.train.settings import leaves, read_value, resolve, value_of, with_values, written

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
FEW = 50  # a space of at most this many combinations is searched exhaustively


@dataclass(frozen=True)
class Range:
    """Choices, or the numbers between two ends, both included; `log` samples by orders of magnitude."""

    values: tuple[Any, ...]
    """The choices, or the two ends."""
    kind: Literal["choice", "int", "float"] = "choice"
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
