"""What torchrun tells a process by environment variables. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from capsnet.errors import UserError

WAIT = "CAPSNET_WAIT"
LONGEST_WAIT = 600.0  # seconds


@dataclass(frozen=True)
class Launch:
    """The place of this process in its group."""

    rank: int
    size: int
    local_rank: int
    restarts: int
    """How often torchrun has restarted the group."""
    error_file: Path | None
    """Where torchrun looks for the reason of a failure."""
    limit: float
    """Seconds that a process waits for the others."""


def launch(environment: Mapping[str, str] = os.environ) -> Launch | None:
    """The place of this process among those that torchrun started; None if torchrun did not start it."""
    if "TORCHELASTIC_RUN_ID" not in environment or "RANK" not in environment:
        return None
    rank, size, local = (int(environment[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    restarts = int(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))
    error_file = environment.get("TORCHELASTIC_ERROR_FILE")
    return Launch(rank, size, local, restarts, Path(error_file) if error_file else None, limit_in(environment))


def limit_in(environment: Mapping[str, str]) -> float:
    """
    >>> limit_in({"CAPSNET_WAIT": "30"}), limit_in({})
    (30.0, 600.0)
    """
    text = environment.get(WAIT, str(LONGEST_WAIT))
    try:
        limit = float(text)
    except ValueError:
        limit = 0.0
    if not 0 < limit < 1e6:
        raise UserError(f"{WAIT} is {text!r} and should be the seconds to wait for other processes, such as 600.")
    return limit
