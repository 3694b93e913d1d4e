"""What all tests share: Hypothesis without a stopwatch, and with the same examples every time in CI."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from capsnet import data, plugins
from capsnet.cli import main
from capsnet.data.registry import DATASETS
from capsnet.models.registry import MODELS
from capsnet.registry import BUILT_IN, Registry
from capsnet.routing import ROUTINGS

settings.register_profile("capsnet", deadline=None, derandomize="CI" in os.environ, max_examples=60)
settings.load_profile("capsnet")


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short real training on MNIST, shared by everything that needs a model."""
    folder = tmp_path_factory.mktemp("runs") / "demo"
    words = "train --epochs 1 --train-limit 20000 --batch-size 100 --lr 0.003 --out"
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
