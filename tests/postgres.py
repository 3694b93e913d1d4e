"""A PostgreSQL server of its own for a test: Debian's binaries, a temporary folder, and a Unix socket."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PATIENCE = 60.0  # seconds, on a busy machine
QUICK = ("fsync=off", "full_page_writes=off", "listen_addresses=", "max_connections=60")


def binaries() -> Path:
    """The newest version that is installed."""
    found = [Path(path).parent for path in [shutil.which("initdb")] if path]
    found += sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name))
    if not found:
        pytest.fail("this test starts PostgreSQL, which is missing: apt-get install postgresql")
    return found[-1]


@contextmanager
def server() -> Iterator[str]:
    """The URL of an empty database. PostgreSQL refuses to run as root: it becomes the user of Debian's package then."""
    programs, user = binaries(), "postgres" if os.geteuid() == 0 else None
    folder = Path(tempfile.mkdtemp(prefix="pg-"))  # not the test's own folder, which other users cannot enter
    try:
        if user:
            shutil.chown(folder, user, user)
        options: dict = {"user": user, "group": user, "extra_groups": []} if user else {}
        make = [programs / "initdb", "--auth=trust", "--username=search", "--no-sync", "--pgdata", folder / "data"]
        subprocess.run(make, check=True, capture_output=True, cwd=folder, **options)
        settings = [word for setting in QUICK for word in ("-c", setting)]
        command = [programs / "postgres", "-D", folder / "data", "-k", folder, *settings]
        with (
            (folder / "log").open("w") as log,
            subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, **options) as process,
        ):
            try:
                wait_for(programs, folder, process)
                yield f"postgresql://search@/postgres?host={folder}"
            finally:
                process.send_signal(signal.SIGINT)  # does not wait for clients
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def wait_for(programs: Path, folder: Path, process: subprocess.Popen[bytes]) -> None:
    """Return when the server answers."""
    until = time.monotonic() + PATIENCE
    ask = [programs / "pg_isready", "-q", "-U", "search", "-d", "postgres", "-h", folder]
    while subprocess.run(ask, check=False).returncode:
        assert process.poll() is None, (folder / "log").read_text()
        assert time.monotonic() < until
        time.sleep(0.1)
