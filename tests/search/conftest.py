"""What tests of searches share: an empty working directory and studies of tiny networks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optuna
import pytest

from capsnet.search.space import read
from capsnet.search.storage import storage_url
from capsnet.search.study import Budget, Task, open_study, work
from capsnet.train.config import Config


@pytest.fixture(autouse=True)
def _elsewhere(elsewhere: None) -> None:
    """Every search writes to the working directory."""


@pytest.fixture
def flags(tiny_flags: list[str]) -> list[str]:
    return tiny_flags


@pytest.fixture
def base(tiny_config: Config) -> Config:
    return tiny_config


@pytest.fixture
def searched(tiny_config: Config) -> Callable[..., optuna.Study]:
    """Open the study "s" of a space and run its trials in this process."""

    def search(*words: str, trials: int = 0, task: Task | None = None, pruner: str = "none", **more: Any) -> Any:
        task = task or Task(read(words or ["lr=0.001..0.01:log"], tiny_config), tiny_config, **more)
        study = open_study("s", storage_url("", "s"), task, pruner)
        if trials:
            work(study, storage_url("", "s"), task, Budget(trials))
        return study

    return search
