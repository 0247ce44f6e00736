"""The autocast around a caller: told, kept out of what graphopt does itself, and put into what is captured."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from graphopt.ir.node import info, set_info

__all__ = ["autocast_state", "is_around", "mark_around", "plain_precision", "under_autocast"]

_DEVICES = ("cpu", "cuda")


def autocast_state() -> tuple[tuple[str, torch.dtype], ...]:
    """The devices for which autocast is on around the caller, with its dtype."""
    return tuple((device, torch.get_autocast_dtype(device)) for device in _DEVICES if torch.is_autocast_enabled(device))


def plain_precision() -> contextlib.AbstractContextManager[None]:
    """Turn autocast off: the casts it asks for are in the captured program."""
    return _without_autocast() if autocast_state() else contextlib.nullcontext()


@contextlib.contextmanager
def _without_autocast() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for device, _ in autocast_state():
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


def under_autocast(call: Callable[..., Any]) -> Callable[..., Any]:
    """``call`` inside of the autocast that is on now, so that a capture records it as a region of the program."""
    states = autocast_state()
    if not states:
        return call

    def cast(*args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for device, dtype in states:
                stack.enter_context(torch.autocast(device, dtype=dtype))
            return call(*args, **kwargs)

    return cast


_AROUND = "captured under autocast"
"""The origin of the regions that a capture under autocast consists of."""


def is_around(node: fx.Node) -> bool:
    """Whether a node is a region under autocast that a capture has put around everything, not one of the model's."""
    return node.target is torch.ops.higher_order.wrap_with_autocast and info(node).origin == _AROUND


def mark_around(graph: fx.Graph, attributes: Mapping[str, fx.GraphModule], depth: int) -> None:
    """Mark the outermost regions of a program just captured, and those inside of them, ``depth`` levels in all."""
    for node in graph.nodes if depth else ():
        if node.target is torch.ops.higher_order.wrap_with_autocast:
            set_info(node, replace(info(node), origin=_AROUND))
            body = attributes[str(node.args[4].target)]
            mark_around(body.graph, dict(body.named_children()), depth - 1)  # type: ignore[arg-type]
