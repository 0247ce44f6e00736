"""The page of what each rank holds and when it waits."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path

import pytest
import torch
from torch import nn

from graphopt import GraphoptError
from graphopt.ir.provided.formats import find_format
from tests.support.hostile import ATTACK
from tests.support.ranks import run_ranks
from tests.support.training import captured

PROLOGUE = """
from torch import nn
import graphopt
from graphopt.passes import *
from dataclasses import replace
from graphopt.ir.node import info, set_info
from graphopt.ir.words.written_units import format_bytes
from graphopt.rewriting.distributed.prediction.link import Link
from tests.support.training import mean_square

def step(*passes, features=24):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, features), nn.GELU(), nn.BatchNorm1d(features), nn.Linear(features, 8))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    found = graphopt.optimize_step(model, optimizer, [DataParallel(), *passes], loss=mean_square, verify=False)
    return found.prepare(torch.randn(8, 16))
"""

PAGES = """
whole = step()
pages = {
    "dense": whole, "stage 1": step(ShardOptimizer()),
    "stage 3": step(ShardParameters(min_bytes=200, cost="roofline")),
}
for name, found in pages.items():
    say([name, found.program.to("ranks"), format_bytes(found.program.memory().peak_bytes)])
    links = ("10Mbit", "100Gbit", Link(1e9, latency=0.5))
    say([found.program.to("ranks", link=link, cost="a100-80gb") for link in links])
"""


def rows(page: str, heading: str) -> dict[str, list[str]]:
    """The rows of the table behind a heading, by what stands first in each."""
    part = page.partition(f"<h2>{heading}</h2>")[2].partition("<h2>")[0]
    found = [
        [unescape(cell) for cell in re.findall(r"<td[^>]*>([^<]*)</td>", row)]
        for row in re.findall(r"<tr>(.*?)</tr>", part)
    ]
    return {row[0]: row[1:] for row in found if row}


def waited(page: str) -> str:
    found = re.search(r"a rank waits ([^(]+) \(", page)
    assert found is not None
    return found[1]


def test_a_rank_holds_its_share_and_waits_longer_for_a_slower_link(tmp_path: Path) -> None:
    said = iter(run_ranks(PROLOGUE + PAGES, 2, tmp_path / "store")[0])
    holds, divided = {}, {}
    for name, page, peak in said:
        assert f"A step peaks at {peak}." in page
        assert "what each of 2 ranks holds, and when it waits" in page
        holds[name], divided[name] = (
            rows(page, "What a rank holds between steps"),
            rows(page, "Which elements each rank has"),
        )
        slow, fast, late = next(said)
        assert "a rank waits 0 s" not in slow
        assert len({waited(found) for found in (slow, fast, late)}) == 3
        assert "500000 us per round" in late
    # 16 x 24 + 24 + 24 + 24 + 24 x 8 + 8 parameters of 4 bytes, and as much twice in AdamW's states
    assert holds["dense"]["parameters, whole"] == ["2.6 kB", "2.6 kB", "100%"]
    assert not divided["dense"]
    assert holds["stage 1"]["parameters, whole"] == ["2.6 kB", "2.6 kB", "100%"]
    assert holds["stage 1"]["shards of optimizer state"] == ["2.6 kB", "5.2 kB", "50%"]
    assert divided["stage 1"]["0.weight/exp_avg"] == ["768 B", "0–191", "192–383"]
    assert divided["stage 3"]["0.weight"] == ["768 B", "0–191", "192–383"]
    assert divided["stage 1"]["3.bias/exp_avg"] == ["16 B", "0–3", "4–7"]
    assert divided["stage 3"]["3.weight"] == ["384 B", "0–95", "96–191"]
    assert holds["stage 3"]["parameters, whole"] == ["320 B", "320 B", "100%"]  # those below min_bytes
    assert holds["stage 3"]["shards of parameters"] == ["1.2 kB", "2.3 kB", "50%"]
    assert holds["stage 3"]["buffers"] == holds["dense"]["buffers"]


HOSTILE = """
made = step().program
made.title = ATTACK
for node in made.graph.nodes:
    if node.op == "call_function":
        set_info(node, replace(info(node), names=(ATTACK,)))
say(made.to("ranks"))
"""


def test_names_from_elsewhere_are_text_and_nothing_may_run(tmp_path: Path) -> None:
    (page,) = run_ranks(f"{PROLOGUE}\nATTACK = {ATTACK!r}\n{HOSTILE}", 2, tmp_path / "store")[0]
    assert page.isascii()
    assert "<script" not in page.lower()
    assert page.count("<svg") == 1
    assert "default-src &#39;none&#39;" in page
    assert set(re.findall(r"<(\w+)", page)) <= {
        "html", "head", "meta", "title", "style", "body", "main", "h1", "h2", "p", "div", "table", "thead", "tbody",
        "tr", "th", "td", "svg", "text", "rect",
    }  # fmt: skip


def test_a_program_that_exchanges_nothing_is_refused() -> None:
    program = captured(nn.Linear(3, 2), torch.zeros(2, 3))
    with pytest.raises(GraphoptError, match="exchanges nothing with other ranks: give the program of a step with"):
        program.to("ranks")
    with pytest.raises(GraphoptError, match="'12 parsec' is not a bandwidth"):
        program.to("ranks", link="12 parsec")
    with pytest.raises(GraphoptError, match="link is a bandwidth such as '10Gbit', or a Link, got 10"):
        program.to("ranks", link=10)
    assert find_format("ranks").suffix == ".ranks.html"
