"""Objects that show themselves in notebooks: what they say, that no name becomes markup, and the page on request."""

from __future__ import annotations

import ast
import builtins
import html
import re
import sys
import types
import webbrowser
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

import graphopt
from graphopt import Pipeline, Program
from graphopt.ir.words.written_units import format_bytes
from graphopt.passes import Recompute
from graphopt.report.notebook import Frame, records_html
from graphopt.report.page import page_of_snapshots
from graphopt.rewriting.pass_ import Records
from tests.support.hostile import ATTACK, LONG, assert_only_text, hostile
from tests.support.training import captured, mean_square

X = torch.linspace(-1, 1, 32).reshape(4, 8)


def model() -> nn.Module:
    return nn.Sequential(OrderedDict((name, nn.Sequential(nn.Linear(8, 8), nn.GELU())) for name in "abc"))


@pytest.fixture(scope="module")
def step() -> graphopt.TrainStep:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return graphopt.optimize_step(net, optimizer, [Recompute(("a", "b"))], loss=mean_square).prepare(X)


def shown(value: Any) -> str:
    """What a notebook shows of a value."""
    page = value._repr_html_()
    assert isinstance(page, str)
    assert_only_text(page)
    return page


# --- static ----------------------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_a_program_shows_facts_and_its_picture(step: graphopt.TrainStep) -> None:
    page = shown(step.program)
    assert "<b>Sequential</b>, step stage" in page
    assert f"{format_bytes(step.program.memory().peak_bytes)}, of which" in page
    assert "recompute{checkpoints=a,b}" in page
    assert step.program.to_svg().strip() in page
    assert len(page) < 200_000


def test_a_forward_program_shows_no_peak() -> None:
    page = shown(graphopt.capture(model(), (X,), stage="forward"))
    assert "forward stage" in page
    assert "predicted peak" not in page


def test_a_large_picture_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    program = captured(model(), X, loss=mean_square)
    assert "<svg" in shown(program)
    monkeypatch.setattr(graphopt.report.notebook, "_LARGEST", 1000)
    assert "<svg" not in shown(program)
    assert "to_svg() makes it" in shown(program)


def test_a_timeline_shows_its_chart(step: graphopt.TrainStep) -> None:
    timeline = step.program.memory()
    assert timeline.to_svg().strip() in shown(timeline)


def test_records_show_a_table(step: graphopt.TrainStep) -> None:
    (record,) = step.records
    assert shown(step.records) == shown(record)
    for text in (record.spec, "joint", "bitwise", f"{record.nodes_before:,} → {record.nodes_after:,}"):
        assert html.escape(text) in shown(record)
    assert isinstance(step.records, list)
    assert step.records == [record]
    assert "no passes" in shown(Records())
    assert "and 60 more" in records_html([record] * 100)


def test_a_step_shows_its_passes_and_its_program(step: graphopt.TrainStep) -> None:
    page = shown(step)
    assert html.escape(repr(step)) in page
    assert step.records[0].spec in page
    assert "<svg" in page


def test_before_a_capture_they_say_so() -> None:
    net = model()
    fresh = graphopt.optimize_step(net, torch.optim.SGD(net.parameters(), lr=0.1), loss=mean_square)
    assert "nothing is captured yet" in shown(fresh)
    optimized = graphopt.optimize(net)
    assert "nothing is captured yet" in shown(optimized)
    assert "(a): Sequential(\n    (0): Linear(in_features=8, out_features=8, bias=True)" in shown(optimized)


def test_an_optimized_model_shows_what_runs_above_its_own_text() -> None:
    net = model()
    optimized = graphopt.optimize(net, [Recompute(("a",))])
    assert repr(optimized).partition("\n")[2] == repr(net)
    optimized(X).sum().backward()
    page = shown(optimized)
    assert "Sequential, optimized with recompute{checkpoints=a}" in page
    assert "<svg" in page
    assert isinstance(optimized.records, list)
    assert repr(optimized).partition("\n")[2] == repr(net)


class Shown(nn.Linear):
    def _repr_html_(self) -> str:
        return f"<p>{self.in_features} in</p>"


def test_a_models_own_html_stays() -> None:
    assert graphopt.optimize(Shown(3, 2))._repr_html_() == "<p>3 in</p>"


def test_hostile_names_are_only_text() -> None:
    program = hostile()
    page = shown(program) + shown(program.memory())
    assert html.escape(ATTACK) in page
    assert LONG not in shown(program).replace(program.to_svg().strip(), ""), "long names are cut in tables"
    assert "\u202e" not in page


def test_an_empty_program() -> None:
    program = Program(fx.Graph(), "forward", [], [])
    program.graph.output(())
    assert "<b>program</b>" in shown(program)
    assert "a program without ops" in shown(program.memory())


# --- the page --------------------------------------------------------------------------------------------------------


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The addresses that the browser is asked for."""
    asked: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda address: asked.append(address) or True)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    return asked


def test_show_opens_the_page_in_the_browser(step: graphopt.TrainStep, opened: list[str], tmp_path: Path) -> None:
    for value in (step, step.program):
        path = value.show()
        assert isinstance(path, Path)
        assert path.is_relative_to(tmp_path)
        assert path.name == "Sequential.html"
        assert opened.pop() == path.as_uri()
        assert path.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert not opened


def test_the_page_of_a_step_holds_every_pass(step: graphopt.TrainStep, opened: list[str]) -> None:
    path = step.show()
    assert isinstance(path, Path)
    pipeline = str(Pipeline([Recompute(("a", "b"))]))
    assert path.read_text(encoding="utf-8") == page_of_snapshots(step.snapshots, step.records, pipeline=pipeline)
    assert len(opened) == 1


def test_hostile_titles_are_no_paths(opened: list[str], tmp_path: Path) -> None:
    program = hostile()
    program.title = "../../" + program.title
    path = program.show()
    assert path.is_relative_to(tmp_path)
    assert re.fullmatch(r"[\w-]{1,40}\.html", path.name)
    assert len(opened) == 1


def test_without_a_browser_the_file_is_named(
    step: graphopt.TrainStep, opened: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(webbrowser, "open", lambda address: False)
    path = step.show()
    assert f"the page is {path}" in capsys.readouterr().err


def test_in_a_notebook_show_gives_a_frame(
    step: graphopt.TrainStep, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = types.SimpleNamespace(kernel=object())
    notebook: Any = types.ModuleType("IPython")
    notebook.get_ipython = lambda: shell
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    frame = step.show()
    assert isinstance(frame, Frame)
    assert not opened
    inline = frame._repr_html_()
    (page,) = re.findall(r'srcdoc="([^"]*)"', inline)
    assert html.unescape(page) == frame.page
    assert 'sandbox="allow-scripts"' in inline
    assert len(repr(frame)) < 80
    shell.kernel = None
    assert isinstance(step.show(), Path), "IPython in a terminal is no notebook"


def test_ipython_is_not_imported(step: graphopt.TrainStep, opened: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def guarded(name: str, *args: Any, **kwargs: Any) -> Any:
        assert name.partition(".")[0] != "IPython"
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", guarded)
    shown(step)
    step.show()


def test_importing_graphopt_leaves_viewers_alone() -> None:
    """No module imports rich or IPython before it needs them."""
    files = list(Path(graphopt.__file__).parent.rglob("*.py"))
    assert len(files) > 100
    for file in files:
        found = [
            name
            for statement in ast.parse(file.read_text(encoding="utf-8")).body
            if isinstance(statement, (ast.Import, ast.ImportFrom))
            for name in (getattr(statement, "module", None) or "", *(alias.name for alias in statement.names))
        ]
        assert not [name for name in found if name.partition(".")[0] in ("rich", "IPython")], file
