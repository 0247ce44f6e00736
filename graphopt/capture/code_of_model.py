"""What the code of a model, and of a loss around it, reads and may change: found once for each capture."""

from __future__ import annotations

import types
from collections.abc import Collection, Iterator
from typing import NamedTuple

from torch import nn

from graphopt.capture.followed_code import CodeFollower
from graphopt.capture.found_variables import FoundVariables
from graphopt.capture.variables import Variable

__all__ = ["Reached", "found_by", "reached_by"]


class Reached(NamedTuple):
    """What code may change in Python.

    Attributes:
        objects: containers, objects, classes and modules, by names for people.
        variables: that functions set or read.
        iterators: names of those that functions may take from.
    """

    objects: list[tuple[str, object]]
    variables: list[Variable]
    iterators: list[str]


def found_by(model: nn.Module, called: object, changing: Collection[str] = ()) -> FoundVariables:
    """What the code of a model, and of a function that is captured around it, reads.

    Args:
        model: that is captured.
        called: a function that is captured around it, a loss for instance; None for the model alone.
        changing: what installed libraries read and change themselves at each call, by names for people: left out.
    """
    follower = CodeFollower(model)
    for module in _one_of_each(model):
        follower.module(module)
    if isinstance(called, types.FunctionType):
        follower.method(called, model)  # its first argument
    elif called is not None:
        follower.call(called)
    follower.follow()
    follower.libraries.note(changing)
    return follower.found


def reached_by(model: nn.Module, called: object) -> Reached:
    """What code may change in Python outside of the model's modules, by names for people.

    Args:
        model: that is captured.
        called: a function that is captured around it, a loss for instance; None for the model alone.
    """
    found = found_by(model, called)
    return Reached(found.reached, found.variables, found.iterators)


def _one_of_each(model: nn.Module) -> Iterator[nn.Module]:
    """Modules whose code or hooks are the user's; one of each class that has nothing of its own."""
    classes: set[type] = set()
    for module in model.modules():
        own = vars(module)
        held = any(callable(value) or isinstance(value, types.ModuleType) for value in own.values())
        special = own["_forward_hooks"] or own["_forward_pre_hooks"] or held
        if special or type(module) not in classes:
            classes.add(type(module))
            yield module
