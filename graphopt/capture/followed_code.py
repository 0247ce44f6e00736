"""What the code of a model and of a loss reads and may change: it is followed from function to function, and not run.

Here the bytecode of functions is read: which names it loads, and which attributes of these. Functions of the user's
files are followed; those of torch, Python and installed libraries are not.
"""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import sys
import types
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from graphopt.capture.contents import CONTAINERS, MOST_ITEMS, PLAIN, Contents, attributes_of, users
from graphopt.capture.fingerprint import Same, by_value
from graphopt.capture.named_values import kept_values
from graphopt.capture.names_loaded import chains_of, compares_types
from graphopt.capture.told_calls import TYPES_COMPARED, told_call
from graphopt.capture.variables import (
    ENVIRONMENT,
    MISSING,
    Cell,
    Environment,
    InContext,
    InSlots,
    Variable,
    variables_set,
)
from graphopt.capture.whose_code import (
    GENERATORS,
    LIBRARIES,
    file_of,
    is_covered_file,
    is_followed,
    is_iterator,
    is_of_library,
    is_of_user,
)

__all__ = ["Found", "found_by", "reached_by"]

_MOST = 2_000
"""Functions that are followed."""

_CHANGES = frozenset(
    ("add", "append", "appendleft", "clear", "discard", "extend", "insert", "remove", "setdefault", "update")
)
"""Methods of containers behind whose call nothing of the container is known."""

_NOT_CALLED = frozenset(
    ("__init__", "__new__", "__repr__", "__str__", "__del__", "__reduce__", "__deepcopy__", "__copy__")
)
"""Special methods that no operator calls."""

_OF_ENVIRONMENT = frozenset(("environ", "getenv", "environb"))


class _Shown:
    """A tensor as it is shown to people, without keeping it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._text = f"a tensor at {id(tensor):#x}"

    def __repr__(self) -> str:
        return self._text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Shown) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)


class Found:
    """What is read, where it is kept, and what it is now.

    Attributes:
        values: keys of what is there, with names for people.
        plain: the numbers, texts and tensors among it and in its containers, by these names.
        places: where to look, the name there, and the object that was found.
        contents: containers whose items count.
        modules: that are called and are not the model's.
        reached: containers, objects, classes and other modules that code may change, by names for people.
        iterators: that code may take from, by names for people.
        variables: that code sets or reads.
        told: what is to be said of functions that code calls.
    """

    def __init__(self, model: nn.Module) -> None:
        self.values: list[tuple[str, Hashable]] = []
        self.plain: dict[str, object] = {}
        self.places: list[tuple[Any, str, object]] = []
        self.contents = Contents()
        self.modules: list[nn.Module] = []
        self.reached: list[tuple[str, object]] = []
        self.iterators: list[str] = []
        self.variables: list[Variable] = []
        self.told: dict[str, None] = {}
        self._model = model
        self._of_model = {id(vars(module)) for module in model.modules()}
        self._seen: set[tuple[int, str]] = set()
        self._met: set[Hashable] = set()
        self._waiting: list[tuple[types.FunctionType, object]] = []
        self._whole: dict[int, tuple[object, str]] = {}
        self._names: set[str] = set()

    def follow(self) -> None:
        """Read the code of everything that was met."""
        while self._waiting and len(self._met) < _MOST:
            self._follow()
            for value, where in list(self._whole.values()):
                self._handed_on(value, where)

    def _handed_on(self, value: object, where: str) -> None:
        """An object that code hands on as a whole: what code reads of objects by these names, and its operators."""
        for name in [name for name in attributes_of(value) if name in self._names]:
            self._attribute(value, [name], f"{where}.")
        for base in users(type(value)):
            for name, item in list(vars(base).items()):
                operator = name.startswith("__") and name not in _NOT_CALLED
                if isinstance(item, types.FunctionType) and (operator or name in self._names):
                    self.method(item, value)

    def _follow(self) -> None:
        while self._waiting and len(self._met) < _MOST:
            function, owner = self._waiting.pop()
            code, name = function.__code__, function.__qualname__
            self._names.update(code.co_names)
            self._sets(function)
            self._environment(code)
            if compares_types(code):
                self.told[f"{name} {TYPES_COMPARED}"] = None
            if function.__defaults__ or function.__kwdefaults__:
                self._content((function.__defaults__, function.__kwdefaults__), f"the defaults of {name}")
            for root, *path in chains_of(code):
                if root == "global":
                    self._look(function.__globals__, path, "")
                elif root == "module":
                    self._look(sys.modules, path, "")
                elif root == "cell" and path[0] in code.co_freevars:
                    cell = (function.__closure__ or ())[code.co_freevars.index(path[0])]
                    self._look(Cell(cell), path, f"{name}: ")
            if owner is not None:
                self._of_owner(code, owner)

    def _environment(self, code: types.CodeType) -> None:
        if not _OF_ENVIRONMENT.isdisjoint(code.co_names):
            for text in code.co_consts:
                if isinstance(text, str):
                    self._look(ENVIRONMENT, [text], "environment variable ")

    def _sets(self, function: types.FunctionType) -> None:
        """Note the variables that a function sets."""
        in_module, in_closures = variables_set(function.__code__)
        self.variables += [Variable(f"the global variable {key}", function.__globals__, key) for key in in_module]
        for key in in_closures:
            cell = (function.__closure__ or ())[function.__code__.co_freevars.index(key)]
            self.variables.append(Variable(f"the variable {key} of {function.__qualname__}", Cell(cell), key))

    def _of_owner(self, code: types.CodeType, owner: object) -> None:
        """What a method reads of its object, and which other methods it may call, by ``super()`` too."""
        where = f"{type(owner).__name__}."
        for root, *path in chains_of(code):
            if root == "self" and path:
                self._attribute(owner, path, where)
        for name in code.co_names if "super" in code.co_names else ():
            if any(isinstance(vars(base).get(name), types.FunctionType) for base in type(owner).__mro__):
                self._attribute(owner, [name], where)

    def call(self, value: object) -> None:
        """Meet what is called: a function, a method, a partial, an object with ``__call__``."""
        if isinstance(value, types.MethodType):
            self.method(value.__func__, value.__self__)
        elif isinstance(value, functools.partial):
            self._content(value.args, "the arguments of a partial")
            self._content(value.keywords, "the keywords of a partial")
            self.call(value.func)
        elif isinstance(value, types.FunctionType):
            self.method(value, None)
        elif isinstance(value, nn.Module):
            self._module(value)
        else:
            self._attribute(value, ["__call__"], f"{type(value).__name__}.")

    def module(self, module: nn.Module) -> None:
        """Meet the code of a module, whose own attributes are read elsewhere."""
        self._attribute(module, ["forward"], f"{type(module).__name__}.")
        own = vars(module)
        for value in own.values():
            if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
                self.call(value)
        for kind in ("_forward_hooks", "_forward_pre_hooks"):
            for hook in own.get(kind, {}).values():
                self.call(hook)

    def method(self, function: object, owner: object) -> None:
        """Meet a function as one of an object; behind a decorator of a library, what it decorates."""
        while not is_followed(function) and hasattr(function, "__wrapped__"):
            function = getattr(function, "__wrapped__", None)
        if isinstance(function, types.MethodType):
            owner = function.__self__
            function = function.__func__
        key = id(function), type(owner) if isinstance(owner, nn.Module) else id(owner)
        if key not in self._met and is_followed(function):
            assert isinstance(function, types.FunctionType)
            self._met.add(key)
            self._waiting.append((function, owner))
            if is_of_user(owner):
                self.reached.append((type(owner).__name__, owner))

    def _module(self, module: nn.Module) -> None:
        if id(vars(module)) not in self._of_model:
            self._of_model.update(id(vars(inner)) for inner in module.modules())
            self.modules.append(module)
            for path, inner in module.named_modules():
                self.reached.append((f"{type(module).__name__}.{path}".rstrip("."), inner))
                self.module(inner)

    def _look(self, place: Any, path: list[str], where: str) -> None:
        """Go along a chain from where its first name is kept."""
        name, *rest = path
        value = place.get(name, MISSING)
        where = f"{where}{name}"
        if told := told_call(value, rest):
            self.told[f"the code of {type(self._model).__name__} {told}"] = None
        if value is MISSING:
            return
        if isinstance(value, (types.ModuleType, type)) and is_of_library(value):
            self._of_library(value, rest, where)
            return
        if self._place(place, name, value) and isinstance(place, (dict, Cell, Environment)):
            self.variables.append(Variable(where, place, name))
        self._value(value, rest, where)

    def _place(self, place: Any, name: str, value: object) -> bool:
        """Note where something is kept; says whether that is new."""
        key = id(place.cell) if isinstance(place, Cell) else id(place), name
        new = key not in self._seen
        if new:
            self._seen.add(key)
            self.places.append((place, name, value))
        return new

    def _of_library(self, value: object, path: list[str], where: str) -> None:
        """A function or a class that a library has under a name, where another one may be put in its place."""
        for name in path:
            if not isinstance(value, types.ModuleType):
                return
            place, value = vars(value), vars(value).get(name, MISSING)
            if value is MISSING:
                return
            where = f"{where}.{name}"
            if self._place(place, name, value):
                self.values.append((where, Same(value)))

    def _value(self, value: object, rest: list[str], where: str) -> None:
        """What a chain has come to, with the names that follow."""
        self._takes(value, rest, where)
        if isinstance(value, (*CONTAINERS, *GENERATORS)) or is_of_user(value):
            self.reached.append((where, value))
        if isinstance(value, types.ModuleType):
            if rest:
                self._look(vars(value), rest, f"{where}.")
        elif isinstance(value, contextvars.ContextVar):
            self._look(InContext(value), [value.name, *rest[1:]], f"{where}: ")
        elif isinstance(value, type):
            self.reached.append((where, value))
            self._of_class(value, rest, f"{where}.")
        elif isinstance(value, (types.FunctionType, types.MethodType, functools.partial, nn.Module)):
            self.values.append((where, Same(getattr(value, "__func__", value))))
            self.call(value)
        elif isinstance(value, CONTAINERS):
            if not (rest and rest[0] in _CHANGES):
                self._content(value, where)
        else:
            self._object(value, rest, where)

    def _takes(self, value: object, rest: list[str], where: str) -> None:
        """Note an iterator, or a container of some; of a user's one, other methods than ``__next__`` are read."""
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
        reads = bool(rest) and rest[0] != "__next__" and is_of_user(value)
        if not reads and len(inner) <= MOST_ITEMS and any(map(is_iterator, (value, *inner))):
            self.iterators.append(where)

    def _object(self, value: object, rest: list[str], where: str) -> None:
        if isinstance(value, PLAIN):
            self.values.append((where, by_value(value)))
            self.plain[where] = value
        elif isinstance(value, torch.Tensor):
            self.values.append((where, Same(value)))
            self.plain[where] = _Shown(value)
        elif rest:
            self._attribute(value, rest, f"{where}.")
        elif dataclasses.is_dataclass(value) or isinstance(value, types.SimpleNamespace):
            self._content(value, where)
        else:
            self.values.append((where, Same(value)))
            if is_of_user(value):
                self._whole[id(value)] = value, where

    def _of_class(self, cls: type, path: list[str], where: str) -> None:
        """An attribute of a class that is used as a name for variables."""
        for base in cls.__mro__ if path else ():
            if path[0] in vars(base) and not is_covered_file(file_of(base)):
                self._look(vars(base), path, where)
                return

    def _attribute(self, owner: object, path: list[str], where: str) -> None:
        """An attribute of an object: its own, or its class's."""
        own = getattr(owner, "__dict__", None)
        if isinstance(own, dict) and path[0] in own:
            value = own[path[0]]
            of_model = isinstance(owner, nn.Module) and id(own) in self._of_model
            if not of_model or isinstance(value, types.ModuleType):
                self._look(own, path, where)
            else:
                self._takes(value, path[1:], f"{where}{path[0]}")
            return
        bases = [base for base in type(owner).__mro__ if path[0] in vars(base)]
        for base in bases:
            if not self._of_base(base, owner, path, where):
                return
        if not bases and isinstance(owner, Mapping):
            self._content(owner, where.rstrip("."))

    def _of_base(self, base: type, owner: object, path: list[str], where: str) -> bool:
        """What one class gives an object; says whether that is a method, behind which others are met by ``super()``."""
        name = path[0]
        value = vars(base)[name]
        if isinstance(value, property):
            self.method(value.fget, owner)
        elif isinstance(value, (staticmethod, classmethod)):
            self.method(value.__func__, owner)
        elif isinstance(value, types.FunctionType):
            if not is_covered_file(file_of(base)) and not any(part in file_of(base) for part in LIBRARIES):
                self.places.append((vars(base), name, value))
                self.values.append((f"{where}{name} of {base.__name__}", Same(value)))
            self.method(value, owner)
            return True
        elif isinstance(value, types.MemberDescriptorType):
            self._look(InSlots(owner), path, where)
        elif hasattr(type(value), "__get__"):
            return True
        elif not is_covered_file(file_of(base)) and not callable(value):
            self._look(vars(base), path, where)
        return False

    def _content(self, value: object, where: str) -> None:
        self.reached.append((where, value))
        self.values.append((where, by_value(value)))
        self.plain |= kept_values(value, where)
        self.contents.add(value)


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


def found_by(model: nn.Module, called: object) -> Found:
    """What the code of a model, and of a function that is captured around it, reads."""
    found = Found(model)
    for module in _one_of_each(model):
        found.module(module)
    if isinstance(called, types.FunctionType):
        found.method(called, model)  # its first argument
    elif called is not None:
        found.call(called)
    found.follow()
    return found


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
