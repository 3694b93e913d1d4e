"""Hyper-parameter search: spaces are checked, workers share a study and survive each other, reports hold together."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
import shlex
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
import sqlalchemy.exc
import torch
from optuna.trial import TrialState
from rich.console import Console

from capsnet import checkpoint, training
from capsnet.cli import main
from capsnet.cli.flags import parse
from capsnet.cli.search import INTERRUPTED, UNTIL, Crew, Search, ShownAblation, limits, line, picture
from capsnet.cli.train import Train, take_preset
from capsnet.config import CapsNetConfig, CNNConfig, Config, get_preset, to_dict
from capsnet.data import load as load_data
from capsnet.data.datasets import listing, same_images
from capsnet.errors import UserError
from capsnet.evaluation import evaluate
from capsnet.experiments.conduct import Show
from capsnet.experiments.plan import Row
from capsnet.runs import Taken
from capsnet.search import ablation, report, storage, study
from capsnet.search.ablation import SUSPECTS, Plan
from capsnet.search.space import (
    SPACES,
    Between,
    Choice,
    combinations,
    read,
    read_values,
    record,
    suggest,
    train_flags,
    with_values,
)
from capsnet.search.storage import storage_url
from capsnet.search.study import Budget, Pace, Task, ended, open_study, paced, work
from pictures import write_folder

TINY = Config(
    train_limit=128, validation=100, batch_size=32, epochs=2, lr=0.003,
    model=CapsNetConfig(
        stem_channels=(8,), stem_kernels=(9,), stem_strides=(2,), primary_types=4, primary_kernel=5, class_dim=8,
        decoder=(16,),
    ),
)  # fmt: skip
FLAGS = shlex.split(
    "--train-limit 128 --validation 100 --batch-size 32 --epochs 2 --lr 0.003 --model.stem-channels 8 "
    "--model.stem-kernels 9 --model.stem-strides 2 --model.primary-types 4 --model.primary-kernel 5 "
    "--model.class-dim 8 --model.decoder 16"
)
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def task(*words: str, **changes: Any) -> Task:
    base = replace(TINY, **changes)
    return Task(read(words or ["lr=0.001..0.01:log", "model.iterations=1,2"], base), base)


def opened(what: Task, name: str = "s", pruner: str = "none") -> optuna.Study:
    return open_study(name, storage_url("", name), what, pruner)


def searched(what: Task, trials: int, name: str = "s", pruner: str = "none") -> optuna.Study:
    made = opened(what, name, pruner)
    work(made, storage_url("", name), what, Budget(trials))
    return made


# --- Spaces ----------------------------------------------------------------------------------------------------


def test_a_space_says_what_it_was_told() -> None:
    words = [
        "lr=0.001..0.01:log",
        "augment.shift=0..3",
        "model.decoder=512-1024,none",
        "model.hidden-caps=none,20x12-10x8",
    ]
    space = read(words, Config())
    assert space["lr"] == Between(0.001, 0.01, log=True)
    assert space["augment.shift"] == Between(0, 3, integer=True)
    assert space["model.decoder"] == Choice(((512, 1024), ()))
    assert space["model.hidden_caps"] == Choice(((), ((20, 12), (10, 8))))
    again = read([f"{name}={text}" for name, text in record(space).items()], Config())
    assert again == space


@pytest.mark.parametrize("name", SPACES)
def test_every_named_space_makes_networks_that_can_be_built(name: str) -> None:
    base = get_preset("quick")
    space = read([name], base)
    sampled = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    made = {suggest(sampled.ask(), space, base) for _ in range(20)}
    assert len(made) > 5
    for config in made:
        training.build(config.model, device=torch.device("meta"))


def test_a_space_with_stems_is_checked_under_each_of_them() -> None:
    best = get_preset("best")
    assert "model.primary_types" in read(["compact"], best)  # none of its stems has branches
    with pytest.raises(UserError, match=r"primary_types=8 cannot be shared out among 3 branches"):
        read(["stem=quick,branched", "model.primary_types=8,96"], best)


def test_a_network_without_a_stem_is_not_offered_one() -> None:
    with pytest.raises(UserError, match=r"there is no field 'stem'") as refused:
        read(["stem=quick,deep"], replace(TINY, model=CNNConfig()))
    assert "did you mean 'stem'" not in str(refused.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "the space is empty"),
        (["lrr=0.1,0.2"], "did you mean 'lr'"),
        (["modle.iterations=1,2"], "did you mean 'model.iterations'"),
        (["compct"], "did you mean 'compact'"),
        (["lr=0.1"], "nothing to choose"),
        (["lr=0.1..0.01"], "is no range"),
        (["lr=0..0.1:log"], "is no range"),
        (["lr=0.1..x"], "lr takes a number, and not 'x'"),
        (["lr=0.001.."], "lr=0.001.. is no range: write LOW..HIGH"),
        (["lr=0.001-0.01"], "A range is for --space: lr=0.001\\.\\.0.01"),
        (["lr=nan,1"], "a number, and not 'nan'"),
        (["epochs=x,2"], "epochs takes a number, and not 'x'"),
        (["model.hidden_caps=none,16-8"], "takes pairs such as 16x8, joined by dashes, or none, and not '16-8'"),
        (["model.iterations=0,1"], "iterations=0 is too small"),
        (["augment.scale=0..2"], "should be below 1"),
        (["schedule=one-cycle,two-cycle"], "did you mean 'one-cycle'"),
        (["schedule=0..1"], "is no number"),
        (["model.leaky=true,perhaps"], "true or false, and not 'perhaps'"),
        (["stem=small,big"], "there is no value of stem 'big'"),
        (["model.stem_channels=8-16,16"], "name whole stems"),
        (["validation=100,200"], "is the same for all trainings"),
    ],
)
def test_a_space_that_makes_no_sense_is_refused_in_a_line(words: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said.replace("(", r"\(")) as caught:
        read(words, TINY)
    assert "\n" not in str(caught.value)


def test_a_network_without_routing_has_no_routing_to_search() -> None:
    with pytest.raises(UserError, match=r"no field 'model\.iterations'"):
        read(["model.iterations=1,2"], Config(model=CNNConfig()))


def test_a_whole_stem_changes_its_three_lists_together() -> None:
    model = with_values(TINY, {"stem": "wide"}).model
    assert isinstance(model, CapsNetConfig)
    assert len(model.stem_channels) == len(model.stem_kernels) == len(model.stem_strides) == 3
    branched = with_values(TINY, {"model.branches": 2, "model.trunk": 1})
    assert with_values(branched, {"stem": "wide"}).model == model
    for chosen in ({"stem": "wide", "model.branches": 2}, {"model.branches": 2, "stem": "wide"}):
        assert with_values(TINY, chosen).model == replace(model, branches=2)
    with pytest.raises(UserError, match="class_dim=8 cannot be shared out among 3 branches"):
        read(["model.class_dim=8,24"], get_preset("best"))


def test_epochs_are_whole_numbers_where_they_are_written_so() -> None:
    space = read(["epochs=1,2"], TINY), read(["epochs=1..4"], TINY), read(["epochs=0.5..4"], TINY)
    assert [str(each["epochs"]) for each in space] == ["1,2", "1..4", "0.5..4.0"]
    assert space[1]["epochs"] == Between(1, 4, integer=True)
    assert space[2]["epochs"] == Between(0.5, 4)
    assert combinations(read(["epochs=1.5,2"], TINY)) == [{"epochs": "1.5"}, {"epochs": "2.0"}]


def test_a_stem_may_part_into_branches() -> None:
    best = get_preset("best")
    assert with_values(best, {"stem": "branched"}) == best
    assert with_values(with_values(best, {"stem": "seven"}), {"stem": "branched"}) == best
    with pytest.raises(UserError, match="primary_types=32 cannot be shared out among 3 branches"):
        read(["stem=quick,branched"], get_preset("quick"))


@pytest.mark.parametrize("name", ["quick", "paper", "expanded-cnn"])
def test_the_command_leads_back_to_the_very_same_config(name: str) -> None:
    config = replace(get_preset(name), lr=0.0123, augment=replace(get_preset(name).augment, rotate=7.5), average=0.99)
    if isinstance(config.model, CapsNetConfig):
        norm = not config.model.stem_norm
        config = replace(config, model=replace(config.model, stem_norm=norm, decoder=(), hidden_caps=((20, 12),)))
    words = shlex.split(report.command(config))
    assert words[:2] == ["capsnet", "train"]
    preset, rest = take_preset(words[2:])
    assert parse(Train, "train", rest, default=Train(config=get_preset(preset))).config == config


def test_settings_that_are_the_presets_own_need_no_flag() -> None:
    assert report.command(get_preset("paper")) == "capsnet train --preset paper"


# --- Trials ----------------------------------------------------------------------------------------------------


def test_a_search_ends_after_its_trials_and_never_looks_at_the_test_set(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hidden:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"a search asked for {name} of the test set")

    load = training.load_data
    monkeypatch.setattr(training, "load_data", lambda *a, **k: replace(load(*a, **k), test=Hidden()))
    made = searched(replace(task(), minutes=0.01), 1, "timed")
    assert made.trials[0].state == TrialState.COMPLETE
    made = searched(task(), 3)
    assert [trial.state for trial in made.trials] == [TrialState.COMPLETE] * 3
    for trial in made.trials:
        said = trial.user_attrs
        assert trial.value == pytest.approx(said["curve"][-1][2])
        assert said["config"]["lr"] == float(f"{trial.params['lr']:.4g}")
        assert said["config"]["model"]["iterations"] == int(trial.params["model.iterations"])
        assert said["seconds"] > 0
        assert said["parameters"] > 10_000
        assert said["errors"] == [round(trial.value), 100]


def test_the_first_trial_is_the_base_itself() -> None:
    made = opened(task())
    assert made.trials[0].system_attrs["fixed_params"] == {"lr": 0.003}  # three iterations are not in the space


def test_few_combinations_are_all_tried_and_each_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["search", "--space", "model.iterations=1..3", "model.leaky=false,true", *FLAGS, "--epochs", "1", "--json"]
    assert main(words) == 0
    trials = json.loads(capsys.readouterr().out)["trials"]
    tried = [(trial["values"]["model.iterations"], trial["values"]["model.leaky"]) for trial in trials]
    assert tried[0] == (3, "false")  # the base's own
    assert sorted(tried) == [(k, leaky) for k in (1, 2, 3) for leaky in ("false", "true")]


def test_a_study_whose_first_worker_was_killed_before_it_had_queued_anything_is_whole_again() -> None:
    what = task("model.iterations=1..3")
    made = opened(what)
    assert len(opened(what).trials) == len(made.trials) == 3
    bare = optuna.create_study(storage=storage_url("", "bare"), study_name="bare")
    bare.set_user_attr("task", what.record())
    assert len(opened(what, "bare").trials) == 3


def test_a_search_goes_on_where_it_was() -> None:
    searched(task(), 1)
    before = opened(task()).trials[0]
    after = searched(task(), 2).trials
    assert len(after) == 2
    assert after[0].value == before.value


def test_a_trial_that_fails_is_noted_and_the_search_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    made = searched(task("batch_size=512,32,16"), 3)  # 512 do not fit into 128 images
    assert sorted(trial.state.name for trial in made.trials) == ["COMPLETE", "COMPLETE", "FAIL"]
    failed = next(trial for trial in made.trials if trial.state == TrialState.FAIL)
    assert "batch of 512" in failed.user_attrs["failure"]
    assert len(list(Path("runs/search/s").iterdir())) == 1  # the best trial's network
    assert main(["search", "--report", "--study", "s"]) == 0
    out = capsys.readouterr().out
    assert "What failed" in out
    assert "batch of 512" in out


def test_where_every_trial_fails_the_search_ends_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"all 5 trials failed.*batch of"):
        searched(task("batch_size=512,1024"), 20)
    assert main(["search", "--report", "--study", "s"]) == 1
    assert "no trial has come to its end yet; other settings need another --study" in capsys.readouterr().out


def test_what_failed_for_want_of_data_is_trained_once_the_data_are_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    what, start = task("model.iterations=1,2,3", "model.leaky=false,true", epochs=1), training.start

    def unreachable(*_: Any) -> None:
        raise UserError("mnist could not be fetched")

    monkeypatch.setattr(training, "start", unreachable)
    with pytest.raises(UserError, match=r"all 5 trials failed.*could not be fetched"):
        searched(what, 6)
    assert main(["search", "--report", "--study", "s"]) == 1
    assert "mnist could not be fetched" in capsys.readouterr().out
    monkeypatch.setattr(training, "start", start)
    made = opened(what)
    assert study.try_again(made, storage_url("", "s")) == 5
    assert study.try_again(made, storage_url("", "s")) == 0
    work(made, storage_url("", "s"), what, Budget(6))
    done = ended(made.trials)
    assert [trial.state.name for trial in done] == ["COMPLETE"] * 6
    assert len({(trial.params["model.iterations"], trial.params["model.leaky"]) for trial in done}) == 6


def test_a_small_search_that_failed_is_tried_again_too() -> None:
    what = task("batch_size=512,1024")
    made = searched(what, 2)
    assert [trial.state.name for trial in made.trials] == ["FAIL", "FAIL"]
    assert study.try_again(made, storage_url("", "s"), 3) == 0  # a third may do better
    assert study.try_again(made, storage_url("", "s"), 2) == 2
    assert not ended(made.trials)


def test_going_on_with_a_search_that_failed_tries_its_trials_again(capsys: pytest.CaptureFixture[str]) -> None:
    call = ["search", "--space", "lr=0.001..0.01", "--trials", "9", *FLAGS, "--batch-size", "512", "--study", "s"]
    for _ in range(2):
        assert main(call) == 2
    err = capsys.readouterr().err
    assert err.count("all 5 trials failed") == 2  # once each time
    assert err.count("the 5 trials of this study have all failed; they are tried again") == 1


def test_where_every_trial_fails_of_late_the_search_ends_too() -> None:
    what = task("batch_size=32,512")
    made = opened(what)
    for size in ("32", *["512"] * 20):
        made.enqueue_trial({"batch_size": size})
    with pytest.raises(UserError, match=r"the last 10 trials failed.*batch of 512"):
        work(made, storage_url("", "s"), what, Budget(21))


def test_a_storage_that_fails_for_a_moment_costs_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    what, told = task(epochs=2), study.Reporter.epoch_ended

    def locked(self: study.Reporter, run: training.Run, record: dict[str, Any]) -> None:
        told(self, run, record)
        raise optuna.exceptions.StorageInternalError("database is locked")

    monkeypatch.setattr(study.Reporter, "epoch_ended", locked)
    with pytest.raises(UserError, match="locked by another program"):
        searched(what, 1)
    monkeypatch.setattr(study.Reporter, "epoch_ended", told)
    assert [trial.state.name for trial in opened(what).trials] == ["FAIL", "WAITING"]
    assert len(list(Path("runs/search/s").iterdir())) == 1  # its checkpoint
    assert len(ended(searched(what, 1).trials)) == 1


def test_a_full_disk_ends_the_search_and_costs_no_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    what, replaced = task(epochs=2), os.replace

    def full(source: Any, target: Any) -> None:
        if str(target).endswith("model.safetensors"):
            raise OSError(errno.ENOSPC, "No space left on device", str(target))
        replaced(source, target)

    def save(self: study.Reporter, run: training.Run, record: dict[str, Any]) -> None:
        checkpoint.write_bytes(run.folder / "model.safetensors", b"")

    monkeypatch.setattr(study.Reporter, "epoch_ended", save)
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        searched(what, 3)
    assert [trial.state.name for trial in opened(what).trials] == ["FAIL", "WAITING"]
    assert len(list(Path("runs/search/s").iterdir())) == 1  # what there is of its training


@pytest.mark.filterwarnings("ignore:Heartbeat")
def test_a_trial_that_kills_its_workers_is_given_up_and_one_that_is_interrupted_never() -> None:
    made = opened(task())
    with storage.in_storage("sqlite://"):
        for killed, times in ((False, 2 * storage.KILLS), (True, storage.KILLS + 1)):
            for _ in range(times):
                trial = made.ask()
                made.tell(trial.number, state=TrialState.FAIL)
                storage.put_back(made, study.frozen(trial), killed)
    states = [trial.state.name for trial in made.trials]
    assert states == ["FAIL"] * (3 * storage.KILLS + 1)  # each time but the last it had been put back
    assert len(ended(made.trials)) == 1


def test_a_trial_that_others_have_left_behind_is_ended_early() -> None:
    what = task("lr=0.0000001,0.003", epochs=4)
    made = opened(what, pruner="median")
    for _ in range(5):
        made.enqueue_trial({"lr": "0.003"})
    made.enqueue_trial({"lr": "0.0000001"})
    work(made, storage_url("", "s"), what, Budget(8))
    hopeless = made.trials[-1]
    assert hopeless.params["lr"] == "0.0000001"
    assert hopeless.state == TrialState.PRUNED
    assert 2 <= len(hopeless.user_attrs["curve"]) < 4  # not in the first half


def test_an_interrupted_trial_goes_on_from_its_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    what = task(epochs=3)
    ended_epoch = study.Reporter.epoch_ended

    def interrupt(self: study.Reporter, run: training.Run, record: dict[str, Any]) -> None:
        ended_epoch(self, run, record)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(study.Reporter, "epoch_ended", interrupt)
    with pytest.raises(KeyboardInterrupt):
        searched(what, 1)
    monkeypatch.setattr(study.Reporter, "epoch_ended", ended_epoch)
    steps = []
    train_step = training.train_step
    monkeypatch.setattr(training, "train_step", lambda run: steps.append(run.step) or train_step(run))
    made = searched(what, 1)
    assert [trial.state for trial in made.trials] == [TrialState.FAIL, TrialState.COMPLETE]
    assert made.trials[0].params == made.trials[1].params
    folder = made.trials[1].user_attrs["folder"]
    assert folder == made.trials[0].user_attrs["folder"]
    assert re.fullmatch("network-[0-9a-f]{12}", folder)  # no number, which would be that of the first
    assert steps == list(range(4, 12))  # not the first epoch's four
    assert [epoch for epoch, _, _ in made.trials[1].user_attrs["curve"]] == [1, 2, 3]
    assert len(ended(made.trials)) == 1


def test_a_time_for_each_trial_becomes_epochs_and_parts_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "measured", lambda run, most: Pace(step=9.0, look=4.0))
    assert paced(TINY, 0) == TINY
    assert paced(TINY, 168 / 60).epochs == 4  # four steps and a look are 40 seconds, and two more looks are to come
    assert paced(TINY, 1).epochs == 1.3
    assert paced(TINY, 0.5) == replace(TINY, epochs=0.55)
    assert paced(TINY, 0.01).epochs == 0.001


def test_a_trial_that_ends_within_an_epoch_is_judged_where_it_ends() -> None:
    (trial,) = searched(task(epochs=1.5), 1).trials
    assert [(epoch, error) for epoch, _, error in trial.user_attrs["curve"]][-1] == (1.5, trial.value)
    assert sorted(trial.intermediate_values) == [6, 10]  # tenths of its six steps after each epoch


def test_the_first_two_calls_do_not_count_when_time_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    took = iter([100.0, 50.0, *[2.0] * 100])
    now = 0.0

    def act() -> None:
        nonlocal now
        now += next(took)

    monkeypatch.setattr(study, "time", SimpleNamespace(monotonic=lambda: now))
    assert study.seconds_each(act, most=10.0) == 2.0
    assert now == 150 + 5 * 2


def test_the_pace_of_a_training_has_steps_and_looks() -> None:
    run = training.prepare(TINY, Path())
    pace = study.measured(run, 0.0)
    assert pace.step > 0
    assert pace.look > 0
    assert run.step == 5


def test_a_trial_whose_folder_a_slow_worker_still_holds_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    start, tries = training.start, iter([True, False])

    def taken_at_first(config: Config, folder: Path) -> training.Run:
        if next(tries):
            raise Taken("a training is under way")
        return start(config, folder)

    monkeypatch.setattr(study, "TELL", 0.0)
    monkeypatch.setattr(training, "start", taken_at_first)
    made = searched(task(epochs=1), 1)
    assert [trial.state for trial in made.trials] == [TrialState.FAIL, TrialState.COMPLETE]
    assert "failure" not in made.trials[1].user_attrs
    assert len(ended(made.trials)) == 1


def test_a_trial_whose_worker_was_killed_at_its_very_beginning_is_done_by_another() -> None:
    what = task(epochs=1)
    made = opened(what)
    for _ in range(2):  # the second time it is one that was put back already
        with pytest.warns(UserWarning, match="Heartbeat"):
            made.ask().set_user_attr("folder", "what the first one had")
        for _ in range(2):  # each is put back once only
            with storage.in_storage("sqlite://"):
                study.revive(made, grace=0)
    assert [trial.state for trial in made.trials] == [TrialState.FAIL, TrialState.FAIL, TrialState.WAITING]
    work(made, storage_url("", "s"), what, Budget(1))
    assert study.own_values(what).items() <= made.trials[2].params.items()
    assert len(ended(made.trials)) == 1


def test_no_trial_begins_that_would_end_too_late() -> None:
    soon = time.monotonic() + 60
    assert Budget(10, soon).spent([], minutes=2)
    assert not Budget(10, soon).spent([], minutes=0.5)


def test_a_worker_in_place_of_another_gets_no_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = Search(hours=8.0)
    assert limits(flags)[1] == pytest.approx(time.monotonic() + 8 * 3600, abs=5)
    told: list[str] = []
    begin = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a, env, **k: told.append(env[UNTIL]) or begin(*a, env=env, **k))
    until = time.monotonic() + 60
    crew = Crew(["--help"], 1, until)
    crew.at_work[0][0].kill()
    crew.at_work[0][0].wait()
    assert crew.look_after()  # with another in its place
    crew.at_work[0][0].wait()
    assert not crew.look_after()
    assert told[0] == told[1]
    monkeypatch.setenv(UNTIL, told[1])
    assert limits(flags)[1] == pytest.approx(until, abs=5)
    assert limits(Search())[1] == pytest.approx(until, abs=5)


# --- Storage ---------------------------------------------------------------------------------------------------


def test_a_study_of_another_space_is_refused() -> None:
    opened(task())
    with pytest.raises(UserError, match=r"another space \(lr is .* there .*choose another name with --study"):
        opened(task("lr=0.1,0.2"))
    with pytest.raises(UserError, match=r"other settings \(epochs is 2 there and 3 here\)"):
        opened(task(epochs=3))
    with pytest.raises(UserError, match="another time a trial"):
        opened(replace(task(), minutes=2))


def model_of(path: Path, **changes: Any) -> str:
    """A model as a training with these settings leaves it behind."""
    run = training.prepare(replace(TINY, **changes), path)
    checkpoint.save_model(path, run.model, {"config": to_dict(run.config)})
    return str(path)


def test_a_study_whose_teacher_has_changed_is_refused(tmp_path: Path) -> None:
    what = task(teacher=model_of(tmp_path / "teacher.safetensors"))
    opened(what)
    model_of(tmp_path / "teacher.safetensors", model=replace(TINY.model, iterations=1))
    with pytest.raises(UserError, match="another model to begin with or to learn from"):
        opened(what)


def test_what_a_model_was_trained_on_is_found_whatever_it_is_called(tmp_path: Path) -> None:
    teacher = model_of(tmp_path / "teacher.safetensors")
    task(teacher=teacher)
    with pytest.raises(UserError, match=r"trained on images that would be held back.*--seed 0"):
        task(teacher=teacher, seed=7)
    with pytest.raises(UserError, match="trained on images that would be held back"):
        task(teacher=teacher, data="affine-mnist")  # made of the same digits
    pupil = model_of(tmp_path / "pupil.safetensors", seed=7, teacher=teacher)
    with pytest.raises(UserError, match=r"teacher\.safetensors was trained on images"):  # the one before it
        task(teacher=pupil, seed=7)
    for between in ("mnist", "fashion-mnist"):  # a shipped one too, whatever came after it
        with pytest.raises(UserError, match=r"^quick-mnist was trained on images"):
            task(init=model_of(tmp_path / f"{between}.safetensors", init="quick-mnist", data=between))
    tensors, told = checkpoint.read_tensors(Path(teacher))
    checkpoint.write_tensors(Path(teacher), tensors, {**told, "certificate": {}})
    with pytest.raises(UserError, match="does not say on which images"):
        task(teacher=teacher)


def grow(photos: Path) -> None:
    """One more picture, a copy of another."""
    shutil.copy(next(iter((photos / "cat").iterdir())), photos / "cat" / "zzz.png")


def test_a_study_or_an_ablation_of_images_that_have_changed_is_refused(tmp_path: Path) -> None:
    photos = write_folder(tmp_path / "photos", ("cat", "dog"), n=40)
    base = replace(TINY, data=f"folder:{photos}", image_size=28, train_limit=0, validation=8, batch_size=16, epochs=1)
    what = Task(read(["lr=0.001,0.01"], base), base)
    searched(what, 1)
    opened(what)
    plan = Plan("x", base, ("bias",), seeds=1)
    ablation.conduct(plan)
    ablation.conduct(plan)
    other = write_folder(tmp_path / "others", ("cat", "dog"), n=42)
    with pytest.raises(UserError, match=r"other settings than these \(--data folder:.*photos there\)"):
        ablation.conduct(replace(plan, base=replace(base, data=f"folder:{other}")))
    grow(photos)
    with pytest.raises(UserError, match=r"'s' in .* is about images that have changed since: choose another name"):
        opened(what)
    with pytest.raises(UserError, match=r"x\.json is of trainings before the images.* changed: choose another name"):
        ablation.conduct(plan)
    made = optuna.load_study(study_name="s", storage=storage_url("", "s"))
    made.set_user_attr("task", {k: v for k, v in what.record().items() if k != "images"})
    opened(what)  # of a time when that was not recorded


@pytest.mark.parametrize("kind", ["folder", "csv"])
def test_a_listing_changes_with_the_files_and_not_with_their_place(kind: str, tmp_path: Path) -> None:
    one = write_folder(tmp_path / "one" / "photos", ("cat", "dog"), n=4)
    rows = [f"{file.relative_to(one.parent)},{file.parent.name}" for file in one.glob("*/*.png")]
    (one.parent / "labels.csv").write_text("\n".join(rows))
    shutil.copytree(one.parent, tmp_path / "two")
    place = "labels.csv" if kind == "csv" else "photos"
    names = [f"{kind}:{tmp_path / folder / place}" for folder in ("one", "two")]
    assert listing(names[0]) == listing(names[1])
    file = next(iter((one / "cat").iterdir()))
    file.write_bytes(file.read_bytes() + b" ")
    assert listing(names[0]) != listing(names[1])
    assert listing("mnist") is None


def test_the_same_folder_is_the_same_images() -> None:
    assert same_images("folder:photos") == same_images("folder:./photos") != same_images("folder:others")
    assert same_images("multimnist") == same_images("mnist") != same_images("fashion-mnist")


def test_a_study_that_something_else_made_is_refused() -> None:
    url = storage_url("", "s")
    Path("runs/search").mkdir(parents=True)
    optuna.create_study(storage=url, study_name="s").optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=1)
    with pytest.raises(UserError, match="not made by capsnet search"):
        opened(task())


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("sqlite:///text.db", "not a database"),
        ("nosuch://host/x", "nosuch"),
        ("sqlite:///:memory:", "in memory"),
        ("sqlite:/trials.db", "neither a file's name nor a URL"),
        ("postgresql+nodriver://me:secret@127.0.0.1:1/x", "cannot be used"),
        ("postgresql+pg8000://me:secret@127.0.0.1:1/x", "needs the Python module pg8000: pip install 'pg8000'."),
    ],
)
def test_a_storage_that_is_none_is_said_so_in_a_line(url: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("text.db").write_text("not a database at all, but a text that is long enough to be taken for one" * 20)
    assert main(["search", "--space", "lr=0.1,0.2", "--storage", url, *FLAGS]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert len(err.strip().splitlines()) == 1
    assert "secret" not in err


def test_a_locked_storage_is_said_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(storage, "LOCKED", 0.1)
    other = sqlite3.connect("locked.db", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    assert main(["search", "--space", "lr=0.1,0.2", "--storage", "locked.db", *FLAGS]) == 2
    assert "locked by another program" in capsys.readouterr().err
    other.close()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--space", "lr=0.1,0.2", "--validation", "0"], "validation"),
        ([], "the space is empty"),
        (["--space", "lr=0.1,0.2", "--seeds", "5"], "--seeds belongs to --ablate"),
        (["--space", "lr=0.1,0.2", "--stop-at", "1"], "leave it out"),
        (["--space", "lr=0.1,0.2", "--minutes", "60", "--hours", "1"], "not one trial of 60 minutes fits"),
        (["--space", "lr=0.1,0.2", "--grace", "1"], "--grace is a number of seconds, 5 or more"),
        (["--space", "lr=0.1,0.2", "--init", "quick-mnist"], "trained on images that would be held back"),
        (["--space", "lr=0.1,0.2", "--teacher", "quick-mnist"], "trained on images that would be held back"),
        (["--ablate", "bias", "--grace", "30"], "leave --grace out"),
        (["--ablate", "bias", "--study", "../x"], "a study's name"),
        (["--space", "lr=0.1,0.2", "--trials", "0"], "--trials should be 1 or more"),
        (["--space", "lr=0.1,0.2", "--pruner", "medain"], "did you mean 'median'"),
        (["--space", "lr=0.1,0.2", "--study", "a/b"], "a study's name"),
        (["--space", "lr=0.1,0.2", "--study", ".."], "no dot or dash in front"),
        (["--space", "epochs=1,2", "--minutes", "1"], "leave epochs out"),
        (["--report", "--study", "nowhere"], "there is no study"),
        (["--ablate", "biass"], "did you mean 'bias'"),
        (["--ablate", "bias", "--minutes", "1"], "--minutes belongs to a search"),
        (["--ablate", "bias", "--preset", "baseline-mnist"], "choose a --preset"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["search", *words]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert len(err.strip().splitlines()) == 1


def test_without_optuna_it_says_what_to_install() -> None:
    code = "import sys; sys.modules['optuna'] = None; from capsnet.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "search", "--space", "lr=0.1,0.2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "capsnet: a search needs Optuna: pip install 'capsnet[search]'.\n"


# --- Several workers -------------------------------------------------------------------------------------------


@pytest.fixture
def two_workers() -> Iterator[subprocess.Popen[str]]:
    words = [
        "--space",
        "lr=0.001..0.01:log",
        "--trials",
        "4",
        "--workers",
        "2",
        "--grace",
        "6",
        "--json",
        "--study",
        "two",
    ]
    command = [sys.executable, "-m", "capsnet.cli", "search", *words, *FLAGS, "--epochs", "20"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    yield process
    if process.poll() is None:
        process.terminate()
        process.communicate()


def running_workers(name: str) -> set[int]:
    """The processes that have a trial under way; none while there is no study yet."""
    url = storage_url("", name)
    if not Path(url.removeprefix("sqlite:///")).exists():
        return set()
    try:
        trials = study.load_study(name, url).trials
    except UserError:  # half made
        return set()
    return {t.user_attrs["worker"] for t in trials if t.state == TrialState.RUNNING and "worker" in t.user_attrs}


def test_a_storage_whose_tables_another_worker_makes_at_this_moment_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url, make, tries = storage_url("", "race"), storage.RDBStorage, []

    def racing(*args: Any, **options: Any) -> Any:
        tries.append(1)
        if len(tries) == 1:  # what SQLite said when two began in the same instant
            cause = sqlite3.IntegrityError("UNIQUE constraint failed: alembic_version.version_num")
            raise sqlalchemy.exc.IntegrityError("INSERT INTO alembic_version", {}, cause)
        if len(tries) == 2:
            raise sqlalchemy.exc.OperationalError("CREATE TABLE", {}, sqlite3.OperationalError("table already exists"))
        return make(*args, **options)

    monkeypatch.setattr(storage, "RDBStorage", racing)
    monkeypatch.setattr(storage, "BEING_MADE", 0.01)
    with storage.in_storage(url):
        assert storage.connect(url).get_all_studies() == []
    assert len(tries) == 3
    tries[:] = []
    with pytest.raises(UserError, match="UNIQUE"), storage.in_storage(url):
        storage.connect(url, attempts=1)


def test_two_workers_share_a_study_and_one_survives_the_other(two_workers: subprocess.Popen[str]) -> None:
    while len(found := running_workers("two")) < 2 and two_workers.poll() is None:
        time.sleep(0.2)
    assert len(found) == 2
    os.kill(min(found), signal.SIGKILL)
    out, err = two_workers.communicate()
    assert two_workers.returncode == 0, err
    assert "a worker was killed; its trial goes back" in err
    told = json.loads(out)
    assert told["counts"] == {"complete": len(told["trials"]), "pruned": 0, "fail": 0}
    assert len(told["trials"]) in (4, 5)  # both workers may begin the last one
    trials = study.load_study("two", storage_url("", "two")).trials
    assert any(trial.system_attrs.get("retry_history") for trial in trials if trial.state == TrialState.COMPLETE)
    assert not [trial for trial in trials if trial.state in (TrialState.RUNNING, TrialState.WAITING)]


def test_a_trial_that_has_begun_has_a_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else nobody would miss a worker that is killed before Optuna's thread has written the first one."""
    beats: list[int] = []

    def train(self: study.Objective, trial: optuna.Trial, config: Config, folder: Path) -> float:
        with closing(sqlite3.connect("runs/search/s.db")) as storage:
            beats.extend(number for (number,) in storage.execute("SELECT COUNT(*) FROM trial_heartbeats"))
        raise UserError("enough")

    monkeypatch.setattr(optuna.storages._heartbeat.HeartbeatThread, "start", lambda self: None)
    monkeypatch.setattr(optuna.storages._heartbeat.HeartbeatThread, "join", lambda self: None)
    monkeypatch.setattr(study.Objective, "train", train)
    searched(task(), 1)
    assert beats == [1]


def test_a_killed_worker_is_replaced_and_one_that_gives_up_is_heard() -> None:
    words = ["--space", "lr=0.1,0.2", *FLAGS, "--epochs", "1000"]  # long enough to be interrupted
    crew = Crew(words, 1)
    (first, _), *_ = crew.at_work
    first.kill()
    first.wait()
    assert crew.look_after()
    assert [worker.pid for worker, _ in crew.at_work] != [first.pid]
    (told, _), *_ = crew.at_work
    while not running_workers("search"):
        time.sleep(0.1)
    told.terminate()  # it puts its trial back and ends by itself
    assert told.wait() == INTERRUPTED
    assert crew.look_after()
    assert [worker.pid for worker, _ in crew.at_work] != [told.pid]
    crew.command += ["--pruner", "medain"]
    (second, _), *_ = crew.at_work
    second.kill()
    second.wait()
    assert crew.look_after()
    crew.at_work[0][0].wait()
    assert not crew.look_after()
    assert "did you mean 'median'" in crew.last_words


def test_a_second_signal_in_the_same_instant_leaves_no_worker_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    crews: list[Crew] = []

    def followed(study: Any, url: str, what: Task, budget: Budget, crew: Crew) -> None:
        crews.append(crew)
        raise KeyboardInterrupt

    def said(text: str) -> None:
        if "stopping" in text:
            raise KeyboardInterrupt

    monkeypatch.setattr("capsnet.cli.search.follow", followed)
    monkeypatch.setattr("capsnet.cli.search.say", said)
    assert main(["search", "--space", "lr=0.1,0.2", *FLAGS, "--epochs", "1000"]) == 130
    (worker, log), *_ = crews[0].at_work
    log.close()
    assert worker.poll() is not None


def test_a_place_that_cannot_be_written_to_is_said_before_the_first_trial(capsys: pytest.CaptureFixture[str]) -> None:
    Path("results").write_text("a file where a folder should be")
    assert main(["search", "--space", "lr=0.001,0.003", "--train-limit", "128", "--validation", "100"]) == 2
    assert "could not write results/search/search.json" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_the_page_lists_no_setting_that_a_trial_has_of_its_own() -> None:
    found = {"base": to_dict(TINY), "space": {"lr": "0.001,0.003", "stem": "small,quick"}, "minutes": 1.0}
    names = [name for name, _ in report.flat(found)]
    assert {"batch_size", "model.iterations", "augment.shift"} <= set(names)
    assert not {"lr", "epochs", "model.stem_channels", "model.branches"} & set(names)
    assert "epochs" in [name for name, _ in report.flat(found | {"minutes": 0.0})]


# --- The best trial's network ----------------------------------------------------------------------------------


def test_the_best_trials_network_is_kept_and_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    made = searched(task("lr=0.0000001,0.003", epochs=4), 2)
    best = min(made.trials, key=lambda trial: trial.value or 0.0)
    assert best.params["lr"] == "0.003"
    (kept,) = (path for path in Path("runs/search/s").iterdir() if path.is_dir())
    assert kept.name == best.user_attrs["folder"]
    assert not (kept / checkpoint.STATE_FILE).exists()
    assert main(["search", "--report", "--study", "s"]) == 0
    assert f"capsnet evaluate {kept}" in capsys.readouterr().out
    assert json.loads(Path("results/search/s.json").read_text())["network"] == str(kept)
    assert str(kept) in Path("results/search/s.html").read_text()
    model = checkpoint.load(kept)
    held_back = load_data("mnist", validation=100, train_limit=128).validation
    assert evaluate(model, held_back).error_percent == best.value


def test_the_same_search_in_another_storage_leaves_the_first_ones_network_alone() -> None:
    what = task("model.iterations=1,2")
    searched(what, 2)
    (kept,) = (path for path in Path("runs/search/s").iterdir() if path.is_dir())
    again = open_study("s", storage_url("other.db", "s"), what, "none")
    work(again, storage_url("other.db", "s"), what, Budget(2))
    assert [trial.state for trial in again.trials] == [TrialState.COMPLETE] * 2
    assert (kept / checkpoint.MODEL_FILE).exists()


def test_tidying_spares_what_others_may_still_need() -> None:
    what = task()
    made = searched(what, 1)
    best = made.trials[0].user_attrs["folder"]
    objective = study.Objective(what, storage.FOLDER / "s")
    for folder in ("dead", "lost"):  # of a worker that was killed a moment ago, and of one killed before it could tidy
        (storage.FOLDER / "s" / folder).mkdir()
    for state, folder in ((TrialState.FAIL, "dead"), (TrialState.FAIL, best), (TrialState.PRUNED, "lost")):
        made.add_trial(optuna.trial.create_trial(state=state, user_attrs={"folder": folder}))
    objective.tidy(made)
    assert {path.name for path in (storage.FOLDER / "s").iterdir()} == {"dead", best}
    objective.tidy(made, made.trials[1])  # its own
    assert {path.name for path in (storage.FOLDER / "s").iterdir()} == {best}
    objective.tidy(made, made.trials[2])  # a second attempt at what is best by now
    assert (storage.FOLDER / "s" / best / checkpoint.MODEL_FILE).exists()


def test_what_a_killed_worker_left_of_a_finished_search_is_tidied_up() -> None:
    what = task()
    made = searched(what, 1)
    state = storage.FOLDER / "s" / made.trials[0].user_attrs["folder"] / checkpoint.STATE_FILE
    state.write_bytes(b"")
    assert searched(what, 1).trials[0].state == TrialState.COMPLETE  # nothing is left to do
    assert not state.exists()


def test_a_worker_killed_before_its_outcome_is_stored_leaves_a_trial_that_can_be_done_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saved = checkpoint.save_model

    def killed(*given: Any) -> None:
        saved(*given)
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "save_model", killed)
    with pytest.raises(KeyboardInterrupt):
        searched(task(), 1)
    monkeypatch.setattr(checkpoint, "save_model", saved)
    monkeypatch.setattr(training, "train_step", lambda run: pytest.fail("it was trained to its end already"))
    made = searched(task(), 1)
    assert [trial.state for trial in made.trials] == [TrialState.FAIL, TrialState.COMPLETE]


# --- Reports ---------------------------------------------------------------------------------------------------


def test_the_front_has_no_trial_that_another_beats_in_both() -> None:
    def row(number: int, error: float, seconds: float) -> dict[str, Any]:
        return {"number": number, "state": "complete", "error_percent": error, "seconds": seconds}

    rows = [row(0, 1.0, 10), row(1, 2.0, 5), row(2, 2.0, 7), row(3, 0.5, 30), row(4, 0.9, 40)]
    assert [r["number"] for r in report.front(rows)] == [1, 0, 3]
    for r in rows[:2]:
        r["curve"] = [[1, r["seconds"] / 2, 3.0], [2, r["seconds"], r["error_percent"]]]
    rows[2]["curve"] = None  # a trial that failed
    assert report.reached(rows[:3]) == [(2.5, 3.0), (5, 2.0), (10, 1.0)]
    assert report.best_first(rows)[0]["number"] == 3


def reached_instead(
    trial: optuna.trial.FrozenTrial, error: float, values: dict[str, Any] | None = None
) -> optuna.trial.FrozenTrial:
    return optuna.trial.create_trial(
        value=error, params=values or trial.params, distributions=trial.distributions, user_attrs=trial.user_attrs
    )


def test_importance_needs_trials_and_a_best_among_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "FEWEST", 8)
    trial = searched(task("lr=0.001..0.01", "model.iterations=1,2"), 1).trials[0]

    def shares(*errors: float) -> dict[str, float]:
        """Of trials whose error goes with their learning rate, and not with their iterations."""
        made = optuna.create_study()
        for k, error in enumerate(errors):
            values = {"lr": error / 10_000, "model.iterations": str(1 + k % 2)}
            made.add_trial(reached_instead(trial, error, values))
        return report.importance(made)

    assert shares(10, 20, 30, 40, 50, 60) == {}  # too few
    assert list(shares(10, 20, 30, 40, 50, 60, 70, 80)) == ["lr", "model.iterations"]
    assert shares(20, 20, 20, 20, 20, 20, 20, 20) == {}  # with no warning
    assert shares(10, 20, 20, 20, 20, 20, 70, 80) == {}  # six are as good as the fourth
    assert next(iter(shares(10, 20, 20, 40, 50, 60, 70, 80))) == "lr"


def test_a_report_has_importance_front_command_pictures_and_page(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "FEWEST", 5)
    made = searched(task(), 5)
    for trial, error in zip(made.trials, (71.3, 51.3, 61.3, 41.3, 81.3), strict=True):  # no two alike, on any machine
        made.add_trial(reached_instead(trial, error))
    assert main(["search", "--report", "--study", "s"]) == 0
    out = capsys.readouterr().out
    told = json.loads(Path("results/search/s.json").read_text())
    assert sum(told["importance"].values()) == pytest.approx(1, abs=0.01)
    assert set(told["importance"]) == {"lr", "model.iterations"}
    assert told["best"] == made.best_trial.number or told["trials"][told["best"]]["error_percent"] == made.best_value
    assert told["command"] in out
    for name in ("importance", "front"):
        assert Path(f"results/search/s/{name}.png").exists()
        assert Path(f"results/search/s/{name}.svg").exists()
    page = Path("results/search/s.html").read_text()
    assert page.count("data:image/png") == 2
    assert "http:" not in page.replace("http-equiv", "")


def test_the_outcome_is_seen_where_it_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    searched(task("model.iterations=1,2"), 2)
    Path("results/search").mkdir(parents=True)
    Path("results/search/s.json").write_text('{"storage": "sqlite:///other.db"}')
    for flags in ([], ["--json"]):
        assert main(["search", "--report", "--study", "s", *flags]) == 2
        out, err = capsys.readouterr()
        assert "capsnet train --preset quick" in out
        assert "s.json is about the study in sqlite:///other.db: choose another name with --study, or move" in err


def test_a_report_does_not_need_the_model_that_its_trials_began_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = model_of(tmp_path / "first.safetensors")
    searched(task("model.iterations=1,2", init=model), 1)
    Path(model).unlink()
    assert main(["search", "--report", "--study", "s"]) == 0
    assert f"--init {model}" in capsys.readouterr().out


def test_a_crew_is_no_larger_than_the_trials_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Crew, "hire", lambda crew: crew.threads)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert Crew([], 2, trials=3).at_work == ["2", "2"]
    assert Crew([], 2, trials=1).at_work == ["2"]  # with 4 that trial would do more in its time than the others


def test_the_lowest_error_is_drawn_in_steps_up_to_the_last_end_of_all_trials() -> None:
    row = {"state": "complete", "values": {}, "epochs": 2, "parameters": 1}
    quick = {**row, "number": 0, "error_percent": 2.0, "seconds": 20.0, "curve": [[1, 10.0, 4.0], [2, 20.0, 2.0]]}
    slow = {**row, "number": 1, "error_percent": 3.0, "seconds": 60.0, "curve": [[1, 30.0, 5.0], [2, 60.0, 3.0]]}
    drawn = report.pictures({"study": "s", "importance": {}, "trials": [quick, slow]})["front"]
    lowest = next(line for line in drawn.axes[0].lines if line.get_label() == "the lowest by then")
    assert list(zip(*lowest.get_data(), strict=True)) == [(10, 4), (20, 4), (20, 2), (60, 2), (60, 2)]


def test_a_study_elsewhere_does_not_write_over_another_of_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    call = ["search", "--space", "lr=0.001,0.002", "--trials", "1", *FLAGS, "--study", "s"]
    assert main(call) == 0
    assert main(call) == 0
    assert "as many trials already as are asked for: 1" in capsys.readouterr().err
    before = Path("results/search/s.json").read_bytes()
    assert main([*call, "--storage", "other.db"]) == 2
    assert "results/search/s.json is about the study in sqlite:///runs/search/s.db" in capsys.readouterr().err
    assert Path("results/search/s.json").read_bytes() == before
    assert not Path("other.db").exists()


def test_a_new_study_does_not_write_over_the_outcome_of_one_that_is_gone(capsys: pytest.CaptureFixture[str]) -> None:
    call = ["search", "--space", "lr=0.001,0.002", "--trials", "1", *FLAGS, "--study", "s"]
    assert main(call) == 0
    before = Path("results/search/s.json").read_bytes()
    Path("runs/search/s.db").unlink()
    assert main(call) == 2
    assert "s.db, which is not here: choose another name with --study" in capsys.readouterr().err
    assert Path("results/search/s.json").read_bytes() == before
    assert not Path("runs/search/s.db").exists()


@pytest.mark.parametrize("found", [[{"config": {}}], {"networks": []}])
def test_a_study_does_not_write_over_a_file_about_something_else(
    found: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    file = Path("results/search/other.json")
    file.parent.mkdir(parents=True)
    checkpoint.write_json(file, found)
    assert main(["search", "--space", "lr=0.001,0.002", "--trials", "1", *FLAGS, "--study", "other"]) == 2
    assert "other.json is about something else: choose another name" in capsys.readouterr().err
    assert checkpoint.read_json(file) == found


def test_two_workers_that_read_the_queue_at_once_do_not_take_the_same_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (opened(task())._storage._backend for _ in range(2))  # type: ignore[attr-defined]
    waiting = first.get_all_trials(first.get_study_id_from_name("s"))[0]._trial_id
    taken: list[bool] = []
    other = threading.Thread(target=lambda: taken.append(second.set_trial_state_values(waiting, TrialState.RUNNING)))
    check = first.check_trial_is_updatable

    def while_the_other_reads(*arguments: Any) -> None:
        other.start()
        other.join(0.5)  # after our reading, before our writing
        check(*arguments)

    monkeypatch.setattr(first, "check_trial_is_updatable", while_the_other_reads)
    taken.append(first.set_trial_state_values(waiting, TrialState.RUNNING))
    other.join()
    assert sorted(taken) == [False, True]


def test_a_study_without_a_finished_trial_has_a_report_too(capsys: pytest.CaptureFixture[str]) -> None:
    opened(task())
    assert main(["search", "--report", "--study", "s"]) == 0
    assert "no trial has come to its end yet\n" in capsys.readouterr().out


def test_the_live_table_shows_the_best_and_what_is_under_way() -> None:
    made = searched(task(), 2)
    under_way = optuna.create_trial(
        state=TrialState.RUNNING, params={"lr": 0.002},
        distributions={"lr": optuna.distributions.FloatDistribution(0, 1)},
        user_attrs={"epochs": 7, "now": {"epoch": 2.5, "left": 75.0}},
    )  # fmt: skip
    trials = [*made.trials, under_way]
    assert line(trials, task(), Budget(5), 2).startswith("2 of 5 trials (0 pruned, 0 failed), best ")
    # 1:15 of one worker's, then two more of 1:30; the other has time for two
    assert line([under_way], replace(task(), minutes=1.5), Budget(5), 2).endswith(", about 4:15 left")
    assert "left" not in line([under_way], task(), Budget(5), 2)
    over = Budget(10**9, time.monotonic() + 10)  # no trial is begun after that, but one under way is trained to its end
    assert line([under_way], task(), over, 2).endswith(", about 1:15 left")
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(picture(trials, task(), Budget(5), 2))
    text = console.export_text()
    assert f"{made.best_value:.2f}" in text
    assert "2.5 of 7" in text
    assert "1:15" in text
    assert "lr=0.002" in text


# --- Ablation --------------------------------------------------------------------------------------------------


def test_an_ablation_says_what_is_left_of_it_in_all(capsys: pytest.CaptureFixture[str]) -> None:
    shown, rows = ShownAblation(), [Row(name, TINY) for name in ("a", "b", "c")]
    shown.planned(rows, rows, None)
    for row in rows[:2]:
        shown.started(row)
        shown.ended(row, {"outcome": {"error_percent": 1.0}, "seconds": 50.0})
    shown.started(rows[2])
    said = capsys.readouterr().err
    assert "training 1 of 3: a" in said and "training 2 of 3: b" in said  # noqa: PT018
    assert said.count("left in all") == 2
    assert "1:40 left in all" in said
    assert "50 s left in all" in said


class Stops(Show):
    """Counts trainings, and presses Ctrl-C after the first epoch of one of them."""

    def __init__(self, at: int = 0) -> None:
        self.names: list[str] = []
        self.at = at

    def started(self, row: Row) -> list[training.Watcher]:
        self.names.append(row.name)
        return [Interrupts()] if len(self.names) == self.at else []


class Interrupts(training.Watcher):
    def epoch_ended(self, run: training.Run, record: dict[str, Any]) -> None:
        signal.raise_signal(signal.SIGINT)


def test_every_suspect_changes_the_papers_network_or_is_there_already() -> None:
    plan = Plan("x", get_preset("paper"), ablation.chosen(["suspects"], get_preset("paper")))
    assert plan.idle() == ["exponential"]
    made = plan.configs()
    for name, config in made.items():
        assert (config == plan.base) == (name == "base")
        training.build(config.model, device=torch.device("meta"))
    official = get_preset("official")
    assert (made["together"].model, made["together"].loss) == (official.model, official.loss)


def test_an_ablation_goes_on_after_an_interruption_and_pairs_its_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan("x", TINY, ("bias", "init"), seeds=2)
    with pytest.raises(KeyboardInterrupt):
        ablation.conduct(plan, Stops(at=3))
    again, steps, train_step = Stops(), list[int](), training.train_step
    monkeypatch.setattr(training, "train_step", lambda run: steps.append(run.step) or train_step(run))
    results = ablation.conduct(plan, again)
    assert steps[:5] == [4, 5, 6, 7, 0]  # the second epoch of the one that was interrupted, and then the next
    assert len(again.names) == 2 * 4 - 2
    assert {row["name"] for row in results.rows} >= {"base-seed0", "bias-seed1", "init+bias-seed1"}
    told = {o["name"]: o for o in ablation.outcomes(results.rows)}
    errors = {row["name"]: row["outcome"]["error_percent"] for row in results.rows}
    apart = [errors[f"bias-seed{k}"] - errors[f"base-seed{k}"] for k in range(2)]
    assert told["bias"]["difference"] == pytest.approx(sum(apart) / 2)
    assert told["bias"]["half_interval_95"] == pytest.approx(12.706 * abs(apart[0] - apart[1]) / 2, abs=1e-3)
    assert told["bias"]["flags"] == ["--model.routing-bias"]
    with pytest.raises(UserError, match=r"\(--lr 0.003 there\): choose another name with --study"):
        ablation.conduct(replace(plan, base=replace(plan.base, lr=0.1, save_every=1.0)))
    of_old = {"certificate": {"config": {"model": {}, "loss": {}, "augment": {}, "momentum": 1}}}
    assert ablation.other_settings(of_old, plan.rows()[0]) == "settings of another version"
    more, longer = Stops(), replace(plan, suspects=("init", "bias", "half-mean"), base=replace(TINY, save_every=1.0))
    ablation.conduct(longer, more)
    assert more.names == [f"{name}-seed{k}" for k in range(2) for name in ("half-mean", "half-mean+init+bias")]


MANY = ("loss.present", "loss.absent", "loss.down_weight", "loss.reconstruction", "loss.teacher", "warmup", "average",
        "weight_decay", "augment.shear", "augment.scale")  # fmt: skip


def test_an_ablation_takes_choices_of_ones_own() -> None:
    words = [
        "lr = 0.002",
        "bias",
        "stem=small+epochs=1.5+average=.90",
        "init",
        "lr=2e-3",
        "average=.9+epochs=1.5+stem=small",
    ]
    names = ablation.chosen([*words, "model.routing-bias=yes"], TINY)  # two spellings of one are one
    assert ablation.chosen(["lr=0.1", "+", "batch_size", "=", "64", "bias"], TINY) == ("batch_size=64+lr=0.1", "bias")
    assert names == ("lr=0.002", "bias", "average=0.9+epochs=1.5+stem=small", "init", "model.routing_bias=true")
    plan = Plan("x", TINY, (*names, f"lr={TINY.lr}"))
    assert plan.idle() == ["model.routing_bias=true", f"lr={TINY.lr}"]  # as bias has it, and as the base does
    made = plan.configs()
    assert list(made) == ["base", *names[:4], "init+bias"]  # the authors' together, and only those
    assert made["lr=0.002"] == replace(TINY, lr=0.002)
    assert made[names[2]] == replace(with_values(TINY, {"stem": "small"}), epochs=1.5, average=0.9)


def test_an_ablation_of_ones_own_choices_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    own = "augment.elastic=0.5+augment.rotate=15+augment.scale=0.15+augment.share=0.75+augment.shear=0.2+lr=0.002"
    typed = "+".join(reversed(own.replace("=0.", "=.").split("+")))
    call = ["search", "--ablate", typed, "--preset", "paper"]
    assert main([*call, "--seeds", "1", *FLAGS, "--study", "x"]) == 0
    assert Path("results/ablation/x.png").exists()  # with no warning of a label that leaves no room
    capsys.readouterr()
    assert main([*call, "--seeds", "1", *FLAGS, "--study", "x", "--json"]) == 0
    said = capsys.readouterr()
    assert "2 trainings, 0 of them to do" in said.err
    base, other = json.loads(said.out)["outcomes"]
    assert other["what"].startswith("augment.elastic 0.0 → 0.5, augment.rotate 0.0 → 15, ")
    assert (base["flags"], other["name"]) == ([], own)
    assert other["flags"] == train_flags(with_values(Config(), read_values(own, TINY)), Config())


def test_a_choice_that_cannot_be_trained_leaves_the_others_alone() -> None:
    plan = Plan("x", TINY, ablation.chosen(["model.primary_kernel=27", "lr=0.002"], TINY), seeds=1)
    for _ in range(2):  # the second time nothing is left but to say so again
        with pytest.raises(
            ablation.Incomplete, match=r"but model\.primary_kernel=27 cannot be: an image of 28×28 px is too small"
        ):
            ablation.conduct(plan)
        rows = json.loads(Path("results/ablation/x.json").read_text())["rows"]
        assert [row["name"] for row in rows] == ["base-seed0", "lr=0.002-seed0"]
    with pytest.raises(UserError, match=r"^an image of"):  # where the base cannot be, nothing can
        ablation.conduct(Plan("y", with_values(TINY, {"model.primary_kernel": 27}), ("bias",), seeds=1))


def test_the_table_of_what_could_be_trained_is_shown_where_a_seed_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train = ablation.trained

    def bad_now_and_then(row: Row, *arguments: Any) -> dict[str, Any]:
        if row.name in ("lr=0.002-seed1", "init-seed0", "init-seed1"):
            raise UserError(f"{row.method} went bad.")
        return train(row, *arguments)

    monkeypatch.setattr(ablation, "trained", bad_now_and_then)
    choices = ["lr=0.002", "init", "leaky"]
    assert main(["search", "--ablate", *choices, "--preset", "paper", "--seeds", "2", *FLAGS, "--study", "x"]) == 2
    out, err = capsys.readouterr()
    assert re.search(r"lr=0\.002 .*leaky routing", out, re.DOTALL)
    rows = json.loads(Path("results/ablation/x.json").read_text())["rows"]
    assert {o["name"]: o["seeds"] for o in ablation.outcomes(rows)} == {
        "base": [0, 1],
        "lr=0.002": [0],
        "leaky": [0, 1],
    }
    assert "x.json, but init cannot be: init went bad; lr=0.002 cannot be with seed 1: lr=0.002 went bad." in err
    assert "over 1 to 2 seeds" in Path("results/ablation/x.svg").read_text()


def test_a_stem_that_does_not_fit_is_no_other_fields_fault() -> None:
    base = with_values(TINY, {"model.stem_channels": (8, 16, 32, 64)})
    assert list(read(["lr=0.001,0.01", "stem=small,quick"], base)) == ["lr", "stem"]
    assert read_values("lr=0.01", base) == {"lr": 0.01}


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("lrr=0.1", "did you mean 'lr'"),
        ("lr=quick", "lr takes a number, and not 'quick'"),
        ("lr=0.1,0.2", "each stands by itself: lr=0.1 lr=0.2"),
        ("lr=-1", "lr=-1.0 is too small"),
        ("lr=0.1+", "and not '0.1\\+'"),
        ("lr=0.1+lr=0.2", "gives lr twice"),
        ("model.stem_kernels=7-7+stem=small", "gives the stem twice"),
        ("bias+lr=0.1", "bias is no FIELD=VALUE"),
        ("+".join(f"{name}=0.123456789012" for name in MANY), "200 letters at most"),
        ("stem=smal", "did you mean 'small'"),
        ("model.stem_channels=8-16", "name whole stems"),
        ("seed=1", "is the same for all trainings"),
        ("biass", "did you mean 'bias'"),
        ("nonsense", "FIELD=VALUE"),
    ],
)
def test_a_choice_that_makes_no_sense_is_refused_in_a_line(word: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        Plan("x", TINY, ablation.chosen([word], TINY)).configs()
    assert "\n" not in str(caught.value)


def test_two_ablations_of_one_name_do_not_mix() -> None:
    plan = Plan("x", TINY, ("bias",), seeds=1)
    with ablation.alone("x", Path("runs/ablation/x")), pytest.raises(UserError, match="'x' is under way"):
        ablation.conduct(plan)
    with pytest.raises(KeyboardInterrupt):
        ablation.conduct(plan, Stops(at=1))
    ablation.conduct(replace(plan, base=replace(TINY, lr=0.1)))
    kept = Path("runs/ablation/x/base-seed0.old-1/config.json")
    assert json.loads(kept.read_text())["lr"] == TINY.lr  # half a training of other settings stays
    with pytest.raises(
        UserError, match=r"base-seed0 with other settings than these \(--lr 0.1 there\): choose another"
    ):
        ablation.conduct(plan)


def test_a_difference_of_less_than_an_image_is_none() -> None:
    def record(method: str, seed: int, error: float) -> dict[str, Any]:
        outcome = {"error_percent": error, "n": 1000}
        config = to_dict(replace(SUSPECTS[method].change(TINY) if method in SUSPECTS else TINY, seed=seed))
        return {"method": method, "seed": seed, "seconds": 1.0, "outcome": outcome, "certificate": {"config": config}}

    errors = {"base": (1.0, 1.2), "bias": (1.1, 1.3), "leaky": (2.0, 2.2), "init": (31.0, 31.2)}
    told = ablation.outcomes([record(name, k, error) for name, both in errors.items() for k, error in enumerate(both)])
    # ten images in either of two seeds are no proof, however equal
    assert {o["name"]: o["sure"] for o in told} == {"base": False, "bias": False, "leaky": False, "init": True}
    halves = {o["name"]: o["half_interval_95"] for o in told}
    assert halves["leaky"] == pytest.approx(12.706 * 0.1 * math.sqrt(10 / 2), abs=1e-3)


def test_ablate_without_a_choice_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", "--seeds", "2", "--ablate"]) == 2
    assert "--ablate takes choices" in capsys.readouterr().err


def test_the_help_names_every_suspect(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["search", "--help"])
    help_text = re.sub(r"[\s│]+", " ", capsys.readouterr().out)
    named = help_text.split("or by name: ")[1].split(", and suspects for all")[0].split(", ")
    assert sorted(named) == sorted(SUSPECTS)


def test_an_ablation_prints_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", "--ablate", "detach", "--preset", "paper", "--seeds", "1", *FLAGS, "--study", "x"]) == 0
    out = capsys.readouterr().out
    assert "gradient through the last iteration only" in out
    assert Path("results/ablation/x.json").exists()
    assert Path("results/ablation/x.png").exists()
    assert [path.name for path in Path("runs/ablation/x").iterdir()] == [".lock"]


def test_a_difference_that_rounds_to_nothing_has_no_minus() -> None:
    told = {"what": "", "seeds": [0], "error_percent": 1.0, "std": 0.0, "half_interval_95": None, "sure": False}
    told |= {"seconds": 1.0}
    rows = ablation.table([{**told, "name": "init", "difference": value} for value in (-0.004, -0.006, 0.0)]).rows
    assert [row[3] for row in rows] == ["+0.00", "-0.01", "+0.00"]


def test_the_flags_of_a_change_are_only_those_that_differ() -> None:
    assert train_flags(replace(TINY, lr=0.5), TINY) == ["--lr", "0.5"]
    assert train_flags(TINY, TINY) == []
