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


def graphopt_commands(run: Run, *commands: str) -> list[str]:
    """What commands write, run one after the other in one process."""
    mark = "=" * 20
    code = (
        f"from graphopt.cli.main import main\nfor words in {[command.split() for command in commands]}:\n"
        f"    assert main(words) == 0\n    print({mark!r})"
    )
    done = run("-c", code)
    assert done.returncode == 0, done.stderr
    return done.stdout.split(mark + "\n")[:-1]


def test_its_pass_and_its_format_are_listed(run: Run) -> None:
    passes, one, formats = graphopt_commands(run, "passes", "passes fold-negations", "formats --json")
    assert "fold-negations" in passes
    assert "Replace the negation of a negation" in one
    found = json.loads(formats)["formats"]
    assert {"name": "mermaid", "suffix": ".mmd", "help": "a flowchart in Mermaid's language"} in found


def test_the_command_line_runs_the_one_and_writes_the_other(run: Run) -> None:
    target = "dump target.py:factory --format mermaid"
    with_pass = f"{target} --passes fold-negations"
    plain, folded, each = graphopt_commands(run, target, with_pass, f"{with_pass} --after-each")
    assert plain.startswith("flowchart TD\n")
    assert plain.count("neg") > folded.count("neg") == 0
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


@pytest.mark.sweep
def test_its_pass_is_verified_like_any_other(run: Run) -> None:
    done = run("-m", "graphopt", "dump", "target.py:factory", "--passes", "break-order")
    assert done.returncode == 1
    assert "'break-order', left a program that is not valid" in done.stderr


@pytest.fixture(scope="module")
def refusals(run: Run) -> str:
    """What looking for formats that are wrong says, one line each."""
    code = (
        "import graphopt\nfrom graphopt.ir.formats import find_format\n"
        "for name in ('absent', 'named-otherwise', 'no-format', 'mermiad'):\n"
        "    try:\n        find_format(name)\n    except graphopt.GraphoptError as error:\n        print(error)"
    )
    return run("-c", code).stdout


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent", "the format 'absent' (graphopt_plugin:ABSENT, from graphopt-plugin) cannot be imported"),
        ("named-otherwise", "registered as 'named-otherwise' but calls itself 'mermaid'"),
        ("no-format", "graphopt_plugin:to_mermaid for 'no-format' (from graphopt-plugin) is not a graphopt.Format"),
        ("mermiad", "no format called 'mermiad'; did you mean 'mermaid'"),
    ],
)
def test_a_format_that_is_wrong_is_an_error_that_names_it(refusals: str, name: str, message: str) -> None:
    (line,) = [line for line in refusals.splitlines() if name in line]
    assert message in line


@pytest.mark.sweep
def test_a_wrong_format_takes_nothing_from_the_others(run: Run) -> None:
    done = run("-c", "import graphopt; print(list(graphopt.available_formats()))")
    own = ["text", "python", "dot", "svg", "json", "html", "perfetto", "ranks", "model-explorer"]
    assert done.stdout.strip() == str([*own, "mermaid"])
    for name in ("absent", "named-otherwise", "no-format", "svg"):
        assert f"'{name}'" in done.stderr
