"""What must be true of every program: a table of invariants, and running two programs against each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphopt import _torch
from graphopt.ir.node import NodeInfo, Phase, info
from graphopt.ir.ops import schema
from graphopt.ir.ops.layers.recurrent import random_parts
from graphopt.ir.ops.values import tensors_of, type_text
from graphopt.ir.program import Program

__all__ = ["INVARIANTS", "Invariant", "verify"]

from graphopt.errors import VerifyError
from graphopt.ir.node import value_of

_AFTER_FORWARD = (Phase.BACKWARD, Phase.RECOMPUTE, Phase.UPDATE)
_NEW_VALUES = {Phase.UPDATE: (Phase.UPDATE, Phase.SYNC)}
_COPIES_BACK = ("swap_out", "swap_out_wait", "move_out", "move_out_wait")


@dataclass(frozen=True, slots=True)
class Invariant:
    """One row of the table: the rule, and a function that yields a message for each violation.

    ``check(program, before)`` gets the program and, where a pass has just run, what it was before.
    """

    rule: str
    check: Callable[[Program, Program | None], Iterator[str]]


def _calls(program: Program) -> Iterator[fx.Node]:
    for node in program.graph.nodes:
        if node.op not in ("placeholder", "output"):
            yield node


def _where(node: fx.Node) -> str:
    known = node.meta.get("graphopt")
    place = f" ({known.source})" if isinstance(known, NodeInfo) and known.source else ""
    return f"{node.name} = {node.target}{place}"


def _topology(program: Program, _: Program | None) -> Iterator[str]:
    try:
        program.graph.lint()
    except Exception as error:  # lint raises plain exceptions of several kinds
        yield str(error)
    if len(program.placeholders) != len(program.inputs):
        yield f"{len(program.placeholders)} placeholders and {len(program.inputs)} descriptions of them"
    if len(program.output_values) != len(program.outputs):
        yield f"{len(program.output_values)} outputs and {len(program.outputs)} descriptions of them"


def _described(program: Program, _: Program | None) -> Iterator[str]:
    for node in program.graph.nodes:
        if node.op == "output":
            continue
        if not isinstance(node.meta.get("graphopt"), NodeInfo):
            yield f"{_where(node)} has no phase and module; add nodes with Program.insert"
        elif "val" not in node.meta and node.op != "get_attr":
            yield f"{_where(node)} has no value; add nodes with Program.insert"


def _one_way(program: Program, _: Program | None) -> Iterator[str]:
    for node in _calls(program):
        if info(node).phase is Phase.FORWARD:
            for source in node.all_input_nodes:
                if source.op == "call_function" and info(source).phase in _AFTER_FORWARD:
                    yield f"{_where(node)} runs in forward and reads {_where(source)} of {info(source).phase.value}"


def _signature(program: Program, before: Program | None) -> Iterator[str]:
    if before is None:
        return
    if program.inputs != before.inputs:
        yield f"the inputs changed: {_difference(before.inputs, program.inputs)}"
    if program.outputs != before.outputs:
        yield f"the outputs changed: {_difference(before.outputs, program.outputs)}"
    for old, new, spec in zip(before.output_values, program.output_values, program.outputs, strict=False):
        if isinstance(old, fx.Node) and isinstance(new, fx.Node):
            was, now = type_text(value_of(old)), type_text(value_of(new))
            if was != now:
                yield f"the {spec.role} {spec.target!r} was {was} and is {now}"


def _difference(old: list[Any], new: list[Any]) -> str:
    gone, come = [s for s in old if s not in new], [s for s in new if s not in old]
    return f"gone {gone or 'none'}, new {come or 'none'}, or reordered"


def _gradients_fit(program: Program, _: Program | None) -> Iterator[str]:
    inputs = {spec.target: node for node, spec in program.inputs_of("parameter", "input")}
    for value, spec in program.outputs_of("gradient"):
        if isinstance(value, fx.Node) and spec.target in inputs:
            mine, wanted = value_of(value), value_of(inputs[spec.target])
            if mine.shape != wanted.shape or mine.dtype != wanted.dtype:
                yield f"the gradient of {spec.target!r} is {type_text(mine)}, the tensor itself {type_text(wanted)}"


def _aliasing(program: Program, before: Program | None) -> Iterator[str]:
    if before is None:
        return
    for name, source in sorted(_returned_inputs(program) - _returned_inputs(before)):
        yield f"the output {name!r} now shares memory with the input {source!r}; clone it"


def _returned_inputs(program: Program) -> set[tuple[str, str]]:
    found = set()
    for value, spec in zip(program.output_values, program.outputs, strict=False):
        pending = [value] if isinstance(value, fx.Node) else []
        while pending:
            node = pending.pop()
            if node.op == "placeholder":
                found.add((f"{spec.role} {spec.target}", node.name))
            else:
                pending += schema.aliased_inputs(node)
    return found


def _random_once(program: Program, before: Program | None) -> Iterator[str]:
    for node in program.phase_nodes(Phase.RECOMPUTE):
        if schema.is_random(node):
            yield f"{_where(node)} draws new random numbers in a recomputation; replay the saved generator state"


def _same_draws(program: Program, before: Program | None) -> Iterator[str]:
    if before is not None:
        now, was = _draws(program), _draws(before)
        if now != was:
            yield (
                f"random draws changed from {was or 'none'} to {now or 'none'}; the numbers of the stream would go to "
                "other places than in eager mode"
            )


def _earlier_draws_in_order(program: Program, before: Program | None) -> Iterator[str]:
    now = iter(_draws(program))
    for draw in _draws(before) if before is not None else ():
        if draw not in now:
            yield f"{draw} is no longer drawn, or behind what it was drawn in front of"


def _drawn(value: Any, node: fx.Node) -> str:
    """What is drawn where, without the dtype: dropout in another precision draws the same mask."""
    text = type_text(value)
    return f"{text[text.find('[') :]} in {info(node).module or 'the root'}"


def _draws(program: Program) -> list[str]:
    return _draws_of(program.graph, program.attributes)


def _draws_of(graph: fx.Graph, bodies: Mapping[str, fx.GraphModule]) -> list[str]:
    """What is drawn, in order, in regions too."""
    found = []
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        for body in (bodies[str(a.target)] for a in node.all_input_nodes if a.op == "get_attr" and a.target in bodies):
            inner = {name: child for name, child in body.named_children() if isinstance(child, fx.GraphModule)}
            found += _draws_of(body.graph, inner)
        if node.target is _torch.run_and_save_rng_state:
            found.append(f"{node.args[0]} {_drawn(value_of(node)[1], node)}")
        elif schema.is_recurrent(node) and schema.is_random(node):
            found += [f"{part.target} {_drawn(value_of(part), node)}" for part in random_parts(node)]
        elif schema.is_random(node):
            found.append(f"{node.target} {_drawn(value_of(node), node)}")
    return found


def _effects_once(program: Program, _: Program | None) -> Iterator[str]:
    for node in program.phase_nodes(Phase.RECOMPUTE):
        if (schema.is_collective(node) and not schema.is_gather(node)) or schema.mutated_inputs(node):
            yield f"{_where(node)} has an effect and would run a second time"


def _fresh_reads(program: Program, _: Program | None) -> Iterator[str]:
    """After a tensor is overwritten in forward or by the update, nothing may read it expecting the old value.

    A forward program writes in place where the model does, and keeps the model's order. What ranks exchange behind an
    update, and what is copied to where it resides, is what the update has left.
    """
    if program.stage == "forward":
        return
    position = {node: index for index, node in enumerate(program.graph.nodes)}
    for writer in program.phase_nodes(Phase.FORWARD, Phase.UPDATE):
        for target in schema.mutated_inputs(writer):
            for reader in schema.readers(schema.storage_root(target)):
                late = position[reader] > position[writer] and not schema.is_view(reader)
                wanted = info(reader).phase in _NEW_VALUES.get(info(writer).phase, (Phase.UPDATE,))
                wanted = wanted or schema.op_name(reader) in _COPIES_BACK
                if late and not wanted and target not in schema.mutated_inputs(reader):
                    yield f"{_where(reader)} reads {target.name!r} after {_where(writer)} has overwritten it"


INVARIANTS: tuple[Invariant, ...] = (
    Invariant("nodes are in topological order and every input and output is described", _topology),
    Invariant("every node has a value, a phase and a module", _described),
    Invariant("nothing in backward feeds forward", _one_way),
    Invariant("a gradient has the shape and dtype of its tensor", _gradients_fit),
    Invariant("no output shares memory with an input that it did not share with before", _aliasing),
    Invariant("random numbers are drawn once and in order: a recomputation replays them", _random_once),
    Invariant("collectives and writes run once", _effects_once),
    Invariant("an input is not read after it is overwritten", _fresh_reads),
)
"""The table that holds for every program, after every pass."""

SIGNATURE = Invariant("inputs and outputs stay as they are unless the pass declares otherwise", _signature)
STREAM = Invariant("random numbers are drawn once and in order: a pass that draws its own declares it", _same_draws)
_EARLIER = Invariant("random numbers that were drawn are drawn in their order", _earlier_draws_in_order)


def verify(
    program: Program,
    *,
    before: Program | None = None,
    declared_signature_change: bool = False,
    declared_draws: bool = False,
) -> None:
    """Check every invariant, and that values are what the ops compute.

    Args:
        program: what to check.
        before: the program before a pass, for the rules that compare.
        declared_signature_change: the pass said that it changes inputs or outputs.
        declared_draws: the pass said that it draws random numbers of its own.

    Raises:
        VerifyError: naming each broken rule with the nodes that break it.
    """
    table = (*INVARIANTS, _EARLIER if declared_draws else STREAM, *(() if declared_signature_change else (SIGNATURE,)))
    problems: list[str] = []
    for invariant in table:
        messages = list(invariant.check(program, before))
        if messages:
            shown = messages[:5] + ([f"... and {len(messages) - 5} more"] if len(messages) > 5 else [])
            problems.append(f"rule: {invariant.rule}\n" + "\n".join(f"  - {message}" for message in shown))
            if invariant.check in (_topology, _described):
                break
    if not problems:
        messages = list(_stale_values(program, before))
        if messages:
            problems.append("rule: values are what the ops compute\n" + "\n".join(f"  - {m}" for m in messages[:5]))
    if problems:
        raise VerifyError("\n".join(problems))


def _stale_values(program: Program, before: Program | None) -> Iterator[str]:
    """Recompute, without data, the value of every node that a pass touched and of what depends on changed values.

    Calls of one op on operands of one kind, as in layers that are alike, are recomputed once.
    """
    computed: dict[tuple[Any, str], Any] = {}
    known = {} if before is None else {n.name: (n.target, str(n.args), str(n.kwargs)) for n in before.graph.nodes}
    for node in _calls(program):
        if node.op != "call_function" or isinstance(value_of(node), (int, float, bool, torch.SymInt)):
            continue
        if before is None or known.get(node.name) == (node.target, str(node.args), str(node.kwargs)):
            continue
        if schema.mutated_inputs(node) or _subgraph(node) or node.target is _torch.inner_gradients:
            continue
        alike = _kind_of_call(node)
        if alike not in computed:
            computed[alike] = program.propagate(node)
        old, new = value_of(node), computed[alike]
        if _metadata(old) != _metadata(new):
            yield f"{_where(node)} is recorded as {type_text(old)} and computes {type_text(new)}"


def _kind_of_call(node: fx.Node) -> tuple[Any, str]:
    """The op and all that its result's shape, dtype and device depend on."""
    given = _torch.map_aggregate(
        (node.args, node.kwargs),
        lambda a: _torch.pytree.tree_map(_layout, value_of(a)) if isinstance(a, fx.Node) else a,
    )
    return node.target, repr(given)


def _layout(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    strides = value.stride() if value.layout is torch.strided else ()
    return value.layout, value.dtype, value.device, tuple(value.shape), strides, value.is_conj(), value.is_neg()


def _subgraph(node: fx.Node) -> bool:
    return any(source.op == "get_attr" for source in node.all_input_nodes)


def _metadata(value: Any) -> list[tuple[Any, ...]]:
    return [(tuple(map(str, t.shape)), t.dtype, t.device) for t in tensors_of(value)]
