"""Run an experiment: train its rows one after the other, measure them, store the outcome.

An interrupted experiment resumes: rows in the results file are not run again, a training continues from its last
checkpoint, and a finished training is only measured. A network that another experiment has trained in exactly the same
way is reused.

Several processes (`capsnet.group`) all run this code and share one folder: rank 0 decides what is to be done and writes
files, and all of them train and evaluate.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from capsnet import __version__, experiments, plugins
from capsnet.data import Batch, multi_hot, parse
from capsnet.data.registry import DATASETS
from capsnet.errors import UserError, unknown
from capsnet.evaluate import evaluate
from capsnet.experiments.core.plan import Budget, Experiment, Record, Row, check_budget
from capsnet.experiments.core.results import Place, Results, opened
from capsnet.group.base import current
from capsnet.io import checkpoint
from capsnet.io.leakage import images_unchanged
from capsnet.io.records import Certificate
from capsnet.models.registry import MODELS, build
from capsnet.routing.base import ROUTINGS
from capsnet.timing import timed
from capsnet.train import loop, precision, runs, steps
from capsnet.train.config import Config
from capsnet.train.config_records import from_dict
from capsnet.train.loop import Result, Watcher

SMOKE = "a few steps of a toy network"


class Show:
    """Progress callbacks; the defaults do nothing."""

    def planned(self, rows: Sequence[Row], left: Sequence[Row], seconds: float | None) -> None:
        """Before the first row: all rows, those to run, and their expected time if it is known."""

    def started(self, row: Row) -> list[Watcher]:
        """Before each row; returns the watchers of its training."""
        return []

    def ended(self, row: Row, record: Record) -> None: ...
    def set_aside(self, kept: Path) -> None: ...


def conduct(
    experiment: Experiment,
    budget: str,
    seeds: int = 1,
    *,
    only: str = "",
    place: Place | None = None,
    show: Show | None = None,
) -> Results:
    """Run the remaining rows of an experiment and return all its results; `only` limits it to rows with a prefix."""
    place, show, size = place or Place(), show or Show(), check_budget(budget)
    if size not in experiment.budgets:
        raise unknown(f"budget of {experiment.name}", budget, experiment.budgets)
    for name in experiment.requires:  # its rows have seeds of their own
        conduct(experiments.get(name), budget, only=only.partition("-seed")[0], place=place, show=show)
    prepare(experiment, place, size)
    planned = plan(experiment, size, seeds)
    rows = [row for row in planned if row.name.startswith(only)]
    if not rows:
        raise UserError(
            f"{experiment.name} has no row that starts with '{only}' at the budget {budget}: its rows have names such "
            f"as {planned[0].name}."
        )
    file = place.file(experiment.name, budget)
    if kept := current().from_leader(lambda: str(opened(file, experiment.name, budget)[1] or "")):
        show.set_aside(Path(kept))
    results, _ = opened(file, experiment.name, budget)
    left = [row for row in rows if not is_done(results.find(row.name), row)]
    untrained = [row for row in left if not is_trained(row, experiment.name, budget, place)]
    show.planned(rows, left, expected_seconds(untrained) if budget != "smoke" and current().leads else None)
    for row in left:
        watchers = show.started(row)
        record = finish_row(experiment, budget, row, place, watchers)
        results.put(record)
        if row.validated:  # its run is not needed now that its figures are safe
            discard(place.run(experiment.name, budget, row.name))
        show.ended(row, record)
    forget_others(experiment, size, results)
    draw_records(experiment, results, place)
    return results


def prepare(experiment: Experiment, place: Place, budget: Budget) -> None:
    """Rank 0 creates the files first, and the others find them."""
    current().from_leader(lambda: experiment.prepare(place, budget), patient=True)
    if not current().leads:
        experiment.prepare(place, budget)
    experiment.consult(place, budget)


def plan(experiment: Experiment, budget: Budget, seeds: int) -> list[Row]:
    """All rows, seed by seed."""
    if seeds < 1:
        raise UserError(f"--seeds must be at least 1, got {seeds}.")
    rows = [row for seed in range(seeds) for row in experiment.rows(budget, seed)]
    if budget == "smoke":
        rows = [replace(row, less=(SMOKE,)) if row.config else row for row in rows]
    unique = {row.name: row for row in rows}  # a row that trains nothing is the same for every seed
    return list(unique.values())


def forget_others(experiment: Experiment, budget: Budget, results: Results) -> None:
    """Sort the records and drop those of other settings, which must not count as further seeds."""
    seeds = 1 + max((record.seed for record in results.rows), default=0)
    wanted = {row.name: row for row in plan(experiment, budget, seeds)}
    results.rows = [r for r in results.rows if r.name not in wanted or is_done(r, wanted[r.name])]
    results.sort(list(wanted))


def is_done(record: Record | None, row: Row) -> bool:
    """Whether a record belongs to this row: same name, same training."""
    if record is None or row.config is None:
        return record is not None
    birth = record.certificate
    return record.also == row.also and same_training(birth.config, row.config) and images_unchanged(birth, row.config)


def same_training(recorded: dict[str, Any], config: Config) -> bool:
    """Whether a recorded config equals this one, apart from what comes from the data and the name of the preset.

    A precision of auto equals the one that was chosen for it; a plugin that has changed makes it another training.
    """
    try:
        if not plugins.unchanged(recorded.get("plugins", []), (ROUTINGS, MODELS, DATASETS)):
            return False
        there = from_dict(recorded)
    except UserError:  # of a version that had other settings
        return False
    model = replace(config.model, image_shape=there.model.image_shape, num_classes=there.model.num_classes)
    config = replace(config, precision=there.precision) if config.precision == "auto" else config
    return there == replace(config, preset=there.preset, save_every=there.save_every, model=model)


def finish_row(experiment: Experiment, budget: str, row: Row, place: Place, watchers: list[Watcher]) -> Record:
    """Train a row if necessary, measure it, and draw the pictures that need its model."""
    began = time.monotonic()
    result = None
    if row.config is None:
        outcome = current().from_leader(lambda: experiment.observe(row), patient=True)
        birth = checkpoint.certificate({}, 0.0)
    elif row.validated:
        outcome, birth = validated(row, place.run(experiment.name, budget, row.name), watchers)
    else:
        result = trained(row, place.run(experiment.name, budget, row.name), place, watchers)
        outcome, birth = experiment.measure(row, result), result.certificate
    files = current().from_leader(lambda: drawn(experiment, budget, row, result, place), patient=True)
    record = Record(
        name=row.name,
        method=row.method,
        seed=row.seed,
        shown=dict(row.shown),
        outcome=outcome,
        paper=dict(row.paper),
        less=row.less,
        also=row.also,
        made=made(row, result, birth),
        pictures=tuple(files),
        seconds=round(birth.seconds if row.config else time.monotonic() - began, 1),
        certificate=birth,
    )
    return record if current().size == 1 else Record.from_json(current().from_leader(record.to_json))


def drawn(experiment: Experiment, budget: str, row: Row, result: Result | None, place: Place) -> list[str]:
    """The names of the pictures of a row, after drawing them."""
    pictures = experiment.draw(row, result) if find_spec("matplotlib") else {}
    folder = place.pictures(experiment.name, budget)
    return [save_picture(figure, folder / f"{row.name}-{name}") for name, figure in pictures.items()]


def made(row: Row, result: Result | None, birth: Certificate) -> dict[str, Any]:
    """Network, parameters, epochs and data of a row."""
    if row.config is None:
        return {}
    model = result.model if result else build(from_dict(birth.config).model, device=torch.device("meta"))
    return {
        "architecture": model.describe(),
        "parameters": birth.parameters,
        "epochs": birth.epochs,
        "steps": birth.steps,
        "training_images": birth.training_images,
        "data": row.config.data,
        "tested_on": result.evaluation.n if result else 0,
    }


def trained(row: Row, folder: Path, place: Place, watchers: list[Watcher]) -> Result:
    """The finished training of a row: reused, resumed or started."""
    assert row.config is not None
    config = row.config
    if found := current().from_leader(lambda: str(find_finished(config, folder, place) or "")):
        return reopened(Path(found))
    return loop.train(started(config, folder), watchers)


def started(config: Config, folder: Path) -> loop.Run:
    """A training, resumed if it is the one in this folder; anything else there is renamed."""
    resumable = current().from_leader(lambda: made_way(config, folder))
    return loop.resume(folder) if resumable else loop.start(config, folder)


def made_way(config: Config, folder: Path) -> bool:
    """Whether this training can be resumed in this folder; anything else there is renamed."""
    file = folder / runs.CONFIG_FILE
    if file.exists() and (runs.has_finished(folder) or not same_training(checkpoint.read_json(file), config)):
        move_away(folder)  # of other settings or another version
    return runs.can_go_on(folder)


def validated(row: Row, folder: Path, watchers: list[Watcher]) -> tuple[dict[str, Any], Certificate]:
    """Train a row and evaluate it on the validation split; only the figures are kept.

    A training that diverges is an outcome as well: its setting is not chosen.
    """
    assert row.config is not None
    run = started(row.config, folder)
    try:
        outcome = loop.train_and_validate(run, watchers).summary()
    except runs.GoneBad as error:
        outcome = {"diverged": error.what}
    birth = loop.birth_certificate(run)
    curve = [[r["epoch"], r["validation_error_percent"]] for r in runs.read_metrics(folder) if r["kind"] == "epoch"]
    return {**outcome, "curve": curve}, birth


def discard(folder: Path) -> None:
    """Remove a run once all processes have read it."""
    current().barrier()
    if current().leads:
        shutil.rmtree(folder, ignore_errors=True)


def is_trained(row: Row, name: str, budget: str, place: Place) -> bool:
    """Whether a row only needs to be measured; one that is validated keeps no run, so it is always trained."""
    if row.config is None or row.validated:
        return False
    return find_finished(row.config, place.run(name, budget, row.name), place) is not None


def find_finished(config: Config, folder: Path, place: Place) -> Path | None:
    """A finished run with the same training, in this folder or of another experiment."""
    for other in [folder, *sorted(path.parent for path in place.runs.glob(f"*/*/{runs.CONFIG_FILE}"))]:
        if runs.has_finished(other) and same_training(checkpoint.read_json(other / runs.CONFIG_FILE), config):
            birth = Certificate.from_json(checkpoint.read_json(other / "results.json")["certificate"])
            # never compare networks of different versions, or of images that have changed
            if birth.capsnet == __version__ and images_unchanged(birth, config):
                return other
    return None


def reopened(folder: Path) -> Result:
    """Reopen a finished training with its data, evaluation and certificate."""
    birth = Certificate.from_json(checkpoint.read_json(folder / "results.json")["certificate"])
    prepared = loop.prepare(from_dict(checkpoint.read_json(folder / runs.CONFIG_FILE)), folder)
    model = checkpoint.load(folder, prepared.device)
    return Result(folder, model, prepared.splits, evaluate(model, prepared.splits.test), birth)


def move_away(folder: Path) -> None:
    """Rename a run that was started with other settings."""
    number = 1
    while (kept := folder.with_name(f"{folder.name}.old-{number}")).exists():
        number += 1
    folder.rename(kept)


# --- Pictures ------------------------------------------------------------------------------------------------


def save_picture(figure: Any, path: Path) -> str:
    """Save a picture as PNG; returns its name for the record."""
    from capsnet.report import figures

    figures.save(figure, path.with_name(f"{path.name}.png"))
    return path.name


def draw_records(experiment: Experiment, results: Results, place: Place) -> None:
    """Draw the pictures that need only the records."""
    if current().leads and find_spec("matplotlib") and results.rows:
        for name, figure in experiment.pictures(results.rows).items():
            save_picture(figure, place.pictures(experiment.name, results.budget) / name)


# --- How long it will take -----------------------------------------------------------------------------------


def expected_seconds(rows: Sequence[Row]) -> float:
    """Expected seconds for the rows on this machine, from a measured step of each network."""
    pace: dict[str, float] = {}
    total = 0.0
    for row in rows:
        if row.config is None:
            continue
        kind = str((row.config.model, row.config.batch_size, row.config.loss.reconstruction > 0))
        if kind not in pace:
            pace[kind] = seconds_per_image(row.config)
        total += pace[kind] * images_in_all(row.config)
    return total


def images_in_all(config: Config) -> float:
    """Training images that a row costs; an evaluated image costs a third of one."""
    train, test = parse(config.data).sizes or (1_000, 1_000)
    learnt = config.train_limit or max(train - config.validation, 1)
    return config.epochs * (learnt + config.validation / 3) + test / 3


def seconds_per_image(config: Config) -> float:
    """Time of a training step per image, measured after a warm-up step."""
    return timed(training_step(config), 1, warmup=1)[0] / config.batch_size


def training_step(config: Config) -> Callable[[], None]:
    """A training step of a new network on random images."""
    device = loop.choose_device(config.device)
    with steps.own_randomness(0, torch.device("cpu")):
        model = build(config.model).to(device)
        images = torch.rand(config.batch_size, *config.model.image_shape)
    j = config.model.num_classes
    labels = torch.arange(config.batch_size) % j
    batch = Batch(images.to(device), multi_hot(labels, j).to(device), labels.to(device), labels.to(device))
    optimizer = loop.build_optimizer(model, config)
    chosen = precision.choose(config.precision, config.model.kind, device)
    model.train()

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with precision.autocast(chosen, device):
            loss = steps.compute_loss(model, batch, config).total
        loss.backward()
        optimizer.step()

    return step
