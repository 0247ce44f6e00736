"""Which node of the graph under construction produced a tensor, and what can be known of it while tracing.

Reads the proxies that ``torch.fx.experimental.proxy_tensor`` attaches to tensors, under the functional wrappers of
``torch._subclasses``: tracers tell nobody else. To compute a value in the middle of tracing, the modes of
``torch.utils._python_dispatch`` are set aside.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["is_known_zero", "traced_node", "tracing_graph"]


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


def is_known_zero(tensor: torch.Tensor) -> bool | None:
    """Whether a tensor that is being traced holds zeros only; None where an input or a parameter reaches it."""
    mode = get_proxy_mode()
    slot = None if mode is None else get_proxy_slot(tensor, mode.tracer, None)
    proxy = getattr(slot, "proxy", None)
    if not isinstance(proxy, fx.Proxy):
        return None
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        try:
            return not _evaluate(proxy.node, {}).any().item()
        except LookupError:
            return None


def _evaluate(node: fx.Node, known: dict[fx.Node, Any]) -> Any:
    """The value of a node.

    Raises:
        LookupError: where an input reaches it, or randomness.
    """

    def value(argument: Any) -> Any:
        return _evaluate(argument, known) if isinstance(argument, fx.Node) else argument

    if node not in known:
        if not isinstance(node.target, OpOverload) or torch.Tag.nondeterministic_seeded in node.target.tags:
            raise LookupError(f"{node} is not computed from constants")
        args, kwargs = map_aggregate((node.args, node.kwargs), value)
        known[node] = node.target(*args, **kwargs)
    return known[node]
