"""What all tests share: Hypothesis without a stopwatch, and with the same examples every time in CI."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from capsnet import data, plugins
from capsnet.cli import main
from capsnet.cli.flags import parse
from capsnet.cli.train import Train
from capsnet.data.registry import DATASETS
from capsnet.models.registry import MODELS
from capsnet.registry import BUILT_IN, Registry
from capsnet.routing import ROUTINGS
from capsnet.train.config import Config
from capsnet.train.presets import get_preset
from pictures import write_folder

settings.register_profile("capsnet", deadline=None, derandomize="CI" in os.environ, max_examples=60)
settings.load_profile("capsnet")
# a training on photos/ that takes a moment
TINY = shlex.split(
    "--data folder:photos --image-size 12 --validation 8 --batch-size 8 --epochs 2 --lr 0.003 --augment.shift 0 "
    "--model.stem-channels 4 --model.stem-kernels 3 --model.stem-strides 2 --model.primary-types 2 "
    "--model.primary-dim 4 --model.primary-kernel 3 --model.class-dim 4 --model.decoder 8"
)


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short real training on MNIST, shared by everything that needs a model."""
    folder = tmp_path_factory.mktemp("runs") / "demo"
    words = "train --epochs 1 --train-limit 6000 --batch-size 50 --lr 0.003 --out"
    assert main([*words.split(), str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For a file of tiny networks, which wait for a second thread longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def digits() -> data.Dataset:
    return data.load("mnist").test


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """80 squares in two colours: 64 to train on, 8 to validate and 8 to test."""
    return write_folder(tmp_path_factory.mktemp("drawn") / "photos", ("cat", "dog"), n=40)


@pytest.fixture
def elsewhere(tmp_path: Path, photos: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    """A working directory with nothing in it but photos/."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(photos, tmp_path / "photos")


@pytest.fixture
def tiny_flags() -> list[str]:
    """The flags of a training on photos/ that takes a moment."""
    return list(TINY)


@pytest.fixture
def tiny_config() -> Config:
    """The config of these flags."""
    return parse(Train, "train", list(TINY), default=Train(config=get_preset("own-images"))).config


@pytest.fixture
def forget_plugins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A test meets nothing that another has loaded or registered, and leaves nothing behind."""
    monkeypatch.setattr(plugins, "_loaded", {})
    monkeypatch.setattr(plugins, "_warned", set())
    registries: list[Registry[Any]] = [ROUTINGS, MODELS, DATASETS]
    hidden = [take_plugins(registry) for registry in registries]
    yield
    for registry, (entries, origins) in zip(registries, hidden, strict=True):
        take_plugins(registry)
        registry._entries |= entries
        registry._origins |= origins


def take_plugins(registry: Registry[Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Remove and return what is not built in."""
    names = [name for name, origin in registry._origins.items() if origin != BUILT_IN]
    return {name: registry._entries.pop(name) for name in names}, {name: registry._origins.pop(name) for name in names}
