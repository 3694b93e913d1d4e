"""A study: trials of one space in one storage, done by any number of workers at once.

A trial is a training on the training images without the validation part, judged on that part at its end; the test
set is never looked at. With a time for each trial, a trial first measures a few of its own steps and then takes as
many epochs as fit, the last of them perhaps in part, with their looks at the validation part.

A trial is pruned when half of the others were better at the same tenth of their training: at an equal share of it and
not at an equal time, for a one-cycle schedule stretches with the training. That is done in the second half alone, when
that schedule's learning rate falls, and only where at least five others were looked at in that tenth.

The best trial's network stays on the disk of the machine that trained it, to be tested without being trained again.

The trial of a worker that was killed goes on from its last checkpoint, where that lies on the same disk.
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
from typing import Any, NamedTuple

import optuna
import torch
from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.storages._heartbeat import BaseHeartbeat
from optuna.trial import FrozenTrial, Trial, TrialState

from capsnet import __version__, checkpoint, runs, training
from capsnet.config import Config, to_dict
from capsnet.data import in_order
from capsnet.errors import UserError, unknown
from capsnet.models.registry import Model
from capsnet.search.space import (
    FAILURES,
    Between,
    Space,
    check_judge,
    combinations,
    ingredients,
    record,
    suggest,
    with_values,
    written,
)
from capsnet.search.storage import FOLDER, connect, in_storage, put_back, shown
from capsnet.training import Run, Watcher

PRUNERS = {
    "median": lambda: optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=5, n_min_trials=5),
    "none": optuna.pruners.NopPruner,
}
WAIT = 1.0  # seconds between two looks at a storage where all trials have begun
TELL = 5.0  # seconds between two words about a training under way
LOOK = 250  # validation images that `evaluate` takes at a time
HOPELESS = 5  # trials that failed, and none that did not; twice as many in a row where some did not
KILLED = "its worker was killed."


@dataclass(frozen=True)
class Task:
    """What a study is about: the same for every worker on it."""

    space: Space
    base: Config
    minutes: float = 0.0
    """Training time of each trial; 0 leaves the epochs as they are."""

    def __post_init__(self) -> None:
        check_judge(self.base)
        if not 0 <= self.minutes < 1e6:
            raise UserError(f"--minutes is the training time of a trial and not {self.minutes}.")
        if self.minutes and "epochs" in self.space:
            raise UserError("with --minutes the epochs follow from the time: leave epochs out of the space.")

    def record(self) -> dict[str, Any]:
        """As it stands in the study; where and how often a worker writes is its own affair."""
        base = {k: v for k, v in to_dict(self.base).items() if k not in ("device", "save_every")}
        whole = {"space": record(self.space), "base": base, "minutes": self.minutes, "judge": "validation error, %"}
        return json.loads(json.dumps(whole | ingredients(self.base) | {"capsnet": __version__}))


@dataclass(frozen=True)
class Budget:
    """When to stop: after so many trials in the study, or at a time on the monotonic clock."""

    trials: int
    until: float = float("inf")

    def spent(self, trials: Sequence[FrozenTrial], minutes: float) -> bool:
        """Whether all is done, or a trial of so many minutes would end too late."""
        return len(ended(trials)) >= self.trials or time.monotonic() + 60 * minutes >= self.until

    def all_begun(self, trials: Sequence[FrozenTrial]) -> bool:
        running = sum(trial.state == TrialState.RUNNING for trial in trials)
        return len(ended(trials)) + running >= self.trials


def ended(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """The trials that came to an end; one that was put back into the queue has not."""
    again = {number for trial in trials for number in trial.system_attrs.get("retry_history", ())}
    return [trial for trial in trials if trial.state.is_finished() and trial.number not in again]


def leader(trials: Sequence[FrozenTrial]) -> FrozenTrial | None:
    """The best of the trials that were trained to their end; of equals the quicker."""
    complete = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    return min(complete, key=lambda trial: (trial.value, trial.user_attrs["seconds"]), default=None)


# --- Opening ---------------------------------------------------------------------------------------------------


def open_study(name: str, url: str, task: Task, pruner: str = "median", grace: int = 60) -> optuna.Study:
    """The study of that name, created or gone on with; one of another space, base or time is refused."""
    if pruner not in PRUNERS:
        raise unknown("pruner", pruner, PRUNERS)
    if grace < 5:
        raise UserError(f"--grace is a number of seconds, 5 or more, and not {grace}: a busy worker may be silent.")
    wanted = task.record()
    with in_storage(url):
        study = optuna.create_study(
            storage=connect(url, grace), study_name=name, load_if_exists=True,
            sampler=optuna.samplers.TPESampler(constant_liar=True), pruner=PRUNERS[pruner](),
        )  # fmt: skip
        if not study.user_attrs and not study.get_trials(deepcopy=False):
            study.set_user_attr("task", wanted)
        found = study.user_attrs.get("task")  # another worker may have begun it in the same instant
        if isinstance(found, dict) and "images" in wanted:
            found = {"images": wanted["images"], **found}  # one from before this was recorded
        if found != wanted:
            raise another(name, url, found, wanted)
        for values in first_trials(task):
            study.enqueue_trial(values, skip_if_exists=True)
    return study


def first_trials(task: Task) -> list[dict[str, Any]]:
    """What is tried first: the base's own values; where there are few combinations, then all the others in no order."""
    own, every = own_values(task), combinations(task.space)
    random.Random(0).shuffle(every)
    return sorted(every, key=lambda values: values != own) if every else [own]


def load_study(name: str, url: str) -> optuna.Study:
    """A study that is there already, to be reported on."""
    file = Path(url.removeprefix("sqlite:///"))
    if url.startswith("sqlite:///") and not file.exists():
        raise UserError(f"there is no study in {file}: name one with --study, or begin it with --space.")
    with in_storage(url):
        storage = connect(url)
        names = optuna.get_all_study_names(storage)
        if name not in names:
            raise unknown("study", name, names)
        study = optuna.load_study(study_name=name, storage=storage)
    if "task" not in study.user_attrs:
        raise another(name, url, None, {})
    return study


def another(name: str, url: str, found: Any, wanted: dict[str, Any]) -> UserError:
    """The error for a study that is not this one, with the first difference."""
    if not isinstance(found, dict):
        said = "was not made by capsnet search"
    else:
        part = next((part for part in wanted if found.get(part) != wanted[part]), "format")
        what = {
            "space": "of another space", "base": "of other settings", "minutes": "of another time a trial",
            "models": "of another model to begin with or to learn from",
            "capsnet": "of another version of capsnet",
        }  # fmt: skip
        said = f"is {what.get(part, f'of another {part}')}{difference(found.get(part), wanted.get(part))}"
        if part == "images":
            said = "is about images that have changed since"
    return UserError(f"the study '{name}' in {shown(url)} {said}: choose another name with --study.")


def difference(found: Any, wanted: Any) -> str:
    """The first field in which two records differ, in brackets."""
    if not (isinstance(found, dict) and isinstance(wanted, dict)):
        return f" ({found} there, {wanted} here)"
    name = next((n for n in [*wanted, *found] if found.get(n) != wanted.get(n)), None)
    if name is None:
        return ""
    if isinstance(found.get(name), dict):
        return difference(found[name], wanted.get(name))
    return f" ({name} is {found.get(name, 'not in it')} there and {wanted.get(name, 'not in it')} here)"


def own_values(task: Task) -> dict[str, Any]:
    """The base's own values, as far as they lie in the space: the first trial."""
    values: dict[str, Any] = {}
    for name, choices in task.space.items():
        for value in choices.ends():
            if not isinstance(choices, Between) and with_values(task.base, {name: value}) == task.base:
                values[name] = written(value)
        if isinstance(choices, Between):
            section, _, field = name.rpartition(".")
            value = getattr(getattr(task.base, section) if section else task.base, field)
            if choices.low <= value <= choices.high:
                values[name] = value
    return values


# --- Working ---------------------------------------------------------------------------------------------------


def work(
    study: optuna.Study,
    url: str,
    task: Task,
    budget: Budget,
    grace: int = 60,
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """Do trials until the budget is spent; at the end wait for those of others, for one of them may be killed."""
    objective = Objective(task, FOLDER / study.study_name)
    while not stop():
        with in_storage(url):
            revive(study, grace)
            trials = study.get_trials(deepcopy=False)
            if budget.spent(trials, task.minutes):
                objective.tidy(study)  # where the last worker was killed before it could
                return
            if budget.all_begun(trials):
                time.sleep(WAIT)
                continue
            try:
                study.optimize(objective, n_trials=1, catch=FAILURES, callbacks=[objective.tidy])
            except ValueError as error:
                if "Cannot tell" not in str(error):  # others took us for dead and have done the trial
                    raise
            refuse_the_hopeless(study)


def revive(study: optuna.Study, grace: int) -> None:
    """Put the trials of dead workers back into the queue."""
    optuna.storages.fail_stale_trials(study)
    for trial in study.get_trials(states=(TrialState.RUNNING,)):
        began = trial.datetime_start
        begun = trial.user_attrs.get("begun") == trial.number  # a trial that was put back has what the first one had
        if begun or not began or datetime.now() - began < timedelta(seconds=2 * grace):
            continue
        try:
            study.tell(trial.number, state=TrialState.FAIL)  # killed before its first heartbeat
        except (ValueError, UpdateFinishedTrialError):  # another worker was quicker
            continue
        put_back(study, trial, killed=True)


def beat(trial: Trial) -> None:
    """The first heartbeat, before the trial says that it has begun. Optuna's own comes from a thread, perhaps later,
    and a worker killed in between would never be missed."""
    storage = trial.study._storage
    if isinstance(storage, BaseHeartbeat):
        storage.record_heartbeat(trial._trial_id)


def refuse_the_hopeless(study: optuna.Study) -> None:
    """Stop where every trial fails, or has done so of late: the reason is none of a single trial's."""
    trials = sorted(ended(study.get_trials(deepcopy=False)), key=lambda trial: trial.datetime_complete or datetime.min)
    failed = [trial.state == TrialState.FAIL for trial in trials]
    most = HOPELESS if all(failed) else 2 * HOPELESS
    if len(trials) >= most and all(failed[-most:]):
        which = f"all {len(trials)} trials" if all(failed) else f"the last {most} trials"
        raise UserError(f"{which} failed. The last one: {trials[-1].user_attrs.get('failure', KILLED)}")


def try_again(study: optuna.Study, url: str, asked_for: int = HOPELESS) -> int:
    """Put all trials back into the queue where every one failed, of as many as were asked for or as make a search
    hopeless; gives their number.

    The reason was none of a single trial's (no data, no memory): whoever goes on with it has mended that.
    """
    with in_storage(url):
        trials = ended(study.get_trials())
        if len(trials) < min(HOPELESS, asked_for) or any(trial.state != TrialState.FAIL for trial in trials):
            return 0
        for trial in trials:
            put_back(study, trial)
    return len(trials)


class Objective:
    """A trial: train, report, judge."""

    def __init__(self, task: Task, folder: Path) -> None:
        self.task, self.folder = task, folder

    def __call__(self, trial: Trial) -> float:
        try:
            config = suggest(trial, self.task.space, self.task.base)
            folder = self.place(trial)
            beat(trial)
            trial.set_user_attr("begun", trial.number)
            trial.set_user_attr("worker", os.getpid())
            return self.train(trial, config, folder)
        except (KeyboardInterrupt, StorageInternalError, OSError):  # none of the trial's own faults
            put_back(trial.study, frozen(trial))
            raise
        except runs.Taken as taken:  # by a worker that was only slow: it ends when it hears that others think it dead
            time.sleep(TELL)
            put_back(trial.study, frozen(trial), killed=True)
            trial.set_user_attr("failure", str(taken))
            raise
        except FAILURES as failure:
            if isinstance(failure.__cause__, OSError):  # a disk that is full is none of them either
                put_back(trial.study, frozen(trial))
                raise failure.__cause__ from None
            what = failure.what if isinstance(failure, runs.GoneBad) else str(failure)
            trial.set_user_attr("failure", what or type(failure).__name__)
            raise

    def tidy(self, study: optuna.Study, own: FrozenTrial | None = None) -> None:
        """Remove the trainings whose outcomes the storage knows; of the best trial the network stays.

        Of the failed only one's own: another's may be about to be put back. A trial that was shares its folder.
        """
        trials = study.get_trials(deepcopy=False)
        done = ended(trials)
        best = leader(done)
        in_use = [trial for trial in trials if trial is best or not trial.state.is_finished()]
        kept = {trial.user_attrs.get("folder") for trial in in_use}
        for trial in done:
            known = trial.state != TrialState.FAIL or (own is not None and trial.number == own.number)
            if known and trial.user_attrs.get("folder") not in {*kept, None}:
                shutil.rmtree(self.folder / trial.user_attrs["folder"], ignore_errors=True)
        if best and (self.folder / best.user_attrs["folder"] / checkpoint.MODEL_FILE).exists():
            (self.folder / best.user_attrs["folder"] / checkpoint.STATE_FILE).unlink(missing_ok=True)

    def place(self, trial: Trial) -> Path:
        """The trial's folder, which a second attempt finds again under another number, so that none is in its name; no
        other trial of any study has the same."""
        if "folder" not in trial.user_attrs:
            trial.set_user_attr("folder", f"network-{secrets.token_hex(6)}")
        return self.folder / trial.user_attrs["folder"]

    def train(self, trial: Trial, config: Config, folder: Path) -> float:
        going_on = runs.can_go_on(folder)
        run = training.resume(folder) if going_on else training.start(paced(config, self.task.minutes), folder)
        trial.set_user_attr("config", to_dict(run.config))
        trial.set_user_attr("epochs", run.config.epochs)
        trial.set_user_attr("parameters", sum(p.numel() for p in run.model.parameters()))
        reporter = Reporter(trial)
        outcome = training.train_and_validate(run, [reporter])
        reporter.sum_up(run)
        trial.set_user_attr("errors", [outcome.errors, outcome.n])
        # the state stays beside it until the storage knows the outcome: killed before that, the trial is done again
        checkpoint.save_model(
            folder / checkpoint.MODEL_FILE, run.finished_model().eval(), training.birth_certificate(run)
        )
        return outcome.error_percent


def frozen(trial: Trial) -> FrozenTrial:
    return trial.study.get_trials()[trial.number]


def paced(config: Config, minutes: float) -> Config:
    """The config with as many epochs as fit into the time, to the thousandth."""
    if not minutes:
        return config
    run = training.prepare(config, Path())
    with training.enough_memory(config):
        step, look = measured(run, min(3.0, 3 * minutes))
    seconds = 60 * minutes - 2 * look  # of the epoch that is cut short, and in the end
    epochs = seconds / (len(run.batches) * step + look)
    return replace(config, epochs=max(0.001, math.floor(1000 * epochs) / 1000))


class Pace(NamedTuple):
    """Seconds of one step, and of one look at the validation part."""

    step: float
    look: float


def measured(run: Run, most: float) -> Pace:
    """The pace of a training here, in about `most` seconds for each of the two."""
    step = seconds_each(lambda: training.train_step(run), most)
    batches, model = len(run.splits.validation) / LOOK, run.averaged_model().eval()
    return Pace(step, seconds_each(lambda: look_at_some(run, model), most) * max(1.0, batches) if batches else 0.0)


@torch.inference_mode()
def look_at_some(run: Run, model: Model) -> None:
    """The first validation images through the network, as at the end of an epoch."""
    images = next(in_order(run.splits.validation, LOOK)).images
    model(images.to(run.device)).lengths.cpu()


def seconds_each(act: Callable[[], object], most: float) -> float:
    """The mean of three calls or more, after two that do not count: the first one may compile something."""
    for _ in range(2):
        act()
    began, done = time.monotonic(), 0
    while done < 3 or time.monotonic() < began + most:
        act()
        done += 1
    return (time.monotonic() - began) / done


class Reporter(Watcher):
    """Tells the study how a training goes, and ends one that others have left behind."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.curve: list[list[float]] = []
        self.tenth, self.told = 0, 0.0

    def started(self, run: Run) -> None:
        for past in runs.read_metrics(run.folder):
            if past["kind"] == "epoch":
                self.note(run, past)

    def stepped(self, run: Run, record: dict[str, Any]) -> None:
        if time.monotonic() > self.told + TELL:
            self.told = time.monotonic()
            left = run.seconds / run.step * (run.steps - run.step)
            self.trial.set_user_attr("now", {"epoch": record["epoch"], "left": round(left, 1)})

    def epoch_ended(self, run: Run, record: dict[str, Any]) -> None:
        if self.note(run, record) and self.tenth < 10 and self.trial.should_prune():
            self.sum_up(run)
            raise optuna.TrialPruned

    def note(self, run: Run, record: dict[str, Any]) -> bool:
        """An epoch's error; the first of a new tenth of the training is reported, for a storage is slow to write to."""
        error = record["validation_error_percent"]
        self.curve.append([record["epoch"], record["seconds"], error])
        tenth = 10 * record["step"] // run.steps
        if tenth == self.tenth:
            return False
        self.tenth = tenth
        self.trial.report(error, tenth)
        return True

    def sum_up(self, run: Run) -> None:
        self.trial.set_user_attr("curve", self.curve)
        self.trial.set_user_attr("seconds", round(run.seconds, 2))
