"""Ablation: change one thing at a time against a base, over several seeds, judged on validation images.

The named variants are mostly what the authors' code does and the paper does not mention; `together` is the base with
all requested ones of the authors' code. Differences are paired by seed, because the same seed means the same split
and the same batches; their 95 % interval is Student's over the seeds. An interrupted ablation resumes with the same
command; a command with more variants or seeds trains only what is new.
"""

from __future__ import annotations

import math
import re
import shutil
import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from capsnet.errors import UserError, unknown
from capsnet.evaluate import mean_and_std, student
from capsnet.experiments.core.conduct import Show, discard, finish_row, is_done, save_picture
from capsnet.experiments.core.plan import Experiment, Record, Row
from capsnet.experiments.core.results import Place, Results, opened
from capsnet.experiments.core.selection import FAILURES, check_base, check_name, ingredients, reason
from capsnet.files import Lock
from capsnet.report.tables import Table
from capsnet.train.config import Config
from capsnet.train.config_records import from_dict
from capsnet.train.settings import read_values, train_flags, value_of, with_values, written

PLACE = Place(Path("results/ablation"), Path("runs/ablation"))
BASE, TOGETHER, ALL = "base", "together", "all"
VARIANTS = {  # name: what it changes, and what that means
    "reconstruction": ("loss.reconstruction=0.01", "reconstruction weighs twenty times as much as in the paper"),
    "half-mean": ("loss.margin_reduction=half-mean", "half the mean of the margin loss over the classes, not its sum"),
    "primary-factor": ("model.primary_factor=true", "primary capsules × 1/types before the squash"),
    "init": ("model.init=official", "the authors' initial weights and biases"),
    "bias": ("model.routing.bias=true", "a learnt bias in the routing"),
    "constant": ("schedule=constant", "constant learning rate"),
    "exponential": ("schedule=exponential", "learning rate × 0.96 every 2,000 steps"),
    "one-cycle": ("schedule=one-cycle", "one-cycle learning rate"),
    "detach": ("model.routing.detach=true", "gradient through the last iteration only"),
    "one-iteration": ("model.routing.iterations=1", "one routing iteration"),
    "leaky": ("model.routing.leaky=true", "leaky routing"),
    "batch-norm": ("model.stem_norm=true", "batch normalisation in the stem"),
    "shift": ("augment.shift=0", "no shifts"),
    "bf16": ("precision=bf16", "large products in bfloat16, or rougher on processors without it"),
    "no-decoder": ("model.decoder=none+loss.reconstruction=0", "no decoder, no reconstruction"),
}
AUTHORS = ("half-mean", "primary-factor", "init", "bias", "exponential")  # those of the authors' code
LONGEST = 200  # characters of a variant's name, which names a folder


@dataclass(frozen=True)
class Ablation(Experiment):
    """What is trained: a base, its variants (by name, or as FIELD=VALUE+FIELD=VALUE) and the seeds."""

    name: str
    base: Config
    variants: tuple[str, ...]
    seeds: int = 3

    columns = MappingProxyType({"error_percent": "validation error, %"})

    def __post_init__(self) -> None:
        check_name(self.name, "--name")
        if self.seeds < 1:
            raise UserError(f"--seeds is the number of trainings per variant, at least 1, got {self.seeds}.")
        for k in range(self.seeds):
            check_base(replace(self.base, seed=self.base.seed + k))

    def configs(self) -> dict[str, Config]:
        """The base, each variant that differs from all others, and those of the authors' code together."""
        authors = [name for name in AUTHORS if name in self.variants]
        together = TOGETHER if len(authors) == len(AUTHORS) else "+".join(authors)
        wanted = {name: [name] for name in self.variants} | ({together: authors} if authors else {})
        made = {BASE: self.base}
        for name, parts in wanted.items():
            config = self.base
            for part in parts:
                config = with_values(config, values_of(part, self.base))
            if config not in made.values():
                made[name] = config
        return made

    def all_rows(self) -> list[Row]:
        """Every training, one seed after another."""
        seeds, made = range(self.base.seed, self.base.seed + self.seeds), self.configs()
        return [Row(name, replace(config, seed=k), validated=True) for k in seeds for name, config in made.items()]


def values_of(name: str, base: Config) -> dict[str, Any]:
    """What a variant changes, by full field names."""
    return read_values(VARIANTS[name][0] if name in VARIANTS else name, base)


def chosen(words: Iterable[str], base: Config) -> tuple[str, ...]:
    """Variants from command-line words, each spelt in one way and listed once."""
    found: dict[str, None] = {}
    for word in re.sub(r"\s*([+=])\s*", r"\1", " ".join(words)).split():  # lr = 0.002 + epochs=5 is one
        if "=" in word:
            values = values_of(word, base)
            name = "+".join(f"{field}={written(value).removesuffix('.0')}" for field, value in values.items())
            if len(name) > LONGEST:
                raise UserError(f"a variant has at most {LONGEST} characters: set what all trainings share with flags.")
            found[name] = None
        elif word in (*VARIANTS, ALL):
            found |= dict.fromkeys(VARIANTS if word == ALL else [word])
        else:
            raise unknown("variant", word, [*VARIANTS, ALL, "FIELD=VALUE"])
    if not found:
        raise UserError(f"name at least one variant: FIELD=VALUE such as lr=0.003, {', '.join(VARIANTS)}, or {ALL}.")
    return tuple(found)


# --- Training --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Conducted:
    """The results of an ablation, and why trainings failed, by name."""

    results: Results
    failed: Mapping[str, str]


def conduct(ablation: Ablation, show: Show | None = None) -> Conducted:
    """Train what an ablation still lacks and return all its records."""
    show, rests_on, budget = show or Show(), ingredients(ablation.base), ablation.base.preset
    folder = PLACE.run(ablation.name, budget, "")
    folder.mkdir(parents=True, exist_ok=True)
    with Lock(folder):
        found, moved = opened(PLACE.results / f"{ablation.name}.json", "ablation", budget)
        if moved:
            show.set_aside(moved)
        rows = ablation.all_rows()
        left = [row for row in rows if not is_done(found.find(row.name), row)]
        if any(record.more.get(part, there) != there for record in found.rows for part, there in rests_on.items()):
            raise UserError(
                f"{found.path} was trained before the images, or the model given as --init or --teacher, changed: "
                f"choose another --name."
            )
        if other := next((row.name for row in left if found.find(row.name)), None):
            raise UserError(f"{found.path} has {other} with other settings than these: choose another --name.")
        show.planned(rows, left, None)
        failed = train_all(ablation, left, found, rests_on, show)
    names = {row.name for row in rows}
    return Conducted(replace(found, rows=[record for record in found.rows if record.name in names]), failed)


def train_all(
    ablation: Ablation, rows: Sequence[Row], found: Results, rests_on: Mapping[str, Any], show: Show
) -> dict[str, str]:
    """Train rows into `found`; why others failed. Without its base, a seed has nothing to compare."""
    failed: dict[str, str] = {}
    for row in rows:
        if f"{BASE}-seed{row.seed}" in failed:
            continue
        watchers = show.started(row)
        try:
            record = finish_row(ablation, found.budget, row, PLACE, watchers)
            if diverged := record.outcome.get("diverged"):
                raise UserError(diverged)
        except FAILURES as failure:
            useless = row.method == BASE and not found.rows
            if useless or isinstance(failure.__cause__, OSError):  # the others would fail too
                raise
            failed[row.name] = reason(failure)
            shutil.rmtree(PLACE.run(ablation.name, found.budget, row.name), ignore_errors=True)
        else:
            found.put(replace(record, more=dict(rests_on)))
            discard(PLACE.run(ablation.name, found.budget, row.name))
            show.ended(row, record)
    return failed


# --- Outcome ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """A variant over its seeds: its validation error, and its difference from the base, paired by seed."""

    name: str
    what: str
    seeds: list[int]
    flags: list[str]
    """What `capsnet train` needs in addition to the base's flags."""
    error_percent: float
    std: float
    difference: float
    half_interval_95: float | None
    """Half of Student's interval of the difference; None for a single seed."""
    sure: bool
    """Whether the interval excludes zero."""
    seconds: float


def outcomes(records: Sequence[Record]) -> list[Outcome]:
    """The base, then each variant that has a seed in common with it."""
    by_name = {(r.method, r.seed): r for r in records}
    configs = {r.method: from_dict(r.certificate.config) for r in records}
    image = max((100 / r.outcome["n"] for r in records), default=0.0)  # no interval is narrower than one image
    found = []
    for name in sorted(configs, key=lambda name: name != BASE):  # the base first
        seeds = [seed for method, seed in by_name if method == name and (BASE, seed) in by_name]
        if seeds:
            pairs = [(by_name[name, seed], by_name[BASE, seed]) for seed in seeds]
            flags = train_flags(replace(configs[name], seed=configs[BASE].seed), configs[BASE])
            found.append(outcome_of(name, what(name, configs[BASE]), flags, pairs, image))
    return found


def outcome_of(name: str, what: str, flags: list[str], pairs: Sequence[tuple[Record, Record]], image: float) -> Outcome:
    """The outcome of a variant from its records, each with the base's of the same seed."""
    errors = [ours.outcome["error_percent"] for ours, _ in pairs]
    differences = [ours.outcome["error_percent"] - base.outcome["error_percent"] for ours, base in pairs]
    difference, (mean, std) = statistics.fmean(differences), mean_and_std(errors)
    half = half_interval(differences, image) if name != BASE else 0.0
    return Outcome(
        name, what, [ours.seed for ours, _ in pairs], flags, round(mean, 4), round(std, 4), round(difference, 4),
        round(half, 4) if math.isfinite(half) else None,
        sure=name != BASE and abs(difference) > max(half, image) + 1e-9,
        seconds=round(statistics.fmean(ours.seconds for ours, _ in pairs), 1),
    )  # fmt: skip


def half_interval(differences: Sequence[float], image: float) -> float:
    """Half of Student's 95 % interval of the mean difference; infinite for a single seed.

    However similar the seeds are, it is not narrower than chance allows: a difference of d images varies by √d.

    >>> round(half_interval([0.1, 0.2, 0.3], 0.01), 3), round(half_interval([2.0, 2.0], 0.5), 1)
    (0.248, 9.0)
    """
    seeds = len(differences)
    if seeds < 2:
        return math.inf
    counting = math.sqrt(abs(statistics.fmean(differences)) * image)
    return student(seeds - 1) * max(statistics.stdev(differences), counting) / math.sqrt(seeds)


def what(name: str, base: Config) -> str:
    """A variant in words."""
    if "=" in name:
        changes = [(field, value_of(base, field), value) for field, value in (w.split("=") for w in name.split("+"))]
        return ", ".join(f"{field} {'' if old is None else written(old) + ' '}→ {new}" for field, old, new in changes)
    said = {BASE: "unchanged", TOGETHER: f"all of the authors' code at once: {', '.join(AUTHORS)}"}
    return VARIANTS[name][1] if name in VARIANTS else said.get(name, "these at once")


def table(found: Sequence[Outcome]) -> Table:
    """The differences as a table; those whose interval excludes zero are marked."""
    rows = []
    for o in found:
        half = "" if o.half_interval_95 is None else f" ± {o.half_interval_95:.2f}"
        error = f"{o.error_percent:.2f}" + (f" ± {o.std:.2f}" if len(o.seeds) > 1 else "")
        difference = f"{round(o.difference, 2) or 0.0:+.2f}{half}{' *' if o.sure else ''}"
        difference = "–" if o.name == BASE else difference
        rows.append([o.name, o.what, error, difference, str(len(o.seeds)), f"{o.seconds:,.0f} s"])
    note = (
        "± is the standard deviation over seeds and, for differences, Student's 95 % interval, which is never narrower "
        "than chance allows for that many images. * marks intervals that exclude zero; by chance alone, one in twenty "
        "variants without any effect is marked."
    )
    return Table(["variant", "what it is", "validation error, %", "difference", "seeds", "training"], rows, [note])


def draw(ablation: Ablation, found: Sequence[Outcome]) -> Path:
    """The errors as bars, most helpful variant first; returns the path of the PNG."""
    from capsnet.report import figures

    bars = []
    for o in sorted(found, key=lambda o: (o.name != BASE, o.difference)):
        label = textwrap.fill(o.name.replace("+", " + "), 34)
        colour = figures.VERMILLION if o.name == BASE else figures.BLUE if o.sure else figures.PALETTE[5]
        bars.append(figures.Bar(label, o.error_percent, colour, o.std))
    note = (
        f"Validation error, mean and standard deviation (seeds: {ablation.seeds}). Dark blue: the 95 % interval of the "
        f"difference excludes zero"
    )
    height = 90 + (26 + 12 * max(bar.label.count("\n") for bar in bars)) * len(bars)
    drawn = figures.bars(f"Variants of {ablation.base.preset}", note, {"": bars}, height=height)
    save_picture(drawn, PLACE.results / ablation.name)
    return PLACE.results / f"{ablation.name}.png"
