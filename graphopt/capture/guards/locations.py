"""Places in Python where a trace could leave something, with what was there before it."""

from __future__ import annotations

import collections
import copy
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from graphopt import _torch
from graphopt.capture.guards.code_owner import has_attributes
from graphopt.capture.guards.contents import DEEPEST, MOST_ITEMS, attributes_of
from graphopt.capture.guards.variables import Variable

__all__ = ["CONTAINERS", "OF_MODULES", "Drawn", "Kept", "Named", "Place", "comparable", "is_traced"]

CONTAINERS = (list, dict, set, collections.deque, tuple)
OF_MODULES = frozenset(vars(nn.Module()))
"""The attributes that every module has, which torch changes itself."""

_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass
class Kept:
    """A container, or an object with attributes, and what it held.

    Attributes:
        of_user: False for an object of a library's, in which only what is of the trace counts.
    """

    name: str
    value: Any
    of_user: bool = True

    def __post_init__(self) -> None:
        self.was = _items(self.value)

    def changes(self) -> list[str]:
        """The names of what is other than it was."""
        if not self.of_user:
            return []
        now = _items(self.value)
        if isinstance(self.value, CONTAINERS):
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
                return self.name if isinstance(self.value, CONTAINERS) else f"{self.name}.{key}"
        return ""

    def restore(self) -> None:
        """Put everything back."""
        if _same(_items(self.value), self.was):
            return
        items = [item for _, item in self.was]
        if isinstance(self.value, dict):
            kind: Any = collections.OrderedDict if isinstance(self.value, collections.OrderedDict) else dict
            kind.clear(self.value)
            kind.update(self.value, self.was)
        elif isinstance(self.value, set):
            set.clear(self.value)
            set.update(self.value, items)
        elif isinstance(self.value, list):
            list.__setitem__(self.value, slice(None), items)
        elif isinstance(self.value, collections.deque):
            collections.deque.clear(self.value)
            collections.deque.extend(self.value, items)
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
class Named:
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
        return self.name if self.changes() and is_traced(self.variable.get()) else ""

    def restore(self) -> None:
        """Set it back."""
        self.variable.set(self.was)


@dataclass
class Drawn:
    """A random generator, and the state that it had."""

    name: str
    value: Any

    def __post_init__(self) -> None:
        self.was = copy.deepcopy(self._state())

    def _state(self) -> Any:
        if isinstance(self.value, random.Random):
            return self.value.getstate()
        if isinstance(self.value, np.random.Generator):
            return self.value.bit_generator.state
        return self.value.get_state(legacy=False)

    def changes(self) -> list[str]:
        """Its name, where it was drawn from."""
        return [] if comparable(self._state()) == comparable(self.was) else [self.name]

    def traced(self) -> str:
        """Nothing of a trace is in it."""
        return ""

    def restore(self) -> None:
        """Take it back."""
        if isinstance(self.value, random.Random):
            self.value.setstate(self.was)
        elif isinstance(self.value, np.random.Generator):
            self.value.bit_generator.state = self.was
        else:
            self.value.set_state(self.was)


Place = Kept | Named | Drawn


def _items(value: Any) -> list[tuple[Any, Any]]:
    """What a container or an object holds, each with its key; without code of its own, which may load what is lazy."""
    if isinstance(value, dict):
        return list(dict.items(value))
    if isinstance(value, set):
        return [(id(item), item) for item in set.__iter__(value)]
    if isinstance(value, list):
        return list(enumerate(list.__iter__(value)))
    if isinstance(value, tuple):
        return list(enumerate(tuple.__iter__(value)))
    if isinstance(value, collections.deque):
        return list(enumerate(collections.deque.__iter__(value)))
    own = vars(value) if isinstance(value, type) else attributes_of(value)
    return [(key, own[key]) for key in own if not (isinstance(value, nn.Module) and key in OF_MODULES)]


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
    if has_attributes(value):
        value = attributes_of(value)
    if not isinstance(value, CONTAINERS):
        return False
    items = _items(value)
    return len(items) <= MOST_ITEMS and any(is_traced(item, depth + 1) for _, item in items)


def comparable(state: Any) -> Any:
    """A state of a random generator, NumPy's arrays in it as bytes."""
    if isinstance(state, dict):
        return {key: comparable(value) for key, value in state.items()}
    return state.tobytes() if isinstance(state, np.ndarray) else state
