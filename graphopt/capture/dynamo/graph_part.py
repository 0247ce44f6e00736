"""One graph that torch's Dynamo has cut out of a model, as a module of its own that is captured like any other.

What a graph of torch's computes, as plain data: the same in each process in which Dynamo cuts the same graph.

Which values of one of Dynamo's graphs are what a module returned: there the modules' own calls are gone.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.fx.traceback import preserve_node_meta
from torch.utils.checkpoint import checkpoint

from graphopt import _torch
from graphopt.errors import CaptureError, shown
from graphopt.ir.names import add_name

__all__ = ["GraphPart", "as_it_is", "cut_of", "graph_form", "module_outputs", "title_of"]

_OWN = "the part of a model"
"""The one name that a part has for itself, which no attribute of a model can have: a child may be called ``shared``."""


@dataclass
class _Cut:
    """What a part of a model is.

    Attributes:
        title: the name of the model's class.
        shared: whether other code may use the arguments as well.
        inputs: how many arguments the graph takes.
        places: where each parameter and buffer stands among the arguments, by its name.
        others: where the other tensors stand.
        numbers: the arguments that are sizes, of a graph for any size, by their places.
        run: runs the graph.
    """

    title: str
    shared: bool
    inputs: int
    places: dict[str, int] = field(default_factory=dict)
    others: list[int] = field(default_factory=list)
    numbers: dict[int, Any] = field(default_factory=dict)
    run: _Interpreter = field(init=False)


class GraphPart(nn.Module):
    """Runs a graph with the parameters and buffers that it was cut out with, under the names that these have.

    Args:
        graph: as Dynamo gives it to a backend; parameters and buffers are among its inputs.
        arguments: of a call of the graph.
        names: the names of the model's parameters and buffers, by their ``id``.
        paths: where the arguments come from in the function that was cut (``input_paths``).
        title: the name of the model's class.
        shared: whether other code may use the arguments as well, so that autograd adds up their gradients.

    What it has by name is the model's; what it is itself, ``cut_of`` gives.

    Raises:
        CaptureError: where the graph takes what is not a tensor, or does what a program would lose.
    """

    def __init__(
        self,
        graph: fx.GraphModule,
        arguments: Sequence[Any],
        names: Mapping[int, str],
        paths: Sequence[str],
        title: str,
        *,
        shared: bool = True,
    ) -> None:
        super().__init__()
        unknown = [argument for argument in arguments if not isinstance(argument, (torch.Tensor, int, float))]
        if unknown:
            raise CaptureError(f"a part of {title} takes {shown(unknown[0])}, which is neither a tensor nor a number")
        _refuse_unknown(graph, title)
        cut = vars(self)[_OWN] = _Cut(title, shared, len(arguments))
        for place, tensor in enumerate(arguments):
            if not isinstance(tensor, torch.Tensor):
                cut.numbers[place] = tensor
                continue
            name = names.get(id(tensor))
            if name is None or name in cut.places:
                cut.others.append(place)
            else:
                cut.places[name] = place
                self._register(name, tensor)
        for module in graph.modules():
            if isinstance(module, fx.GraphModule):
                _torch.with_paths(module, _whole_paths(cut, paths))
        cut.run = _Interpreter(graph)  # which names what the modules of the whole model give

    def _register(self, name: str, tensor: torch.Tensor) -> None:
        *path, last = name.split(".")
        module: nn.Module = self
        for step in path:
            if step not in module._modules:
                module.add_module(step, nn.Module())
            module = module._modules[step]  # type: ignore[assignment]
        if isinstance(tensor, nn.Parameter):
            module.register_parameter(last, tensor)
        else:
            module.register_buffer(last, tensor)

    def forward(self, *inputs: torch.Tensor) -> Any:
        """What the graph returns for its own parameters and buffers and the other tensors of a call."""
        cut = cut_of(self)
        arguments: list[Any] = [cut.numbers.get(place) for place in range(cut.inputs)]
        for name, place in cut.places.items():
            path, _, last = name.rpartition(".")
            arguments[place] = getattr(self.get_submodule(path), last)
        for place, tensor in zip(cut.others, inputs, strict=True):
            arguments[place] = tensor
        return cut.run(arguments)


def cut_of(part: GraphPart) -> _Cut:
    """What a part is, beside the names of the model that it has."""
    found: _Cut = vars(part)[_OWN]
    return found


def _whole_paths(cut: _Cut, paths: Sequence[str]) -> Callable[[str], str]:
    """Gives the paths of the whole model for those in the function that was cut, by the names of parameters."""
    above = ""
    for name, place in cut.places.items():
        if paths[place] and name.endswith(f".{paths[place]}"):
            above = name.removesuffix(paths[place])
    return lambda path: (above + path).rstrip(".")


class _Interpreter:
    """Runs a graph node by node, so that what is traced has each node's module path, names and source line."""

    def __init__(self, graph: fx.GraphModule) -> None:
        self._graph = graph
        self._names = module_outputs(graph.graph)

    def _graphopt_compared_by(self) -> list[Any]:
        """What stored captures of it depend on."""
        return graph_form(self._graph)

    def __call__(self, arguments: Sequence[Any]) -> Any:
        with preserve_node_meta():
            return _NodeByNode(self._graph, self._names).run(*arguments)


class _NodeByNode(fx.Interpreter):
    """Names what modules return, and reads a number where the graph reads the value of a tensor that stands for it."""

    def __init__(self, graph: fx.GraphModule, names: Mapping[fx.Node, list[str]] | None) -> None:
        super().__init__(graph)
        self._names = names

    def run_node(self, n: fx.Node) -> Any:
        """As the graph has it."""
        result = super().run_node(n)
        for name in (self._names or {}).get(n, ()):
            if isinstance(result, torch.Tensor):
                add_name(result, name)
        return result

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As the graph has it; a checkpointed body is called as the model has called it."""
        if str(target) != _CHECKPOINT:
            return super().call_function(target, args, kwargs)
        body, *rest = args
        inside = _NodeByNode(body, None if self._names is None else module_outputs(body.graph))
        return checkpoint(inside.run, *rest, **kwargs)

    def call_method(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As the graph has it, but for ``item()`` of what is a number already."""
        if target == "item" and not isinstance(args[0], torch.Tensor):
            return args[0]
        return super().call_method(target, args, kwargs)


_CHECKPOINT = "tag_activation_checkpoint"
_KNOWN = ("autograd_function_apply", _CHECKPOINT)
"""Dynamo's own ops that can be captured."""

_INFERENCE = "_enter_inference_mode"
"""What Dynamo has in a graph for ``torch.inference_mode``, whose tensors autograd knows nothing of."""


def as_it_is(graph: fx.GraphModule) -> Callable[..., Any]:
    """What computes a graph without a program, with eager mode's gradients.

    Where Dynamo has put a checkpointed body into one op, that op by itself draws other random numbers in backward.
    """
    if any(str(node.target) == _CHECKPOINT for node in graph.graph.nodes):
        return _NodeByNode(graph, None).run
    return graph.forward  # hooks of all modules have acted already


def _refuse_unknown(graph: fx.GraphModule, title: str) -> None:
    """Raise a ``CaptureError`` for calls that do more than compute: Dynamo has ops of its own for hooks and others."""
    for node in graph.graph.nodes:
        own = isinstance(node.target, _torch.HigherOrderOperator) and str(node.target) not in _KNOWN
        own = own or getattr(node.target, "__name__", "") == _INFERENCE
        if own or (node.op == "call_method" and str(node.target).startswith("register_")):
            raise CaptureError(f"a part of {title} uses {getattr(node.target, '__name__', node.target)}")


def title_of(model: nn.Module) -> str:
    """Whose program it is that is captured from ``model``, for people: the name of the class that users know."""
    return cut_of(model).title if isinstance(model, GraphPart) else type(model).__name__


def graph_form(graph: fx.GraphModule) -> list[Any]:
    """Each node: what it calls, with what, and of which module of the model; nodes stand as their places.

    Functions, tensors and numbers stand as they are.
    """
    places = {node: place for place, node in enumerate(graph.graph.nodes)}
    return [
        [node.op, _target(graph, node), _plain(node.args, places), _plain(node.kwargs, places), _modules(node)]
        for node in graph.graph.nodes
    ]


def _target(graph: fx.GraphModule, node: fx.Node) -> Any:
    if node.op == "get_attr":
        value = operator.attrgetter(str(node.target))(graph)
        return graph_form(value) if isinstance(value, fx.GraphModule) else value
    if isinstance(node.target, _torch.HigherOrderOperator):
        return str(node.target)
    return "" if node.op in ("placeholder", "output") else node.target


def _plain(value: Any, places: Mapping[fx.Node, int]) -> Any:
    if isinstance(value, fx.Node):
        return ("node", places[value])
    if isinstance(value, slice):
        return ("slice", *(_plain(part, places) for part in (value.start, value.stop, value.step)))
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *(_plain(item, places) for item in value)]
    if isinstance(value, Mapping):
        return {name: _plain(item, places) for name, item in value.items()}
    return value


def _modules(node: fx.Node) -> list[str]:
    """The paths of the modules that a call is from, which passes find tensors by."""
    return [str(path) for path, _ in (node.meta.get("nn_module_stack") or {}).values()]


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
