"""`torchrun -m capsnet train`: a killed process changes nothing, and whatever stops one stops all with one message."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from test_group import free_port, start_ranks
from torchruns import (
    HERE,
    TINY_CNN,
    ended,
    losses,
    one_of_two_machines,
    same_weights,
    step_of,
    torchrun,
    wait_for,
    workers,
)

from capsnet.cli import main
from capsnet.io import checkpoint

pytestmark = pytest.mark.usefixtures("forget_plugins")
TRAIN = ["train", *TINY_CNN, "--epochs", "20"]
RUN = Path("runs/quick-bars")


def killed(folder: Path, moments: list[tuple[int, Callable[[], bool]]], words: list[str]) -> str:
    """Train in `folder`, killing a rank at each of these moments; what was said."""
    agent = torchrun(folder, *words)
    try:
        for rank, moment in moments:
            wait_for(lambda moment=moment: moment() or agent.poll() is not None)  # type: ignore[misc]
            if (process := workers(agent).get(rank)) and agent.poll() is None:
                os.kill(process, signal.SIGKILL)
        return ended(agent, folder)
    finally:
        agent.kill()


def test_a_killed_process_changes_nothing(tmp_path: Path) -> None:
    """Rank 0 dies after a checkpoint, torchrun restarts both, and the run ends with the bits of an undisturbed one."""
    quiet, hurt = tmp_path / "quiet", tmp_path / "hurt"
    quiet.mkdir()
    hurt.mkdir()
    undisturbed = start_ranks(["-m", "capsnet", *TRAIN, "--out", str(quiet / RUN)])
    said = killed(hurt, [(0, lambda: step_of(hurt / RUN) > 2)], TRAIN)
    for process in undisturbed:
        _, err = process.communicate(timeout=200)
        assert process.returncode == 0, err
    assert "exitcode: -9" in said
    assert said.count("test error") == 1
    assert same_weights(hurt / RUN, quiet / RUN)
    assert losses(hurt / RUN) == losses(quiet / RUN)
    assert [path.name for path in (hurt / "runs").iterdir()] == [RUN.name]  # the same folder again
    record = json.loads((hurt / RUN / "results.json").read_text())
    assert record["certificate"]["processes"] == 2
    assert record["test"]["n"] == 21


@pytest.mark.slow
def test_processes_killed_at_random_moments_change_nothing(tmp_path: Path) -> None:
    words = ["train", *TINY_CNN, "--epochs", "80"]
    draw = random.Random(0)
    for name in ("quiet", "hurt"):
        (tmp_path / name).mkdir()
    quiet = torchrun(tmp_path / "quiet", *words)
    run = tmp_path / "hurt" / RUN

    def later() -> Callable[[], bool]:
        end: list[float] = []

        def moment() -> bool:  # some time after the processes have begun to train
            if not end and (run / "config.json").exists():
                end.append(time.monotonic() + 6 * draw.random())
            return bool(end) and time.monotonic() > end[0]

        return moment

    during_a_save = lambda: any(run.glob(".state*.part"))
    moments = [
        (0, lambda: (run / "config.json").exists()),
        (1, later()),
        (0, during_a_save),
        (0, later()),
        (1, later()),
    ]
    said = killed(tmp_path / "hurt", moments, words)
    ended(quiet, tmp_path / "quiet")
    assert said.count("exitcode: -9") >= 3
    assert said.count("test error") == 1
    assert same_weights(run, tmp_path / "quiet" / RUN)
    assert not list(run.glob(".*.part"))


@pytest.mark.slow
def test_two_machines_without_a_shared_folder_train_together(tmp_path: Path) -> None:
    """Two torchruns that meet at an address, each in a folder of its own; the process of one of them is killed."""
    quiet = tmp_path / "quiet"
    undisturbed = start_ranks(["-m", "capsnet", *TRAIN, "--out", str(quiet)])
    port, folders = free_port(), [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    agents = [one_of_two_machines(folder, port, *TRAIN, "--out", "run") for folder in folders]
    wait_for(lambda: any(step_of(folder / "run") > 2 for folder in folders))
    (other,) = (agent for agent, folder in zip(agents, folders, strict=True) if not (folder / "run").exists())
    os.kill(workers(other)[1], signal.SIGKILL)
    said = [ended(agent, folder) for agent, folder in zip(agents, folders, strict=True)]
    for process in undisturbed:
        process.communicate(timeout=200)
    assert "".join(said).count("test error") == 1
    (run,) = (folder / "run" for folder in folders if (folder / "run").exists())
    assert same_weights(run, quiet)


@pytest.mark.slow
def test_a_stopped_run_continues_with_another_number_of_processes_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = torchrun(tmp_path, "train", *TINY_CNN, "--epochs", "2000")
    run = tmp_path / RUN
    wait_for(lambda: step_of(run) > 2)
    agent.terminate()
    said = ended(agent, tmp_path)
    assert f"resume with: torchrun --nproc-per-node 2 -m capsnet train --resume {RUN}" in said
    step = step_of(run)
    state = checkpoint.read_tensors(run / checkpoint.STATE_FILE)
    state[1]["config"]["epochs"] = 1 + step // 6
    checkpoint.write_tensors(run / checkpoint.STATE_FILE, *state)
    monkeypatch.chdir(tmp_path)
    words = ["train", "--resume", str(RUN), "--plugin", str(HERE / "bars.py"), "--no-report", "--no-tensorboard"]
    assert main(words) == 0
    assert f"This run had 2 processes until step {step} and continues with 1" in capsys.readouterr().err


BREAKS = {
    "load": ("raise UserError('the data cannot be read.')", "the data cannot be read"),
    "bug": ("raise RuntimeError('a bug')", "RuntimeError: a bug"),
    "memory": ("raise MemoryError", "there is not enough memory for this run"),
}


def broken(folder: Path, what: str, rank: int = 1) -> Path:
    """The plugin with the dataset, which fails in one rank."""
    code = (HERE / "bars.py").read_text()
    trouble = f"    if os.environ['RANK'] == '{rank}':\n        {what}\n    return split("
    code = code.replace("    return split(", trouble)
    code = code.replace("import torch\n", "import os\n\nimport torch\n\nfrom capsnet.errors import UserError\n", 1)
    (folder / "bars.py").write_text(code)
    return folder / "bars.py"


def with_plugin(file: Path, *more: str) -> list[str]:
    words = [str(file) if word.endswith("bars.py") else word for word in TINY_CNN]
    return ["-m", "capsnet", "train", *words, *more]


def said_by(processes: list[subprocess.Popen[str]]) -> str:
    """What failing processes say together; each of them ends with exit code 2."""
    said = ""
    for process in processes:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 2, out + err
        said += err
    assert said.count("capsnet: ") == 1, said
    return said


@pytest.mark.slow
@pytest.mark.parametrize("name", BREAKS)
def test_a_process_that_fails_stops_all_with_its_message(tmp_path: Path, name: str) -> None:
    code, message = BREAKS[name]
    words = with_plugin(broken(tmp_path, code), "--out", str(tmp_path / "run"))
    said = said_by(start_ranks(words))
    assert "capsnet: rank 1 on " in said
    assert message in said


@pytest.mark.slow
def test_a_mistake_of_all_processes_is_reported_by_one(tmp_path: Path) -> None:
    said = said_by(start_ranks(["-m", "capsnet", "train", "--data", "mnisst"]))
    assert said.startswith("capsnet: there is no dataset 'mnisst'")


@pytest.mark.slow
def test_a_diverging_run_stops_all_and_is_not_tried_again(tmp_path: Path) -> None:
    agent = torchrun(tmp_path, *TRAIN, "--lr", "1e30", "--clip", "0", restarts=3)
    said = ended(agent, tmp_path)
    assert agent.returncode != 0
    ours = [line for line in said.splitlines() if line.startswith("capsnet: ")]
    assert len(ours) == 1
    assert "the loss became nan at step" in ours[0] or "is not finite" in ours[0]


@pytest.mark.slow
def test_another_version_of_a_plugin_or_of_the_data_is_refused(tmp_path: Path) -> None:
    for change, what in (("# another version", "contents of the plugin bars.py"), ("", "test images of bars")):
        (tmp_path / "other").mkdir(exist_ok=True)
        code = (HERE / "bars.py").read_text()
        ours, theirs = tmp_path / "bars.py", tmp_path / "other" / "bars.py"
        ours.write_text(code)
        theirs.write_text(code + change if change else code.replace("toy_set(21, 2)", "toy_set(21, 3)"))
        first, second = start_ranks(
            ["-c", START, str(ours), str(theirs), *with_plugin(Path("bars.py"))[3:], "--out", str(tmp_path / "run")]
        )
        said = said_by([first, second])
        assert "capsnet: rank 1 has other contents of the plugin bars.py" in said
        assert f"other {what}" in said


START = """
import os, sys
from capsnet.cli import main
file = sys.argv[1 + int(os.environ["RANK"])]
words = [file if word == "bars.py" else word for word in sys.argv[3:]]
sys.exit(main(["train", *words]))
"""


@pytest.mark.slow
def test_a_process_that_hangs_is_named(tmp_path: Path) -> None:
    words = with_plugin(HERE / "bars.py", "--epochs", "5000", "--out", str(tmp_path / "run"))
    first, second = start_ranks(words, CAPSNET_WAIT="5")
    wait_for(lambda: step_of(tmp_path / "run") > 2)
    second.send_signal(signal.SIGSTOP)
    _, err = first.communicate(timeout=60)
    second.kill()
    second.communicate()
    assert first.returncode == 2
    line = next(line for line in err.splitlines() if line.startswith("capsnet: "))
    assert "rank 1 on " in line
    assert "is missing: it has not reached step " in line
    assert "within 5 s" in line


@pytest.mark.slow
def test_several_processes_evaluate_and_reproduce_as_one(
    tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(run, tmp_path / "model")
    capsys.readouterr()
    assert main(["evaluate", "model", "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    agent = torchrun(tmp_path, "evaluate", "model", "--json")
    assert json.loads(ended(agent, tmp_path).splitlines()[-1]) == alone
    agent = torchrun(tmp_path, "reproduce", "multimnist", "--budget", "smoke", "--json")
    rows = json.loads(ended(agent, tmp_path, 600).splitlines()[-1])["rows"]
    assert agent.returncode == 0
    assert all(row["outcome"]["n"] == row["made"]["tested_on"] for row in rows if "n" in row["outcome"])


@pytest.mark.slow
def test_other_verbs_are_refused(tmp_path: Path) -> None:
    agent = torchrun(tmp_path, "models", restarts=0)
    assert "capsnet: models runs in one process: start it without torchrun." in ended(agent, tmp_path)
    assert agent.returncode != 0
