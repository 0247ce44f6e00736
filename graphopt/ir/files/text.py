"""A program as readable text: Python with types, phases, modules, provenance and explicit ends of life."""

from __future__ import annotations

import operator
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import fx

from graphopt import _torch
from graphopt.errors import GraphoptError
from graphopt.ir.lowering import reused_operands
from graphopt.ir.node import InputSpec, NodeInfo, OutputSpec, Phase, info, value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.values import tensors_of, type_text
from graphopt.ir.program import Program
from graphopt.ir.words.written_units import counted, format_bytes

__all__ = [
    "Writer",
    "comment_of",
    "ends_of_life",
    "input_line",
    "output_line",
    "statement",
    "subgraph_of",
    "to_text",
]

INDENT = "    "
_WIDTH = 110
"""Columns that code may take before a call is broken over lines; the comment behind it comes on top."""

_ARITHMETIC = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**"}
_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}

INFIX = {**_ARITHMETIC, **_COMPARISONS, "and_": "&", "or_": "|"}
"""Functions of ``operator`` (sizes are computed with them) that are written between their two arguments."""

_READABLE = {"run_and_save_rng_state": "record_random", "run_with_rng_state": "replay_random"}
_NUMBERED_CLASS = re.compile(r"#\d+$")
_UNDESCRIBED = NodeInfo(Phase.FORWARD, origin="added to the graph directly, without phase and module")


def to_text(program: Program) -> str:
    """The program for people.

    A header says whose program it is, which passes it went through and, for joint and step programs, the predicted
    peak in bytes. Every input has its type and role; every call its result's type (``f32[4, 8]``), its name for users,
    a planner's decision, who made it where that was not the capture, and whether the generated code takes a sum in
    place of an operand. Comment lines tell phase and module with the
    user's source line. ``del`` stands where the generated code drops its last reference to a value; inputs belong to
    the caller and have none. Equal programs give equal text: it holds no addresses and no folders.

    Args:
        program: of any stage; nodes that a broken pass left without description are shown as such.
    """
    lines = [*_header(program), "", "def step("]
    lines += [f"{INDENT}{input_line(n, s)}" for n, s in zip(program.placeholders, program.inputs, strict=False)]
    lines += ["):"]
    lines += _body(program.graph, program.attributes, INDENT, notes=_notes(program))
    lines += _return(program)
    return "\n".join(lines) + "\n"


def _header(program: Program) -> list[str]:
    nodes = program.nodes
    calls = sum(1 for node in nodes if node.op not in ("placeholder", "output"))
    lines = [
        f"# {program.title or 'program'}, {program.stage} stage: {counted(len(nodes), 'nodes')}, {calls} of them ops",
        f"# passes: {', '.join(program.history) or 'none'}",
    ]
    if program.context.device is not None:
        lines.append(f"# device: {program.context.device.name}, captured without data")
    symbols = ", ".join(f"{name} = {size}" for name, size in program.symbols.items())
    if symbols:
        which = "that bytes are counted for" if program.context.sizes.planned else "in the example inputs"
        lines.append(f"# sizes {which}: {symbols}")
    if program.stage != "forward" and calls:
        lines.append(f"# predicted peak: {_peak(program)}")
    return lines


def _peak(program: Program) -> str:
    try:
        timeline = program.memory()
    except GraphoptError as error:
        return f"unknown, {error}"
    at = timeline.peak_at
    names = info(at).names
    where = f"{at.name} ({names[0]})" if names else at.name
    others = "".join(f"; {format_bytes(t.peak_bytes)} on {device}" for device, t in timeline.others.items())
    return (
        f"{format_bytes(timeline.peak_bytes)} ({timeline.peak_bytes} bytes) at {where}, "
        f"{format_bytes(timeline.resident_bytes)} of it resident{others}"
    )


def _return(program: Program) -> list[str]:
    values = program.output_values
    if not values:
        return [f"{INDENT}return ()"]
    writer = Writer()
    lines = [output_line(writer.value(v), s) for v, s in zip(values, program.outputs, strict=False)]
    return [f"{INDENT}return (", *(INDENT * 2 + line for line in lines), f"{INDENT})"]


def input_line(node: fx.Node, spec: InputSpec, name: str | None = None) -> str:
    """``b_0_l_bias: f32[8],  # parameter b.0.l.bias``."""
    known = _known(node) or _UNDESCRIBED
    also = [other for other in known.names if other != spec.target]
    more = f" | also {', '.join(also)}" if also else ""
    return f"{name or node.name}: {_type(value_of(node)) or 'None'},  # {spec.role} {spec.target}{more}"


def output_line(value: str, spec: OutputSpec) -> str:
    """``t_6,  # gradient head.weight``."""
    return f"{value},  # {spec.role if spec.role == spec.target else f'{spec.role} {spec.target}'}"


# --- the body --------------------------------------------------------------------------------------------------------


def _notes(program: Program) -> dict[fx.Node, str]:
    """What the generated code does differently from the program as written."""
    try:
        reused = reused_operands(program)
    except GraphoptError:
        return {}
    return {node: f"in place of {operand.name}" for node, operand in reused.items()}


def _body(
    graph: fx.Graph, attributes: Mapping[str, Any], indent: str, *, notes: Mapping[fx.Node, str] | None = None
) -> list[str]:
    """The calls; with ``notes`` (of the whole program) phases are told apart by banners."""
    lines: list[str] = []
    ends = ends_of_life(graph)
    writer = Writer()
    phase: Phase | None = None
    place: tuple[str, str] | None = None
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        known = _known(node)
        if notes is not None and known is not None and known.phase is not phase:
            lines.append(f"{indent}# ---- {known.phase.value}")
            phase, place = known.phase, None
        if known is not None and node.op == "call_function" and (known.module, known.source) != place:
            lines += [indent + comment for comment in _place_comment(known, place)]
            place = (known.module, known.source)
        lines += [
            indent + line
            for line in statement(node, known or _UNDESCRIBED, attributes, writer, (notes or {}).get(node, ""))
        ]
        if node in ends:
            lines += _wrapped(f"{indent}del ", [dead.name for dead in ends[node]])
    return lines


def _place_comment(known: NodeInfo, place: tuple[str, str] | None) -> list[str]:
    """The comment above the first call of a module, or of another of the module's source lines."""
    source = short_source(known.source)
    if place is not None and place[0] == known.module:
        return [f"# {source}"] if source else []
    module = f"module {known.module}" if known.module else "top level"
    return [f"# {module} ({source})" if source else f"# {module}"]


def short_source(source: str) -> str:
    """A source line with its file name but without the folder: ``model.py:12 in forward``."""
    return re.sub(r"^.*[/\\]", "", source)


def statement(
    node: fx.Node, known: NodeInfo, attributes: Mapping[str, Any], writer: Writer, note: str = ""
) -> list[str]:
    """The lines for one node: its call with a comment behind it, or the nested function that it refers to.

    Args:
        node: a call or a reference to a sub-graph.
        known: what the comment says of it.
        attributes: the sub-graphs by the name under which nodes refer to them.
        writer: says how nodes are called.
        note: what else the comment says.
    """
    if node.op == "get_attr":
        return _nested(node, attributes, writer)
    comment = " | ".join(part for part in (comment_of(node, known), note) if part)
    start = "" if is_bare(node) else f"{writer.names(node)} = "
    opening, arguments, closing = writer.call(node)
    tail = f"  # {comment}" if comment else ""
    line = f"{start}{opening}{', '.join(arguments)}{closing}"
    if len(line) <= _WIDTH or not arguments:
        return [line + tail]
    inner = [", ".join(arguments)]
    if len(inner[0]) > _WIDTH:
        inner = [piece for argument in arguments for piece in _argument_lines(argument)]
    return [f"{start}{opening}", *(INDENT + piece for piece in inner), closing + tail]


def comment_of(node: fx.Node, known: NodeInfo) -> str:
    """What stands behind a call: type and names, decision, and origin where it is not the capture."""
    given = [name for name in known.names if "::" not in name] or list(known.names[:1])
    parts = [" ".join(part for part in (_type(value_of(node)), ", ".join(given)) if part)]
    if known.policy is not None:
        parts.append(known.policy.value)
    if known.origin != "capture":
        parts.append(known.origin)
    return " | ".join(part for part in parts if part)


def _type(value: Any) -> str:
    """The type of a value; numbers that vary are numbers, and a size that turned out to be fixed is a plain int."""
    if isinstance(value, torch.SymInt) and str(value).lstrip("-").isdigit():
        return "int"
    return {torch.SymFloat: "float", torch.SymBool: "bool"}.get(type(value)) or type_text(value)


def is_bare(node: fx.Node) -> bool:
    """Whether a call is there for what it writes, and its result is nobody's."""
    return not node.users and bool(schema.mutated_inputs(node))


def subgraph_of(node: fx.Node, attributes: Mapping[str, Any]) -> fx.GraphModule | None:
    """The sub-graph that a ``get_attr`` node refers to, or None where there is none under that name."""
    found = attributes.get(str(node.target))
    return found if isinstance(found, fx.GraphModule) else None


def _nested(node: fx.Node, attributes: Mapping[str, Any], writer: Writer) -> list[str]:
    module = subgraph_of(node, attributes)
    if module is None:
        return [f"{writer.names(node)} = attribute({str(node.target)!r})"]
    places = module.graph.find_nodes(op="placeholder")
    output = next(iter(module.graph.find_nodes(op="output")))
    arguments = ", ".join(f"{place.name}: {_type(value_of(place)) or 'None'}" for place in places)
    return [
        f"def {writer.names(node)}({arguments}):",
        *_body(module.graph, dict(module.named_children()), INDENT),
        f"{INDENT}return {Writer().value(output.args[0])}",
    ]


def _argument_lines(argument: str) -> list[str]:
    if len(argument) <= _WIDTH or argument[0] not in "[(":
        return [argument + ","]
    return [argument[0], *_wrapped(INDENT, [argument[1:-1]]), argument[-1] + ","]


def _wrapped(start: str, names: Iterable[str]) -> list[str]:
    """``start`` and the names, over as many lines as that takes; later lines begin like the first."""
    pieces = textwrap.wrap(", ".join(names), _WIDTH - len(start), break_long_words=False, break_on_hyphens=False)
    return [start + (piece.rstrip(",") if start.strip() else piece) for piece in pieces]


def ends_of_life(graph: fx.Graph, *, everything: bool = False) -> dict[fx.Node, list[fx.Node]]:
    """After which node which values end, as the generated code drops its references.

    Args:
        graph: topologically ordered.
        everything: include inputs and values that are not tensors, which take no memory of the program's own.

    Returns:
        for each node behind which something ends, what ends, in the order in which it was made. Outputs do not end.
    """
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        for source in node.all_input_nodes:
            last[source] = node
    ends: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        end = last.get(node) or node
        if node.op in ("output", "get_attr") or end.op in ("output", "placeholder") or is_bare(node):
            continue
        if everything or (node.op != "placeholder" and tensors_of(value_of(node))):
            ends.setdefault(end, []).append(node)
    return ends


def _known(node: fx.Node) -> NodeInfo | None:
    try:
        return info(node)
    except GraphoptError:
        return None


# --- expressions -----------------------------------------------------------------------------------------------------


class Writer:
    """Writes calls and their arguments; ``names`` says how a node is called."""

    def __init__(self, names: Callable[[fx.Node], str] = operator.attrgetter("name")) -> None:
        self.names = names

    def call(self, node: fx.Node) -> tuple[str, list[str], str]:
        """A call as its opening, its arguments and its closing: ``("aten.mm(", ["a", "b"], ")")``."""
        arguments = [self.value(argument) for argument in node.args]
        module, name = getattr(node.target, "__module__", ""), getattr(node.target, "__name__", "")
        if node.target is operator.getitem:
            return f"{arguments[0]}[{self.index(node.args[1])}]", [], ""
        if module in ("_operator", "operator") and name in INFIX and len(arguments) == 2:
            return f"{arguments[0]} {INFIX[name]} {arguments[1]}", [], ""
        arguments += [f"{key}={self.value(value)}" for key, value in node.kwargs.items()]
        if isinstance(node.target, _torch.HigherOrderOperator):
            return self.higher_order(node.target, node.args, arguments)
        return f"{self.target(node.target)}(", arguments, ")"

    def higher_order(
        self, target: _torch.HigherOrderOperator, args: tuple[Any, ...], arguments: list[str]
    ) -> tuple[str, list[str], str]:
        """A call of an op that takes functions, another op or a class."""
        name = str(target)
        if target is _torch.custom_function:
            return f"{_NUMBERED_CLASS.sub('', str(args[0]))}.apply(", arguments[1:], ")"
        if target is _torch.inner_gradients and len(args) > 3:
            count, (again, unused), tensors = args[0], arguments[1:3], arguments[3:]
            outputs, gradients, inputs = tensors[:count], tensors[count : 2 * count], tensors[2 * count :]
            lists = [f"[{', '.join(each)}]" for each in (outputs, inputs, gradients)]
            return "torch.autograd.grad(", [*lists, f"create_graph={again}", f"allow_unused={unused}"], ")"
        if name == "wrap_with_autocast" and len(args) > 4:
            device, dtype, enabled, cache, function, *rest = arguments
            options = f"{device}, {dtype}, enabled={enabled}, cache_enabled={cache}"
            return f"autocast({options})({function})(", rest, ")"
        return f"{_READABLE.get(name, name)}(", arguments, ")"

    def target(self, target: Any) -> str:
        """What is called: ``aten.mm``, ``aten.sum.dim_IntList``, ``torch.sym_max``."""
        if isinstance(target, _torch.OpOverload):
            return str(target).removesuffix(".default")
        if isinstance(target, _torch.HigherOrderOperator):
            return str(target)
        module = getattr(target, "__module__", None) or ""
        name = getattr(target, "__qualname__", None) or type(target).__name__
        return f"{module.lstrip('_')}.{name}" if module else name

    def index(self, value: Any) -> str:
        """What stands in brackets."""
        if isinstance(value, slice):
            ends = ["" if end is None else self.value(end) for end in (value.start, value.stop, value.step)]
            return ":".join(ends if ends[2] else ends[:2])
        return self.value(value)

    def value(self, value: Any) -> str:
        """An argument: a node by its name, everything else as Python writes it."""
        if isinstance(value, fx.Node):
            return self.names(value)
        if isinstance(value, (list, tuple)):
            items = ", ".join(self.value(item) for item in value)
            if isinstance(value, list):
                return f"[{items}]"
            return f"({items},)" if len(value) == 1 else f"({items})"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key!r}: {self.value(item)}" for key, item in value.items()) + "}"
        if isinstance(value, slice):
            return f"slice({self.value(value.start)}, {self.value(value.stop)}, {self.value(value.step)})"
        return self.atom(value)

    def atom(self, value: Any) -> str:
        """An argument without parts."""
        if value is None or isinstance(value, (bool, int, float, complex, str)):
            return repr(value)
        if isinstance(value, (torch.dtype, torch.layout, torch.memory_format, torch.SymInt, torch.SymFloat)):
            return str(value)
        if isinstance(value, torch.device):
            return repr(str(value))
        if callable(value):
            return self.target(value)
        return f"<{type(value).__name__}>"
