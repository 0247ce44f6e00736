"""Calls of ops seen from below: which ops reach the device, and which ops a composite op is made of.

Watches calls with a mode of ``torch.utils._python_dispatch``, takes composite ops apart with their own ``decompose``,
and silences the log of ``torch._subclasses.fake_tensor``, which has no public switch.

Calling a function on tensors of a class with ``__torch_function__`` as if they were plain ones.

Uses ``torch._C.DisableTorchFunctionSubclass``, which torch's own documentation of subclasses uses too.

Which ops there are, and which overload a call means: ``aten.mul`` of a tensor and a number is ``aten.mul.Scalar``.

Private: ``torch._C._jit_resolve_packet``, which asks torch's own argument parser, and the registries of ops.

What torch's dispatcher has registered for an op: autocast's rules, and whether it is made of other ops.

Asks ``torch._C`` for the dispatcher's tables, which is the only place that lists autocast's rules.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket, _higher_order_ops
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from graphopt._torch.private_names import AUTOCAST, require

__all__ = [
    "CallRecorder",
    "OpOverloadPacket",
    "autocast_operators",
    "call_plainly",
    "has_autocast_rule",
    "higher_order_ops",
    "is_composite",
    "is_registered",
    "parts_of",
    "qualified_name",
    "refusals_expected",
    "resolve_overload",
]


class CallRecorder(TorchDispatchMode):
    """While it is active, adds each op that reaches the device to ``calls``, with its arguments.

    Questions about a tensor's device are left out. With ``run=False`` casts alone are run; the first other op is added,
    and ``StopIteration`` raised.
    """

    def __init__(self, calls: list[tuple[OpOverload, tuple[Any, ...], dict[str, Any]]], *, run: bool = True) -> None:
        super().__init__()
        self.calls = calls
        self._run = run

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.prim.device.default:
            self.calls.append((func, args, dict(kwargs or {})))
            if not self._run and func is not torch.ops.aten._to_copy.default:
                raise StopIteration
        try:
            return func(*args, **(kwargs or {}))
        except RuntimeError as error:
            if _NOT_LINKED not in str(error):
                raise
            return _without_device(func, args, kwargs or {})


_NOT_LINKED = "not linked with support for"
"""In what torch says where it was built without a device, and an op on values without data asks for its library all the
same: what writes running statistics does."""


def _without_device(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The results of an op on values without data, by its kernel for no device."""
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]

    def placed(device: torch.device | str) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)

    args, kwargs = pytree.tree_map_only(torch.Tensor, placed("meta"), (args, kwargs))
    return pytree.tree_map_only(torch.Tensor, placed(tensors[0].device), func(*args, **kwargs))


_REFUSALS = [
    logging.getLogger(f"torch.{name}") for name in ("_subclasses.fake_tensor", "fx.experimental.symbolic_shapes")
]


@contextlib.contextmanager
def refusals_expected() -> Iterator[None]:
    """While calls are tried that may be refused, keep torch from logging each refusal as an error or a warning."""
    saved = [logger.disabled for logger in _REFUSALS]
    for logger in _REFUSALS:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in zip(_REFUSALS, saved, strict=True):
            logger.disabled = disabled


def parts_of(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[fx.Graph, list[int]]:
    """The ops that a composite op is made of, one level down, as a graph.

    Args:
        op: for which ``is_composite`` holds.
        args: fake tensors, other values, and lists of them.
        kwargs: the same by keyword.

    Returns:
        A graph with one placeholder for each distinct tensor argument, and, for each tensor argument in order, the
        number of its placeholder.
    """
    leaves, structure = pytree.tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    distinct = list({id(tensor): tensor for tensor in tensors}.values())
    numbers = {id(tensor): number for number, tensor in enumerate(distinct)}

    def call(given: list[torch.Tensor]) -> Any:
        values = [given[numbers[id(leaf)]] if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        inner_args, inner_kwargs = pytree.tree_unflatten(values, structure)
        return op(*inner_args, **inner_kwargs)

    traced = make_fx(call, decomposition_table={op: op.decompose}, pre_dispatch=True)(distinct)
    return traced.graph, [numbers[id(tensor)] for tensor in tensors]


def call_plainly(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call a function of torch; ``__torch_function__`` of its arguments is not asked."""
    with torch._C.DisableTorchFunctionSubclass():
        return function(*args, **kwargs)


def resolve_overload(packet: OpOverloadPacket, args: Sequence[Any], kwargs: Mapping[str, Any]) -> OpOverload:
    """The overload of ``packet`` that takes these arguments.

    Raises:
        RuntimeError: where none does, with the schemas that there are.
    """
    name = torch._C._jit_resolve_packet(packet._qualified_op_name, *args, **kwargs)
    overload: OpOverload = getattr(packet, name or "default")
    return overload


def is_registered(name: str) -> bool:
    """Whether an op is registered under a qualified name such as ``aten::mul``; nothing is loaded to find out."""
    return bool(torch._C._jit_get_schemas_for_operator(name))


def higher_order_ops() -> dict[str, HigherOrderOperator]:
    """The ops that take functions, by their names."""
    return dict(_higher_order_ops)


def has_autocast_rule(op: OpOverload, device: str) -> bool:
    """Whether ``torch.autocast`` has a rule of its own for an op on a device type (``cpu``, ``cuda``)."""
    require(AUTOCAST)
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), _autocast_key(device))


def is_composite(op: OpOverload) -> bool:
    """Whether an op is defined by other ops, for which autocast may have rules."""
    require(AUTOCAST)
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")


def qualified_name(op: OpOverload) -> str:
    """The name of an op with namespace and overload: ``aten::softmax.int``."""
    return op.name()


def autocast_operators(device: str) -> list[OpOverload]:
    """Every op for which ``torch.autocast`` has a rule on a device type, by name."""
    require(AUTOCAST)
    return [
        _operator(name)
        for name in sorted(torch._C._dispatch_get_all_op_names())
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, _autocast_key(device))
    ]


def _autocast_key(device: str) -> str:
    """The name of the dispatch key under which autocast's rules for a device type are registered."""
    return f"Autocast{device.upper()}"


def _operator(qualified: str) -> OpOverload:
    """The op of a name with namespace and overload."""
    namespace, _, rest = qualified.partition("::")
    name, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), name)
    return getattr(packet, overload or "default")
