"""What is searched: fields of the config by their dotted names, each with its choices or its range.

    lr=0.001..0.01:log          between two numbers, by orders of magnitude
    augment.shift=0..3          whole numbers, because the field holds one
    model.iterations=1,2,3      choices
    model.decoder=512-1024,none lists: numbers joined by dashes, pairs by x (20x12-10x8), none for an empty one
    stem=small,quick,wide       whole convolutional stems, so that channels, kernels and strides fit each other

The names of `SPACES` stand for several of these. Every value is checked against the field's own type and limits.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from capsnet import checkpoint, zoo
from capsnet import config as settings
from capsnet.config import CapsNetConfig, Config
from capsnet.data.datasets import listing
from capsnet.errors import UserError, unknown
from capsnet.models.capsnet import check_branches
from capsnet.pretrained import check_unseen

if TYPE_CHECKING:
    from optuna.trial import BaseTrial


class Stem(NamedTuple):
    """The convolutions before the primary capsules; those after the trunk are parted among the branches."""

    channels: tuple[int, ...]
    kernels: tuple[int, ...]
    strides: tuple[int, ...]
    branches: int = 1
    trunk: int = 0


STEMS = {
    "paper": Stem((256,), (9,), (1,)),
    "small": Stem((32, 64), (5, 3), (2, 1)),
    "quick": Stem((32, 64, 64), (5, 3, 3), (2, 1, 1)),
    "wide": Stem((64, 128, 128), (5, 3, 3), (2, 1, 1)),
    "deep": Stem((32, 64, 64, 64), (5, 3, 3, 3), (2, 1, 1, 1)),
    "deeper": Stem((32, 64, 64, 128, 128), (3, 3, 3, 3, 3), (1, 2, 1, 1, 1)),
    "deepest": Stem((32, 64, 64, 128, 128, 128), (3, 3, 3, 3, 3, 3), (1, 1, 2, 1, 1, 1)),
    "seven": Stem((16, 32, 32, 64, 96, 128, 128), (3,) * 7, (1, 1, 1, 2, 1, 1, 1)),
    "branched": Stem((32, 32, 32, 192, 288, 384, 384), (3,) * 7, (1, 1, 1, 2, 1, 1, 1), branches=3, trunk=3),
}
STEM_LISTS = {"model.stem_channels", "model.stem_kernels", "model.stem_strides"}
SPACES = {
    "compact": (
        "stem=small,quick,wide,deep,deeper,deepest", "model.primary_types=8,16,24,32,48", "model.primary_dim=4,8,16",
        "model.primary_kernel=3,5", "model.class_dim=8,16,24", "model.decoder=256-512,512-1024",
    ),
    "training": (
        "lr=0.001..0.02:log", "schedule=exponential,one-cycle", "warmup=0.05..0.4", "optimizer=adam,adamw",
        "weight_decay=0.001..0.1:log", "batch_size=64,128,256", "average=0,0.99,0.998",
    ),
    "augmentation": (
        "augment.shift=0..3", "augment.rotate=0..15", "augment.scale=0..0.2", "augment.shear=0..0.3",
        "augment.elastic=0..1", "augment.erase=0..8", "augment.share=0.25..1",
        "augment.until=0.5..1",
    ),
    "routing": (
        "model.iterations=1..4", "model.leaky=false,true", "model.routing_bias=false,true", "model.detach=false,true",
    ),
    "loss": (
        "loss.reconstruction=0.00005..0.02:log", "loss.margin_reduction=sum,half-mean", "loss.down_weight=0.25..1",
        "loss.absent=0.02..0.2",
    ),
}  # fmt: skip
# what a trial is judged on, and what the data decide: the same for all trials
FIXED = {
    "preset", "data", "init", "teacher", "validation", "validation_choice", "seed", "device", "save_every", "stop_at",
    "patience", "model.image_shape", "model.num_classes", "model.routing",
}  # fmt: skip
FAILURES = (UserError, RuntimeError, MemoryError, ArithmeticError)  # of one training, while the others go on
FEW = 50  # combinations: so many are all tried, each once
WORDS = {"true": True, "yes": True, "false": False, "no": False}


@dataclass(frozen=True)
class Choice:
    """One of several values."""

    values: tuple[Any, ...]

    def suggest(self, trial: BaseTrial, name: str) -> Any:
        words = {written(value): value for value in self.values}  # a storage keeps words, not tuples
        return words[trial.suggest_categorical(name, list(words))]

    def ends(self) -> tuple[Any, ...]:
        return self.values

    def all(self) -> Sequence[Any]:
        """Every value, as a storage keeps it; none where they cannot be counted."""
        return [written(value) for value in self.values]

    def __str__(self) -> str:
        return ",".join(map(written, self.values))


@dataclass(frozen=True)
class Between:
    """A number between two others, both included; `log` draws by orders of magnitude."""

    low: float
    high: float
    log: bool = False
    integer: bool = False

    def suggest(self, trial: BaseTrial, name: str) -> float:
        if self.integer:
            return trial.suggest_int(name, int(self.low), int(self.high), log=self.log)
        value = trial.suggest_float(name, self.low, self.high, log=self.log)
        return min(max(float(f"{value:.4g}"), self.low), self.high)  # digits that mean nothing make commands long

    def ends(self) -> tuple[float, float]:
        return self.low, self.high

    def all(self) -> Sequence[int]:
        return range(int(self.low), int(self.high) + 1) if self.integer else ()

    def __str__(self) -> str:
        return f"{written(self.low)}..{written(self.high)}{':log' * self.log}"


Range = Choice | Between
Space = Mapping[str, Range]


def read(words: Iterable[str], base: Config) -> Space:
    """The space that words on the command line declare; of a field that comes twice, the later one holds.

    >>> space = read(["routing", "lr=0.001..0.01:log"], Config())
    >>> list(space)[-1], str(space["lr"]), str(space["model.iterations"])
    ('lr', '0.001..0.01:log', '1..4')
    """
    space: dict[str, Range] = {}
    for declared in _single(words):
        name, text = _named(declared)
        space[name] = _range(name, text, _type_of(name, base) if name != "epochs" or _whole(text) else float)
    stems = [{"stem": value} for value in space["stem"].ends()] if "stem" in space else [{}]
    for name, choices in space.items():
        for value, stem in itertools.product(choices.ends(), stems):
            _check(base, {**stem, name: value})
    if not space:
        raise UserError(
            f"the space is empty: --space takes fields with their values, such as lr=0.001..0.01:log, or names: "
            f"{', '.join(SPACES)}."
        )
    return space


def read_values(text: str, base: Config) -> dict[str, Any]:
    """The values that words such as `stem=deep+lr=0.002` give to fields, by their names; epochs may be a fraction here.

    >>> read_values("model.decoder=none+lr=2e-3", Config())
    {'lr': 0.002, 'model.decoder': ()}
    """
    values: dict[str, Any] = {}
    for word in re.split(r"\+(?=[^+=]+=)", text):
        if "=" not in word:
            raise UserError(f"{word} is no FIELD=VALUE: what has a name of its own stands by itself, not in {text}.")
        name, value = _named(word)
        if name in values:
            raise UserError(f"{text} gives {name} twice: leave one of them out.")
        values[name] = _value(name, value, float if name == "epochs" else _type_of(name, base))
    if "stem" in values and not STEM_LISTS.isdisjoint(values):
        raise UserError(f"{text} gives the stem twice: as a whole, and its lists.")
    _check(base, values)
    return dict(sorted(values.items()))


def _whole(text: str) -> bool:
    """Whether choices or a range are whole numbers.

    >>> _whole("1,2"), _whole("1..4:log"), _whole("0.5..2"), _whole("1,2.5")
    (True, True, False, False)
    """
    return all(word.strip().isdigit() for word in re.split(r"\.\.|,", text.partition(":")[0]))


def _single(words: Iterable[str]) -> Iterator[str]:
    """Each declaration by itself; a name stands for all of its own."""
    for word in words:
        if "=" in word:
            yield word
        elif word in SPACES:
            yield from SPACES[word]
        else:
            raise unknown("space", word, [*SPACES, "FIELD=VALUES"])


def _named(word: str) -> tuple[str, str]:
    """A field's name and what is said of it."""
    name, _, text = word.partition("=")
    return name.strip().replace("-", "_"), text.strip()


def combinations(space: Space) -> list[dict[str, Any]]:
    """Every combination of a space's values, where there are few of them; else none.

    >>> combinations(read(["model.leaky=false,true", "model.iterations=1..2"], Config()))[1]
    {'model.leaky': 'false', 'model.iterations': 2}
    >>> combinations(read(["model.leaky=false,true", "lr=0.001..0.01"], Config()))
    []
    """
    values = [choices.all() for choices in space.values()]
    if not 0 < math.prod(map(len, values)) <= FEW:
        return []
    return [dict(zip(space, chosen, strict=True)) for chosen in itertools.product(*values)]


def fields(base: Config) -> dict[str, Any]:
    """The fields that can be searched, by their dotted names, with their types; epochs in whole numbers where they are
    written so."""
    hints = dict(typing.get_type_hints(Config)) | {"epochs": int}
    for part in ("model", "loss", "augment"):
        del hints[part]
        section = type(getattr(base, part))
        hints |= {f"{part}.{name}": hint for name, hint in typing.get_type_hints(section).items()}
    return {name: hint for name, hint in hints.items() if name not in FIXED}


def _type_of(name: str, base: Config) -> Any:
    known = fields(base)
    if name == "stem" and isinstance(base.model, CapsNetConfig):
        return typing.Literal[tuple(STEMS)]
    if name in FIXED:
        raise UserError(f"{name} is the same for all trainings: give it as a flag of its own.")
    if name not in known:
        raise unknown("field", name, [*known, *["stem"] * isinstance(base.model, CapsNetConfig)])
    return known[name]


def _range(name: str, text: str, hint: Any) -> Range:
    if ".." not in text:
        values = tuple(dict.fromkeys(_value(name, word.strip(), hint) for word in text.split(",")))
        if len(values) < 2:
            raise UserError(
                f"--space {name}={text} leaves nothing to choose: name two values or more, joined by commas."
            )
        return Choice(values)
    if hint not in (int, float):
        raise UserError(
            f"--space {name}={text} is a range, and {name} is no number: name its values, joined by commas."
        )
    numbers, _, kind = text.partition(":")
    ends = [_value(name, word, hint) for word in numbers.split("..", 1) if word]
    low, high = ends if len(ends) == 2 else (0, 0)  # one that is missing makes no range
    if kind not in ("", "log") or not low < high or (kind == "log" and low <= 0):
        raise UserError(
            f"--space {name}={text} is no range: write LOW..HIGH, LOW below HIGH, or LOW..HIGH:log with LOW above 0."
        )
    return Between(low, high, kind == "log", hint is int)


def _value(name: str, word: str, hint: Any) -> Any:
    """A value from its word, by the type of its field."""
    try:
        value = _parsed(word, hint)
        if settings._fits(value, hint) and not (isinstance(value, float) and not math.isfinite(value)):
            return value
    except (ValueError, KeyError):
        pass
    if typing.get_origin(hint) is typing.Literal:
        raise unknown(f"value of {name}", word, typing.get_args(hint))
    kinds = {int: "a whole number", float: "a number", bool: "true or false"}
    if typing.get_origin(hint) is tuple:
        pairs = typing.get_origin(typing.get_args(hint)[0]) is tuple
        kind = f"{'pairs such as 16x8,' if pairs else 'numbers'} joined by dashes, or none"
    else:
        kind = kinds[hint]
    raise UserError(f"{name} takes {kind}, and not '{word}'.{_how(name, word, hint)}")


def _how(name: str, word: str, hint: Any) -> str:
    """What someone may have meant who wrote several numbers where there can be one.

    >>> _how("lr", "0.1-0.2", float), _how("lr", "0.1,0.2", float), _how("lr", "x", float)
    (' A range is for --space: lr=0.1..0.2.', ' Of several choices each stands by itself: lr=0.1 lr=0.2.', '')
    """
    numbers = re.split("[-,]", word)
    if hint not in (int, float) or len(numbers) < 2 or not all(re.fullmatch(r"[\d.]+", number) for number in numbers):
        return ""
    if "," in word:
        return f" Of several choices each stands by itself: {' '.join(f'{name}={number}' for number in numbers)}."
    return f" A range is for --space: {name}={'..'.join(numbers)}."


def _parsed(word: str, hint: Any) -> Any:
    if hint is bool:
        return WORDS[word.lower()]
    if hint in (int, float):
        return hint(word)
    if typing.get_origin(hint) is tuple:
        inner = typing.get_args(hint)[0]
        parts = [] if word == "none" else word.split("-" if typing.get_args(hint)[-1] is Ellipsis else "x")
        return tuple(_parsed(part, inner) for part in parts)
    return word


def written(value: Any) -> str:
    """A value as it is typed in a space.

    >>> written((32, 64)), written(((20, 12), (10, 8))), written(()), written(True), written(0.00005)
    ('32-64', '20x12-10x8', 'none', 'true', '0.00005')
    """
    if isinstance(value, tuple):
        nested = [written(v) if not isinstance(v, tuple) else "x".join(map(written, v)) for v in value]
        return "-".join(nested) or "none"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.12f}".rstrip("0").rstrip(".") if isinstance(value, float) and 1e-9 < abs(value) < 1 else str(value)


def _check(base: Config, values: Mapping[str, Any]) -> None:
    """Refuse what the config itself would refuse, and lists of a stem that would not fit each other."""
    changed = with_values(base, values)
    if isinstance(changed.model, CapsNetConfig):
        check_branches(changed.model)
    if not STEM_LISTS.isdisjoint(values):
        model = typing.cast(CapsNetConfig, changed.model)
        if not len(model.stem_channels) == len(model.stem_kernels) == len(model.stem_strides):
            said = "+".join(f"{name}={written(value)}" for name, value in values.items())
            raise UserError(
                f"{said} does not fit the stem's other lists; name whole stems instead: stem={','.join(STEMS)}."
            )


def check_name(name: str) -> None:
    """Refuse a study's name that would be no file's name."""
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise UserError(
            f"a study's name has letters, digits, dots, dashes and underscores, and no dot or dash in front: "
            f"change --study '{name}'."
        )


def check_judge(base: Config) -> None:
    """Refuse settings under which the validation images would be no judge of a training."""
    if not base.validation:
        raise UserError("trainings are judged on validation images: set --validation above 0.")
    if base.stop_at:
        raise UserError("with --stop-at every good training ends at the same error: leave it out.")
    check_unseen(base)


def ingredients(base: Config) -> dict[str, Any]:
    """What a training rests on besides its settings, by checksums: the models it begins with or learns from, and one's
    own images. Of these the validation part is another one as soon as there is one more of them."""
    models = {name: zoo.sha256(checkpoint.model_file(name)) for name in (base.init, base.teacher) if name}
    images = listing(base.data)
    return {"models": models} | ({} if images is None else {"images": images})


def with_values(base: Config, values: Mapping[str, Any]) -> Config:
    """The config with fields changed, by their dotted names; `stem` changes its three lists and its branches."""
    sections: dict[str, dict[str, Any]] = {"": {}, "model": {}, "loss": {}, "augment": {}}
    for name, value in values.items():
        section, _, field = name.rpartition(".")
        if name == "stem":
            channels, kernels, strides, branches, trunk = STEMS[value]
            lists = {"stem_channels": channels, "stem_kernels": kernels, "stem_strides": strides}
            stem = lists | {"branches": branches, "trunk": trunk}
            sections["model"] = stem | sections["model"]  # unless they are chosen themselves
        else:
            sections[section][field] = value
    top = sections.pop("")
    return replace(base, **top, **{part: replace(getattr(base, part), **new) for part, new in sections.items()})


def suggest(trial: BaseTrial, space: Space, base: Config) -> Config:
    """The config of a trial."""
    return with_values(base, {name: choices.suggest(trial, name) for name, choices in space.items()})


def record(space: Space) -> dict[str, str]:
    """A space as words, which `read` takes again."""
    return {name: str(choices) for name, choices in space.items()}


def train_flags(config: Config, base: Config) -> list[str]:
    """The flags of `capsnet train` that lead from one config to another; what the data decide is left out.

    >>> train_flags(Config(lr=0.01, model=CapsNetConfig(leaky=True, decoder=())), Config())
    ['--lr', '0.01', '--model.leaky', '--model.decoder']
    """
    flags: list[str] = []
    for part in ("", "model", "loss", "augment"):
        new, old = (getattr(c, part) if part else c for c in (config, base))
        for field in dataclasses.fields(new):
            name = f"{part}.{field.name}" if part else field.name
            value = getattr(new, field.name)
            known = name not in ("preset", "model.image_shape", "model.num_classes")
            if known and not dataclasses.is_dataclass(value) and value != getattr(old, field.name):
                flags += _flag(part, field.name, value)
    return flags


def _flag(part: str, name: str, value: Any) -> list[str]:
    name, before = name.replace("_", "-"), f"--{part}." if part else "--"
    if isinstance(value, bool):
        return [f"{before}{'' if value else 'no-'}{name}"]
    words = [str(n) for n in settings._numbers(value)] if isinstance(value, tuple) else [str(value)]
    return [f"{before}{name}", *words]
