"""Forward program → joint program: differentiate, and carry names, modules and source lines across."""

from __future__ import annotations

import operator
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import fx

from graphopt import _torch
from graphopt.capture.call.assigned_buffers import IN_PARTS
from graphopt.capture.call.source_lines import user_frame
from graphopt.capture.effects.changed_parameters import finish_changed_parameters
from graphopt.capture.effects.checks import (
    refuse_loops,
    refuse_overlapping,
    refuse_overlapping_writes,
    refuse_varying_lstm,
    shared_write,
    tell_shared_outputs,
)
from graphopt.capture.forward.inner_gradients import refuse_arguments_without_gradients
from graphopt.capture.forward.untraceable import PACKED, first_line
from graphopt.capture.joint.finish_joint import (
    forget_statistics,
    honour_regions,
    match_layouts,
    name_gradients,
    own_gradients,
    return_originals,
    seed_backward,
    settle_mutations,
)
from graphopt.capture.joint.replace_ops import use_own_ops
from graphopt.capture.joint.traced_joint import (
    HOLDS,
    PLACE,
    Runner,
    TracedJoint,
    base_name,
    is_seen_through,
    marked,
    read_trace,
)
from graphopt.errors import CaptureError, GraphBreakError
from graphopt.ir.gradients import base_of
from graphopt.ir.graphs.graph_copies import copy_node
from graphopt.ir.host import refuse_shortage
from graphopt.ir.node import TRACE_CONSTANT, InputSpec, NodeInfo, OutputSpec, Phase, info, set_info, set_value, value_of
from graphopt.ir.ops import schema
from graphopt.ir.program import Program

__all__ = ["JointCapture", "build_joint", "capture_joint", "check_forward"]


class DifferentiableTrace(Protocol):
    """What makes a rewritten joint program differentiable: torch's trace of it, or what stands for that."""

    def gradient_routes(self) -> _torch.GradientRoutes:
        """How gradients of what the callable returns, or has changed, come back into it."""
        ...

    def returns_arguments(self) -> bool:
        """Whether a result is an argument, a parameter, or a view of one."""
        ...

    def backward_layout(self) -> list[bool]:
        """For each input that backward may answer for, in order: whether it has a gradient."""
        ...

    def compile(self, *halves: Any, **options: Any) -> Callable[..., Any]:
        """As ``_torch.JointTrace`` has it."""
        ...


@dataclass(frozen=True)
class JointCapture:
    """A joint program together with the trace that can compile a rewritten version of it.

    Attributes:
        program: what passes rewrite.
        trace: compiles the two halves of a rewritten program into a differentiable callable.
        inputs: the parameters, buffers and constants that this callable takes first, in order.
    """

    program: Program
    trace: DifferentiableTrace
    inputs: list[InputSpec]


def capture_joint(forward: Program, tensors: dict[str, torch.Tensor], examples: list[torch.Tensor]) -> JointCapture:
    """Differentiate a forward program.

    Args:
        forward: a program of stage ``forward``.
        tensors: the parameters and buffers by name, as in ``named_parameters(remove_duplicate=False)``.
        examples: the example inputs, in the program's order; only their metadata is used.

    Raises:
        CaptureError: where nothing requires a gradient, or autograd refuses what the model does.
    """
    args = check_forward(forward, tensors, examples)
    runner = Runner(forward, tensors)
    given = {**tensors, **dict(zip((spec.target for _, spec in forward.inputs_of("input")), examples, strict=False))}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Error detected in", UserWarning)  # it is raised besides
            trace = _torch.JointTrace(runner, tuple(args))
    except Exception as error:
        refuse_shortage(error, forward.title)
        shared = shared_write(forward, given) if "share storage" in str(error) else None
        raise shared or _explain(error, forward.title) from error
    if any(role.kind == "shared" for _, role in trace.inputs()):
        raise shared_write(forward, given) or GraphBreakError(
            f"{forward.title} writes in place to tensors that share memory: give tensors of their own{IN_PARTS}"
        )
    if not trace.requires_grad:
        results = [value for value in forward.output_values if isinstance(value, fx.Node)]
        if any(base_of(value).op == "placeholder" for value in results):
            raise CaptureError(
                f"everything that {forward.title} returns with a gradient is a view of its inputs or parameters: there "
                "is nothing for a program to compute; call the model without graphopt"
            )
        raise CaptureError(
            f"nothing in {forward.title} requires a gradient for these inputs: every parameter is frozen, or the "
            "outputs are detached; unfreeze a parameter, or call the model in eval mode without graphopt"
        )
    program = build_joint(forward, runner, read_trace(trace), trace.gradient_routes())
    return JointCapture(program, trace, [runner.holder[key] for key in trace.parameter_order()])


def check_forward(
    forward: Program, tensors: dict[str, torch.Tensor], examples: list[torch.Tensor]
) -> Sequence[torch.Tensor]:
    """What a forward program is traced with; refuses what would be traced wrongly.

    Args:
        forward: as for ``capture_joint``.
        tensors: likewise.
        examples: likewise.

    Raises:
        CaptureError: naming what is refused.
    """
    refuse_loops(forward.title, (node for _, node in marked(forward.graph, forward.attributes)))
    dynamic = any(
        isinstance(size, torch.SymInt) for node, _ in forward.inputs_of("input") for size in value_of(node).shape
    )
    args: list[torch.Tensor] = examples
    if dynamic:
        args = [value_of(node) for node, _ in forward.inputs_of("input")]
        for fake, real in zip(args, examples, strict=True):
            fake.requires_grad_(real.requires_grad)
    refuse_arguments_without_gradients(forward, tensors, examples)
    refuse_varying_lstm(forward.graph)
    refuse_overlapping_writes(forward.title, (node for _, node in marked(forward.graph, forward.attributes)))
    return args


def build_joint(forward: Program, runner: Runner, traced: TracedJoint, routes: _torch.GradientRoutes) -> Program:
    """The joint program of what was traced.

    Args:
        forward: what is differentiated.
        runner: of that program.
        traced: its joint graph.
        routes: how gradients come into it.

    Raises:
        CaptureError: for results that overlap, and for what a program cannot hold.
    """
    tangents = [str(role.target) for _, role in traced.inputs if role.kind == "tangent"]
    refuse_overlapping(forward, {int(number) for number in tangents if number.isdigit()})
    tell_shared_outputs(forward, routes.together)
    return _Builder(forward, runner, traced).build()


def _explain(error: Exception, title: str) -> CaptureError:
    where = getattr(error, PLACE, "") or user_frame(error.__traceback__)
    advice = (
        "check that the same call trains in eager mode; in-place changes of inputs or parameters, and backward code "
        "that needs values, are the usual reasons"
    )
    text = first_line(error)
    if "_pack_padded_sequence" in text:
        text, advice = PACKED[0], PACKED[1] + IN_PARTS
    elif isinstance(error, _torch.NEEDS_VALUES):
        advice = (
            "the op's result, or its size, depends on values (.item(), nonzero, an index by a mask): use torch.where "
            "or a product with the mask, or move it outside of the model" + IN_PARTS
        )
    elif "modified by an inplace operation" in str(error):
        advice = (
            "forward changes a tensor when backward needs it as it was; through .data, eager mode trains on the "
            "changed values without a word: change it before its first use in forward, or behind the step"
        )
    kind = GraphBreakError if isinstance(error, _torch.NEEDS_VALUES) else CaptureError
    explained = kind(
        f"{title} cannot be differentiated as one program: {text}\n  where: {where}\n  what to do: {advice}"
    )
    explained.of_trace = True
    if isinstance(explained, GraphBreakError):
        explained.of_values = True
    return explained


class _Builder:
    """Turns torch's joint graph into a ``Program``: flat inputs, phases, names, modules, seed of the backward."""

    def __init__(self, forward: Program, runner: Runner, traced: TracedJoint) -> None:
        self._forward = forward
        self._runner = runner
        self._traced = traced
        self._known: dict[str, NodeInfo] = {
            mark: info(node) for mark, node in marked(forward.graph, forward.attributes) if node.op != "output"
        }
        self._known |= runner.inside
        self._graph = fx.Graph()
        self._map: dict[fx.Node, fx.Node] = {}
        self._specs: list[InputSpec] = []
        self._constants: dict[str, torch.Tensor] = {}
        self._placeholder_of = {key: name for name, key in reversed(runner.keys.items())}
        self._zeros: list[fx.Node] = []
        self._input_names = [(node.name, spec) for node, spec in forward.inputs_of("input")]

    def build(self) -> Program:
        for node, role in self._traced.inputs:
            self._placeholder(node, role)
        self._calls()
        values, outputs = self._outputs()
        self._graph.output(tuple(values))
        title, context = self._forward.title, self._forward.context
        program = Program(self._graph, "joint", self._specs, outputs, self._constants, {}, title, context=context)
        use_own_ops(program)
        self._name_values(program)
        finish_changed_parameters(program, self._zeros)
        if any(spec.role == "loss" for spec in program.outputs):
            seed_backward(program)
            return_originals(program)
        forget_statistics(program)
        settle_mutations(program)
        program.erase_dead()
        honour_regions(program)
        program.erase_dead()
        name_gradients(program)
        match_layouts(program)
        if program.inputs_of("tangent"):
            own_gradients(program)
        return program

    def _placeholder(self, node: fx.Node, role: _torch.AotInput) -> None:
        if role.kind == "input":
            name, spec = self._input_names[int(role.target)]
        elif role.kind == "tangent":
            name, spec = f"tangents_{len(self._specs)}", InputSpec("tangent", f"tangent[{role.target}]")
        else:
            spec = self._runner.holder[str(role.target)]
            name = self._placeholder_of[str(role.target)]
        new = self._graph.placeholder(name)
        set_value(new, value_of(node))
        new.meta[HOLDS] = node.meta.get(HOLDS, ())
        phase = Phase.BACKWARD if role.kind == "tangent" else Phase.FORWARD
        names = self._known[name].names if name in self._known else (spec.target,)
        set_info(new, NodeInfo(phase, names=names, origin=spec.role))
        if spec.role == "constant":
            self._constants[new.name] = self._forward.constants[name]
        if role.of_parameter:
            self._zeros.append(new)
        self._specs.append(spec)
        self._map[node] = new

    def _calls(self) -> None:
        for node in self._traced.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            if node.target is torch.ops.aten._assert_tensor_metadata.default:
                continue
            if node.op == "get_attr":
                self._constant(node)
            elif is_seen_through(node):
                self._see_through(node)
            else:
                self._call(node)

    def _see_through(self, node: fx.Node) -> None:
        """An identity is its operand, which then holds what both hold."""
        self._map[node] = kept = self._map[node.all_input_nodes[0]]
        kept.meta[HOLDS] = (*kept.meta.get(HOLDS, ()), *node.meta.get(HOLDS, ()))

    def _call(self, node: fx.Node) -> None:
        # numbered as the calls that are left, not as torch came to them: calls that it has dropped leave no gaps
        new = copy_node(self._graph, node, self._mapped, base_name(node))
        set_value(new, value_of(new))  # a check gives nothing, and torch notes no value then
        backward = node in self._traced.backward
        source = self._known.get(self._traced.sources[node], NodeInfo(Phase.FORWARD))
        phase = Phase.BACKWARD if backward else Phase.FORWARD
        region = None if backward else source.region
        set_info(new, replace(source, phase=phase, names=(), region=region, origin="capture"))
        self._map[node] = new

    def _mapped(self, value: Any) -> Any:
        return self._map[value] if isinstance(value, fx.Node) else value

    def _constant(self, node: fx.Node) -> None:
        """A tensor that the trace met as a value becomes an input by reference.

        Raises:
            CaptureError: where it is no tensor but a body that an op runs.
        """
        value = getattr(self._traced.graph.owning_module, str(node.target))
        if isinstance(value, fx.GraphModule):
            (user, *_) = node.users
            raise GraphBreakError(
                f"{self._forward.title} calls {user.target}, which runs one body or another, and a training program "
                "has one path\n  what to do: compute both and choose with torch.where, or move the decision outside "
                "of the model"
            )
        first = next(iter(self._graph.nodes))
        with self._graph.inserting_before(first):
            new = self._graph.placeholder(str(node.target))
        set_value(new, node.meta.get("val", value))
        self._constants[new.name] = value
        set_info(new, NodeInfo(Phase.FORWARD, names=(new.name,), origin=TRACE_CONSTANT))
        self._specs.insert(0, InputSpec("constant", new.name))
        self._map[node] = new

    def _outputs(self) -> tuple[list[Any], list[OutputSpec]]:
        values: list[Any] = []
        specs: list[OutputSpec] = []
        for value, role in self._traced.outputs:
            if role.kind == "base":
                specs.append(OutputSpec("base", f"base[{len(specs)}]"))
            elif role.kind == "output":
                specs.append(self._forward.outputs[role.index or 0])
            elif role.of is not None and role.of.kind == "input":
                specs.append(OutputSpec(role.kind, self._input_names[int(role.of.target)][1].target))
            else:
                assert role.of is not None
                specs.append(OutputSpec(role.kind, self._runner.holder[str(role.of.target)].target))
            values.append(self._map[value] if isinstance(value, fx.Node) else value)
        return values, specs

    def _name_values(self, program: Program) -> None:
        """Give each joint node the names of the forward values it holds, and its own ``path::op``."""
        ops = Counter[str]()
        for node in program.graph.nodes:
            if node.op == "output":
                continue
            known = info(node)
            marks = node.meta.pop(HOLDS, ())
            marked = [name for mark in marks for name in self._known[mark].names if "::" not in name]
            names = [*known.names, *(name for name in dict.fromkeys(marked) if name not in known.names)]
            value = value_of(node)
            if node.op == "call_function" and isinstance(value, torch.Tensor) and not schema.mutated_inputs(node):
                names.append(_op_name(node, ops))
            set_info(node, replace(known, names=tuple(names)))


def _op_name(node: fx.Node, seen: Counter[str]) -> str:
    """``path::op`` in forward, ``path::op~`` in backward, numbered from the second on; ``op.1`` for a second result."""
    op = schema.op_name(node)
    if node.target is operator.getitem:
        source, index = node.args
        op = schema.op_name(source) + (f".{index}" if index else "")  # type: ignore[arg-type]
    known = info(node)
    base = f"{known.module}::{op}{'' if known.phase is Phase.FORWARD else '~'}"
    number = seen[base]
    seen[base] += 1
    return base if number == 0 else f"{base}_{number}"
