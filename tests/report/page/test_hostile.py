"""Names that try to be more than names: on the page nothing executes, and everything is shown."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from playwright.sync_api import Browser
from torch import nn

from graphopt import Program
from graphopt.ir.context import Context
from graphopt.ir.node import info, set_info
from graphopt.report.page import page_of_program, page_of_story
from graphopt.report.page.story import Snapshot, Story
from tests.support.browser import Opened, opened
from tests.support.training import captured

ATTACK = "</script><img src=x onerror=alert(1)><script>alert(2)</script>"
TURNED = "safe\u202eslarutan\u2066\u0007"
QUOTES = "\"'`&amp;{{style}}${alert(3)}\\"
LONG = "long" * 2500
NAMES = (ATTACK, TURNED, QUOTES, LONG)
SOURCE = f"/tmp/{ATTACK}\u202e.py:1 in {QUOTES}"


def hostile() -> Program:
    """A program in which names of modules, tensors, files, passes and the model itself are hostile."""
    program = captured(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4), nn.GELU()), torch.zeros(2, 4))
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    for number, node in enumerate(calls):
        name = NAMES[number % len(NAMES)]
        module = name.replace(".", "")
        set_info(node, replace(info(node), module=module, names=(f"{name}{number}",), source=SOURCE, origin=ATTACK))
    program.title = ATTACK + TURNED + LONG
    program.context = Context(history=(ATTACK,))
    return program


@pytest.fixture(scope="module")
def program() -> Program:
    return hostile()


@pytest.fixture
def page(browser: Browser, program: Program, tmp_path: Path) -> Iterator[Opened]:
    story = Story(
        (Snapshot(ATTACK, program), Snapshot(LONG, program.copy())), 0, 1, QUOTES + ATTACK, f"graphopt '{ATTACK}'"
    )
    file = tmp_path / "hostile.html"
    file.write_text(page_of_story(story), encoding="ascii")
    with opened(browser, file) as found:
        yield found


def written(text: str) -> str:
    """What the page shows of a text: what is invisible or turns the order of writing around is written out."""
    return re.sub("[\u202e\u2066\u0007]", lambda found: f"\\u{ord(found[0]):04x}", text)


def assert_harmless(page: Opened) -> None:
    page.page.wait_for_timeout(50)
    assert page.problems == []
    assert page.page.locator("img").count() == 0
    assert page.page.locator("script").count() == 2
    assert page.page.evaluate("document.title").startswith("</script><img")


def test_nothing_executes_and_the_title_is_whole(page: Opened) -> None:
    assert_harmless(page)
    assert ATTACK in page.text("#sentence")
    assert page.text("#title").startswith(ATTACK)
    assert "\u202e" not in page.page.evaluate("document.body.innerText")
    assert page.page.evaluate("document.documentElement.scrollWidth") <= 1280


@pytest.mark.sweep(but=("quotes",))
@pytest.mark.parametrize("name", NAMES, ids=["script", "turned", "quotes", "long"])
def test_a_calls_facts_are_shown_whole(page: Opened, program: Program, name: str) -> None:
    node = next(n for n in program.graph.nodes if n.op == "call_function" and info(n).names[0].startswith(name))
    page.page.click("#open-all")
    page.find(info(node).names[0])
    assert page.ask("selected") == node.name
    shown = page.details()
    assert page.text("#details h3") == written(info(node).names[0])
    assert shown["module"] == written(info(node).module)
    assert shown["source"] == written(SOURCE)
    assert shown["made by"] == written(ATTACK)
    place = page.ask("place", node.name)
    page.page.mouse.move(place["x"], place["y"])
    page.page.mouse.click(place["x"], place["y"])
    page.page.locator("#details button").first.click()
    assert_harmless(page)


def test_every_part_of_the_page_copes(page: Opened, program: Program) -> None:
    page.slide(1)
    page.slide(0)
    assert written(ATTACK) in page.text("#snapshot")
    page.show("#chart-before canvas").press("End")
    alive = {cells[0] for cells in page.table("#moment-alive")}
    timeline = program.memory()
    assert alive == {written(item.name) for item in timeline.alive_at(len(timeline.nodes) - 1)}
    names = {cells[0] for cells in page.table("#activations-table")}
    assert any(written(TURNED) in name for name in names)
    for head in range(page.page.locator("#activations-table th button").count()):
        page.page.locator("#activations-table th button").nth(head).click()
    assert page.page.locator("#build pre").all_inner_texts() == [QUOTES + ATTACK, f"graphopt '{ATTACK}'"]
    assert_harmless(page)


def test_the_file_holds_no_markup_but_its_own(program: Program) -> None:
    text = page_of_program(program)
    assert text.isascii()
    assert text.count("<script") == 2
    assert text.count("</script>") == 2
    assert "<img" not in text
    data = text.split('id="data">')[1].split("</script>")[0]
    assert not set(data) & set("<>&")


@pytest.mark.sweep
def test_the_policy_lets_nothing_in(browser: Browser, program: Program, tmp_path: Path) -> None:
    """A script, a style and a picture that somebody puts into the file do nothing."""
    file, picture = tmp_path / "broken.html", (tmp_path / "picture.png").as_uri()
    inserted = f"<script>document.title = 'owned'</script><img src='{picture}'><i style='color: red'>i</i>"
    file.write_text(page_of_program(program).replace("<header>", f"{inserted}<header>"), encoding="ascii")
    with opened(browser, file, harmless=False) as found:
        assert found.page.evaluate("document.title") != "owned"
        assert found.page.locator("i").evaluate("i => getComputedStyle(i).color") != "rgb(255, 0, 0)"
        assert sum("Content Security Policy" in problem for problem in found.problems) == 3
        assert picture not in found.requests or "img-src" in "".join(found.problems)
