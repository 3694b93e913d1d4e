"""The view by hand in a real browser."""

from __future__ import annotations

import numpy as np
import pytest
from playwright.sync_api import Page, expect

from capsnet.lab.hand import by_hand
from capsnet.routing import kuramoto
from lab_page import Opened, choose_by_hand, painted
from lab_server import known_plugin


def couplings(page: Page, which: int = 0) -> list[str]:
    """The couplings of the chosen algorithm (0) or of the one it is compared with (1), as text."""
    return [str(bar.get_attribute("data-value")) for bar in page.locator(f"[data-pair^='{which}/']").all()]


def couplings_once_drawn(page: Page, wanted: np.ndarray) -> np.ndarray:
    """The couplings of the page; it may still be drawing the last choice."""
    for _ in range(50):
        shown = np.array([float(value.replace("−", "-")) for value in couplings(page)])
        if shown.shape == wanted.shape and np.allclose(shown, wanted, atol=6e-4):
            break
        page.wait_for_timeout(100)
    return shown


def test_by_hand_every_algorithm_routes_the_same_votes(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kuramoto, "STRENGTH", 4.0)  # where the slider of the page starts
    page.locator("#hand").click()
    votes = page.evaluate("() => lab.state.hand.votes")
    choose_by_hand(page, "max-min")
    for name in page.evaluate("() => lab.routings.map(({ name }) => name)"):
        choose_by_hand(page, name)
        with known_plugin():  # one of the algorithms
            trace = by_hand(votes, name, {"iterations": 10, "step": 0.2} if name == "kuramoto" else {})
        wanted = np.array(trace["couplings"][-1]).T.flatten()
        np.testing.assert_allclose(couplings_once_drawn(page, wanted), wanted, atol=6e-4)
        caption = page.locator("#view-hand figcaption").first.inner_text()
        assert f"{trace['activations'][-1][0]:.2f}" in caption
        assert page.locator("#hand-routing").input_value() == name
    assert page.evaluate("() => lab.state.hand.votes") == votes


def test_by_hand_a_symbol_means_what_the_algorithm_calls_it(page: Page) -> None:
    page.locator("#hand").click()
    for name, title in (("gates", "Gate"), ("dynamic", "Coupling coefficient")):
        choose_by_hand(page, name)
        page.locator("#view-hand td[data-card=c]").first.hover()
        expect(page.locator("#card b")).to_have_text(title)


def test_by_hand_gaussians_show_their_spread(page: Page) -> None:
    page.locator("#hand").click()
    choose_by_hand(page, "em")
    expect(page.locator("#view-hand .spread-line").first).to_be_visible()
    spread = by_hand(page.evaluate("() => lab.state.hand.votes"), "em", {})["variances"][-1][0][0] ** 0.5
    shown = float(page.locator("#view-hand .spread-line").first.get_attribute("rx") or 0)
    assert shown == pytest.approx(160 * spread / 1.3, rel=1e-4)
    choose_by_hand(page, "uniform")
    expect(page.locator("#view-hand .spread-line").first).to_be_hidden()


def test_by_hand_two_algorithms_are_compared_and_the_link_keeps_both(page: Page, opened: Opened) -> None:
    page.locator("#hand").click()
    choose_by_hand(page, "max-min")
    expect(page.locator("#hand-difference")).to_contain_text("Largest difference")
    dynamic = couplings(page, 1)
    page.locator("#hand-against").select_option("uniform")
    expect(page.locator("#view-hand .legends")).to_contain_text("uniform, one step")
    assert set(couplings(page, 1)) == {"0.500"} != set(dynamic)
    page.locator("#view-hand [aria-label='More iterations']").click()
    expect(page.locator("#view-hand .procedure li")).to_have_count(4)
    page.locator("#view-hand .planes").click(position={"x": 2, "y": 2})
    page.locator("#view-hand [data-vote='0-0']").focus()
    page.keyboard.press("ArrowUp")  # moves the vote, not the step
    page.locator("#hand-play").focus()
    page.keyboard.press("ArrowLeft")
    painted(page)
    assert page.locator("#view-hand [aria-current=step]").get_attribute("data-line") == "2"
    again = opened(page.evaluate("() => lab.link()"), settled=False)
    expect(again.locator("#hand-against")).to_have_value("uniform")
    expect(again.locator("#hand-routing")).to_have_value("max-min")
    expect(again.locator("#view-hand [aria-current=step]")).to_have_attribute("data-line", "2")
    assert couplings(again) == couplings(page)


def test_an_algorithm_that_the_server_does_not_have_is_replaced(page: Page) -> None:
    page.evaluate("() => lab.update({ view: 'hand', hand: { routing: 'fuzzy' } })")
    expect(page.locator("#notice")).to_contain_text("no routing “fuzzy”")
    expect(page.locator("#view-hand")).to_contain_text("Procedure 1")
