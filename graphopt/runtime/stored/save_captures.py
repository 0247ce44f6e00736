"""The captures of a step written to one file."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from graphopt.errors import GraphoptError
from graphopt.ir.files.serialization import to_json
from graphopt.rewriting.pipeline import Pipeline
from graphopt.runtime.calls.size_rules import SizeRules
from graphopt.runtime.programs.rewrite import Rewritten
from graphopt.runtime.stored.checked_file import write_checked
from graphopt.runtime.stored.program_cache import ProgramCache
from graphopt.runtime.stored.program_files import ShippedFiles
from graphopt.runtime.stored.shipped_captures import KIND
from graphopt.runtime.stored.stable_form import NoStableFormError
from graphopt.runtime.stored.stored_capture import CaptureNotes, not_kept, variant_file, write_capture
from graphopt.runtime.stored.stored_sizes import write_sizes

__all__ = ["HasCapture", "save_captures"]


class HasCapture(Protocol):
    """One capture of a step."""

    rewritten: Rewritten
    rules: SizeRules


def save_captures(
    path: Path, captures: Sequence[HasCapture], cache: ProgramCache, pipeline: Pipeline, backend: object, verify: object
) -> None:
    """Write captures to a file that ``graphopt.load_step`` reads.

    Args:
        path: of the file, which is replaced.
        captures: of one step.
        cache: makes their keys.
        pipeline: the passes.
        backend: of the step.
        verify: of the step.

    Raises:
        GraphoptError: where a capture holds what no file can, naming it, or the file cannot be written.
    """
    _check_text(pipeline)
    found = [_files(capture, cache) for capture in captures]
    data = {
        "kind": KIND,
        "pipeline": str(pipeline),
        "backend": backend if isinstance(backend, str) else "callable",
        "verify": str(verify),
        "captures": found,
        "compiled": base64.b64encode(_compiled() if backend == "inductor" else b"").decode("ascii"),
    }
    try:
        write_checked(path, data)
    except OSError as error:
        raise GraphoptError(f"{path} cannot be written: {error.strerror or error}") from error


def _check_text(pipeline: Pipeline) -> None:
    """A file names passes by their text, which has to give the same passes again."""
    for mine in pipeline.passes:
        try:
            again = Pipeline(str(mine)).passes
        except GraphoptError as error:
            raise GraphoptError(
                f"a step with {mine.name} cannot be saved: no text names this pass ({error})"
            ) from error
        if again != (mine,):
            raise GraphoptError(f"a step with {mine.name} cannot be saved: its text does not say all of it")


def _files(capture: HasCapture, cache: ProgramCache) -> dict[str, Any]:
    rewritten = capture.rewritten
    reason = not_kept(rewritten)
    files = ShippedFiles("", {})
    try:
        if reason:
            raise NoStableFormError(reason)
        sizes = write_sizes(capture.rules, rewritten.program.context)
        key = cache.key(rewritten.session, vary=sizes is not None)
        write_capture(files, key, rewritten, CaptureNotes(sizes))
    except NoStableFormError as error:
        raise GraphoptError(f"a step of {rewritten.session.title} cannot be saved: {error}") from error
    for name, program in rewritten.variants.items():
        files.write(variant_file(name), to_json(program))
    return files.values()


def _compiled() -> bytes:
    """What inductor has made in this process, as torch packs it."""
    found = torch.compiler.save_cache_artifacts()
    return b"" if found is None else found[0]
