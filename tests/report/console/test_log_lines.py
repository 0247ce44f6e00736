"""The line in the log for each capture: what it says, where it goes, and how it is silenced."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import graphopt
from graphopt.passes import Recompute
from tests.support.training import mean_square

X = torch.linspace(-1, 1, 64).reshape(8, 8)
LINE = r"Sequential: peak [\d.]+ [kM]?B( -> [\d.]+ [kM]?B)? predicted.*, 1 pass, \d+\.\d s"

TOOK = r"Sequential: captured \d+\.\d s, rewritten \d+\.\d s"
"""Behind the line of the first capture."""

SCRIPT = """
import logging, sys, torch, graphopt
from torch import nn
if "root" in sys.argv:
    logging.basicConfig(level=logging.WARNING, stream=sys.stdout)
if "level" in sys.argv:
    logging.getLogger("graphopt").setLevel(logging.WARNING)
net = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.GELU(), nn.Linear(8, 8))
model = graphopt.optimize(net, "recompute{checkpoints=0,3}")
for rows in (8, 9):
    model(torch.zeros(rows, 8)).sum().backward()
"""


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.GELU(), nn.Linear(8, 8))


def test_each_capture_is_one_line_at_info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="graphopt.capture")
    optimized = graphopt.optimize(model(), Recompute(("0", "3")))
    optimized(X), optimized(X), optimized(X[:4])
    lines = [record.getMessage() for record in caplog.records if record.name == "graphopt.capture"]
    assert [bool(re.fullmatch(LINE, line)) for line in lines] == [True, False, True], lines
    assert re.fullmatch(TOOK, lines[1])


def test_a_change_at_an_earlier_stage_is_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="graphopt.capture")
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
    graphopt.optimize_step(net, optimizer, Recompute(("0", "3")), loss=mean_square).prepare(X)
    line, took = [record.getMessage() for record in caplog.records if record.name == "graphopt.capture"]
    assert re.fullmatch(TOOK, took)
    assert re.search(r"predicted( \(joint stage .* -> .*\))?, 1 pass, ", line)


@pytest.mark.sweep(but=("words4-off-0",))
@pytest.mark.parametrize(
    ("words", "setting", "lines"),
    [((), "", 2), (("root",), "", 0), (("level",), "", 0), ((), "warning", 0), ((), "off", 0)],
)
def test_without_a_terminal_the_line_reaches_stderr(
    words: tuple[str, ...], setting: str, lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHOPT_LOG", setting)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *words], capture_output=True, text=True, check=True, timeout=120,
        cwd=Path(__file__).parents[3],
    )  # fmt: skip
    told = [line for line in done.stderr.splitlines() if not re.match("graphopt: capturing", line)]  # where it was slow
    expected = [LINE, TOOK, LINE][: 3 if lines else 0]
    assert [bool(re.fullmatch(f"graphopt: {form}", line)) for form, line in zip(expected, told, strict=True)] == [
        True
    ] * len(expected)
    assert done.stdout == ""
