"""Training: what is minimised, what is chosen on what, and that an interruption changes nothing."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from capsnet import checkpoint, training
from capsnet.config import CapsNetConfig, CNNConfig, Config, get_preset
from capsnet.data import Augment, Dataset, Splits
from capsnet.errors import UserError

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


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> Splits:
    splits = Splits(toy_set(48, 0), toy_set(16, 1), toy_set(20, 2))
    monkeypatch.setattr(training, "load_data", lambda *_, **__: splits)
    return splits


def toy_config(**changes: object) -> Config:
    config = Config(epochs=2, batch_size=8, lr=0.01, validation=16, model=TINY, augment=Augment(shift=1))
    return replace(config, **changes)  # type: ignore[arg-type]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return checkpoint.read_tensors(folder / checkpoint.MODEL_FILE)[0]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_a_training_learns_and_writes_model_metrics_and_results(toys: Splits, tmp_path: Path) -> None:
    result = training.train(training.start(toy_config(epochs=12), tmp_path / "run"))
    assert result.evaluation.error_percent == 0
    record = json.loads((tmp_path / "run/results.json").read_text())
    assert record["test"]["n"] == 20
    assert record["certificate"]["config"]["seed"] == 0
    losses = [r["loss"] for r in training.read_metrics(tmp_path / "run/metrics.jsonl") if r["kind"] == "train"]
    assert losses[-1] < losses[0]
    assert not (tmp_path / "run" / checkpoint.STATE_FILE).exists()


def test_a_seed_fixes_every_weight_and_another_seed_does_not(toys: Splits, tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        training.train(training.start(toy_config(seed=seed, epochs=1), tmp_path / name))
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))
    assert not same(weights(tmp_path / "a"), weights(tmp_path / "c"))


@pytest.mark.parametrize(
    "changes",
    [
        {"average": 0.9, "optimizer": "adamw", "weight_decay": 0.01, "schedule": "one-cycle", "clip": 1.0},
        {"patience": 1, "epochs": 6, "schedule": "exponential"},
        {"model": CNNConfig(channels=(4,), kernels=(3,), pool=(2,), hidden=(8,))},
        {"precision": "bf16"},
    ],
    ids=["averaged", "early-stop", "dropout", "bf16"],
)
def test_stopping_after_any_step_and_resuming_gives_bit_identical_weights(
    toys: Splits, tmp_path: Path, changes: dict[str, object]
) -> None:
    config = toy_config(**changes)
    training.train(training.start(config, tmp_path / "whole"))
    run = training.start(config, tmp_path / "parts")
    for step in (1, 5, 7):
        with pytest.raises(KeyboardInterrupt):
            training.loop(run, [], lambda run=run, step=step: run.step >= step)
        run = training.resume(tmp_path / "parts")
        assert run.step == step
    training.train(run)
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "parts"))

    def without_time(name: str) -> list[dict]:
        records = training.read_metrics(tmp_path / name / "metrics.jsonl")
        return [{k: v for k, v in r.items() if k not in ("seconds", "images_per_second")} for r in records]

    assert without_time("whole") == without_time("parts")


def test_early_stopping_looks_at_validation_and_never_at_test(toys: Splits, tmp_path: Path) -> None:
    config = toy_config(patience=2, epochs=8)
    training.train(training.start(config, tmp_path / "a"))
    shuffled = replace(toys.test, labels=toys.test.labels.flip(0))
    object.__setattr__(toys, "test", shuffled)
    result = training.train(training.start(config, tmp_path / "b"))
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))
    assert result.certificate["epochs"] < 8


def test_early_stopping_keeps_the_weights_of_the_best_epoch(toys: Splits, tmp_path: Path) -> None:
    run = training.start(toy_config(patience=1, epochs=3), tmp_path / "run")
    training.train(run)
    best = min(
        (r for r in training.read_metrics(tmp_path / "run/metrics.jsonl") if r["kind"] == "epoch"),
        key=lambda r: r["validation_error_percent"],
    )
    assert run.best_epoch == best["epoch"]
    assert run.best_error == best["validation_error_percent"]


def test_a_loss_that_is_not_a_number_stops_and_keeps_the_last_good_checkpoint(toys: Splits, tmp_path: Path) -> None:
    run = training.start(toy_config(lr=1e30), tmp_path / "run")
    with pytest.raises(UserError, match=r"loss became .* at step .*last good checkpoint is kept"):
        training.train(run)
    again = training.resume(tmp_path / "run")
    assert all(p.isfinite().all() for p in again.model.parameters())


def test_a_run_folder_that_exists_is_never_overwritten(toys: Splits, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="exists already and is not overwritten"):
        training.start(toy_config(), tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_finished_run_has_nothing_to_resume(toys: Splits, tmp_path: Path) -> None:
    training.train(training.start(toy_config(epochs=1), tmp_path / "run"))
    with pytest.raises(UserError, match="has finished"):
        training.resume(tmp_path / "run")
    with pytest.raises(UserError, match="there is no run"):
        training.resume(tmp_path / "elsewhere")


def test_a_batch_larger_than_the_data_names_both_numbers(toys: Splits, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"100.*48"):
        training.start(toy_config(batch_size=100), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_learning_rates_follow_their_schedules() -> None:
    official = get_preset("official")
    assert training.learning_rate(official, 2000, 300_000) == pytest.approx(0.00096)
    assert training.learning_rate(official, 10**7, 10**7) == 1e-6
    cycle = replace(official, schedule="one-cycle", lr=1.0, warmup=0.2)
    rates = [training.learning_rate(cycle, step, 100) for step in range(101)]
    assert max(rates) == rates[20] == 1.0
    assert rates[0] == pytest.approx(0.04)
    assert rates[100] == pytest.approx(0.001)
    assert rates[:21] == sorted(rates[:21])
    assert rates[20:] == sorted(rates[20:], reverse=True)


def test_the_average_of_constant_weights_is_those_weights(toys: Splits, tmp_path: Path) -> None:
    run = training.start(toy_config(average=0.99, lr=0.0), tmp_path / "run")
    before = {k: v.clone() for k, v in run.model.named_parameters()}
    training.train(run)
    for name, value in before.items():
        torch.testing.assert_close(run.average[name], value)


def test_an_unknown_device_lists_those_that_are_there() -> None:
    with pytest.raises(UserError, match=r"no device 'tpu'.*auto, cpu"):
        training.choose_device("tpu")
    assert training.choose_device("cpu").type == "cpu"


# ------------------------------------------------------------------------------------------- killed from outside

SCRIPT = """
import os, signal, sys
import torch
from pathlib import Path
sys.path.insert(0, {tests!r})
from capsnet import checkpoint, training
from test_training import toy_config, toy_set
from capsnet.data import Splits

training.load_data = lambda *_, **__: Splits(toy_set(48, 0), toy_set(16, 1), toy_set(20, 2))
folder, die_at_save, where = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
saves = 0
whole = getattr(os, where)

def dying(*args):
    global saves
    saves += 1
    if saves == die_at_save:
        os.kill(os.getpid(), signal.SIGKILL)
    return whole(*args)

setattr(os, where, dying)
run = training.resume(folder) if folder.exists() else training.start(toy_config(epochs=150, save_every=0.0), folder)
training.train(run)
"""


def start_process(folder: Path, script: Path, die_at_save: int = -1, where: str = "replace") -> subprocess.Popen:
    command = [sys.executable, str(script), str(folder), str(die_at_save), where]
    return subprocess.Popen(command, stderr=subprocess.PIPE)


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script") / "train_toys.py"
    path.write_text(SCRIPT.format(tests=str(Path(__file__).parent)))
    return path


@pytest.fixture(scope="module")
def undisturbed(script: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    process = start_process(folder, script)
    error = process.communicate()[1].decode()
    assert process.returncode == 0, error
    return weights(folder)


def test_twenty_kills_at_random_moments_leave_the_final_weights_bit_identical(
    script: Path, undisturbed: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    folder, kills, dice = tmp_path / "run", 0, random.Random(7)
    metrics = folder / "metrics.jsonl"
    while not (folder / checkpoint.MODEL_FILE).exists():
        before = metrics.stat().st_mtime_ns if metrics.exists() else 0
        process = start_process(folder, script)
        while process.poll() is None and kills < 20:
            if metrics.exists() and metrics.stat().st_mtime_ns != before:  # it trains: let it go on for a moment
                time.sleep(dice.uniform(0, 0.15))
                process.send_signal(signal.SIGKILL)
                kills += process.wait() == -signal.SIGKILL
            time.sleep(0.002)
        error = process.communicate()[1].decode()
        assert process.returncode in (0, -signal.SIGKILL), error
    assert kills == 20, f"it was done after {kills} kills: make it longer"
    assert same(weights(folder), undisturbed)


@pytest.mark.parametrize("where", ["fsync", "replace"])
def test_a_kill_in_the_middle_of_a_save_leaves_the_final_weights_bit_identical(
    script: Path, undisturbed: dict[str, torch.Tensor], tmp_path: Path, where: str
) -> None:
    folder = tmp_path / "run"
    process = start_process(folder, script, die_at_save=9, where=where)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert list(folder.glob(".*.part")), "the kill was not in the middle of a save"
    process = start_process(folder, script)
    error = process.communicate()[1].decode()
    assert process.returncode == 0, error
    assert not list(folder.glob(".*.part"))
    assert same(weights(folder), undisturbed)


def test_ctrl_c_stops_between_two_steps_with_a_checkpoint(
    toys: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = training.start(toy_config(save_every=math.inf, epochs=50), tmp_path / "run")
    step = training.train_step

    def interrupted(run: training.Run) -> training.Losses:
        if run.step == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return step(run)

    monkeypatch.setattr(training, "train_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        training.train(run)
    assert training.resume(tmp_path / "run").step == 5
