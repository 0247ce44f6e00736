"""Version, help and completion: words alone, for which nothing of torch is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

import graphopt
from graphopt.analysis.costs.device_names import DEVICES
from graphopt.analysis.costs.profiles import PROFILES
from graphopt.cli.arguments.command_line import command_line
from graphopt.cli.arguments.command_parser import commands_of
from graphopt.cli.arguments.completion import words_of
from graphopt.ir.provided.formats import OWN, available_formats, format_names
from graphopt.report.register import FORMATS

RUN = """
import sys
sys.argv = ["/usr/bin/graphopt", *sys.argv[1:]]
from graphopt.cli.main import main
code = main(sys.argv[1:])
heavy = sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "numpy", "scipy", "networkx", "rich"})
print(code, heavy)
"""


@pytest.mark.sweep(cases=("words2-commands:", "words4-model-explorer"))
@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--version"], f"graphopt {graphopt.__version__}"),
        (["help"], "exit codes:"),
        (["--help"], "commands:"),
        (["help", "plan"], "--world-size"),
        (["dump", "--help"], "model-explorer"),
        (["completion", "bash"], "complete -o default -F _graphopt graphopt"),
    ],
)
def test_words_need_no_torch(words: list[str], shown: str) -> None:
    done = subprocess.run([sys.executable, "-c", RUN, *words], capture_output=True, text=True, check=True, timeout=120)
    assert shown in done.stdout
    assert done.stdout.splitlines()[-1] == "0 []"
    assert done.stderr == ""


def test_python_m_graphopt_needs_no_torch_for_its_version() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "graphopt", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == f"graphopt {graphopt.__version__}\n"
    assert "graphopt.cli.main" in done.stderr
    assert " torch" not in done.stderr


def test_names_that_need_no_torch_are_those_of_what_there_is() -> None:
    assert tuple(PROFILES) == DEVICES
    assert tuple(form.name for form in FORMATS) == OWN
    assert set(available_formats()) == set(format_names())


def test_an_option_is_spelled_and_explained_alike_wherever_it_is() -> None:
    """One spelling for one thing, and the same values; what it is about may differ (rows, bytes, a program)."""
    found: dict[str, set[tuple[str, ...]]] = {}
    commands = commands_of(command_line())
    for name, parser in commands.items():
        for option, values in words_of(parser).items():
            if option not in ("--format", "--stage"):
                found.setdefault(option, set()).add(tuple(values))
        options = {option for action in parser._actions for option in action.option_strings}
        assert {option for option in options if not option.startswith("--")} <= {"-h", "-p", "-b", "-o"}, name
    assert [option for option, values in found.items() if len(values) > 1] == []
    fitting = {"--budget", "--cost", "--time-limit", "--remeasure", "--passes", "--stage"}
    for name in ("view", "dump", "memory", "diff", "plan"):
        assert fitting <= set(words_of(commands[name])), name
    for name in ("tensors", "memory", "compare"):
        assert "--limit" in words_of(commands[name]), name
    for name in ("tensors", "compare"):
        assert "--match" in words_of(commands[name]), name


def test_exit_codes_are_in_the_help() -> None:
    text = command_line().format_help()
    for code in ("0 ", "1 ", "2 ", "130"):
        assert f"\n  {code}" in text
