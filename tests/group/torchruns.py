"""Starting `torchrun -m capsnet …` in a test, finding its processes, and reading what a training has written."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from capsnet.io import checkpoint
from capsnet.train import runs

HERE = Path(__file__).parent
TINY_CNN = [
    *("--plugin", str(HERE / "bars.py"), "--data", "bars", "--model", "cnn", "--model.channels", "4", "4"),
    *("--model.kernels", "3", "3", "--model.pool", "2", "1", "--model.hidden", "8", "--model.norm"),
    *("--validation", "16", "--batch-size", "8", "--lr", "0.002", "--device", "cpu", "--save-every", "0.1"),
    *("--no-report", "--no-tensorboard"),
]


def torchrun(folder: Path, *words: str, size: int = 2, restarts: int = 9, **environment: str) -> subprocess.Popen[str]:
    """`torchrun -m capsnet WORDS` in a folder; what it says goes to the file `said` there."""
    options = ["--standalone", "--nproc-per-node", str(size), "--max-restarts", str(restarts)]
    return started(folder, [*options, "-m", "capsnet", *words], environment)


def one_of_two_machines(folder: Path, port: int, *words: str) -> subprocess.Popen[str]:
    """The torchrun of one machine of two, with a process of its own."""
    options = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--max-restarts", "9"]
    options += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "test"]
    return started(folder, [*options, "-m", "capsnet", *words], {})


def started(folder: Path, words: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--monitor-interval", "0.1", *words]
    with (folder / "said").open("w") as said:
        return subprocess.Popen(
            command, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1", **environment}, text=True,
            stdout=said, stderr=subprocess.STDOUT,
        )  # fmt: skip


def workers(agent: subprocess.Popen[str]) -> dict[int, int]:
    """The process id of each rank that torchrun runs now."""
    found = {}
    for child in Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split():
        try:
            words = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        ranks = [int(word[5:]) for word in words if word.startswith(b"RANK=")]
        found |= {rank: int(child) for rank in ranks}
    return found


def wait_for(condition: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def step_of(run: Path) -> int:
    """The step of the last checkpoint of a run, 0 if there is none."""
    try:
        return int(checkpoint.read_tensors(run / checkpoint.STATE_FILE)[1]["state"]["step"])
    except (ValueError, OSError):
        return 0


def ended(agent: subprocess.Popen[str], folder: Path, seconds: float = 240) -> str:
    """What torchrun and its processes said until the end."""
    agent.wait(timeout=seconds)
    return (folder / "said").read_text()


def same_weights(one: Path, other: Path) -> bool:
    """Whether two finished runs have the same bits."""
    (first, _), (second, _) = (checkpoint.read_tensors(run / checkpoint.MODEL_FILE) for run in (one, other))
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def losses(run: Path) -> list[tuple[int, float]]:
    return [(record["step"], record["loss"]) for record in runs.read_metrics(run) if record["kind"] == "train"]
