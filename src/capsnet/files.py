"""Files and folders that survive a kill: atomic writes, locks between processes, checksums."""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import tempfile
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from capsnet.errors import UserError

LOCK_FILE = ".lock"


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically: at any moment either the old file or the complete new one exists."""
    temporary = path.parent / f".{path.name}.{secrets.token_hex(4)}.part"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("xb") as file:  # not mkstemp, whose mode 0600 is for secrets
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise not_written(path, error) from error
    finally:
        with suppress(OSError):
            temporary.unlink()  # already renamed if all went well


def check_writable(path: Path) -> None:
    """Refuse a path that cannot be written to before the work begins; leaves nothing behind."""
    try:
        folder = next(parent for parent in path.absolute().parents if parent.exists())
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise not_written(path, error) from error


def not_written(path: Path, error: OSError) -> UserError:
    kept = " The previous file is still good." if os.path.isfile(path) else ""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    advice = "Free some space, then try again." if full else "Choose a place that can be written to."
    return UserError(f"could not write {path}: {error.strerror}.{kept} {advice}")


def leftovers(folder: Path) -> list[Path]:
    """Temporary files of interrupted writes."""
    return list(folder.glob(".*.part"))


def remove_leftovers(folder: Path) -> None:
    for part in leftovers(folder):
        part.unlink(missing_ok=True)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Taken(UserError):
    """The folder belongs to another process or run."""


class Lock:
    """An exclusive lock on a folder until `release` or the end of the process, even if it is killed.

    If another process holds it, `on_wait` is called and the lock is waited for; without `on_wait`, Taken is raised.
    """

    def __init__(self, folder: Path, on_wait: Callable[[], None] | None = None) -> None:
        handle = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o666)
        self.release = weakref.finalize(self, os.close, handle)
        try:
            import fcntl

            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if on_wait is None:
                    self.release()
                    raise Taken(f"another process is using {folder}: wait until it ends.") from None
                on_wait()
                fcntl.flock(handle, fcntl.LOCK_EX)
        except (ImportError, OSError):
            pass  # Windows and some network file systems have no such locks

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
