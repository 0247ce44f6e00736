"""A ``forward`` that is set on a model, in place of its class's: `model.forward = ...`, as Accelerate and TRL do.

Such a function may run around the one before it, as autocast does, or in place of it, as a head that gives log
probabilities instead of logits. Either way it is what a call of the model computes, and so what is captured.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

__all__ = ["entry", "of_any_model", "what_runs"]

Forward = Callable[..., Any]
_RUNS = "_graphopt_runs"


def entry(given: Forward, start: Callable[[Forward, Any, tuple[Any, ...], dict[str, Any]], Any]) -> Forward:
    """A ``forward`` under the name and with the signature of a given one, which hands each call to ``start``.

    Args:
        given: a function of a model and the arguments of a call.
        start: gets that, the model, and the call.
    """

    @functools.wraps(given)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return start(given, self, args, kwargs)

    del forward.__wrapped__  # who unwraps an optimized model must stop here
    forward.__signature__ = inspect.signature(given)  # type: ignore[attr-defined]
    setattr(forward, _RUNS, (forward, given))
    return forward


def _given(forward: object) -> Forward | None:
    """What an entry runs, bound or not; None for any other function, also where it wraps one and has its attributes."""
    function = getattr(forward, "__func__", forward)
    itself, given = getattr(function, _RUNS, (None, None))
    return given if itself is function else None


def what_runs(model: nn.Module) -> Forward:
    """What calls of an optimized model run, as a function of a model: set on the object, or of its class."""
    given = _given(model.forward)
    assert given is not None, "the forward of an optimized model is an entry"
    return given


def of_any_model(model: nn.Module, own: Forward) -> Forward:
    """A ``forward`` that was set on a model as a function of a model.

    One that is bound to this model, or to one that shares all attributes with it, is bound to what it is called with
    instead, whose training flag counts.
    """
    if isinstance(own, MethodType) and _is_the_same(own.__self__, model):
        return own.__func__
    bound_first = isinstance(own, functools.partial) and bool(own.args) and _is_the_same(own.args[0], model)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if isinstance(own, functools.partial) and bound_first:
            return own.func(self, *own.args[1:], *args, **{**own.keywords, **kwargs})
        return own(*args, **kwargs)

    functools.update_wrapper(forward, own)
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    known = inspect.signature(own)
    forward.__signature__ = known.replace(parameters=[first, *known.parameters.values()])  # type: ignore[attr-defined]
    return forward


def _is_the_same(one: object, model: nn.Module) -> bool:
    return isinstance(one, nn.Module) and vars(one) is vars(model)
