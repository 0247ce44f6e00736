"""What containers, arrays and objects of Python hold: which of it counts, and how a change of it is noticed."""

from __future__ import annotations

import array
import collections
import contextvars
import ctypes
import functools
import operator
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from graphopt import _torch
from graphopt.capture.guards.code_owner import is_covered_class, is_of_users
from graphopt.capture.guards.slots import in_slots, slots_of
from graphopt.capture.guards.variables import in_context

__all__ = [
    "CONTAINERS",
    "DEEPEST",
    "MOST_ITEMS",
    "PLAIN",
    "Contents",
    "attributes_of",
    "deeper",
    "is_code",
    "is_container",
    "items_of",
    "raw_bytes",
    "users",
]

DEEPEST = 6
"""How deep containers and objects in others are compared; ``deeper`` says what counts."""

MOST_ITEMS = 2_000
"""Items of a container that are compared one by one; a larger one is compared as a whole."""

MOST_WATCHED = 100_000
"""Items of a container, other than a dictionary, that are looked at on each call."""

MOST_BYTES = 1 << 22
"""Bytes of an array that are looked at on each call."""

_MOST_VALUES = 20_000
"""Containers and objects that are looked at on each call."""

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, np.generic)
"""What holds nothing else, and never changes."""

CONTAINERS = (list, tuple, set, frozenset, collections.deque, Mapping)
"""What holds items."""

_SEQUENCES: tuple[Any, ...] = (list, tuple, set, frozenset)
_C_DATA: Any = ctypes.c_int.__mro__[-2]
"""The class of numbers, arrays and structures of C."""

_ARRAYS = (np.ndarray, array.array, bytearray, memoryview, _C_DATA)

_FIXED = (tuple, frozenset, functools.partial, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
"""Classes whose objects refer to the same things as long as they live, beside their attributes."""


def is_container(value: object) -> bool:
    """Whether a value is all of what it holds; a mapping of an installed library may load what it gives, and is not."""
    if isinstance(value, Mapping) and not isinstance(value, dict):
        return _may_be_asked(type(value))
    return isinstance(value, CONTAINERS)


def deeper(depth: float, value: object, item: object) -> float:
    """The depth of what a value holds: containers in containers, with no object around them, count little."""
    plain = depth < 1 and is_container(value) and is_container(item)
    return depth + (1 / 16 if plain else 1)


def items_of(value: Any) -> tuple[Any, ...]:
    """The items of a container, or what else a value refers to, in order; empty for a value of any other kind.

    Of mappings, keys and values. Subclasses of Python's containers are read without code of their own.
    """
    if isinstance(value, dict):
        kind: Any = collections.OrderedDict if isinstance(value, collections.OrderedDict) else dict
        made = (value.default_factory,) if isinstance(value, collections.defaultdict) else ()
        return (*made, *kind.keys(value), *kind.values(value))
    if isinstance(value, Mapping):
        return (*value.keys(), *value.values()) if is_container(value) else ()
    if isinstance(value, collections.deque):
        return (value.maxlen, *collections.deque.__iter__(value))
    for base in _SEQUENCES:
        if isinstance(value, base):
            return tuple(base.__iter__(value))
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    if isinstance(value, contextvars.ContextVar):
        return in_context(value)
    if isinstance(value, np.ndarray) and value.dtype == object:
        return tuple(value.flat)
    return ()


@functools.lru_cache(maxsize=10_000)
def _may_be_asked(cls: Any) -> bool:
    return is_covered_class(cls) or is_of_users(cls)


def raw_bytes(value: Any) -> bytes | None:
    """The numbers of an array of Python's, NumPy's or C's; None for anything else."""
    if not isinstance(value, _ARRAYS) or (isinstance(value, np.ndarray) and value.dtype == object):
        return None
    return bytes(value) if isinstance(value, (bytearray, _C_DATA)) else value.tobytes()


def attributes_of(value: object) -> dict[str, Any]:
    """The attributes of an object, those in ``__slots__`` among them; of a class of the user's, its values."""
    if isinstance(value, type):
        own = vars(value) if is_of_users(value) else {}
        return {name: item for name, item in own.items() if not name.startswith("__") and not is_code(item)}
    found = getattr(value, "__dict__", None)
    own = found if isinstance(found, dict) else {}
    return {**own, **dict(in_slots(value))} if slots_of(value) else own


def is_code(value: object) -> bool:
    """Whether a class's attribute is a method, or something else that computes what is read."""
    return callable(value) or hasattr(type(value), "__get__")


def users(cls: type) -> tuple[type, ...]:
    """A class and its bases, as far as they are the user's."""
    return _users(cls)


@functools.lru_cache(maxsize=10_000)
def _users(cls: Any) -> tuple[type, ...]:
    return tuple(base for base in cls.__mro__ if is_of_users(base))


class Contents:
    """Containers, arrays and objects whose contents count, and those in them, with what they hold now.

    Attributes:
        modules: the modules of torch among what they hold.
        too_large: the names of what is too large to be looked at on each call.
    """

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.too_large: dict[str, None] = {}
        self._dictionaries: list[dict[Any, Any]] = []
        self._versions: list[int] = []
        self._same_entries: Callable[[], bool] | None = None
        self._others: list[tuple[Any, tuple[Any, ...]]] = []
        self._arrays: list[tuple[Any, tuple[Any, ...]]] = []
        self._weak: list[tuple[weakref.ReferenceType[Any], tuple[Any, ...]]] = []
        self._seen: dict[int, object] = {}

    def add(self, value: object, name: str = "", depth: float = 0) -> None:
        """Remember what a value holds, and what the values in it hold.

        Args:
            value: anything.
            name: for people.
            depth: of ``value`` in what was added.
        """
        if isinstance(value, (*PLAIN, torch.Tensor, types.ModuleType)) or depth >= DEEPEST or id(value) in self._seen:
            return
        if isinstance(value, type) and not is_of_users(value):
            return
        if len(self._seen) >= _MOST_VALUES:
            self.too_large[name] = None
            return
        self._seen[id(value)] = value
        if isinstance(value, nn.Module):
            self.modules.append(value)
            return
        self._look(value, name)
        inner = (*items_of(value), *attributes_of(value).values(), *users(type(value)))
        for item in inner:
            if not isinstance(item, PLAIN):
                self.add(item, name, deeper(depth, value, item))

    def dictionary(self, value: dict[Any, Any]) -> None:
        """Remember which entries a dictionary has, and nothing of what they hold."""
        self._dictionaries.append(value)
        self._versions.append(_torch.dict_version(value))

    def _look(self, value: Any, name: str) -> None:
        if isinstance(value, weakref.ReferenceType):
            self._weak.append((value, _weak_state(value)))
            return
        own = getattr(value, "__dict__", None)
        for dictionary in (value, own):
            if isinstance(dictionary, dict):
                self.dictionary(dictionary)
        if isinstance(value, _ARRAYS):
            size = ctypes.sizeof(value) if isinstance(value, _C_DATA) else getattr(value, "nbytes", 0)
            if size > MOST_BYTES:
                self.too_large[name] = None
            else:
                self._arrays.append((value, _array_state(value)))
        if type(value) is dict or type(value) in _FIXED:
            return
        if is_container(value) and not isinstance(value, dict) and len(value) > MOST_WATCHED:
            self.too_large[name] = None
        else:
            self._others.append((value, _state(value)))

    def unchanged(self) -> bool:
        """Whether everything holds what it held."""
        return (
            self._has_same_entries()
            and all(_is_same(_state(value), state) for value, state in self._others)
            and all(_array_state(value) == state for value, state in self._arrays)
            and all(_weak_state(value) == state for value, state in self._weak)
        )

    def _has_same_entries(self) -> bool:
        if self._same_entries is not None:
            return self._same_entries()
        same = list(map(_torch.dict_version, self._dictionaries)) == self._versions
        if same:
            self._same_entries = _torch.DictionariesUnchanged(self._dictionaries)
        return same


def _state(value: Any) -> tuple[Any, ...]:
    """The objects that a value holds, beside the entries of dictionaries, and its class."""
    if isinstance(value, type):
        return value.__mro__, *vars(value).values()
    first = (type(value), *(item for _, item in in_slots(value)))
    if isinstance(value, collections.defaultdict):
        first = (*first, value.default_factory)
    if isinstance(value, dict):
        return (*first, *_order(value)) if isinstance(value, collections.OrderedDict) else first
    return (*first, *items_of(value))


def _order(value: collections.OrderedDict[Any, Any]) -> tuple[Any, ...]:
    """The keys, which move without an assignment; of a large one, those at its ends."""
    if len(value) <= MOST_ITEMS:
        return tuple(value)
    return next(iter(value)), next(reversed(value))


def _is_same(now: tuple[Any, ...], state: tuple[Any, ...]) -> bool:
    return len(now) == len(state) and all(map(operator.is_, now, state))


def _array_state(value: Any) -> tuple[Any, ...]:
    return raw_bytes(value), getattr(value, "shape", None), str(getattr(value, "dtype", ""))


def _weak_state(value: weakref.ReferenceType[Any]) -> tuple[Any, ...]:
    """What tells whether attributes were set on what a weak reference refers to, without keeping it or any of them."""
    referent = value()
    own = getattr(referent, "__dict__", None)
    slots = tuple(id(item) for _, item in in_slots(referent))
    return type(referent).__qualname__, _torch.dict_version(own) if isinstance(own, dict) else None, slots
