"""Studies: trials are real trainings in a real SQLite storage, judged on validation images."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
from optuna.storages import RetryHeartbeatStaleTrialCallback
from optuna.trial import TrialState

from capsnet import data
from capsnet.cli import main
from capsnet.errors import UserError
from capsnet.evaluate import evaluate
from capsnet.io import checkpoint
from capsnet.search import study as studies
from capsnet.search.space import read
from capsnet.search.storage import MOST_RETRIES, storage_url
from capsnet.search.study import Budget, Task, ended, open_study, paced, revive, work
from capsnet.train.config import Config

Searched = Callable[..., optuna.Study]
pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning", "ignore:Heartbeat")
URL = "sqlite:///runs/search/s.db"


def states(study: optuna.Study) -> list[str]:
    return [trial.state.name for trial in study.trials]


def test_a_trial_is_judged_on_the_validation_images_and_starts_with_the_base(searched: Searched, base: Config) -> None:
    study = searched("lr=0.001..0.01:log", "class_dim=4,8", trials=3)
    assert states(study) == ["COMPLETE"] * 3
    assert study.trials[0].params["lr"] == base.lr
    for trial in study.trials:
        said = trial.user_attrs
        assert said["config"]["lr"] == float(f"{trial.params['lr']:.4g}")
        assert said["config"]["model"]["class_dim"] == int(trial.params["model.class_dim"])
        assert trial.value == said["curve"][-1][2] == 100 * said["errors"][0] / said["errors"][1]
        assert said["errors"][1] == 8  # validation images, of 64 + 8 + 8
        assert said["parameters"] > 100


def test_the_network_of_the_best_trial_is_kept_and_no_other(searched: Searched, base: Config) -> None:
    study = searched("lr=0.0000001,0.003", trials=2)
    best = studies.leader(study.trials)
    (kept,) = Path("runs/search/s").iterdir()
    assert best is not None
    assert kept.name == best.user_attrs["folder"]
    assert not (kept / checkpoint.STATE_FILE).exists()
    held_out = data.load(base.data, validation=8, image_size=12).validation
    assert evaluate(checkpoint.load(kept), held_out).error_percent == best.value


def test_a_small_space_is_searched_exhaustively_and_each_combination_once(searched: Searched) -> None:
    study = searched("class_dim=4..5", "absent=0.2,0.1", trials=4)
    tried = [(trial.params["model.class_dim"], trial.params["loss.absent"]) for trial in study.trials]
    assert sorted(tried) == [(4, "0.1"), (4, "0.2"), (5, "0.1"), (5, "0.2")]
    assert tried[0] == (4, "0.1")  # the base's own
    assert len(searched("class_dim=4..5", "absent=0.2,0.1").trials) == 4  # opened again: nothing is queued twice


def test_a_search_resumes_where_it_was(searched: Searched) -> None:
    before = searched(trials=1).trials[0]
    after = searched(trials=2).trials
    assert len(after) == 2
    assert (after[0].value, after[0].datetime_complete) == (before.value, before.datetime_complete)


def test_a_failed_trial_is_recorded_with_its_reason_and_the_search_continues(searched: Searched) -> None:
    study = searched("primary_kernel=99,3,5", trials=3)
    assert sorted(states(study)) == ["COMPLETE", "COMPLETE", "FAIL"]
    (failed,) = (trial for trial in study.trials if trial.state == TrialState.FAIL)
    assert "too small" in failed.user_attrs["failure"]
    assert len(list(Path("runs/search/s").iterdir())) == 1  # the best trial's network


def test_a_search_stops_when_ten_trials_in_a_row_failed(searched: Searched) -> None:
    with pytest.raises(UserError, match=r"the last 10 trials failed; to start anew, use another --study\..*too small"):
        searched("primary_kernel=20..50", trials=20)


def test_a_trial_that_is_worse_than_the_median_is_pruned_in_its_second_half(searched: Searched, base: Config) -> None:
    task = Task(read(["lr=0.0000001,0.003"], replace(base, epochs=8)), replace(base, epochs=8))
    study = searched(task=task, pruner="median")
    for lr in [*["0.003"] * 5, "0.0000001"]:
        study.enqueue_trial({"lr": lr})
    work(study, URL, task, Budget(8))
    hopeless = study.trials[-1]
    assert hopeless.state == TrialState.PRUNED
    assert 4 <= len(hopeless.user_attrs["curve"]) < 8


def test_a_trial_may_end_within_an_epoch(searched: Searched, base: Config) -> None:
    task = Task(read(["lr=0.001,0.003"], replace(base, epochs=1.5)), replace(base, epochs=1.5))
    trial = searched(task=task, trials=1).trials[0]
    assert [epoch for epoch, _, _ in trial.user_attrs["curve"]] == [1, 1.5]


# --- Time per trial --------------------------------------------------------------------------------------------


def test_more_minutes_make_more_epochs(base: Config) -> None:
    assert paced(base, 0.002).epochs < paced(base, 0.2).epochs / 5
    assert paced(base, 0) == base
    assert replace(paced(base, 0.002), epochs=base.epochs) == base


def test_a_trial_takes_about_its_time(searched: Searched) -> None:
    trial = searched("lr=0.001..0.01", trials=1, minutes=0.02).trials[0]
    assert trial.user_attrs["epochs"] != 2  # the base's
    assert trial.user_attrs["seconds"] < 12


def test_no_trial_begins_that_would_end_too_late(searched: Searched) -> None:
    study = searched(minutes=1)
    work(study, URL, Task(read(["lr=0.001..0.01:log"], Config()), Config(), minutes=1), Budget(3, until=0))
    assert states(study) == ["WAITING"]


# --- Trials that are queued again ------------------------------------------------------------------------------


def test_a_trial_whose_worker_was_killed_before_its_first_heartbeat_is_run_again(searched: Searched) -> None:
    study = searched("class_dim=4,8")
    for _ in range(2):
        study.ask()
        revive(study, grace=0)
        revive(study, grace=0)  # only once
    assert states(study) == ["FAIL", "FAIL", "WAITING", "WAITING"]
    done = ended(searched("class_dim=4,8", trials=2).trials)
    assert [trial.state.name for trial in done] == ["COMPLETE"] * 2
    assert {trial.params["model.class_dim"] for trial in done} == {"4", "8"}


def test_a_trial_that_kills_its_workers_is_given_up(searched: Searched) -> None:
    study = searched()
    stale = RetryHeartbeatStaleTrialCallback(max_retry=MOST_RETRIES)
    for _ in range(MOST_RETRIES + 1):
        number = study.ask().number
        stale(study, study.trials[number])
        study.tell(number, state=TrialState.FAIL)
    assert states(study) == ["FAIL"] * (MOST_RETRIES + 1)  # queued again each time but the last
    assert len(ended(study.trials)) == 1


# --- What is refused -------------------------------------------------------------------------------------------


def test_a_study_of_another_task_is_refused_and_the_difference_named(searched: Searched, base: Config) -> None:
    searched()
    with pytest.raises(UserError, match=r"'s' in .*differs in space\.lr \(.*choose another name with --study"):
        searched("lr=0.1,0.2")
    with pytest.raises(UserError, match=r"differs in base\.epochs \(2 there, 3 here\)"):
        searched(task=Task(read(["lr=0.001..0.01:log"], base), replace(base, epochs=3)))
    with pytest.raises(UserError, match="differs in minutes"):
        searched(minutes=2)
    shutil.copy(next(Path("photos/cat").iterdir()), "photos/cat/zzz.png")
    with pytest.raises(UserError, match="differs in images"):
        searched()


def test_a_study_that_something_else_created_is_refused(searched: Searched) -> None:
    Path("runs/search").mkdir(parents=True)
    optuna.create_study(storage=URL, study_name="s").optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=1)
    with pytest.raises(UserError, match="was not created by capsnet search"):
        searched()
    with pytest.raises(UserError, match="was not created by capsnet search"):
        studies.load_study("s", URL)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("sqlite:///text.db", "not a database"),
        ("nosuch://host/x", "nosuch"),
        ("sqlite:///:memory:", "in memory"),
        ("sqlite:/trials.db", "neither a file name nor a URL"),
        ("postgresql+pg8000://me:secret@127.0.0.1:1/x", "pg8000"),
    ],
)
def test_a_storage_that_cannot_be_used_is_one_sentence(url: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("text.db").write_text("not a database at all, but a text that is long enough to be taken for one" * 20)
    assert main(["search", "--space", "lr=0.1,0.2", "--storage", url]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert len(err.strip().splitlines()) == 1
    assert "secret" not in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--space", "lr=0.1,0.2", "--validation", "0"], "set --validation above 0"),
        (["--space", "lr=0.1,0.2", "--stop-at", "1"], "leave it out"),
        (["--space", "lr=0.1,0.2", "--minutes", "60", "--hours", "1"], "no trial of 60 minutes fits into 1 hours"),
        (["--space", "lr=0.1,0.2", "--minutes", "-1"], "--minutes is the training time"),
        (["--space", "lr=0.1,0.2", "--grace", "1"], "--grace is a number of seconds, at least 5"),
        (["--space", "lr=0.1,0.2", "--init", "quick-mnist"], "quick-mnist was trained on images"),
        (["--space", "lr=0.1,0.2", "--teacher", "quick-mnist"], "quick-mnist was trained on images"),
        (["--space", "lr=0.1,0.2", "--trials", "0"], "--trials should be at least 1, not 0"),
        (["--space", "lr=0.1,0.2", "--pruner", "medain"], "did you mean 'median'"),
        (["--space", "lr=0.1,0.2", "--study", "../x"], "is not a name"),
        (["--space", "epochs=1,2", "--minutes", "1"], "remove epochs from the space"),
        (["--report", "--study", "nowhere"], "there is no study in"),
        ([], "the space is empty"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_sentence(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["search", *words]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert len(err.strip().splitlines()) == 1


def test_the_task_in_the_storage_is_json_and_leaves_out_what_a_worker_may_choose(base: Config) -> None:
    task = Task(read(["lr=0.001,0.01"], base), base)
    assert json.loads(json.dumps(task.record())) == task.record()
    open_study("s", storage_url("", "s"), task)
    open_study("s", storage_url("", "s"), replace(task, base=replace(base, device="cpu", save_every=1.0)))
