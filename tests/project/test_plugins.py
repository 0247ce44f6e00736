"""A package of someone else's, installed with pip: its pass and its format stand beside graphopt's own everywhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

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


DUMP = "dump target.py:factory --format mermaid"
COMMANDS = {
    "passes": "passes",
    "one": "passes fold-negations",
    "formats": "formats --json",
    "plain": DUMP,
    "folded": f"{DUMP} --passes fold-negations",
    "each": f"{DUMP} --passes fold-negations --after-each",
}
WRONG = ("absent", "named-otherwise", "no-format", "mermiad")

CODE = f"""
import contextlib, io, json
import torch, graphopt, target
from graphopt.cli.main import main
from graphopt.ir.provided.formats import find_format

def written(words):
    with contextlib.redirect_stdout(io.StringIO()) as found:
        assert main(words.split()) == 0
    return found.getvalue()

def refused(name):
    try:
        find_format(name)
    except graphopt.GraphoptError as error:
        return str(error)

said = {{name: written(words) for name, words in {COMMANDS}.items()}}
said.update({{name: refused(name) for name in {WRONG}}})
model, inputs = target.factory()
optimized = graphopt.optimize(model, "fold-negations", example_inputs=inputs)
page = optimized.program.to_html()
said["program"] = [optimized.program.to("mermaid").splitlines()[0], str(optimized.records[0].changed)]
said["page"] = [word in page for word in ("fold-negations", "a flowchart in Mermaid")]
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said(run: Run) -> dict[str, Any]:
    """What commands write, what looking for wrong formats says, and a program and its page, in one process."""
    done = run("-c", CODE)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_its_pass_and_its_format_are_listed(said: dict[str, Any]) -> None:
    assert "fold-negations" in said["passes"]
    assert "Replace the negation of a negation" in said["one"]
    found = json.loads(said["formats"])["formats"]
    assert {"name": "mermaid", "suffix": ".mmd", "help": "a flowchart in Mermaid's language"} in found


def test_the_command_line_runs_the_one_and_writes_the_other(said: dict[str, Any]) -> None:
    assert said["plain"].startswith("flowchart TD\n")
    assert said["plain"].count("neg") > said["folded"].count("neg") == 0
    assert said["each"].count("flowchart TD") == 3
    assert "%% " in said["each"]


def test_programs_write_it_and_the_page_lists_both(said: dict[str, Any]) -> None:
    assert said["program"] == ["flowchart TD", "2 replaced"]
    assert said["page"] == [True, True]


@pytest.mark.sweep
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
def test_a_format_that_is_wrong_is_an_error_that_names_it(said: dict[str, Any], name: str, message: str) -> None:
    assert message in said[name]


@pytest.mark.sweep
def test_a_wrong_format_takes_nothing_from_the_others(run: Run) -> None:
    done = run("-c", "import graphopt; print(list(graphopt.available_formats()))")
    own = ["text", "python", "dot", "svg", "json", "html", "perfetto", "ranks", "model-explorer"]
    assert done.stdout.strip() == str([*own, "mermaid"])
    for name in ("absent", "named-otherwise", "no-format", "svg"):
        assert f"'{name}'" in done.stderr
