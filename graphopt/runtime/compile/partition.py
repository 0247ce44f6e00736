"""Programs in parts: forward and backward for autograd; what a compiler takes and the update that it does not."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import fx, nn

from graphopt import _torch
from graphopt.ir.gradients import base_of
from graphopt.ir.graphs.graph_copies import copy_node
from graphopt.ir.lowering import apply_reuse
from graphopt.ir.node import TRACE_CONSTANT, Phase, info, value_of
from graphopt.ir.ops import schema
from graphopt.ir.program import Program

__all__ = ["bind_state", "partition", "saved_values", "split_update"]

T = TypeVar("T")


def saved_values(program: Program) -> list[fx.Node]:
    """What forward computes or is given, and something after forward reads: tensors first, then sizes."""
    late = _late(program)
    there = late.union(node for node, _ in program.inputs_of("pass_state")).union(_trace_constants(program))
    _, late_nodes = _divide(program.graph.nodes, late)
    read, _ = _divide(_read_by(late_nodes), there)
    returned, _ = _divide(_nodes_among(value for value, _ in program.outputs_of("gradient")), late)
    _, saved = _divide(program.graph.nodes, {*read, *returned})
    tensors, sizes = _tensors_and_sizes(saved)
    return tensors + sizes


def _tensors_and_sizes(nodes: list[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
    sizes, tensors = _divide(nodes, {node for node in nodes if isinstance(value_of(node), torch.Tensor)})
    return tensors, sizes


def _calls(program: Program) -> list[fx.Node]:
    return [node for node in program.graph.nodes if node.op not in ("placeholder", "output")]


def _read_by(calls: Iterable[fx.Node]) -> dict[fx.Node, None]:
    """What calls read, each value once, in the order of its first reader."""
    return dict.fromkeys(source for node in calls for source in node.all_input_nodes)


def _divide(values: Iterable[T], chosen: Container[T]) -> tuple[list[T], list[T]]:
    """The values that are not among ``chosen``, and those that are; both in order."""
    others: list[T] = []
    found: list[T] = []
    for value in values:
        (found if value in chosen else others).append(value)
    return others, found


def _late(program: Program) -> set[fx.Node]:
    """What runs after forward, and the tangents. Transfers and exchanges belong to the part in which they stand."""
    found: set[fx.Node] = set()
    for node in program.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        phase = info(node).phase
        where_it_stands = phase in (Phase.TRANSFER, Phase.SYNC)
        if phase is not Phase.FORWARD and (found or not where_it_stands):
            found.add(node)
    return found.union(node for node, _ in program.inputs_of("tangent"))


def partition(
    program: Program, layout: list[bool], state: Mapping[str, torch.Tensor] | None = None, *, any_strides: bool = False
) -> tuple[fx.GraphModule, fx.GraphModule, bool]:
    """The two halves of a joint program, in torch's calling convention.

    Args:
        program: of stage joint, with tangents as inputs.
        layout: for each input that backward answers for, whether it has a gradient (None is returned otherwise).
        state: the tensors behind the inputs that are pass state, by target; they become buffers of the halves that use
            them, under the names of the inputs' nodes.
        any_strides: let backward take tangents of any strides, as eager mode's does, where it can.

    Returns:
        forward: inputs → outputs, saved tensors, saved sizes; backward: saved sizes, saved tensors, tangents →
        gradients. Both use the boxed convention. Then whether backward takes tangents of any strides.
    """
    program = program.copy()
    apply_reuse(program)
    early_calls, late_calls = _divide(_calls(program), _late(program))
    tangents = [node for node, _ in program.inputs_of("tangent")]
    live = {node: (state or {})[spec.target] for node, spec in program.inputs_of("pass_state")}
    live |= {node: program.constants[node.name] for node in _trace_constants(program)}
    primals, _ = _divide(program.placeholders, {*tangents, *live})
    tensors, sizes = _tensors_and_sizes(saved_values(program))
    results = [value for value, _ in program.outputs_of("mutation", "output", "base", "loss")]
    forward = _extract(primals, early_calls, [*results, *tensors, *sizes], "GraphoptForward", live)
    given = [*sizes, *tensors, *tangents]
    names = {node.name for node in tangents}
    takes: list[bool] = []

    def change(graph: fx.Graph) -> None:
        takes.append(any_strides and _take_any_strides(graph, names))

    backward = _extract(given, late_calls, _answers(program, layout), "GraphoptBackward", live, change)
    return forward, backward, takes[0]


_BOUND_TO_STRIDES = ("as_strided", "_reshape_alias", "view_as_complex", "view_as_real", "view.dtype", "set_")
"""Ops that read the strides of their argument, or need them to be as they were traced."""

_AS_THE_FIRST = ("index_add", "index_put", "index_copy", "scatter", "select_scatter", "slice_scatter", "copy")
"""Ops whose results have the strides of their first argument."""

_OF_THEIR_OWN = ("new_", "slice_backward", "select_backward", "mm.", "addmm.", "bmm.", "baddbmm.", "repeat.")
"""Ops whose results have the same strides whatever strides their arguments have."""


def _take_any_strides(backward: fx.Graph, tangents: Collection[str]) -> bool:
    """Let a half take tangents of any strides, as eager mode's backward does; whether it can.

    Views become reshapes, which copy where no view is possible. What reads the strides of a value that follow those of
    a tangent cannot take others.

    Args:
        backward: the graph of the half.
        tangents: the names of its inputs that are tangents.
    """
    follows: set[fx.Node] = set()
    for node in backward.nodes:
        if _has_strides_of(node, follows, tangents):
            follows.add(node)
        if node.op == "call_function" and _op(node).startswith(_BOUND_TO_STRIDES) and node.args[0] in follows:
            return False
    for node in backward.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        node.target = torch.ops.aten.reshape.default
    return True


def _has_strides_of(node: fx.Node, follows: set[fx.Node], tangents: Collection[str]) -> bool:
    """Whether the strides of a value may be others where those of the tangents are, with the values that are so."""
    if node.op != "call_function":
        return node.name in tangents
    op = _op(node)
    if op.startswith(_OF_THEIR_OWN) or node.kwargs.get("memory_format") is torch.contiguous_format:
        return False
    read = node.args[:1] if op.startswith(_AS_THE_FIRST) else node.all_input_nodes
    return any(source in follows for source in read)


def _op(node: fx.Node) -> str:
    return str(node.target).removeprefix("aten.")


def _answers(program: Program, layout: list[bool]) -> list[Any]:
    """What backward returns: for each input that it answers for its gradient, or None where it has none."""
    gradients = iter([value for value, _ in program.outputs_of("gradient")])
    return [next(gradients) if present else None for present in layout]


def bind_state(module: fx.GraphModule, program: Program, state: Mapping[str, torch.Tensor]) -> None:
    """Let a copy of one half refer to the tensors of pass state themselves: torch compiles a deep copy of each half."""
    for node, spec in program.inputs_of("pass_state"):
        if hasattr(module, node.name):
            setattr(module, node.name, state[spec.target])


def _trace_constants(program: Program) -> list[fx.Node]:
    """The inputs that the trace has met as values: nobody gives them, and halves have them as buffers."""
    return [node for node, _ in program.inputs_of("constant") if info(node).origin == TRACE_CONSTANT]


def _nodes_among(values: Iterable[Any]) -> list[fx.Node]:
    return [value for value in values if isinstance(value, fx.Node)]


def _extract(
    inputs: list[fx.Node],
    calls: list[fx.Node],
    results: list[Any],
    name: str,
    live: Mapping[fx.Node, torch.Tensor] | None = None,
    change: Callable[[fx.Graph], None] | None = None,
) -> fx.GraphModule:
    """A module of some calls; the tensors of ``live`` that these read become its buffers, and are not inputs.

    ``change`` gets the graph before its code is generated.
    """
    graph = fx.Graph()
    owner = nn.Module()
    mapping = {node: graph.placeholder(node.name) for node in inputs}
    read = {*_read_by(calls), *_nodes_among(results)}
    for node, tensor in (live or {}).items():
        if node in read:
            owner.register_buffer(node.name, tensor)
            mapping[node] = graph.get_attr(node.name)
    for node, copy in mapping.items():
        copy.meta.update(node.meta)

    def mapped(value: Any) -> Any:
        return mapping[value] if isinstance(value, fx.Node) else value

    for node in calls:
        mapping[node] = copy_node(graph, node, mapped)
    graph.output(tuple(map(mapped, results)))
    if change is not None:
        change(graph)
    graph.set_codegen(_torch.BoxedCodeGen())
    return _torch.LazyGraphModule(owner, graph, class_name=name)


def split_update(program: Program) -> tuple[fx.GraphModule, fx.GraphModule, list[int], list[int]]:
    """A step program as two modules of the boxed convention: everything up to the gradients, and the update.

    Updates that run between calls of backward run behind all of them, in their order. What reads what the update has
    made or written, such as exchanges of parameters behind it, belongs to the update.

    Returns:
        The first module: (the inputs it needs) → (results of its own, then what the update reads).
        The second: (the inputs it needs, then what the first handed over) → (results of its own).
        For both, the positions of the inputs they need among the program's.
    """
    program = program.copy()
    update = _from_update_on(program)
    for node in update:
        program.output_node.prepend(node)
    apply_reuse(program)  # only now: no sum may overwrite a gradient that its update has yet to read
    first_calls, second_calls = _divide(_calls(program), update)
    results = [value for value, _ in program.outputs_of("loss", "output", "gradient", "base", "mutation", "state")]
    first_results, second_results = _divide(results, update)
    first_reads = {*_read_by(first_calls), *_nodes_among(results)}
    second_reads = _read_by(second_calls)
    handed_over = [node for node in second_reads if node.op != "placeholder" and node not in update]
    _, first_inputs = _divide(program.placeholders, first_reads)
    _, second_inputs = _divide(program.placeholders, second_reads)
    first = _extract(first_inputs, first_calls, [*first_results, *handed_over], "GraphoptGradients")
    second = _extract([*second_inputs, *handed_over], second_calls, second_results, "GraphoptUpdate")
    position = {node: index for index, node in enumerate(program.placeholders)}
    return first, second, [position[node] for node in first_inputs], [position[node] for node in second_inputs]


def _from_update_on(program: Program) -> dict[fx.Node, None]:
    """The calls of the update and those that depend on them, by value or by what they write, in order."""
    found: dict[fx.Node, None] = {}
    written: set[fx.Node] = set()
    for node in program.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        sources = node.all_input_nodes
        depends = not found.keys().isdisjoint(sources) or not written.isdisjoint(map(base_of, sources))
        if depends or info(node).phase is Phase.UPDATE:
            found[node] = None
            written.update(base_of(target) for target in schema.mutated_inputs(node))
    return found
