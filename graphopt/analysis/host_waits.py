"""Which calls of a program make the host wait for the device, and what keeps a program from being a CUDA graph.

A step on a device is as fast as it can be only where the host runs ahead of it. Read from the program, so that it can
be said on any machine; what ops of other libraries do inside is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphopt import _torch
from graphopt.errors import GraphoptError
from graphopt.ir.node import info, value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.communication.groups import find_group
from graphopt.ir.ops.values import tensors_of
from graphopt.ir.program import Program

__all__ = ["Obstacle", "graph_obstacles", "host_waits", "require_graph"]


@dataclass(frozen=True, slots=True)
class Obstacle:
    """A call or an input that stands in the way.

    Attributes:
        name: of the node.
        why: what it does, for people.
        source: the line of the model that it comes from; empty where that is not known.
    """

    name: str
    why: str
    source: str = ""

    def __str__(self) -> str:
        return f"{self.name}{f' ({self.source})' if self.source else ''}: {self.why}"


def host_waits(program: Program) -> list[Obstacle]:
    """The calls at which the host waits for the device, in order; none for a program on the CPU alone.

    Copies from the device to ordinary host memory and back, results whose value or size the host has to read, checks of
    linear algebra, transfers to disk, and exchanges by a backend of the host such as gloo.

    Args:
        program: of any stage, on a device or captured for one.

    Example:
        >>> from graphopt.analysis.host_waits import host_waits
        >>> program = graphopt.capture(model, (x,), loss=loss, optimizer=optimizer, device="h100-80gb")
        >>> host_waits(program)
        []
    """
    return list(_found(program, _WAITS))


def graph_obstacles(program: Program) -> list[Obstacle]:
    """Why a program cannot be captured as a CUDA graph, call by call; empty where it can.

    All waits of the host are in the way, and so is what the host does anew in each step, which a graph would not
    repeat: transfers, generator states that are saved and replayed, updates that run as Python, and numbers and sizes
    that differ from step to step. Values that live on the CPU are no part of a graph either.

    Args:
        program: of any stage, on a device or captured for one.

    Raises:
        GraphoptError: for a program that is on the CPU, where there are no such graphs.

    Example:
        >>> from graphopt.analysis.host_waits import graph_obstacles
        >>> program = graphopt.capture(model, (x,), loss=loss, optimizer=optimizer, device="h100-80gb")
        >>> graph_obstacles(program)
        []
    """
    if not any(_on_device(node) for node in program.graph.nodes):
        raise GraphoptError(
            "the program is on the CPU, and CUDA graphs are of a device: move the model to one, or capture it for one "
            "with graphopt.capture(..., device='h100-80gb')"
        )
    return [*_inputs_that_change(program), *_found(program, (*_WAITS, *_HOST_WORK))]


def require_graph(program: Program) -> None:
    """Refuse a program that cannot be captured as a CUDA graph.

    Raises:
        GraphoptError: with all that is in the way, each by its name and source line.
    """
    obstacles = graph_obstacles(program)
    if obstacles:
        listed = "".join(f"\n  {obstacle}" for obstacle in obstacles)
        raise GraphoptError(
            f"the program cannot be a CUDA graph; {len(obstacles)} thing{'s' * (len(obstacles) > 1)} stand"
            f"{'s' * (len(obstacles) == 1)} in the way:{listed}\n  what to do: leave out the passes that these come "
            "from, change the lines that are named, or run the step without a graph"
        )


_Rule = Callable[[fx.Node], str]
"""Says why a call is in the way; empty where it is not."""


def _found(program: Program, rules: tuple[_Rule, ...]) -> Iterator[Obstacle]:
    for node in program.graph.nodes:
        if node.op in ("placeholder", "output") or not _on_device(node):
            continue
        why = next(filter(None, (rule(node) for rule in rules)), "")
        if why:
            yield Obstacle(node.name, why, info(node).source)


def _values(node: fx.Node) -> list[torch.Tensor]:
    """The tensors that a call reads and makes."""
    nodes = node.all_input_nodes if node.op == "output" else [*node.all_input_nodes, node]
    return [tensor for source in nodes for tensor in tensors_of(value_of(source))]


def _on_device(node: fx.Node) -> bool:
    return any(_torch.device_kind(tensor) != "cpu" for tensor in _values(node))


def _called(node: fx.Node) -> Any:
    """The op of a call; that inside, where a generator's state is saved or replayed."""
    if node.target is _torch.run_and_save_rng_state:
        return node.args[0]
    return node.args[1] if node.target is _torch.run_with_rng_state else node.target


# --- what makes the host wait ----------------------------------------------------------------------------------------


def _reads_values(node: fx.Node) -> str:
    op = _called(node)
    if not isinstance(op, _torch.OpOverload):
        return ""
    name = op._schema.name.partition("::")[2]
    if torch.Tag.data_dependent_output in op.tags or name in ("is_nonzero", "_linalg_check_errors"):
        return f"{name} gives the host a value that the device has to compute first"
    masked = name not in ("index", "index_put", "index_put_") or _has_mask(node)
    if masked and (torch.Tag.dynamic_output_shape in op.tags or name.startswith("index_put")):
        return f"the size of what {name} selects depends on values, which the host waits for"
    return ""


def _has_mask(node: fx.Node) -> bool:
    """Whether a call indexes by truth values: their number decides the size of the result."""
    chosen = schema.nodes_in(node.args[1])
    return any(
        tensor.dtype in (torch.bool, torch.uint8) for source in chosen for tensor in tensors_of(value_of(source))
    )


_COPIES = ("_to_copy", "copy", "copy_")


def _copies_across(node: fx.Node) -> str:
    if not isinstance(node.target, _torch.OpOverload) or schema.op_name(node) not in _COPIES:
        return ""
    source, target = (node.args[0], node) if schema.op_name(node) == "_to_copy" else (node.args[1], node.args[0])
    if not (isinstance(source, fx.Node) and isinstance(target, fx.Node)):
        return ""
    was, becomes = (_torch.device_kind(value_of(side)) for side in (source, target))
    if was == becomes or "cpu" not in (was, becomes):
        return ""
    return f"a copy from {was} to {becomes} through ordinary host memory"


def _checks_by_hand(node: fx.Node) -> str:
    if not isinstance(node.target, _torch.OpOverload):
        return ""
    name = node.target._schema.name
    if name == "graphopt::boundary" and node.args[2]:
        return "the boundary of a checkpoint that synchronizes"
    if name == "graphopt::same_on_all_ranks":
        return "digests of a tensor are compared between ranks in the first step"
    return ""


def _tier(node: fx.Node) -> str:
    """Where the tensor of a transfer op goes to or comes from; empty for other calls."""
    if not (isinstance(node.target, _torch.OpOverload) and node.target._schema.name in _TRANSFERS):
        return ""
    pending = [node]
    seen: set[fx.Node] = set()
    while pending:
        call = pending.pop()
        if schema.holds_elsewhere(call):
            return str(call.args[1])
        seen.add(call)
        pending += [source for source in call.all_input_nodes if source not in seen and _is_handle(source)]
    return "host"


_TRANSFERS = ("graphopt::offload", "graphopt::offload_wait", "graphopt::prefetch", "graphopt::prefetch_wait")


def _is_handle(node: fx.Node) -> bool:
    return isinstance(node.target, _torch.OpOverload) and node.target._schema.name in _TRANSFERS


def _waits_for_disk(node: fx.Node) -> str:
    if _tier(node) != "disk" or not schema.op_name(node).endswith("_wait"):
        return ""
    return "a tensor is on its way to or from disk, by a thread that the host waits for"


def _exchanges_by_host(node: fx.Node) -> str:
    backend = _backend(node)
    if backend in ("", "nccl", "rccl", "xccl"):
        return ""
    return f"an exchange by {backend}, which works on the host"


def _backend(node: fx.Node) -> str:
    """The backend of the group that a collective talks in; empty where that is not known here."""
    if not schema.is_collective(node) or not isinstance(node.target, _torch.OpOverload):
        return ""
    arguments = [argument.name for argument in node.target._schema.arguments]
    named = next((name for name in ("group_name", "group") if name in arguments), None)
    if named is None:
        return ""
    place = arguments.index(named)
    group = node.args[place] if place < len(node.args) else node.kwargs.get(named)
    distributed = torch.distributed
    if not (isinstance(group, str) and distributed.is_available() and distributed.is_initialized()):
        return ""
    try:
        found = find_group(group)
    except (GraphoptError, RuntimeError, ValueError):
        return ""
    configured = str(distributed.get_backend(found.handle))
    return "nccl" if "nccl" in configured else configured


# --- what the host does anew in each step ----------------------------------------------------------------------------


def _moves(node: fx.Node) -> str:
    tier = _tier(node)
    return f"a transfer to or from the {tier} tier, whose blocks the host chooses in each step" if tier else ""


def _replays_randomness(node: fx.Node) -> str:
    if node.target not in (_torch.run_and_save_rng_state, _torch.run_with_rng_state):
        return ""
    return "the state of the random generator passes through the host, and a graph would repeat the same one"


def _runs_python(node: fx.Node) -> str:
    if isinstance(node.target, _torch.OpOverload) and node.target._schema.name == "graphopt::opaque_update_":
        return "the optimizer's update runs in eager mode, in Python"
    return ""


def _inputs_that_change(program: Program) -> Iterator[Obstacle]:
    for node, spec in zip(program.placeholders, program.inputs, strict=True):
        value = value_of(node)
        tensors = tensors_of(value)
        what = f"the {spec.role} {spec.target!r}"
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            yield Obstacle(node.name, f"{what} is a number of the host, which a graph would fix")
        elif isinstance(value, (torch.SymInt, torch.SymFloat)) or any(_has_symbols(tensor) for tensor in tensors):
            yield Obstacle(node.name, f"{what} has a size that varies")
        elif node.users and any(_torch.device_kind(tensor) == "cpu" for tensor in tensors):
            yield Obstacle(node.name, f"{what} is on the CPU")


def _has_symbols(tensor: torch.Tensor) -> bool:
    return any(isinstance(size, torch.SymInt) for size in tensor.shape)


_WAITS: tuple[_Rule, ...] = (_reads_values, _copies_across, _checks_by_hand, _waits_for_disk, _exchanges_by_host)
_HOST_WORK: tuple[_Rule, ...] = (_moves, _replays_randomness, _runs_python)
