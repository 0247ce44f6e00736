"""What a model's Python and a loss change beside tensors while they are captured: containers, objects, variables."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from graphopt import _torch
from graphopt.capture.call.assigned_buffers import IN_PARTS
from graphopt.capture.guards.code_analysis import reached_by
from graphopt.capture.guards.code_owner import (
    GENERATORS,
    has_attributes,
    is_covered_class,
    is_iterator,
    is_of_user,
    is_of_users,
)
from graphopt.capture.guards.contents import DEEPEST, MOST_ITEMS
from graphopt.capture.guards.locations import CONTAINERS, OF_MODULES, Drawn, Kept, Named, Place
from graphopt.capture.guards.variables import Variable, variables_set
from graphopt.errors import GraphBreakError

__all__ = ["arguments_noted", "attributes_kept", "changes_noted", "reached_places"]

_MOST = 100_000
"""Items of a container that is looked at."""

_MOST_PLACES = 20_000
"""Containers and objects that are looked at."""


@contextlib.contextmanager
def changes_noted(model: nn.Module, called: object) -> Iterator[list[str]]:
    """Note what the user's code changes in Python, and leave nothing of the trace there.

    That is: containers and objects in attributes of modules, and what functions reach by global variables, closures,
    and the object whose method they are. Attributes of the model's modules are noted by who sets them.

    Containers in attributes of modules hold behind the block what they held before, so that a later call finds the
    capture. Gives a list that holds then what has changed: ``path.name``, ``log``, ``meter.sum``, and the global
    variables that ``forward`` of a module sets. Where something of the trace was put there, everything has what it had
    before, and so has it where the block fails.

    Args:
        model: that is captured.
        called: a loss around it, or None.

    Raises:
        GraphBreakError: before the block, for iterators that the code takes from; behind it, for tensors that are kept
            outside of the model, and random generators of Python or NumPy that are drawn from.
    """
    reached = reached_by(model, called)
    _refuse_iterators(reached.iterators)
    met: set[int] = set()
    inside = _kept([*_in_modules(model)], met)
    kept = [*inside, *_kept(reached.objects, met)]
    places: list[Place] = [*kept, *_named(reached.variables, kept)]
    names: list[str] = []
    with _as_before(places):
        yield names
        _refuse_draws(places)
        changed = [place for place in places if place.changes()]
        for place in places:
            if name := place.traced():
                who = "forward" if called is None else "forward or the loss"
                raise GraphBreakError(
                    f"{who} keeps tensors in {name}, and a program cannot put them there: return them, or register "
                    f"them as buffers of a fixed shape{IN_PARTS}"
                )
    names += dict.fromkeys(name for place in changed for name in place.changes())
    for place in inside:
        if isinstance(place.value, CONTAINERS):
            place.restore()
    names += [name for name in _globals_set(model) if name not in names]


def reached_places(model: nn.Module, called: object, arguments: Iterable[Any]) -> list[Place]:
    """What the code of a model, and of a loss around it, may change in Python, each able to restore what it is now.

    Args:
        model: whose code runs.
        called: a loss around it, or None.
        arguments: of the call.
    """
    reached = reached_by(model, called)
    given = [("", part) for value in arguments for part in (value, *_torch.pytree.tree_leaves(value))]
    others = [(name, part) for name, part in given if not isinstance(part, (nn.Module, type))]
    kept = _kept([*_in_modules(model), *reached.objects, *others], set())
    return [*kept, *_named(reached.variables, kept)]


@contextlib.contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Leave plain attributes of modules the objects that they are: torch.export puts copies of containers there.

    Others may refer to these: a list that two modules share, or that the user's loop appends to.
    """
    before = [
        (vars(module), {name: value for name, value in vars(module).items() if name not in OF_MODULES})
        for module in model.modules()
    ]
    try:
        yield
    finally:
        for own, attributes in before:
            own.update({name: value for name, value in attributes.items() if own.get(name) is not value})


@contextlib.contextmanager
def arguments_noted(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[list[str]]:
    """Note which of its arguments the user's code changes: containers, and objects of the user's classes.

    The caller's containers stay as they are, since a call gets others like them; objects have what they had where
    something of the trace was put there, or the block fails.

    Args:
        names: of the positional arguments, as far as they have names.
        args: positional arguments of the call.
        kwargs: those given by keyword.

    Raises:
        GraphBreakError: before the block, for iterators; behind it, for tensors that are kept in an argument, and
            random generators among them that are drawn from.
    """
    by_name = {names[number] if number < len(names) else str(number): value for number, value in enumerate(args)}
    given = [(f"its argument {name}", value) for name, value in {**by_name, **kwargs}.items()]
    parts = [(name, part) for name, value in given for part in (value, *_torch.pytree.tree_leaves(value))]
    _refuse_iterators([name.removeprefix("its ") for name, part in parts if is_iterator(part)])
    places = _kept([(name, part) for name, part in parts if not isinstance(part, (nn.Module, type))], set())
    changed: list[str] = []
    with _as_before(places):
        yield changed
        _refuse_draws(places)
        for place in places:
            if name := place.traced():
                raise GraphBreakError(
                    f"tensors are put into {name.removeprefix('its ')}, and a program cannot put them there: return "
                    f"them{IN_PARTS}"
                )
            changed += place.changes()


# --- what is looked at -----------------------------------------------------------------------------------------------


def _refuse_iterators(names: Sequence[str]) -> None:
    """Raise a ``GraphBreakError`` for the first one, before an item of it is gone."""
    if names:
        raise GraphBreakError(
            f"{names[0]} is an iterator, which each call takes from, and the program would have the item of the capture"
            f" at every call: take the item before the call, and give it as an argument{IN_PARTS}"
        )


def _refuse_draws(places: Sequence[Place]) -> None:
    """Raise a ``GraphBreakError`` where one of the generators was drawn from."""
    for place in _drawn(places):
        if place.changes():
            raise GraphBreakError(
                f"forward draws from {place.name}, a random generator that is not torch's, and the program would have "
                "the number of the capture at every call\n  what to do: draw with torch (torch.rand), or before the "
                "call, and give the number as a tensor"
            )


@contextlib.contextmanager
def _as_before(places: Sequence[Place]) -> Iterator[None]:
    """Where the block fails, everything has what it had before; what follows is for eager mode to do."""
    try:
        yield
    except BaseException as error:
        for place in places:
            place.restore()
        of_python = [place for place in _drawn(places) if isinstance(place.value, random.Random)]
        if of_python and isinstance(error, GraphBreakError):
            error.in_parts = False  # Dynamo takes the numbers of such a generator for constants
        raise


def _drawn(places: Iterable[Place]) -> list[Drawn]:
    return [place for place in places if isinstance(place, Drawn)]


def _named(variables: Iterable[Variable], kept: Iterable[Place]) -> list[Named]:
    """Variables, each once, but for attributes of objects that are looked at as a whole."""
    objects = [place.value for place in kept if isinstance(place, Kept) and hasattr(place.value, "__dict__")]
    whole = {id(vars(value)) for value in objects}
    each = {variable.identity: variable for variable in reversed(list(variables))}
    return [Named(variable.name, variable) for variable in reversed(each.values()) if id(variable.place) not in whole]


def _kept(objects: Sequence[tuple[str, Any]], met: set[int]) -> list[Kept | Drawn]:
    """Containers, objects and generators, and those in them; ``met`` are those that are known, by their ids."""
    found: list[Kept | Drawn] = []
    waiting = [(name, value, 0, True) for name, value in reversed(objects)]
    while waiting and len(found) < _MOST_PLACES:
        name, value, depth, of_user = waiting.pop()
        if id(value) in met or depth >= DEEPEST or not _is_looked_at(value, inside=depth > 0):
            continue
        met.add(id(value))
        if isinstance(value, GENERATORS):
            found.append(Drawn(name, value))
            continue
        of_user = of_user and (is_of_user(value) or isinstance(value, (*CONTAINERS, nn.Module, type)))
        kept = Kept(name, value, of_user)
        found.append(kept)
        items = kept.was if len(kept.was) <= MOST_ITEMS else []
        names = [name if isinstance(value, CONTAINERS) else f"{name}.{key}" for key, _ in items]
        inner = [(path, item, depth + 1, of_user) for path, (_, item) in zip(names, items, strict=True)]
        waiting += reversed(inner)
    return found


def _is_looked_at(value: object, *, inside: bool = True) -> bool:
    """Whether a value may be changed: a container, an object, a generator; not inside of one, a module or a class."""
    if isinstance(value, CONTAINERS):
        return len(value) <= _MOST
    if isinstance(value, (nn.Module, type)):
        return not inside
    return isinstance(value, GENERATORS) or is_of_user(value) or _is_of_library(value)


def _is_of_library(value: object) -> bool:
    return has_attributes(value) and not is_covered_class(type(value))


def _in_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Containers and objects of the user's classes in the attributes of modules, and the classes of modules."""
    for path, module in model.named_modules():
        if is_of_users(type(module)):
            yield type(module).__name__, type(module)
        for name, value in vars(module).items():
            if name not in OF_MODULES and _is_looked_at(value):
                yield f"{path}.{name}".lstrip("."), value


# --- what code says that it sets -------------------------------------------------------------------------------------


def _globals_set(model: nn.Module) -> list[str]:
    """The global variables that ``forward`` of a module sets, as its own code says: at this call, or at another."""
    codes = {getattr(type(module).forward, "__code__", None) for module in model.modules()}
    own = [code for code in codes if code is not None and not code.co_filename.startswith(_torch.FOLDER)]
    return sorted({f"the global variable {name}" for code in own for name in variables_set(code)[0]})
