"""Worker processes of a search: started, replaced when they are killed, and stopped with their parent.

A worker is a process that runs the same command and finds its parent and its deadline in the environment.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO

import torch

from capsnet import plugins

WORKER = "CAPSNET_SEARCH_WORKER"  # set for workers: the parent's process id, and when to stop by the wall clock
INTERRUPTED = 130  # exit code of a worker that somebody else stopped
MOST_REPLACED = 20  # they may all be killed for the same reason


def worker_of() -> tuple[int, float] | None:
    """The parent of this process and its deadline by the wall clock, if this is a worker."""
    parent, _, until = os.environ.get(WORKER, "").partition(" ")
    return (int(parent), float(until)) if parent else None


class Crew:
    """The workers of one command."""

    def __init__(self, argv: list[str], size: int, until: float, say: Callable[[str], None]) -> None:
        self.command = [sys.executable, "-m", "capsnet", "search", *plugins.flags(), *argv]
        deadline = time.time() + until - time.monotonic() if until < math.inf else until
        threads = max(1, torch.get_num_threads() // size)
        self.environment = {**os.environ, "OMP_NUM_THREADS": str(threads), WORKER: f"{os.getpid()} {deadline}"}
        self.say, self.replaced, self.last_words = say, 0, ""
        self.workers = [self.hire() for _ in range(size)]

    def hire(self) -> tuple[subprocess.Popen[bytes], IO[str]]:
        """A worker in a separate session, so that Ctrl-C reaches it once, through its parent."""
        log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (it lives as long as the worker)
        process = subprocess.Popen(
            self.command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
        return process, log

    def look_after(self) -> bool:
        """Replace workers that were killed, and keep the last message of those that failed; whether any is running."""
        for worker, log in [each for each in self.workers if each[0].poll() is not None]:
            self.workers.remove((worker, log))
            if worker.returncode < 0 or worker.returncode == INTERRUPTED:
                self.say("a worker was killed; its trial is queued again")
                if self.replaced < MOST_REPLACED:
                    self.replaced += 1
                    self.workers.append(self.hire())
            elif worker.returncode > 0:
                log.seek(0)
                lines = log.read().strip().splitlines() or [f"a worker ended with code {worker.returncode}"]
                self.last_words = lines[-1].removeprefix("capsnet: ").rstrip(".") + "."
            log.close()
        return bool(self.workers)

    def stop(self) -> None:
        """Let every worker save its training and queue it again; a second Ctrl-C does not wait for that."""
        try:
            for worker, _ in self.workers:
                worker.send_signal(signal.SIGINT)
            for worker, _ in self.workers:
                worker.wait()
        except KeyboardInterrupt:
            for worker, _ in self.workers:
                worker.kill()


@contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C, SIGTERM and SIGHUP raise KeyboardInterrupt, even where the shell ignores them."""
    numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
