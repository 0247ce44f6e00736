"""Live in a kernel: progress below the cell while it runs, nothing of it afterwards, and the page in a frame."""

from __future__ import annotations

import contextlib
import html
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from graphopt.report.notebook_progress import NotebookProgress
from tests.support.paths import ROOT

PREPARE = """
import os
import torch
import graphopt
from graphopt.passes import FitMemory
from graphopt.report import notebook_progress
from graphopt.rewriting.progress import searching, working
notebook_progress._INTERVAL = 0.0  # show every update
model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(4)))
x = torch.randn(512, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
TRAIN = """
step = graphopt.optimize_step(
    model, optimizer, [FitMemory("70%", cost="roofline")], loss=lambda model, x: model(x).square().mean()
).prepare(x)
"""
SPELL = """
with working("reading <b>names</b>") as show:
    show("layer & 1")
"""
OTHER_RANK = """
os.environ["RANK"] = "1"
with working("on another rank"):
    pass
"""


class Recording(NotebookClient):  # type: ignore[misc]
    """A client that keeps every display and update, cell by cell, as text and as HTML."""

    def __init__(self, notebook: Any, **options: Any) -> None:
        super().__init__(notebook, **options)
        self.shown: dict[int, list[dict[str, str]]] = {}

    def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
        if msg["msg_type"] in ("display_data", "update_display_data"):
            self.shown.setdefault(cell_index, []).append(msg["content"]["data"])
        return super().process_message(msg, cell, cell_index)


@pytest.fixture(scope="module")
def run() -> Recording:
    cells = [nbformat.v4.new_code_cell(source) for source in (PREPARE, TRAIN, SPELL, "step.show()", OTHER_RANK)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    client = Recording(notebook, kernel_name="python3", timeout=120)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    client.execute(env=environment)
    return client


@pytest.mark.sweep
def test_a_capture_and_a_search_show_how_far_they_are(run: Recording) -> None:
    texts = [bundle["text/plain"] for bundle in run.shown[1]]
    assert "capturing Sequential for f32[512, 8]" in texts
    assert any(text.startswith("capturing Sequential for f32[512, 8]: ") for text in texts), (
        "which pass runs is the remark"
    )
    shares = [int(match[1]) for text in texts if (match := re.match(r"searching plans (\d+)%", text))]
    assert shares == sorted(shares)
    assert len(shares) > 1
    assert any("smallest peak" in text for text in texts)
    assert any('<progress max="1" value="0.' in bundle["text/html"] for bundle in run.shown[1])


@pytest.mark.sweep
def test_nothing_of_it_stays(run: Recording) -> None:
    left = [output.data for output in run.nb.cells[1].outputs if output.output_type == "display_data"]
    assert left
    assert [data for data in left if set(data.values()) != {""}] == []


@pytest.mark.sweep
def test_a_name_is_text(run: Recording) -> None:
    pages = [bundle["text/html"] for bundle in run.shown[2]]
    assert any("reading &lt;b&gt;names&lt;/b&gt; layer &amp; 1" in page for page in pages)
    assert not any("<b>" in page for page in pages)


def test_show_gives_the_page_below_the_cell(run: Recording) -> None:
    (output,) = run.nb.cells[3].outputs
    frame = output.data["text/html"]
    assert frame.startswith('<iframe sandbox="allow-scripts"')
    assert 'height="720"' in frame
    assert "max-height:90vh" in frame
    (page,) = re.findall(r'srcdoc="([^"]*)"', frame)
    assert "fit-memory" in html.unescape(page)


@pytest.mark.sweep
def test_one_rank_speaks_for_all(run: Recording) -> None:
    assert 4 not in run.shown


def test_elsewhere_the_terminals_progress_is_used() -> None:
    asked = []

    class Other:
        @contextlib.contextmanager
        def working(self, message: str) -> Iterator[Callable[[str], None]]:
            asked.append(message)
            yield lambda remark: None

        @contextlib.contextmanager
        def bar(self, message: str) -> Iterator[Callable[[float, str], None]]:
            asked.append(message)
            yield lambda share, remark: None

    progress = NotebookProgress(Other())
    with progress.working("capturing"), progress.bar("searching"):
        pass
    assert asked == ["capturing", "searching"]
