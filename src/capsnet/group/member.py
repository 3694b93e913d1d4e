"""A process's part in a group, from start to end: join, work, and one message for the group if something fails."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import traceback
import uuid
from collections.abc import Callable
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import replace
from datetime import timedelta
from typing import TextIO

import torch
import torch.distributed as dist

from capsnet.errors import UserError, explained
from capsnet.group.base import Group, member_of
from capsnet.group.launch import Launch
from capsnet.group.processes import Processes, first_line
from capsnet.group.watch import FAILED, Lost, Watch, has_failed_for_good

HEAD_START = 1.0  # seconds that rank 0 has to report a mistake that all processes make


class Started(Group):
    """A group of one process that torchrun started, and may have restarted."""

    def __init__(self, launch: Launch) -> None:
        self.restarts = launch.restarts


class NoLeader(UserError):
    """Rank 0 is missing."""


def take_part(launch: Launch, work: Callable[[], int]) -> int:
    """Do the work as a member of the group that torchrun has started; returns the exit code."""
    if launch.size == 1:
        with member_of(Started(launch)):
            return work()
    if has_failed_for_good(launch):
        return FAILED
    stderr = sys.stderr
    with ExitStack() as stack:
        if launch.rank:  # rank 0 alone talks to the user
            silence = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(redirect_stdout(silence))
            stack.enter_context(redirect_stderr(silence))
        try:
            launch, watch = join(launch)
        except UserError as error:
            first = 1 if isinstance(error, NoLeader) else 0  # of those that know
            return complain(str(error), stderr) if launch.rank == first else FAILED
        return as_member(launch, watch, work, stderr)


def join(launch: Launch) -> tuple[Launch, Watch]:
    """Meet the other processes; the error names those that do not arrive within the limit."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    limit = timedelta(seconds=launch.limit)
    longer = timedelta(days=7)  # the watch notices what is missing and knows names; patience has no limit

    def client(serves: bool) -> dist.Store:
        try:
            return dist.TCPStore(address, port, launch.size, serves, limit, wait_for_workers=False, multi_tenant=True)
        except RuntimeError as error:
            raise NoLeader(f"{address}:{port} does not answer ({first_line(error)}): is rank 0 running?") from None

    torchruns = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    shared = client(launch.rank == 0 and not torchruns)
    number, restarts = meet(launch, shared)
    ours, own = (dist.PrefixStore(f"capsnet/{number}", store) for store in (shared, client(False)))
    launch = replace(launch, restarts=restarts)
    watch = Watch(launch, ours, own)
    wait_for_all(launch, watch, shared, number)
    if launch.local_rank < torch.cuda.device_count():
        torch.cuda.set_device(launch.local_rank)
    kinds = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    store = dist.PrefixStore("torch", ours)
    dist.init_process_group(kinds, store=store, rank=launch.rank, world_size=launch.size, timeout=longer)
    watch.start()
    return launch, watch


def meet(launch: Launch, store: dist.Store) -> tuple[int, int]:
    """The number of this attempt and how often the group was restarted, from rank 0.

    The store of torchrun outlives an attempt, and a machine counts only its own failures as restarts. So rank 0 numbers
    the attempts, and every other process asks with a unique word, because an older answer may still be there.
    """
    if not launch.rank:
        number = store.add("capsnet/attempts", 1)
        return number, max(number - 1, launch.restarts)
    word = uuid.uuid4().hex
    store.set(f"capsnet/asks/{launch.rank}", word)
    end = time.monotonic() + launch.limit
    while not store.check([f"capsnet/told/{word}"]):
        if time.monotonic() > end:
            raise NoLeader(f"rank 0 has not started within {launch.limit:g} s: look at the messages of its machine.")
        time.sleep(0.05)
    number, restarts = json.loads(store.get(f"capsnet/told/{word}"))
    return number, restarts


def wait_for_all(launch: Launch, watch: Watch, store: dist.Store, number: int) -> None:
    """Wait until every process has written its place in the store; rank 0 tells them the attempt."""
    end = time.monotonic() + launch.limit
    while missing := [rank for rank, place in watch.places().items() if place[0] < 0]:
        for asks in [f"capsnet/asks/{rank}" for rank in missing if launch.rank == 0]:
            if store.check([asks]):
                store.set(f"capsnet/told/{store.get(asks).decode()}", json.dumps([number, launch.restarts]))
        if time.monotonic() > end:
            raise UserError(
                f"rank {', '.join(map(str, missing))} of {launch.size} has not started within {launch.limit:g} s: "
                f"start torchrun on every machine, with the same --nnodes and --rdzv-endpoint."
            )
        time.sleep(0.05)


def as_member(launch: Launch, watch: Watch, work: Callable[[], int], stderr: TextIO) -> int:
    """Do the work; the first process that fails says why, the others end in silence."""
    group = Processes(launch, watch)
    try:
        with member_of(group):
            code = work()
            group.doing = "the end"
            group.barrier()  # nobody leaves before the files are written
            watch.ended.set()  # from now on, the end of a process is not a failure
    except KeyboardInterrupt:
        return 130
    except Lost as error:
        code = FAILED
        if not watch.failed() and watch.claim(str(error), final=False):
            complain(f"{error} The report of torchrun says which one ended.", stderr)
    except (UserError, OSError) as error:
        code = fail(launch, watch, explained(error) if isinstance(error, OSError) else str(error), stderr)
    except Exception:
        code = fail(launch, watch, traceback.format_exc(), stderr)
    else:
        dist.destroy_process_group()
    watch.stop()
    return code


def fail(launch: Launch, watch: Watch, message: str, stderr: TextIO) -> int:
    """Report a failure, unless another process was first; rank 0 is the first to report what all of them run into."""
    if launch.rank and watch.failed(HEAD_START):
        return FAILED
    if watch.claim(message):
        where = f"rank {launch.rank} on {socket.gethostname()}: " if launch.rank else ""
        complain(where + message, stderr)
    return FAILED


def complain(message: str, stderr: TextIO) -> int:
    print(f"capsnet: {message}", file=stderr, flush=True)
    return FAILED
