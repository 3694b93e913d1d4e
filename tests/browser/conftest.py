"""A real browser for the Lab's page. Every page is watched: an error on its console or a request to elsewhere fails."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from capsnet import checkpoint, zoo
from lab_server import Running, running_lab, write_models

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MISSING = (
    "the Lab's page is tested in Chromium, and there is none: run `make chromium`, or `apt-get install -y chromium`"
)
QUIETLY = [
    "--no-sandbox", "--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run",
    "--disable-default-apps",
]  # fmt: skip
NAME = "quick-mnist"
PATIENCE = 1000 * int(os.environ.get("CAPSNET_PATIENCE", "30"))  # milliseconds; more of it on a busy machine
expect.set_options(timeout=PATIENCE)


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
    """The quick network, asked for every class that is there instead of the longest: it does see some pairs."""
    model = checkpoint.load(NAME)
    model.multi_label = True
    checkpoint.save_model(folder / checkpoint.MODEL_FILE, model, {"config": {"data": "multimnist"}})
    return str(folder)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The quick network, one of every kind besides, and, until one is shipped, one that sees two digits."""
    folder = tmp_path_factory.mktemp("models")
    two = [] if "multimnist" in zoo.names() else [write_two_at_once(folder / "two-at-once")]
    return [NAME, *two, *write_models(folder)]


@pytest.fixture(scope="session")
def lab(models: list[str]) -> Iterator[Running]:
    with running_lab(*models, "--port", "0") as running:
        yield running


class Watch:
    """What a page has said on its console and asked of others."""

    def __init__(self, origin: str) -> None:
        self.origin, self.complaints, self.strangers = origin, list[str](), list[str]()

    def over(self, page: Page) -> Page:
        page.on("console", lambda message: self.hear(message.type, message.text))
        page.on("pageerror", lambda error: self.complaints.append(f"uncaught: {error}"))
        page.on("request", lambda request: self.see(request.url))
        return page

    def hear(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.complaints.append(f"{kind}: {text}")

    def see(self, url: str) -> None:
        if not url.startswith((self.origin, "data:", f"blob:{self.origin}")):
            self.strangers.append(url)


@pytest.fixture
def watch(lab: Running) -> Iterator[Watch]:
    watch = Watch(lab.url)
    yield watch
    assert watch.complaints == []
    assert watch.strangers == []


Opened = Callable[..., Page]


@pytest.fixture
def opened(browser: Browser, lab: Running, watch: Watch) -> Iterator[Opened]:
    """opened(url, **options) → a page in a context of its own, with the example already thought about."""
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


SETTLED = """() => {
  const lab = window.lab;
  if (!lab?.model || !lab.result || !lab.input || lab.status !== 'ok') return false;
  if (lab.state.input.mode === 'test' && !lab.digit(lab.state.input.index)) return false;
  if (lab.model.has_decoder && !lab.decoder) return false;
  const { header, input } = lab.result;
  const { routing, selected } = lab.state;
  const asked = header.model === lab.model.name
    && (header.kind === 'cnn' || (header.iterations === routing.iterations && header.leaky === routing.leaky))
    && (selected === null || header.kind === 'cnn' || header.focus === selected);
  return asked && input.length === lab.input.length && input.every((value, k) => value === lab.input[k]);
}"""


def settle(page: Page) -> None:
    """Wait until the answer is there that belongs to what is shown, and it is painted.

    Asked twice, frames between: right after a change the old answer still belongs to the old input.
    """
    for _ in range(2):
        painted(page)
        page.wait_for_function(SETTLED)
    painted(page)


def painted(page: Page) -> None:
    """Two frames on."""
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
