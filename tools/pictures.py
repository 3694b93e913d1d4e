"""Take the pictures of docs/lab.md and README.md: the Lab in a real browser, with the shipped models.

    python tools/pictures.py                  all of them, into docs/images
    python tools/pictures.py lab-hand …       only these
    python tools/pictures.py latency          measure response times, into results/lab.json
    python tools/pictures.py static-latency   the same for the Lab without a server, into results/lab-static.json

Needs Chromium and capsnet[dev].
"""

from __future__ import annotations

import contextlib
import functools
import http.server
import io
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, ViewportSize, sync_playwright

from capsnet.io import checkpoint

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
QUIETLY = ["--no-sandbox", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
SCREEN, PHONE = ViewportSize(width=1280, height=720), ViewportSize(width=390, height=844)
THOUGHT = "() => window.lab?.result && window.lab.decoder && window.lab.status === 'ok'"


@contextlib.contextmanager
def running_lab() -> Iterator[str]:
    """Run a Lab for the duration of the block; yields its address."""
    command = [sys.executable, "-m", "capsnet", "lab", "--no-browser", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()


def open_page(browser: Browser, url: str, *, screen: ViewportSize = SCREEN, dark: bool = False) -> Page:
    page = browser.new_page(viewport=screen, color_scheme="dark" if dark else "light", device_scale_factor=1.5)
    page.goto(url)
    settle(page)
    return page


def settle(page: Page) -> None:
    """Wait until the page shows the result of the last change."""
    page.wait_for_timeout(400)
    page.wait_for_function(THOUGHT)
    page.wait_for_timeout(900)


def change(page: Page, patch: dict[str, object]) -> None:
    page.evaluate("patch => window.lab.update(patch)", patch)
    settle(page)


def save(page: Page, name: str, full_page: bool = False) -> None:
    """Save a screenshot with few colours: a third of the bytes, no visible difference."""
    image = Image.open(io.BytesIO(page.screenshot(full_page=full_page))).convert("RGB")
    image.quantize(192, dither=Image.Dither.NONE).save(IMAGES / f"{name}.png", optimize=True)


def lab(browser: Browser, url: str) -> None:
    page = open_page(browser, url)
    change(page, {"routing": {"t": 2}})
    save(page, "lab")


def lab_dark(browser: Browser, url: str) -> None:
    page = open_page(browser, url, dark=True)
    change(page, {"routing": {"t": 2}, "tweak": {"5": [0.0, 0.2, *[0.0] * 14]}})
    save(page, "lab-dark")


def lab_overlap(browser: Browser, url: str) -> None:
    page = open_page(browser, url)
    overlap = {"a": 0, "b": 1, "dx": 3, "dy": 2}
    change(page, {"model": "multimnist", "input": {"mode": "overlap", "overlap": overlap}})
    save(page, "lab-overlap")


def lab_compare(browser: Browser, url: str) -> None:
    page = open_page(browser, url)
    change(page, {"model": "expanded-mnist", "input": {"mode": "test", "index": 4}})
    page.click("#compare")
    change(page, {"transform": {"rotate": 30, "shear": 0.2, "scale": 0.9}})
    save(page, "lab-compare")


def lab_hand(browser: Browser, url: str) -> None:
    page = open_page(browser, url)
    page.click("#hand")
    change(page, {"hand": {"against": "max-min", "t": 2, "line": 6}})
    page.wait_for_timeout(1500)
    save(page, "lab-hand")


def lab_oscillators(browser: Browser, url: str) -> None:
    page = open_page(browser, url)
    page.click("#hand")
    change(page, {"hand": {"routing": "kuramoto", "options": {"coupling": 5}, "t": 99, "line": 0}})
    page.wait_for_timeout(1500)
    save(page, "lab-oscillators")


def lab_phases(browser: Browser, url: str) -> None:
    page = open_page(browser, url)
    overlap = {"a": 1, "b": 4, "dx": 5, "dy": -3}
    patch = {"model": "sync-multimnist", "input": {"mode": "overlap", "overlap": overlap}}
    page.evaluate("patch => window.lab.update(patch)", patch)
    page.wait_for_timeout(4000)  # this model has no decoder to wait for
    save(page, "lab-phases")


def lab_present(browser: Browser, url: str) -> None:
    page = open_page(browser, url)
    change(page, {"present": "routing", "routing": {"t": 2}})
    save(page, "lab-present")


def lab_phone(browser: Browser, url: str) -> None:
    save(open_page(browser, url, screen=PHONE), "lab-phone", full_page=True)


def lab_routing(browser: Browser, url: str) -> None:
    """Routing as an animation of five iterations with a pause at the end."""
    page = open_page(browser, url)
    change(page, {"routing": {"options": {"iterations": 5}, "t": 0}})
    panel, frames = page.locator("#panel-routing"), []
    for t in range(5):
        page.evaluate("t => window.lab.update({routing: {t}})", t)
        for _ in range(7):
            frames.append(Image.open(io.BytesIO(panel.screenshot())).convert("RGB"))
    small = [frame.resize((frame.width // 3 * 2, frame.height // 3 * 2), Image.Resampling.LANCZOS) for frame in frames]
    drawn = [frame.quantize(64, dither=Image.Dither.NONE) for frame in small]
    pauses = [1500 if k == len(drawn) - 1 else 90 for k in range(len(drawn))]
    drawn[0].save(
        IMAGES / "lab-routing.gif", save_all=True, append_images=drawn[1:], duration=pauses, loop=0, optimize=True
    )


def latency(browser: Browser, url: str) -> None:
    """A hundred moves of a pose slider and as many rotations of the input, timed in the page."""
    page = open_page(browser, url)
    page.evaluate("() => { lab.timings.length = 0; lab.encodings.length = 0; }")
    page.focus("#pose input[data-dim='3']")
    for k in range(100):
        page.keyboard.press("ArrowRight" if k % 20 < 10 else "ArrowLeft")
        page.wait_for_timeout(40)
    for k in range(100):
        page.evaluate("turn => window.lab.update({transform: {rotate: turn}})", k % 40 - 20)
        page.wait_for_timeout(150)
    record = {
        "model": page.evaluate("() => window.lab.model.name"),
        "slider_to_painted_ms": quantiles(page.evaluate("() => [...window.lab.timings]")),
        "input_to_answer_ms": quantiles(page.evaluate("() => [...window.lab.encodings]")),
        "certificate": checkpoint.certificate({"tools": "pictures.py latency"}, 0.0).to_json(),
    }
    checkpoint.write_json(ROOT / "results" / "lab.json", record)


FIRST_ANSWER = """async () => {
  while (!window.lab?.result) await new Promise(requestAnimationFrame);
  return performance.now();
}"""
ANSWERS = """async () => {
  const times = [];
  for (let n = 0; n < 100; n++) {
    const pixels = lab.input.map((value, k) => (k % 100 === n ? 1 - value : value));
    const start = performance.now();
    await lab.engine.encode(pixels, { model: lab.model.name, routing: {}, focus: null });
    times.push(performance.now() - start);
  }
  return times;
}"""


@contextlib.contextmanager
def exported_lab() -> Iterator[str]:
    """Export the default model and serve it for the duration of the block; yields the address."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "capsnet", "lab", "quick-mnist", "--export", f"{folder}/lab"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        handler = functools.partial(QuietHandler, directory=folder)
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            yield f"http://127.0.0.1:{server.server_port}/lab/"
            server.shutdown()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


def static_latency(browser: Browser, url: str) -> None:
    """Twenty warm loads and a hundred answers of the Lab without a server, timed in the page."""
    with exported_lab() as address:
        page = open_page(browser, address)
        loads = []
        for _ in range(20):
            page.wait_for_timeout(1000)
            page.reload()
            loads.append(page.evaluate(FIRST_ANSWER))
        settle(page)
        record = {
            "model": page.evaluate("() => window.lab.model.name"),
            "load_to_first_answer_ms": quantiles(loads),
            "input_to_answer_ms": quantiles(page.evaluate(ANSWERS)),
            "certificate": checkpoint.certificate({"tools": "pictures.py static-latency"}, 0.0).to_json(),
        }
    checkpoint.write_json(ROOT / "results" / "lab-static.json", record)


def quantiles(milliseconds: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(milliseconds, n=20)
    return {"n": len(milliseconds), "median": round(statistics.median(milliseconds), 2), "p95": round(cuts[-1], 2)}


PICTURES: dict[str, Callable[[Browser, str], None]] = {
    "lab": lab,
    "lab-dark": lab_dark,
    "lab-overlap": lab_overlap,
    "lab-compare": lab_compare,
    "lab-hand": lab_hand,
    "lab-oscillators": lab_oscillators,
    "lab-phases": lab_phases,
    "lab-present": lab_present,
    "lab-phone": lab_phone,
    "lab-routing": lab_routing,
}
ALL = {**PICTURES, "latency": latency, "static-latency": static_latency}


def main(names: list[str]) -> int:
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None or set(names) - set(ALL):
        print("pictures: Chromium is not installed" if path is None else f"pictures are: {', '.join(ALL)}")
        return 2
    with running_lab() as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=QUIETLY)
        for name in names or PICTURES:
            print(name, flush=True)
            ALL[name](browser, url)
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
