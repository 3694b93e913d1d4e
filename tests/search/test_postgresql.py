"""A search in PostgreSQL from several machines: nothing is lost, and nothing is tried twice."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import optuna
import pytest
from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.pool import NullPool

import postgres
from capsnet.cli import main
from capsnet.search.storage import storage_url, turn

pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
MACHINES = ("one", "two", "three")
CHOICES = list(range(2, 9))
PATIENCE = 400.0  # seconds, on a busy machine


@pytest.fixture(scope="module")
def database() -> Iterator[str]:
    with postgres.server() as url:
        yield url


class Machines:
    """Several folders that share nothing but a database, as machines do, with a command in each."""

    def __init__(self, url: str, words: list[str], stack: ExitStack) -> None:
        self.url = storage_url(url, "s")
        command = [sys.executable, "-m", "capsnet", "search", "--storage", url, *words]
        for name in MACHINES:
            shutil.copytree("photos", f"{name}/photos")
        self.processes = {
            name: stack.enter_context(
                subprocess.Popen(command, cwd=name, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            )
            for name in MACHINES
        }
        stack.callback(lambda: [process.terminate() for process in self.processes.values()])

    def trials(self) -> list[FrozenTrial]:
        """The trials of the study; none before it is created."""
        with turn(self.url, "s"):
            storage = RDBStorage(self.url, {"poolclass": NullPool})
        if "s" not in optuna.get_all_study_names(storage):
            return []
        return optuna.load_study(study_name="s", storage=storage).trials

    def training(self) -> dict[int, FrozenTrial]:
        """The trials that have a checkpoint, by the process of their worker."""
        begun = [t for t in self.trials() if t.state == TrialState.RUNNING and "config" in t.user_attrs]
        return {trial.user_attrs["worker"]: trial for trial in begun}

    def two_training(self) -> dict[int, FrozenTrial]:
        """Wait until two machines train; the third may still be starting."""
        until = time.monotonic() + PATIENCE
        while len(found := self.training()) < 2:
            for process in self.processes.values():
                assert process.poll() is None, process.communicate()
            assert time.monotonic() < until
            time.sleep(0.5)
        return found


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.slow
def test_three_machines_share_a_search_and_one_is_lost(database: str, tiny_flags: list[str]) -> None:
    space = ["--space", f"class_dim={','.join(map(str, CHOICES))}", "--study", "s", "--grace", "5", "--json"]
    with ExitStack() as stack:
        machines = Machines(database, [*space, *tiny_flags, "--epochs", "30"], stack)
        victim, lost = machines.two_training().popitem()
        (gone,) = (name for name, process in machines.processes.items() if process.pid == parent_of(victim))
        machines.processes[gone].send_signal(signal.SIGKILL)  # first: it would replace its worker
        os.kill(victim, signal.SIGKILL)
        told = {name: process.communicate(timeout=PATIENCE) for name, process in machines.processes.items()}
        for name, process in machines.processes.items():
            assert (process.returncode == 0) == (name != gone), told[name]
        trials = machines.trials()
    complete = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    assert Counter(trial.params["model.class_dim"] for trial in complete) == Counter(map(str, CHOICES))
    (again,) = (trial for trial in trials if lost.number in RetryHeartbeatStaleTrialCallback.retry_history(trial))
    assert again.params == lost.params
    assert [trial.number for trial in trials if trial.state == TrialState.FAIL] == [lost.number]
    assert len(trials) == len(CHOICES) + 1
    (counts, _) = (json.loads(out)["counts"] for name, (out, _) in told.items() if name != gone)
    assert counts == {"complete": len(CHOICES), "pruned": 0, "fail": 0}


@pytest.mark.slow
def test_a_turn_in_the_database_ends_with_the_process_that_has_it(database: str) -> None:
    url = storage_url(database, "s")
    code = f"import time; from capsnet.search.storage import turn; ours = turn({url!r}, 's'); print(1, flush=True); "
    code += "time.sleep(99)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        process.stdout.readline()
        waiting = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        with waiting:
            with pytest.raises(subprocess.TimeoutExpired):
                waiting.wait(3)
            process.kill()
            assert waiting.stdout
            assert waiting.stdout.readline() == "1\n"
            waiting.kill()
    with turn(url, "s") as ours:
        ours.release()  # again at the end: that is allowed


def test_without_the_driver_it_says_what_to_install(
    tiny_flags: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    for words in (["--space", "class_dim=2,3", *tiny_flags], ["--report"]):
        assert main(["search", "--storage", "postgresql://me@127.0.0.1:1/x", *words]) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert said == "capsnet: a search in PostgreSQL needs its driver: pip install 'capsnet[postgresql]'."


def test_a_server_that_does_not_answer_is_one_sentence(
    tiny_flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    url = "postgresql://me:secret@127.0.0.1:1/x"
    assert main(["search", "--storage", url, "--space", "class_dim=2,3", *tiny_flags]) == 2
    said = capsys.readouterr().err
    assert "cannot use the storage postgresql+psycopg://me:***@127.0.0.1:1/x" in said
    assert "secret" not in said
    assert "Traceback" not in said
