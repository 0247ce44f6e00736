"""What a model's Python and a loss change beside tensors while they are captured: containers, objects, variables."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphopt import _torch
from graphopt.capture.assigned_buffers import IN_PARTS
from graphopt.capture.fingerprint import DEEPEST, MOST_ITEMS
from graphopt.capture.variables_read import Variable, is_of_user, is_of_users, reached_by, variables_set
from graphopt.errors import GraphBreakError

__all__ = ["arguments_noted", "changes_noted", "is_traced"]

_CONTAINERS = (list, dict, set, collections.deque, tuple)
_OF_MODULES = frozenset(vars(nn.Module()))
"""The attributes that every module has, which torch changes itself."""

_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


@contextlib.contextmanager
def changes_noted(model: nn.Module, called: object) -> Iterator[list[str]]:
    """Note what the user's code changes in Python, and leave nothing of the trace there.

    That is: containers and objects in attributes of modules, and what functions reach by global variables, closures,
    and the object whose method they are. Attributes of the model's modules are noted by who sets them.

    Gives a list that holds behind the block what has changed: ``path.name``, ``log``, ``meter.sum``, and the global
    variables that ``forward`` of a module sets. Where something of the trace was put there, everything has what it had
    before, and so has it where the block fails.

    Args:
        model: that is captured.
        called: a loss around it, or None.

    Raises:
        GraphBreakError: behind the block, for tensors that are kept outside of the model.
    """
    objects, variables = reached_by(model, called)
    kept = _kept([*_in_modules(model), *objects])
    places: list[_Kept | _Named] = [*kept, *_named(variables, kept)]
    names: list[str] = []
    try:
        yield names
    except BaseException:
        _restore(places)
        raise
    changed = [place for place in places if place.changes()]
    for place in changed:
        if name := place.traced():
            _restore(places)
            who = "forward" if called is None else "forward or the loss"
            raise GraphBreakError(
                f"{who} keeps tensors in {name}, and a program cannot put them there: return them, or register them "
                f"as buffers of a fixed shape{IN_PARTS}"
            )
    names += dict.fromkeys(name for place in changed for name in place.changes())
    names += [name for name in _globals_set(model) if name not in names]


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
        GraphBreakError: behind the block, for tensors that are kept in an argument.
    """
    by_name = {names[number] if number < len(names) else str(number): value for number, value in enumerate(args)}
    given = [(f"its argument {name}", value) for name, value in {**by_name, **kwargs}.items()]
    objects = [(name, leaf) for name, value in given for leaf in _torch.pytree.tree_leaves(value) if is_of_user(leaf)]
    places = _kept([*((name, value) for name, value in given if isinstance(value, _CONTAINERS)), *objects])
    changed: list[str] = []
    try:
        yield changed
    except BaseException:
        _restore(places)
        raise
    for place in places:
        if name := place.traced():
            _restore(places)
            raise GraphBreakError(
                f"tensors are put into {name.removeprefix('its ')}, and a program cannot put them there: return them"
                f"{IN_PARTS}"
            )
        changed += place.changes()


# --- what is looked at -----------------------------------------------------------------------------------------------


@dataclass
class _Kept:
    """A container, or an object with attributes, and what it held."""

    name: str
    value: Any

    def __post_init__(self) -> None:
        self.was = _items(self.value)

    def changes(self) -> list[str]:
        """The names of what is other than it was."""
        now = _items(self.value)
        if isinstance(self.value, _CONTAINERS):
            return [] if _same(now, self.was) else [self.name]
        then = dict(self.was)
        new = [key for key, item in now if key not in then or item is not then[key]]
        gone = [key for key in then if key not in dict(now)]
        return [f"{self.name}.{key}" for key in (*new, *gone)]

    def traced(self) -> str:
        """Where it holds something of the trace; empty where it does not."""
        known = {id(item) for _, item in self.was}
        for key, item in _items(self.value):
            if id(item) not in known and is_traced(item):
                return self.name if isinstance(self.value, _CONTAINERS) else f"{self.name}.{key}"
        return ""

    def restore(self) -> None:
        """Put everything back."""
        if _same(_items(self.value), self.was):
            return
        items = [item for _, item in self.was]
        if isinstance(self.value, (dict, set, list, collections.deque)):
            self.value.clear()
        if isinstance(self.value, dict):
            self.value.update(self.was)
        elif isinstance(self.value, set):
            self.value.update(items)
        elif isinstance(self.value, (list, collections.deque)):
            self.value.extend(items)
        else:
            self._restore_attributes()

    def _restore_attributes(self) -> None:
        before, now = dict(self.was), dict(_items(self.value))
        owner = type if isinstance(self.value, type) else object  # a module's own __setattr__ would register
        for key in now.keys() - before.keys():
            owner.__delattr__(self.value, key)
        for key, item in before.items():
            if key not in now or now[key] is not item:
                owner.__setattr__(self.value, key, item)


@dataclass
class _Named:
    """A variable, and what it was."""

    name: str
    variable: Variable

    def __post_init__(self) -> None:
        self.was = self.variable.get()

    def changes(self) -> list[str]:
        """Its name, where it is other than it was."""
        return [] if self.variable.get() is self.was else [self.name]

    def traced(self) -> str:
        """Its name, where it is something of the trace."""
        return self.name if is_traced(self.variable.get()) else ""

    def restore(self) -> None:
        """Set it back."""
        self.variable.set(self.was)


def _named(variables: Iterable[Variable], kept: Iterable[_Kept]) -> list[_Named]:
    """Variables, each once, but for attributes of objects that are looked at as a whole."""
    whole = {id(vars(place.value)) for place in kept if hasattr(place.value, "__dict__")}
    each = {variable.identity: variable for variable in reversed(list(variables))}
    return [_Named(variable.name, variable) for variable in reversed(each.values()) if id(variable.place) not in whole]


def _kept(objects: Sequence[tuple[str, Any]]) -> list[_Kept]:
    """Containers and objects, and the containers in them."""
    found: list[_Kept] = []
    met: set[int] = set()
    waiting = [(name, value, 0) for name, value in reversed(objects)]
    while waiting:
        name, value, depth = waiting.pop()
        if id(value) in met or depth >= DEEPEST or not (isinstance(value, _CONTAINERS) or depth == 0):
            continue
        met.add(id(value))
        found.append(_Kept(name, value))
        items = found[-1].was if len(found[-1].was) <= MOST_ITEMS else []
        names = [name if isinstance(value, _CONTAINERS) else f"{name}.{key}" for key, _ in items]
        inner = [(path, item, depth + 1) for path, (_, item) in zip(names, items, strict=True)]
        waiting += [entry for entry in reversed(inner) if isinstance(entry[1], _CONTAINERS)]
    return found


def _in_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Containers and objects of the user's classes in the attributes of modules, and the classes of modules."""
    for path, module in model.named_modules():
        if is_of_users(type(module)):
            yield type(module).__name__, type(module)
        for name, value in vars(module).items():
            if name not in _OF_MODULES and (isinstance(value, _CONTAINERS) or is_of_user(value)):
                yield f"{path}.{name}".lstrip("."), value


def _items(value: Any) -> list[tuple[Any, Any]]:
    """What a container or an object holds, each with its key, which no one changes in place."""
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, _CONTAINERS):
        return [(id(item), item) for item in value] if isinstance(value, set) else list(enumerate(value))
    own = vars(value)
    return [(key, own[key]) for key in own if not (isinstance(value, nn.Module) and key in _OF_MODULES)]


def _same(one: list[tuple[Any, Any]], other: list[tuple[Any, Any]]) -> bool:
    """Whether the same objects are there."""
    return len(one) == len(other) and all(
        value is was and (key is before or key == before)
        for (key, value), (before, was) in zip(one, other, strict=True)
    )


def is_traced(value: Any, depth: int = 0) -> bool:
    """Whether something is, or holds, a tensor or a number of the trace."""
    if isinstance(value, torch.Tensor):
        return _torch.has_no_data(value)
    if depth >= DEEPEST or isinstance(value, _SYMBOLS):
        return isinstance(value, _SYMBOLS)
    if is_of_user(value):
        value = vars(value)
    if not isinstance(value, _CONTAINERS) or len(value) > MOST_ITEMS:
        return False
    return any(is_traced(item, depth + 1) for item in (value.values() if isinstance(value, dict) else value))


def _restore(places: Iterable[_Kept | _Named]) -> None:
    for place in places:
        place.restore()


# --- what code says that it sets -------------------------------------------------------------------------------------


def _globals_set(model: nn.Module) -> list[str]:
    """The global variables that ``forward`` of a module sets, as its own code says: at this call, or at another."""
    codes = {getattr(type(module).forward, "__code__", None) for module in model.modules()}
    own = [code for code in codes if code is not None and not code.co_filename.startswith(_torch.FOLDER)]
    return sorted({f"the global variable {name}" for code in own for name in variables_set(code)[0]})
