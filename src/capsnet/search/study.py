"""A study: trials of one space in one storage, run by any number of workers.

A trial is a training without the validation images, judged on them at its end; the test set is never used. With a
time per trial, the number of epochs follows from the pace of its first steps.

Pruning compares trials at the same tenth of their training, not at the same time, because a one-cycle schedule
stretches with the training. It starts in the second half and needs five finished trials.

The trial of an interrupted or killed worker is queued again and resumes from its last checkpoint if that is on the
same disk. The network of the best trial is kept.
"""

from __future__ import annotations

import json
import math
import os
import random
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.storages import RetryHeartbeatStaleTrialCallback
from optuna.trial import FrozenTrial, Trial, TrialState

from capsnet import __version__
from capsnet.errors import UserError, unknown
from capsnet.experiments.core.selection import FAILURES, check_base, ingredients, reason
from capsnet.files import Lock, Taken
from capsnet.io import checkpoint
from capsnet.search.space import Space, combinations, own_values, suggest
from capsnet.search.storage import (
    FOLDER,
    SQLITE,
    DatabaseLock,
    connect,
    storage_errors,
    turn,
    without_password,
)  # fmt: skip
from capsnet.search.workers import INTERRUPTED
from capsnet.train import loop, runs
from capsnet.train.config import Config
from capsnet.train.config_records import to_dict
from capsnet.train.loop import Run, Watcher
from capsnet.train.pace import epochs_within

PRUNERS = {
    "median": lambda: optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=5, n_min_trials=5),
    "none": optuna.pruners.NopPruner,
}
WAIT = 0.5  # seconds between two looks at a storage whose trials have all begun
HOPELESS = 10  # failed trials in a row after which a search stops: the cause is not a single trial's
KILLED = "its worker was killed."


@dataclass(frozen=True)
class Task:
    """What a study is about, the same for all its workers."""

    space: Space
    base: Config
    minutes: float = 0.0
    """Training time per trial; 0 trains for the config's epochs."""

    def __post_init__(self) -> None:
        check_base(self.base)
        if not 0 <= self.minutes < 1e6:
            raise UserError(f"--minutes is the training time of a trial, 0 or more, got {self.minutes}.")
        if self.minutes and "epochs" in self.space:
            raise UserError("--minutes determines the number of epochs: remove epochs from the space.")

    def record(self) -> dict[str, Any]:
        """The task as the study stores it, without what each worker may choose for itself."""
        base = {name: value for name, value in to_dict(self.base).items() if name not in ("device", "save_every")}
        space = {name: str(choices) for name, choices in self.space.items()}
        task = {"space": space, "base": base, "minutes": self.minutes, "judge": "validation error, %"}
        return json.loads(json.dumps(task | ingredients(self.base) | {"capsnet": __version__}))


@dataclass(frozen=True)
class Budget:
    """When to stop: after a number of trials in the study, or at a time of the monotonic clock."""

    trials: int
    until: float = math.inf

    def spent(self, trials: Sequence[FrozenTrial], minutes: float) -> bool:
        """Whether all trials are done, or another one would end too late."""
        return len(ended(trials)) >= self.trials or time.monotonic() + 60 * minutes >= self.until

    def all_begun(self, trials: Sequence[FrozenTrial]) -> bool:
        return len(ended(trials)) + sum(trial.state == TrialState.RUNNING for trial in trials) >= self.trials


def ended(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """The finished trials, without those that were queued again."""
    again = {number for trial in trials for number in RetryHeartbeatStaleTrialCallback.retry_history(trial)}
    return [trial for trial in trials if trial.state.is_finished() and trial.number not in again]


def leader(trials: Sequence[FrozenTrial]) -> FrozenTrial | None:
    """The best complete trial; of equals the quicker one."""
    complete = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    return min(complete, key=lambda trial: (trial.value, trial.user_attrs["seconds"]), default=None)


# --- Opening ---------------------------------------------------------------------------------------------------


def open_study(name: str, url: str, task: Task, pruner: str = "median", grace: int = 60) -> optuna.Study:
    """Create or resume the study of that name; a study of another task is refused."""
    if pruner not in PRUNERS:
        raise unknown("pruner", pruner, PRUNERS)
    if grace < 5:
        raise UserError(f"--grace is a number of seconds, at least 5, got {grace}.")
    with storage_errors(url), turn(url, name):
        study = optuna.create_study(
            storage=connect(url, grace), study_name=name, load_if_exists=True,
            sampler=optuna.samplers.TPESampler(constant_liar=True), pruner=PRUNERS[pruner](),
        )  # fmt: skip
        if not study.user_attrs and not study.get_trials(deepcopy=False):
            study.set_user_attr("task", task.record())
        check_same(study, url, task.record())
        own, every = own_values(task.space, task.base), combinations(task.space, task.base)
        random.Random(0).shuffle(every)
        for values in sorted(every, key=lambda values: values != own) or [own]:  # the base's own values come first
            study.enqueue_trial(values, skip_if_exists=True)
    return study


def load_study(name: str, url: str) -> optuna.Study:
    """An existing study, to be reported on."""
    file = Path(url.removeprefix(SQLITE))
    if url.startswith(SQLITE) and not file.exists():
        raise UserError(f"there is no study in {file}: name one with --study, or start it with --space.")
    with storage_errors(url), turn(url, name):  # another process may create it
        storage = connect(url)
        names = optuna.get_all_study_names(storage)
        if name not in names:
            raise unknown("study", name, names)
        study = optuna.load_study(study_name=name, storage=storage)
    check_same(study, url, study.user_attrs.get("task", {}))
    return study


def check_same(study: optuna.Study, url: str, wanted: dict[str, Any]) -> None:
    """Refuse a study of another task, and name the first difference."""
    there, here = flat(study.user_attrs.get("task", {})), flat(wanted)
    name = next((name for name in [*here, *there] if there.get(name) != here.get(name)), None)
    how = f"differs in {name} ({there.get(name, 'none')} there, {here.get(name, 'none')} here)" if name else ""
    how = how if there else "was not created by capsnet search"
    if how:
        place = without_password(url)
        raise UserError(f"the study '{study.study_name}' in {place} {how}: choose another name with --study.")


def flat(record: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one with dotted names.

    >>> flat({"lr": 1, "model": {"routing": {"iterations": 3}}})
    {'lr': 1, 'model.routing.iterations': 3}
    """
    made: dict[str, Any] = {}
    for name, value in record.items():
        made |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return made


# --- Working ---------------------------------------------------------------------------------------------------


def work(
    study: optuna.Study, url: str, task: Task, budget: Budget, grace: int = 60,
    stop: Callable[[], bool] = lambda: False,
) -> None:  # fmt: skip
    """Run trials until the budget is spent; at the end wait for other workers, because one of them may be killed.

    Databases do not lock what they read, so workers take trials in turns.
    """
    folder = FOLDER / study.study_name
    while not stop():
        with storage_errors(url), turn(url, study.study_name) as ours:
            revive(study, grace)
            trials = study.get_trials(deepcopy=False)
            tidy(trials, folder)
            if budget.spent(trials, task.minutes):
                return
            stop_if_hopeless(trials)
            if not budget.all_begun(trials):
                study.optimize(Objective(task, folder, ours), n_trials=1, catch=FAILURES)
                continue
        time.sleep(WAIT)


def revive(study: optuna.Study, grace: int) -> None:
    """Queue the trials of dead workers again, also of those that were killed before their first heartbeat."""
    optuna.storages.fail_stale_trials(study)
    for trial in study.get_trials(states=(TrialState.RUNNING,)):
        began = trial.datetime_start or datetime.now()
        if trial.user_attrs.get("began") != trial.number and datetime.now() - began > timedelta(seconds=2 * grace):
            queue_again(study, trial.number)
            study.tell(trial.number, state=TrialState.FAIL)


def queue_again(study: optuna.Study, number: int) -> None:
    """Queue a trial again with its values and attributes, to resume where it was."""
    RetryHeartbeatStaleTrialCallback()(study, study.get_trials()[number])


def stop_if_hopeless(trials: Sequence[FrozenTrial]) -> None:
    """Stop when one trial after another fails."""
    last = sorted(ended(trials), key=lambda trial: trial.datetime_complete or datetime.min)[-HOPELESS:]
    if len(last) == HOPELESS and all(trial.state == TrialState.FAIL for trial in last):
        why = last[-1].user_attrs.get("failure", KILLED)
        raise UserError(f"the last {HOPELESS} trials failed; to start anew, use another --study. The last error: {why}")


def tidy(trials: Sequence[FrozenTrial], folder: Path) -> None:
    """Remove the run folders of finished trials; of the best one the network is kept."""
    done = ended(trials)
    best = leader(done)
    kept = {trial.user_attrs.get("folder") for trial in trials if trial is best or not trial.state.is_finished()}
    for name in {trial.user_attrs.get("folder", "") for trial in done} - kept - {""}:
        shutil.rmtree(folder / name, ignore_errors=True)
    if best and (folder / best.user_attrs["folder"] / checkpoint.MODEL_FILE).exists():
        (folder / best.user_attrs["folder"] / checkpoint.STATE_FILE).unlink(missing_ok=True)


@dataclass
class Objective:
    """One trial: train, report, judge."""

    task: Task
    folder: Path
    turn: Lock | DatabaseLock

    def __call__(self, trial: Trial) -> float:
        trial.set_user_attr("began", trial.number)  # within our turn, so that nobody takes it for abandoned
        self.turn.release()
        try:
            return self.train(trial)
        except (UpdateFinishedTrialError, Taken):  # others took the trial over while this worker was silent
            raise SystemExit(INTERRUPTED) from None
        except FAILURES as failure:
            if isinstance(failure.__cause__, OSError):  # a full disk is not the trial's fault
                queue_again(trial.study, trial.number)
                raise failure.__cause__ from None
            trial.set_user_attr("failure", reason(failure))
            raise
        except (KeyboardInterrupt, StorageInternalError, OSError):
            queue_again(trial.study, trial.number)
            raise

    def train(self, trial: Trial) -> float:
        config = suggest(trial, self.task.space, self.task.base)
        trial.set_user_attr("worker", os.getpid())
        if "folder" not in trial.user_attrs:  # not named by number: another attempt has another one
            trial.set_user_attr("folder", f"network-{secrets.token_hex(6)}")
        folder = self.folder / trial.user_attrs["folder"]
        run = loop.resume(folder) if runs.can_go_on(folder) else loop.start(paced(config, self.task.minutes), folder)
        trial.set_user_attr("config", to_dict(run.config))
        trial.set_user_attr("epochs", run.config.epochs)
        trial.set_user_attr("parameters", sum(p.numel() for p in run.model.parameters()))
        reporter = Reporter(trial)
        outcome = loop.train_and_validate(run, [reporter])
        reporter.sum_up(run)
        # the state is kept until the storage knows the outcome: a trial killed before that is judged again
        checkpoint.save_model(folder / checkpoint.MODEL_FILE, run.finished_model().eval(), loop.birth_certificate(run))
        trial.set_user_attr("errors", [outcome.errors, outcome.n])
        return outcome.error_percent


def paced(config: Config, minutes: float) -> Config:
    """The config with as many epochs as fit into the time, by the pace of its first steps; 0 changes nothing."""
    if not minutes:
        return config
    return replace(config, epochs=epochs_within(minutes, loop.prepare(config, Path())))


class Reporter(Watcher):
    """Tells the study about a training, and stops one that is worse than others."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.curve: list[list[float]] = []
        self.tenth = 0

    def started(self, run: Run) -> None:
        for past in runs.read_metrics(run.folder):
            if past["kind"] == "epoch":
                self.note(run, past)

    def epoch_ended(self, run: Run, record: dict[str, Any]) -> None:
        if self.note(run, record) and self.tenth < 10 and self.trial.should_prune():
            self.sum_up(run)
            raise optuna.TrialPruned

    def note(self, run: Run, record: dict[str, Any]) -> bool:
        """Keep an epoch's error; report the first of each tenth of the training, because storages are slow."""
        self.curve.append([record["epoch"], record["seconds"], record["validation_error_percent"]])
        tenth = 10 * record["step"] // run.steps
        if tenth == self.tenth:
            return False
        self.tenth = tenth
        self.trial.report(record["validation_error_percent"], tenth)
        return True

    def sum_up(self, run: Run) -> None:
        self.trial.set_user_attr("curve", self.curve)
        self.trial.set_user_attr("seconds", round(run.seconds, 2))
