"""What a region of a forward program (a sub-graph under `no_grad` or autocast) does beside giving its result."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from graphopt.ir.ops import schema

__all__ = ["has_effect", "is_written", "mutated_inputs"]

Bodies = Mapping[str, fx.GraphModule]


def mutated_inputs(node: fx.Node, bodies: Bodies) -> list[fx.Node]:
    """The argument nodes that a call writes to, also inside of the body that it runs.

    Args:
        node: of a program, or of a body.
        bodies: the sub-graphs by name (``Program.attributes``).
    """
    body, inputs = _body(node, bodies)
    if body is None:
        return schema.mutated_inputs(node)
    written = _written(body)
    places = [number for number, inside in enumerate(body.graph.find_nodes(op="placeholder")) if inside in written]
    return [source for number in places if isinstance(source := inputs[number], fx.Node)]


def has_effect(node: fx.Node, bodies: Bodies) -> bool:
    """Whether removing or repeating a call would change more than its result, also inside of the body that it runs."""
    body, _ = _body(node, bodies)
    if body is None:
        return schema.has_effect(node)
    return any(
        has_effect(inside, _nested(body)) for inside in body.graph.nodes if inside.op not in ("placeholder", "output")
    )


def is_written(node: fx.Node, bodies: Bodies) -> bool:
    """Whether a call writes to the memory behind a view, before it or after it."""
    root = schema.storage_root(node)
    targets = (target for reader in schema.readers(root) for target in mutated_inputs(reader, bodies))
    return any(schema.storage_root(target) is root for target in targets)


def _body(node: fx.Node, bodies: Bodies) -> tuple[fx.GraphModule | None, list[object]]:
    """The sub-graph that a call runs, and what it gets; None for other calls."""
    for place, argument in enumerate(node.args):
        if isinstance(argument, fx.Node) and argument.op == "get_attr" and str(argument.target) in bodies:
            return bodies[str(argument.target)], list(node.args[place + 1 :])
    return None, []


def _nested(body: fx.GraphModule) -> Bodies:
    return {name: child for name, child in body.named_children() if isinstance(child, fx.GraphModule)}


def _written(body: fx.GraphModule) -> set[fx.Node]:
    """The values whose memory is written in a body, behind views."""
    nested, found = _nested(body), set()
    for node in body.graph.nodes:
        for target in mutated_inputs(node, nested):
            while sources := schema.aliased_inputs(target) if target.op == "call_function" else []:
                target = sources[0]
            found.add(target)
    return found
