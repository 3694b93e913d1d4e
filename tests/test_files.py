"""Files survive a kill, and a lock is held by one process at a time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from capsnet.files import Lock, Taken, write_bytes

WRITER = """
import sys
from pathlib import Path
from capsnet.files import write_bytes
print("ready", flush=True)
while True:
    for letter in b"ab":
        write_bytes(Path(sys.argv[1]), bytes([letter]) * 3_000_000)
"""


def test_a_killed_process_never_leaves_half_a_file_under_its_name(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for delay in (0.01, 0.03, 0.06):
        with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            while not path.exists() and writer.poll() is None:
                time.sleep(0.001)
            time.sleep(delay)
            writer.send_signal(signal.SIGKILL)
        assert path.read_bytes() in (b"a" * 3_000_000, b"b" * 3_000_000)


def test_a_written_file_has_the_mode_that_the_umask_asks_for_and_leaves_the_umask_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.umask(0o027)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "umask", lambda mask: pytest.fail("other threads would create files with this umask"))
            write_bytes(tmp_path / "file", b"a")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


HOLDER = """
import sys, time
from pathlib import Path
from capsnet.files import Lock
lock = Lock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


def test_a_lock_is_refused_or_waited_for_and_ends_with_its_process(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(Taken, match="another process is using"):
            Lock(tmp_path)
        with Lock(tmp_path, on_wait=holder.kill):  # waits until the other process is dead
            assert holder.wait() == -signal.SIGKILL
    with Lock(tmp_path):
        pass
