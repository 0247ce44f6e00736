"""The backward of a compiled callable: what is told before it, and second derivatives, which torch refuses.

torch connects first derivatives to its error by a tensor of its own, and to none of the callable's arguments. Where
somebody asks for the second derivative by one of these and allows for none (``allow_unused=True``, as
``torch.autograd.functional.hessian`` does), it comes out as zero. So they are connected to the arguments here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from graphopt._torch.capture.custom_functions import apply_function
from graphopt.errors import CaptureError

__all__ = ["before_compiled_backward", "connect_second_derivatives", "explain_second_derivatives"]

_HOOK = "_double_backward"
"""The method of torch's autograd functions around compiled callables that connects first derivatives to an error."""

_ARGUMENTS = "_graphopt_arguments"
"""Where a node of autograd's graph keeps what second derivatives are connected to."""

_DEEPEST = 4
"""How many views may lie between a result and the callable that made it."""


class _Refused(torch.autograd.Function):
    """The identity of the first tensors, without a derivative by any."""

    @staticmethod
    def forward(ctx: Any, message: str, gradients: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.message = message
        return tuple(gradient.view_as(gradient) for gradient in tensors[:gradients])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise CaptureError(ctx.message)


class _Behind(torch.autograd.Function):
    """An empty tensor that is behind others in autograd's graph and keeps none of their memory."""

    @staticmethod
    def forward(ctx: Any, first: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return first.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise AssertionError("behind a tensor whose derivative is refused")


def connect_second_derivatives(results: Iterable[Any], resident: Sequence[Any], given: Sequence[Any]) -> None:
    """Let second derivatives of results of a compiled callable depend on the callable's arguments.

    Args:
        results: of one call.
        resident: arguments that are kept in memory anyway.
        given: the others, of which nothing is kept.
    """
    node = _compiled_node(results)
    if node is not None:
        made = [tensor for tensor in given if isinstance(tensor, torch.Tensor) and tensor.requires_grad]
        behind = [apply_function(_Behind, *made)] if made else []
        setattr(node, _ARGUMENTS, (*resident, *behind))


def explain_second_derivatives(results: Iterable[Any], message: str) -> None:
    """Let the second derivative of results of a compiled callable be a ``CaptureError`` with a message.

    First derivatives are not touched, taken with ``create_graph=True`` or not. Does nothing where torch has no such
    method; its own error stays then.
    """
    node = _compiled_node(results)
    if node is None:
        return
    made = type(node)._forward_cls
    connect = getattr(made, _HOOK)

    def connected(ctx: Any, run: Any, arguments: list[Any]) -> Any:
        gradients = connect(ctx, run, arguments)
        places = [place for place, gradient in enumerate(gradients) if isinstance(gradient, torch.Tensor)]
        known = [each for each in getattr(ctx, _ARGUMENTS, ()) if isinstance(each, torch.Tensor) and each.requires_grad]
        refused = apply_function(_Refused, message, len(places), *(gradients[place] for place in places), *known)
        found = list(gradients)
        for place, gradient in zip(places, refused, strict=True):
            found[place] = gradient
        return tuple(found)

    setattr(made, _HOOK, staticmethod(connected))


def before_compiled_backward(results: Iterable[Any], call: Callable[[], None]) -> None:
    """Call something whenever the backward of a compiled callable is about to run, in the thread that runs it.

    Does nothing where the results are of no such callable.
    """
    node = _compiled_node(results)
    if node is not None:
        node.register_prehook(lambda _: call())


def _compiled_node(results: Iterable[Any]) -> Any:
    """The node of autograd's graph that stands for a compiled callable; None where no result is of one."""
    return next((node for result in results if (node := _made_by(result)) is not None), None)


def _made_by(result: Any) -> Any:
    """The node of the compiled callable that made a result; None for one that is not of such a callable."""
    node = result.grad_fn if isinstance(result, torch.Tensor) else None
    for _ in range(_DEEPEST):
        made = getattr(type(node), "_forward_cls", None)
        if made is not None and hasattr(made, _HOOK):
            return node
        following = getattr(node, "next_functions", ())
        node = following[0][0] if following else None
    return None
