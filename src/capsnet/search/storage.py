"""Where trials are stored: an SQLite file by default, or any database that Optuna supports.

Workers share a storage and send heartbeats; the trial of a worker that falls silent is queued again, at most
`MOST_RETRIES` times in all, because the trial itself may be what kills its workers.

Workers take trials one after another. In PostgreSQL they wait for each other in the database, on however many machines
they run; otherwise on a lock file, which workers on one machine share.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import ExperimentalWarning, OptunaError, StorageInternalError
from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback
from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from capsnet.errors import UserError
from capsnet.experiments.core.selection import check_name
from capsnet.files import Lock

FOLDER = Path("runs/search")
SQLITE = "sqlite:///"
POSTGRESQL = "postgresql+psycopg"
DATABASE_LOCK = 0x63617073  # "caps": what our advisory lock is called in a database
PATIENCE = 30.0  # seconds to wait while another process writes to SQLite
MOST_RETRIES = 5


def storage_url(storage: str, name: str) -> str:
    """An Optuna storage URL: a file name means SQLite, an empty one runs/search/NAME.db."""
    check_name(name, "--study")
    if storage in ("sqlite://", "sqlite:///:memory:", ":memory:"):
        raise UserError("workers cannot share a storage in memory: give --storage a file name.")
    if re.match(r"\w\w+:(?!//)", storage):  # a single letter is a drive
        raise UserError(f"--storage {storage} is neither a file name nor a URL such as sqlite:///trials.db.")
    storage = re.sub(r"^postgres(ql)?://", f"{POSTGRESQL}://", storage)  # of its drivers, the one that we install
    return storage if "://" in storage else f"{SQLITE}{storage or FOLDER / f'{name}.db'}"


class DatabaseLock:
    """A lock that all machines share, until `release` or the end of the connection, even if the process is killed."""

    def __init__(self, url: str) -> None:
        engine = create_engine(url, poolclass=NullPool, isolation_level="AUTOCOMMIT")
        self.connection = engine.connect()
        self.connection.execute(text(f"SELECT pg_advisory_lock({DATABASE_LOCK})"))

    def release(self) -> None:
        self.connection.close()

    def __enter__(self) -> DatabaseLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def turn(url: str, name: str) -> Lock | DatabaseLock:
    """Wait until no other worker of a study takes a trial or creates the study."""
    if url.startswith("postgresql"):
        with driver_needed(url):
            return DatabaseLock(url)
    folder = Path(f"{url.removeprefix(SQLITE) if url.startswith(SQLITE) else FOLDER / name}.lock")
    folder.mkdir(parents=True, exist_ok=True)
    return Lock(folder, on_wait=lambda: None)


@contextmanager
def driver_needed(url: str) -> Iterator[None]:
    """Say what to install if Python cannot talk to the database."""
    try:
        yield
    except ImportError as error:
        if url.startswith(POSTGRESQL):
            raise UserError("a search in PostgreSQL needs its driver: pip install 'capsnet[postgresql]'.") from None
        raise StorageInternalError(str(error.__context__ or error)) from None


def without_password(url: str) -> str:
    try:
        return make_url(url).render_as_string(hide_password=True)
    except ArgumentError:
        return "given"


@contextmanager
def storage_errors(url: str) -> Iterator[None]:
    """Turn what goes wrong with a storage into one sentence, and silence Optuna's notes on experimental features."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            yield
    except (SQLAlchemyError, OptunaError) as error:
        why = (str(error.__cause__ or error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"cannot use the storage {without_password(url)} ({why}): --storage takes a file name or an Optuna storage "
            f"URL such as sqlite:///search.db or postgresql://user@host/search, which no other program may lock."
        ) from None


def connect(url: str, grace: int = 60) -> RDBStorage:
    """The storage, with heartbeats: a worker that is silent for `grace` seconds counts as dead."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    options: dict[str, Any] = {"pool_pre_ping": True}  # a server may have restarted
    if url.startswith(SQLITE):
        Path(url.removeprefix(SQLITE)).parent.mkdir(parents=True, exist_ok=True)
        options = {"connect_args": {"timeout": PATIENCE}}
    try:
        with driver_needed(url):
            return RDBStorage(
                url, options, heartbeat_interval=max(1, grace // 3), grace_period=grace,
                heartbeat_stale_trial_callback=RetryHeartbeatStaleTrialCallback(max_retry=MOST_RETRIES),
            )  # fmt: skip
    except RuntimeError as error:  # tables of another version
        raise StorageInternalError(str(error.__context__ or error)) from None
