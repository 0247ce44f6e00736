"""The overview at the start of training: what it says, when and where it is written."""

from __future__ import annotations

import re
import sys
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, final

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import graphopt
from graphopt import Changed, FxPass, Pass, Pipeline, Program
from graphopt.passes import DataParallel, MixedPrecision, Offload, Recompute
from graphopt.report.console.overview import overview_spans, overview_text
from graphopt.rewriting.pass_ import Numerics, PassStage
from tests.report.console.test_terminal import Terminal
from tests.support.hostile import STEERING, assert_steers_nothing, hostile
from tests.support.training import mean_square

X = torch.linspace(-1, 1, 64).reshape(8, 8)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict((name, nn.Sequential(nn.Linear(8, 8), nn.GELU())) for name in "abc"))


def step_of(*passes: Pass) -> graphopt.TrainStep:
    net = model()
    return graphopt.optimize_step(net, torch.optim.SGD(net.parameters(), lr=0.1, fused=True), passes, loss=mean_square)


def without_figures(text: str) -> str:
    return re.sub(r"\d[\d.]* k?B", "N B", text)


# --- what it says ----------------------------------------------------------------------------------------------------


def test_every_option_is_in_it_with_what_it_changed() -> None:
    passes = (Recompute(("a", "b")), Offload(min_bytes=10**9, cost="roofline"))
    step = step_of(*passes).prepare(X)
    text = overview_text(step._pipeline.passes, step.records, step.program)
    lines = text.replace(str(step.records[1].changed), "nothing: REASON")
    assert_expected_inline(
        without_figures(lines),
        """\
graphopt: Sequential, step stage, 47 ops, 2 passes
  recompute (joint, bitwise)
    checkpoints = a, b
    joint: 2 recomputed, 2 checkpoints, 0 random ops replayed; peak N B -> N B
  offload (last, bitwise)
    tensors = none (default)
    tier = host (default)
    prefetch = auto (default)
    min-bytes = 1000000000
    keep-last = 1 (default)
    cost = roofline
    step: nothing: REASON
  predicted peak  N B, of which N B persistent; joint stage N B -> N B
  numerics        bitwise: results equal the captured program's to the last bit
  exchange        nothing
""",
    )


@pytest.mark.sweep
def test_the_peaks_are_those_of_the_records_and_of_the_program() -> None:
    step = step_of(Recompute(("a", "b"))).prepare(X)
    (record,) = step.records
    text = overview_text(step._pipeline.passes, step.records, step.program)
    size = graphopt.ir.words.written_units.format_bytes
    assert record.peak_before is not None
    assert record.peak_after is not None
    assert f"joint stage {size(record.peak_before)} -> {size(record.peak_after)}" in text
    assert f"predicted peak  {size(step.program.memory().peak_bytes)}, of which" in text


@pytest.mark.sweep
def test_numerics_are_those_of_the_weakest_pass_that_did_something() -> None:
    step = step_of(MixedPrecision(), Recompute(("a",))).prepare(X)
    text = overview_text(step._pipeline.passes, step.records, step.program)
    assert "numerics        changes: results differ by design (mixed-precision)" in text
    assert "    dtype = bfloat16 (default)\n" in text


def test_passes_without_options_and_passes_that_did_not_run() -> None:
    def untouched(module: torch.fx.GraphModule) -> None:
        del module

    @final
    @dataclass(frozen=True)
    class Elsewhere(Pass):
        """Has nothing to do here."""

        name: ClassVar[str] = "elsewhere"
        stage: ClassVar[PassStage] = "joint"
        numerics: ClassVar[Numerics] = "bitwise"

        def concerns(self, program: Program) -> bool:
            return False

        def apply(self, program: Program) -> Changed:
            raise AssertionError

    step = step_of(FxPass(untouched), Elsewhere()).prepare(X)
    text = overview_text(step._pipeline.passes, step.records, step.program)
    assert "\n  untouched (joint, tolerant)\n    function = " in text
    assert "untouched\n    joint: nothing: " in text
    assert " at 0x" not in text
    assert "\n  elsewhere (joint, bitwise)\n    did not run: " in text


@pytest.fixture
def four_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("four_ranks")
def test_what_is_exchanged_is_counted() -> None:
    net = model()
    step = step_of(DataParallel(first_bucket_mb=0, bucket_mb=0)).prepare(X)
    text = overview_text(step._pipeline.passes, step.records, step.program)
    size = sum(parameter.numel() * 4 for parameter in net.parameters())
    written = graphopt.ir.words.written_units.format_bytes(size)
    assert f"this rank puts {written} per step into collectives: 6 all_reduce" in text


@pytest.mark.sweep
def test_long_values_are_cut_and_names_are_only_text() -> None:
    passes = (Recompute(tuple(f"{STEERING}{number}" for number in range(100))),)
    lines = list(overview_spans(passes, [], hostile()))
    assert max(len(text) for line in lines[1:] for text, _ in line) < 200
    stream = Terminal()
    graphopt.report.console.terminal.write_spans(lines, stream)
    assert_steers_nothing(stream.getvalue())


# --- when and where --------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRAPHOPT_OVERVIEW", raising=False)
    monkeypatch.delenv("RANK", raising=False)


def test_once_at_the_first_call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("GRAPHOPT_OVERVIEW", "1")
    step = step_of(Recompute(("a",)))
    assert capsys.readouterr().err == ""
    step(X)
    written = capsys.readouterr()
    assert written.err.startswith("graphopt: Sequential, step stage, ")
    assert written.out == ""
    step(X)
    step(X[:4])
    assert capsys.readouterr() == ("", "")
    optimized = graphopt.optimize(model(), [Recompute(("a",))])
    optimized(X).sum().backward()
    optimized(X[:4]).sum().backward()
    assert capsys.readouterr().err.count("graphopt: Sequential, joint stage, ") == 1


def test_where_stderr_is_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    step_of().prepare(X)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for setting, wanted in (("", True), ("0", False), ("1", True)):
        monkeypatch.setenv("GRAPHOPT_OVERVIEW", setting)
        stream = Terminal()
        monkeypatch.setattr(sys, "stderr", stream)
        step_of().prepare(X)
        assert ("step stage, " in stream.getvalue() and "no passes" in stream.getvalue()) is wanted
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    step_of().prepare(X)
    assert "no passes" in stream.getvalue()
    assert "\x1b" not in stream.getvalue()


def test_on_the_first_rank_only(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("GRAPHOPT_OVERVIEW", "1")
    monkeypatch.setenv("RANK", "3")
    step_of().prepare(X)
    assert capsys.readouterr().err == ""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        step_of().prepare(X)
    finally:
        dist.destroy_process_group()
    assert "no passes" in capsys.readouterr().err


def test_a_setting_that_means_nothing_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GRAPHOPT_OVERVIEW", "yes")
    step_of().prepare(X)
    assert "GRAPHOPT_OVERVIEW is 'yes', and means nothing" in caplog.text


@pytest.mark.sweep
def test_a_pipeline_object_is_fine_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("GRAPHOPT_OVERVIEW", "1")
    graphopt.optimize(model(), Pipeline("recompute{checkpoints=a}").passes, example_inputs=(X,))
    assert "checkpoints = a\n" in capsys.readouterr().err
