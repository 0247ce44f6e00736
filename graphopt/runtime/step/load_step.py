"""`load_step`: a whole step whose captures come from a file that `TrainStep.save` wrote."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graphopt.errors import ArgumentError, GraphoptError, public, quoted
from graphopt.rewriting.pipeline import Pipeline
from graphopt.rewriting.pipeline_file import check_writes
from graphopt.rewriting.progress import working
from graphopt.runtime.compile.backend import Backend
from graphopt.runtime.runner import Options
from graphopt.runtime.step.train_step import TrainStep
from graphopt.runtime.stored.shipped_captures import Shipped, read_shipped

__all__ = ["load_step"]


@public
def load_step(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    loss: Callable[..., Any] | None = None,
    dynamic_shapes: Any = "auto",
    backend: Backend | None = None,
    trust_compiled: bool = False,
    allow_write: str | os.PathLike[str] | None = None,
) -> TrainStep:
    """A training step that was captured and planned before, here or on another machine.

    The file names the passes and holds programs as data; nothing in it is run as Python. It is compared with the model,
    the loss and the optimizer at once, and with the arguments at the first call. Calls of other signatures are captured
    behind the first one that the file serves. Parameters and optimizer state come from the objects given here.

    Args:
        path: of a file that ``TrainStep.save`` wrote.
        model: as the step was made for: the same names, shapes, attributes and code.
        optimizer: of the same class and settings; learning rates are free.
        loss: the same loss function.
        dynamic_shapes: for calls of other sizes than those that the file has, as for ``optimize_step``.
        backend: needed where the step was saved with a callable of yours.
        trust_compiled: also load what inductor has made, which torch reads from the file, and which is code that runs:
            only for files of your own. Without it inductor compiles again.
        allow_write: a folder in which and below which the passes of the file may write, beside that of
            ``GRAPHOPT_DUMP``; ``offload-state`` with a folder needs it.

    Raises:
        ArgumentError: where ``backend`` is missing.
        PipelineError: for passes that are to write elsewhere.
        GraphoptError: where the file is no such file, is not whole, or is for something else, naming what differs.

    Example:
        >>> import tempfile
        >>> path = tempfile.mkdtemp() + "/step"
        >>> step = graphopt.optimize_step(model, optimizer, "recompute{checkpoints=blocks.*}", loss=loss)
        >>> first = step(x)
        >>> step.save(path)
        >>> again = graphopt.load_step(path, model, optimizer, loss=loss)
        >>> bool(again(x) < first)
        True
        >>> again.records[0].name
        'recompute'
    """
    with working(f"reading the step in {path}"):
        shipped = read_shipped(Path(path))
    chosen: Any = shipped.backend if backend is None else backend
    if chosen == "callable":
        raise ArgumentError(f"{shipped.source} was saved with a backend that is a callable: give it as backend=")
    pipeline = Pipeline(shipped.pipeline or ())
    check_writes(pipeline.passes, shipped.source, allow_write, "graphopt.load_step(..., allow_write=FOLDER)")
    verify: Any = {"structure": "structure", "True": True, "False": False}[shipped.verify]
    options = Options.checked(model, pipeline, dynamic_shapes, chosen, verify)
    if trust_compiled:
        _load_compiled(shipped)
    step = TrainStep(model, optimizer, options, loss)
    step.use_shipped(shipped)
    return step


def _load_compiled(shipped: Shipped) -> None:
    """Hand what inductor made to torch.

    Raises:
        GraphoptError: where torch cannot read it.
    """
    if not shipped.compiled:
        return
    try:
        torch.compiler.load_cache_artifacts(shipped.compiled)
    except Exception as error:  # whatever torch finds in bytes that it did not write
        raise GraphoptError(
            f"{shipped.source}: torch cannot read what is compiled in it: {quoted(error, 200)}"
        ) from error
