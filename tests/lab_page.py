"""Helpers for the tests of the page: what a page reports, and when it has settled."""

from __future__ import annotations

import base64
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
from playwright.sync_api import Page, expect

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


def numbers(page: Page, expression: str) -> np.ndarray:
    """A Float32Array of the page."""
    return np.array(page.evaluate(f"() => Array.from({expression})"), np.float32)


def canvas(page: Page, selector: str) -> np.ndarray:
    """The pixels of a canvas (h, w, 4)."""
    found = page.evaluate(
        """(selector) => {
          const { height, width } = document.querySelector(selector);
          const copy = new OffscreenCanvas(width, height).getContext('2d', { willReadFrequently: true });
          copy.drawImage(document.querySelector(selector), 0, 0);
          const { data } = copy.getImageData(0, 0, width, height);
          const rows = Array.from({ length: height }, (_, y) => data.subarray(4 * width * y, 4 * width * (y + 1)));
          return [height, width, btoa(rows.map((row) => String.fromCharCode(...row)).join(''))];
        }""",
        selector,
    )
    return np.frombuffer(base64.b64decode(found[2]), np.uint8).reshape(found[0], found[1], 4)


def lengths(page: Page) -> list[float]:
    """The bars as screen readers announce them."""
    bars = page.locator("#classes [data-class]")
    return [float(bars.nth(k).get_attribute("aria-valuenow") or "nan") for k in range(bars.count())]


def draw(page: Page, *points: tuple[float, float]) -> None:
    """A stroke on the canvas through points relative to its width and height."""
    box = page.locator("#draw").bounding_box()
    assert box
    places = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in points]
    page.mouse.move(*places[0])
    page.mouse.down()
    for place in places[1:]:
        page.mouse.move(*place, steps=6)
    page.mouse.up()


def draw_one(page: Page) -> None:
    page.locator("#clear").click()
    draw(page, (0.5, 0.2), (0.5, 0.8))
    settle(page)


def move_slider(page: Page, selector: str, value: float) -> None:
    """Change the value and send the event of a moved slider."""
    page.locator(selector).evaluate(
        "(slider, value) => { slider.value = value; slider.dispatchEvent(new Event('input', { bubbles: true })); }",
        value,
    )


def glided(page: Page, t: int) -> None:
    """Wait until the ribbons show routing iteration t."""
    page.wait_for_function("(t) => Number(document.querySelector('.routing-body').dataset.shown) === t", arg=t)


def choose_by_hand(page: Page, name: str) -> None:
    page.locator("#hand-routing").select_option(name)
    expect(page.locator("#view-hand .legends")).to_contain_text(f"{name}, ")


def exported(page: Page, folder: Path, name: str) -> Path:
    """The file that an entry of the export menu saves."""
    page.locator("#export").click()
    with page.expect_download() as download:
        page.locator(f"#export-{name}").click()
    file = folder / download.value.suggested_filename
    download.value.save_as(file)
    return file
