"""``graphopt plan``."""

from __future__ import annotations

import functools
import json
import math
import re
import signal
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, final

import pytest
import torch
from torch import nn

import graphopt
from graphopt import Changed, Pass, Program
from graphopt.analysis.costs import figures, measurements
from graphopt.analysis.costs.cost import PROFILES, cost_report, costs_of
from graphopt.capture import CaptureSession
from graphopt.cli.commands import plan as plan_command
from graphopt.cli.target.target import load_target
from graphopt.passes import FitMemory
from graphopt.planning import planner
from graphopt.planning.search.local_search import Explorer
from graphopt.planning.transfers.offloading import Lanes
from graphopt.rewriting import pipeline
from graphopt.rewriting.memory.fit.fitting import Fitting, FittingOptions
from graphopt.rewriting.memory.fit.preparation import prepared
from graphopt.rewriting.memory.recompute.planning_problem import PlanningProblem
from graphopt.rewriting.memory.transfers.transfer_insertion import host_lanes
from graphopt.rewriting.pass_ import Numerics, PassStage
from graphopt.rewriting.pipeline import Pipeline
from graphopt.runtime.programs.rewrite import rewrite
from tests.passes.test_fit_memory_checkpoints import Checkpointed
from tests.report.console.test_terminal import Terminal
from tests.support.command import RECOMPUTE, Command, Outcome, install, target
from tests.support.costs import kept, use_changed, use_folder
from tests.support.training import Blocks

COST = "a100-80gb"
"""Seconds that no machine's load changes."""


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


def tiny() -> tuple[nn.Module, torch.Tensor]:
    """A target that is captured and planned in no time: a drop-in model."""
    layers = nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4)
    return nn.Sequential(*layers), torch.zeros(64, 8)


TINY = f"{__file__}:tiny"
STEP = target("step")


def planned(run: Command, *argv: object, of: str = TINY, cost: str = COST) -> Outcome:
    return run("plan", of, "--cost", cost, *argv)


def session_of(text: str) -> CaptureSession:
    """A capture of a target, whose folder does not stay on the path."""
    path = list(sys.path)
    try:
        return load_target(text).session()
    finally:
        sys.path[:] = path


@functools.cache
def captured(text: str) -> Program:
    """The program of a target as it is."""
    return rewrite(session_of(text), Pipeline(), until="step" if text == STEP else "joint").program


@functools.cache
def fitting_of(text: str) -> Fitting:
    """The fitting that the command should have made for a target."""
    program = prepared(captured(text), "a test").program
    memory = program.memory()
    return Fitting(program, memory, cost_report(memory.nodes, method="roofline", profile=PROFILES[COST]).seconds)


def section(text: str, budget: str) -> list[str]:
    """The lines of one budget."""
    _, _, after = text.partition(f"==== budget {budget} (")
    return after.split("\n==== ")[0].splitlines()


# --- the frontier ----------------------------------------------------------------------------------------------------


def test_without_a_budget_the_trade_as_text(run: Command) -> None:
    outcome = planned(run)
    assert (outcome.code, outcome.err) == (0, "")
    fitting = fitting_of(TINY)
    lines = outcome.out.splitlines()
    assert lines[0] == "Sequential, joint stage; passes: none"
    plain = captured(TINY).memory().peak_bytes
    assert f"({plain} bytes)" in lines[1]
    (first,) = [line for line in lines if line.startswith("done first ")]
    assert "ops of backward run sooner" in first
    assert f"({fitting.smallest().peak_bytes} bytes)" in lines[2]
    rows = [re.split(r"  +", line.strip()) for line in lines[lines.index("") + 1 :]]
    assert rows[0] == ["peak", "bytes", "of the peak", "recomputed", "of the step", "ops recomputed"]
    expected = [(point.peak, len(fitting.simulate(point).plan.repeats())) for point in fitting.frontier]
    assert [(int(row[1]), int(row[5])) for row in rows[1:]] == expected
    assert rows[-1][2:] == [f"{fitting.memory.peak_bytes / plain:.1%}", "0 s", "0.0%", "0"]
    assert fitting.memory.peak_bytes < plain
    assert "====" not in outcome.out


@pytest.mark.sweep
def test_the_trade_as_data_is_the_frontier(run: Command) -> None:
    data = planned(run, "--json", of=STEP).data
    fitting = fitting_of(STEP)
    assert data["schema"] == 1
    assert data["versions"]["graphopt"] == graphopt.__version__
    assert (data["title"], data["stage"], data["passes"], data["cost"]) == ("Small", "step", [], COST)
    assert data["plain"] == {
        "peak_bytes": captured(STEP).memory().peak_bytes,
        "resident_bytes": captured(STEP).memory().resident_bytes,
        "seconds": fitting.seconds,
    }
    points = [(point.peak, point.again, 1 + point.again / fitting.seconds) for point in fitting.frontier]
    assert [(p["peak_bytes"], p["extra_seconds"], p["ratio"]) for p in data["frontier"]] == points
    assert data["smallest_peak_bytes"] == points[0][0]
    assert (data["cut_short"], data["budgets"]) == ("", [])


@pytest.mark.sweep
def test_a_chart_in_a_file(run: Command, tmp_path: Path) -> None:
    file = tmp_path / "frontier.svg"
    outcome = planned(run, "--format", "svg", "-b", "90%", "-o", file)
    assert (outcome.code, outcome.out) == (0, "")
    assert f"wrote {file}" in outcome.err
    root = ET.parse(file).getroot()
    told = [node.text or "" for node in root.iter("{http://www.w3.org/2000/svg}title")]
    for point in fitting_of(TINY).frontier:
        assert any(text.startswith(f"{point.peak} bytes") for text in told)
    assert any(text.startswith("budget 90%, ") for text in told)


@pytest.mark.sweep
def test_passes_run_before(run: Command) -> None:
    outcome = planned(run, "-p", RECOMPUTE, "--json", of=target("plain"))
    assert outcome.err.startswith(f"{RECOMPUTE}: ")
    data = outcome.data
    assert data["passes"] == [RECOMPUTE]
    rewritten = rewrite(session_of(target("plain")), Pipeline(RECOMPUTE), until="joint")
    assert [data["plain"]["peak_bytes"]] == [record.peak_after for record in rewritten.records]


@pytest.mark.sweep
def test_times_are_measured_anew_where_that_is_asked_for(
    run: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = use_folder(tmp_path, monkeypatch)
    monkeypatch.setattr(figures, "_fresh", False)
    planned(run, "--json", cost="measured")

    def poison(data: Any) -> None:
        data["seconds"] = dict.fromkeys(data["seconds"], 1234.5)

    use_changed(folder, poison, monkeypatch)
    assert planned(run, "--json", cost="measured").data["plain"]["seconds"] > 1234.5
    assert planned(run, "--json", "--remeasure", cost="measured").data["plain"]["seconds"] < 1234.5
    assert max(kept(tmp_path / "changed")["seconds"].values()) < 1234.5
    refused = planned(run, "--remeasure")
    assert refused.code != 0
    assert f"--cost {COST} takes no time from it" in refused.err


@pytest.mark.sweep
def test_times_of_a_busy_machine_are_told(run: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_folder(tmp_path, monkeypatch)
    monkeypatch.setattr(measurements, "measured_seconds", lambda *_: figures.Figure(1e-3, doubtful=True))
    found = planned(run, "-b", "75%", cost="measured")
    told = (
        r"the times of \d+ distinct ops are estimated by the roofline, .* could only be measured while the machine had "
    )
    assert re.search(rf"^{told}other work", found.out, re.MULTILINE)
    assert "other work" not in found.err
    alone = planned(run, cost="measured")
    assert re.search(rf"^warning: {told}", alone.err, re.MULTILINE)


@pytest.mark.sweep
def test_fit_memory_itself_is_left_out_and_named(run: Command) -> None:
    outcome = planned(run, "-p", "fit-memory{budget=90%}", "--json")
    assert "fit-memory{budget=90%} does not run" in outcome.err
    assert outcome.data["passes"] == []
    assert outcome.data["plain"] == planned(run, "--json").data["plain"]


@pytest.mark.sweep
def test_of_a_drop_in_model_and_of_a_chosen_stage(run: Command) -> None:
    assert planned(run, "--json").data["stage"] == "joint"
    assert planned(run, "--json", "--stage", "joint", of=STEP).data["stage"] == "joint"
    no_step = planned(run, "--stage", "step")
    assert no_step.code == 2
    assert "gives no optimizer" in no_step.err


@pytest.mark.sweep
def test_seconds_are_measured_unless_told_otherwise(run: Command) -> None:
    outcome = run("plan", TINY, "--json")
    assert outcome.code == 0
    assert outcome.data["cost"] == "measured"
    assert outcome.data["plain"]["seconds"] > 0


# --- budgets ---------------------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_several_budgets_each_get_a_plan(run: Command) -> None:
    fitting = fitting_of(TINY)
    exact = fitting.frontier.lowest.peak
    outcome = planned(run, "--budget", exact, "-b", "78%", "-b", "96%", "-b", "1GB")
    assert (outcome.code, outcome.err) == (0, "")
    assert re.findall(r"^==== budget (\S+)", outcome.out, re.MULTILINE) == [str(exact), "78%", "96%", "1GB"]
    tight, share, first, wide = (section(outcome.out, budget) for budget in (str(exact), "78%", "96%", "1GB"))
    assert tight[0] == f"{exact} bytes)"
    assert share[0] == f"{int(captured(TINY).memory().peak_bytes * 0.78)} bytes)"
    for lines in (tight, share):
        assert " allowed; with nothing recomputed it takes " in lines[1]
        assert any(line.startswith("recomputed  ") for line in lines)
        assert any(line.startswith("saved      ") for line in lines)
    assert first[1].startswith("with what is done first the peak is ")
    assert "is within the budget of 1.0 GB" in wide[1]


@pytest.mark.sweep
def test_budgets_as_data_are_what_fit_memory_does(run: Command) -> None:
    (answer, sooner, auto) = planned(run, "-b", "75%", "-b", "90%", "-b", "auto", "--json").data["budgets"]
    records = rewrite(session_of(TINY), Pipeline([FitMemory("75%", cost=COST)]), until="joint").records
    assert answer["feasible"] is True
    assert answer["peak_bytes"] == records[0].peak_after <= answer["budget_bytes"]
    assert answer["runs_again"] == records[0].changed.counts["recomputed"]
    actions = {decision["action"] for decision in answer["decisions"]}
    assert actions == {"saved", "recomputed"}
    plain, first = captured(TINY).memory().peak_bytes, fitting_of(TINY).memory.peak_bytes
    for found, peak in ((sooner, first), (auto, plain)):
        assert (found["feasible"], found["ratio"], found["decisions"]) == (True, 1.0, [])
        assert found["peak_bytes"] == peak


@pytest.mark.sweep
def test_a_budget_that_nothing_meets_is_fit_memorys_error(run: Command) -> None:
    outcome = planned(run, "-b", "75%", "-b", "30kB")
    assert outcome.code == 1
    session = session_of(TINY)
    with pytest.raises(graphopt.GraphoptError, match="no plan fits") as caught:
        rewrite(session, Pipeline([FitMemory("30kB", cost=COST)]), until="joint")
    cause = caught.value.__cause__
    assert cause is not None
    assert outcome.err.startswith(f"graphopt: error: {cause}\n")
    assert all(f"  {note}" in outcome.err for note in cause.__notes__)
    assert section(outcome.out, "30kB")[1] == "no plan was found within it"
    assert any(line.startswith("recomputed  ") for line in section(outcome.out, "75%"))


def blocks() -> tuple[nn.Module, torch.Tensor]:
    """A target whose smallest peak is found in the order of calls that it has, with as little search as tests do."""
    return Blocks(5, p=0.1), torch.zeros(3, 6, dtype=torch.int64)


@pytest.mark.sweep  # with little search, in tests/rewriting/memory/order
def test_a_budget_that_only_the_given_order_meets_is_met(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "_EACH", 2_000)
    of = f"{__file__}:blocks"
    program = captured(of)
    ways = [prepared(program, "a test", reorder=reorder).program for reorder in (True, False)]
    all_out = FittingOptions(thorough=True)
    new, kept = (Fitting(way, way.memory(), costs_of(way.memory(), COST).seconds, all_out) for way in ways)
    given = kept.smallest()
    assert given.peak_bytes < new.smallest().peak_bytes
    expected = kept.within(given.peak_bytes)
    assert expected is not None
    outcome = planned(run, "-b", given.peak_bytes, "--json", of=of)
    (answer,) = outcome.data["budgets"]
    assert (answer["peak_bytes"], answer["runs_again"]) == (given.peak_bytes, len(expected.simulated.plan.repeats()))
    lines = section(planned(run, "-b", given.peak_bytes, of=of).out, str(given.peak_bytes))
    assert "in the given order of ops: in the other one no plan was found for it" in lines
    refused = planned(run, "-b", given.peak_bytes - 1, of=of)
    assert refused.code == 1
    assert f"the smallest peak found is {given.peak_bytes} bytes" in refused.err


def test_every_budget_that_nothing_meets_is_an_error(run: Command) -> None:
    outcome = planned(run, "-b", "1kB", "-b", "96%", "-b", "10%", "--json")
    assert outcome.code == 1
    assert [answer["feasible"] for answer in outcome.data["budgets"]] == [False, True, False]
    assert outcome.err.count("no plan fits into ") == 2
    assert outcome.data["budgets"][0]["error"] in outcome.err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("-b", "8 miles"), "budget='8 miles': '8 miles' is not a number of bytes: write 8GB, 512MiB or 1000000, 60%"),
        (("-b", "-5%"), "budget='-5%': '-5%' is not a number of bytes: write 8GB"),
        (("--budget=-5%",), "'-5%' is not a number of bytes"),
        (("--time-limit", "0"), "'0' is not a number of seconds above 0"),
        (("--time-limit", "soon"), "'soon' is not a number of seconds above 0"),
        (("--cost", "a100"), "invalid choice: 'a100'"),
        (("--stage", "forward"), "invalid choice: 'forward'"),
        (("--format", "png"), "invalid choice: 'png'"),
        (("--json", "--format", "svg"), "two formats"),
        (("blocks.*",), "unrecognized arguments: blocks.*"),
    ],
)
def test_wrong_arguments_exit_with_2(run: Command, argv: tuple[str, ...], message: str) -> None:
    outcome = run("plan", "x:y", *argv)
    assert (outcome.code, outcome.out) == (2, "")
    assert message in outcome.err


def test_targets_and_files_that_are_not_there(run: Command, tmp_path: Path) -> None:
    unknown = planned(run, of=target("steps"))
    assert (unknown.code, unknown.out) == (2, "")
    assert "did you mean 'step'" in unknown.err
    no_folder = planned(run, "-o", tmp_path / "none" / "x.svg")
    assert (no_folder.code, no_folder.out) == (2, "")
    assert "there is no folder" in no_folder.err


def test_help_has_an_example(run: Command) -> None:
    outcome = run("plan", "--help")
    assert outcome.code == 0
    assert "graphopt plan examples/train_gpt.py:factory --budget 200MB --budget 60%\n" in outcome.out
    assert "60% of the peak" in " ".join(outcome.out.split())


def test_a_program_in_which_nothing_can_be_dropped(run: Command, tmp_path: Path) -> None:
    file = tmp_path / "linear.py"
    file.write_text("import torch\ndef build():\n    return torch.nn.Linear(4, 4), torch.zeros(2, 4)\n")
    text, chart = (run("plan", f"{file}:build", "--cost", COST, "--format", form) for form in ("text", "svg"))
    assert (text.code, chart.code) == (0, 0)
    assert text.out.count("100.0%") == 1
    ET.fromstring(chart.out)


@pytest.mark.sweep
def test_what_moves_to_the_host_is_named(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def fast(planning: PlanningProblem, room: int | None) -> Lanes:
        assert room is None
        return replace(host_lanes(planning, 10**9, smallest=1), out=math.inf, back=math.inf)

    monkeypatch.setattr(plan_command, "host_lanes", fast)
    text = planned(run, "-b", "75%")
    assert text.code == 0
    assert any(line.startswith("offloaded  ") for line in section(text.out, "75%"))
    (answer,) = planned(run, "-b", "75%", "--json").data["budgets"]
    assert [entry["bytes"] for entry in answer["offloaded"]] == [64 * 32 * 4]
    assert (answer["ratio"], answer["runs_again"]) == (1.0, 0)
    assert answer["peak_bytes"] <= answer["budget_bytes"]


# --- long searches ---------------------------------------------------------------------------------------------------


@pytest.fixture
def interrupted() -> Iterator[Callable[..., None]]:
    """Ctrl-C, in place of a function; a shell that runs the tests in the background has them ignore it otherwise."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda *_, **__: signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)


@pytest.mark.sweep
def test_ctrl_c_during_the_search_shows_what_was_found(
    run: Command, monkeypatch: pytest.MonkeyPatch, interrupted: Callable[..., None]
) -> None:
    monkeypatch.setattr(Explorer, "explore", interrupted)
    text = planned(run, "-b", "78%")
    assert (text.code, text.err) == (0, "")
    assert "the search was interrupted: these are the best plans found until then" in text.out
    assert any(line.startswith("recomputed  ") for line in section(text.out, "78%"))
    data = planned(run, "--json")
    assert data.data["cut_short"] == "interrupted"
    assert len(data.data["frontier"]) > 1
    assert data.err == "warning: the search was interrupted: these are the best plans found until then\n"
    assert "interrupted" in planned(run, "--format", "svg").out


@pytest.mark.sweep
def test_a_second_ctrl_c_ends_the_program(
    run: Command, monkeypatch: pytest.MonkeyPatch, interrupted: Callable[..., None]
) -> None:
    monkeypatch.setattr(Explorer, "explore", interrupted)
    monkeypatch.setattr(plan_command, "frontier_report", interrupted)
    assert planned(run).code == 130


def test_ctrl_c_in_a_training_script_is_not_swallowed(
    monkeypatch: pytest.MonkeyPatch, interrupted: Callable[..., None]
) -> None:
    monkeypatch.setattr(Explorer, "explore", interrupted)
    session = session_of(TINY)
    with pytest.raises(KeyboardInterrupt):
        rewrite(session, Pipeline([FitMemory("75%", cost=COST)]), until="joint")


@pytest.mark.sweep
def test_a_time_limit_ends_the_search(run: Command) -> None:
    data = planned(run, "--time-limit", "1e-9", "--json").data
    assert data["cut_short"] == "time limit"
    assert data["frontier"][-1]["ratio"] == 1.0
    assert "ended at its time limit" in planned(run, "--time-limit", "1e-9").out
    assert planned(run, "--time-limit", "600", "--json").data["cut_short"] == ""


@pytest.mark.sweep
def test_progress_is_for_terminals_only(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    assert planned(run).err == ""
    stream = Terminal()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys, "stderr", stream)
    outcome = planned(run, "--json", cost="measured")
    assert outcome.code == 0
    json.loads(outcome.out)
    for text in ("capturing ", "measuring the ops", "searching plans", "Ctrl-C: best so far"):
        assert text in stream.getvalue()


# --- other passes of the last stage ----------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class LastOfAll(Pass):
    """Runs on the program that runs."""

    name: ClassVar[str] = "last-of-all"
    stage: ClassVar[PassStage] = "last"
    numerics: ClassVar[Numerics] = "bitwise"

    def apply(self, program: Program) -> Changed:
        program.title = f"{program.title} at last"
        return Changed(counts={"renamed": 1})


@pytest.mark.sweep
def test_other_passes_of_the_last_stage_run(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, LastOfAll, pipeline.find_pass("fit-memory"))
    outcome = planned(run, "-p", "last-of-all,fit-memory{budget=1kB}", "--json")
    assert outcome.code == 0
    assert outcome.data["title"] == "Sequential at last"
    assert outcome.data["passes"] == ["last-of-all"]


# --- segments of the model's own -------------------------------------------------------------------------------------


def checkpointed() -> tuple[nn.Module, torch.Tensor]:
    """A target whose blocks are checkpointed."""
    return Checkpointed(False), torch.zeros(96, 16)


def test_segments_of_the_model_are_planned_as_a_hint(run: Command) -> None:
    text = f"{__file__}:checkpointed"
    low, high = captured(text).memory().peak_bytes, fitting_of(text).memory.peak_bytes
    assert low < high
    between = (low + high) // 2
    outcome = planned(run, "--budget", between, "--budget", high, of=text)
    note = "the model's checkpoint() segments: "
    (first,) = [line for line in outcome.out.splitlines() if line.startswith(f"done first           {note}")]
    assert not first.startswith(f"done first           {note}0 ")
    assert [line for line in section(outcome.out, str(between)) if line.startswith(note)]
    assert "nothing has to be recomputed" in "\n".join(section(outcome.out, str(high)))
