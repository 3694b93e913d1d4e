"""Failures and missing processes, noticed through the key-value store that all processes share.

A collective operation can only wait: it does not say for whom, and NCCL's does not even notice that a process has died.
So a thread of each process looks at the store twice a second. There the first process that fails leaves its message,
and every process writes how many operations it has entered. A process that waits for longer than the limit reads from
these numbers which others have not arrived.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from capsnet.errors import UserError
from capsnet.group.launch import WAIT, Launch

BEAT = 0.5  # seconds between two looks at the store
GRACE = 2.0  # seconds to look for the message of a process that has gone
FAILED = 2  # the exit code


class Watch:
    """What one process sees of the others through the store. `waiting` marks the code that waits for them."""

    def __init__(self, launch: Launch, store: Any, own_store: Any) -> None:
        self.launch, self.store, self.own_store = launch, store, own_store  # a store for each thread
        self.entered, self.doing = 0, "starting"
        self.since: float | None = None  # when the current wait began
        self.ended = threading.Event()
        self.store.set(f"place/{launch.rank}", json.dumps([0, "starting", socket.gethostname()]))
        self.thread = threading.Thread(target=self.look, daemon=True, name="watch")

    def start(self) -> None:
        self.thread.start()

    @contextmanager
    def waiting(self, doing: str, patient: bool = False) -> Iterator[None]:
        """Inside the context this process waits for the others, for the limit at most unless it is patient."""
        self.entered, self.doing = self.entered + 1, doing
        self.since = None if patient else time.monotonic()
        try:
            yield
        finally:
            self.since = None

    def look(self) -> None:
        """Twice a second: tell how far this process is; stop it if the group has failed or a process is missing."""
        told = -1
        while not self.ended.wait(BEAT):
            try:
                if self.entered != told:
                    told = self.entered
                    self.own_store.set(f"place/{self.launch.rank}", self.place())
                if self.own_store.check(["failed"]):
                    leave(FAILED)
                since = self.since
                if since is not None and time.monotonic() - since > self.launch.limit:
                    self.report_missing()
            except RuntimeError:  # the store went with rank 0 or with torchrun
                if not self.ended.is_set():
                    leave(FAILED)

    def place(self) -> str:
        return json.dumps([self.entered, self.doing, socket.gethostname()])

    def report_missing(self) -> None:
        """Say which processes have not arrived, and stop."""
        text = missing_text(self.places(), self.entered, self.doing, self.launch.limit)
        if self.claim(text, self.own_store, final=False):
            print(f"capsnet: {text}", file=sys.__stderr__, flush=True)
        leave(FAILED)

    def places(self) -> dict[int, tuple[int, str, str]]:
        """How many operations each process has entered, what it did last, and its machine."""
        found = {}
        for rank in range(self.launch.size):
            known = self.own_store.check([f"place/{rank}"])
            found[rank] = tuple(json.loads(self.own_store.get(f"place/{rank}"))) if known else (-1, "", "")
        return found

    def claim(self, message: str, store: Any = None, final: bool = True) -> bool:
        """Whether this process is the first that fails; then its message is the one of the group."""
        store = store or self.store
        try:
            if store.add("failures", 1) != 1:
                return False
            store.set("failed", message)
        except RuntimeError:  # no store, no group: rank 0 has gone
            return self.launch.rank == 0
        write_error(self.launch, message, final)
        return True

    def failed(self, seconds: float = GRACE) -> bool:
        """Whether a process has said why it failed, waiting a moment for it."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                if self.store.check(["failed"]):
                    return True
            except RuntimeError:
                return False
            time.sleep(0.05)
        return False

    def stop(self) -> None:
        self.ended.set()
        self.thread.join(2 * BEAT)


def missing_text(places: dict[int, tuple[int, str, str]], entered: int, doing: str, limit: float) -> str:
    """Which processes are missing, and on which machines.

    >>> missing_text({0: (7, "step 6", "ann"), 1: (3, "step 2", "bob")}, 7, "step 6", 600).partition(" Check")[0]
    'rank 1 on bob is missing: it has not reached step 6 within 600 s, and was last seen at step 2.'
    """
    late = {rank: place for rank, place in places.items() if place[0] < entered}
    if not late:
        return (
            f"all {len(places)} processes reached {doing}, but it has not ended within {limit:g} s: check the network "
            f"between the machines; {WAIT} sets the limit in seconds."
        )
    who = " and ".join(f"rank {rank}{f' on {host}' if host else ''}" for rank, (_, _, host) in late.items())
    verbs = ("is", "it has", "was") if len(late) == 1 else ("are", "they have", "were")
    seen = ", ".join(dict.fromkeys(was or "no point yet" for _, was, _ in late.values()))
    return (
        f"{who} {verbs[0]} missing: {verbs[1]} not reached {doing} within {limit:g} s, and {verbs[2]} last seen at "
        f"{seen}. Check that machine and its network; {WAIT} sets the limit in seconds."
    )  # fmt: skip


def write_error(launch: Launch, message: str, final: bool) -> None:
    """Leave the reason where torchrun looks for it, so that its own report names it too."""
    if launch.error_file is None:
        return
    extra = {"timestamp": str(int(time.time()))}
    report = {"message": {"message": message, "extraInfo": extra}, "capsnet": final}
    with suppress(OSError):  # a full disk must not hide the reason on the terminal
        launch.error_file.parent.mkdir(parents=True, exist_ok=True)
        launch.error_file.write_text(json.dumps(report))


def has_failed_for_good(launch: Launch) -> bool:
    """Whether the attempt before this restart failed for a reason that a restart does not remove, and has said so."""
    if launch.error_file is None or not launch.restarts:
        return False
    attempts = launch.error_file.parents[2]
    for file in attempts.glob(f"attempt_{launch.restarts - 1}/*/error.json"):
        try:
            if json.loads(file.read_text()).get("capsnet"):
                write_error(launch, json.loads(file.read_text())["message"]["message"], True)
                return True
        except (OSError, ValueError, KeyError):
            continue
    return False


def leave(code: int) -> None:
    """End the process at once: its main thread may be inside an operation that never returns."""
    if sys.__stderr__ is not None and sys.__stderr__.isatty():
        print("\033[?25h", end="", file=sys.__stderr__, flush=True)  # the cursor, which a progress bar hides
    os._exit(code)


class Lost(UserError):
    """The connection to another process is gone."""
