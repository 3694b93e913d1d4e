"""Where a study's trials are kept: SQLite in a file unless told otherwise, or any storage that Optuna speaks to.

Several workers share it. One shows that it is alive by a heartbeat; the trial of one that falls silent is put back into
the queue by the others.
"""

from __future__ import annotations

import os
import re
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import optuna
import sqlalchemy
from optuna.exceptions import ExperimentalWarning, OptunaError, StorageInternalError
from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback
from optuna.trial import FrozenTrial
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, IntegrityError, SQLAlchemyError

from capsnet.errors import UserError
from capsnet.search.space import check_name

FOLDER = Path("runs/search")
LOCKED = 30.0  # seconds to wait while another worker writes to SQLite
BEING_MADE = 1.0  # seconds to wait while another worker makes the tables
KILLS = 3  # workers that a trial may lose before it counts as failed: it may be its own fault
DRIVERS = {"psycopg": "psycopg[binary]", "psycopg2": "psycopg2-binary", "MySQLdb": "mysqlclient"}  # module → package


def storage_url(storage: str, name: str) -> str:
    """An Optuna storage URL; a file's name means SQLite, and nothing at all runs/search/NAME.db."""
    check_name(name)
    if storage in ("sqlite://", "sqlite:///:memory:", ":memory:"):
        raise UserError("workers cannot share a storage in memory: give --storage a file's name.")
    if "://" in storage:
        return storage
    if re.match(r"\w\w+:", storage):  # one letter is a drive
        raise UserError(f"--storage {storage} is neither a file's name nor a URL such as sqlite:///trials.db.")
    return f"sqlite:///{storage or FOLDER / f'{name}.db'}"


def shown(url: str) -> str:
    """A URL without its password."""
    try:
        return make_url(url).render_as_string(hide_password=True)
    except ArgumentError:
        return "given"


@contextmanager
def in_storage(url: str) -> Iterator[None]:
    """What goes wrong with a storage, in one sentence; Optuna's remarks on its own experiments are not shown."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            yield
    except (SQLAlchemyError, OptunaError) as error:
        reason = (str(error.__cause__ or error).strip() or type(error).__name__).splitlines()[0]
        if "database is locked" in reason:
            raise UserError(
                f"the storage {shown(url)} is locked by another program: end that one, or choose another --storage."
            ) from None
        raise UserError(
            f"the storage {shown(url)} cannot be used ({reason}): --storage takes a file's name or an Optuna storage "
            f"URL such as sqlite:///search.db or postgresql://user@host/search."
        ) from None


def connect(url: str, grace: int = 60, attempts: int = 5) -> RDBStorage:
    """The storage, with heartbeats: a worker silent for `grace` seconds counts as dead."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    is_file = url.startswith("sqlite:///")
    if is_file:
        Path(url.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
    try:
        storage = RDBStorage(
            url, {"connect_args": {"timeout": LOCKED, "isolation_level": None}} if is_file else {},
            heartbeat_interval=max(1, grace // 3), grace_period=grace,
            heartbeat_stale_trial_callback=lambda study, trial: put_back(study, trial, killed=True),
        )  # fmt: skip
        if is_file:
            lock_before_reading(storage, Path(url.removeprefix("sqlite:///")))
        return storage
    except ImportError as error:
        module = getattr(error.__cause__ or error.__context__, "name", None)
        if module is None:
            raise StorageInternalError from error
        raise UserError(
            f"the storage {shown(url)} needs the Python module {module}: pip install '{DRIVERS.get(module, module)}'."
        ) from None
    except RuntimeError as error:  # tables of another version
        raise StorageInternalError from error
    except SQLAlchemyError as error:
        being_made = isinstance(error, IntegrityError) or "already exists" in str(error)  # by another worker, just now
        if not being_made or attempts == 1:
            raise
        time.sleep(BEING_MADE)
        return connect(url, grace, attempts - 1)


def lock_before_reading(storage: RDBStorage, file: Path) -> None:
    """Let a transaction on SQLite begin with its lock: else two workers that read the same queue at once both take the
    same trial, for what they read is not locked until one of them writes. A file that may only be read needs no lock.
    """
    if os.access(file, os.W_OK):
        sqlalchemy.event.listen(storage.engine, "begin", lambda link: link.exec_driver_sql("BEGIN IMMEDIATE"))


def put_back(study: optuna.Study, trial: FrozenTrial, killed: bool = False) -> None:
    """Queue a trial that was interrupted, to go on where it was; one whose workers are killed, a few times only."""
    kills = trial.user_attrs.get("kills", 0) + killed
    if kills <= KILLS:
        trial.user_attrs["kills"] = kills
        RetryHeartbeatStaleTrialCallback()(study, trial)
