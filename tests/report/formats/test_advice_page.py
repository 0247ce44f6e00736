"""The page and the terminal's picture of the pipelines that passes were chosen from."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands.test_plan_of_ranks import STEP
from tests.support.browser import chromium, opened
from tests.support.command import Command

ARGV = ("advise", STEP, "--device", "h100-80gb", "--devices", "16", "--network", "1Gbit", "--memory", "636MB")


def candidates(run: Command) -> list[dict[str, Any]]:
    return run(*ARGV, "--json").data["candidates"]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


def test_each_point_leads_to_its_pipeline(run: Command, tmp_path: Path) -> None:
    file = tmp_path / "passes.html"
    assert run(*ARGV, "--format", "html", "-o", file).code == 0
    weighed = candidates(run)
    chosen = next(index for index, one in enumerate(weighed) if one["fits"])
    with chromium() as browser, opened(browser, file) as page:
        rows = page.table("table")
        assert [cells[0] for cells in rows] == [one["passes"] or "no pass" for one in weighed]
        assert [cells[4] for cells in rows].count("chosen") == 1
        assert rows[chosen][4] == "chosen"
        links = page.page.locator("svg a")
        assert links.count() == sum(one["step"] is not None for one in weighed)
        for place in range(links.count()):
            told = links.nth(place).locator("title").text_content() or ""
            links.nth(place).focus()
            page.page.keyboard.press("Enter")
            target = page.page.locator("tr:target td").first
            assert told.split(": ")[0] == target.inner_text()


def test_a_terminal_shows_all_of_them_and_the_budget(run: Command) -> None:
    outcome = run(*ARGV)
    assert outcome.code == 0
    *_, plot = outcome.out.rstrip().split("\n\n")
    *rows, axis, _, legend = plot.splitlines()
    assert len(rows) == 10
    assert axis.strip().startswith("└")
    drawn = "".join(rows)
    assert drawn.count("◆") == 1
    (budget,) = {row.index("┊") for row in rows if "┊" in row}
    for row in rows:
        assert all(match.start() <= budget for match in re.finditer("[◆●]", row)), "what fits is left of the budget"
    assert 1 <= drawn.count("○") <= sum(not one["fits"] for one in candidates(run))
    assert legend.startswith("◆ chosen  ● fits  ○ does not fit  ┊ 99.1 MB")
