"""One code for one kind of mistake, over all commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphopt.cli.arguments.command_line import command_line
from graphopt.cli.arguments.exit_codes import EXIT_CODES
from tests.support.command import RECOMPUTE, Command, target

ON_A_PROGRAM = ("tensors", "dump", "memory", "diff", "compare", "view", "plan")
TAKES_PASSES = ("dump", "memory", "diff", "compare", "view", "plan")

HOSTILE_TARGETS = {
    "model": 2,
    "Net": 2,
    "number": 2,
    "needs_more": 2,
    "gone": 2,
    "raises": 1,
    "nothing": 1,
    "branches": 1,
}
"""What stands in a file behind a name, and the code that a command ends with."""

CODE = """
import torch
from torch import nn

class Net(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x

model, number = Net(), 3

def needs_more(width):
    return model, (torch.zeros(width),)

def raises():
    raise KeyError("missing")

def nothing():
    return None

def branches():
    return model, (torch.zeros(2, requires_grad=True),)
"""


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


def with_passes(command: str, passes: str = RECOMPUTE) -> tuple[str, ...]:
    return ("-p", passes) if command in TAKES_PASSES else ()


@pytest.mark.parametrize("command", ON_A_PROGRAM)
def test_targets_that_are_not_right(
    run: Command, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(CODE, encoding="utf-8")
    found = {name: run(command, f"net.py:{name}", *with_passes(command)).code for name in HOSTILE_TARGETS}
    assert found == HOSTILE_TARGETS
    for text in ("net.py", "nett.py:model", "nett:model"):
        assert run(command, text, *with_passes(command)).code == 2


@pytest.mark.parametrize("command", TAKES_PASSES)
def test_what_an_argument_names_and_is_not_there_or_not_right(run: Command, command: str, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("[passes.recompte]\n")
    name = target("plain")
    arguments: list[tuple[object, ...]] = [
        ("-p", "recompte"),
        ("-p", "recompute{checkpoint=blocks.0}"),
        ("-p", "recompute{checkpoints=blocks.0"),
        ("-p", "offload{tier=tape}"),
        ("--config", tmp_path / "gone.toml"),
        ("--config", wrong),
        ("--no-such-option",),
        ("--stage", "jont"),
    ]
    if command != "compare":
        arguments += [
            ("--device", "h101"),
            ("--device", tmp_path / "gone.toml"),
            ("--device", wrong),
            ("-p", RECOMPUTE, "-b", "-5GB"),
            ("-p", RECOMPUTE, "-b", "60%", "--cost", tmp_path / "gone.toml"),
            ("-p", RECOMPUTE, "-b", "60%", "--cost", "measurd"),
        ]
    if command in ("dump", "memory", "plan", "view"):
        arguments += [("-p", RECOMPUTE, "-o", tmp_path / "none" / "x.svg"), ("-p", RECOMPUTE, "-o", tmp_path)]
    for given in arguments:
        outcome = run(command, name, *given)
        assert (outcome.code, outcome.out) == (2, ""), given
        assert outcome.err.startswith("graphopt: error: ")
        assert "Traceback" not in outcome.err


@pytest.mark.parametrize(
    "argv",
    [
        ("passes", "recompte"),
        ("help", "dmup"),
        ("completion", "bsh"),
        ("profile", "quantum"),
        ("profile", "cuda:99"),
        ("profile", "cpu", "--calls", "gone.py:factory"),
        ("cache", "list", "0123"),
        ("cache", "lst"),
        ("formats", "svg"),
        ("tensors", "x:y", "--checkpoints", "--stage", "forward"),
        ("plan", "x:y", "--world-size", "4"),
        ("dump", "hf:gone.json", "--tokens", "4", "--device", "h200"),
    ],
    ids=" ".join,
)
def test_the_other_commands(
    run: Command, argv: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHOPT_CACHE", str(tmp_path))
    outcome = run(*argv)
    assert (outcome.code, outcome.out) == (2, "")


@pytest.mark.parametrize("command", ["dump", "memory", "diff", "view", "plan"])
def test_a_budget_that_no_plan_meets(run: Command, command: str, tmp_path: Path) -> None:
    output = ("-o", tmp_path / "page.html") if command == "view" else ()
    outcome = run(command, target("step"), "-b", "5%", *output)
    assert outcome.code == 1
    assert len(outcome.err.splitlines()) <= 5, outcome.err


def test_what_the_program_does_not_have(run: Command) -> None:
    assert run("tensors", target("plain"), "block.1").code == 1
    assert run("dump", target("plain"), "-p", "recompute{checkpoints=block.0}").code == 1


def test_the_table_is_in_the_help() -> None:
    text = " ".join(command_line().format_help().split())
    assert set(EXIT_CODES) == {0, 1, 2, 130}
    for code, meaning in EXIT_CODES.items():
        assert f"{code} {meaning}" in text
