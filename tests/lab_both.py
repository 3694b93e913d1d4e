"""Tests of the page for both Labs: browser/test_lab.py runs them with a server, test_static_lab.py without."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from playwright.sync_api import Page, expect

from capsnet import data
from capsnet.io import checkpoint
from capsnet.lab.samples import centred
from capsnet.models.capsnet import CapsNet
from capsnet.routing.base import ALL, Sizes
from capsnet.routing.dynamic import DynamicRouting
from capsnet.routing.kuramoto import KuramotoRouting
from lab_page import (
    Opened,
    Watch,
    canvas,
    draw,
    draw_one,
    exported,
    glided,
    lengths,
    move_slider,
    numbers,
    painted,
    settle,
)


def test_a_drawn_stroke_makes_one_bar_lead(page: Page) -> None:
    draw_one(page)
    found = lengths(page)
    assert int(np.argmax(found)) == 1
    assert sorted(found)[-1] > 0.7 > 0.5 > sorted(found)[-2]
    expect(page.locator("#prediction")).to_contain_text("This is a 1")


def test_a_slider_shows_the_reconstruction_of_torch(page: Page, model: CapsNet) -> None:
    before = canvas(page, "#reconstruction")
    move_slider(page, "#pose input[data-dim='3']", 0.25)
    move_slider(page, "#pose input[data-dim='9']", -0.2)
    painted(page)
    after = canvas(page, "#reconstruction")
    assert np.abs(after.astype(int) - before).max() > 40
    poses = torch.from_numpy(numbers(page, "lab.result.poses")).view(1, 10, 16)
    klass = page.evaluate("() => lab.selected()")
    poses[0, klass, 3] += 0.25
    poses[0, klass, 9] -= 0.2
    with torch.inference_mode():
        expected = model.reconstruct(poses, torch.tensor([klass]))
    assert expected is not None
    pose = json.dumps(poses[0, klass].tolist())
    decoded = numbers(page, f"lab.decode({pose}, {klass})")
    np.testing.assert_allclose(decoded, expected.flatten(), atol=1e-4)
    # the canvas shows this image pixel by pixel
    shade = after[..., :3].mean(-1)
    if shade.shape != (28, 28):
        shade = np.array(Image.fromarray(shade.astype(np.uint8)).resize((28, 28), Image.Resampling.BOX), float)
    assert abs(np.corrcoef(shade.flatten(), expected.flatten())[0, 1]) > 0.99


def test_scrubbing_steps_through_the_iterations_and_couplings_sum_to_one(page: Page, model: CapsNet) -> None:
    page.get_by_label("More iterations", exact=True).first.click()
    settle(page)
    shape = page.evaluate("() => lab.result.couplings.shape")
    assert shape == [4, 288, 10]
    couplings = numbers(page, "lab.result.couplings").reshape(shape)
    np.testing.assert_allclose(couplings.sum(-1), 1, atol=1e-5)
    np.testing.assert_allclose(couplings[0], 0.1, atol=1e-6)
    pictures, said = [], []
    for t in range(4):
        move_slider(page, "#scrub", t)
        glided(page, t)
        assert page.evaluate("() => lab.state.routing.t") == t
        pictures.append(canvas(page, "#ribbons"))
        said.append(float(page.locator("#ribbons").get_attribute("data-value") or "nan"))
    assert said[0] == pytest.approx(0.1, abs=1e-3)
    assert said == sorted(said)
    assert said[-1] > said[0] + 0.005
    assert np.abs(pictures[0].astype(int) - pictures[-1]).max() > 20


def two_digits(model: CapsNet, digits: data.Dataset, dx: int, dy: int) -> tuple[int, int]:
    """The indices of two test digits that the network recognises when they overlap."""
    for a in range(40):
        others = torch.arange(40, 140)
        others = others[digits.labels[others] != digits.labels[a]]
        shape = model.config.image_shape
        first = centred(digits.images[a].float() / 255, shape)
        second = centred(digits.images[others].float() / 255, shape).roll((dy, dx), (-2, -1))
        seen = model.predict((first + second).clamp(max=1), top=2)
        for n, b in enumerate(others.tolist()):
            both = {int(digits.labels[a]), int(digits.labels[b])}
            if set(seen.labels[n].tolist()) == both and seen.activations[n].topk(3).values[1] > 0.7:
                return a, b
    raise AssertionError("the network recognises no pair")


def test_two_overlapping_digits_are_both_named_and_decoded(opened: Opened, digits: data.Dataset) -> None:
    page = opened()
    page.locator("button[data-mode=overlap]").click()
    page.wait_for_function("() => lab.model.multi_label")
    model = checkpoint.load(page.evaluate("() => lab.model.name"))
    assert isinstance(model, CapsNet)
    a, b = two_digits(model, digits, 4, -4)
    for which, index in (("a", a), ("b", b)):
        page.locator(f"#overlap-{which}").fill(str(index))
        page.locator(f"#overlap-{which}").press("Enter")
    page.locator("#draw").focus()
    while (at := page.evaluate("() => [lab.state.input.overlap.dx, lab.state.input.overlap.dy]")) != [4, -4]:
        keys = [("ArrowLeft", at[0] > 4), ("ArrowRight", at[0] < 4), ("ArrowUp", at[1] > -4), ("ArrowDown", at[1] < -4)]
        page.keyboard.press(next(key for key, wanted in keys if wanted))
    settle(page)
    shape = model.config.image_shape
    first, second = (centred(digits.images[n].float() / 255, shape) for n in (a, b))
    expected = (first + second.roll((-4, 4), (-2, -1))).clamp(max=1)
    np.testing.assert_allclose(numbers(page, "lab.input"), expected.flatten(), atol=1e-3)
    named = set(re.findall(r"\d", page.locator("#prediction").inner_text()))
    assert named == {str(int(digits.labels[n])) for n in (a, b)}
    # each in its own colour
    pictures = page.locator("#panel-classes .decoded canvas")
    assert pictures.count() >= 1
    seen = canvas(page, "#panel-classes .decoded canvas")[..., :3].astype(int)
    assert np.ptp(seen, axis=-1).max() > 40


def state_of(page: Page) -> dict[str, Any]:
    return page.evaluate("() => lab.state")


def test_a_link_restores_the_whole_state_including_the_drawing(opened: Opened) -> None:
    page = opened()
    page.locator("#clear").click()
    draw(page, (0.3, 0.25), (0.7, 0.25), (0.45, 0.8))
    draw(page, (0.35, 0.5), (0.6, 0.5))
    settle(page)
    page.evaluate(
        """() => lab.update({
          transform: { rotate: 12, scale: 1.1, shear: 0.2, x: 1.5, y: -2 },
          routing: { options: { iterations: 5, leaky: true }, t: 2 },
          selected: 7, keepLength: true, names: { 'quick-mnist/7/3': 'thickness' } })"""
    )
    settle(page)
    move_slider(page, "#pose input[data-dim='3']", 0.155)
    page.locator("#pose-keep").click()
    move_slider(page, "#mix", 0.3)
    settle(page)
    page.evaluate(
        "async () => { while (location.href !== await lab.link()) await new Promise(requestAnimationFrame); }"
    )
    link = page.url
    assert "#" in link
    other = opened(link)
    assert state_of(other) == state_of(page)
    np.testing.assert_array_equal(numbers(other, "lab.input"), numbers(page, "lab.input"))
    painted(other)
    for selector in ("#draw", "#seen", "#reconstruction"):
        np.testing.assert_array_equal(canvas(other, selector), canvas(page, selector))
    expect(other.locator("#prediction")).to_have_text(page.locator("#prediction").inner_text())
    other.reload()
    settle(other)
    assert state_of(other) == state_of(page)


def test_an_image_can_be_uploaded(page: Page, watch: Watch) -> None:
    image = Image.new("L", (120, 160), "white")
    image.paste("black", (54, 20, 66, 140))
    file = io.BytesIO()
    image.save(file, "PNG")
    page.locator("button[data-mode=image]").click()
    page.locator("#file").set_input_files({"name": "one.png", "mimeType": "image/png", "buffer": file.getvalue()})
    page.wait_for_function("() => lab.state.input.pixels")
    settle(page)
    expect(page.locator("#prediction")).to_contain_text("This is a 1")
    page.locator("#file").set_input_files({"name": "no.png", "mimeType": "image/png", "buffer": b"not an image"})
    expect(page.locator("#notice")).to_contain_text("image")
    assert [complaint for complaint in watch.complaints if "422" not in complaint] == []
    watch.complaints.clear()  # browsers always log a 422


def test_compare_shows_the_answer_of_the_cnn(page: Page) -> None:
    page.locator("#compare").click()
    expect(page.locator("#panel-compare")).to_be_visible()
    expect(page.locator("#compare-verdict")).to_contain_text(re.compile("say"))
    shown = page.locator("#panel-compare").inner_text()
    for model in page.evaluate("() => lab.models.filter((m) => [lab.model.name, 'small-cnn'].includes(m.name))"):
        assert model["name"] in shown
    assert "parameters" in shown
    verdict = page.locator("#compare-verdict").inner_text()
    page.locator("#draw").focus()
    for _ in range(6):
        page.keyboard.press("ArrowRight")
    settle(page)
    expect(page.locator("#compare-verdict")).not_to_have_text(verdict)


def test_routing_by_hand_shows_procedure_1(page: Page) -> None:
    page.locator("#hand").click()
    expect(page.locator("#view-hand")).to_be_visible()
    expect(page.locator("#view-hand")).to_contain_text("Procedure 1")
    lit = []
    for _ in range(6):
        lit.append(page.locator("#view-hand [aria-current=step]").get_attribute("data-line"))
        page.locator("#hand-step").click()
        painted(page)
    assert lit[:5] == ["2", "4", "5", "6", "7"]
    while page.locator("#hand-step").is_enabled():
        page.locator("#hand-step").click()
        painted(page)
    drawn = page.evaluate("() => lab.state.hand")
    v = DynamicRouting().route(torch.tensor([drawn["votes"]]), None, ALL, trace=False).poses[0]
    shown = page.locator("#view-hand").inner_text()
    for length in v.norm(dim=-1).tolist():
        assert f"{length:.2f}" in shown


def phases(page: Page) -> list[float]:
    """The phases of all oscillators in whole degrees."""
    cells = page.locator("#view-hand td[data-card=phase]")
    angles = cells.evaluate_all("(cells) => cells.map((cell) => cell.textContent)")
    return [float(angle.replace("−", "-").rstrip("°")) for angle in angles]


def test_by_hand_oscillators_in_phase_take_one_colour(page: Page) -> None:
    page.locator("#hand").click()
    page.locator("#hand-oscillators").click()
    expect(page.locator("#hand-routing")).to_have_value("kuramoto")
    page.wait_for_function("() => lab.state.hand.t === 2")  # it plays
    page.locator("#hand-play").click()
    votes = torch.tensor([page.evaluate("() => lab.state.hand.votes")])
    routing = KuramotoRouting(iterations=10, step=0.2)
    routing.build(Sizes(4, 2, 2, 2, types=4))
    for coupling, groups in ((0.0, ["0", "0", "0", ""]), (6.0, ["0"] * 4)):
        move_slider(page, "#hand-option-coupling", coupling)
        page.evaluate("() => lab.update({ hand: { t: 99, line: 0 } })")
        painted(page)
        torch.nn.init.constant_(routing.kappa, coupling)
        trace = routing.route(votes, None, ALL, trace=True).trace
        assert trace is not None
        assert trace.oscillators is not None
        x, y = trace.oscillators[-1, 0].detach().unbind(-1)
        wanted = torch.atan2(y, x).rad2deg().flatten().numpy()
        for _ in range(50):  # until the page has drawn the last change
            shown = phases(page)
            if np.allclose(shown, wanted, atol=0.51):
                break
            page.wait_for_timeout(100)
        np.testing.assert_allclose(shown, wanted, atol=0.51)
        dots = page.locator("[data-upper='0'] .oscillator")
        assert dots.evaluate_all("(dots) => dots.map(({ dataset }) => dataset.group)") == groups


def test_a_panel_and_all_numbers_can_be_exported(page: Page, tmp_path: Path) -> None:
    assert exported(page, tmp_path, "routing-svg").read_text().count("<path") > 300
    record = json.loads(exported(page, tmp_path, "numbers-json").read_text())
    assert record["activations"]["shape"] == [10]
    np.testing.assert_allclose(record["activations"]["data"], numbers(page, "lab.result.activations"), atol=1e-6)


STORY = ["Input", "Primary capsules", "Votes", "Routing", "Class capsules", "Pose"]
SHOWN = ["draw", "primary", "votes", "ribbons", "classes", "reconstruction"]


def test_a_presentation_tells_the_story_slide_by_slide(opened: Opened) -> None:
    page = opened()
    normal = page.locator("#prediction").evaluate("(p) => parseFloat(getComputedStyle(p).fontSize)")
    page.locator("#present").click()
    for number, (title, shown) in enumerate(zip(STORY, SHOWN, strict=True)):
        expect(page.locator("#slide h2")).to_have_text(title)
        expect(page.locator(".slide-count")).to_have_text(f"{number + 1} of 6")
        expect(page.locator(f"#{shown}")).to_be_visible()
        expect(page.locator(".panel:visible")).to_have_count(1)
        page.keyboard.press("PageDown" if number % 2 else "ArrowRight")
    expect(page.locator("#slide-next")).to_be_disabled()
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#slide h2")).to_have_text("Class capsules")
    assert page.locator("#prediction").evaluate("(p) => parseFloat(getComputedStyle(p).fontSize)") > 1.7 * normal
    link = page.evaluate("() => lab.link()")
    page.keyboard.press("Escape")
    expect(page.locator("#slide")).to_be_hidden()
    expect(page.locator("#header")).to_be_visible()
    expect(page.locator("#present")).to_be_focused()
    other = opened(link)
    expect(other.locator("#slide h2")).to_have_text("Class capsules")
