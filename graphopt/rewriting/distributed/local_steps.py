"""Local steps: what LocalSGD and AdaptiveLocalSGD have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from graphopt.errors import GraphoptError
from graphopt.ir.node import Phase, info, value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.communication.collectives import ALL_REDUCE
from graphopt.ir.ops.communication.groups import Group, find_group
from graphopt.ir.ops.values import storage_bytes
from graphopt.ir.program import Program
from graphopt.ir.state import PassState
from graphopt.ir.words.written_units import format_bytes
from graphopt.rewriting.distributed.dense.remove_all_reduce import (
    agree_on_skipping,
    one_group,
    reductions,
    remove_all_reduces,
    remove_buffer_averages,
)
from graphopt.rewriting.distributed.flat_exchange import read_parts, start_exchange
from graphopt.rewriting.distributed.parameter_average import average_now, average_parameters, updated_parameters
from graphopt.rewriting.pass_ import Changed

__all__ = [
    "LOCAL",
    "NOTHING_SENT",
    "NOT_EXCHANGED",
    "SYNCHRONOUS",
    "LocalGradients",
    "average_model",
    "average_updated",
    "check_steps",
    "hold_mean_loss",
    "keep_gradients_local",
    "run_locally",
]

SYNCHRONOUS = "synchronous"
"""The form in which gradients are exchanged at every step."""
LOCAL = "local"
"""The form in which nothing is exchanged but whether to skip."""

_BUCKET = 32 * 2**20
"""Bytes of parameters that are averaged together between two runs."""

NOT_EXCHANGED = "no gradients are exchanged in this program: one process, or nothing is trained"
NOTHING_SENT = "nothing is exchanged in this step"


def check_steps(begin_step: int, last_step: int | None) -> None:
    """Raise for numbers of updates that are none.

    Args:
        begin_step: updates before the first local one.
        last_step: number of the last update, counted from 0; None where it is not known.

    Raises:
        GraphoptError: naming the option.
    """
    if begin_step < 0:
        raise GraphoptError(f"begin_step is a number of updates of at least 0, got {begin_step}")
    if last_step is not None and last_step < 0:
        raise GraphoptError(f"last_step is the number of an update, counted from 0, got {last_step}")


def run_locally(program: Program, *, average: bool, state: bool, origin: str) -> tuple[Changed, Group | None]:
    """Take the gradient exchange out of a step program, and average parameters behind its update or not.

    Args:
        program: of stage step, with the exchange of ``DataParallel``.
        average: whether parameters are averaged at the end of the step.
        state: whether the optimizer's state is averaged with them.
        origin: the pass that asks.

    Returns:
        what was done, and the ranks; no ranks where there is no exchange in the program.
    """
    local = keep_gradients_local(program, origin=origin)
    if local is None:
        return Changed(reason=NOT_EXCHANGED), None
    counts, group = {"gradients kept local": local.gradients}, local.group
    if not average:
        remove_buffer_averages(program)
        return Changed(counts, lines=(NOTHING_SENT,)), group
    names = average_parameters(program, group, limit=local.limit, state=state, origin=origin)
    total = sum(_bytes(program, name) for name in names)
    line = f"{len(names)} tensors are averaged over {group.size} ranks: {format_bytes(total)} per averaging and rank"
    return Changed(counts | {"tensors averaged": len(names)}, lines=(line,)), group


@dataclass(frozen=True, slots=True)
class LocalGradients:
    """A step program whose gradients are exchanged no more.

    Attributes:
        group: the ranks that have exchanged them.
        limit: bytes of the largest of their buckets.
        gradients: how many there were.
    """

    group: Group
    limit: int
    gradients: int


def keep_gradients_local(program: Program, *, origin: str) -> LocalGradients | None:
    """Take the exchange of gradients out of a step program; None where there is none.

    Args:
        program: of stage step.
        origin: the pass that asks.
    """
    found = reductions(program)
    if not found:
        return None
    group = one_group(found, origin)
    limit = max(storage_bytes(value_of(reduction.start)) for reduction in found)
    count = sum(len(reduction.members) for reduction in found)
    remove_all_reduces(program, found, origin)
    agree_on_skipping(program, group, origin)
    return LocalGradients(group, limit, count)


def _bytes(program: Program, name: str) -> int:
    named: dict[str, fx.Node] = {spec.target: node for node, spec in program.inputs_of("parameter", "state")}
    return storage_bytes(value_of(named[name])) if name in named else 0


def average_model(program: Program, model: nn.Module, optimizer: torch.optim.Optimizer, *, origin: str) -> None:
    """Average now what a program averages behind its update; all ranks have to call it.

    Args:
        program: as ``run_locally`` has made it, with averaging; nothing is done where it averages nothing.
        model: whose parameters are averaged.
        optimizer: whose state is averaged where the program averages it.
        origin: the pass whose averaging it is.
    """
    starts = [
        node for node in program.graph.find_nodes(op="call_function", target=ALL_REDUCE) if info(node).made_by == origin
    ]
    tensors = []
    for node, spec in program.inputs_of("parameter", "state"):
        if any(_renews(user, node) for user in node.users):
            name, _, key = spec.target.partition("/")
            parameter = model.get_parameter(name)
            tensors.append(optimizer.state[parameter][key] if key else parameter)
    if starts and tensors:
        limit = max(storage_bytes(value_of(start)) for start in starts)
        average_now(tensors, find_group(str(starts[-1].args[2])), limit)


def average_updated(program: Program, model: nn.Module, *, origin: str) -> None:
    """Average the parameters that a program updates now; all ranks have to call it.

    Args:
        program: in which a pass exchanges something; nothing is done where it exchanges nothing.
        model: whose parameters are averaged.
        origin: the pass.
    """
    starts = (node for node in program.graph.nodes if schema.is_collective(node) and not schema.hands_on(node))
    groups = [str(schema.named_arguments(node)["group_name"]) for node in starts if info(node).made_by == origin]
    if groups:
        tensors = [model.get_parameter(name) for name in updated_parameters(program)]
        average_now(tensors, find_group(groups[-1]), _BUCKET)


def hold_mean_loss(program: Program, group: Group, target: str, *, origin: str) -> None:
    """Keep the mean of the ranks' losses as pass state of one element, float32.

    Args:
        program: of stage step.
        group: the ranks.
        target: what it is called.
        origin: whose nodes they are.
    """
    ((loss, _),) = program.outputs_of("loss")
    common: dict[str, Any] = {"before": program.output_node, "phase": Phase.SYNC, "origin": f"{origin}: the mean loss"}
    kept = program.add_state(target, PassState((1,), torch.float32, value_of(loss).device))
    own = program.insert(torch.ops.aten._to_copy.default, (loss,), {"dtype": torch.float32}, **common)
    own = program.insert(torch.ops.aten.view.default, (own, [1]), **common)
    start = start_exchange(program, [own], program.output_node, group, "mean", f"{origin}: the mean loss")
    (mean,) = read_parts(program, start, [own], program.output_node, origin)
    program.insert(torch.ops.aten.copy_.default, (kept, mean), **common)


def _renews(user: fx.Node, node: fx.Node) -> bool:
    """Whether a call writes what ranks have exchanged to an input."""
    writes = user.target is torch.ops.aten.copy_.default and user.args[0] is node
    return writes and info(user).phase is Phase.SYNC
