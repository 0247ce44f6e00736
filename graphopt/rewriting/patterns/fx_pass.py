"""Any function on a GraphModule as a pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, cast, final, get_args

from torch import fx

from graphopt.errors import GraphoptError, check_type, choice, wrong_argument
from graphopt.ir.node import InputSpec, NodeInfo, Phase, set_info, set_value
from graphopt.ir.program import Program
from graphopt.rewriting.pass_ import STAGES, Changed, Numerics, Pass, PassStage

__all__ = ["FxPass"]

_ORDER = (Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTE, Phase.TRANSFER, Phase.SYNC, Phase.UPDATE)


@final
@dataclass(frozen=True)
class FxPass(Pass):
    """Runs a plain FX function as a pass: ``FxPass(my_function, stage="joint")``.

    The function gets the program as a ``torch.fx.GraphModule`` with flat placeholders and one tuple of outputs, and
    changes it in place or returns another GraphModule. Nodes that it adds get their values, phases and modules filled
    in afterwards from what they read; everything is verified as for any other pass. Numerics count as ``tolerant``
    unless said otherwise.

    Args:
        function: takes a GraphModule; returns None or a GraphModule.
        stage: which program it rewrites: forward, joint, step or last.
        numerics: what it promises: bitwise, tolerant or changes.
        name: what it is called in logs and errors; the function's name in kebab-case by default.

    Raises:
        ArgumentError: for what is no function, and for a stage or numerics that there are not.

    Example:
        >>> def rename(graph_module):
        ...     for node in graph_module.graph.nodes:
        ...         node.meta["seen"] = True
        >>> graphopt.FxPass(rename, stage="joint", numerics="bitwise").name
        'rename'
    """

    name: ClassVar[str] = "fx"
    stage: ClassVar[PassStage] = "joint"
    numerics: ClassVar[Numerics] = "tolerant"

    function: Callable[[fx.GraphModule], fx.GraphModule | None]

    def __init__(
        self,
        function: Callable[[fx.GraphModule], fx.GraphModule | None],
        *,
        stage: PassStage = "joint",
        numerics: Numerics = "tolerant",
        name: str | None = None,
    ) -> None:
        if not callable(function):
            raise wrong_argument("FxPass's function", function, "a function on a GraphModule")
        stage = cast(PassStage, choice("FxPass's stage", stage, STAGES))
        numerics = cast(Numerics, choice("FxPass's numerics", numerics, get_args(Numerics)))
        check_type("FxPass's name", name, (str, type(None)), "text in kebab-case, or None for the function's own")
        label = name or getattr(function, "__name__", type(function).__name__).strip("<>").replace("_", "-")
        for key, value in (("function", function), ("stage", stage), ("numerics", numerics), ("name", label)):
            object.__setattr__(self, key, value)

    def __str__(self) -> str:
        return f"fx:{self.name}"

    def apply(self, program: Program) -> Changed:
        """See the class."""
        before = _listing(program.graph)
        module = fx.GraphModule(dict(program.attributes), program.copy().graph)
        result = self.function(module)
        if result is not None and not isinstance(result, fx.GraphModule):
            raise GraphoptError(
                f"{self.name} returned {type(result).__name__}: an FX function changes its GraphModule in place and "
                "returns None, or returns a GraphModule"
            )
        graph = (result or module).graph
        after = _listing(graph)
        if list(after.items()) == list(before.items()):
            return Changed(reason="the graph is as it was")
        _adopt(program, graph, f"fx:{self.name}")
        kept = before.keys() & after.keys()
        moved = [name for name in before if name in kept] != [name for name in after if name in kept]
        counts = {
            "added": len(after.keys() - kept),
            "erased": len(before.keys() - kept),
            "rewritten": sum(1 for name in kept if before[name] != after[name]),
            "reordered": int(moved),
        }
        return Changed({what: count for what, count in counts.items() if count})


def _listing(graph: fx.Graph) -> dict[str, str]:
    """What every node is, by name and in order."""
    return {node.name: f"{node.op} {node.target} {node.args} {node.kwargs}" for node in graph.nodes}


def _adopt(program: Program, graph: fx.Graph, origin: str) -> None:
    """Put a foreign graph in the place of the program's, describing what it added."""
    copy = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        mapping[node] = copy.node_copy(node, lambda n: mapping[n])
    program.graph = copy
    specs = dict(zip((n.name for n in graph.find_nodes(op="placeholder")), program.inputs, strict=False))
    program.inputs = [specs.get(node.name, InputSpec("input", node.name)) for node in program.placeholders]
    for node in copy.nodes:
        if node.op != "output" and not isinstance(node.meta.get("graphopt"), NodeInfo):
            _describe(program, node, origin)


def _describe(program: Program, node: fx.Node, origin: str) -> None:
    sources = [source.meta["graphopt"] for source in node.all_input_nodes]
    phase = max((known.phase for known in sources), key=_ORDER.index, default=Phase.FORWARD)
    module = sources[0].module if sources else ""
    set_info(node, NodeInfo(phase, module, origin=origin, source=sources[0].source if sources else ""))
    if node.op == "call_function":
        set_value(node, program.propagate(node))
