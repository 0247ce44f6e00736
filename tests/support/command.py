"""The command line in the test's process, and passes that misbehave."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, final
from unittest import mock

import pytest
import torch

from graphopt import Changed, Pass, Phase, Program
from graphopt.cli.main import main
from graphopt.ir.node import OutputSpec, Stage
from graphopt.rewriting import pipeline
from graphopt.rewriting.pass_ import Numerics

FILE = Path(__file__).parent / "targets.py"
RECOMPUTE = "recompute{checkpoints=blocks.*}"


def target(name: str) -> str:
    """A factory of ``tests/support/targets.py`` as a TARGET."""
    return f"{FILE}:{name}"


@dataclass
class Outcome:
    """What a command left: its exit code, and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        return json.loads(self.out)


@dataclass
class Command:
    """Runs commands in this process; a target's file and what it puts on the path are forgotten afterwards."""

    capsys: pytest.CaptureFixture[str]

    def __call__(self, *argv: object) -> Outcome:
        self.capsys.readouterr()
        path = list(sys.path)
        quiet = {"GRAPHOPT_LOG": os.environ.get("GRAPHOPT_LOG", "warning")}  # not what takes long on a busy machine
        try:
            with mock.patch.dict(os.environ, quiet):
                code = main([str(arg) for arg in argv])
        finally:
            sys.path[:] = path
            for name in list(sys.modules):
                if name.startswith("graphopt_target_"):
                    del sys.modules[name]
        captured = self.capsys.readouterr()
        return Outcome(code, captured.out, captured.err)


@final
@dataclass(frozen=True)
class Nothing(Pass):
    """Does nothing.

    The second paragraph.
    """

    name: ClassVar[str] = "nothing"
    stage: ClassVar[Stage] = "joint"
    numerics: ClassVar[Numerics] = "bitwise"
    after: ClassVar[tuple[str, ...]] = ("recompute",)
    requires: ClassVar[tuple[str, ...]] = ("first",)
    conflicts: ClassVar[tuple[str, ...]] = ("other", "third")
    changes_signature: ClassVar[bool] = True

    budget: float | None = None
    names: tuple[str, ...] = ("a", "b")
    fast: bool = False
    label: str = ""

    def apply(self, program: Program) -> Changed:
        return Changed(reason="it is for show")


@final
@dataclass(frozen=True)
class Idle(Pass):
    """Finds nothing to do."""

    name: ClassVar[str] = "idle"
    stage: ClassVar[Stage] = "joint"
    numerics: ClassVar[Numerics] = "bitwise"

    def apply(self, program: Program) -> Changed:
        return Changed(reason="there is no work")


@final
@dataclass(frozen=True)
class Double(Pass):
    """Doubles every output, and claims that it changes nothing."""

    name: ClassVar[str] = "double"
    stage: ClassVar[Stage] = "joint"
    numerics: ClassVar[Numerics] = "bitwise"

    def apply(self, program: Program) -> Changed:
        values = list(program.output_values)
        last = program.nodes[-2]
        values[0] = program.insert(
            torch.ops.aten.add.Tensor, (values[0], values[0]), after=last, phase=Phase.BACKWARD, origin="double"
        )
        program.set_outputs(values, program.outputs)
        return Changed(counts={"doubled": 1}, lines=("doubled the first output",))


@final
@dataclass(frozen=True)
class Rename(Pass):
    """Breaks a rule: it calls the first output something else without declaring it."""

    name: ClassVar[str] = "rename"
    stage: ClassVar[Stage] = "joint"
    numerics: ClassVar[Numerics] = "bitwise"

    def apply(self, program: Program) -> Changed:
        program.outputs[0] = OutputSpec(program.outputs[0].role, "renamed")
        return Changed(counts={"renamed": 1})


@final
@dataclass(frozen=True)
class Crash(Pass):
    """Raises."""

    name: ClassVar[str] = "crash"
    stage: ClassVar[Stage] = "step"
    numerics: ClassVar[Numerics] = "bitwise"

    def apply(self, program: Program) -> Changed:
        raise ValueError("nobody expected this")


def install(monkeypatch: pytest.MonkeyPatch, *passes: type[Pass]) -> None:
    """Let the text form find ``passes``, as an entry point would."""
    known = {cls.name: cls for cls in passes}
    monkeypatch.setattr(pipeline, "find_pass", known.__getitem__)
