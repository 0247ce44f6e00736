"""Errors of the command line's own grammar, help and the version are there before torch is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

RUN = """
import contextlib, io, json, sys
from graphopt.cli.main import main
found = []
for words in json.loads(sys.argv[1]):
    err = io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(err):
        code = main(words)
    found.append((code, err.getvalue(), "torch" in sys.modules))
print(json.dumps(found))
"""

TARGET = "examples/train_gpt.py:factory"
COMMANDS = ("passes", "formats", "tensors", "dump", "memory", "diff", "compare", "view", "plan", "cache", "profile")
CAPTURING = {
    "tensors": (),
    "dump": (),
    "memory": (),
    "diff": ("-p", "recompute"),
    "compare": ("-p", "recompute"),
    "view": (),
    "plan": (),
}
"""Commands that capture a target, with what each cannot do without."""


def answers(lines: list[list[str]]) -> list[tuple[int, str]]:
    """The exit code and the output of each line, in one process that has not imported torch behind any of them."""
    command = [sys.executable, "-c", RUN, json.dumps(lines)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [line for line, (_, _, torch) in zip(lines, found, strict=True) if torch] == []
    return [(code, text) for code, text, _ in found]


def on_targets(*words: str, only: tuple[str, ...] = tuple(CAPTURING), target: str = TARGET) -> list[list[str]]:
    return [[command, target, *CAPTURING[command], *words] for command in only]


FITTING = ("dump", "memory", "diff", "view", "plan")
WRITING = ("dump", "memory", "view", "plan")

WRONG = {
    "an unknown command": ([["plna"]], "did you mean 'plan'"),
    "no command": ([[]], "required: COMMAND"),
    "an unknown option": (
        [[command, "--jsn"] for command in ("passes", "formats", "profile")],
        "did you mean '--json'",
    ),
    "an unknown option behind a target": (on_targets("--jsn"), "did you mean '--json'"),
    "a missing argument": ([[command] for command in CAPTURING], "required: TARGET"),
    "an unknown word": ([["cache", "lst"], ["completion", "bsh"], ["help", "plann"]], "did you mean"),
    "a stage": (on_targets("--stage", "jont"), "did you mean 'joint'"),
    "a format": (on_targets("--format", "jsn", only=("dump", "memory", "plan")), "did you mean 'json'"),
    "a number": (on_targets("--batch", "x", only=("dump", "plan", "tensors")), "'x' is not a whole number above 0"),
    "seconds": (on_targets("-b", "60%", "--time-limit", "soon", only=FITTING), "'soon' is not a number of seconds"),
    "bytes": (on_targets("-b", "12XB", only=FITTING), "'12XB' is not a number of bytes"),
    "no bytes": (on_targets("-b", "8", only=FITTING), "did you mean '8GB'"),
    "bytes of a tensor": ([["tensors", TARGET, "--min-bytes", "3x"]], "'3x' is not a number of bytes"),
    "a device": (on_targets("--device", "h101", only=(*FITTING, "tensors")), "h100-80gb"),
    "a cost": (on_targets("-b", "60%", "--cost", "A100", only=FITTING), "a100-80gb"),
    "a device to measure": ([["profile", "cudda"]], "did you mean 'cuda'"),
    "a profile that is not TOML": ([["profile", "-o", "mine.json"]], "let mine.json end in .toml"),
    "a bandwidth": ([["plan", TARGET, "--world-size", "8", "--bandwidth", "fast"]], "is not a bandwidth"),
    "options that do not go together": (on_targets("--cost", "roofline", only=("dump", "view")), "give --budget too"),
    "a target of another form": (on_targets(target="model"), "'model' names no factory"),
    "a file that is not there": (on_targets(target="examples/train_gtp.py:factory"), "did you mean 'train_gpt.py'"),
    "a module that is not there": (on_targets(target="exmples.train_gpt:factory"), "there is no module 'exmples'"),
    "a configuration that is not there": (
        on_targets("--device", "h200", "--tokens", "8", only=("dump", "plan"), target="hf:none.json"),
        "there is no file 'none.json'",
    ),
    "passes in a file that is not there": (
        [[command, TARGET, "--config", "none.toml"] for command in CAPTURING if command != "tensors"],
        "there is no file 'none.toml'",
    ),
    "a profile that is not there": (on_targets("--device", "none.toml", only=FITTING), "graphopt profile -o none.toml"),
    "a folder that is not there": (on_targets("-o", "none/x.html", only=WRITING), "there is no folder none"),
    "calls of a file that is not there": ([["profile", "--calls", "none.py:build"]], "there is no file 'none.py'"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_wrong_is_said_before_torch_is_imported(kind: str) -> None:
    lines, said = WRONG[kind]
    for line, (code, text) in zip(lines, answers(lines), strict=True):
        assert code == 2, (line, text)
        assert said in text, (line, text)


def test_help_and_version_need_no_torch() -> None:
    lines = [["--help"], ["--version"], ["help"], *([command, "--help"] for command in COMMANDS)]
    lines += [["help", command] for command in COMMANDS]
    assert {code for code, _ in answers(lines)} == {0}


def test_a_line_that_is_right_gets_to_the_target(tmp_path: Path) -> None:
    target = tmp_path / "made.py"
    target.write_text("raise RuntimeError('this is the target')\n", encoding="utf-8")
    command = [sys.executable, "-m", "graphopt", "dump", f"{target}:build", "-b", "60%"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1
    assert "this is the target" in done.stderr
