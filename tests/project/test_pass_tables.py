"""The generated tables in the documents: they are current, hold every pass, and stale ones are found and rewritten."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from graphopt.rewriting.registry import available_passes
from tests.support import catalogue
from tests.support.command import Idle, Nothing
from tests.support.documents import text_of
from tests.support.paths import ROOT

README, GUIDE = ROOT / "passes" / "README.md", ROOT / "graphopt" / "README.md"
TEXT = README.read_text(encoding="utf-8")


@pytest.mark.parametrize("document", [README, GUIDE], ids=["passes", "devices"])
def test_the_tables_are_current(document: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert catalogue.main(["--check", str(document)]) == 0, capsys.readouterr().err


def test_every_built_in_pass_is_in_the_table() -> None:
    table = TEXT[TEXT.index(catalogue.START) : TEXT.index(catalogue.END)]
    own = [name for name, cls in available_passes().items() if cls.__module__.startswith("graphopt.passes.")]
    assert own
    assert re.findall(r"^\| `\w+` \| `([\w-]+)` \|", table, re.MULTILINE) == own


def test_every_built_in_pass_has_a_section() -> None:
    sections = re.split(r"^#+ ", TEXT, flags=re.MULTILINE)
    own = [cls.__name__ for cls in available_passes().values() if cls.__module__.startswith("graphopt.passes.")]
    told = [section for section in sections if not section.startswith("All passes")]
    assert [name for name in own if not any(re.search(rf"\b{name}\b", section) for section in told)] == []


def test_a_row_says_what_a_pass_does() -> None:
    heading, rule, nothing, _ = catalogue.passes_table([Nothing, Idle]).splitlines()
    assert heading.count(" | ") == rule.count(" | ") == nothing.count(" | ") == 4
    assert nothing.startswith("| `Nothing` | `nothing` | ")
    assert nothing.endswith(" | Does nothing. |")


def test_a_stale_table_is_reported_and_rewritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "README.md"
    copy.write_text(TEXT.replace("| `Recompute` |", "| `Recomputed` |"), encoding="utf-8")
    assert catalogue.main(["--check", str(copy)]) == 1
    assert f"--write {copy}" in capsys.readouterr().err
    assert catalogue.main(["--write", str(copy)]) == 0
    assert copy.read_text(encoding="utf-8") == TEXT


@pytest.mark.parametrize("text", ["no markers", f"{catalogue.END}{catalogue.START}", catalogue.START, TEXT + TEXT])
def test_wrong_markers_are_an_error(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "README.md"
    copy.write_text(text, encoding="utf-8")
    assert catalogue.main(["--write", str(copy)]) == 2
    assert "each once and in this order" in capsys.readouterr().err
    assert copy.read_text(encoding="utf-8") == text


def test_a_missing_file_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert catalogue.main(["--check", str(tmp_path / "gone.md")]) == 2
    assert "gone.md" in capsys.readouterr().err


def test_the_border_in_the_document_is_that_of_the_code() -> None:
    text = text_of("graphopt/ARCHITECTURE.md")
    assert catalogue.replace_table(text, catalogue.border_table(), "<!-- border -->", "<!-- /border -->") == text
