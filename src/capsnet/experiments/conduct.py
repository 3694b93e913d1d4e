"""Conducting an experiment: train its rows one after the other, measure, keep the outcome.

Killed at any moment, the same command goes on: rows in the results file are not run again, a training goes on from its
last checkpoint, and one that had ended without being measured is only measured. A network that another experiment has
trained in exactly the same way is taken from there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from capsnet import __version__, checkpoint, runs, training
from capsnet.config import Config, from_dict
from capsnet.data import Batch, multi_hot, options
from capsnet.data.parts import Layout
from capsnet.errors import UserError
from capsnet.evaluation import evaluate
from capsnet.experiments.plan import Budget, Experiment, Row, check_budget
from capsnet.experiments.results import Place, Results, opened
from capsnet.models.registry import Model, build
from capsnet.training import Result, Watcher

IMAGES = {"mnist": 60_000, "multimnist": 60_000, "expanded-mnist": 60_000, "affine-mnist": 60_000, "cifar10": 50_000}
TESTED = {"multimnist": 100_000, "affine-mnist": 320_000}


class Show:
    """Someone who looks on: the command line's progress. Every method may be left out."""

    def planned(self, rows: Sequence[Row], left: Sequence[Row], seconds: float | None) -> None:
        """Before the first row: all rows, those that are left, and how long those will take if that is known."""

    def started(self, row: Row) -> list[Watcher]:
        """Before each row; who watches its training."""
        return []

    def ended(self, row: Row, record: dict[str, Any]) -> None: ...
    def set_aside(self, kept: Path) -> None: ...


def conduct(
    experiment: Experiment,
    budget: str,
    seeds: int = 1,
    *,
    place: Place | None = None,
    show: Show | None = None,
) -> Results:
    """Run what is left of an experiment and return all its results."""
    place, show = place or Place(), show or Show()
    check_budget(budget)
    experiment.prepare(place)
    rows = plan(experiment, check_budget(budget), seeds)
    results, kept = opened(place.file(experiment.name, budget), experiment.name, budget)
    if kept:
        show.set_aside(kept)
    left = [row for row in rows if not is_done(results.find(row.name), row)]
    untrained = [row for row in left if not is_trained(row, experiment.name, budget, place)]
    show.planned(rows, left, expected_seconds(untrained) if budget != "smoke" else None)
    for row in left:
        watchers = show.started(row)
        record = finish_row(experiment, budget, row, place, watchers)
        results.put(record)
        show.ended(row, record)
    forget_others(experiment, check_budget(budget), results)
    draw_records(experiment, results, place)
    return results


def plan(experiment: Experiment, budget: Budget, seeds: int) -> list[Row]:
    """All rows, seed after seed: the first seed's whole table comes first."""
    if seeds < 1:
        raise UserError(f"--seeds is how often each row is trained, at least 1, and is {seeds}.")
    rows = [row for seed in range(seeds) for row in experiment.rows(budget, seed)]
    unique = {row.name: row for row in rows}  # a row that trains nothing is the same for every seed
    return list(unique.values())


def forget_others(experiment: Experiment, budget: Budget, results: Results) -> None:
    """Sort the records, and drop those that would be trained otherwise today: they must not count as further seeds."""
    seeds = 1 + max((record["seed"] for record in results.rows), default=0)
    wanted = {row.name: row for row in plan(experiment, budget, seeds)}
    results.rows = [r for r in results.rows if r["name"] not in wanted or is_done(r, wanted[r["name"]])]
    results.sort(list(wanted))


def is_done(record: dict[str, Any] | None, row: Row) -> bool:
    """Whether a record is this very row's: of the same name and trained in the same way."""
    if record is None or row.config is None:
        return record is not None
    return record.get("also", "") == row.also and same_training(record["certificate"]["config"], row.config)


def same_training(recorded: dict[str, Any], config: Config) -> bool:
    """Whether a recorded config is this one; shape and classes come from the data, a preset's name changes nothing."""
    try:
        there = from_dict(recorded)
    except UserError:  # of a version that had other settings
        return False
    model = replace(config.model, image_shape=there.model.image_shape, num_classes=there.model.num_classes)
    return there == replace(config, preset=there.preset, save_every=there.save_every, model=model)


def finish_row(experiment: Experiment, budget: str, row: Row, place: Place, watchers: list[Watcher]) -> dict[str, Any]:
    """Train a row if it has to be, measure it, and draw what needs its model."""
    began = time.monotonic()
    result = None
    if row.config is None:
        outcome, birth = experiment.observe(row), checkpoint.certificate({}, 0.0)
    else:
        result = trained(row, place.run(experiment.name, budget, row.name), place, watchers)
        outcome, birth = experiment.measure(row, result), result.certificate
    pictures = experiment.draw(row, result) if find_spec("matplotlib") else {}
    folder = place.pictures(experiment.name, budget)
    files = [save_picture(figure, folder / f"{row.name}-{name}") for name, figure in pictures.items()]
    return {
        "name": row.name,
        "method": row.method,
        "seed": row.seed,
        "shown": dict(row.shown),
        "outcome": outcome,
        "paper": dict(row.paper),
        "less": list(row.less),
        "also": row.also,
        "made": made(row, result, birth),
        "pictures": files,
        "seconds": round(birth["seconds"] if result else time.monotonic() - began, 1),
        "certificate": birth,
    }


def made(row: Row, result: Result | None, birth: dict[str, Any]) -> dict[str, Any]:
    """What a row was: network, parameters, epochs and data."""
    if result is None or row.config is None:
        return {}
    return {
        "architecture": describe(result.model),
        "parameters": birth["parameters"],
        "epochs": birth["epochs"],
        "steps": birth["steps"],
        "training_images": birth["training_images"],
        "data": row.config.data,
        "tested_on": result.evaluation.n,
    }


def describe(model: Model) -> str:
    from capsnet.report import architecture

    return architecture(model.config, getattr(model, "grid", None)) if find_spec("matplotlib") else str(model.config)


def trained(row: Row, folder: Path, place: Place, watchers: list[Watcher]) -> Result:
    """The finished training of a row: found, gone on with, or begun."""
    assert row.config is not None
    if found := find_finished(row.config, folder, place):
        return reopened(found)
    file = folder / runs.CONFIG_FILE
    if file.exists() and (runs.has_finished(folder) or not same_training(checkpoint.read_json(file), row.config)):
        move_away(folder)  # of other settings, or of another version
    run = training.resume(folder) if runs.can_go_on(folder) else training.start(row.config, folder)
    return training.train(run, watchers)


def is_trained(row: Row, name: str, budget: str, place: Place) -> bool:
    """Whether a row has only to be measured."""
    return row.config is not None and find_finished(row.config, place.run(name, budget, row.name), place) is not None


def find_finished(config: Config, folder: Path, place: Place) -> Path | None:
    """A run that has been trained in just this way to its end, in this folder or for another experiment."""
    for other in [folder, *sorted(path.parent for path in place.runs.glob(f"*/*/{runs.CONFIG_FILE}"))]:
        if runs.has_finished(other) and same_training(checkpoint.read_json(other / runs.CONFIG_FILE), config):
            by = checkpoint.read_json(other / "results.json")["certificate"]["capsnet"]
            if by == __version__:  # another version's networks never stand beside this one's
                return other
    return None


def reopened(folder: Path) -> Result:
    """A finished training again, with its data, its test and its certificate."""
    record = checkpoint.read_json(folder / "results.json")
    prepared = training.prepare(from_dict(checkpoint.read_json(folder / runs.CONFIG_FILE)), folder)
    model = checkpoint.load(folder, prepared.device)
    return Result(folder, model, prepared.splits, evaluate(model, prepared.splits.test), record["certificate"])


def move_away(folder: Path) -> None:
    """A run that was begun with other settings stays, under another name."""
    number = 1
    while (kept := folder.with_name(f"{folder.name}.old-{number}")).exists():
        number += 1
    folder.rename(kept)


# --- Pictures ------------------------------------------------------------------------------------------------


def save_picture(figure: Any, path: Path) -> str:
    """A picture as PNG and SVG; the name that the record keeps."""
    from capsnet import figures

    for kind in ("png", "svg"):
        figures.save(figure, path.with_name(f"{path.name}.{kind}"))
    return path.name


def draw_records(experiment: Experiment, results: Results, place: Place) -> list[str]:
    """The pictures that the records alone give."""
    if not find_spec("matplotlib") or not results.rows:
        return []
    folder = place.pictures(experiment.name, results.budget)
    files = [save_picture(figure, folder / name) for name, figure in experiment.pictures(results.rows).items()]
    experiment.finish(results.rows, folder)
    return files


# --- How long it will take -----------------------------------------------------------------------------------


def expected_seconds(rows: Sequence[Row]) -> float:
    """What the rows will take here, from a measured step of each kind of network."""
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
    """Images that a row passes through its network; one that is only looked at costs a third of one learnt from."""
    kind = config.data.partition(":")[0]
    known = IMAGES.get(kind, 1000) - config.validation
    if kind == "parts":  # drawn, as many as are asked for
        known = options.read(Layout, config.data).train
    learnt = config.train_limit or known
    return config.epochs * (learnt + config.validation / 3) + TESTED.get(kind, 10_000) / 3


def seconds_per_image(config: Config, timer: Callable[[], float] = time.perf_counter) -> float:
    """One training step, measured after one that does not count."""
    device = training.choose_device(config.device)
    with training.own_randomness(0, torch.device("cpu")):
        model = build(config.model).to(device)
        images = torch.rand(config.batch_size, *config.model.image_shape)
    j = config.model.num_classes
    labels = torch.arange(config.batch_size) % j
    batch = Batch(images.to(device), multi_hot(labels, j).to(device), labels.to(device), labels.to(device))
    optimizer = training.build_optimizer(model, config)
    model.train()
    for _ in range(2):
        began = timer()
        training.compute_loss(model, batch, config).total.backward()
        optimizer.step()
        seconds = timer() - began
    return seconds / config.batch_size
