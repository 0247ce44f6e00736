"""Running a program before and after rewriting on the same inputs, and comparing what comes out."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from torch import fx

from graphopt import _torch
from graphopt.errors import VerifyError
from graphopt.ir.graphs.autocast import plain_precision
from graphopt.ir.node import OutputSpec, value_of
from graphopt.ir.ops.values import cuda_indices
from graphopt.ir.program import Program
from graphopt.runtime.programs.binding import Binding
from graphopt.runtime.programs.rewrite import Rewritten

__all__ = ["check_numerics", "run_once"]

logger = logging.getLogger(__name__)


def run_once(program: Program, inputs: list[Any], seed: int = 0) -> tuple[Any, ...]:
    """Run a program on copies of ``inputs`` from a fixed random state; the caller's generators are left as they are."""
    copies = [value.detach().clone() if isinstance(value, torch.Tensor) else value for value in inputs]
    devices = cuda_indices(value for value in copies if isinstance(value, torch.Tensor))
    with torch.random.fork_rng(devices=devices), torch.no_grad(), plain_precision():
        torch.manual_seed(seed)
        return tuple(program.to_graph_module().forward(copies))


def check_numerics(rewritten: Rewritten) -> None:
    """Run the captured and the rewritten joint program on the example inputs and compare outputs and gradients.

    Passes that are all ``bitwise`` must leave everything equal to the last bit; with ``tolerant`` ones
    ``torch.testing.assert_close`` decides; with passes that change numerics nothing is compared, and the log says so.

    Raises:
        VerifyError: naming the outputs that differ.
    """
    classes = {p.numerics for p in rewritten.pipeline.passes}
    if "changes" in classes:
        names = [p.name for p in rewritten.pipeline.passes if p.numerics == "changes"]
        logger.warning("verify='numerics' compares nothing: %s change numerics by design", ", ".join(names))
        return
    after = _without_update(rewritten)
    label, before = next(item for item in rewritten.snapshots if item[1].stage == "joint")
    problems = []
    results = [run_once(program, _inputs(program, rewritten)) for program in (before, after)]
    for was, now, spec in zip(*results, after.outputs, strict=True):
        if isinstance(was, torch.Tensor):
            difference = _beyond_tolerance(was, now) if "tolerant" in classes else _not_bitwise(was, now)
            problems += [f"{_of(spec)}{difference}"] if difference else []
    if problems:
        raise VerifyError(
            f"the rewritten program computes other values than the captured one ({label}):\n  " + "\n  ".join(problems)
        )


def _beyond_tolerance(was: torch.Tensor, now: torch.Tensor) -> str:
    """How two tensors differ by more than ``torch.testing.assert_close`` lets pass; empty where they do not."""
    try:
        torch.testing.assert_close(now, was, equal_nan=True)
    except AssertionError as error:
        return f": {str(error).splitlines()[-1]}"
    return ""


def _not_bitwise(was: torch.Tensor, now: torch.Tensor) -> str:
    """How far two tensors differ; empty where they are equal, with not-a-number in the same places."""
    if torch.equal(was, now) or (was.isnan() == now.isnan()).logical_and(was.isnan() | (was == now)).all():
        return ""
    worst = (was.double() - now.double()).abs().max().item()
    return f" differs by up to {worst:.3e}"


def _without_update(rewritten: Rewritten) -> Program:
    """The rewritten forward and backward; of a whole step, a copy on which the passes of the stage ``last`` are run."""
    joint = rewritten.stages["joint"]
    late = rewritten.pipeline.of("last")
    if rewritten.program.stage == "joint" or not late:
        return joint
    names = ", ".join(p.name for p in late)
    logger.warning(
        "verify='numerics' compares forward and backward, without the update; for that %s ran on them", names
    )
    copy = joint.copy()
    rewritten.finish(copy)
    return copy


def _of(spec: OutputSpec) -> str:
    return f"the {spec.role} {spec.target}"


def _inputs(program: Program, rewritten: Rewritten) -> list[Any]:
    session = rewritten.session
    tangents = {node.name: _tangent(value_of(node)) for node, _ in program.inputs_of("tangent")}
    without = [(n, s) for n, s in zip(program.placeholders, program.inputs, strict=True) if s.role != "tangent"]
    graph, specs = _only([n for n, _ in without]), [s for _, s in without]
    bare = Program(graph, "joint", specs, [], program.constants, pass_state=program.pass_state)
    values = iter(Binding(bare, session.model).gather(session.captured.example_tensors))
    return [tangents[n.name] if n.name in tangents else next(values) for n in program.placeholders]


def _only(nodes: list[fx.Node]) -> fx.Graph:
    """A graph of placeholders alone, for a binding."""
    graph = fx.Graph()
    for node in nodes:
        graph.placeholder(node.name).meta = dict(node.meta)
    graph.output(())
    return graph


def _tangent(value: torch.Tensor) -> torch.Tensor:
    """A tangent whose entries differ: constant ones vanish behind normalisations, and would hide wrong gradients."""
    sizes = [_torch.size_hint(size) for size in value.shape]
    steps = torch.arange(math.prod(sizes), dtype=torch.float64, device=value.device)
    return steps.mul(0.7).cos().to(value.dtype).reshape(sizes)
