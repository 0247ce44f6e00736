"""What decides what a function computes and what torch's Dynamo does not look at: looked at here, behind both doors.

Dynamo compares what it has read with what is there at each call, and cuts anew where that is something else. It takes
for granted that classes keep their methods and that nobody adds a hook to all modules; it compares a dictionary but for
its order, and a number but for the sign of zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, MappingProxyType
from typing import Any

import torch
from torch import fx, nn

from graphopt import _torch
from graphopt.capture.guards.code_analysis import found_by
from graphopt.capture.guards.variables import MISSING

__all__ = ["Unguarded", "decides_on_masks"]

_MASKS = "transformers/masking_utils.py"


class Unguarded:
    """Has Dynamo look at more, for the graphs of one model or function.

    A method that is called on tensors is looked at in all graphs from the first one on that calls it: where another
    function is in its place, the graph that Dynamo then makes does not call it.
    """

    def __init__(self) -> None:
        self._of_tensors = {"__torch_function__"}

    def guard(self, graph: fx.GraphModule, model: nn.Module, function: object) -> None:
        """While Dynamo hands over a graph: have it cut anew where something else is there at a later call.

        Args:
            graph: as Dynamo made it.
            model: that is cut, or an empty one.
            function: that is cut where no model is.
        """
        self._of_tensors |= {str(node.target) for node in graph.graph.nodes if node.op == "call_method"}
        self._of_tensors |= {name for name, value in vars(torch.Tensor).items() if _is_of_others(value)}
        classes = {type(module) for module in model.modules()} | set(_classes_in(graph))
        lines = dict.fromkeys(kind for each in classes for kind in each.__mro__ if kind is not object)
        slots = [(vars(kind), name, value) for kind in lines for name, value in vars(kind).items() if _is_code(value)]
        slots += [(vars(torch.Tensor), name, vars(torch.Tensor).get(name, MISSING)) for name in self._of_tensors]
        slots += [slot for slot in found_by(model, function).places if _is_taken_for_granted(*slot)]
        hooks = _hooks_of_all_modules()

        def make(local: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], bool]:
            orders = {name: list(value) for name, value in local.items() if type(value) is dict and len(value) > 1}
            zeros = {name: math.copysign(1.0, value) for name, value in local.items() if _is_zero(value)}

            def same(now: Mapping[str, Any]) -> bool:
                return (
                    all(owner.get(name, MISSING) is value for owner, name, value in slots)
                    and _hooks_of_all_modules() == hooks
                    and not any(_in_another_order(now.get(name), order) for name, order in orders.items())
                    and all(
                        math.copysign(1.0, now[name]) == sign for name, sign in zeros.items() if _is_zero(now.get(name))
                    )
                )

            return same

        _torch.guard_by(make, "graphopt: methods, hooks of all modules, orders of keywords, signs of zero")


def _hooks_of_all_modules() -> tuple[Any, ...]:
    return _torch.has_global_backward_hooks(), _torch.global_module_hooks()


def _is_code(value: object) -> bool:
    return isinstance(value, (FunctionType, property, classmethod, staticmethod))


def _is_taken_for_granted(owner: Any, _name: str, value: object) -> bool:
    """Whether Dynamo has not looked at what code reads: code of classes, and nothing where something may come to be.

    Not where that is an object's own attributes, which the guard would keep in memory with all that they hold.
    """
    of_class = isinstance(owner, MappingProxyType)
    of_file = isinstance(owner, dict) and "__builtins__" in owner
    return (value is MISSING and (of_class or of_file)) or (of_class and _is_code(value))


def _is_of_others(value: object) -> bool:
    return isinstance(value, FunctionType) and not value.__module__.startswith("torch")


def _is_zero(value: object) -> bool:
    return type(value) is float and value == 0.0


def _in_another_order(value: object, order: list[Any]) -> bool:
    """Whether a dictionary has the same keys in another order."""
    return type(value) is dict and len(value) == len(order) and list(value) != order and set(value) == set(order)


def _classes_in(graph: fx.GraphModule) -> Iterator[type]:
    """The classes of the modules whose code has made a graph."""
    for node in graph.graph.nodes:
        for _, kind in (node.meta.get("nn_module_stack") or {}).values():
            if isinstance(kind, type) and issubclass(kind, nn.Module):
                yield kind


def decides_on_masks(graph: fx.GraphModule) -> bool:
    """Whether a graph has a mask that a model of ``transformers`` leaves out in eager mode where it hides nothing."""
    return any(_MASKS in str(node.meta.get("stack_trace") or "").replace("\\", "/") for node in graph.graph.nodes)
