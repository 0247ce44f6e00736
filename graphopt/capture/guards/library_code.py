"""What the code of installed libraries reads, as far as a model or a loss calls it: numbers, texts, flags, functions.

Their bytecode is read as that of the user's own functions in ``code_analysis.py``: of the functions that layers and the
user's code call, and of those that these call. Plain values that it names count, small containers of them, and which
functions there are; what is torch's or Python's does not, nor what a function sets itself, a count of its calls for
instance.
"""

from __future__ import annotations

import collections
import enum
import functools
import os
import sys
import types
from collections.abc import Collection, Hashable
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from graphopt.capture.guards.code_owner import file_of, is_covered_class, is_covered_file, is_followed
from graphopt.capture.guards.contents import DEEPEST, PLAIN, is_code, is_container, items_of
from graphopt.capture.guards.found_variables import FoundVariables
from graphopt.capture.guards.loaded_names import chains_of, found_by_text, names_in, texts_in
from graphopt.capture.guards.slots import slots_of
from graphopt.capture.guards.variables import ENVIRONMENT, MISSING, Cell, Computed, InSlots, variables_set

__all__ = ["LibraryCode", "is_plain"]

_MOST = 2_000
"""Functions that are followed."""

_MOST_ITEMS = 100
"""Items of the largest container that counts."""

_NOT_NAMED = frozenset(
    ("__call__", "__enter__", "__exit__", "__getitem__", "__init__", "__new__", "__post_init__", "backward", "forward")
)
"""Methods that code calls without their names."""

_OF_ENVIRONMENT = frozenset(("environ", "getenv", "environb"))


class UsersCode(Protocol):
    """Follows functions of the user's that a library is given.

    Attributes:
        title: of the model, for people.
    """

    title: str

    def method(self, function: object, owner: object) -> None:
        """Meet a function as one of an object."""
        ...


class _Read(NamedTuple):
    """Something that code reads: where it is kept, and what it is now."""

    place: Any
    name: str
    value: object


class LibraryCode:
    """Reads the code of libraries from function to function.

    Args:
        found: gets what is read.
        users: code of the user's; a reference that keeps it alive is its owner's.
    """

    def __init__(self, found: FoundVariables, users: UsersCode) -> None:
        self._found, self._users = found, users
        self._met: set[Hashable] = set()
        self._waiting: collections.deque[tuple[types.FunctionType, object]] = collections.deque()
        self._read: dict[str, _Read] = {}
        self._sets: set[tuple[int, str]] = set()
        self._names: frozenset[str] = frozenset()  # in the function that is read now, and those that it gives as texts
        self._texts: frozenset[str] = frozenset()

    def meet(self, function: object, owner: object = None) -> None:
        """Meet a function, and what it decorates.

        Args:
            function: anything; what is no function of a library is left alone.
            owner: the object or the class whose method it is.
        """
        while function is not None:
            if isinstance(function, types.MethodType):
                owner, function = function.__self__, function.__func__
            if isinstance(function, types.FunctionType):
                self._meet(function, owner)
            function = _vars(function).get("__wrapped__")

    def _meet(self, function: types.FunctionType, owner: object) -> None:
        code = function.__code__
        if is_followed(function) and not code.co_filename.startswith("<"):  # else of a data class or a named tuple
            self._users.method(function, owner)
            return
        if is_covered_file(code.co_filename) or is_covered_file(file_of(function)):
            return
        key = code, type(owner) if isinstance(owner, nn.Module) else id(owner)
        if key not in self._met and len(self._met) < _MOST:
            self._met.add(key)
            self._waiting.append((function, owner))

    def handed_on(self, value: object, path: list[str], where: str) -> None:
        """What the user's code has of a library, with the names that follow."""
        self._names, self._texts = frozenset(path), frozenset()
        if not is_plain(value) and not self._called(value):
            self._value(value, path, where)

    def follow(self) -> bool:
        """Read the code of everything that was met; says whether the user's code may be among it."""
        waited = bool(self._waiting)
        while self._waiting:
            self._follow(*self._waiting.popleft())
        return waited

    def note(self, changing: Collection[str]) -> None:
        """Note what was read.

        Args:
            changing: names for people of what the libraries' code changes at each call.
        """
        for where, (place, name, value) in self._read.items():
            if where in changing or (_identity(place), name) in self._sets:
                continue
            if self._found.place(place, name, value) and value is not MISSING:
                self._found.of_library(value, where)
        if len(self._met) >= _MOST:
            self._found.told[
                f"the code of {self._users.title} calls more functions of installed libraries than are read "
                f"({_MOST:,}): what only the others read of global variables has the values of the capture"
            ] = None

    # --- the code of one function -------------------------------------------------------------------------------------

    def _follow(self, function: types.FunctionType, owner: object) -> None:
        code, known = function.__code__, function.__globals__
        self._names, self._texts = names_in(code), found_by_text(code)
        self._found.names |= self._names
        where = f"{known.get('__name__')}."
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=False))
        in_module, in_closures = variables_set(code)
        self._sets.update((id(known), name) for name in in_module)
        self._sets.update((id(cells[name]), name) for name in in_closures)
        self._defaults(function, where)
        for root, *path in chains_of(code):
            if root == "global":
                self._look(known, path, where)
            elif root == "module":
                self._look(sys.modules, path, "")
            elif root == "cell" and path[0] in cells:
                self._look(Cell(cells[path[0]]), path, f"{where}{function.__qualname__}: ")
            elif root == "self" and owner is not None and path:
                self._attribute(owner, path, f"{where}{_class_of(owner).__name__}.")
        if owner is not None:
            self._methods(_class_of(owner), owner, self._names)
        for text in [] if _OF_ENVIRONMENT.isdisjoint(self._names) else texts_in(code):
            if text.isidentifier() and (text.isupper() or text in os.environ):
                self._look(ENVIRONMENT, [text], "environment variable ")

    def _defaults(self, function: types.FunctionType, where: str) -> None:
        """The containers among the defaults of a function, which hold what they hold, and the functions there."""
        for kind in ("__defaults__", "__kwdefaults__"):
            defaults = getattr(function, kind)
            for value in items_of(defaults):
                self._called(value)
            if is_plain(defaults) and any(map(is_container, items_of(defaults))):
                self._read[f"{kind} of {where}{function.__qualname__}"] = _Read(Computed(function), kind, defaults)

    def _look(self, place: Any, path: list[str], where: str) -> None:
        """Go along a chain from where its first name is kept."""
        name, *rest = path
        value = place.get(name, MISSING)
        where = f"{where}{name}"
        if isinstance(value, types.ModuleType):
            self._of_module(value, rest)
        elif value is MISSING:
            if name in self._texts:
                self._read.setdefault(where, _Read(place, name, value))
        elif is_plain(value) or isinstance(value, types.FunctionType):
            self._read.setdefault(where, _Read(place, name, value))
            self._called(value)
        elif not self._called(value):
            self._value(value, rest, where)

    def _of_module(self, module: types.ModuleType, path: list[str]) -> None:
        """What code reads of a module, unless it is torch's or Python's."""
        name = module.__name__
        file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)
        if name.partition(".")[0] in sys.stdlib_module_names or file is None or is_covered_file(file):
            return
        chains = [path] if path else [[text] for text in self._texts]
        for chain in chains:
            self._look(vars(module), chain, f"{name}.")

    def _value(self, value: object, path: list[str], where: str) -> None:
        """A class, an object or a container that a chain has come to, with the names that follow."""
        if isinstance(value, type):
            if issubclass(value, torch.Tensor):
                self._found.classes.add(value)
            self._methods(value, value, self._names | _NOT_NAMED)
        elif is_container(value):
            for item in items_of(value) if len(items_of(value)) <= _MOST_ITEMS else ():
                self._called(item)
            return
        else:
            self._methods(type(value), value, self._names | (_NOT_NAMED - {"__init__", "__new__", "__post_init__"}))
        chains = [path] if path else [[name] for name in sorted(self._names_of(value))]
        for chain in chains:
            self._attribute(value, chain, f"{where}.")

    def _names_of(self, value: object) -> set[str]:
        """The attributes of an object that is handed on, which the same function reads, or looks for by a text."""
        if is_covered_class(_class_of(value)):
            return set()
        return {name for name in self._names if name in _vars(value) or name in self._texts or name in slots_of(value)}

    def _attribute(self, owner: Any, path: list[str], where: str) -> None:
        """An attribute of an object or of a class; those of modules are part of the model's key, but for their code."""
        own = _vars(owner)
        if isinstance(owner, nn.Module):
            value = own.get(path[0], own.get("_modules", {}).get(path[0], MISSING))
            if value is not MISSING:
                if not self._called(value) and path[1:]:
                    self._methods(type(value), value, self._names)
                return
        elif not isinstance(owner, type) and (path[0] in own or path[0] in slots_of(owner)):
            self._look(own if path[0] in own else InSlots(owner), path, where)
            return
        for base in _class_of(owner).__mro__:
            if path[0] in vars(base):
                of_class = self._found.of_class(base)
                if (
                    not is_covered_class(base)
                    and not isinstance(base, enum.EnumMeta)
                    and not is_code(of_class[path[0]])
                ):
                    self._look(of_class, path, where)
                return

    def _methods(self, cls: type, owner: object, names: frozenset[str]) -> None:
        """The methods of a class and its bases that code may call by some names."""
        for base in cls.__mro__:
            if not is_covered_class(base):
                for name in names & vars(base).keys():
                    item = vars(base)[name]
                    if isinstance(item, types.FunctionType):
                        where = f"{base.__module__}.{base.__name__}.{name}"
                        self._read.setdefault(where, _Read(self._found.of_class(base), name, item))
                    elif isinstance(item, property):
                        item = item.fget
                    elif isinstance(item, (classmethod, staticmethod)):
                        item = item.__func__
                    elif isinstance(item, functools.cached_property):
                        item = item.func
                    self.meet(item, owner)

    def _called(self, value: object) -> bool:
        """Meet what may be called; says whether a value is that."""
        if isinstance(value, functools.partial):
            return self._called(value.func)
        if isinstance(value, (types.FunctionType, types.MethodType)) or "__wrapped__" in _vars(value):
            self.meet(value)
        else:
            return isinstance(value, (types.BuiltinFunctionType, nn.Module))
        return True


def _class_of(owner: object) -> type:
    return owner if isinstance(owner, type) else type(owner)


def _vars(value: object) -> Any:
    """The attributes of an object or a class; empty where it has none."""
    own = getattr(value, "__dict__", None)
    return own if isinstance(own, (dict, types.MappingProxyType)) else {}


def _identity(place: object) -> int:
    return id(place.cell if isinstance(place, Cell) else place)


def is_plain(value: object, depth: int = 0) -> bool:
    """Whether a value is a number, a text or a flag, or a small container of such."""
    if isinstance(value, PLAIN):
        return True
    items = items_of(value) if is_container(value) and depth < DEEPEST else None
    return items is not None and len(items) <= _MOST_ITEMS and all(is_plain(item, depth + 1) for item in items)
