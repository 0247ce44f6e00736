"""Where the names lead that code loads: from a variable along attributes to a number, a container, an object, code.

What is met on the way is noted with where it is kept. Nothing of a user's runs: an attribute that code computes is not
asked for, and that code is followed instead.
"""

from __future__ import annotations

import abc
import builtins
import contextvars
import dataclasses
import functools
import types
import weakref
from collections.abc import Mapping
from typing import Any, Protocol, cast

import torch
from torch import nn

from graphopt.capture.guards.code_owner import (
    GENERATORS,
    LIBRARIES,
    file_of,
    is_covered_file,
    is_of_library,
    is_of_user,
    is_of_users,
    is_wrapper,
)
from graphopt.capture.guards.contents import (
    CONTAINERS,
    MOST_ITEMS,
    PLAIN,
    is_code,
    is_container,
    items_of,
    raw_bytes,
    users,
)
from graphopt.capture.guards.found_variables import FoundVariables
from graphopt.capture.guards.impure_calls import told_call
from graphopt.capture.guards.library_code import LibraryCode, is_plain
from graphopt.capture.guards.named_values import GETTERS, names_of
from graphopt.capture.guards.variables import MISSING, Cell, Computed, Environment, InContext, InSlots, Variable

__all__ = ["CALLED", "Code", "ReachedValues"]

CALLED = (types.FunctionType, types.MethodType, functools.partial, nn.Module)
"""What is code, or has some."""

_CHANGES = frozenset(
    ("add", "append", "appendleft", "clear", "discard", "extend", "insert", "remove", "setdefault", "update")
)
"""Methods of containers behind whose call nothing of the container is known."""

_SHARED = "multiprocessing.sharedctypes"
"""The module of numbers and arrays that processes share."""


class Code(Protocol):
    """What follows the code that values lead to.

    Attributes:
        title: of the model, for people.
        found: what is noted.
        of_model: ids of the dictionaries of modules whose attributes are part of the model's key.
        whole: objects that code hands on as a whole, by their ids, with names for people.
        names: that code reads of objects.
        texts: by which code may find attributes.
        libraries: reads their code.
    """

    title: str
    found: FoundVariables
    of_model: set[int]
    whole: dict[int, tuple[object, str]]
    names: set[str]
    texts: set[str]
    libraries: LibraryCode

    def call(self, value: object) -> None:
        """Meet what is called."""
        ...

    def method(self, function: object, owner: object) -> None:
        """Meet a function as one of an object."""
        ...

    def code_of(self, item: object, owner: object) -> None:
        """Meet the code of what a class has under a name."""
        ...


class ReachedValues:
    """Goes along chains of names, and notes what is there.

    Args:
        code: gets the code that is met; a reference that keeps it alive is its owner's.
    """

    def __init__(self, code: Code) -> None:
        self._code, self._found = code, code.found

    def look(self, place: Any, path: list[str], where: str) -> None:
        """Go along a chain from where its first name is kept."""
        name, *rest = path
        value = place.get(name, MISSING)
        where = f"{where}{name}"
        if told := told_call(value, rest):
            self._found.told[f"the code of {self._code.title} {told}"] = None
        if value is MISSING:
            self._found.place(place, name, value)
            if hasattr(builtins, name):
                self._found.builtin(name)
            return
        if isinstance(value, type) and issubclass(value, torch.Tensor):
            self._found.classes.add(value)
        if isinstance(value, (types.ModuleType, type)) and is_of_library(value):
            if isinstance(value, abc.ABCMeta):
                self._found.bases(value)
            self._of_library(value, rest, where)
            return
        if self._found.place(place, name, value) and isinstance(place, (dict, Cell, Environment)):
            self._found.variables.append(Variable(where, place, name))
        self._value(value, rest, where)

    def _of_library(self, value: object, path: list[str], where: str) -> None:
        """What a library has under a name, where another one may be put in its place, and what it reads itself."""
        rest = list(path)
        while rest and isinstance(value, types.ModuleType):
            module, place, name = value, cast(Any, vars(value)), rest.pop(0)
            value = place.get(name, MISSING)
            if value is MISSING and hasattr(type(module), name):  # a setting: torch.backends.cudnn.benchmark
                place = Computed(module)
                self._found.leaf(value := place.get(name, MISSING), f"{where}.{name}")
            if value is MISSING:
                return
            where = f"{where}.{name}"
            if not self._found.place(place, name, value):
                continue
            if is_plain(value) and not is_covered_file(getattr(module, "__file__", None) or ""):
                self._found.of_library(value, where)
            else:
                self._found.same(value, where)
        if isinstance(value, type) and issubclass(value, torch.Tensor):
            self._found.classes.add(value)
        self._code.libraries.handed_on(value, rest, where)

    def _value(self, value: object, rest: list[str], where: str) -> None:
        """What a chain has come to, with the names that follow."""
        self._found.takes(value, rest, where)
        if isinstance(value, (*CONTAINERS, *GENERATORS)) or is_of_user(value):
            self._found.reached.append((where, value))
        if isinstance(value, types.ModuleType):
            if rest:
                self.look(vars(value), rest, f"{where}.")
            else:
                self._code.whole[id(value)] = value, where
        elif isinstance(value, contextvars.ContextVar):
            self.look(InContext(value), [value.name, *rest[1:]], f"{where}: ")
        elif isinstance(value, type):
            self._found.reached.append((where, value))
            self._found.bases(value)
            self._code.whole[id(value)] = value, where
            self.of_class(value, rest, f"{where}.")
        elif isinstance(value, CALLED) or is_wrapper(value):
            self._found.same(getattr(value, "__func__", value), where)
            self._code.call(value)
            if isinstance(value, types.FunctionType) and rest:
                self.look(vars(value), rest, f"{where}.")
        elif isinstance(value, CONTAINERS):
            if not (rest and rest[0] in _CHANGES):
                self.content(value, where)
        else:
            self._object(value, rest, where)

    def _object(self, value: object, rest: list[str], where: str) -> None:
        if is_of_user(value):
            self._found.kind(value, where)
        if isinstance(value, (*PLAIN, torch.Tensor)):
            self._found.leaf(value, where)
        elif isinstance(value, weakref.ReferenceType):
            self._found.same(value, where)
            if is_of_user(value()):  # of which nothing is kept but its attributes
                self._code.whole[id(value)] = value(), where
        elif isinstance(value, GETTERS):
            self._found.same(value, where)
            self._code.names |= names_of(value)
            self._code.texts |= names_of(value)
        elif raw_bytes(value) is not None or type(value).__module__ == _SHARED:
            self.content(value, where)
        elif rest:
            self.attribute(value, rest, f"{where}.")
        elif dataclasses.is_dataclass(value) or isinstance(value, types.SimpleNamespace):
            self.content(value, where)
        else:
            self._found.same(value, where)
            if is_of_user(value):
                self._code.whole[id(value)] = value, where

    def of_class(self, cls: type, path: list[str], where: str) -> None:
        """An attribute of a class: its own, or its metaclass's."""
        if not path:
            return
        for base in users(type(cls)):
            if path[0] in vars(base):
                self._of_base(base, cls, path, where)
        for base in cls.__mro__:
            if path[0] in vars(base) and not is_covered_file(file_of(base)):
                if isinstance(vars(base)[path[0]], (classmethod, staticmethod)):
                    self._of_base(base, cls, path, where)
                else:
                    self.look(self._found.of_class(base), path, where)
                return

    def attribute(self, owner: object, path: list[str], where: str) -> None:
        """An attribute of an object: its own, or its class's."""
        if isinstance(owner, type):
            self.of_class(owner, path, where)
            return
        for base in users(type(owner)):
            for name in {"__getattr__", "__getattribute__"} & vars(base).keys():
                self._found.member(base, name, where)
                self._code.method(vars(base)[name], owner)
        own = getattr(owner, "__dict__", None)
        if path[0] == "__class__":
            self.of_class(type(owner), path[1:], where)
        elif isinstance(own, dict) and path[0] in (*own, "__dict__"):
            self._own_attribute(owner, own, path, where)
        else:
            self._of_bases(owner, path, where)

    def _own_attribute(self, owner: object, own: dict[str, Any], path: list[str], where: str) -> None:
        """An attribute that an object has itself; those of the model's modules are part of its key."""
        of_model = isinstance(owner, nn.Module) and id(own) in self._code.of_model
        value = own.get(path[0])
        if path[0] not in own:  # all of them
            if not of_model:
                self.content(own, where.rstrip("."))
        elif not of_model or isinstance(value, types.ModuleType):
            self.look(own, path, where)
        else:
            self._found.takes(value, path[1:], f"{where}{path[0]}")

    def _of_bases(self, owner: object, path: list[str], where: str) -> None:
        """An attribute that an object has by its class, or does not have."""
        mro = type(owner).__mro__
        bases = [base for base in mro if path[0] in vars(base)]
        for base in mro[: mro.index(bases[0])] if bases else ():
            if is_of_users(base):
                self._found.not_there(base, path[:1])
        for base in bases:
            if not self._of_base(base, owner, path, where):
                break
        if not bases and isinstance(owner, Mapping):
            self.content(owner, where.rstrip("."))
        elif id(getattr(owner, "__dict__", None)) not in self._code.of_model:
            self._found.not_there(owner, path[:1])

    def _of_base(self, base: type, owner: object, path: list[str], where: str) -> bool:
        """What one class gives an object; says whether that is a method, behind which others are met by ``super()``."""
        name = path[0]
        value = vars(base)[name]
        if isinstance(value, types.MemberDescriptorType):
            self.look(InSlots(owner), path, where)
            return False
        code = is_code(value)
        of_library = is_covered_file(file_of(base)) or any(part in file_of(base) for part in LIBRARIES)
        if code and not of_library:
            self._found.member(base, name, where)
        if code:
            self._code.code_of(value, owner)
        elif not is_covered_file(file_of(base)):
            self.look(self._found.of_class(base), path, where)
        return code

    def content(self, value: object, where: str) -> None:
        """Note a container, or an object that counts by what it holds, and meet the code in it."""
        self._found.content(value, where)
        self._code_in(value, where)

    def _code_in(self, value: Any, where: str, depth: int = 0) -> None:
        """Meet the code of what is in a container."""
        items = items_of(value) if is_container(value) and depth < 3 else ()
        for item in items if len(items) <= MOST_ITEMS else ():
            if isinstance(item, CALLED) or is_wrapper(item):
                self._code.call(item)
            elif is_of_user(item) or (isinstance(item, type) and is_of_users(item)):
                self._code.whole[id(item)] = item, where
            else:
                self._code_in(item, where, depth + 1)
