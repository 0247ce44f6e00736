"""The run directory: one JSON file per stage and rank, a manifest, and a script that reproduces a failing pass."""

from __future__ import annotations

import json
import logging
import os
import platform
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch

from graphopt.errors import quoted
from graphopt.ir.files.serialization import SCHEMA_VERSION, to_json
from graphopt.ir.program import Program
from graphopt.ir.version import VERSION
from graphopt.rewriting.pass_ import Pass, PassRecord
from graphopt.rewriting.pipeline import Pipeline

__all__ = ["DumpDirectory", "environment"]

logger = logging.getLogger(__name__)

_VARIABLE = "GRAPHOPT_DUMP"


def environment() -> dict[str, str]:
    """What a program was made with."""
    return {
        "graphopt": VERSION,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


class DumpDirectory:
    """Writes what happens to a program into ``directory/runN/rankR``; an instrument of the pipeline.

    Every file is JSON with a ``schema`` number; nothing is pickled.
    """

    def __init__(self, directory: Path, title: str, pipeline: Pipeline) -> None:
        rank = int(os.environ.get("RANK", "0"))
        run = sum(1 for _ in directory.glob("run*"))
        while True:
            self.path = directory / f"run{run}" / f"rank{rank}"
            try:
                self.path.mkdir(parents=True)
                break
            except FileExistsError:
                run += 1
        self._title = title
        self._pipeline = str(pipeline)
        self._files: list[str] = []
        self._started = time.time()
        self._write_manifest("running", [])

    @staticmethod
    def is_wanted() -> bool:
        """Whether ``GRAPHOPT_DUMP`` names a directory."""
        return bool(os.environ.get(_VARIABLE))

    @classmethod
    def from_environment(cls, title: str, pipeline: Pipeline) -> DumpDirectory | None:
        """The directory that ``GRAPHOPT_DUMP`` names, or None where it is not set."""
        directory = os.environ.get(_VARIABLE)
        if not directory:
            return None
        try:
            return cls(Path(directory), title, pipeline)
        except OSError as error:
            logger.warning("%s=%s cannot be written to (%s): nothing is dumped", _VARIABLE, directory, error)
            return None

    def record(self, label: str, program: Program) -> None:
        """Write one program."""
        plain = re.sub(r"[^\w.-]+", "-", label).strip("-")[:60]
        name = f"{len(self._files):02d}-{plain}.json"
        self._write(name, json.dumps(to_json(program)))
        self._files.append(name)

    def before_pass(self, current: Pass, program: Program) -> None:
        """Nothing: the program is in the file of the last stage or pass."""

    def after_pass(self, current: Pass, program: Program, record: PassRecord) -> None:
        """Write the rewritten program."""
        self.record(current.name, program)

    def failed_pass(self, current: Pass, before: Program, error: Exception) -> None:
        """Write the program the pass was given, and a script that runs the pass on it again."""
        self.record(f"before-{current.name}", before)
        script = self.path / "repro.py"
        self._write(script.name, _REPRODUCE.format(name=current.name, spec=str(current), file=self._files[-1]))
        self._write_manifest("failed", [], error=f"{current.name}: {quoted(error)}")
        error.add_note(f"graph before this pass: {self.path / self._files[-1]}")
        error.add_note(f"reproduce: {sys.executable} {script}")

    def finish(self, records: list[PassRecord]) -> None:
        """Complete the manifest."""
        self._write_manifest("finished", records)

    def _write_manifest(self, state: str, records: list[PassRecord], error: str | None = None) -> None:
        manifest = {
            "schema": SCHEMA_VERSION,
            "state": state,
            "title": self._title,
            "pipeline": self._pipeline,
            "environment": environment(),
            "started": self._started,
            "seconds": time.time() - self._started,
            "files": self._files,
            "passes": [record_json(record) for record in records],
            "error": error,
        }
        self._write("manifest.json", json.dumps(manifest, indent=2))

    def _write(self, name: str, text: str) -> None:
        """Write a file; where the disk does not take it, training goes on without."""
        try:
            (self.path / name).write_text(text, encoding="utf-8")
        except OSError as error:
            logger.warning("%s: %s cannot be written (%s)", _VARIABLE, self.path / name, error)


def record_json(record: PassRecord) -> dict[str, Any]:
    """What one pass did, for machines."""
    return {
        "name": record.name,
        "spec": record.spec,
        "stage": record.stage,
        "numerics": record.numerics,
        "changed": dict(record.changed.counts),
        "reason": record.changed.reason,
        "tensors": list(record.changed.tensors),
        "lines": list(record.changed.lines),
        "seconds": record.seconds,
        "nodes": [record.nodes_before, record.nodes_after],
        "peak_bytes": [record.peak_before, record.peak_after],
    }


_REPRODUCE = '''"""Runs the pass {name!r} on the program it failed on."""

import json
from pathlib import Path

from graphopt.rewriting.pipeline import Pipeline
from graphopt.ir.program import Program

program = Program.from_json(json.loads((Path(__file__).parent / {file!r}).read_text(encoding="utf-8")))
Pipeline({spec!r}).run(program)
'''
