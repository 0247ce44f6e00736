"""What the code of a model and of a loss reads and may change: it is followed from function to function, and not run.

Here the bytecode of functions is read: which names it loads, and which attributes of these. Functions of the user's
files are followed; those of torch, Python and installed libraries are not.
"""

from __future__ import annotations

import builtins
import contextvars
import dataclasses
import functools
import sys
import types
import weakref
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import nn

from graphopt.capture.contents import (
    CONTAINERS,
    MOST_ITEMS,
    PLAIN,
    attributes_of,
    is_container,
    items_of,
    raw_bytes,
    users,
)
from graphopt.capture.found_variables import FoundVariables
from graphopt.capture.names_loaded import (
    begun,
    chains_of,
    compares_types,
    found_by_text,
    loaded_names,
    names_among,
    names_in,
    texts_in,
)
from graphopt.capture.told_calls import TYPES_COMPARED, told_call
from graphopt.capture.variables import (
    ENVIRONMENT,
    MISSING,
    Cell,
    Environment,
    InContext,
    InSlots,
    OfFunction,
    Variable,
    variables_set,
)
from graphopt.capture.whose_code import (
    GENERATORS,
    LIBRARIES,
    file_of,
    is_covered_file,
    is_followed,
    is_of_library,
    is_of_user,
    is_of_users,
    is_wrapper,
)

__all__ = ["CodeFollower"]

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

_CONSTRUCTS = frozenset(("__init__", "__new__"))

_OF_ENVIRONMENT = frozenset(("environ", "getenv", "environb"))
_OF_MODULES = frozenset(("modules", "import_module", "__import__"))
_OF_TEXTS = frozenset(("eval", "exec", "globals"))

_SHARED = "multiprocessing.sharedctypes"
"""The module of numbers and arrays that processes share."""


class CodeFollower:
    """Reads code from function to function, and notes what it meets.

    Attributes:
        found: what it has noted.
    """

    def __init__(self, model: nn.Module) -> None:
        self.found = FoundVariables()
        self._model = model
        self._of_model = {id(vars(module)) for module in model.modules()}
        self._met: set[Hashable] = set()
        self._waiting: list[tuple[types.FunctionType, object]] = []
        self._whole: dict[int, tuple[object, str]] = {}
        self._names: set[str] = set()
        self._texts: set[str] = set()

    def follow(self) -> None:
        """Read the code of everything that was met."""
        whole = -1
        while self._waiting or len(self._whole) > whole:
            whole = len(self._whole)
            while self._waiting and len(self._met) < _MOST:
                self._follow(*self._waiting.pop())
            if len(self._met) >= _MOST:
                return
            for value, where in list(self._whole.values()):
                self._handed_on(value, where)

    def _handed_on(self, value: object, where: str) -> None:
        """An object that code hands on as a whole: what code reads of objects by these names, and its operators.

        Of a class, what its objects have of it.
        """
        own = attributes_of(value)
        for name in [name for name in own if name in self._names or begun([name], self._texts)]:
            self._attribute(value, [name], f"{where}.")
        self.found.not_there(value, self._texts - own.keys())
        of_class = isinstance(value, type)
        owner, called = (None, _NOT_CALLED - _CONSTRUCTS) if of_class else (value, _NOT_CALLED)
        for base in users(value if isinstance(value, type) else type(value)):
            for name, item in list(vars(base).items()):
                if (name.startswith("__") and name not in called) or name in self._names:
                    self._code_of(item, owner)

    def _code_of(self, item: object, owner: object) -> None:
        """Meet the code of what a class has under a name."""
        if isinstance(item, types.FunctionType):
            self.method(item, owner)
        elif isinstance(item, property):
            self.method(item.fget, owner)
        elif isinstance(item, (classmethod, staticmethod)):
            self.method(item.__func__, owner)
        elif isinstance(item, functools.cached_property):
            self.method(item.func, owner)
        elif isinstance(item, functools.singledispatchmethod):
            self.call(item.dispatcher)
        elif isinstance(item, _CALLED) or is_wrapper(item):
            self.call(item)
        elif is_of_user(item):
            self._whole[id(item)] = item, type(item).__name__

    def _follow(self, function: types.FunctionType, owner: object) -> None:
        code, name = function.__code__, function.__qualname__
        self._names.update(names_in(code))
        self._texts.update(found_by_text(code))
        self._sets(function)
        self._by_text(function)
        if compares_types(code):
            self.found.told[f"{name} {TYPES_COMPARED}"] = None
        if function.__defaults__ or function.__kwdefaults__:
            self._content((function.__defaults__, function.__kwdefaults__), f"the defaults of {name}")
        self._chains(function)
        if owner is not None:
            self._of_owner(code, owner)
        if not {"type", "__class__"}.isdisjoint(code.co_names):
            whose = self._model.modules() if owner is None else [owner]
            for cls in {type(value) for value in whose}:
                self._by_class(code, cls)

    def _chains(self, function: types.FunctionType) -> None:
        """Variables that code names: global ones, of closures, and what it imports."""
        code = function.__code__
        for root, *path in chains_of(code):
            if root == "global":
                self._look(function.__globals__, path, "")
            elif root == "module":
                self._look(sys.modules, path, "")
            elif root == "cell" and path[0] in code.co_freevars:
                cell = (function.__closure__ or ())[code.co_freevars.index(path[0])]
                self._look(Cell(cell), path, f"{function.__qualname__}: ")

    def _by_text(self, function: types.FunctionType) -> None:
        """Variables that code finds by texts: those in it, and those of global variables that it loads."""
        code, names, known = function.__code__, loaded_names(function.__code__), function.__globals__
        loaded = {value for value in map(known.get, names) if isinstance(value, str)}
        texts = sorted((texts_in(code) | loaded) - {function.__doc__ or ""})
        for text in [] if _OF_ENVIRONMENT.isdisjoint(names_in(code)) else texts:
            self._look(ENVIRONMENT, [text], "environment variable ")
        for text in [] if _OF_MODULES.isdisjoint(names_in(code)) else texts:
            module = sys.modules.get(text)
            if module is not None and not is_of_library(module):
                for name in names_in(code) & vars(module).keys():
                    self._look(sys.modules, [text, name], "")
        by_text = sorted(name for name in names & _OF_TEXTS if name not in known)
        if by_text:
            given = names_among(texts, run=by_text != ["globals"])
            wanted = given | begun(known, given)
            for name in sorted(wanted.difference(code.co_varnames, code.co_cellvars, code.co_freevars)):
                self._look(known, [name], "")
            if not given:
                self.found.told[
                    f"{function.__qualname__} finds variables by a text ({by_text[0]}), and a program has what they "
                    "were at its capture"
                ] = None

    def _sets(self, function: types.FunctionType) -> None:
        """Note the variables that a function sets."""
        in_module, in_closures = variables_set(function.__code__)
        self.found.variables += [Variable(f"the global variable {key}", function.__globals__, key) for key in in_module]
        for key in in_closures:
            cell = (function.__closure__ or ())[function.__code__.co_freevars.index(key)]
            self.found.variables.append(Variable(f"the variable {key} of {function.__qualname__}", Cell(cell), key))

    def _of_owner(self, code: types.CodeType, owner: object) -> None:
        """What a method reads of its object, and which other methods it may call, by ``super()`` too."""
        where = f"{type(owner).__name__}."
        for root, *path in chains_of(code):
            if root == "self" and path:
                self._attribute(owner, path, where)
        for name in code.co_names if "super" in code.co_names else ():
            if any(isinstance(vars(base).get(name), types.FunctionType) for base in type(owner).__mro__):
                self._attribute(owner, [name], where)

    def _by_class(self, code: types.CodeType, cls: type) -> None:
        """What code may read of the class of an object, found by ``type(...)``."""
        for base in users(cls):
            own = attributes_of(base)
            for name in own.keys() & names_in(code):
                self._of_class(base, [name], f"{cls.__name__}.")
            self.found.not_there(base, found_by_text(code) - own.keys())

    def call(self, value: object) -> None:
        """Meet what is called: a function, a method, a partial, an object with ``__call__``."""
        if isinstance(value, types.MethodType):
            self.method(value.__func__, value.__self__)
        elif isinstance(value, functools.partial):
            self._content(value.args, "the arguments of a partial")
            self._content(value.keywords, "the keywords of a partial")
            self.call(value.func)
        elif isinstance(value, types.FunctionType) or is_wrapper(value):
            registry = vars(value).get("registry")
            if isinstance(registry, Mapping):  # of functools.singledispatch
                self._content(registry, "functions registered by class")
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
            parts = [(name, getattr(function, name)) for name in ("__code__", "__defaults__", "__kwdefaults__")]
            self.found.places += [(OfFunction(function), name, part) for name, part in parts if part is not None]
            self.found.same(function.__code__, f"the code of {function.__qualname__}")
            if is_of_user(owner):
                self.found.reached.append((type(owner).__name__, owner))

    def _module(self, module: nn.Module) -> None:
        if id(vars(module)) not in self._of_model:
            self._of_model.update(id(vars(inner)) for inner in module.modules())
            self.found.modules.append(module)
            for path, inner in module.named_modules():
                self.found.reached.append((f"{type(module).__name__}.{path}".rstrip("."), inner))
                self.module(inner)

    def _look(self, place: Any, path: list[str], where: str) -> None:
        """Go along a chain from where its first name is kept."""
        name, *rest = path
        value = place.get(name, MISSING)
        where = f"{where}{name}"
        if told := told_call(value, rest):
            self.found.told[f"the code of {type(self._model).__name__} {told}"] = None
        if value is MISSING:
            if not hasattr(builtins, name):
                self.found.place(place, name, value)
            return
        if isinstance(value, (types.ModuleType, type)) and is_of_library(value):
            self._of_library(value, rest, where)
            return
        if self.found.place(place, name, value) and isinstance(place, (dict, Cell, Environment)):
            self.found.variables.append(Variable(where, place, name))
        self._value(value, rest, where)

    def _of_library(self, value: object, path: list[str], where: str) -> None:
        """A function or a class that a library has under a name, where another one may be put in its place."""
        for name in path:
            if not isinstance(value, types.ModuleType):
                return
            place, value = vars(value), vars(value).get(name, MISSING)
            if value is MISSING:
                return
            where = f"{where}.{name}"
            if self.found.place(place, name, value):
                self.found.same(value, where)

    def _value(self, value: object, rest: list[str], where: str) -> None:
        """What a chain has come to, with the names that follow."""
        self.found.takes(value, rest, where)
        if isinstance(value, (*CONTAINERS, *GENERATORS)) or is_of_user(value):
            self.found.reached.append((where, value))
        if isinstance(value, types.ModuleType):
            if rest:
                self._look(vars(value), rest, f"{where}.")
        elif isinstance(value, contextvars.ContextVar):
            self._look(InContext(value), [value.name, *rest[1:]], f"{where}: ")
        elif isinstance(value, type):
            self.found.reached.append((where, value))
            self._whole[id(value)] = value, where
            self._of_class(value, rest, f"{where}.")
        elif isinstance(value, _CALLED) or is_wrapper(value):
            self.found.same(getattr(value, "__func__", value), where)
            self.call(value)
            if isinstance(value, types.FunctionType) and rest:
                self._look(vars(value), rest, f"{where}.")
        elif isinstance(value, CONTAINERS):
            if not (rest and rest[0] in _CHANGES):
                self._content(value, where)
        else:
            self._object(value, rest, where)

    def _object(self, value: object, rest: list[str], where: str) -> None:
        if isinstance(value, (*PLAIN, torch.Tensor)):
            self.found.leaf(value, where)
        elif isinstance(value, weakref.ReferenceType):
            self.found.same(value, where)
            if is_of_user(value()):  # of which nothing is kept but its attributes
                self._whole[id(value)] = value(), where
        elif raw_bytes(value) is not None or type(value).__module__ == _SHARED:
            self._content(value, where)
        elif rest:
            self._attribute(value, rest, f"{where}.")
        elif dataclasses.is_dataclass(value) or isinstance(value, types.SimpleNamespace):
            self._content(value, where)
        else:
            self.found.same(value, where)
            if is_of_user(value):
                self._whole[id(value)] = value, where

    def _of_class(self, cls: type, path: list[str], where: str) -> None:
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
                    self._look(self.found.of_class(base), path, where)
                return

    def _attribute(self, owner: object, path: list[str], where: str) -> None:
        """An attribute of an object: its own, or its class's."""
        if isinstance(owner, type):
            self._of_class(owner, path, where)
            return
        for base in users(type(owner)):
            for name in {"__getattr__", "__getattribute__"} & vars(base).keys():
                self.method(vars(base)[name], owner)
        own = getattr(owner, "__dict__", None)
        if path[0] == "__class__":
            self._of_class(type(owner), path[1:], where)
        elif isinstance(own, dict) and path[0] in (*own, "__dict__"):
            self._own_attribute(owner, own, path, where)
        else:
            self._of_bases(owner, path, where)

    def _own_attribute(self, owner: object, own: dict[str, Any], path: list[str], where: str) -> None:
        """An attribute that an object has itself; those of the model's modules are part of its key."""
        of_model = isinstance(owner, nn.Module) and id(own) in self._of_model
        value = own.get(path[0])
        if path[0] not in own:  # all of them
            if not of_model:
                self._content(own, where.rstrip("."))
        elif not of_model or isinstance(value, types.ModuleType):
            self._look(own, path, where)
        else:
            self.found.takes(value, path[1:], f"{where}{path[0]}")

    def _of_bases(self, owner: object, path: list[str], where: str) -> None:
        """An attribute that an object has by its class, or does not have."""
        bases = [base for base in type(owner).__mro__ if path[0] in vars(base)]
        for base in bases:
            if not self._of_base(base, owner, path, where):
                return
        if not bases and isinstance(owner, Mapping):
            self._content(owner, where.rstrip("."))
        elif not bases and id(getattr(owner, "__dict__", None)) not in self._of_model:
            self.found.not_there(owner, path[:1])

    def _of_base(self, base: type, owner: object, path: list[str], where: str) -> bool:
        """What one class gives an object; says whether that is a method, behind which others are met by ``super()``."""
        name = path[0]
        value = vars(base)[name]
        if isinstance(value, types.MemberDescriptorType):
            self._look(InSlots(owner), path, where)
            return False
        code = callable(value) or hasattr(type(value), "__get__")
        of_library = is_covered_file(file_of(base)) or any(part in file_of(base) for part in LIBRARIES)
        if code and not of_library and self.found.place(self.found.of_class(base), name, value):
            self.found.same(value, f"{where}{name} of {base.__name__}")
        if code:
            self._code_of(value, owner)
        elif not is_covered_file(file_of(base)):
            self._look(self.found.of_class(base), path, where)
        return code

    def _content(self, value: object, where: str) -> None:
        self.found.content(value, where)
        self._code_in(value, where)

    def _code_in(self, value: Any, where: str, depth: int = 0) -> None:
        """Meet the code of what is in a container."""
        items = items_of(value) if is_container(value) and depth < 3 else ()
        for item in items if len(items) <= MOST_ITEMS else ():
            if isinstance(item, _CALLED) or is_wrapper(item):
                self.call(item)
            elif is_of_user(item) or (isinstance(item, type) and is_of_users(item)):
                self._whole[id(item)] = item, where
            else:
                self._code_in(item, where, depth + 1)


_CALLED = (types.FunctionType, types.MethodType, functools.partial, nn.Module)
