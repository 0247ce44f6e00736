"""Completion scripts: bash completes with them, and those of zsh and fish come from the same parser."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from graphopt.cli.arguments.command_line import command_line
from graphopt.cli.arguments.command_parser import commands_of
from graphopt.cli.arguments.completion import words_of
from tests.support.command import Command


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


def completed(script: Path, *words: str) -> list[str]:
    """What bash offers behind the words of a command line, of which the last is incomplete."""
    line = " ".join(f"'{word}'" for word in words)
    code = f"source {script}; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _graphopt; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.split()


def test_bash_completes_commands_options_and_values(run: Command, tmp_path: Path) -> None:
    script = tmp_path / "graphopt.bash"
    script.write_text(run("completion", "bash").out, encoding="utf-8")
    known = subprocess.run(
        ["bash", "-c", f"source {script}; complete -p graphopt"], capture_output=True, text=True, check=True, timeout=60
    )
    assert "-F _graphopt graphopt" in known.stdout
    assert completed(script, "graphopt", "me") == ["memory"]
    assert completed(script, "graphopt", "plan", "x:y", "--bud") == ["--budget"]
    assert completed(script, "graphopt", "dump", "x:y", "--stage", "j") == ["joint"]
    assert completed(script, "graphopt", "completion", "f") == ["fish"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_command_and_option_is_in_the_script(run: Command, shell: str) -> None:
    script = run("completion", shell).out
    for name, parser in commands_of(command_line()).items():
        assert name in script
        for option, values in words_of(parser).items():
            assert (f"-l {option[2:]}" if shell == "fish" and option.startswith("--") else option.lstrip("-")) in script
            assert " ".join(values) in script
