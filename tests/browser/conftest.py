"""A real browser for the Lab. Every page is watched: an error on its console or a request to another host fails."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from capsnet.io import checkpoint, zoo
from capsnet.io.records import Certificate
from capsnet.lab.site import export_site
from capsnet.models.capsnet import CapsNet
from capsnet.models.config import CapsNetConfig, CNNConfig
from lab_page import NAME, PATIENCE, Opened, Watch, settle
from lab_server import SMALL, Running, running_lab, write_model, write_models
from static_site import Host

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MISSING = "the Lab is tested in Chromium, which is not installed: run `make chromium` or `apt-get install -y chromium`"
QUIETLY = [
    "--no-sandbox", "--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run",
    "--disable-default-apps",
]  # fmt: skip
expect.set_options(timeout=PATIENCE)
pytest.register_assert_rewrite("lab_both")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        pytest.fail(MISSING)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=QUIETLY)
        yield browser
        browser.close()


def write_two_at_once(folder: Path) -> str:
    """The quick network as a multi-label model: it does recognise some pairs."""
    model = checkpoint.load(NAME)
    model.multi_label = True
    checkpoint.save_model(folder / checkpoint.MODEL_FILE, model, Certificate(config={"data": "multimnist"}))
    return str(folder)


@pytest.fixture(scope="session")
def model() -> CapsNet:
    """The network that the page starts with."""
    model = checkpoint.load(NAME)
    assert isinstance(model, CapsNet)
    return model


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The quick network, one model of every kind, and a model for two digits unless one is shipped."""
    folder = tmp_path_factory.mktemp("models")
    two = [] if "multimnist" in zoo.names() else [write_two_at_once(folder / "two-at-once")]
    return [NAME, *two, *write_models(folder)]


@pytest.fixture(scope="session")
def served(models: list[str]) -> Iterator[Running]:
    with running_lab(*models, "--port", "0") as running:
        yield running


@pytest.fixture(scope="session")
def lab(served: Running) -> Running | Host:
    """The Lab under test; a module may put an exported one in its place."""
    return served


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All shipped models, a CNN to compare with and a model for colour images, as a site with few test images."""
    folder = tmp_path_factory.mktemp("static")
    cnn = write_model(folder / "small-cnn", CNNConfig(channels=(4,), kernels=(5,), pool=(4,), hidden=(8,)))
    colour = write_model(
        folder / "colour", CapsNetConfig((3, 32, 32), 3, **SMALL, decoder=(8,)), "folder:/secret/place"
    )
    others = [name for name in zoo.names() if name != NAME]
    export_site(folder / "lab", [NAME, *others, cnn, colour], samples=600)
    return folder / "lab"


@pytest.fixture
def watch(lab: Running | Host) -> Iterator[Watch]:
    watch = Watch(lab.url)
    yield watch
    assert watch.complaints == []
    assert watch.strangers == []


@pytest.fixture
def opened(browser: Browser, lab: Running | Host, watch: Watch) -> Iterator[Opened]:
    """opened(url, **options) → a page in its own context, with the answer to the example shown."""
    contexts: list[BrowserContext] = []

    def open_page(url: str = "", settled: bool = True, **options: Any) -> Page:
        contexts.append(browser.new_context(**{"viewport": {"width": 1280, "height": 720}, **options}))
        page = watch.over(contexts[-1].new_page())
        page.set_default_timeout(PATIENCE)
        page.goto(url or lab.url)
        if settled:
            settle(page)
        return page

    yield open_page
    for context in contexts:
        context.close()


@pytest.fixture
def page(opened: Opened) -> Page:
    return opened()
