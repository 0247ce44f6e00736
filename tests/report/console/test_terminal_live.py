"""What a terminal gets beyond plain text: diffs after each pass, the stacked timeline, bars; and what it never gets."""

from __future__ import annotations

import io
import logging
import re
import sys
from collections.abc import Callable, Iterable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from torch import nn

import graphopt
from graphopt import GraphoptError, Pipeline, Program
from graphopt.capture import CaptureSession
from graphopt.cli.main import main
from graphopt.passes import FitMemory, Recompute
from graphopt.report.console import terminal
from graphopt.report.console.progress_bar import progress_bar
from graphopt.report.text.after_each_pass import after_each_lines, marked_lines
from graphopt.report.text.candidate_table import candidates_text
from graphopt.report.text.memory_bands import CATEGORY_STYLES
from graphopt.report.text.memory_chart import category_style, chart
from graphopt.report.text.memory_table import memory_spans, memory_text
from graphopt.report.text.snapshots import snapshots_text
from graphopt.report.text.tensor_table import tensors_table
from graphopt.rewriting.instruments import ShowPasses
from graphopt.rewriting.progress import measuring, searching
from graphopt.runtime.programs.rewrite import Rewritten, rewrite
from tests.report.console.test_terminal import Terminal
from tests.support.command import RECOMPUTE, Double, target
from tests.support.hostile import NAMES, STEERING, assert_steers_nothing, hostile
from tests.support.reporting import Net, joint, plain
from tests.support.training import mean_square, recomputed

COLOR = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture
def make_screen(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Terminal]:
    """Makes one terminal of 100 columns of stdout and stderr; in the test, since pytest sets its own before it."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.delenv("NO_COLOR", raising=False)

    def make() -> Terminal:
        stream = Terminal()
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", stream)
        return stream

    return make


def texts(lines: Iterable[Sequence[terminal.Span]]) -> list[str]:
    return ["".join(text for text, _ in line) for line in lines]


# --- after each ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def doubled() -> Rewritten:
    session = CaptureSession(nn.Linear(2, 2, bias=False), (torch.randn(3, 2),))
    return rewrite(session, Pipeline([Double()]), until="joint")


def test_what_a_pass_changed_is_marked_in_the_whole_program(doubled: Rewritten) -> None:
    lines = list(after_each_lines(doubled))
    written = texts(lines)
    (start,) = (number for number, text in enumerate(written) if text.startswith("# ==== 3/3"))
    marked = [(text[0], style) for ((text, style),) in lines[start + 2 : -1] if text[0] in "+-"]
    assert set(marked) == {("+", "green"), ("-", "red")}
    added = [text for text in written[start + 2 :] if text.startswith("+ ")]
    assert any("double" in text and "add" in text for text in added)
    assert re.match(r"# ==== 3/3 joint stage: double: 1 doubled; ", plain(written[start]))
    assert (lines[start][0][1], lines[start + 1]) == ("bold", [("#   doubled the first output", "dim")])


def test_before_and_after_can_both_be_read_off_the_marks(doubled: Rewritten) -> None:
    written = texts(after_each_lines(doubled))
    (start,) = (number for number, text in enumerate(written) if text.startswith("# ==== 3/3"))
    body = written[start + 2 : -1]
    before, after = (program.to_text().removesuffix("\n").split("\n") for _, program in doubled.snapshots[1:])
    assert [text[2:] for text in body if text[0] in " -"] == before
    assert [text[2:] for text in body if text[0] in " +"] == after


@given(st.lists(st.sampled_from("abcdefgh"), max_size=12), st.lists(st.sampled_from("abcdefgh"), max_size=12))
def test_marks_lose_no_line_of_either_text(before: list[str], after: list[str]) -> None:
    marked = list(marked_lines(before, after))
    assert [line for mark, line in marked if mark != "+"] == before
    assert [line for mark, line in marked if mark != "-"] == after
    assert before != after or all(mark == " " for mark, _ in marked)


def test_an_insertion_is_all_that_is_marked() -> None:
    before = [f"line {number}" if number % 3 else "" for number in range(300)]
    after = [*before[:100], "new", *before[100:]]
    assert [(mark, line) for mark, line in marked_lines(before, after) if mark != " "] == [("+", "new")]


def test_what_is_captured_is_printed_as_in_plain_text(doubled: Rewritten) -> None:
    whole = snapshots_text(doubled, Program.to_text, "#").split("\n")
    written = texts(after_each_lines(doubled))
    (end,) = (number for number, text in enumerate(whole) if text.startswith("# ==== 3/3"))
    assert written[:end] == whole[:end]


@pytest.mark.sweep
def test_dump_after_each_has_colors_on_a_terminal_only(
    make_screen: Callable[[], Terminal], monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = make_screen()
    command = ["dump", target("plain"), "-p", RECOMPUTE, "--after-each"]
    assert main(command) == 0
    colored = screen.getvalue()
    assert re.search(r"\x1b\[32m\+ .*recompute: blocks", colored)
    monkeypatch.setenv("NO_COLOR", "1")
    uncolored = Terminal()
    monkeypatch.setattr(sys, "stdout", uncolored)
    assert main(command) == 0
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stdout", pipe)
    assert main(command) == 0
    assert "\x1b" not in uncolored.getvalue()
    seconds = re.compile(r"\d+\.\d\d s$", re.MULTILINE)
    assert seconds.sub("", uncolored.getvalue()) == seconds.sub("", pipe.getvalue())
    assert "\n+ " not in pipe.getvalue()


# --- the timeline ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def program() -> Program:
    return recomputed(joint(Net(8), 64, 4), "blocks.*")


def test_plain_text_is_what_the_pieces_say_without_styles(program: Program) -> None:
    lines = memory_spans(program, 5, 90, colored=False)
    assert memory_text(program, 5, 90) == "".join(text + "\n" for text in texts(lines))
    assert {style for line in lines for _, style in line} == {""}


@pytest.mark.parametrize("width", [40, 72, 100, 180])
def test_the_chart_fits_the_terminal(program: Program, width: int) -> None:
    lines = texts(chart(program.memory(), width, colored=True))
    rows = [line for line in lines if line.endswith("│")]
    assert len(rows) == 14
    assert len({len(line) for line in rows}) == 1
    assert all(cell_len(line) <= width for line in rows)
    assert sum(line.count("▲") for line in lines if line.lstrip().startswith("└")) == 1


def test_categories_are_stacked_in_their_colors(program: Program) -> None:
    timeline = program.memory()
    lines = chart(timeline, 100, colored=True)
    used = {part for line in lines for _, style in line for part in style.split(" on ") if part}
    key = next(line for line in lines if "from the top:" in line[0][0])
    named = [(text.strip(), style) for text, style in key[1:]]
    names = [text for text, style in named if not style]
    assert names == [name for name in reversed(CATEGORY_STYLES) if name in names]
    assert {"activations", "recomputed", "backward", "gradients"} <= set(names)
    assert "parameters" not in names, "what is resident is below the chart"
    assert [style for _, style in named if style] == [category_style(name) for name in names]
    assert used == {category_style(name) for name in names}


def test_the_highest_column_is_full(program: Program) -> None:
    timeline = program.memory()
    (top,) = [
        line for line in texts(chart(timeline, 300, colored=True)) if line.startswith(f"{memory_label(timeline)} │")
    ]
    assert re.search("[▁-█]", top)


def memory_label(timeline: graphopt.ir.memory.timeline.MemoryTimeline) -> str:
    return graphopt.ir.words.written_units.format_bytes(timeline.peak_bytes)


@pytest.mark.sweep
def test_memory_on_a_terminal(make_screen: Callable[[], Terminal]) -> None:
    screen = make_screen()
    assert main(["memory", target("plain"), "-p", RECOMPUTE]) == 0
    written = screen.getvalue()
    assert "38;2;86;180;233m" in written, "activations are sky blue"
    uncolored = COLOR.sub("", written)
    assert uncolored.index("==== before") < uncolored.index("==== after")
    assert uncolored.count("from the top:") == 2
    assert max(cell_len(line) for line in uncolored.split("\n") if line.endswith("│")) <= 100


# --- names -----------------------------------------------------------------------------------------------------------


def test_nothing_in_a_name_reaches_the_terminal_as_a_command(make_screen: Callable[[], Terminal]) -> None:
    screen = make_screen()
    program = hostile()
    for text in (program.to_text(), memory_text(program), str(tensors_table(program)), *NAMES):
        terminal.write(text, screen, style=terminal.line_style)
    terminal.write(candidates_text(program.checkpoint_candidates()), screen)
    terminal.write_spans(memory_spans(program), screen)
    error = GraphoptError(STEERING)
    error.add_note(STEERING)
    terminal.write_error(error)
    assert_steers_nothing(screen.getvalue())
    assert r"red\x1b[31m\x1b]0;title\x07\x9b2J\x0d\x08" in screen.getvalue()


def test_names_are_shown_without_colors_too(
    make_screen: Callable[[], Terminal], monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = make_screen()
    monkeypatch.setenv("NO_COLOR", "1")
    terminal.write(STEERING, screen)
    assert screen.getvalue() == "red\\x1b[31m\\x1b]0;title\\x07\\x9b2J\\x0d\\x08\n"
    pipe = io.StringIO()
    terminal.write(STEERING, pipe)
    assert pipe.getvalue() == STEERING + "\n", "files and pipes get what there is"


def test_warnings_steer_nothing(make_screen: Callable[[], Terminal], monkeypatch: pytest.MonkeyPatch) -> None:
    screen = make_screen()
    logger = logging.getLogger("graphopt.test")
    handler = logging.StreamHandler(screen)
    handler.setFormatter(terminal.LogFormatter("%(message)s"))
    logger.addHandler(handler)
    try:
        logger.warning("%s", STEERING)
    finally:
        logger.removeHandler(handler)
    assert_steers_nothing(screen.getvalue())


def test_markup_in_a_message_is_text(make_screen: Callable[[], Terminal]) -> None:
    screen = make_screen()
    with terminal.working("capturing [bold]dir[/bold]/x.py") as show:
        show("[red]joint")
    with progress_bar("measuring [x]") as bar:
        bar(0.5, "[y]")
    assert "[bold]dir[/bold]/x.py" in screen.getvalue()


# --- what moves ------------------------------------------------------------------------------------------------------


def test_one_display_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    class Display:
        def __init__(self, name: str) -> None:
            self.name = name

        def start(self) -> None:
            said.append(f"{self.name} on")

        def stop(self) -> None:
            said.append(f"{self.name} off")

    with terminal.displayed(Display("outer")), pytest.raises(KeyError), terminal.displayed(Display("inner")):
        raise KeyError
    assert said == ["outer on", "outer off", "inner on", "inner off", "outer on", "outer off"]


def test_bars_inside_of_a_spinner(make_screen: Callable[[], Terminal]) -> None:
    screen = make_screen()
    with terminal.working("capturing"):
        with measuring() as progress:
            progress(1, 2)
            progress(2, 2)
        with progress_bar("searching plans") as show:
            show(0.5, "half")
    for text in ("capturing", "measuring the ops", "searching plans"):
        assert text in screen.getvalue()


def test_capture_passes_and_plans_are_followed_on_a_terminal(make_screen: Callable[[], Terminal]) -> None:
    screen = make_screen()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))
    step = graphopt.optimize_step(
        model, torch.optim.SGD(model.parameters(), lr=0.1), [FitMemory("95%")], loss=mean_square
    )
    step(torch.randn(64, 16))
    assert "capturing Sequential" in screen.getvalue()
    assert "searching plans" in screen.getvalue()


def test_everything_is_quiet_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    with measuring() as measured, searching(), terminal.working("capturing") as show:
        measured(1, 2)
        show("joint stage")
    graphopt.optimize(nn.Linear(2, 2), [Recompute("auto")])(torch.randn(3, 2)).sum().backward()
    assert capsys.readouterr() == ("", "")


def test_other_ranks_are_quiet(make_screen: Callable[[], Terminal], monkeypatch: pytest.MonkeyPatch) -> None:
    screen = make_screen()
    monkeypatch.setenv("RANK", "1")
    with terminal.working("capturing"), progress_bar("measuring") as show:
        show(0.5, "")
    assert screen.getvalue() == ""


def test_the_pass_that_runs_is_named() -> None:
    said: list[str] = []
    program = joint(Net(2), 3, 4)
    Pipeline([Recompute("blocks.*")]).run(program, instruments=[ShowPasses(said.append)])
    assert said == ["joint stage, recompute", "joint stage"]
