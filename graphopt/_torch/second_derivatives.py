"""Second derivatives through a compiled callable, which torch refuses in words of its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from graphopt._torch.custom_functions import apply_function
from graphopt.errors import CaptureError

__all__ = ["explain_second_derivatives"]

_HOOK = "_double_backward"
"""The method of torch's autograd functions around compiled callables that connects first derivatives to an error."""

_DEEPEST = 4
"""How many views may lie between a result and the callable that made it."""


class _Refused(torch.autograd.Function):
    """The identity, without a derivative."""

    @staticmethod
    def forward(ctx: Any, message: str, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.message = message
        return tuple(gradient.view_as(gradient) for gradient in gradients)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise CaptureError(ctx.message)


def explain_second_derivatives(results: Iterable[Any], message: str) -> None:
    """Let the second derivative of results of a compiled callable be a ``CaptureError`` with a message.

    First derivatives are not touched, taken with ``create_graph=True`` or not. Does nothing where torch has no such
    method; its own error stays then.
    """
    made = next((made for result in results if (made := _made_by(result)) is not None), None)
    if made is None:
        return
    connect = getattr(made, _HOOK)

    def connected(ctx: Any, run: Any, arguments: list[Any]) -> Any:
        gradients = connect(ctx, run, arguments)
        places = [place for place, gradient in enumerate(gradients) if isinstance(gradient, torch.Tensor)]
        refused = apply_function(_Refused, message, *(gradients[place] for place in places))
        found = list(gradients)
        for place, gradient in zip(places, refused, strict=True):
            found[place] = gradient
        return tuple(found)

    setattr(made, _HOOK, staticmethod(connected))


def _made_by(result: Any) -> Any:
    """The autograd function that made a result; None for one that is not of a compiled callable."""
    node = result.grad_fn if isinstance(result, torch.Tensor) else None
    for _ in range(_DEEPEST):
        made = getattr(type(node), "_forward_cls", None)
        if made is not None and hasattr(made, _HOOK):
            return made
        following = getattr(node, "next_functions", ())
        node = following[0][0] if following else None
    return None
