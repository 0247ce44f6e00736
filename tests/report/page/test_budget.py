"""The budget slider in a real browser, and the axe checks: each plan that it shows is the one that Python has."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import Browser

from graphopt import Pipeline
from graphopt.capture import CaptureSession
from graphopt.ir.words.written_units import format_bytes
from graphopt.report.page import Story, page_of_story, story_of_snapshots
from graphopt.runtime.programs.rewrite import rewrite
from tests.support.browser import Opened, opened
from tests.support.training import Blocks, next_token

LAYERS = 2
WORDS = {"k": "saved", "r": "recomputed", "o": "offloaded"}


@pytest.fixture(scope="module")
def story() -> Story:
    """A whole step that was fitted into less than it takes, with offloading allowed."""
    torch.manual_seed(0)
    model = Blocks(LAYERS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    session = CaptureSession(model, (torch.randint(0, 11, (8, 32)),), None, loss=next_token, optimizer=optimizer)
    result = rewrite(session, Pipeline("fit-memory{budget=70% cost=roofline host-budget=1GB}"), until="step")
    return story_of_snapshots(result.snapshots, result.records)


@pytest.fixture(scope="module")
def frontier(story: Story) -> dict[str, Any]:
    return story.records[-1].changed.details["frontier"]()


@pytest.fixture(scope="module")
def file(story: Story, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("budget") / "page.html"
    path.write_text(page_of_story(story), encoding="ascii")
    return path


@pytest.fixture
def page(browser: Browser, file: Path) -> Iterator[Opened]:
    with opened(browser, file) as found:
        yield found


def choose(page: Opened, place: int) -> None:
    """Move the slider to a plan."""
    slider = page.show("#budget-slider")
    slider.focus()
    page.page.evaluate(
        "place => { const s = document.getElementById('budget-slider'); s.value = place;"
        " s.dispatchEvent(new Event('input')); }",
        place,
    )
    settled(page, place)


def settled(page: Opened, place: int) -> None:
    """Wait until a plan is shown, which it is with the next frame."""
    page.page.wait_for_function("place => window.graphoptPage.plan().place === place", arg=place)
    page.page.evaluate("() => new Promise(next => requestAnimationFrame(() => requestAnimationFrame(next)))")


def sums(frontier: dict[str, Any], place: int) -> dict[str, int]:
    """Bytes of what a plan saves, recomputes and offloads."""
    sizes = frontier["tensors"]["bytes"]
    return {
        word: sum(size for code, size in zip(frontier["plans"][place], sizes, strict=True) if code == letter)
        for letter, word in WORDS.items()
    }


def test_the_page_opens_with_the_plan_that_was_applied(page: Opened, story: Story) -> None:
    after = story.snapshots[story.after].program.memory()
    assert f"peak {format_bytes(after.peak_bytes)}" in page.text("#budget-figures")
    assert "the plan that was applied" in page.text("#budget-figures")
    assert "estimated from the roofline" in page.text("#figures")
    assert page.ask("plan")["shown"] is None
    assert page.page.locator("#figures .value").count() == 2


def test_the_slider_shows_each_plan_as_python_has_it(page: Opened, frontier: dict[str, Any]) -> None:
    last = len(frontier["peaks"]) - 1
    assert int(page.page.get_attribute("#budget-slider", "max") or 0) == last
    assert page.page.locator("#budget-ticks option").count() == last + 1
    for place in sorted({0, last // 3, last // 2, last}):
        if place == frontier["chosen"]:
            continue
        choose(page, place)
        shown = page.text("#budget-figures")
        expected = sums(frontier, place)
        assert f"peak {format_bytes(frontier['peaks'][place])}" in shown
        assert f"saved {format_bytes(expected['saved'])}" in shown
        assert f"recomputed {format_bytes(expected['recomputed'])}" in shown
        share = frontier["extra"][place] / frontier["seconds"]
        if share > 0.001:
            assert f"time +{share:.1%}".replace("%", " %") in shown
        ribbons = page.ask("ribbons")
        for kind, word in (("kept", "saved"), ("again", "recomputed"), ("away", "offloaded")):
            drawn = sum(ribbon["bytes"] for ribbon in ribbons if ribbon["kind"] == kind)
            assert drawn == expected[word]
        assert page.table("#plan-table", "tfoot")[0][4] == format_bytes(expected["saved"])


def test_the_table_follows_the_slider_and_the_way_back_is_there(page: Opened, frontier: dict[str, Any]) -> None:
    choose(page, 0)
    smallest = page.table("#plan-table")
    choose(page, len(frontier["peaks"]) - 1)
    plain = page.table("#plan-table")
    assert [cells[0] for cells in smallest] == [cells[0] for cells in plain]
    assert smallest != plain
    assert all("recomputed" not in cells[3] for cells in plain)
    assert "nothing recomputed" in page.text("#budget-figures")
    page.page.click("#budget-back")
    page.page.wait_for_function("() => window.graphoptPage.plan().shown === null")
    assert "the plan that was applied" in page.text("#budget-figures")


@pytest.mark.sweep
def test_keys_and_buttons_step_from_plan_to_plan(page: Opened, frontier: dict[str, Any]) -> None:
    choose(page, 1)
    page.show("#budget-slider").focus()
    page.page.keyboard.press("ArrowLeft")
    settled(page, 0)
    assert page.page.locator("#budget-less").is_disabled()
    page.page.click("#budget-more")
    settled(page, 1)
    page.show("#frontier").focus()
    page.page.keyboard.press("End")
    settled(page, len(frontier["peaks"]) - 1)
    assert "nothing recomputed" in page.text("#budget-figures")


@pytest.mark.sweep
def test_bars_show_seconds_where_they_are_known(page: Opened) -> None:
    before = page.page.locator("#graph").screenshot()
    page.page.click("#by-seconds")
    assert page.page.get_attribute("#by-seconds", "aria-pressed") == "true"
    page.ask("draw")
    assert page.page.locator("#graph").screenshot() != before


@pytest.mark.sweep
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_axe_finds_no_serious_fault(browser: Browser, file: Path, dark: bool) -> None:
    axe = (files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8")
    with opened(browser, file, dark=dark) as page:
        page.page.evaluate(axe)
        result = page.page.evaluate("() => axe.run()")
        found = [
            f"{fault['id']}: {fault['help']}: {[node['html'][:120] for node in fault['nodes'][:4]]}"
            for fault in result["violations"]
            if fault["impact"] in ("serious", "critical")
        ]
        assert found == []
        assert len(result["passes"]) > 10


@pytest.mark.sweep
def test_a_phone_shows_all_of_it(browser: Browser, file: Path) -> None:
    with opened(browser, file, size=(390, 844)) as page:
        assert page.page.evaluate("document.documentElement.scrollWidth") <= 390
        choose(page, 0)
        for selector in ("#budget-slider", "#graph", "#plan-table", "#frontier"):
            box = page.show(selector).bounding_box()
            assert box is not None
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= 390
