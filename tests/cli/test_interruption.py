"""Ctrl-C at any moment: a word on stderr, the code 130, and no traceback."""

from __future__ import annotations

import functools
import signal
import subprocess
import sys
from pathlib import Path

import pytest

INTERRUPTED = """
import os, runpy, signal, sys

class AtImportOf:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            sys.meta_path.remove(self)
            for _ in range({times}):
                os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, AtImportOf())
sys.argv = ["graphopt", *sys.argv[1:]]
{start}
"""
"""A process that gets SIGINT when it comes to the import of a module."""

STARTS = {
    "python -m": 'runpy.run_module("graphopt", run_name="__main__", alter_sys=True)',
    "installed": "from graphopt.__main__ import main; sys.exit(main())",
    "installed before": "from graphopt.cli.main import main; sys.exit(main())",
}

TARGET = """
import torch
{imported}

def factory():
    {called}
    return torch.nn.Linear(2, 2), (torch.zeros(2, 2),)

"""


def run(tmp_path: Path, name: str, start: str = "python -m", *, times: int = 1, **target: str) -> None:
    (tmp_path / "made.py").write_text(TARGET.format(**{"imported": "", "called": "pass", **target}), encoding="utf-8")
    code = INTERRUPTED.format(name=name, times=times, start=STARTS[start])
    # a shell sets SIGINT aside for what runs in the background, and these tests may
    heard = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    done = subprocess.run(
        [sys.executable, "-c", code, "dump", "made.py:factory"],
        capture_output=True, text=True, check=False, cwd=tmp_path, timeout=300, preexec_fn=heard,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (130, "graphopt: interrupted\n"), done.stderr
    assert "def " not in done.stdout


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("graphopt.cli.main", "python -m"),
        ("argparse", "python -m"),
        ("graphopt.cli.arguments.command_line", "installed"),
        ("graphopt.cli.commands.looking", "installed before"),
        ("numpy", "python -m"),
        pytest.param("torch.nn", "installed", marks=pytest.mark.sweep),
        pytest.param("graphopt.report.page", "installed before", marks=pytest.mark.sweep),
    ],
)
def test_between_imports(tmp_path: Path, name: str, start: str) -> None:
    run(tmp_path, name, start)


def test_in_the_users_code(tmp_path: Path) -> None:
    run(tmp_path, "wave", called="import wave")


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("target", "times"),
    [
        ({"imported": "import wave"}, 1),
        ({"called": "import wave"}, 2),
        ({"called": "try:\n        import wave\n    finally:\n        import chunk_of_nothing"}, 1),
    ],
)
def test_wherever_it_comes(tmp_path: Path, target: dict[str, str], times: int) -> None:
    (tmp_path / "chunk_of_nothing.py").touch()
    run(tmp_path, "wave", times=times, **target)


def test_a_process_that_is_to_ignore_it_does(tmp_path: Path) -> None:
    code = INTERRUPTED.format(name="graphopt.cli.commands.words", times=1, start=STARTS["installed"])
    code = f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", code, "help", "dump"], capture_output=True, text=True, check=False, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: graphopt dump")


def test_the_handler_of_a_process_that_calls_main_stays(capsys: pytest.CaptureFixture[str]) -> None:
    from graphopt.cli.main import main

    before = signal.getsignal(signal.SIGINT)
    assert main(["help"]) == 0
    assert signal.getsignal(signal.SIGINT) is before
    assert "usage: graphopt" in capsys.readouterr().out
