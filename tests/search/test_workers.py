"""Worker processes: they share a study, survive each other, and nothing is lost or run twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from optuna.storages import RetryHeartbeatStaleTrialCallback
from optuna.trial import FrozenTrial, TrialState

from capsnet.cli import main
from capsnet.errors import UserError
from capsnet.search.storage import storage_url
from capsnet.search.study import ended, load_study

PATIENCE = 240.0  # seconds, on a busy machine
SPACE = ["--space", "lr=0.001..0.01:log", "--study", "s", "--grace", "5", "--json"]
pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")


class Commands:
    """`capsnet` commands in processes of their own, which end with the test."""

    def __init__(self, stack: ExitStack) -> None:
        self.stack = stack

    def start(self, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "capsnet", *words]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.stack.callback(finish, process)
        return process


def finish(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.terminate()
    if process.stdout and not process.stdout.closed:
        process.communicate(timeout=PATIENCE)


@pytest.fixture
def capsnet() -> Iterator[Commands]:
    with ExitStack() as stack:
        yield Commands(stack)


def trials() -> list[FrozenTrial]:
    """The trials of the study; none while it is being created."""
    if not Path("runs/search/s.db").exists():
        return []
    try:
        return load_study("s", storage_url("", "s")).trials
    except UserError:
        return []


def wait_for(condition: Any, process: subprocess.Popen[str]) -> Any:
    """What a condition gives as soon as it gives something."""
    until = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.25)  # a look at the storage costs as much as a step
    return found


def training() -> set[int]:
    """The workers that have a checkpoint of their trial."""
    begun = [t for t in trials() if t.state == TrialState.RUNNING and "config" in t.user_attrs]
    return {trial.user_attrs["worker"] for trial in begun}


def told(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    return json.loads(out)


def is_alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_the_trial_of_a_killed_worker_is_run_again_and_no_other(capsnet: Commands, flags: list[str]) -> None:
    process = capsnet.start("search", *SPACE, "--trials", "2", "--workers", "2", *flags, "--epochs", "30")
    victim = min(wait_for(training, process))
    lost = next(trial for trial in trials() if trial.user_attrs.get("worker") == victim)
    os.kill(victim, signal.SIGKILL)
    found = told(process)
    assert found["counts"] == {"complete": 2, "pruned": 0, "fail": 0}
    (again,) = (trial for trial in trials() if lost.number in RetryHeartbeatStaleTrialCallback.retry_history(trial))
    assert again.params == lost.params
    assert again.user_attrs["folder"] == lost.user_attrs["folder"]
    assert [state.name for state in (trial.state for trial in trials())].count("COMPLETE") == 2
    assert len(trials()) == 3


def test_an_interrupted_search_resumes_from_its_checkpoint_with_the_same_command(
    capsnet: Commands, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["search", *SPACE, "--trials", "1", *flags, "--epochs", "40"]
    process = capsnet.start(*command)
    wait_for(lambda: list(Path("runs/search").rglob("metrics.jsonl")), process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert f"resume with: capsnet search {' '.join(SPACE)}" in err
    assert [trial.state.name for trial in trials()] == ["FAIL", "WAITING"]
    (metrics,) = Path("runs/search").rglob("metrics.jsonl")
    before = metrics.read_text().splitlines()
    assert main(command) == 0
    (trial,) = json.loads(capsys.readouterr().out)["trials"]
    assert [epoch for epoch, _, _ in trial["curve"]] == list(range(1, 41))
    assert metrics.read_text().splitlines()[: len(before)] == before  # nothing was trained twice
    assert trial["folder"] == metrics.parent.name


GUARDED = """
import os
from dataclasses import fields
from capsnet import data
from capsnet.data.registry import DatasetInfo, register

class Guarded(data.Dataset):
    def gather(self, *_, **__):
        raise AssertionError("a search used the test set")

def load(request):
    splits = data.load("folder:photos", validation=request.validation, seed=request.seed, image_size=12)
    test = Guarded(**{field.name: getattr(splits.test, field.name) for field in fields(splits.test) if field.init})
    return data.Splits(splits.train, splits.validation, test)

register(DatasetInfo("guarded", "squares whose test set must not be used", load, preset="own-images"))
with open("loaded.txt", "a") as file:
    print(os.getpid(), file=file)
"""


def test_two_commands_share_a_study_load_plugins_and_run_exactly_the_trials_asked_for_without_the_test_set(
    capsnet: Commands, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("plugin.py").write_text(GUARDED)
    more = ["--data", "guarded", "--epochs", "1", "--plugin", "plugin.py"]
    command = ["search", *SPACE, "--space", "class_dim=2..5", *flags, *more]
    process = capsnet.start(*command)
    assert main(command) == 0, capsys.readouterr().err
    assert told(process)["counts"] == {"complete": 4, "pruned": 0, "fail": 0}
    assert sorted(trial.params["model.class_dim"] for trial in trials()) == list(range(2, 6))
    workers = {trial.user_attrs["worker"] for trial in trials()}
    assert {process.pid, os.getpid(), *workers} <= set(map(int, Path("loaded.txt").read_text().split()))


def test_workers_end_with_their_parent_and_lose_nothing(capsnet: Commands, flags: list[str]) -> None:
    command = ["search", *SPACE, "--trials", "2", *flags, "--epochs", "15"]
    process = capsnet.start(*command)
    (worker,) = wait_for(training, process)
    process.kill()
    process.wait()
    begun = len(trials())  # one, or on a busy machine two
    until = time.monotonic() + PATIENCE
    while is_alive(worker) and time.monotonic() < until:
        time.sleep(0.1)
    assert [trial.state.name for trial in trials()] == begun * ["COMPLETE"]  # it finished its trial and began no other
    assert main(command) == 0
    assert len(ended(trials())) == len(trials()) == 2


def test_what_stops_the_workers_is_one_sentence(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", *SPACE, "--space", "lr=0.1..0.2", *flags, "--model.primary-kernel", "99"]) == 2
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("capsnet: "))
    assert "the last 10 trials failed" in line
    assert "too small" in line
    assert "resume with: capsnet search" in line


def test_without_optuna_it_says_what_to_install() -> None:
    code = "import sys; sys.modules['optuna'] = None; from capsnet.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "search", "--space", "lr=0.1,0.2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "capsnet: a search needs Optuna: pip install 'capsnet[search]'.\n"
