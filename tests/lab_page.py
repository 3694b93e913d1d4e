"""Helpers for the tests of the page: what a page reports, and when it has settled."""

from __future__ import annotations

import os
from collections.abc import Callable

from playwright.sync_api import Page

NAME = "quick-mnist"
PATIENCE = 1000 * int(os.environ.get("CAPSNET_PATIENCE", "30"))  # milliseconds; increase it on a busy machine
Opened = Callable[..., Page]


class Watch:
    """Errors on the console of a page and its requests to other hosts."""

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


SETTLED = """() => {
  const lab = window.lab;
  if (!lab?.model || !lab.result || !lab.input || lab.status !== 'ok') return false;
  if (lab.state.input.mode === 'test' && !lab.digit(lab.state.input.index)) return false;
  if (lab.model.has_decoder && !lab.decoder) return false;
  const { header, input } = lab.result;
  const { selected } = lab.state;
  const options = Object.entries(lab.routingOptions());
  const asked = header.model === lab.model.name
    && options.every(([name, value]) => header.routing[name] === value)
    && (selected === null || header.focus === undefined || header.focus === selected);
  return asked && input.length === lab.input.length && input.every((value, k) => value === lab.input[k]);
}"""


def settle(page: Page) -> None:
    """Wait until the answer to what is shown has arrived and is painted.

    Checked twice with frames in between: right after a change the old answer still matches the old input.
    """
    for _ in range(2):
        painted(page)
        page.wait_for_function(SETTLED)
    painted(page)


def painted(page: Page) -> None:
    """Wait for two frames."""
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
