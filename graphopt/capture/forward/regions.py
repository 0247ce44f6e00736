"""What a model does for itself while it is captured: names, checkpointed regions, autograd functions, gradients.

A flat exported graph → one whose regions, under autocast or without gradients, are calls of bodies of their own.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from graphopt import _torch
from graphopt.capture.call.source_lines import user_frame
from graphopt.capture.forward.inner_gradients import refused_inside
from graphopt.errors import CaptureError, GraphBreakError
from graphopt.ir.names import add_name, identifier
from graphopt.ir.ops import schema

__all__ = ["REGION_KEY", "nest_regions", "observe", "refuse_other_numbers"]

_WRITABLE = (torch.Tensor, str, int, float, bool, complex, torch.dtype, torch.device, torch.memory_format, type(None))
"""What an argument of a call in a graph may be."""

REGION_KEY = "graphopt_region"
"""Where a node under construction keeps the number of the ``torch.utils.checkpoint`` call it belongs to."""


@contextlib.contextmanager
def observe(model: nn.Module) -> Iterator[None]:
    """While a capture traces ``model``, name modules' outputs and mark what the model already asks for."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_module_names(model))
        stack.enter_context(_torch.intercept_checkpoint(_checkpoint_regions()))
        stack.enter_context(_torch.intercept_custom_functions(_check_function))
        stack.enter_context(_torch.intercept_inner_gradients(refused_inside))
        yield


@contextlib.contextmanager
def _module_names(model: nn.Module) -> Iterator[None]:
    """Call each module's output by the module's path; a module called again gets ``path@1``, and so on."""
    calls: Counter[str] = Counter()

    def hook_for(path: str) -> Any:
        def hook(_module: nn.Module, _args: Any, result: Any) -> None:
            number = calls[path]
            calls[path] += 1
            base = path if number == 0 else f"{path}@{number}"
            if isinstance(result, torch.Tensor):
                add_name(result, base)
                return
            leaves, _ = _torch.pytree.tree_flatten_with_path(result)
            for place, leaf in leaves:
                if isinstance(leaf, torch.Tensor):
                    add_name(leaf, base + _torch.pytree.keystr(place).replace("['", ".").replace("']", ""))

        return hook

    handles = [module.register_forward_hook(hook_for(path)) for path, module in model.named_modules() if path]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _checkpoint_regions() -> Any:
    """A context manager factory that marks every node traced inside with a region number, outermost region first."""
    numbers = itertools.count()
    depth = 0

    @contextlib.contextmanager
    def region(context_fn: Any, preserve: bool) -> Iterator[None]:
        nonlocal depth
        if context_fn is not None:
            raise CaptureError(
                f"selective checkpointing (context_fn={context_fn!r}) at {user_frame()}: its policy is written for "
                "eager's op-by-op dispatch; remove the checkpoint() call and name the tensors to keep with "
                "graphopt.passes.Recompute(checkpoints=[...])"
            )
        graph = _torch.tracing_graph()
        if graph is None:
            yield
            return
        before = set(graph.nodes)
        depth += 1
        try:
            yield
        finally:
            depth -= 1
            inside = [node for node in graph.nodes if node not in before]
            if not depth:
                number = next(numbers)
                for node in inside:
                    node.meta[REGION_KEY] = number
        if not preserve:
            refuse_other_numbers(inside)

    return region


def refuse_other_numbers(nodes: Iterable[fx.Node]) -> None:
    """Refuse random ops that eager mode runs again with other numbers, for whose results it computes gradients.

    Args:
        nodes: of a call of ``checkpoint(preserve_rng_state=False)``.

    Raises:
        GraphBreakError: naming one.
    """
    drawing = next(filter(schema.is_random, nodes), None)
    if drawing is not None:
        raise GraphBreakError(
            f"checkpoint(preserve_rng_state=False) at {user_frame()} is around {schema.op_name(drawing)}, which draws "
            "other random numbers when eager mode runs it again for backward: gradients are then those of another "
            "forward; leave preserve_rng_state at True, which costs a program nothing"
        )


def _check_function(cls: type, args: tuple[Any, ...]) -> None:
    """Refuse custom autograd functions whose arguments cannot be written into a graph."""
    for position, arg in enumerate(args):
        leaves = _torch.pytree.tree_leaves(arg)
        for leaf in leaves:
            if not isinstance(leaf, _WRITABLE):
                raise GraphBreakError(
                    f"{cls.__qualname__}.apply at {user_frame()} gets a {type(leaf).__name__} as argument {position}; "
                    "a captured autograd function takes tensors, numbers, strings, dtypes and devices: "
                    "pass what the object holds instead of the object"
                )


_EXPORTED = re.compile(r"^[pbc]_model_")
"""What ``torch.export`` puts in front of the names of parameters, buffers and constants."""


@dataclass(eq=False)
class _Region:
    """Calls that run under one setting.

    Attributes:
        grad: whether gradients are on in it.
        call: the op that runs it, and that op's arguments in front of the body; None for the whole graph.
        begin: the call that began it, where there is one that its end names.
        items: calls and regions, in order.
    """

    grad: bool
    call: tuple[Any, tuple[Any, ...]] | None = None
    begin: fx.Node | None = None
    items: list[fx.Node | _Region] = field(default_factory=list)

    def nodes(self) -> Iterator[fx.Node]:
        """All calls in it, in order."""
        for item in self.items:
            if isinstance(item, _Region):
                yield from item.nodes()
            else:
                yield item


def nest_regions(module: fx.GraphModule) -> fx.GraphModule:
    """Make calls of ``wrap_with_autocast`` and ``wrap_with_set_grad_enabled`` of what runs between their switches.

    Args:
        module: flat, with the calls that switch (``_torch.without_regions``); it stays as it is.

    Returns:
        A module with the same inputs and outputs; the graphs of other higher-order ops are nested likewise.
    """
    switches = (_torch.AUTOCAST_BEGINS, _torch.AUTOCAST_ENDS, _torch.SETS_GRAD_MODE)
    if not any(node.target in switches or node.op == "get_attr" for node in module.graph.nodes):
        return module
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    attributes: dict[str, Any] = {}
    parser = _Parser()
    for node in module.graph.nodes:
        if node.op != "output":
            parser.read(node)
    _emit(parser.whole, graph, mapping, module, attributes)
    for node in module.graph.find_nodes(op="output"):
        graph.node_copy(node, lambda n: mapping[n])
    return fx.GraphModule(attributes, graph)


class _Parser:
    """Reads a flat graph into regions."""

    def __init__(self) -> None:
        self.whole = _Region(grad=True)
        self._stack = [self.whole]

    def read(self, node: fx.Node) -> None:
        """Take the next call: one that switches, or one that belongs to the region of now."""
        now = self._stack[-1]
        if node.target is _torch.AUTOCAST_BEGINS:
            call = torch.ops.higher_order.wrap_with_autocast, tuple(node.args)
            self._open(_Region(now.grad, call, node))
        elif node.target is _torch.AUTOCAST_ENDS:
            while self._stack.pop().begin is not node.args[0]:
                pass  # a grad mode that was set inside of it, and not back
            self._set_grad(now.grad)
        elif node.target is _torch.SETS_GRAD_MODE:
            self._set_grad(bool(node.args[0]))
        else:
            now.items.append(node)

    def _open(self, region: _Region) -> None:
        self._stack[-1].items.append(region)
        self._stack.append(region)

    def _set_grad(self, enabled: bool) -> None:
        now = self._stack[-1]
        if enabled == now.grad:
            return
        if now.call is not None and now.begin is None:
            self._stack.pop()  # back to the mode around this region
        else:
            self._open(_Region(enabled, (torch.ops.higher_order.wrap_with_set_grad_enabled, (enabled,))))


def _emit(
    region: _Region,
    graph: fx.Graph,
    mapping: dict[fx.Node, fx.Node],
    module: fx.GraphModule,
    attributes: dict[str, Any],
) -> None:
    """Write the calls of a region into a graph, and what they refer to into ``attributes``."""
    for item in region.items:
        if isinstance(item, _Region):
            _emit_body(item, graph, mapping, module, attributes)
        elif item.op != "get_attr":
            for source in item.all_input_nodes:
                if source.op == "get_attr" and source not in mapping:
                    mapping[source] = graph.node_copy(source)
                    value = getattr(module, str(source.target))
                    nested = isinstance(value, fx.GraphModule)
                    attributes[str(source.target)] = nest_regions(value) if nested else value
            mapping[item] = graph.node_copy(item, lambda n: mapping[n])


def _emit_body(
    region: _Region,
    graph: fx.Graph,
    mapping: dict[fx.Node, fx.Node],
    module: fx.GraphModule,
    attributes: dict[str, Any],
) -> None:
    inside = dict.fromkeys(node for node in region.nodes() if node.op != "get_attr")
    if not inside:
        return
    read = dict.fromkeys(source for node in inside for source in node.all_input_nodes)
    sources = [source for source in read if source not in inside and source.op != "get_attr"]
    results = [node for node in inside if any(user not in inside for user in node.users)]
    body, inner, nested = fx.Graph(), dict[fx.Node, fx.Node](), dict[str, Any]()
    for source in sources:
        inner[source] = body.placeholder(identifier(_EXPORTED.sub("", source.name)))
        inner[source].meta = {"val": source.meta.get("val")}
    _emit(region, body, inner, module, nested)
    body.output(tuple(inner[node] for node in results))
    name = next(name for name in (f"region_{i}" for i in range(len(attributes) + 1)) if name not in attributes)
    attributes[name] = fx.GraphModule(nested, body)
    assert region.call is not None
    target, settings = region.call
    inputs = [mapping[source] for source in sources]
    call = graph.call_function(target, (*settings, graph.get_attr(name), *inputs))
    call.meta["val"] = tuple(node.meta.get("val") for node in results)
    for place, node in enumerate(results):
        mapping[node] = graph.call_function(operator.getitem, (call, place))
        mapping[node].meta = dict(node.meta)
