"""Training: what is minimised, what is chosen on what, and that an interruption changes nothing."""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

import capsnet
from capsnet import terminal
from capsnet.cli import demo as cli_demo
from capsnet.cli import main
from capsnet.cli import train as cli_train
from capsnet.data import Augment, Batch, Dataset, Splits
from capsnet.data.batches import in_order
from capsnet.errors import UserError
from capsnet.evaluate import evaluate
from capsnet.files import leftovers, sha256
from capsnet.io import checkpoint
from capsnet.io.leakage import check_unseen
from capsnet.io.records import Certificate
from capsnet.models.base import Losses, Output
from capsnet.models.capsnet import CapsNet
from capsnet.models.config import CapsNetConfig, CNNConfig, LossConfig
from capsnet.models.registry import build
from capsnet.models.registry import register as register_model
from capsnet.routing import ROUTINGS, Routing, Sizes, options_for, register
from capsnet.search.study import paced
from capsnet.train import callbacks, loop, precision, runs, steps
from capsnet.train.config import Config
from capsnet.train.config_records import to_dict
from capsnet.train.presets import get_preset
from pictures import write_folder

pytestmark = pytest.mark.usefixtures("one_thread")
TINY = CapsNetConfig(
    stem_channels=(4,), stem_kernels=(3,), stem_norm=True, primary_types=2, primary_dim=4, primary_kernel=3,
    class_dim=4, decoder=(8,),
)  # fmt: skip


def toy_set(n: int, seed: int) -> Dataset:
    """Bright bars, upright or lying: two classes that a tiny network learns."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % 2
    images = torch.randint(0, 60, (n, 1, 12, 12), generator=draw)
    for image, label in zip(images, labels, strict=True):
        image[0, 2:10, 5:7] += 150 * int(label == 0)
        image[0, 5:7, 2:10] += 150 * int(label == 1)
    return Dataset(images.to(torch.uint8), labels, ("upright", "lying"), "bars")


def toy_splits() -> Splits:
    return Splits(toy_set(48, 0), toy_set(16, 1), toy_set(20, 2))


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> Splits:
    splits = toy_splits()
    monkeypatch.setattr(loop, "load_data", lambda *_, **__: splits)
    return splits


def toy_config(**changes: object) -> Config:
    config = Config(epochs=2, batch_size=8, lr=0.01, validation=16, model=TINY, augment=Augment(shift=1))
    return replace(config, **changes)  # type: ignore[arg-type]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return checkpoint.read_tensors(folder / checkpoint.MODEL_FILE)[0]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_a_training_learns_and_writes_model_metrics_and_results(toys: Splits, tmp_path: Path) -> None:
    result = loop.train(loop.start(toy_config(epochs=12), tmp_path / "run"))
    assert result.evaluation.error_percent == 0
    record = json.loads((tmp_path / "run/results.json").read_text())
    assert record["test"]["n"] == 20
    assert record["certificate"]["config"]["seed"] == 0
    losses = [r["loss"] for r in runs.read_metrics(tmp_path / "run") if r["kind"] == "train"]
    assert losses[-1] < losses[0]
    assert not (tmp_path / "run" / checkpoint.STATE_FILE).exists()


def test_images_per_second_count_images_and_not_the_batch_that_was_asked_for(toys: Splits, tmp_path: Path) -> None:
    run = loop.assemble(toy_config(batch_size=480), tmp_path, toys)  # of 48 images
    run.step, run.seconds = 3, 2.0
    losses = Losses(*[torch.zeros(())] * 3)
    assert loop.step_record(run, losses)["images_per_second"] == 72


def test_a_seed_fixes_every_weight_and_another_seed_does_not(toys: Splits, tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        loop.train(loop.start(toy_config(seed=seed, epochs=1), tmp_path / name))
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))
    assert not same(weights(tmp_path / "a"), weights(tmp_path / "c"))


def test_the_last_epochs_of_a_training_are_sharp_where_the_augmentation_ends_before(
    toys: Splits, tmp_path: Path
) -> None:
    bent = Augment(shift=1, rotate=20, until=0.75)
    ending, moved = (
        loop.prepare(toy_config(epochs=4, augment=spec), tmp_path).batches for spec in (bent, Augment(shift=1))
    )
    same_images = [torch.equal(ending.batch(k).images, moved.batch(k).images) for k in range(24)]  # 6 steps an epoch
    assert same_images == [False] * 18 + [True] * 6


@pytest.fixture
def taught(toys: Splits, tmp_path: Path) -> Config:
    """A config that learns from a network of the same bars."""
    loop.train(loop.start(toy_config(epochs=6, seed=5), tmp_path / "teacher"))
    return toy_config(epochs=4, teacher=str(tmp_path / "teacher"))


def test_a_teacher_is_believed_as_much_as_it_counts(
    taught: Config, toys: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swapped = replace(toys, train=replace(toys.train, labels=1 - toys.train.labels))
    with monkeypatch.context() as patch:
        patch.setattr(loop, "load_data", lambda *_, **__: swapped)
        loop.train(loop.start(toy_config(epochs=12), tmp_path / "liar"))
    wrong = {}
    for name, weight in (("taught", 20.0), ("unheard", 0.0)):
        config = replace(taught, epochs=12, teacher=str(tmp_path / "liar"), loss=LossConfig(teacher=weight))
        wrong[name] = loop.train(loop.start(config, tmp_path / name)).evaluation.error_percent
    assert wrong == {"taught": 100, "unheard": 0}
    record = runs.read_metrics(tmp_path / "taught")[-2]
    assert record["loss"] == pytest.approx(
        record["classification"] + 0.0005 * record["reconstruction"] + 20 * record["teacher"], rel=1e-4
    )
    birth = json.loads((tmp_path / "taught/results.json").read_text())["certificate"]
    assert birth["taught_by"]["sha256"] == sha256(tmp_path / "liar" / checkpoint.MODEL_FILE)


def test_a_teacher_stays_as_it_is_and_answers_as_when_it_was_tested(taught: Config, tmp_path: Path) -> None:
    run = loop.prepare(taught, tmp_path / "run")
    assert run.teacher is not None
    before = {name: tensor.clone() for name, tensor in run.teacher.state_dict().items()}
    for _ in range(3):
        steps.train_step(run)
    assert same(before, run.teacher.state_dict())  # batch normalisation's means among them
    assert not run.teacher.training


def test_a_teacher_that_changes_under_a_training_is_noticed(taught: Config, tmp_path: Path) -> None:
    run = loop.start(taught, tmp_path / "run")
    steps.train_step(run)
    run.save()
    assert run.lock is not None
    run.lock.release()
    assert loop.resume(tmp_path / "run").taught_by == run.taught_by
    loop.train(loop.start(toy_config(epochs=1), tmp_path / "another"))
    (tmp_path / "another" / checkpoint.MODEL_FILE).replace(tmp_path / "teacher" / checkpoint.MODEL_FILE)
    with pytest.raises(UserError, match="has changed: start a new run"):
        loop.resume(tmp_path / "run")


def test_a_teacher_of_other_classes_is_refused(toys: Splits, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"quick-mnist cannot teach .* the classes 0, 1, 2, … and images of \(1, 28, 28\) instead"
    ):
        loop.prepare(toy_config(teacher="quick-mnist"), tmp_path / "run")


@pytest.mark.parametrize(
    "changes",
    [
        {"average": 0.9, "optimizer": "adamw", "weight_decay": 0.01, "schedule": "one-cycle", "clip": 1.0},
        {"patience": 1, "epochs": 6, "schedule": "exponential"},
        {"model": CNNConfig(channels=(4,), kernels=(3,), pool=(2,), hidden=(8,))},
        {"precision": "bf16"},
        {"loss": LossConfig(reconstruction=0)},
        {"average": 0.9, "patience": 3},
        {"epochs": 1.5, "schedule": "one-cycle", "patience": 3},
    ],
    ids=["averaged", "early-stop", "dropout", "bf16", "decoder-off", "averaged-early-stop", "part-of-an-epoch"],
)
def test_stopping_after_any_step_and_resuming_gives_bit_identical_weights(
    toys: Splits, tmp_path: Path, changes: dict[str, object]
) -> None:
    config = toy_config(**changes)
    loop.train(loop.start(config, tmp_path / "whole"))
    run = loop.start(config, tmp_path / "parts")
    for step in (1, 5, 7):
        with pytest.raises(KeyboardInterrupt):
            loop.loop(run, [], lambda run=run, step=step: run.step >= step)
        run.lock.release()
        run = loop.resume(tmp_path / "parts")
        assert run.step == step
    loop.train(run)
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "parts"))

    def without_time(name: str) -> list[dict]:
        records = runs.read_metrics(tmp_path / name)
        return [{k: v for k, v in r.items() if k not in ("seconds", "images_per_second")} for r in records]

    assert without_time("whole") == without_time("parts")


@pytest.mark.parametrize("hardware", [True, False])
def test_a_run_records_the_precision_that_auto_chose_and_keeps_it_elsewhere(
    toys: Splits, tmp_path: Path, hardware: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "has_bf16", lambda: hardware)
    run = loop.start(toy_config(precision="auto"), tmp_path / "run")
    run.lock.release()
    chosen = "bf16" if hardware else "fp32"
    assert checkpoint.read_json(tmp_path / "run" / runs.CONFIG_FILE)["precision"] == chosen
    monkeypatch.setattr(precision, "has_bf16", lambda: not hardware)  # on another machine
    assert loop.resume(tmp_path / "run").config.precision == chosen


def test_a_training_can_end_within_an_epoch_and_is_validated_there(toys: Splits, tmp_path: Path) -> None:
    result = loop.train(loop.start(toy_config(epochs=1.5, schedule="one-cycle"), tmp_path / "run"))
    records = runs.read_metrics(tmp_path / "run")  # 6 steps an epoch
    assert [(r["epoch"], r["step"]) for r in records if r["kind"] == "epoch"] == [(1, 6), (1.5, 9)]
    assert [r["step"] for r in records if r["kind"] == "train"][-1] == 9
    assert (result.certificate.epochs, result.certificate.steps) == (1.5, 9)
    last = [r["lr"] for r in records if r["kind"] == "train"][-1]
    assert last < 0.2 * toy_config().lr  # the schedule ends where the training does


def test_patience_counts_whole_epochs_however_long_they_are(toys: Splits, tmp_path: Path) -> None:
    run = loop.prepare(toy_config(patience=1), tmp_path)
    run.batches = range(60_000)  # type: ignore[assignment]
    run.best_epoch, run.step = 1, 2 * 60_000 - 1
    assert run.epoch == 2  # rounded
    assert not loop.stopped_early(run)  # one step before the second look
    run.step += 1
    assert loop.stopped_early(run)


def test_early_stopping_looks_at_validation_and_never_at_test(toys: Splits, tmp_path: Path) -> None:
    config = toy_config(patience=2, epochs=8)
    loop.train(loop.start(config, tmp_path / "a"))
    shuffled = replace(toys.test, labels=toys.test.labels.flip(0))
    object.__setattr__(toys, "test", shuffled)
    result = loop.train(loop.start(config, tmp_path / "b"))
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))
    assert result.certificate.epochs < 8


def test_early_stopping_keeps_the_weights_of_the_best_epoch(toys: Splits, tmp_path: Path) -> None:
    run = loop.start(toy_config(patience=1, epochs=3), tmp_path / "run")
    weights_of = {}

    class Keeps(loop.Watcher):
        def epoch_ended(self, run: loop.Run, record: dict[str, Any]) -> None:
            weights_of[run.epoch] = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}

    loop.train(run, [Keeps()])
    best = min(
        (r for r in runs.read_metrics(tmp_path / "run") if r["kind"] == "epoch"),
        key=lambda r: r["validation_error_percent"],
    )
    assert run.best_epoch == best["epoch"]
    assert run.best_error == best["validation_error_percent"]
    assert same(weights(tmp_path / "run"), weights_of[run.best_epoch])


def test_a_bar_moves_with_every_step_and_ends_with_the_time_taken(toys: Splits, tmp_path: Path) -> None:
    bar, seen = callbacks.TrainingBar(), []

    class Onlooker(loop.Watcher):
        def moved(self, run: loop.Run) -> None:
            seen.append((run.step, bar.progress.tasks[0].completed))

    run = loop.start(toy_config(epochs=1), tmp_path / "run")
    loop.train(run, [bar, Onlooker()])
    assert seen == [(step, step) for step in range(1, run.steps + 1)]
    task = bar.progress.tasks[0]
    assert (task.description, task.completed) == ("testing", len(toys.test))
    assert terminal.TimeLeft().render(task).plain.startswith("in ")
    bar.progress.reset(bar.task, total=10)
    assert terminal.TimeLeft().render(task).plain == "… left"


def test_the_certificate_has_the_validation_error_of_the_weights_that_are_kept(toys: Splits, tmp_path: Path) -> None:
    """And not that of an epoch in between, which may have been lower."""

    class WasBetter(loop.Watcher):
        def epoch_ended(self, run: loop.Run, record: dict[str, Any]) -> None:
            run.best_error = -1.0

    result = loop.train(loop.start(toy_config(), tmp_path / "run"), [WasBetter()])
    judged = loop.evaluate(result.model, toys.validation).error_percent
    assert result.certificate.validation_error_percent == judged


def test_a_training_on_the_fast_paths_goes_on_bit_identically(tmp_path: Path) -> None:
    """The quick network is large enough for the routing and the convolutions of its own kernels."""
    config = replace(get_preset("quick"), train_limit=320, batch_size=64, epochs=1, device="cpu")
    loop.train(loop.start(config, tmp_path / "whole"))
    run = loop.start(config, tmp_path / "parts")
    with pytest.raises(KeyboardInterrupt):
        loop.loop(run, [], lambda: run.step >= 2)
    run.lock.release()
    loop.train(loop.resume(tmp_path / "parts"))
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "parts"))


def test_images_that_have_changed_in_between_are_no_longer_trained_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One more of them, and what was trained on may be what is tested on."""
    photos = write_folder(tmp_path / "photos", ("cat", "dog"), n=40)
    config = toy_config(data=f"folder:{photos}", epochs=2, image_size=28)
    run = loop.start(config, tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        loop.loop(run, [], lambda: run.step >= 1)
    run.lock.release()
    result = loop.train(loop.resume(tmp_path / "run"))
    assert set(result.certificate.images) == {"train", "validation", "test"}
    assert main(["evaluate", str(tmp_path / "run")]) == 0
    assert "has changed" not in capsys.readouterr().err
    run = loop.start(config, tmp_path / "other")
    run.lock.release()
    shutil.copy(next(iter((photos / "cat").iterdir())), photos / "cat" / "zzz.png")
    with pytest.raises(UserError, match=r"has changed since .* started"):
        loop.resume(tmp_path / "other")
    assert main(["evaluate", str(tmp_path / "run")]) == 0
    assert "has changed since" in capsys.readouterr().err


def test_a_model_to_begin_with_that_has_learnt_the_test_images_is_refused(tmp_path: Path) -> None:
    photos = write_folder(tmp_path / "photos", ("cat", "dog"), n=40)
    config = toy_config(data=f"folder:{photos}", epochs=1, image_size=28)
    loop.train(loop.start(config, tmp_path / "first"))
    again = replace(config, init=str(tmp_path / "first"))
    loop.train(loop.start(again, tmp_path / "second"))
    with pytest.raises(UserError, match="was trained on images that would be held out here"):
        loop.start(replace(again, seed=1), tmp_path / "third")
    loop.prepare(again, tmp_path)
    loop.begin(replace(again, image_size=20), tmp_path)  # the same images, smaller
    shutil.copy(next(iter((photos / "cat").iterdir())), photos / "cat" / "zzz.png")
    for size in (28, 20):
        with pytest.raises(UserError, match=r"has changed since .*first was trained on it.* leave .*first out"):
            loop.begin(replace(again, image_size=size), tmp_path)


def test_a_divided_folder_may_grow_where_it_is_trained_on(tmp_path: Path) -> None:
    for part in ("train", "test", "validation"):
        write_folder(tmp_path / "photos" / part, ("cat", "dog"), n=24)
    config = toy_config(data=f"folder:{tmp_path / 'photos'}", epochs=1, image_size=28)
    loop.train(loop.start(config, tmp_path / "first"))
    again = replace(config, init=str(tmp_path / "first"))
    for part, refused in (("train", False), ("test", True)):
        cats = tmp_path / "photos" / part / "cat"
        shutil.copy(next(iter(cats.iterdir())), cats / "zzz.png")
        with pytest.raises(UserError, match="has changed since") if refused else nullcontext():
            loop.begin(again, tmp_path)


def test_a_folder_without_a_validation_part_of_its_own_may_not(tmp_path: Path) -> None:
    for part in ("train", "test"):
        write_folder(tmp_path / "photos" / part, ("cat", "dog"), n=40)
    config = toy_config(data=f"folder:{tmp_path / 'photos'}", epochs=1, image_size=28)
    loop.train(loop.start(config, tmp_path / "first"))
    loop.begin(replace(config, init=str(tmp_path / "first")), tmp_path)
    cats = tmp_path / "photos" / "train" / "cat"
    shutil.copy(next(iter(cats.iterdir())), cats / "zzz.png")
    with pytest.raises(UserError, match="has changed since"):
        loop.begin(replace(config, init=str(tmp_path / "first")), tmp_path)


def test_a_validation_error_after_a_model_that_has_learnt_those_images_is_said_to_be_too_good(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = replace(get_preset("quick"), init="quick-mnist", validation=100, train_limit=100, batch_size=50, epochs=1)
    loop.begin(config, tmp_path)
    assert "will be too optimistic: quick-mnist was trained on images" in capsys.readouterr().err
    with pytest.raises(UserError, match="quick-mnist was trained on images"):
        loop.begin(replace(config, patience=1), tmp_path)


def test_two_models_that_began_with_each_other_are_looked_at_once(tmp_path: Path) -> None:
    first, second = tmp_path / "first.safetensors", tmp_path / "second.safetensors"
    config = toy_config()
    for path, before in ((first, second), (second, first)):
        birth = Certificate(config=to_dict(replace(config, init=str(before))))
        checkpoint.save_model(path, loop.build(config.model), birth)
    check_unseen(replace(config, init=str(first)))


def test_a_loss_that_is_not_a_number_stops_and_keeps_the_last_good_checkpoint(toys: Splits, tmp_path: Path) -> None:
    run = loop.start(toy_config(lr=1e30), tmp_path / "run")
    with pytest.raises(UserError, match=r"loss became .* at step .*last good checkpoint is kept"):
        loop.train(run)
    again = loop.resume(tmp_path / "run")
    assert all(p.isfinite().all() for p in again.model.parameters())


def poison(run: loop.Run, last_step: int, name: str) -> Callable[[loop.Run], loop.Losses]:
    """A step that leaves a value which is no number in the weights, after a loss that was one."""
    step = steps.train_step

    def poisoned(run: loop.Run) -> loop.Losses:
        losses = step(run)
        if run.step == last_step:
            run.model.state_dict()[name].view(-1)[0] = float("nan")
        return losses

    return poisoned


@pytest.mark.parametrize("name", ["caps.0.weight", "stem.1.running_var"])
def test_weights_that_go_bad_in_the_last_step_write_no_model_and_cost_no_checkpoint(
    toys: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    run = loop.start(toy_config(), tmp_path / "run")
    monkeypatch.setattr(loop, "train_step", poison(run, run.steps, name))
    monkeypatch.setattr(loop, "SHORT", 0.0)  # a checkpoint after every epoch, however short
    with pytest.raises(UserError, match=rf"{name} is not finite after step 12.*start a new run with"):
        loop.train(run)
    assert not (tmp_path / "run" / checkpoint.MODEL_FILE).exists()
    assert loop.resume(tmp_path / "run").step == 6


def test_a_model_that_is_not_finite_is_neither_judged_nor_kept(toys: Splits, tmp_path: Path) -> None:
    run = loop.start(toy_config(), tmp_path / "run")
    with torch.no_grad():
        next(run.model.parameters()).view(-1)[0] = float("inf")
    with pytest.raises(UserError, match="not finite"):
        loop.finish(run, [])
    assert {path.name for path in run.folder.iterdir()} == {".lock", "config.json", checkpoint.STATE_FILE}


def test_a_run_folder_that_exists_is_never_overwritten(toys: Splits, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="already exists and is not overwritten"):
        loop.start(toy_config(), tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_finished_run_has_nothing_to_resume(toys: Splits, tmp_path: Path) -> None:
    loop.train(loop.start(toy_config(epochs=1), tmp_path / "run"))
    with pytest.raises(UserError, match="has finished"):
        loop.resume(tmp_path / "run")
    with pytest.raises(UserError, match="there is no run"):
        loop.resume(tmp_path / "elsewhere")


def test_a_run_killed_before_its_first_checkpoint_starts_again(toys: Splits, tmp_path: Path) -> None:
    loop.train(loop.start(toy_config(), tmp_path / "whole"))
    loop.start(toy_config(), tmp_path / "cut").lock.release()
    (tmp_path / "cut" / checkpoint.STATE_FILE).unlink()
    loop.train(loop.resume(tmp_path / "cut"))
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "cut"))


def test_a_run_that_has_lost_its_state_does_not_start_again_without_a_word(toys: Splits, tmp_path: Path) -> None:
    run = loop.start(toy_config(), tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        loop.loop(run, [], lambda: run.step >= 7)
    run.lock.release()
    (run.folder / checkpoint.STATE_FILE).unlink()
    with pytest.raises(UserError, match="there is no checkpoint"):
        loop.resume(run.folder)
    assert runs.read_metrics(run.folder)


def test_only_one_training_at_a_time_has_a_folder(toys: Splits, tmp_path: Path) -> None:
    run = loop.start(toy_config(epochs=1), tmp_path / "run")
    part = tmp_path / "run/.state.safetensors.x.part"
    part.write_text("being written")
    with pytest.raises(UserError, match=r"another process is using .*: wait until it ends\.$"):
        loop.resume(tmp_path / "run")
    assert part.exists()
    part.unlink()
    loop.train(run)
    with pytest.raises(UserError, match="has finished"):
        loop.resume(tmp_path / "run")


def test_the_demo_goes_on_with_its_own_training_alone(
    toys: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli_demo, "get_preset", lambda _: toy_config())
    monkeypatch.setattr(cli_train, "write_report", lambda _: None)
    loop.start(toy_config(), Path("runs/demo")).lock.release()
    assert main(["demo"]) == 0
    assert "runs/demo already exists" not in capsys.readouterr().err
    shutil.rmtree("runs/demo")
    loop.start(toy_config(epochs=7), Path("runs/demo")).lock.release()  # half a training of other settings
    assert main(["demo"]) == 0
    assert "runs/demo already exists; this run is written to runs/demo-2" in capsys.readouterr().err
    assert json.loads(Path("runs/demo-2/config.json").read_text())["epochs"] == 2
    assert runs.can_go_on(Path("runs/demo"))


def test_two_that_start_at_once_get_a_folder_each(
    toys: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second looks while the first has not yet made its folder."""
    from capsnet.cli.train import start_in_free_folder

    monkeypatch.chdir(tmp_path)
    prepare, others = loop.prepare, []

    def prepare_while_another_starts(config: Config, folder: Path, stem: Any = None) -> loop.Run:
        monkeypatch.setattr(loop, "prepare", prepare)
        others.append(start_in_free_folder(config, "toys"))
        return prepare(config, folder, stem)

    monkeypatch.setattr(loop, "prepare", prepare_while_another_starts)
    run = start_in_free_folder(toy_config(), "toys")
    assert [str(r.folder) for r in (*others, run)] == ["runs/toys", "runs/toys-2"]


class Cut(loop.Watcher):
    """Someone who interrupts when the model is there and the report is about to be written."""

    def finished(self, result: loop.Result) -> None:
        raise KeyboardInterrupt


def test_a_training_cut_off_in_its_report_goes_on_to_write_it(toys: Splits, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        loop.train(loop.start(toy_config(), tmp_path / "run"), [Cut()])
    before = weights(tmp_path / "run")
    assert main(["train", "--resume", str(tmp_path / "run"), "--no-tensorboard"]) == 0
    assert (tmp_path / "run/report.html").exists()
    assert not (tmp_path / "run" / checkpoint.STATE_FILE).exists()
    assert same(weights(tmp_path / "run"), before)


@pytest.mark.parametrize("killed_in", ["start", "report"])
def test_an_unfinished_demo_goes_on_and_a_finished_one_stays(
    toys: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_in: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("capsnet.cli.demo.get_preset", lambda name: toy_config())
    monkeypatch.setattr("capsnet.cli.train.write_report", lambda r: (r.folder / "report.html").write_text("drawn"))
    run = loop.start(toy_config(), Path("runs/demo"))
    if killed_in == "start":
        run.lock.release()
        (run.folder / checkpoint.STATE_FILE).unlink()
    else:
        with pytest.raises(KeyboardInterrupt):
            loop.train(run, [Cut()])
    assert main(["demo"]) == 0
    assert [path.name for path in Path("runs").iterdir()] == ["demo"]
    assert Path("runs/demo/report.html").exists()
    before = (run.folder / checkpoint.MODEL_FILE).stat().st_mtime_ns
    assert main(["demo"]) == 0
    assert (run.folder / checkpoint.MODEL_FILE).stat().st_mtime_ns == before
    assert Path("runs/demo-2/report.html").exists()


@pytest.mark.parametrize("where", ["started", "stepped", "evaluated", "closed"])
def test_whoever_looks_on_is_told_when_it_ends_whatever_happens(toys: Splits, tmp_path: Path, where: str) -> None:
    closed = []

    class Onlooker(loop.Watcher):
        def closed(self) -> None:
            closed.append(self)

    class Troubled(Onlooker):
        pass

    def trouble(*_: object) -> None:
        raise KeyboardInterrupt

    first, troubled, last = Onlooker(), Troubled(), Onlooker()
    setattr(troubled, where, trouble)
    run = loop.start(toy_config(epochs=1), tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        loop.train(run, [first, troubled, last])
    assert {first, last} <= set(closed)


def test_a_training_leaves_its_callers_random_numbers_alone(toys: Splits, tmp_path: Path) -> None:
    model = CNNConfig(channels=(4,), kernels=(3,), pool=(2,), hidden=(8,))  # has dropout
    before = torch.get_rng_state()
    loop.train(loop.start(toy_config(epochs=1, model=model), tmp_path / "run"))
    capsnet.load(tmp_path / "run")
    assert torch.equal(torch.get_rng_state(), before)


def test_the_largest_seed_trains(toys: Splits, tmp_path: Path) -> None:
    loop.train(loop.start(toy_config(epochs=1, seed=2**63 - 1), tmp_path / "run"))


def test_stopping_early_without_validation_images_is_refused(
    toys: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = replace(toys, validation=toys.train.subset(torch.arange(0)))
    monkeypatch.setattr(loop, "load_data", lambda *_, **__: empty)
    with pytest.raises(UserError, match=r"needs validation images, and bars has none"):
        loop.start(toy_config(patience=1), tmp_path / "run")


# ----------------------------------------------------------------------------------------------- several labels


@pytest.fixture
def sets(toys: Splits, monkeypatch: pytest.MonkeyPatch) -> Splits:
    """Images with one bar, with both or with none."""

    def several(dataset: Dataset) -> Dataset:
        targets = torch.stack([torch.arange(len(dataset)) % 2, torch.arange(len(dataset)) // 2 % 2], 1)
        return replace(dataset, labels=targets.bool())

    splits = Splits(*map(several, (toys.train, toys.validation, toys.test)))
    monkeypatch.setattr(loop, "load_data", lambda *_, **__: splits)
    return splits


@pytest.mark.parametrize(
    "model", [TINY, CNNConfig(channels=(4,), kernels=(3,), pool=(2,), hidden=(8,))], ids=["capsules", "cnn"]
)
@pytest.mark.parametrize("more", [{}, {"average": 0.9, "patience": 2}], ids=["plain", "averaged-early-stop"])
def test_a_model_of_several_labels_remembers_that_it_is_one(
    sets: Splits, tmp_path: Path, model: CapsNetConfig | CNNConfig, more: dict
) -> None:
    run = loop.start(toy_config(model=model, **more), tmp_path / "run")
    assert run.model.multi_label
    result = loop.train(run)
    loaded = capsnet.load(tmp_path / "run")
    assert result.model.multi_label
    assert loaded.multi_label
    sums = evaluate(loaded, sets.test).activations.sum(1)
    assert (sums - 1).abs().max() > 0.01  # a softmax's would all be 1
    assert torch.equal(evaluate(loaded, sets.test).activations, result.evaluation.activations)


def test_averaging_with_early_stopping_judges_and_keeps_the_averaged_weights(toys: Splits, tmp_path: Path) -> None:
    averages: list[dict[str, torch.Tensor]] = []
    raw: list[float] = []

    class Onlooker(loop.Watcher):
        def epoch_ended(self, run: loop.Run, record: dict) -> None:
            averages.append({name: tensor.clone() for name, tensor in run.average.items()})
            raw.append(evaluate(run.model, toys.validation).error_percent)

    run = loop.start(toy_config(average=0.95, patience=3, epochs=6, lr=0.003), tmp_path / "run")
    result = loop.train(run, [Onlooker()])
    judged = [r["validation_error_percent"] for r in runs.read_metrics(run.folder) if r["kind"] == "epoch"]
    for average, error in zip(averages, judged, strict=True):
        run.model.load_state_dict(average)
        assert evaluate(run.model, toys.validation).error_percent == error
    assert judged != raw, "the weights themselves do as well: this shows nothing"
    assert same(result.model.state_dict(), averages[judged.index(min(judged))])


def test_the_loss_of_a_cnn_is_computed_in_full_precision(toys: Splits) -> None:
    config = toy_config(model=CNNConfig((1, 12, 12), 2, (4,), (3,), (2,), (8,)))
    model = build(config.model)
    with torch.autocast("cpu", torch.bfloat16):
        losses = steps.compute_loss(model, next(in_order(toys.train, 8)), config)
    assert losses.total.dtype == torch.float32


# ---------------------------------------------------------------------------------------------- a state gone wrong


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors, state: tensors.pop("optimizer.stem.0.weight/exp_avg"),
        lambda tensors, state: [tensors.pop(name) for name in list(tensors) if name.startswith("optimizer.")],
        lambda tensors, state: tensors.update({"optimizer.stem.0.weight/exp_avg": torch.zeros(3)}),
        lambda tensors, state: tensors.update({"optimizer.99/step": torch.zeros(())}),
        lambda tensors, state: tensors.pop("average/caps.0.weight"),
        lambda tensors, state: [tensors.pop(name) for name in list(tensors) if name.startswith("best/")],
        lambda tensors, state: tensors.update({"other/x": torch.zeros(1)}),
        lambda tensors, state: state.update(folder="/"),
        lambda tensors, state: state.update(step="7"),
        lambda tensors, state: state.update(step=7.5),
        lambda tensors, state: state.update(step=-1),
        lambda tensors, state: state.update(step=10**6),
        lambda tensors, state: state.update(step=None),
        lambda tensors, state: state.pop("best_epoch"),
        lambda tensors, state: state.update(seconds=float("nan")),
    ],
)
def test_a_state_with_anything_missing_or_strange_is_refused(toys: Splits, tmp_path: Path, change: Callable) -> None:
    run = loop.start(toy_config(average=0.9, patience=2), tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        loop.loop(run, [], lambda: run.step >= 7)
    run.lock.release()
    file = run.folder / checkpoint.STATE_FILE
    tensors, record = checkpoint.read_tensors(file)
    change(tensors, record["state"])
    checkpoint.write_tensors(file, tensors, record)
    with pytest.raises(UserError, match=checkpoint.STATE_FILE):
        loop.resume(run.folder)


@pytest.mark.parametrize("part", ["config", "state"])
def test_a_state_without_its_config_or_its_numbers_is_refused(toys: Splits, tmp_path: Path, part: str) -> None:
    run = loop.start(toy_config(), tmp_path / "run")
    run.lock.release()
    tensors, record = checkpoint.read_tensors(run.folder / checkpoint.STATE_FILE)
    checkpoint.write_tensors(run.folder / checkpoint.STATE_FILE, tensors, {**record, part: None})
    with pytest.raises(UserError, match="contains no resumable run"):
        loop.resume(run.folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"certificate": None}, "None as its certificate"),
        ({"certificate": "x"}, "'x' as its certificate"),
        ({"multi_label": "yes"}, "'yes' as its multi_label"),
        ({"model": {"primary_stride": 0}}, "primary_stride=0 is too small"),
        ({"model": {"decoder": [1_000_000, 1_000_000]}}, "does not fit"),
    ],
)
def test_a_model_with_a_damaged_header_is_refused(toys: Splits, tmp_path: Path, change: dict, said: str) -> None:
    loop.train(loop.start(toy_config(epochs=1), tmp_path / "run"))
    file = tmp_path / "run" / checkpoint.MODEL_FILE
    tensors, record = checkpoint.read_tensors(file)
    parts = {**record, **change, "model": {**record["model"], **change.get("model", {})}}
    checkpoint.write_tensors(file, tensors, parts)
    with pytest.raises(UserError, match=said):
        capsnet.load(file)


def test_a_loaded_model_can_be_trained_further(toys: Splits, tmp_path: Path) -> None:
    loop.train(loop.start(toy_config(epochs=1), tmp_path / "run"))
    model = capsnet.load(tmp_path / "run").train()
    model(torch.rand(4, 1, 12, 12)).activations.sum().backward()
    assert all(p.requires_grad and not p.is_meta for p in model.parameters())
    assert model.get_buffer("stem.1.num_batches_tracked") == 7  # 6 steps and this one


# ------------------------------------------------------------------------------------------------- out of memory


def too_much(*_: object, **__: object) -> None:
    torch.empty(10**15)


def out_of_memory(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def no_memory(*_: object, **__: object) -> None:
    raise MemoryError


PLACES = {"build": loop, "compute_loss": steps}


@pytest.mark.parametrize("trouble", [too_much, out_of_memory, no_memory])
@pytest.mark.parametrize("where", PLACES)
def test_too_little_memory_says_what_takes_less(
    toys: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, trouble: Callable
) -> None:
    monkeypatch.setattr(PLACES[where], where, trouble)
    with pytest.raises(UserError, match=r"memory.*--batch-size.*--image-size.*--model.shared"):
        loop.train(loop.start(toy_config(), tmp_path / "run"))


@pytest.mark.parametrize("where", PLACES)
def test_too_little_memory_is_said_where_a_pace_is_measured(
    toys: Splits, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(PLACES[where], where, too_much)
    with pytest.raises(UserError, match=r"memory.*--batch-size"):
        paced(toy_config(), 0.01)


def test_other_errors_are_not_taken_for_too_little_memory(
    toys: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bug(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(steps, "compute_loss", bug)
    with pytest.raises(RuntimeError, match="a bug"):
        loop.train(loop.start(toy_config(), tmp_path / "run"))


# ----------------------------------------------------------------------------------------------------------------


def test_a_batch_larger_than_the_data_is_cut_to_it_and_both_numbers_are_named(
    toys: Splits, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = loop.start(toy_config(batch_size=100), tmp_path / "run")
    assert "48 images instead of 100" in capsys.readouterr().err
    assert len(run.batches.batch(0).images) == 48


def test_learning_rates_follow_their_schedules() -> None:
    official = get_preset("official")
    assert steps.learning_rate(official, 2000, 300_000) == pytest.approx(0.00096)
    assert steps.learning_rate(official, 10**7, 10**7) == 1e-6
    cycle = replace(official, schedule="one-cycle", lr=1.0, warmup=0.2)
    rates = [steps.learning_rate(cycle, step, 100) for step in range(101)]
    assert max(rates) == rates[20] == 1.0
    assert rates[0] == pytest.approx(0.04)
    assert rates[100] == pytest.approx(0.001)
    assert rates[:21] == sorted(rates[:21])
    assert rates[20:] == sorted(rates[20:], reverse=True)


def test_the_average_of_constant_weights_is_those_weights(toys: Splits, tmp_path: Path) -> None:
    run = loop.start(toy_config(average=0.99, lr=0.0), tmp_path / "run")
    before = {k: v.clone() for k, v in run.model.named_parameters()}
    loop.train(run)
    for name, value in before.items():
        torch.testing.assert_close(run.average[name], value)


def test_an_unknown_device_lists_those_that_are_there() -> None:
    with pytest.raises(UserError, match=r"no device 'tpu'.*auto, cpu"):
        loop.choose_device("tpu")
    for name in ("cpu:x", "cpu:1", "cuda:99", "meta", ""):
        with pytest.raises(UserError, match="no device"):
            loop.choose_device(name)
    assert loop.choose_device("cpu").type == "cpu"


# ------------------------------------------------------------------------------------------- killed from outside

# Processes of a server that has PyTorch loaded: they begin in no time and die like any other
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch", "torch._dynamo"])


def train_toys(folder: Path, epochs: int, die: str, ready: Connection) -> None:
    """Begin or go on with a training; `die` = "replace:9" kills at the ninth os.replace, "replace:X" at that of X."""
    loop.load_data = lambda *_, **__: toy_splits()  # type: ignore[assignment]
    torch.set_num_threads(1)
    name, _, when = die.partition(":")
    if name:
        setattr(os, name, functools.partial(die_or, getattr(os, name), when, []))
    ready.send("begins")
    config = toy_config(epochs=epochs, save_every=0.0)
    loop.train(loop.resume(folder) if runs.can_go_on(folder) else loop.start(config, folder))


def die_or(call: Callable, when: str, calls: list, *arguments: object, **more: object) -> object:
    calls.append(arguments)
    if str(len(calls)) == when or Path(str(arguments[-1])).name == when:
        os.kill(os.getpid(), signal.SIGKILL)
    return call(*arguments, **more)


def begin(folder: Path, epochs: int, die: str = "") -> BaseProcess:
    heard, ready = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=train_toys, args=(folder, epochs, die, ready))
    process.start()
    ready.close()
    heard.recv()
    return process


def end(process: BaseProcess) -> int | None:
    process.join()
    return process.exitcode


def wait_for_a_checkpoint(folder: Path, process: BaseProcess) -> None:
    state = folder / checkpoint.STATE_FILE
    before = state.stat().st_mtime_ns if state.exists() else 0
    while process.is_alive() and not (state.exists() and state.stat().st_mtime_ns != before):
        time.sleep(0.002)


def test_twenty_kills_at_random_moments_leave_the_final_weights_bit_identical(tmp_path: Path) -> None:
    folder, dice, epochs = tmp_path / "run", random.Random(7), 60
    assert end(begin(tmp_path / "undisturbed", epochs)) == 0
    for kill in range(20):
        process = begin(folder, epochs)
        if kill % 2:  # every second one while it trains, the others at once or while it reads what there is
            wait_for_a_checkpoint(folder, process)
        time.sleep(dice.uniform(0, 0.1))
        process.kill()
        assert end(process) == -signal.SIGKILL, f"it was done after {kill} kills: make it longer"
    assert end(begin(folder, epochs)) == 0
    assert same(weights(folder), weights(tmp_path / "undisturbed"))


def test_a_kill_at_any_write_leaves_the_final_weights_bit_identical(tmp_path: Path) -> None:
    folder, epochs = tmp_path / "run", 4
    assert end(begin(tmp_path / "undisturbed", epochs)) == 0
    for die in (
        "replace:config.json", "fsync:2", "replace:state.safetensors", "fsync:9", "replace:9",
        "replace:results.json", "replace:model.safetensors", "unlink:state.safetensors",
    ):  # fmt: skip
        assert end(begin(folder, epochs, die)) == -signal.SIGKILL, die
        assert die[0] == "u" or leftovers(folder), f"{die} was not in the middle of a write"
        assert not runs.has_finished(folder)
    assert end(begin(folder, epochs)) == 0
    assert not leftovers(folder)
    assert same(weights(folder), weights(tmp_path / "undisturbed"))


def test_ctrl_c_stops_between_two_steps_with_a_checkpoint(
    toys: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = loop.start(toy_config(save_every=1e9, epochs=50), tmp_path / "run")
    step = steps.train_step

    def interrupted(run: loop.Run) -> loop.Losses:
        if run.step == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return step(run)

    monkeypatch.setattr(loop, "train_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        loop.train(run)
    assert loop.resume(tmp_path / "run").step == 5


@pytest.mark.parametrize(("optimizer", "decays"), [("adam", {0.0}), ("adamw", {0.0, 0.1})])
def test_weight_decay_is_adamws_alone_and_spares_biases(optimizer: str, decays: set[float]) -> None:
    config = Config(optimizer=optimizer, weight_decay=0.1, model=TINY)  # type: ignore[arg-type]
    groups = loop.build_optimizer(build(TINY), config).param_groups
    assert {group["weight_decay"] for group in groups} == decays
    assert all(p.dim() > 1 for group in groups if group["weight_decay"] for p in group["params"])


@pytest.mark.parametrize("routing", [*ROUTINGS.names(), "dynamic with a bias", "of a plugin"])
@pytest.mark.usefixtures("forget_plugins")
def test_weight_decay_spares_the_biases_of_every_routing(routing: str) -> None:
    class Plugin(Routing):
        def build(self, sizes: Sizes, **where: Any) -> None:
            super().build(sizes, **where)
            self.offset = torch.nn.Parameter(torch.empty(sizes.upper, sizes.upper_dim, **where))

    register("of a plugin")(Plugin)
    options = options_for("dynamic", bias=True) if routing == "dynamic with a bias" else options_for(routing)
    model = build(replace(TINY, routing=options))
    optimizer = loop.build_optimizer(model, Config(optimizer="adamw", weight_decay=0.1, model=model.config))
    decayed = {name for group in optimizer.param_groups if group["weight_decay"] for name in group["param_names"]}
    of_routing = {"caps.0.routing.gate"} if routing == "self-routing" else set()
    weights = {
        "stem.0.weight",
        "primary.conv.weight",
        "caps.0.weight",
        *(f"decoder.linears.{k}.weight" for k in (0, 1)),
    }
    assert decayed == weights | of_routing


class WithIdleParameter(CapsNet):
    """A network with a parameter that has a gradient in some steps only."""

    idle_until = 0

    def __init__(self, config: CapsNetConfig, **where: Any) -> None:
        super().__init__(config, **where)
        self.idle = torch.nn.Parameter(torch.ones(3, **where))

    def loss(self, output: Output, batch: Batch, config: LossConfig, progress: float = 1.0) -> Losses:
        losses = super().loss(output, batch, config, progress)
        active = progress >= self.idle_until
        return losses._replace(total=losses.total + self.idle.square().sum()) if active else losses


@pytest.mark.parametrize("idle_until", [2.0, 0.5], ids=["never", "in the second half"])
@pytest.mark.usefixtures("forget_plugins")
def test_a_run_with_a_parameter_without_a_gradient_resumes_bit_identically(
    toys: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, idle_until: float
) -> None:
    monkeypatch.setattr(WithIdleParameter, "idle_until", idle_until)
    register_model("idle")(WithIdleParameter)
    config = toy_config(model=WithIdleParameter.Config(**vars(TINY)))
    loop.train(loop.start(config, tmp_path / "whole"))
    run = loop.start(config, tmp_path / "parts")
    for step in (2, 8):
        with pytest.raises(KeyboardInterrupt):
            loop.loop(run, [], lambda run=run, step=step: run.step >= step)
        run.lock.release()
        run = loop.resume(tmp_path / "parts")
    loop.train(run)
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "parts"))


def test_a_signal_that_is_sent_twice_in_a_row_ends_the_training_between_steps(monkeypatch):
    """`timeout` signals the process and then its group: the second may not break off the step or the checkpoint."""
    with loop.stop_between_steps() as requested:
        assert not requested()
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)
        assert requested()
        monkeypatch.setattr(loop, "ONE_SIGNAL", 0.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)


def test_tensorboard_shows_images_of_two_channels(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    few = Dataset(torch.randint(0, 256, (6, 2, 12, 12), dtype=torch.uint8), torch.arange(6) % 3, tuple("abc"), "pairs")
    run = loop.assemble(toy_config(), tmp_path, Splits(few, few.subset(torch.arange(0)), few))
    assert run.model.decoder is not None
    board = callbacks.TensorBoard()
    board.started(run)
    board.epoch_ended(run, {"validation_error_percent": None})
    board.closed()
    assert any((tmp_path / "tensorboard").iterdir())
