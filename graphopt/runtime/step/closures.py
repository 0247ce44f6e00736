"""Optimizers that evaluate the model several times for one update, as LBFGS does, behind a whole step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import fx

from graphopt.errors import GraphoptError
from graphopt.ir.node import Phase
from graphopt.ir.ops.updates.opaque_update import Evaluate, evaluated_by, opaque_update_
from graphopt.ir.program import Program
from graphopt.rewriting.pipeline import Pipeline
from graphopt.runtime.step.step_variants import CompiledStep

__all__ = ["asks_again", "evaluate", "evaluations"]


def evaluate(compiled: CompiledStep, batch: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of a batch and the gradients by name, from a program without an update."""
    with torch.no_grad():
        results = compiled.run(compiled.binding.gather(batch))
    named = list(zip(compiled.program.outputs, results, strict=True))
    gradients = {spec.target: value for spec, value in named if spec.role == "gradient"}
    return next(value for spec, value in named if spec.role == "loss"), gradients


def _update_calls(program: Program) -> list[fx.Node]:
    return [node for node in program.phase_nodes(Phase.UPDATE) if node.target is opaque_update_]


def asks_again(program: Program) -> bool:
    """Whether the optimizer behind a program evaluates the model by itself while the program runs."""
    return any(node.kwargs.get("loss") is not None for node in _update_calls(program))


def evaluations(
    optimizer: torch.optim.Optimizer, program: Program, pipeline: Pipeline, every: int, again: Callable[[], Evaluate]
) -> contextlib.AbstractContextManager[None]:
    """While the block runs, what an optimizer's closure evaluates; nothing for an optimizer without one.

    Args:
        optimizer: of the step.
        program: of the step that is about to run.
        pipeline: its passes.
        every: how many batches a step takes.
        again: gives the function that computes loss and gradients of the batch again.

    Raises:
        GraphoptError: where each evaluation would have to do what only the step's program does.
    """
    if not asks_again(program):
        return contextlib.nullcontext()
    name = type(optimizer).__name__
    late = [current.name for current in pipeline.passes if current.stage == "step"]
    if late or every > 1:
        what = f"the {'passes' if len(late) > 1 else 'pass'} {', '.join(late)}" if late else f"accumulate({every})"
        raise GraphoptError(
            f"{name} evaluates the model several times for one update, and {what} acts on the gradients of a step only "
            "once: leave it out, or keep your loop and use graphopt.optimize"
        )
    targets = {node: spec.target for node, spec in program.inputs_of("parameter")}
    parameters = _update_calls(program)[0].args[0]
    assert isinstance(parameters, (list, tuple))
    order = [targets[node] for node in parameters if isinstance(node, fx.Node)]
    return evaluated_by(optimizer, again(), order)
