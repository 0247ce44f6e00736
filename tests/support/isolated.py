"""Calls in processes of their own, forked from one with everything imported: one that dies ends nothing else."""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from tests.support.paths import ROOT

__all__ = ["Isolated", "Outcome"]

MEMORY = 12 << 30
"""Address space of one call, in bytes."""

SECONDS = 3600
"""After which a call that hangs is ended; minutes are enough for each, but not beside other work."""


@dataclass(frozen=True)
class Outcome:
    """How one call ended.

    Attributes:
        values: what the function yielded, as JSON gives it back.
        died: how the process ended, empty where it came to the end.
        said: the last lines of what it wrote to standard error.
    """

    values: list[Any]
    died: str
    said: str


class Isolated:
    """Calls a function that yields JSON values, each call in a process of its own.

    Args:
        target: the function, as ``module:name``; its module is imported once.
    """

    def __init__(self, target: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.isolated", target],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip

    def __call__(self, *arguments: Any) -> Outcome:
        """Call the function with arguments that JSON can hold."""
        given, answers = self._process.stdin, self._process.stdout
        assert given is not None
        assert answers is not None
        given.write(json.dumps(arguments) + "\n")
        given.flush()
        return Outcome(**json.loads(answers.readline()))

    def __enter__(self) -> Isolated:
        return self

    def __exit__(self, *raised: object) -> None:
        with self._process:  # closes its input, upon which it ends
            pass


# --- the process that forks ------------------------------------------------------------------------------------------


def _serve(target: str, given: Iterable[str], answers: TextIO) -> None:
    module, _, name = target.partition(":")
    function: Callable[..., Iterable[Any]] = getattr(importlib.import_module(module), name)
    for line in given:
        with tempfile.TemporaryDirectory() as folder:
            found, said = Path(folder, "found"), Path(folder, "said")
            found.touch()
            said.touch()
            child = os.fork()
            if child == 0:
                _run(function, json.loads(line), found, said)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            outcome = {
                "values": [json.loads(value) for value in found.read_text(encoding="utf-8").splitlines()],
                "died": "" if status == 0 else signal.Signals(-status).name if status < 0 else f"exit status {status}",
                "said": said.read_text(encoding="utf-8", errors="replace")[-2000:],
            }
        answers.write(json.dumps(outcome) + "\n")
        answers.flush()


def _run(function: Callable[..., Iterable[Any]], arguments: list[Any], found: Path, said: Path) -> None:
    """Write down what a function yields; never returns."""
    status = 1
    try:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        signal.alarm(SECONDS)
        with said.open("w", encoding="utf-8") as opened:
            os.dup2(opened.fileno(), 1)
            os.dup2(opened.fileno(), 2)
        with found.open("w", encoding="utf-8") as opened:
            for value in function(*arguments):
                opened.write(json.dumps(value) + "\n")
                opened.flush()
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what is printed while modules are imported is no answer
    _serve(sys.argv[1], sys.stdin, _answers)
