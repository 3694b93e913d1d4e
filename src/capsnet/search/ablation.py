"""Ablation: one choice at a time against a base, over several seeds, on validation images.

The suspects are what the authors' code does and the paper does not say, any of which may be why others report more
errors than the paper's 0.25 %, and a few choices of others; one's own are written as `lr=0.002` or, several at once,
`stem=deep+epochs=5`. `together` is the base with those of the authors at once
(and `init+bias` with those two, where no others of theirs were asked for). A difference is taken seed by seed,
for the same seed means the same images held back and the same order of batches; its 95 % interval is Student's over the
seeds. Killed at any moment, the same command goes on; one that names more suspects or seeds trains only what is new.
"""

from __future__ import annotations

import math
import re
import shutil
import statistics
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from capsnet import checkpoint, runs, training
from capsnet.config import CapsNetConfig, Config, from_dict
from capsnet.errors import UserError, unknown
from capsnet.evaluation import mean_and_std
from capsnet.experiments import results as kept
from capsnet.experiments.conduct import Show, is_done, move_away, same_training, save_picture
from capsnet.experiments.plan import Row, Table
from capsnet.search.space import (
    FAILURES,
    check_judge,
    check_name,
    ingredients,
    read_values,
    train_flags,
    with_values,
    written,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RESULTS, RUNS = Path("results/ablation"), Path("runs/ablation")
BASE, TOGETHER = "base", "together"


class Suspect(NamedTuple):
    """A choice that may matter."""

    what: str | Callable[[Config], str]
    values: Mapping[str, Any] | Callable[[Config], Mapping[str, Any]]
    authors: bool = False  # whether the authors' code has it

    def change(self, config: Config) -> Config:
        return with_values(config, self.values(config) if callable(self.values) else self.values)


SUSPECTS = {
    "reconstruction": Suspect(
        "reconstruction weighs twenty times as much",
        lambda c: {"loss.reconstruction": 20 * c.loss.reconstruction},
    ),
    "half-mean": Suspect(
        "half the margin loss's mean over the classes instead of its sum, as in the authors' code: beside it the "
        "reconstruction weighs twenty times as much",
        {"loss.margin_reduction": "half-mean"}, True,
    ),
    "primary-factor": Suspect("primary capsules × 1/types before the squash", {"model.primary_factor": True}, True),
    "init": Suspect("the authors' initial weights and biases", {"model.init": "official"}, True),
    "bias": Suspect("a learnt bias in the routing", {"model.routing_bias": True}, True),
    "constant": Suspect("constant learning rate", {"schedule": "constant"}),
    "exponential": Suspect("learning rate × 0.96 every 2,000 steps", {"schedule": "exponential"}, True),
    "one-cycle": Suspect("learning rate up, then down to almost nothing", {"schedule": "one-cycle"}),
    "detach": Suspect("gradient through the last iteration only", {"model.detach": True}),
    "one-iteration": Suspect("one routing iteration", {"model.iterations": 1}),
    "leaky": Suspect("leaky routing", {"model.leaky": True}),
    "batch-norm": Suspect("batch normalisation in the stem", {"model.stem_norm": True}),
    "shift": Suspect(
        lambda c: "no shifts" if c.augment.shift else "shifts of up to 2 pixels",
        lambda c: {"augment.shift": 0 if c.augment.shift else 2},
    ),
    "bf16": Suspect("large products in bfloat16, or rougher where the processor has none", {"precision": "bf16"}),
    "no-decoder": Suspect("no decoder, no reconstruction", {"model.decoder": (), "loss.reconstruction": 0.0}),
}  # fmt: skip
LONGEST = 200  # characters of a choice: it names a folder
# Student's t at 97.5 % for 1 to 9 degrees of freedom
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


@dataclass(frozen=True)
class Plan:
    """What is trained: a base, the suspects and the seeds."""

    name: str
    base: Config
    suspects: tuple[str, ...]
    seeds: int = 3

    def __post_init__(self) -> None:
        if not isinstance(self.base.model, CapsNetConfig):
            raise UserError("the choices of --ablate are a capsule network's: choose a --preset that has one.")
        check_name(self.name)
        if self.seeds < 1:
            raise UserError(f"--seeds is how often each choice is trained, at least 1, and is {self.seeds}.")
        for k in range(self.seeds):
            check_judge(replace(self.base, seed=self.base.seed + k))

    def configs(self) -> dict[str, Config]:
        """The base, each suspect that changes it, and all of the authors' together."""
        alone = {name: changed(name, self.base) for name in self.suspects}
        authors = [name for name, suspect in SUSPECTS.items() if suspect.authors]
        theirs = [name for name in authors if name in self.suspects]
        together = self.base
        for name in theirs:
            together = SUSPECTS[name].change(together)
        made = {BASE: self.base}
        for name, config in alone.items():
            if config not in made.values():
                made[name] = config
        called = TOGETHER if theirs == authors else "+".join(theirs)
        return made if together in made.values() else made | {called: together}

    def idle(self) -> list[str]:
        """The suspects that the base, or one before them, has already."""
        return [name for name in self.suspects if name not in self.configs()]

    def rows(self) -> list[Row]:
        """Every training; the first seed's whole table comes first."""
        made = self.configs()
        return [Row(name, replace(c, seed=self.base.seed + k)) for k in range(self.seeds) for name, c in made.items()]


def changed(name: str, base: Config) -> Config:
    """The base with a suspect, or with a choice of one's own: `lr=0.002`, `stem=deep+epochs=5`."""
    return with_values(base, read_values(name, base)) if "=" in name else SUSPECTS[name].change(base)


def chosen(words: Iterable[str], base: Config) -> tuple[str, ...]:
    """Suspects by name, `suspects` for all of them, and choices of one's own: each spelt in one way, and once."""
    found: dict[str, None] = {}
    for word in re.sub(r"\s*([+=])\s*", r"\1", " ".join(words)).split():  # lr = 0.002 + epochs=5 is one
        if "=" in word:
            values = read_values(word, base)
            name = "+".join(f"{field}={written(value).removesuffix('.0')}" for field, value in values.items())
            if len(name) > LONGEST:
                raise UserError(f"a choice has {LONGEST} letters at most: give what all trainings share as flags.")
            found[name] = None
        elif word in (*SUSPECTS, "suspects"):
            found |= dict.fromkeys(SUSPECTS if word == "suspects" else [word])
        else:
            raise unknown("suspect", word, [*SUSPECTS, "suspects", "FIELD=VALUE"])
    return tuple(found)


class Incomplete(UserError):
    """Some choices cannot be trained, or not with every seed; what can be is in `results`."""

    def __init__(self, results: kept.Results, failed: Sequence[tuple[Row, str]], seeds: int) -> None:
        each = []
        for name, why in {row.method: why for row, why in failed}.items():
            which = [str(row.seed) for row, _ in failed if row.method == name]
            only = f" with seed {', '.join(which)}" if len(which) < seeds else ""
            each.append(f"{name} cannot be{only}: {why.rstrip('.')}")
        super().__init__(f"the others are trained and in {results.path}, but {'; '.join(each)}.")
        self.results = results


def conduct(plan: Plan, show: Show | None = None, results: Path = RESULTS, trainings: Path = RUNS) -> kept.Results:
    """Train what is left of an ablation and return all its records."""
    with alone(plan.name, trainings / plan.name):
        return conduct_alone(plan, show or Show(), results, trainings)


@contextmanager
def alone(name: str, folder: Path) -> Iterator[None]:
    """Hold the ablation of a name: a second one would overwrite what the first one writes."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = runs.Lock(folder)
    except runs.Taken:
        raise UserError(
            f"the ablation '{name}' is under way: wait until it ends, or choose another name with --study."
        ) from None
    try:
        yield
    finally:
        lock.release()


def conduct_alone(plan: Plan, show: Show, results: Path, trainings: Path) -> kept.Results:
    found, moved = kept.opened(results / f"{plan.name}.json", "ablation", plan.base.preset)
    if moved:
        show.set_aside(moved)
    rows = plan.rows()
    left = [row for row in rows if not is_done(found.find(row.name), row)]
    for row in left:
        if record := found.find(row.name):
            raise UserError(
                f"{found.path} has {row.name} with {other_settings(record, row)}: choose another name with --study."
            )
    rests_on = ingredients(plan.base)
    if any(record.get(part, there) != there for record in found.rows for part, there in rests_on.items()):
        raise UserError(
            f"{found.path} is of trainings before the images, or the model to begin with or to learn from, changed: "
            f"choose another name with --study."
        )
    show.planned(rows, left, None)
    failed: list[tuple[Row, str]] = []
    for row in left:
        watchers = show.started(row)
        try:
            record = trained(row, trainings / plan.name / row.name, watchers)
        except FAILURES as failure:
            if row.method == BASE or isinstance(failure.__cause__, OSError):  # then nothing else would go well
                raise
            failed.append((row, failure.what if isinstance(failure, runs.GoneBad) else str(failure)))
            shutil.rmtree(trainings / plan.name / row.name, ignore_errors=True)
            continue
        found.put(record | rests_on)
        shutil.rmtree(trainings / plan.name / row.name)  # what there is to know is in the record
        show.ended(row, record)
    names = {row.name for row in rows}
    asked_for = replace(found, rows=[record for record in found.rows if record["name"] in names])
    if failed:
        raise Incomplete(asked_for, failed, plan.seeds)
    return asked_for


def other_settings(record: Mapping[str, Any], row: Row) -> str:
    """In what the training of a record differs from the one that is asked for."""
    assert row.config is not None
    try:
        there = from_dict(record["certificate"]["config"])
    except UserError:
        return "settings of another version"
    flags = train_flags(replace(there, save_every=row.config.save_every), row.config)
    return f"other settings than these ({' '.join(flags)} there)"


def trained(row: Row, folder: Path, watchers: list[training.Watcher]) -> dict[str, Any]:
    """The record of one training, begun or gone on with, judged on its validation part."""
    assert row.config is not None
    file = folder / runs.CONFIG_FILE
    if file.exists() and not same_training(checkpoint.read_json(file), row.config):
        move_away(folder)  # half a training of other settings
    run = training.resume(folder) if runs.can_go_on(folder) else training.start(row.config, folder)
    judged = training.train_and_validate(run, watchers).summary()
    curve = [[r["epoch"], r["validation_error_percent"]] for r in runs.read_metrics(folder) if r["kind"] == "epoch"]
    return {
        "name": row.name, "method": row.method, "seed": row.seed, "shown": {}, "paper": {}, "less": [], "made": {},
        "outcome": {**judged, "curve": curve}, "seconds": round(run.seconds, 1),
        "certificate": training.birth_certificate(run),
    }  # fmt: skip


# --- What came out ---------------------------------------------------------------------------------------------


def interval(values: Sequence[float]) -> float:
    """Half the width of Student's 95 % interval of a mean; infinite for a single value.

    >>> round(interval([0.1, 0.2, 0.3]), 3)
    0.248
    """
    free = len(values) - 1
    return student(free) * statistics.stdev(values) / math.sqrt(len(values)) if free else math.inf


def counted(apart: Sequence[float], image: float) -> float:
    """The least that half an interval can be, however equal the seeds are: in a difference of d images at least d have
    changed sides, which by chance alone varies by √d.

    >>> round(counted([2.0, 2.0], 0.5), 1)  # four images of 200, twice
    9.0
    """
    free, seeds = len(apart) - 1, len(apart)
    images = abs(statistics.fmean(apart)) / image
    return student(free) * image * math.sqrt(images / seeds) if free else math.inf


def student(free: int) -> float:
    """Student's t at 97.5 %."""
    z = 1.959964
    return STUDENT[free - 1] if free <= len(STUDENT) else z + (z**3 + z) / (4 * free) + 2.8 / free**2


def outcomes(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The base, then each choice with its error over seeds and its difference from the base, seed by seed."""
    errors = {(r["method"], r["seed"]): r["outcome"]["error_percent"] for r in records}
    seconds = {(r["method"], r["seed"]): r["seconds"] for r in records}
    configs = {r["method"]: from_dict(r["certificate"]["config"]) for r in records}
    least = max((100 / r["outcome"]["n"] for r in records), default=0.0)  # one image: no interval is narrower
    told = []
    for name, config in sorted(configs.items(), key=lambda item: item[0] != BASE):  # the base first
        seeds = [seed for method, seed in errors if method == name and (BASE, seed) in errors]
        if not seeds:
            continue
        apart = [errors[name, seed] - errors[BASE, seed] for seed in seeds]
        half = max(interval(apart), counted(apart, least)) if name != BASE else 0.0
        mean, std = mean_and_std([errors[name, seed] for seed in seeds])
        flags = train_flags(replace(config, seed=configs[BASE].seed), configs[BASE])
        told.append({
            "name": name, "what": what(name, configs[BASE]), "flags": flags, "seeds": seeds,
            "error_percent": round(mean, 4), "std": round(std, 4), "difference": round(statistics.fmean(apart), 4),
            "half_interval_95": round(half, 4) if math.isfinite(half) else None,
            "sure": name != BASE and abs(statistics.fmean(apart)) > max(half, least) + 1e-9,
            "seconds": round(statistics.fmean(seconds[name, seed] for seed in seeds), 1),
        })  # fmt: skip
    return told


def what(name: str, base: Config) -> str:
    """What a choice is, in words; of one's own, what it changes."""
    if "=" in name:
        return ", ".join(
            f"{field} {was(field, base)}→ {value}" for field, value in (p.split("=") for p in name.split("+"))
        )
    authors = [each for each, suspect in SUSPECTS.items() if suspect.authors and suspect.change(base) != base]
    words = {BASE: "as it is", TOGETHER: f"those of the authors' code at once: {', '.join(authors)}"}
    if name in words or "+" in name:
        return words.get(name, "these at once")
    said = SUSPECTS[name].what
    return said(base) if callable(said) else said


def was(field: str, base: Config) -> str:
    """The base's value of a field; a whole stem has none."""
    section, _, name = field.rpartition(".")
    return "" if field == "stem" else f"{written(getattr(getattr(base, section) if section else base, name))} "


def table(told: Sequence[Mapping[str, Any]]) -> Table:
    """The differences in words; one whose interval leaves out zero is marked."""
    rows = []
    for o in told:
        half = o["half_interval_95"]
        spread = "" if half is None else f" ± {half:.2f}"
        error = f"{o['error_percent']:.2f}" + (f" ± {o['std']:.2f}" if len(o["seeds"]) > 1 else "")
        apart = "–" if o["name"] == BASE else f"{round(o['difference'], 2) or 0.0:+.2f}{spread}{' *' * o['sure']}"
        rows.append([
            o["name"], o["what"], error, apart, str(len(o["seeds"])),
            f"{o['seconds']:,.0f} s",
        ])  # fmt: skip
    columns = ["choice", "what it is", "validation error, %", "against the base", "seeds", "training"]
    return Table(columns, rows, ["± is the deviation over seeds, and Student's 95 % interval of the difference, but "
                                 "never narrower than chance makes a difference of that many images; "
                                 "* marks differences whose interval leaves out zero: chance alone marks one choice "
                                 "in twenty that changes nothing."])  # fmt: skip


def draw(plan: Plan, told: Sequence[Mapping[str, Any]], results: Path = RESULTS) -> Path:
    """The errors as bars, what helps first, as PNG and SVG; gives the PNG's path."""
    from capsnet import figures

    def label(name: str) -> str:
        return textwrap.fill(name.replace("+", " + "), 34) if "=" in name else name

    def colour(o: Mapping[str, Any]) -> str:
        return figures.VERMILLION if o["name"] == BASE else figures.BLUE if o["sure"] else figures.PALETTE[5]

    ordered = sorted(told, key=lambda o: (o["name"] != BASE, o["difference"]))
    bars = [figures.Bar(label(o["name"]), o["error_percent"], colour(o), o["std"]) for o in ordered]
    epochs = ", one epoch" if plan.base.epochs == 1 else f", {plan.base.epochs} epochs"
    epochs *= not any("epochs=" in o["name"] for o in told)
    fewest = min(len(o["seeds"]) for o in told)
    over = f"{fewest} to {plan.seeds} seeds" if fewest < plan.seeds else f"{plan.seeds} seeds"
    seeds = "one seed" if plan.seeds == 1 else f"mean and deviation over {over}"
    note = f"Validation error, {seeds}{epochs}. Dark blue: the 95 % interval of the difference leaves out zero"
    lines = max(bar.label.count("\n") for bar in bars)  # of the longest label, beyond its first
    figure: Figure = figures.bars(
        f"Each choice beside {plan.base.preset}", note, {"": bars}, height=90 + (26 + 12 * lines) * len(bars)
    )
    save_picture(figure, results / plan.name)
    return results / f"{plan.name}.png"
