"""One Lab with a model of every kind, shared by all tests of the server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lab_server import Running, running_lab, write_models

NAME = "quick-mnist"


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_lab(NAME, *write_models(tmp_path_factory.mktemp("models")), "--port", "0") as running:
        yield running
