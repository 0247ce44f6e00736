"""An optimizer's update that can be skipped on the device, without asking the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from graphopt import _torch
from graphopt.ir.gradients import base_of, update_calls
from graphopt.ir.node import Phase
from graphopt.ir.ops import schema
from graphopt.ir.ops.updates import scale as ops
from graphopt.ir.program import Program

__all__ = ["make_conditional"]

_COUNT = torch.ops.aten._foreach_add_.Scalar
_UNCOUNT = torch.ops.aten._foreach_sub_.List


def make_conditional(program: Program, found_inf: fx.Node, origin: str) -> int:
    """Let the update of a step program leave parameters and optimizer state as they are where ``found_inf`` is not 0.

    Fused ops take ``found_inf`` themselves, and their step counts are counted back, as in torch's optimizers. What
    other calls write, which may be a shard of a parameter, is copied before and put back. State that the update creates
    is not covered: whoever runs the program throws it away after a skipped step.

    Args:
        program: of stage step.
        found_inf: a tensor of one element, float32, 0 or 1, made before the optimizer's first call.
        origin: the pass that asks, for people.

    Returns:
        How many tensors are copied.
    """
    calls = update_calls(program)
    fused = [node for node in calls if _takes_found_inf(node)]
    counts = {step for node in fused for step in _argument(node, "state_steps")}
    for node in fused:
        node.kwargs = {**node.kwargs, "found_inf": found_inf}
    counted, kept = _written(program, [node for node in calls if node not in fused], counts)
    end: dict[str, Any] = {"before": program.output_node, "phase": Phase.UPDATE, "origin": f"{origin}: a skipped step"}
    if counted:
        program.insert(_UNCOUNT, (counted, [found_inf] * len(counted)), **end)
    if kept:
        before = [_keep(program, node, first, origin) for node, first in kept.items()]
        program.insert(ops.put_back_, (list(kept), before, found_inf), **end)
    return len(kept)


def _written(
    program: Program, calls: Sequence[fx.Node], counts: set[fx.Node]
) -> tuple[list[fx.Node], dict[fx.Node, fx.Node]]:
    """The parameters and state that calls write.

    Returns:
        the step counts that they only count up; and all others, or of each the one view that is written, with the call
        in front of which it is still as it was.
    """
    lasting = {node for node, _ in program.inputs_of("parameter", "state")}
    counted: dict[fx.Node, None] = {}
    views: dict[fx.Node, dict[fx.Node, fx.Node]] = {}
    for node in calls:
        written = {target: base_of(target) for target in schema.mutated_inputs(node)}
        written = {target: base for target, base in written.items() if base in lasting}
        if node.target is _COUNT and node.args[1] == 1 and counts.issuperset(written.values()):
            counted.update(dict.fromkeys(written.values()))
            continue
        for target, base in written.items():
            views.setdefault(base, {}).setdefault(_view(target), node)
    kept: dict[fx.Node, fx.Node] = {}
    for base, found in views.items():
        (view, first), *others = found.items()
        kept |= {base: calls[0]} if others else {view: first if view is not base else calls[0]}
    return [node for node in counted if node not in views], kept


def _view(written: fx.Node) -> fx.Node:
    """The input, or the view of it, behind the results of writing to it."""
    while written.op == "call_function" and not schema.is_view(written) and schema.aliased_inputs(written):
        written = schema.aliased_inputs(written)[0]
    return written


def _takes_found_inf(node: fx.Node) -> bool:
    return isinstance(node.target, _torch.OpOverload) and any(
        argument.name == "found_inf" for argument in node.target._schema.arguments
    )


def _argument(node: fx.Node, name: str) -> list[fx.Node]:
    """The nodes in an argument of a call, by its name in the schema."""
    assert isinstance(node.target, _torch.OpOverload)
    names = [argument.name for argument in node.target._schema.arguments]
    index = names.index(name) if name in names else len(node.args)
    value: Any = node.args[index] if index < len(node.args) else node.kwargs.get(name, ())
    return [item for item in value if isinstance(item, fx.Node)]


def _keep(program: Program, node: fx.Node, first: fx.Node, origin: str) -> fx.Node:
    whose = f"{origin}: kept for a skipped step"
    return program.insert(torch.ops.aten.clone.default, (node,), before=first, phase=Phase.UPDATE, origin=whose)
