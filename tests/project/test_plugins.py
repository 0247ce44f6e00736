"""A package of someone else's, installed with pip: its pass and its format stand beside graphopt's own everywhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.support.paths import ROOT, SUPPORT

Run = Callable[..., subprocess.CompletedProcess[str]]

TARGET = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return torch.relu(-(-self.linear(x)))


def factory():
    return Model(), (torch.randn(2, 4),)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs Python where the package is installed."""
    folder, place = tmp_path_factory.mktemp("installed"), tmp_path_factory.mktemp("work")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(folder), str(SUPPORT / "plugin")], check=True, capture_output=True)
    (place / "target.py").write_text(TARGET)

    def python(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)

    return python


def graphopt_command(run: Run, *arguments: str) -> str:
    done = run("-m", "graphopt", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_its_pass_and_its_format_are_listed(run: Run) -> None:
    assert "fold-negations" in graphopt_command(run, "passes")
    assert "Replace the negation of a negation" in graphopt_command(run, "passes", "fold-negations")
    formats = json.loads(graphopt_command(run, "formats", "--json"))["formats"]
    assert {"name": "mermaid", "suffix": ".mmd", "help": "a flowchart in Mermaid's language"} in formats
    assert "mermaid" in graphopt_command(run, "dump", "--help")


def test_the_command_line_runs_the_one_and_writes_the_other(run: Run) -> None:
    target = ("dump", "target.py:factory", "--format", "mermaid")
    plain = graphopt_command(run, *target)
    assert plain.startswith("flowchart TD\n")
    assert plain.count("neg") > graphopt_command(run, *target, "--passes", "fold-negations").count("neg") == 0
    each = graphopt_command(run, *target, "--passes", "fold-negations", "--after-each")
    assert each.count("flowchart TD") == 3
    assert "%% " in each


def test_programs_write_it_and_the_page_lists_both(run: Run) -> None:
    code = (
        "import torch, graphopt, target\n"
        "model, inputs = target.factory()\n"
        "optimized = graphopt.optimize(model, 'fold-negations', example_inputs=inputs)\n"
        "print(optimized.program.to('mermaid').splitlines()[0])\n"
        "print(optimized.records[0].changed)\n"
        "page = optimized.program.to_html()\n"
        "print('fold-negations' in page, 'a flowchart in Mermaid' in page)\n"
    )
    assert run("-c", code).stdout.splitlines() == ["flowchart TD", "2 replaced", "True True"]


def test_its_pass_is_verified_like_any_other(run: Run) -> None:
    done = run("-m", "graphopt", "dump", "target.py:factory", "--passes", "break-order")
    assert done.returncode == 1
    assert "'break-order', left a program that is not valid" in done.stderr


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent", "the format 'absent' (graphopt_plugin:ABSENT, from graphopt-plugin) cannot be imported"),
        ("named-otherwise", "registered as 'named-otherwise' but calls itself 'mermaid'"),
        ("no-format", "graphopt_plugin:to_mermaid for 'no-format' (from graphopt-plugin) is not a graphopt.Format"),
        ("mermiad", "no format called 'mermiad'; did you mean 'mermaid'"),
    ],
)
def test_a_format_that_is_wrong_is_an_error_that_names_it(run: Run, name: str, message: str) -> None:
    code = (
        "import graphopt\nfrom graphopt.ir.formats import find_format\n"
        f"try:\n    find_format({name!r})\nexcept graphopt.GraphoptError as error:\n    print(error)"
    )
    assert message in run("-c", code).stdout


def test_a_wrong_format_takes_nothing_from_the_others(run: Run) -> None:
    done = run("-c", "import graphopt; print(list(graphopt.available_formats()))")
    own = ["text", "python", "dot", "svg", "json", "html", "perfetto", "model-explorer"]
    assert done.stdout.strip() == str([*own, "mermaid"])
    for name in ("absent", "named-otherwise", "no-format", "svg"):
        assert f"'{name}'" in done.stderr
