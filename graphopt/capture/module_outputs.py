"""Which values of one of Dynamo's graphs are what a module returned: there the modules' own calls are gone."""

from __future__ import annotations

from collections import Counter, defaultdict

from torch import fx

__all__ = ["module_outputs"]

_Call = tuple[str, int]
"""A module's path, and which of its calls it is."""


def module_outputs(graph: fx.Graph) -> dict[fx.Node, list[str]]:
    """The names of modules' outputs, inner modules first; ``path@1`` for a module's second call.

    A module's output is the one value of its that others use. Where they use several, or none, it has no name.

    Args:
        graph: whose nodes have their modules' paths in ``meta["nn_module_stack"]``.
    """
    inside = _calls(graph)
    members: dict[_Call, list[fx.Node]] = defaultdict(list)
    for node, calls in inside.items():
        for call in calls:
            members[call].append(node)
    found: dict[fx.Node, list[str]] = {}
    for (path, number), nodes in sorted(members.items(), key=lambda item: -item[0][0].count(".")):
        leaving = [node for node in nodes if any((path, number) not in inside.get(user, ()) for user in node.users)]
        if path and len(leaving) == 1:
            found.setdefault(leaving[0], []).append(path if number == 0 else f"{path}@{number}")
    return found


def _calls(graph: fx.Graph) -> dict[fx.Node, tuple[_Call, ...]]:
    """The calls of modules that each node is part of, outermost first."""
    found: dict[fx.Node, tuple[_Call, ...]] = {}
    numbers: Counter[str] = Counter()
    open_calls: dict[tuple[str, str], _Call] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        stack = [(key, entry[0]) for key, entry in node.meta.get("nn_module_stack", {}).items()]
        open_calls = {step: open_calls[step] for step in stack if step in open_calls}
        for key, path in stack:
            if (key, path) not in open_calls:
                open_calls[key, path] = (path, numbers[path])
                numbers[path] += 1
        found[node] = tuple(open_calls[step] for step in stack)
    return found
