"""Nothing waits in silence: what takes long says what it does and on what, and the first step what it took."""

from __future__ import annotations

import contextlib
import gc
import logging
import re
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, final

import pytest
import torch
from torch import nn

import graphopt
from graphopt import Changed, Pass
from graphopt.passes import FitMemory, Recompute
from graphopt.report.console import announced
from graphopt.report.console.progress_bar import TerminalProgress
from graphopt.rewriting import progress
from graphopt.rewriting.progress import measuring, searching, working
from graphopt.runtime.calls import observers as seconds_taken
from tests.report.console.test_terminal import Terminal
from tests.support.command import Command, target
from tests.support.training import mean_square

X = torch.linspace(-1, 1, 512).reshape(64, 8)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4)))


def step_of(passes: Any = (), **options: Any) -> Any:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return graphopt.optimize_step(model, optimizer, passes, loss=mean_square, **options)


@dataclass
class Recorder:
    """Notes what is shown as work, and the lines that stay."""

    shown: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def working(self, message: str) -> Iterator[Callable[[str], None]]:
        self.shown.append(message)
        yield lambda remark: None

    @contextlib.contextmanager
    def bar(self, message: str) -> Iterator[Callable[[float, str], None]]:
        self.shown.append(message)
        yield lambda share, remark: None

    def line(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    working("")  # what the layers above hand down is there
    found = Recorder()
    monkeypatch.setattr(progress, "_progress", found)
    return found


# --- in a file or a pipe ---------------------------------------------------------------------------------------------


class Kept(logging.Handler):
    """Keeps the lines that a logger is given."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[str]]]:
    """What the log says of work that goes on, which is told at once."""
    monkeypatch.setattr(announced, "_SOON", 0.0)
    kept = Kept()
    level = announced.logger.level
    announced.logger.addHandler(kept)
    announced.logger.setLevel(logging.INFO)
    yield lambda: list(kept.lines)
    announced.logger.setLevel(level)
    announced.logger.removeHandler(kept)


def wait_for(holds: Callable[[], bool]) -> bool:
    until = time.monotonic() + 30
    while not holds() and time.monotonic() < until:
        time.sleep(0.005)
    return holds()


def test_work_is_told_while_it_goes_on(lines: Callable[[], list[str]]) -> None:
    with working("capturing LM"):
        assert wait_for(lambda: lines() == ["capturing LM"])
        with searching():
            assert wait_for(lambda: lines()[1:] == ["capturing LM: searching plans"])
        with working("capturing LM"):
            time.sleep(0.05)
    with measuring():
        assert wait_for(lambda: lines()[2:] == ["measuring the ops"])
    assert len(lines()) == 3


def test_what_is_done_soon_is_not_told(lines: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announced, "_SOON", 3600.0)
    with working("capturing LM"), searching():
        pass
    with pytest.raises(KeyError), working("capturing LM"):
        raise KeyError
    assert lines() == []


def test_where_the_log_is_quiet_nothing_is_started(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING, logger="graphopt")
    monkeypatch.setattr(announced.threading, "Timer", None)
    with TerminalProgress().working("capturing LM") as show:
        show("a remark")
    assert caplog.records == []


@final
@dataclass(frozen=True)
class Slow(Pass):
    """Does nothing until the log has a line of what goes on."""

    name, stage, numerics = "slow", "joint", "bitwise"
    seen: ClassVar[Callable[[], bool]]

    def apply(self, program: graphopt.Program) -> Changed:
        return Changed(reason=f"told: {wait_for(type(self).seen)}", satisfied=True)


def test_a_slow_capture_says_what_it_captures_and_for_which_call(lines: Callable[[], list[str]]) -> None:
    Slow.seen = lambda: "capturing Sequential for f32[64, 8]" in lines()
    model = graphopt.optimize(net(), [Slow()])
    model(X).sum().backward()
    assert model.records["slow"].changed.reason == "told: True"


def test_a_model_is_not_kept(lines: Callable[[], list[str]]) -> None:
    model = net()
    kept, passes = weakref.ref(model), [Recompute("auto")]
    step = graphopt.optimize_step(model, torch.optim.SGD(model.parameters(), lr=0.1), passes, loss=mean_square)
    step(X)
    assert lines()
    del step, model
    gc.collect()
    assert kept() is None


def test_commands_say_what_they_wait_for(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announced, "_SOON", 0.0)
    monkeypatch.setenv("GRAPHOPT_LOG", "")
    run = Command(capsys)
    said = run("plan", target("step"), "--cost", "roofline").err
    assert re.search(r"^graphopt: capturing \w+ for f32\[", said, re.MULTILINE), said
    assert re.search(r"^graphopt: searching plans of \w+$", said, re.MULTILINE), said
    monkeypatch.setenv("GRAPHOPT_LOG", "warning")
    assert run("plan", target("step"), "--cost", "roofline").err == ""


# --- on a terminal ---------------------------------------------------------------------------------------------------


def test_a_bar_has_the_time_that_remains_and_the_first_step_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("TERM", "xterm-256color"), ("COLUMNS", "140"), ("GRAPHOPT_OVERVIEW", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("GRAPHOPT_LOG", raising=False)
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    with searching():
        pass
    assert re.search(r"searching plans.*0:00:00.*left.*-:--:--", screen.getvalue())
    step = step_of([Recompute("auto")])
    step(X), step(X)
    told = re.findall(r"^.*captured \d.*$", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r", "", screen.getvalue()), re.MULTILINE)
    assert [bool(re.fullmatch(r"Sequential: captured \d+\.\d s, rewritten \d+\.\d s", line)) for line in told] == [True]


# --- what is told ----------------------------------------------------------------------------------------------------


def test_what_runs_later_is_told_as_well(recorder: Recorder, tmp_path: Path) -> None:
    step = step_of([FitMemory("95%", cost="roofline")])
    step.accumulate(2)
    for _ in range(4):
        step(X)
    step(X[:32]), step(X[:32])
    assert recorder.shown[0] == "capturing Sequential for f32[64, 8]"
    assert "searching plans" in recorder.shown
    assert "capturing Sequential for f32[32, 8]" in recorder.shown
    kinds = [text.rpartition(": ")[2] for text in recorder.shown if text.startswith("making another program of Seq")]
    assert {"update", "first update"} & set(kinds)
    graphopt.checkpoint.save(tmp_path, step)
    graphopt.checkpoint.load(tmp_path, step)
    assert recorder.shown[-2:] == [f"saving a checkpoint in {tmp_path}", f"loading the checkpoint in {tmp_path}"]


def test_compiling_comparing_and_other_settings_are_told(recorder: Recorder) -> None:
    step = step_of(backend=lambda module, inputs: module.forward, verify="numerics")
    step(X)
    assert any(re.fullmatch(r"compiling \d+ ops with the given backend", text) for text in recorder.shown)
    assert "comparing Sequential with what it computes without passes" in recorder.shown
    step.optimizer.param_groups[0]["nesterov"] = True
    step(X)
    assert "tracing the optimizer of Sequential with its other settings" in recorder.shown


def test_a_step_in_a_file_is_told(recorder: Recorder, tmp_path: Path) -> None:
    step = step_of()
    step(X)
    step.save(tmp_path / "step")
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    graphopt.load_step(tmp_path / "step", model, optimizer, loss=mean_square)
    assert recorder.shown[-1] == f"reading the step in {tmp_path / 'step'}"


SECONDS = r"\d+\.\d s"


@pytest.mark.parametrize(
    ("passes", "expected"),
    [
        ((), rf"Sequential: captured {SECONDS}"),
        ([Recompute("auto")], rf"Sequential: captured {SECONDS}, rewritten {SECONDS}"),
        (
            [FitMemory("80%", cost="roofline")],
            rf"Sequential: captured {SECONDS}, planned {SECONDS}, recomputes \d+ %; later steps ×1\.\d\d of baseline",
        ),
        ([FitMemory("1GB", cost="roofline")], rf"Sequential: captured {SECONDS}, planned {SECONDS}"),
    ],
)
@pytest.mark.parametrize("door", ["drop-in", "torch.compile", "whole step"])
def test_the_first_step_says_once_what_it_took(door: str, passes: Any, expected: str, recorder: Recorder) -> None:
    if door == "whole step":
        step = step_of(passes)
        step(X), step(X)
    else:
        compiled = door == "torch.compile"
        options = {"passes": passes}
        model = (
            torch.compile(net(), backend="graphopt", options=options) if compiled else graphopt.optimize(net(), passes)
        )
        for _ in range(2):
            model(X).square().mean().backward()
    (line,) = recorder.lines
    assert re.fullmatch(expected, line), line


def test_the_share_is_that_of_the_plan(recorder: Recorder) -> None:
    model = graphopt.optimize(net(), [FitMemory("80%", cost="roofline")])
    model(X).square().mean().backward()
    changed = model.records["fit-memory"].changed
    assert changed.slowdown is not None
    assert recorder.lines[0].endswith(
        f"recomputes {100 * changed.slowdown:.0f} %; later steps ×{1 + changed.slowdown:.2f} of baseline"
    )
    told = re.search(r"([\d.]+)% more", "\n".join(changed.lines))
    assert told is not None
    assert float(told[1]) == pytest.approx(100 * changed.slowdown, abs=0.051)


def test_what_comes_later_is_told_where_it_took_long(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    step = step_of()
    step(X)
    monkeypatch.setattr(seconds_taken, "_LONG", 0.0)
    step(X), step(X[:32])
    first, another, size = recorder.lines[:3]
    assert re.fullmatch(rf"Sequential: captured {SECONDS}", first)
    assert re.fullmatch(rf"Sequential: another program, update: {SECONDS}", another)
    assert re.fullmatch(rf"Sequential: captured {SECONDS}", size)


def test_what_was_read_says_so(recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHOPT_CACHE", str(tmp_path))
    monkeypatch.setenv("GRAPHOPT_CACHE_PROGRAMS", "1")
    for _ in range(2):
        step_of([Recompute("auto")])(X)
    assert re.fullmatch(rf"Sequential: read from the cache {SECONDS}", recorder.lines[-1])
    assert "reading the stored capture of Sequential" in recorder.shown
