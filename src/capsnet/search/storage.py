"""Where trials are stored: an SQLite file by default, or any database that Optuna supports.

Workers share a storage and send heartbeats; the trial of a worker that falls silent is queued again, at most
`MOST_RETRIES` times in all, because the trial itself may be what kills its workers.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import optuna
from optuna.exceptions import ExperimentalWarning, OptunaError, StorageInternalError
from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from capsnet.errors import UserError
from capsnet.experiments.core.selection import check_name

FOLDER = Path("runs/search")
SQLITE = "sqlite:///"
PATIENCE = 30.0  # seconds to wait while another process writes to SQLite
MOST_RETRIES = 5


def storage_url(storage: str, name: str) -> str:
    """An Optuna storage URL: a file name means SQLite, an empty one runs/search/NAME.db."""
    check_name(name, "--study")
    if storage in ("sqlite://", "sqlite:///:memory:", ":memory:"):
        raise UserError("workers cannot share a storage in memory: give --storage a file name.")
    if re.match(r"\w\w+:(?!//)", storage):  # a single letter is a drive
        raise UserError(f"--storage {storage} is neither a file name nor a URL such as sqlite:///trials.db.")
    return storage if "://" in storage else f"{SQLITE}{storage or FOLDER / f'{name}.db'}"


def lock_folder(url: str, name: str) -> Path:
    """The folder that the workers of a study on this machine lock while one of them takes a trial."""
    folder = Path(f"{url.removeprefix(SQLITE) if url.startswith(SQLITE) else FOLDER / name}.lock")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


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
    options = {}
    if url.startswith(SQLITE):
        Path(url.removeprefix(SQLITE)).parent.mkdir(parents=True, exist_ok=True)
        options = {"connect_args": {"timeout": PATIENCE}}
    try:
        return RDBStorage(
            url, options, heartbeat_interval=max(1, grace // 3), grace_period=grace,
            heartbeat_stale_trial_callback=RetryHeartbeatStaleTrialCallback(max_retry=MOST_RETRIES),
        )  # fmt: skip
    except (ImportError, RuntimeError) as error:  # no driver, or tables of another version
        raise StorageInternalError(str(error.__context__ or error)) from None
