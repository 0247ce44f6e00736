from __future__ import annotations

import io
import sys

import pytest

from graphopt.errors import GraphoptError
from graphopt.report.console import terminal


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_colours_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    text = "+ added\n- gone\n  " + "long " * 60
    plain = io.StringIO()
    terminal.write(text, plain, style=terminal.line_style)
    assert plain.getvalue() == text + "\n"
    coloured = Terminal()
    terminal.write(text, coloured, style=terminal.line_style)
    assert "\x1b[32m+ added\x1b[0m\n\x1b[31m- gone\x1b[0m\n  " + "long " * 60 in coloured.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    uncoloured = Terminal()
    terminal.write(text, uncoloured, style=terminal.line_style)
    assert uncoloured.getvalue() == text + "\n"


def test_a_spinner_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with terminal.working("capturing model.py:build"):
        pass
    assert capsys.readouterr().err == ""
    stream = Terminal()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys, "stderr", stream)
    with terminal.working("capturing model.py:build"):
        pass
    assert "capturing model.py:build" in stream.getvalue()


def test_characters_that_the_output_cannot_hold() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    terminal.write("a ▇ b", stream)
    stream.flush()
    assert raw.getvalue() == b"a ? b\n"


def test_errors_with_their_notes(capsys: pytest.CaptureFixture[str]) -> None:
    error = GraphoptError("first line\nsecond line")
    error.add_note("a note\nof two lines")
    terminal.write_error(error)
    assert capsys.readouterr().err == "graphopt: error: first line\nsecond line\n  a note\n  of two lines\n"


def test_what_a_line_of_a_report_looks_like() -> None:
    lines = ["+12 nodes, -3 nodes; peak 1 kB", "--- a", "+++ b", "@@ -1 +1 @@", "+x", "-y", "    # module a", "z"]
    styles = ["bold", "bold", "bold", "bold", "green", "red", "dim", ""]
    assert [terminal.line_style(line) for line in lines] == styles


def test_width_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "73")
    assert terminal.terminal_width() == 73
