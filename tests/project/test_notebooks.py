"""The notebooks as they are stored: executed in order, with outputs that code hosts show and that say what they are."""

from __future__ import annotations

import ast
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.support.notebooks import NOTEBOOKS, execute

PATHS = sorted(NOTEBOOKS.glob("*.ipynb"))
MOST = 300_000
"""Bytes of a notebook: code hosts show no large ones."""

SHOWN = {"text/plain", "text/html", "image/svg+xml", "image/png"}
MACHINE = re.compile(r"(?<![\w.])/(?:tmp|root|home|work|usr|opt|var|Users|private)/|[A-Z]:\\\\|file://")


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def says_something(source: str) -> bool:
    """Whether a cell prints, ends in a picture or writes a file."""
    if source.startswith("%%writefile"):
        return True
    inside = [node for top in ast.parse(source).body if not isinstance(top, ast.FunctionDef) for node in ast.walk(top)]
    called = {node.func.id for node in inside if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    return bool(called & {"print", "SVG"})


@pytest.fixture(params=PATHS, ids=lambda path: path.stem)
def stored(request: pytest.FixtureRequest) -> Any:
    notebook = nbformat.read(request.param, as_version=4)
    nbformat.validate(notebook)
    return notebook


def test_they_begin_with_the_budget() -> None:
    assert [path.stem for path in PATHS] == [
        "1_fit_a_budget", "2_look_around", "3_mixed_precision", "4_sparse_exchange", "5_write_your_own_pass",
        "6_train_apart",
    ]  # fmt: skip


def test_every_cell_that_prints_has_its_output(stored: Any) -> None:
    cells = code_cells(stored)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    silent = [cell.source for cell in cells if says_something(cell.source) and not cell.outputs]
    assert not silent, "make notebooks executes and stores them"
    assert any(says_something(cell.source) for cell in cells)


def test_outputs_are_results_in_forms_that_are_shown_everywhere(stored: Any) -> None:
    outputs = [output for cell in code_cells(stored) for output in cell.outputs]
    assert {output.output_type for output in outputs} <= {"stream", "execute_result", "display_data"}
    assert {output.name for output in outputs if output.output_type == "stream"} <= {"stdout"}
    bundles = [output.data for output in outputs if output.output_type != "stream"]
    assert {kind for data in bundles for kind in data} <= SHOWN
    assert not any("<script" in text or "<iframe" in text for data in bundles for text in data.values())


def test_every_output_is_followed_by_words(stored: Any) -> None:
    cells = stored.cells
    assert cells[0].cell_type == cells[-1].cell_type == "markdown"
    unexplained = [
        cell.source
        for cell, following in pairwise(cells)
        if cell.cell_type == "code" and cell.outputs and following.cell_type == "code"
    ]
    assert not unexplained
    assert any("**Look at**" in cell.source for cell in cells)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_file_is_small_and_tells_nothing_of_the_machine(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.encode()) < MOST
    assert not MACHINE.findall(text)
    notebook = nbformat.reads(text, as_version=4)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert not any(cell.metadata for cell in notebook.cells)


@pytest.mark.sweep
def test_what_is_stored_has_no_log_lines_and_no_leftovers_of_displays(tmp_path: Path) -> None:
    source = """
import sys
from graphopt.rewriting.progress import working
print("first")
print("a log line", file=sys.stderr)
with working("for a while"):
    print("second")
"""
    path = tmp_path / "small.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)]), path)
    (cell,) = execute(path).cells
    assert [(output.output_type, output.text) for output in cell.outputs] == [("stream", "first\nsecond\n")]
