"""What tests of searches share: an empty working directory, tiny networks and a folder of drawn images."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest

from capsnet.cli.flags import parse
from capsnet.cli.train import Train
from capsnet.search.space import read
from capsnet.search.storage import storage_url
from capsnet.search.study import Budget, Task, open_study, work
from capsnet.train.config import Config
from capsnet.train.presets import get_preset
from pictures import write_folder

FLAGS = shlex.split(
    "--data folder:photos --image-size 12 --validation 8 --batch-size 8 --epochs 2 --lr 0.003 --augment.shift 0 "
    "--model.stem-channels 4 --model.stem-kernels 3 --model.stem-strides 2 --model.primary-types 2 "
    "--model.primary-dim 4 --model.primary-kernel 3 --model.class-dim 4 --model.decoder 8"
)


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """80 squares in two colours: 64 to train on, 8 to validate and 8 to test."""
    return write_folder(tmp_path_factory.mktemp("drawn") / "photos", ("cat", "dog"), n=40)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, photos: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    """A working directory with nothing in it but photos/."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(photos, tmp_path / "photos")


@pytest.fixture
def flags() -> list[str]:
    """The flags of a training that takes a moment."""
    return list(FLAGS)


@pytest.fixture
def base() -> Config:
    """The config of these flags."""
    return parse(Train, "train", list(FLAGS), default=Train(config=get_preset("own-images"))).config


@pytest.fixture
def searched(base: Config) -> Callable[..., optuna.Study]:
    """Open the study "s" of a space and run its trials in this process."""

    def search(*words: str, trials: int = 0, task: Task | None = None, pruner: str = "none", **more: Any) -> Any:
        task = task or Task(read(words or ["lr=0.001..0.01:log"], base), base, **more)
        study = open_study("s", storage_url("", "s"), task, pruner)
        if trials:
            work(study, storage_url("", "s"), task, Budget(trials))
        return study

    return search
