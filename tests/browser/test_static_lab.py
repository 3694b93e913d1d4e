"""The exported Lab in a real browser: the numbers of Python, speed, size, offline, and links to the served Lab."""

from __future__ import annotations

import base64
import io
import json
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter
from playwright.sync_api import Browser, Page, expect

from capsnet import data
from capsnet.io import checkpoint, zoo
from capsnet.lab import graphs, inference, protocol
from capsnet.lab.hand import by_hand
from capsnet.lab.models import Shelf
from capsnet.lab.samples import centred
from capsnet.lab.server import read_photo
from capsnet.models.base import Divided, Model
from capsnet.nn import functional
from capsnet.nn.layers import DenseCaps
from lab_both import *  # noqa: F403
from lab_page import NAME, PATIENCE, Opened, Watch, settle
from lab_server import Running
from static_site import Host, hosted

TOLERANCE = 1e-4
MOST_BYTES = 15_000_000
CAPSULES = [name for name in zoo.names() if name not in ("expanded-cnn", "sync-multimnist", "viewpoints-matrix")]


@pytest.fixture(scope="module")
def lab(site: Path) -> Iterator[Host]:
    """In this file the Lab is the exported one."""
    with hosted(site) as host:
        yield host


COMPARE = """async ([model, path, n, routing]) => {
  const { parseFrame } = await import(new URL('static/js/frames.js', location.href));
  const worst = {};
  for (let k = 0; k < n; k++) {
    const expected = parseFrame(await (await fetch(`${path}/${k}.frame`)).arrayBuffer());
    const found = model
      ? await lab.engine.encode(expected.images, { model, routing, focus: null })
      : await routed(expected, path, k);
    if (JSON.stringify(found.header.ranking) !== JSON.stringify(expected.header.ranking)) worst.ranking = 1;
    for (const { name, shape } of expected.header.arrays) {
      if (name === 'images') continue;
      const sides = found[name]?.shape;
      if (JSON.stringify(sides) !== JSON.stringify(shape)) throw new Error(`${name}: ${sides} instead of ${shape}`);
      const gap = expected[name].reduce((most, value, at) => Math.max(most, Math.abs(value - found[name][at])), 0);
      worst[name] = Math.max(worst[name] ?? 0, gap);
    }
  }
  return worst;

  async function routed(expected, path, k) {
    const { answer, networkOf } = await import(new URL('static/js/network.js', location.href));
    const network = networkOf(parseFrame(await (await fetch(`${path}/${k}.layers`)).arrayBuffer()));
    const { header, arrays } = answer(network, [expected.primary], {}, null);
    for (const [name, [values, shape]] of Object.entries(arrays)) {
      arrays[name] = Float32Array.from(values);
      arrays[name].shape = shape;
    }
    return { header, ...arrays };
  }
}"""


def write_expected(folder: Path, model: Model, images: torch.Tensor, routing: str = "{}") -> None:
    """What the served Lab answers to each image, as frames below the site."""
    folder.mkdir(exist_ok=True)
    for k, image in enumerate(images):
        header, arrays = inference.encode(model, image, routing)
        (folder / f"{k}.frame").write_bytes(protocol.pack(header, {"images": image, **arrays}))


def differences(page: Page, lab: Host, name: str, model: Model, n: int, routing: dict[str, Any]) -> dict[str, float]:
    """The largest difference of every array of the page from that of the served Lab."""
    images = data.load("fashion-mnist" if name == "fashion" else "mnist").test.images[:n]
    folder = lab.folder / f"expected-{name}"
    pixels = centred(images.float() / 255, model.config.image_shape)
    write_expected(folder, model, pixels, json.dumps(routing))
    return page.evaluate(COMPARE, [name, folder.name, n, routing])


def check_differences(found: dict[str, float]) -> None:
    assert {"activations", "poses", "couplings", "outputs", "primary", "votes", "agreement", "entropy"} <= set(found)
    assert {name: gap for name, gap in found.items() if not gap < TOLERANCE} == {}


@pytest.mark.parametrize("name", CAPSULES)
def test_the_numbers_of_every_model_are_those_of_python(page: Page, lab: Host, name: str) -> None:
    check_differences(differences(page, lab, name, checkpoint.load(name), 100 if name == NAME else 4, {}))


@pytest.mark.slow
@pytest.mark.parametrize("name", CAPSULES)
def test_a_hundred_digits_of_every_model_are_those_of_python(page: Page, lab: Host, name: str) -> None:
    check_differences(differences(page, lab, name, checkpoint.load(name), 100, {}))


@pytest.mark.parametrize("routing", [{"iterations": 5, "leaky": True}, {"iterations": 1}])
def test_routing_options_have_the_same_effect_as_in_python(page: Page, lab: Host, routing: dict[str, Any]) -> None:
    check_differences(differences(page, lab, NAME, checkpoint.load(NAME), 3, routing))


def layers_of(name: str, matrix: bool) -> tuple[DenseCaps, ...]:
    """Two capsule layers, the first one shared over positions, with parameters that are not the initial ones."""
    lower, dims = (16, 16) if matrix else (8, 6)
    common: dict[str, Any] = {"routing": name, "matrix": matrix}
    layers = DenseCaps(12, lower, 5, dims, shared=4, **common), DenseCaps(5, dims, 3, dims, **common)
    for layer in layers:
        for parameter in layer.routing.state_dict().values():
            parameter.add_(0.1 * torch.rand_like(parameter))
    return layers


@pytest.mark.parametrize(("matrix", "squashed"), [(False, True), (True, True), (False, False)])
def test_every_algorithm_routes_layers_as_python_does(page: Page, lab: Host, matrix: bool, squashed: bool) -> None:
    """Shared transformations, hidden capsules, learnt parameters, matrix poses and lower capsules of any length, which
    no shipped model has."""
    torch.manual_seed(0)
    folder = lab.folder / f"expected-layers-{matrix}-{squashed}"
    folder.mkdir()
    for k, name in enumerate(graphs.ROUTINGS):
        layers = layers_of(name, matrix)
        primary = (0.3 if squashed else 0.6) * torch.randn(1, 12, 16 if matrix else 8)
        lower = (
            None
            if squashed or not layers[0].routing.own_activations
            else functional.lengths(functional.squash(primary))
        )
        with torch.inference_mode():
            hidden = layers[0].route(primary, lower)
            own = hidden.activations if layers[0].routing.own_activations else None
            routed = layers[1].route(hidden.poses, own, trace=True)
        ranking = routed.activations[0].argsort(descending=True).tolist()
        assert routed.trace is not None
        arrays = {"primary": primary[0], "activations": routed.activations[0], "poses": routed.poses[0]}
        arrays |= inference.traced(routed.trace, ranking[0])
        (folder / f"{k}.frame").write_bytes(protocol.pack({"ranking": ranking, "focus": ranking[0]}, arrays))
        parts = Divided(lambda images: (), (layers,), squashed)
        (folder / f"{k}.layers").write_bytes(graphs.to_layers(parts))
    check_differences(page.evaluate(COMPARE, ["", folder.name, len(graphs.ROUTINGS), {}]))


def test_by_hand_every_algorithm_gives_the_numbers_of_python(page: Page) -> None:
    draw = np.random.default_rng(0)
    for offer in page.evaluate("() => lab.routings.map(({ name, options }) => ({ name, options }))"):
        for lower, upper in ((2, 2), (6, 4)):
            votes = draw.uniform(-0.9, 0.9, (lower, upper, 2)).round(3).tolist()
            options = {one["name"]: one["value"] for one in offer["options"]}
            found = page.evaluate("(question) => lab.engine.hand(...question)", [votes, offer["name"], options])
            expected = by_hand(votes, offer["name"], options)
            assert found.keys() == expected.keys()
            for key, values in expected.items():
                np.testing.assert_allclose(found[key], values, atol=TOLERANCE, err_msg=f"{offer['name']} {key}")


def written(image: Image.Image, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **({"quality": 95} if kind == "JPEG" else {}))
    return file.getvalue()


def photographed(digit: np.ndarray) -> Image.Image:
    """A digit on paper in uneven light, with noise and a speck."""
    noise = np.random.default_rng(0).normal(0, 3, (420, 380))
    paper = 205.0 + np.linspace(-35, 35, 380) + np.linspace(10, -10, 420)[:, None] + noise
    ink = np.kron(digit.astype(float), np.ones((9, 9)))
    paper[100 : 100 + ink.shape[0], 60 : 60 + ink.shape[1]] -= ink * 0.6
    paper[30:33, 300:303] -= 90
    return Image.fromarray(paper.clip(0, 255).astype(np.uint8)).filter(ImageFilter.GaussianBlur(1))


def thin(_: np.ndarray) -> Image.Image:
    image = Image.new("RGBA", (400, 500), (255, 255, 255, 0))
    image.paste((10, 10, 90, 255), (198, 60, 202, 440))
    return image


def scanned(digit: np.ndarray) -> Image.Image:
    return Image.fromarray(255 - digit).resize((300, 300), Image.Resampling.BICUBIC).convert("RGB")


def large(digit: np.ndarray) -> Image.Image:
    return photographed(digit).resize((1330, 1470), Image.Resampling.BICUBIC).convert("RGB")


PHOTOS: dict[str, tuple[Callable[[np.ndarray], Image.Image], str]] = {
    "photo": (photographed, "PNG"), "thin": (thin, "PNG"), "scan": (scanned, "PNG"), "large": (large, "JPEG"),
}  # fmt: skip


@pytest.mark.parametrize("model", [NAME, "expanded-mnist", "multimnist", "colour"])
def test_an_image_file_is_prepared_as_python_prepares_it(
    page: Page, site: Path, digits: data.Dataset, model: str
) -> None:
    shelf = Shelf([str(site.parent / "colour")])
    for name, (make, kind) in PHOTOS.items():
        body = written(make(digits.images[0, 0].numpy()), kind)
        found = page.evaluate(
            """async ([bytes, model]) => {
              const file = new Blob([Uint8Array.from(atob(bytes), (c) => c.charCodeAt(0))]);
              const { header, pixels } = await lab.engine.photo(file, model);
              return [header.note, pixels.shape, [...pixels]];
            }""",
            [base64.b64encode(body).decode(), model],
        )
        header, arrays = read_photo(body, shelf.find(model))
        expected = arrays["pixels"]
        assert found[0] == header["note"], name
        assert found[1] == list(expected.shape)
        gap = np.abs(np.array(found[2]) - expected.flatten().numpy())
        assert gap.max() < (0.02 if kind == "PNG" else 0.08), f"{name}: {gap.max():.3f}"
        assert gap.mean() < 0.002, f"{name}: {gap.mean():.4f}"


def test_what_is_no_image_gets_a_message(page: Page) -> None:
    page.locator("button[data-mode=image]").click()
    page.locator("#file").set_input_files({"name": "no.png", "mimeType": "image/png", "buffer": b"not an image"})
    expect(page.locator("#notice")).to_contain_text("use PNG, JPEG, WebP, GIF or BMP")
    page.locator("#file").set_input_files({"name": "half.png", "mimeType": "image/png", "buffer": b"\x89PNG\r\n\x1a\n"})
    expect(page.locator("#notice")).to_contain_text("damaged")


def test_the_first_answer_is_small_and_early_and_the_others_are_quick(
    browser: Browser, site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bounds for times are wide because the machine may be busy; the measurement is printed."""
    with hosted(site) as host, browser.new_context() as context:
        page = context.new_page()
        page.set_default_timeout(PATIENCE)
        page.goto(host.url)
        page.wait_for_function("() => lab?.result")
        first = sum(host.sent.values())
        assert {path for path in host.sent if "/models/" in path and NAME not in path} == set()
        began = time.perf_counter()
        page.reload()
        page.wait_for_function("() => lab?.result")
        warm = time.perf_counter() - began
        settle(page)
        times = page.evaluate(
            """async () => {
              const times = [];
              for (let n = 0; n < 60; n++) {
                const pixels = lab.input.map((value, k) => (k % 60 === n ? 1 - value : value));
                const start = performance.now();
                await lab.engine.encode(pixels, { model: lab.model.name, routing: {}, focus: null });
                times.push(performance.now() - start);
              }
              return times.sort((a, b) => a - b);
            }"""
        )
    with capsys.disabled():
        print(f"\n{first / 1e6:.1f} MB, warm {warm:.2f} s, answers {times[30]:.0f} ms, 95 % {times[57]:.0f} ms")
    assert first <= MOST_BYTES
    assert warm < 20
    assert times[30] < 250


def test_after_one_visit_it_works_without_a_network(browser: Browser, site: Path) -> None:
    with hosted(site) as host, browser.new_context() as context:
        watch = Watch(host.url)
        page = watch.over(context.new_page())
        page.set_default_timeout(PATIENCE)
        page.goto(host.url)
        settle(page)
        page.locator("#model").select_option("fashion")
        settle(page)
        page.wait_for_function(
            """async (wanted) => {
              const paths = [];
              for (const name of await caches.keys()) {
                for (const { url } of await (await caches.open(name)).keys()) paths.push(new URL(url).pathname);
              }
              return wanted.every((end) => paths.some((path) => path.endsWith(end)));
            }""",
            arg=["index.html", f"{NAME}/layers.bin", f"{NAME}/decoder.bin", "fashion/graph.bin", "fashion/decoder.bin",
                 "samples/mnist/labels.bin", "samples/mnist/1.bin", "ort.wasm.bin", "js/engine-worker.js"],
        )  # fmt: skip
        page.close()
        host.stop()
        page = watch.over(context.new_page())
        page.set_default_timeout(PATIENCE)
        page.goto(host.url)
        settle(page)
        expect(page.locator("#prediction")).to_contain_text("This is a 5")
        page.locator("button[data-mode=test]").click()
        page.locator("#digit-index").fill("599")
        page.locator("#digit-index").press("Enter")
        settle(page)
        assert page.evaluate("() => lab.digit(599).label") == int(data.load("mnist").test.labels[599])
        page.locator("#hand").click()
        expect(page.locator("#view-hand .legends")).to_contain_text("dynamic, ")
        page.locator("#tab-lab").click()
        page.locator("button[data-mode=draw]").click()
        page.locator("#model").select_option("fashion")
        settle(page)
        assert watch.complaints == []


CHANGE = {"transform": {"rotate": 25}, "selected": 3, "routing": {"options": {"iterations": 4}, "t": 2}}


def test_a_link_made_in_one_lab_opens_in_the_other(opened: Opened, lab: Host, served: Running) -> None:
    for start, end in ((lab.url, served.url), (served.url, lab.url)):
        page = opened(start)
        page.evaluate("(change) => lab.update(change)", CHANGE)
        settle(page)
        link = page.evaluate("() => lab.link()")
        other = opened(end + "#" + link.split("#")[1])
        found, expected = (one.evaluate("() => [lab.state, [...lab.result.activations]]") for one in (other, page))
        assert found[0] == expected[0]
        np.testing.assert_allclose(found[1], expected[1], atol=TOLERANCE)


@pytest.fixture
def watch(lab: Host, request: pytest.FixtureRequest) -> Iterator[Watch]:
    """Both Labs are known to the test that opens both."""
    watch = Watch(lab.url)
    if "served" in request.fixturenames:
        watch.see = lambda url: None  # type: ignore[method-assign]
    yield watch
    assert watch.complaints == []
    assert watch.strangers == []


def test_digits_mistakes_and_comparison_work_without_a_server(page: Page) -> None:
    page.locator("button[data-mode=test]").click()
    page.locator("#digit-mistakes").check()
    page.wait_for_function("() => lab.state.input.index > 0")
    settle(page)
    index, label, first = page.evaluate(
        "() => [lab.state.input.index, lab.digit(lab.state.input.index).label, lab.result.header.ranking[0]]"
    )
    assert label == int(data.load("mnist").test.labels[index])
    assert label != first
    page.locator("#digit-index").fill("700")
    page.locator("#digit-index").press("Enter")
    expect(page.locator("#panel-input")).to_contain_text("indices range from 0 to 599")
    page.locator("button[data-mode=draw]").click()
    page.locator("#compare").click()
    expect(page.locator("#compare-verdict")).to_contain_text("say")


def test_a_model_that_is_not_in_the_site_gets_a_message(opened: Opened, lab: Host) -> None:
    page = opened()
    link = page.evaluate("async () => { lab.update({ model: 'missing' }); return lab.state.model; }")
    assert link == NAME
    expect(page.locator("#notice")).to_contain_text("This Lab has no model “missing”")


def test_compressed_files_are_what_python_wrote(site: Path) -> None:
    frame = zlib.decompress((site / "models" / NAME / "decoder.bin").read_bytes())
    _, arrays = protocol.unpack(frame)
    model = checkpoint.load(NAME)
    assert model.decoder is not None
    np.testing.assert_array_equal(arrays["w0"], model.decoder.state_dict()["linears.0.weight"])
