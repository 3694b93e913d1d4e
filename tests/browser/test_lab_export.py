"""Export and presentation in a real browser; lab_both.py has what is tested with both Labs."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import numpy as np
from PIL import Image
from playwright.sync_api import Page, expect

from lab_both import STORY
from lab_page import NAME, Opened, canvas, exported, settle


def test_every_panel_can_be_exported_as_a_drawing_and_as_pixels(page: Page, tmp_path: Path) -> None:
    page.locator("#export").click()
    panels = ["overview", "input", "primary", "routing", "classes", "pose"]
    offered = page.locator(".export-menu button").evaluate_all("(buttons) => buttons.map(({ id }) => id)")
    assert {f"export-{panel}-{kind}" for panel in panels for kind in ("svg", "png")} <= set(offered)
    page.keyboard.press("Escape")
    said = {
        "input": "28×28 pixels",
        "primary": "length 0.96",
        "routing": "evidence for 5",
        "classes": "(length 0.96).",
        "pose": "0.372",
    }
    for panel, text in said.items():
        drawing = exported(page, tmp_path, f"{panel}-svg").read_text()
        ElementTree.fromstring(drawing)
        assert text in drawing
        with Image.open(exported(page, tmp_path, f"{panel}-png")) as sheet:
            assert sheet.width >= 1600
            assert len(sheet.convert("RGB").getcolors(1 << 24) or []) > 20
    drawing = (tmp_path / f"capsule-lab-{NAME}-routing.svg").read_text()
    assert drawing.count("<path") > 300  # ribbons and votes are vectors
    expect(page.locator("#play")).to_be_visible()  # the controls are back
    assert canvas(page, "#ribbons")[..., 3].any()


def test_routing_and_a_pose_dimension_can_be_exported_as_animations(page: Page, tmp_path: Path) -> None:
    with Image.open(exported(page, tmp_path, "routing-gif")) as film:
        assert getattr(film, "n_frames", 1) == 17  # three iterations with seven frames between two of them
        first = np.array(film.convert("RGB"), int)
        film.seek(16)
        assert np.abs(np.array(film.convert("RGB"), int) - first).max() > 40
    assert page.locator(".routing-body").get_attribute("data-shown") == "0"
    with Image.open(exported(page, tmp_path, "strip-gif")) as film:
        assert getattr(film, "n_frames", 1) == 20
    with Image.open(exported(page, tmp_path, "strip-png")) as strip:
        assert strip.width > 9 * strip.height


def test_routing_by_hand_can_be_exported(page: Page, tmp_path: Path) -> None:
    page.locator("#hand").click()
    expect(page.locator("#hand-difference")).not_to_be_empty()
    drawing = exported(page, tmp_path, "hand-svg").read_text()
    ElementTree.fromstring(drawing)
    assert "upper capsule 1" in drawing
    assert page.locator("#hand-difference").inner_text()[:12] in drawing


def test_a_focused_slider_keeps_its_arrow_keys_in_a_presentation(page: Page) -> None:
    page.evaluate("() => lab.update({ present: 'pose' })")
    page.locator("#pose input[data-dim='0']").focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("() => lab.state.tweak[lab.selected()][0]") > 0
    expect(page.locator("#slide h2")).to_have_text("Pose")
    page.keyboard.press("PageUp")  # as remote controls send
    expect(page.locator("#slide h2")).to_have_text("Class capsules")


def test_a_presentation_fits_on_a_phone(opened: Opened) -> None:
    page = opened(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    page.locator("#present").tap()
    for title in STORY:
        expect(page.locator("#slide h2")).to_have_text(title)
        assert page.evaluate("() => document.documentElement.scrollWidth") <= 390, title
        page.locator("#slide-next").tap(force=True)
    page.locator("#slide-end").tap()
    expect(page.locator("#slide")).to_be_hidden()


def test_a_presentation_leaves_out_what_a_model_does_not_have(page: Page) -> None:
    page.evaluate("() => lab.update({ model: 'small-cnn', present: 'routing' })")
    settle(page)
    expect(page.locator(".slide-count")).to_have_text("1 of 2")
    page.locator("#slide-next").click()
    expect(page.locator("#slide h2")).to_have_text("Classes")
