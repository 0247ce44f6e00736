"""nn.Module (+ loss) → forward program, by torch.export.

Arguments that are one tensor, given in several places: read in the first of them alone.

Autograd then meets one leaf, and adds up its gradient in eager mode's order; sums by place, added behind the program,
would be another order, and so other bits. The signature of a call says which of its arguments are one tensor.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from graphopt.capture.call.assigned_buffers import refuse_empty
from graphopt.capture.call.flatten import Structure
from graphopt.capture.call.source_lines import source_line
from graphopt.capture.dynamo.graph_part import title_of
from graphopt.capture.effects.tensor_effects import NumbersRead, Outside
from graphopt.capture.forward.regions import REGION_KEY, nest_regions
from graphopt.capture.forward.traced_call import TracedCall, export_call
from graphopt.capture.forward.transformers_masks import Question
from graphopt.errors import CaptureError
from graphopt.ir.gradients import base_of
from graphopt.ir.names import NAMES_KEY, identifier
from graphopt.ir.node import InputSpec, NodeInfo, OutputSpec, Phase, set_info, set_value, unique_names, value_of
from graphopt.ir.ops.schema import op_name
from graphopt.ir.program import Program
from graphopt.ir.region_effects import mutated_inputs
from graphopt.ir.words.written_units import counted

__all__ = ["ForwardCapture", "capture_forward", "read_in_one_place"]

_EXPORT_KINDS = {"PARAMETER": "parameter", "BUFFER": "buffer", "CONSTANT_TENSOR": "constant", "USER_INPUT": "input"}


@dataclass
class ForwardCapture:
    """A forward program with the structures around it: how to flatten a call and how to rebuild its result.

    Attributes:
        questions: what the model has asked of the values of the call's tensors, with the answers it is for.
        changed: the arguments that the user's code changes, for people.
        left_out: the places in the result where None stands for a cache, likewise.
        outside: tensors that require gradients and are neither the model's nor arguments, of which it has the values.
        numbers: tensors that are neither, and whose numbers became Python's.
    """

    program: Program
    inputs: Structure
    outputs: Structure
    example_tensors: list[torch.Tensor]
    questions: Mapping[Question, bool] = field(default_factory=dict)
    changed: Sequence[str] = ()
    left_out: Sequence[str] = ()
    outside: Sequence[Outside] = ()
    numbers: Sequence[NumbersRead] = ()


def capture_forward(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], call: TracedCall
) -> ForwardCapture:
    """Trace a call of a model into a forward program.

    Args:
        model: whose parameters the program refers to.
        args: positional example inputs.
        kwargs: keyword example inputs.
        call: what is traced.

    Raises:
        CaptureError: where the model's Python cannot be traced, naming the line of user code and what to do.
    """
    traced = export_call(model, args, kwargs, call)
    seen = traced.seen
    program = _to_program(traced.exported, seen.outputs, traced.inputs)
    if call.scalar_loss:
        program.outputs = _name_loss(program, seen.loss)
    program.title = title_of(model)
    refuse_empty(program)
    read_in_one_place(program, traced.given)
    return ForwardCapture(
        program,
        traced.inputs,
        seen.outputs,
        traced.tensors,
        traced.questions.answers,
        seen.changed,
        seen.left_out,
        seen.outside,
        seen.numbers,
    )


def _to_program(exported: Any, returned: Structure, inputs: Structure) -> Program:
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    attributes: dict[str, fx.GraphModule] = {}
    constants: dict[str, torch.Tensor] = {}
    specs: list[InputSpec] = []
    dead: set[fx.Node] = set()
    input_paths = iter(_input_names(inputs))
    signature = {spec.arg.name: spec for spec in exported.graph_signature.input_specs}
    namer = _OpNames()
    module = nest_regions(exported.graph_module)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            new, spec = _placeholder(graph, node, signature[node.name], exported, constants, input_paths)
            specs.append(spec)
            mapping[node] = new
        elif node.op == "output":
            continue
        elif node.target is torch.ops.aten._assert_tensor_metadata.default:
            dead.add(node)
        elif _is_whole_slice(node):
            mapping[node] = mapping[node.args[0]]
        else:
            if node.op == "get_attr" and isinstance(node.target, str):
                attributes[node.target] = getattr(module, node.target)
                _describe_body(attributes[node.target], namer)
            mapping[node] = new = graph.node_copy(node, lambda n: mapping[n])
            set_info(new, _node_info(node, namer))
    result = next(n for n in reversed(module.graph.nodes) if n.op == "output")
    values = [mapping[v] if isinstance(v, fx.Node) else v for v in result.args[0]]
    graph.output(tuple(values))
    unique_names(graph)
    outputs = [OutputSpec("output", path or "result") for path in returned.paths]
    return Program(graph, "forward", specs, outputs, constants, attributes)


def _is_whole_slice(node: fx.Node) -> bool:
    """Whether a slice takes all of an axis whose size is open: where sizes are numbers, Python makes none of it."""
    if node.target is not torch.ops.aten.slice.Tensor:
        return False
    tensor, given, rest = node.args[0], list(node.args[1:]), [0, None, None, 1]
    dim, start, end, step = given + rest[len(given) :]
    varies = isinstance(value_of(tensor).shape[dim], torch.SymInt)  # type: ignore[arg-type]
    return bool(varies and start in (0, None) and end in (None, sys.maxsize) and step == 1)


def _name_loss(program: Program, place: int | None) -> list[OutputSpec]:
    """The outputs of a loss function, with the loss as such.

    Raises:
        CaptureError: where there is none, or it is not one number.
    """
    value = None if place is None else program.output_values[place]
    shape = tuple(value_of(value).shape) if isinstance(value, fx.Node) else None
    if place is None or shape is None or any(size != 1 for size in shape):
        several = f"{counted(len(program.outputs), 'tensors')} without one"
        found = several if shape is None else f"a tensor of shape {shape}"
        raise CaptureError(
            f"the loss must be one scalar tensor, and this one returns {found}: reduce it (.mean(), .sum()), or pass "
            "loss=lambda model, *batch: ... that returns a scalar: alone, first in a tuple, or as 'loss' in a dict"
        )
    return [*program.outputs[:place], OutputSpec("loss", "loss"), *program.outputs[place + 1 :]]


def _placeholder(
    graph: fx.Graph, node: fx.Node, spec: Any, exported: Any, constants: dict[str, torch.Tensor], paths: Any
) -> tuple[fx.Node, InputSpec]:
    role = _EXPORT_KINDS.get(spec.kind.name)
    if role is None and isinstance(exported.constants.get(spec.target), torch.Generator):
        raise CaptureError(
            "forward draws from a torch.Generator of its own, whose state a program does not move\n"
            "  what to do: draw from torch's own generator there, inside of a stream of graphopt.RandomStreams where "
            "its numbers are to be apart from others"
        )
    if role is None:
        raise CaptureError(
            f"the model holds {spec.target or spec.arg.name!r}, a {spec.kind.name}, which is not a tensor"
        )
    target = next(paths) if role == "input" else spec.target.removeprefix("model.")
    new = graph.placeholder(identifier(target))
    set_value(new, value_of(node))
    if role == "constant":
        constants[new.name] = exported.constants[spec.target]
    extra = node.meta.get(NAMES_KEY, ())
    set_info(new, NodeInfo(Phase.FORWARD, names=(target, *extra), origin=role))
    return new, InputSpec(role, target)


def _input_names(inputs: Structure) -> list[str]:
    """What to call each input: ``args[1]`` for the second positional argument, ``mask`` for the keyword."""
    names = []
    for path in inputs.paths:
        rest = path[3:]
        if path.startswith("[1]"):
            names.append(re.sub(r"^\['([^']*)'\]", r"\1", rest))
        else:
            names.append("args" + rest)
    return names


def _describe_body(body: fx.GraphModule, namer: _OpNames) -> None:
    """Describe the nodes of a sub-graph (an autocast or no-grad region) and of those inside it."""
    for node in list(body.graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            body.graph.erase_node(node)
        else:
            set_info(node, _node_info(node, namer))
    for child in body.children():
        if isinstance(child, fx.GraphModule):
            _describe_body(child, namer)


class _OpNames:
    """Gives ``path::op``, ``path::op_1`` … to the ops of each module, in program order."""

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()

    def next(self, path: str, op: str) -> str:
        base = f"{path}::{op}"
        number = self._seen[base]
        self._seen[base] += 1
        return base if number == 0 else f"{base}_{number}"


def _node_info(node: fx.Node, namer: _OpNames) -> NodeInfo:
    stack = [entry for entry in node.meta.get("nn_module_stack", {}).values() if not entry[0].startswith("_empty_")]
    module = re.sub(r"@\d+", "", stack[-1][0]) if stack else ""
    module = module.removeprefix("model.") if module != "model" else ""
    tensor = isinstance(value_of(node), torch.Tensor)
    names = (*reversed(node.meta.get(NAMES_KEY, ())), namer.next(module, op_name(node))) if tensor else ()
    return NodeInfo(
        Phase.FORWARD, module, names, source_line(node.meta.get("stack_trace")), region=node.meta.get(REGION_KEY)
    )


def read_in_one_place(program: Program, given: Sequence[torch.Tensor]) -> None:
    """Let a forward program read a tensor with a gradient in the first place in which it was given.

    What the program writes to keeps its places.

    Args:
        program: is changed.
        given: the tensors of the call, in the order of the program's inputs.
    """
    nodes = [node for node, _ in program.inputs_of("input")]
    written = {base_of(node) for call in program.graph.nodes for node in mutated_inputs(call, program.attributes)}
    first: dict[int, int] = {}
    for place, tensor in enumerate(given):
        earlier = first.setdefault(id(tensor), place)
        node, other = nodes[place], nodes[earlier]
        if earlier != place and tensor.requires_grad and written.isdisjoint((node, other)) and _alike(node, other):
            node.replace_all_uses_with(other)


def _alike(node: torch.fx.Node, other: torch.fx.Node) -> bool:
    """Whether two values have the same sizes, those that vary included."""
    return [*map(str, value_of(node).shape)] == [*map(str, value_of(other).shape)]
