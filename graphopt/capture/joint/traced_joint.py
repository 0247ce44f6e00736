"""A forward program run under torch's joint trace, and that trace read back: which call comes from which.

Runs a forward program node by node while torch traces it, so that each op is what eager mode makes of it.

Traced, some calls are others than in eager mode: torch writes in-place calls as calls that return a new tensor, which
may be laid out otherwise, and takes other formulas for gradients where it cannot look at values.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.fx import traceback

from graphopt import _torch
from graphopt.capture.call.tensor_parallel_form import DistributedCall
from graphopt.capture.forward.inner_gradients import differentiated_by
from graphopt.capture.joint.device_kernels import on_device
from graphopt.capture.joint.traced_modules import modules_noted
from graphopt.ir.node import InputSpec, NodeInfo, info
from graphopt.ir.ops import schema
from graphopt.ir.ops.layers.dropout import prod_backward
from graphopt.ir.ops.values import is_dense
from graphopt.ir.program import Program

__all__ = [
    "HOLDS",
    "PLACE",
    "Interpreter",
    "Runner",
    "TracedJoint",
    "base_name",
    "is_seen_through",
    "mark_of",
    "marked",
    "read_trace",
]

_MARK = "graphopt"
"""Where joint nodes get the place of the forward node they were traced under (in ``meta["custom"]``)."""

_IDENTITIES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
"""Ops that autograd's bookkeeping leaves behind; in a program they are their argument."""


class Runner(nn.Module):
    """Runs a forward program node by node, so that every op traced underneath knows which node it came from.

    Attributes:
        keys: by the name of a placeholder, under which name this module has its tensor: one for each tensor.
        holder: what that is.
        inside: by the mark of a place inside of a node, what is known of that place (``modules_noted``).
    """

    def __init__(self, program: Program, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self._module = [_as_module(program)]
        self.keys: dict[str, str] = {}
        self.holder: dict[str, InputSpec] = {}
        self.inside: dict[str, NodeInfo] = {}
        known: dict[int, str] = {}
        for node, spec in zip(program.placeholders, program.inputs, strict=True):
            if spec.role == "input":
                continue
            tensor = program.constants[node.name] if spec.role == "constant" else tensors[spec.target]
            key = known.setdefault(id(tensor), f"t{len(known)}")
            self.keys[node.name] = key
            if key in self.holder:
                continue
            self.holder[key] = spec
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(key, tensor)
            else:
                self.register_buffer(key, tensor)

    def forward(self, *inputs: torch.Tensor) -> tuple[Any, ...]:
        """What the program returns for its inputs that are no tensors of this module."""
        supply = iter(inputs)
        module = self._module[0]
        values = [
            getattr(self, self.keys[node.name]) if node.name in self.keys else next(supply)
            for node in module.graph.find_nodes(op="placeholder")
        ]
        with traceback.preserve_node_meta():
            return tuple(Interpreter(module, known=self.inside).run(*values))


def _as_module(program: Program) -> fx.GraphModule:
    """The program as a module whose every node, also in sub-graphs, carries the mark of where it stands."""
    copy = program.copy()
    module = fx.GraphModule(copy.attributes, copy.graph)
    for mark, node in marked(module.graph, copy.attributes):
        node.meta["custom"] = {_MARK: mark}
    return module


def marked(graph: fx.Graph, attributes: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, fx.Node]]:
    """Every node of a graph and of its sub-graphs, with its place: ``name``, ``sub/name``, ``sub/sub/name``."""
    for node in graph.nodes:
        yield prefix + node.name, node
    for name, body in attributes.items():
        if isinstance(body, fx.GraphModule):
            yield from marked(body.graph, dict(body.named_children()), f"{prefix}{name}/")


@dataclass(frozen=True)
class TracedJoint:
    """A joint graph as torch traced it, with what its nodes are.

    Attributes:
        graph: of torch's.
        inputs: its placeholders with what they stand for, in calling order; tensors by their keys in the ``Runner``.
        outputs: its values, likewise.
        sources: the place of the forward call that a call comes from (``marked``); empty where it is not known.
        backward: the calls of backward.
    """

    graph: fx.Graph
    inputs: Sequence[tuple[fx.Node, _torch.AotInput]]
    outputs: Sequence[tuple[Any, _torch.AotOutput]]
    sources: dict[fx.Node, str]
    backward: set[fx.Node]


def read_trace(trace: _torch.JointTrace) -> TracedJoint:
    """A trace, with what is known of its calls: by the mark of a forward call, else by autograd's number for it."""
    inputs = trace.inputs()
    backward = {node for node, role in inputs if role.kind == "tangent"}
    sources: dict[fx.Node, str] = {}
    by_sequence: dict[int, str] = {}
    begun = False
    for node in trace.graph.nodes:
        if node.op != "call_function" or node.target is torch.ops.aten._assert_tensor_metadata.default:
            continue
        mark = mark_of(node)
        if is_seen_through(node):
            sources[node] = mark
            if node.all_input_nodes[0] in backward:
                backward.add(node)
            continue
        tagged = node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")
        # torch leaves out calls that it makes when backward has ended, for gradients of another dtype
        late = tagged or any(source in backward for source in node.all_input_nodes)
        # and calls of a backward that runs a graph of its own; what stands behind the first of these belongs to them
        late |= begun and not schema.mutated_inputs(node)
        sequence = node.meta.get("seq_nr")
        sources[node] = source = mark or by_sequence.get(sequence, "")
        if late:
            backward.add(node)
        elif source and sequence is not None:
            by_sequence.setdefault(sequence, source)
        begun |= late
    return TracedJoint(trace.graph, inputs, trace.outputs(), sources, backward)


def mark_of(node: fx.Node) -> str:
    """The place of the forward call that torch noted for a call of its joint graph; empty where it noted none."""
    return str((node.meta.get("custom") or {}).get(_MARK, ""))


def is_seen_through(node: fx.Node) -> bool:
    """Whether a call of torch's joint graph is its operand, as far as a program goes."""
    return node.target in _IDENTITIES and not any(user.op == "output" for user in node.users)


def base_name(node: fx.Node) -> str:
    """The name of a node without its number."""
    return re.sub(r"_\d+$", "", node.name)


HOLDS = "graphopt_holds"
"""Where a joint node under construction gets the places of the forward nodes whose value it is."""

PLACE = "graphopt_place"
"""The attribute of an error that says which line of the user's code made the call that raised it."""

_aten = torch.ops.aten

_DROPOUTS = (
    _aten.dropout.default,
    _aten.feature_dropout.default,
    _aten.alpha_dropout.default,
    _aten.feature_alpha_dropout.default,
)
"""Ops that draw nothing where they drop nothing or all; traced, torch would copy their argument, or draw."""

_AUTOCAST = torch.ops.higher_order.wrap_with_autocast
_SET_GRAD = torch.ops.higher_order.wrap_with_set_grad_enabled
_PRODUCTS = (_aten.prod.default, _aten.prod.dim_int)

_LARGER_THAN = {_aten.maximum.default: (torch.lt, torch.gt), _aten.minimum.default: (torch.gt, torch.lt)}
"""By op: where its first argument, and where its second one, is not what it gives."""


class Interpreter(fx.Interpreter):
    """Runs a forward program, and notes on each joint node under construction which forward values it holds.

    Custom autograd functions run as themselves, with their own backward, and gradients that the model takes inside of
    forward are taken by autograd.
    """

    def __init__(self, module: fx.GraphModule, prefix: str = "", known: dict[str, NodeInfo] | None = None) -> None:
        super().__init__(module)
        self._prefix = prefix
        self._known = {} if known is None else known
        self._place = ""
        self._bodies = {id(child): name for name, child in module.named_children()}
        self._differentiated_by = differentiated_by(module)

    def _inside(self, body: fx.GraphModule) -> Interpreter:
        return Interpreter(body, f"{self._prefix}{self._bodies[id(body)]}/", self._known)

    def run_node(self, n: fx.Node) -> Any:
        """Run a node; the node that torch traces for it, or the error that it raises, says which one it was."""
        self._place = self._prefix + n.name
        try:
            result = super().run_node(n)
        except Exception as error:
            if not hasattr(error, PLACE) and n.op == "call_function":
                setattr(error, PLACE, info(n).source)
            raise
        if n in self._differentiated_by and not result.requires_grad:
            result = (result.detach() if n.op == "placeholder" else result).requires_grad_()
        if isinstance(result, torch.Tensor):
            _hold(result, self._prefix + n.name)
        return result

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an op so that what is traced is what eager mode runs."""
        if target is _torch.custom_function:
            region = _torch.region_of(args[0])
            if isinstance(region, DistributedCall):
                with modules_noted(region.model, self._place, self._known, _hold, _MARK):
                    return region(*args[1:])
            return _torch.custom_function.original(*args)
        if target is _torch.inner_gradients:
            return _torch.inner_gradients.original(*args)
        if target in (_AUTOCAST, _SET_GRAD):
            return self._region(target, args)
        if target in _DROPOUTS and (args[1] in (0, 1) or not args[2]):
            return _without_draw(*args)
        if target in _PRODUCTS:
            return _product(*args, **kwargs)
        if target in _LARGER_THAN and not all(argument.is_contiguous() for argument in args):
            return _torch.apply_function(_Extreme, target, *args)
        other = on_device(target, args, kwargs)
        if other is not None:
            return other()
        functional = _functional_form(target)
        if functional is not None and _is_laid_out_its_own_way(args[0]):
            return self._written(target, functional, args, kwargs)
        result = super().call_function(target, args, kwargs)
        return _as_kernels_lay_out(target, args, result)

    def _region(self, target: Any, args: tuple[Any, ...]) -> Any:
        """Run the calls of a region under its settings."""
        if target is _AUTOCAST:
            device, dtype, enabled, cache, body, *inputs = args
            with torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache):
                return self._inside(body).run(*inputs)
        enabled, body, *inputs = args
        with torch.set_grad_enabled(enabled):
            return self._inside(body).run(*inputs)

    def _written(self, target: Any, functional: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an op that writes to its first argument, which keeps its strides.

        torch traces it as one that returns a new tensor, whose strides may be others, or in which random numbers go
        into other places.
        """
        given: torch.Tensor = args[0]
        if target is _aten.bernoulli_.float:
            order = sorted(range(given.dim()), key=given.stride, reverse=True)
            drawn = functional(given.permute(order), *(args[1:] or (0.5,)), **kwargs)
            return given.copy_(drawn.permute([order.index(dimension) for dimension in range(given.dim())]))
        if target is _aten.dropout_.default:
            kept = 1 - args[1]
            noise = self.call_function(_aten.bernoulli_.float, (torch.empty_like(given), kept), {})
            return given.mul_(noise.div_(kept))
        with torch.no_grad():
            strides = functional(given.detach(), *args[1:], **kwargs).stride()
        if strides == given.stride():
            return super().call_function(target, args, kwargs)
        return given.copy_(self.call_function(functional, args, kwargs))


def _hold(tensor: torch.Tensor, mark: str) -> None:
    """Note on the joint node that stands for a tensor that it is the value of a place."""
    node = _torch.traced_node(tensor)
    if node is not None:
        node.meta[HOLDS] = (*node.meta.get(HOLDS, ()), mark)


def _without_draw(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """A dropout that keeps all elements, or none."""
    if p == 0 or not train:
        return x
    return torch.mul(x, torch.zeros((), dtype=x.dtype, device=x.device))


@functools.cache
def _functional_form(target: Any) -> Any:
    """The op that returns what another one writes to its first argument; None for all other ops."""
    if not isinstance(target, _torch.OpOverload):
        return None
    name, arguments = target._schema.name, target._schema.arguments
    writes = bool(arguments) and arguments[0].alias_info is not None and arguments[0].alias_info.is_write
    if target is _aten.bernoulli_.float:
        return _aten.bernoulli.p
    random = torch.Tag.nondeterministic_seeded in target.tags and target is not _aten.dropout_.default
    if random or not (name.startswith("aten::") and name.endswith("_") and writes):
        return None
    packet = getattr(_aten, name.removeprefix("aten::").removesuffix("_"), None)
    return getattr(packet, target._overloadname, None) if packet is not None else None


def _is_laid_out_its_own_way(tensor: torch.Tensor) -> bool:
    """Whether a tensor has all elements once, in another order than that of its dimensions."""
    return not tensor.is_contiguous() and is_dense(tensor)


def _as_kernels_lay_out(target: Any, args: tuple[Any, ...], result: Any) -> Any:
    """Give a result the strides that the real kernel gives it, where torch's data-less kernel says otherwise.

    BatchNorm returns a dense tensor in one of the usual memory formats; traced, it keeps a transposed input's strides,
    and what follows would take other paths than in eager mode.
    """
    if target is not torch.ops.aten.batch_norm.default or _torch.device_kind(args[0]) != "cpu":
        return result
    formats = {4: (torch.channels_last,), 5: (torch.channels_last_3d,)}.get(result.dim(), ())
    usual = any(args[0].is_contiguous(memory_format=f) for f in (torch.contiguous_format, *formats))
    return result if usual else result.contiguous()


# --- products --------------------------------------------------------------------------------------------------------


class _Product(torch.autograd.Function):
    """A product, whose backward looks for zeros as eager mode's does; traced, torch's takes the longer way always."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dims: tuple[int, bool] | None) -> torch.Tensor:
        result: torch.Tensor = _aten.prod.default(x) if dims is None else _aten.prod.dim_int(x, *dims)
        ctx.save_for_backward(x, result)
        ctx.dims = dims
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, result = ctx.saved_tensors
        dim, keepdim = ctx.dims or (None, False)
        return prod_backward(gradients[0], x, result, dim, keepdim), None


def _product(
    x: torch.Tensor, dim: int | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    """``aten::prod``."""
    x = x if dtype is None else x.to(dtype)
    dims = None if dim is None else (dim, keepdim)
    if not (x.requires_grad and torch.is_grad_enabled()):
        return _aten.prod.default(x) if dims is None else _aten.prod.dim_int(x, *dims)
    return _torch.apply_function(_Product, x, dims)


# --- maxima and minima -----------------------------------------------------------------------------------------------


class _Extreme(torch.autograd.Function):
    """The larger or smaller of two tensors, whose gradients are laid out as in eager mode.

    Eager mode writes zeros into them in place; traced, that becomes a call whose result is contiguous.
    """

    @staticmethod
    def forward(ctx: Any, op: Any, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(first, second)
        ctx.beaten = _LARGER_THAN[op]
        result: torch.Tensor = op(first, second)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        first, second = ctx.saved_tensors
        (gradient,) = gradients
        found: list[torch.Tensor | None] = []
        for beaten, needed in zip(ctx.beaten, ctx.needs_input_grad[1:], strict=True):
            shared = torch.where(first == second, gradient / 2, gradient) if needed else None
            found.append(None if shared is None else torch.where(beaten(first, second), 0.0, shared))
        return None, *found
