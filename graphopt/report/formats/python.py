"""A program as Python source that runs on its own."""

from __future__ import annotations

import builtins
import keyword
import math
import operator
from typing import Any

import torch
from torch import fx

from graphopt import _torch
from graphopt.errors import GraphoptError
from graphopt.ir.files.text import INDENT, Writer, ends_of_life, is_bare, subgraph_of
from graphopt.ir.lowering import apply_reuse
from graphopt.ir.names import one_line
from graphopt.ir.program import Program

__all__ = ["to_python"]

_TAKEN = {"args", "graphopt", "math", "operator", "pkgutil", "step", "torch", "_torch"}
"""Names that the source uses itself; a node of that name is called something else."""


def to_python(program: Program) -> str:
    """The program as Python source: imports, and ``step(args)`` that computes what ``program.to_graph_module()`` does.

    ``args`` is a list of tensors and numbers, one for each input in the program's order; it is emptied, so that values
    die at their last use. The result is a tuple in the order of ``program.outputs``. Ops are written by their full
    names (``torch.ops.aten.add.Tensor``), sub-graphs as nested functions; sums of gradients are taken in place as in
    the module, so that memory is the same too.

    Args:
        program: of any stage.

    Raises:
        GraphoptError: for what has no source form: an attribute that is not a sub-graph, a custom autograd function
            defined inside another function, an argument or a callable that cannot be written down.
    """
    program = program.copy()
    apply_reuse(program)
    body = _Body(program.graph, dict(program.attributes), {})
    lines = [f'"""{_title(program)}"""', ""]
    inner = _arguments(program, body)
    inner += body.calls()
    inner += _return(program, body)
    lines += [*_imports(inner), "", "", "def step(args):", *(INDENT + line for line in inner)]
    return "\n".join(lines) + "\n"


def _title(program: Program) -> str:
    name = (program.title or "a program").replace("\\", "").replace('"', "")
    passes = ", ".join(program.history).replace("\\", "").replace('"', "'") or "none"
    return one_line(f"{name}: {program.stage} stage; passes: {passes}.")


def _imports(lines: list[str]) -> list[str]:
    """The modules that the source mentions."""
    text = "\n".join(lines)
    found = [f"import {module}" for module in ("math", "operator", "pkgutil") if f"{module}." in text]
    found = sorted({*found, "import operator"})
    found += ["", "import torch"]
    if "torch.ops.graphopt." in text:
        found += ["", "import graphopt.passes"]
    if "_torch." in text:
        found += ["", "from graphopt import _torch"]
    return found


def _arguments(program: Program, body: _Body) -> list[str]:
    lines = ["("] if program.inputs else []
    for node, spec in zip(program.placeholders, program.inputs, strict=True):
        lines.append(f"{INDENT}{body.name(node)},  # {one_line(f'{spec.role} {spec.target}')}")
    return [*lines, ") = args", "args.clear()"] if lines else ["args.clear()"]


def _return(program: Program, body: _Body) -> list[str]:
    if not program.outputs:
        return ["return ()"]
    lines = [
        f"{INDENT}{body.value(value)},  # {one_line(f'{spec.role} {spec.target}')}"
        for value, spec in zip(program.output_values, program.outputs, strict=True)
    ]
    return ["return (", *lines, ")"]


class _Body(Writer):
    """Writes the calls of one graph; sub-graphs know the names that are taken around them."""

    def __init__(self, graph: fx.Graph, attributes: dict[str, Any], outer: dict[str, str]) -> None:
        self._graph = graph
        self._attributes = attributes
        self._named: dict[fx.Node, str] = {}
        taken = _TAKEN | set(outer) | set(dir(builtins)) | set(keyword.kwlist)
        for node in graph.nodes:
            name = node.name
            while name in taken:
                name += "_"
            taken.add(name)
            self._named[node] = name
        super().__init__(self._named.__getitem__)
        self._taken = {name: name for name in self._named.values()} | outer

    def name(self, node: fx.Node) -> str:
        """How a node is called in the source."""
        return self._named[node]

    def calls(self) -> list[str]:
        """The lines of the calls, with ``del`` behind the last use of each value."""
        ends = ends_of_life(self._graph, everything=True)
        lines: list[str] = []
        for node in self._graph.nodes:
            if node.op == "get_attr":
                lines += self._function(node)
            elif node.op == "call_function":
                opening, arguments, closing = self.call(node)
                start = "" if is_bare(node) else f"{self.name(node)} = "
                lines.append(f"{start}{opening}{', '.join(arguments)}{closing}")
            elif node.op not in ("placeholder", "output"):
                raise GraphoptError(
                    f"{node.format_node()} cannot be written as Python: programs hold function calls only"
                )
            if node in ends:
                lines.append(f"del {', '.join(self.name(dead) for dead in ends[node])}")
        return lines

    def _function(self, node: fx.Node) -> list[str]:
        module = subgraph_of(node, self._attributes)
        if module is None:
            found = self._attributes.get(str(node.target))
            what = f"is a {type(found).__name__}" if found is not None else "does not exist"
            raise GraphoptError(
                f"the attribute {str(node.target)!r} that node {node.name!r} refers to {what}: only sub-graphs can be "
                "written as Python; make a tensor an input of the program, or use program.to_json()"
            )
        inner = _Body(module.graph, dict(module.named_children()), self._taken)
        output = next(iter(module.graph.find_nodes(op="output")))
        places = ", ".join(inner.name(place) for place in module.graph.find_nodes(op="placeholder"))
        lines = [*inner.calls(), f"return {inner.value(output.args[0])}"]
        return [f"def {self.name(node)}({places}):", *(INDENT + line for line in lines)]

    def higher_order(
        self, target: _torch.HigherOrderOperator, args: tuple[Any, ...], arguments: list[str]
    ) -> tuple[str, list[str], str]:
        """A call of an op that takes functions, another op or a class."""
        if target is _torch.custom_function:
            key = str(args[0])
            if key not in _torch.custom_function.registry:
                raise GraphoptError(
                    f"the autograd function {one_line(key)!r:.100} is none that was captured in this process: capture "
                    "the program here, so that what the source imports is what the model used"
                )
            if "<locals>" in key or "#" in key:
                raise GraphoptError(
                    f"the autograd function {key} cannot be written as Python, because it cannot be imported: define "
                    "it at the top level of a module, under a name of its own"
                )
            return f"pkgutil.resolve_name({key!r}).apply(", arguments[1:], ")"
        if target is _torch.inner_gradients:
            raise GraphoptError(
                "gradients that forward takes by itself have no Python of their own while the program is not "
                "differentiated: write the joint stage (graphopt.capture(...), without stage='forward')"
            )
        return f"{self.target(target)}(", arguments, ")"

    def target(self, target: Any) -> str:
        """What is called, by its full name."""
        if isinstance(target, _torch.OpOverload):
            return f"torch.ops.{target}"
        if isinstance(target, _torch.HigherOrderOperator):
            name = str(target)
            return f"_torch.{name}" if getattr(_torch, name, None) is target else f"torch.ops.higher_order.{name}"
        name = getattr(target, "__name__", "")
        for home in (operator, math, torch):
            if getattr(home, name, None) is target:
                return f"{home.__name__}.{name}"
        raise GraphoptError(
            f"{target!r} cannot be written as Python: programs call registered ops and functions of operator, math and "
            "torch; register it with torch.library.custom_op"
        )

    def atom(self, value: Any) -> str:
        """An argument without parts."""
        if isinstance(value, float) and not math.isfinite(value):
            return f"float('{value}')"
        if isinstance(value, torch.device):
            return f"torch.device({str(value)!r})"
        text = super().atom(value)
        if text.startswith("<") or isinstance(value, (torch.SymInt, torch.SymFloat)):
            raise GraphoptError(f"the argument {value!r} of type {type(value).__name__} cannot be written as Python")
        return text
