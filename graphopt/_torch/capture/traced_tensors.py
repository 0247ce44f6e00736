"""Which node of the graph under construction produced a tensor, and what can be known of it while tracing.

Reads the proxies that ``torch.fx.experimental.proxy_tensor`` attaches to tensors, under the functional wrappers of
``torch._subclasses``: tracers tell nobody else. To compute a value in the middle of tracing, the modes of
``torch.utils._python_dispatch`` are set aside.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["is_written", "known_value", "outside_of_tracing", "traced_node", "tracing_graph"]


def tracing_graph() -> fx.Graph | None:
    """The graph that the innermost tracer is building, or None outside of tracing."""
    mode = get_proxy_mode()
    return None if mode is None else mode.tracer.graph


def traced_node(tensor: torch.Tensor) -> fx.Node | None:
    """The node that stands for ``tensor`` in the graph under construction, or None where it is not traced."""
    mode = get_proxy_mode()
    if mode is None:
        return None
    if isinstance(tensor, FunctionalTensor):
        torch._sync(tensor)  # pyright: ignore[reportPrivateImportUsage]
        tensor = torch._from_functional_tensor(tensor.elem)  # pyright: ignore[reportPrivateImportUsage]
    slot = get_proxy_slot(tensor, mode.tracer, default=None)
    if slot is None:
        return None
    proxy = getattr(slot, "proxy", slot)
    return proxy.node if isinstance(proxy, fx.Proxy) else None


@contextlib.contextmanager
def outside_of_tracing() -> Iterator[None]:
    """Compute with data in the middle of tracing: nothing of it becomes part of the graph."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield


def known_value(tensor: torch.Tensor) -> torch.Tensor | None:
    """What a tensor that is being traced holds; None where an input, a parameter, a size or a write reaches it."""
    node = traced_node(tensor)
    if node is None:
        return None
    with outside_of_tracing():
        try:
            return _evaluate(node, {})
        except LookupError:
            return None


def _evaluate(node: fx.Node, known: dict[fx.Node, Any]) -> Any:
    """The value of a node.

    Raises:
        LookupError: where an input reaches it, or randomness, or what it is made of is written to.
    """

    def value(argument: Any) -> Any:
        return _evaluate(argument, known) if isinstance(argument, fx.Node) else argument

    if node not in known:
        if not isinstance(node.target, OpOverload) or torch.Tag.nondeterministic_seeded in node.target.tags:
            raise LookupError(f"{node} is not computed from constants")
        if is_written(node):
            raise LookupError(f"{node} is written to")
        args, kwargs = map_aggregate((node.args, node.kwargs), value)
        known[node] = node.target(*args, **kwargs)
    return known[node]


def is_written(node: fx.Node) -> bool:
    """Whether an op in the graph so far writes to a value, or to a view of it."""
    ops = [(user, user.target._schema) for user in node.users if isinstance(user.target, OpOverload)]
    return any(
        schema.is_mutable or (any(result.alias_info for result in schema.returns) and is_written(user))
        for user, schema in ops
    )
