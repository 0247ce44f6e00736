"""`optimize_step`: makes a training step that passes rewrite."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from graphopt.errors import public
from graphopt.runtime.drop_in.module import take_over

if TYPE_CHECKING:
    from graphopt.rewriting.pipeline import Passes
    from graphopt.runtime.compile.backend import Backend
    from graphopt.runtime.programs.rewrite import Verify
    from graphopt.runtime.step.train_step import TrainStep

__all__ = ["optimize_step"]


@public
def optimize_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    passes: Passes = (),
    *,
    loss: Callable[..., Any] | None = None,
    example_inputs: tuple[Any, ...] | None = None,
    dynamic_shapes: Any = "auto",
    backend: Backend = "eager",
    verify: Verify = "structure",
) -> TrainStep:
    """Make a function that runs a whole training step, captured as one program and rewritten by passes.

    Args:
        model: the bare module; updated in place. The passes of a result of ``optimize`` are taken over.
        optimizer: a ``torch.optim`` object over its parameters; stays the source of truth. The step runs the
            implementation that it is asked for, with eager mode's bits; ``Adam``, ``AdamW`` and ``Adagrad`` that are
            asked for none run their fused kernel, with the bits of ``fused=True``.
        passes: ``Pass`` objects or their text form, in a list in any order, or one alone; None for no passes;
            ``"auto"`` for what the machine needs and results do not show: a plan where memory is short, and, where
            several ranks train, the fastest way to exchange gradients by ``example_inputs`` (``graphopt.advise``).
        loss: ``loss(model, *batch)`` returning a scalar, or more beside it (metrics, predictions): a tuple or list that
            begins with the loss, a dict with ``"loss"``, or an object with ``.loss``; the step then returns the same,
            detached. None where the model returns the loss or an object with ``.loss``, the rest of which is left out.
        example_inputs: a batch to capture with right away; otherwise the first call captures.
        dynamic_shapes: ``"auto"`` lets an axis vary from its second size on, so that few captures serve all sizes; None
            captures each size by itself; or the sizes that may vary, as for ``torch.export.export``, for the arguments
            of the step.
        backend: ``"eager"`` (the generated code), ``"inductor"``, or ``callable(graph_module, inputs)``.
        verify: ``"structure"`` (the invariant table after each pass), ``"numerics"`` (also compare with the unrewritten
            program on the example inputs), or False.

    Raises:
        ArgumentError: for a loss, an optimizer or sizes of another form.
        PipelineError: where the passes do not fit together.
        CaptureError: where the model, loss or optimizer cannot be captured; the optimizer then works in drop-in mode.

    Example:
        >>> step = graphopt.optimize_step(model, optimizer, [Recompute("blocks.*")], loss=loss)
        >>> for batch in (x, x):
        ...     value = step(batch)
        >>> value.shape, step.records[0].name
        (torch.Size([]), 'recompute')
    """
    # what captures and runs programs: for those who make one
    from graphopt.capture.call.sharded_form import is_fully_sharded
    from graphopt.capture.call.tensor_parallel_form import has_distributed_tensors
    from graphopt.rewriting.pipeline import AUTO
    from graphopt.runtime.runner import Options
    from graphopt.runtime.step.train_step import TrainStep

    if passes == AUTO and not (is_fully_sharded(model) or has_distributed_tensors(model)):  # whose ranks have a way
        from graphopt.runtime.advice.automatic import automatic_passes

        passes = automatic_passes(model, optimizer, loss, example_inputs)
    model, taken = take_over(model, passes)
    sharded, distributed = is_fully_sharded(model), has_distributed_tensors(model)
    options = Options.checked(
        model, taken, dynamic_shapes, backend, verify, fully_sharded=sharded, distributed=distributed
    )
    step = TrainStep(model, optimizer, options, loss)
    if example_inputs is not None:
        step.prepare_example(example_inputs)
    return step
