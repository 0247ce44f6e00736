"""What the code of a model and of a loss reads and may change: it is followed from function to function, and not run.

Here the bytecode of functions is read: which names it loads, and which attributes of these. Functions of the user's
files are followed; those of torch and Python are not, and ``LibraryCode`` reads those of installed libraries.

What the code of a model, and of a loss around it, reads and may change: found once for each capture.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Collection, Hashable, Iterator, Mapping
from typing import NamedTuple

from torch import nn

from graphopt.capture.guards.code_owner import is_followed, is_of_library, is_of_user, is_wrapper
from graphopt.capture.guards.contents import attributes_of, is_code, users
from graphopt.capture.guards.found_variables import FoundVariables
from graphopt.capture.guards.impure_calls import TYPES_COMPARED
from graphopt.capture.guards.library_code import LibraryCode
from graphopt.capture.guards.loaded_names import (
    begun,
    chains_of,
    compares_types,
    computes_names,
    found_by_text,
    loaded_names,
    names_among,
    names_in,
    texts_in,
)
from graphopt.capture.guards.named_values import attribute_values, texts_among
from graphopt.capture.guards.reachable_values import CALLED, ReachedValues
from graphopt.capture.guards.variables import ENVIRONMENT, Cell, Computed, Variable, variables_set

__all__ = ["CodeFollower", "Reached", "found_by", "reached_by"]

_MOST = 2_000
"""Functions that are followed."""

_NOT_CALLED = frozenset((
    "__copy__", "__deepcopy__", "__del__", "__dict__", "__init__", "__new__", "__reduce__", "__repr__", "__str__",
    "__weakref__",
))  # fmt: skip
"""Special methods that no operator calls."""

_CALLS = ("__call__", "_wrapped_call_impl", "_call_impl")
"""Methods of modules through which torch calls ``forward``."""

_CONSTRUCTS = frozenset(("__init__", "__new__"))

_OF_ENVIRONMENT = frozenset(("environ", "getenv", "environb"))
_OF_MODULES = frozenset(("modules", "import_module", "__import__"))
_OF_TEXTS = frozenset(("eval", "exec", "globals"))


class CodeFollower:
    """Reads code from function to function, and notes what it meets.

    Attributes:
        found: what it has noted.
        libraries: reads the code of these.

    The other ones are those of ``reached_values.Code``.
    """

    def __init__(self, model: nn.Module) -> None:
        self.found = FoundVariables()
        self.title = type(model).__name__
        self._model = model
        self.of_model = {id(vars(module)) for module in model.modules()}
        self.whole: dict[int, tuple[object, str]] = {}
        self.names: set[str] = set()
        self.texts: set[str] = set()
        self._met: set[Hashable] = set()
        self._waiting: list[tuple[types.FunctionType, object]] = []
        self._all_texts: set[str] = set()
        self._starts: set[str] = set()  # texts of code that puts names together
        self._computes = False
        self._of_attributes = texts_among(dict(attribute_values(model)))
        self.libraries = LibraryCode(self.found, weakref.proxy(self))
        self._values = ReachedValues(weakref.proxy(self))  # so that nothing that was met outlives this object

    def follow(self) -> None:
        """Read the code of everything that was met."""
        whole = -1
        while self._waiting or self.libraries.follow() or len(self.whole) > whole:
            whole = len(self.whole)
            while self._waiting and len(self._met) < _MOST:
                self._follow(*self._waiting.pop())
            if len(self._met) >= _MOST:
                self.libraries.follow()
                return
            if self._computes:
                texts = self._all_texts.union(texts_among(self.found.plain), self._of_attributes)
                self.texts.update(name for text in texts for name in text.split("."))
            for value, where in list(self.whole.values()):
                self._handed_on(value, where)

    def _handed_on(self, value: object, where: str) -> None:
        """An object that code hands on as a whole: what code reads of objects by these names, and its operators.

        Of a class, what its objects have of it.
        """
        own = attributes_of(value)
        if self._computes:  # by a pattern, too
            self.names.update(_positions(type(value)))
        for name in (own.keys() & self.names) | begun(own, self.texts) | begun(own, self._starts, shortest=1):
            self._values.attribute(value, [name], f"{where}.")
        self.found.not_there(value, {text for text in self.texts if text.isidentifier()} - own.keys())
        if isinstance(value, type):
            cls, owner, called = value, None, _NOT_CALLED - _CONSTRUCTS
        else:
            cls, owner, called = type(value), value, _NOT_CALLED
        for base in users(cls):
            for name, item in list(vars(base).items()):
                if (name.startswith("__") and name not in called) or name in self.names:
                    if is_code(item):
                        self.found.member(base, name, where)
                    self.code_of(item, owner)

    def code_of(self, item: object, owner: object) -> None:
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
        elif isinstance(item, CALLED) or is_wrapper(item):
            self.call(item)
        elif is_of_user(item):
            self.whole[id(item)] = item, type(item).__name__

    def _follow(self, function: types.FunctionType, owner: object) -> None:
        code, name = function.__code__, function.__qualname__
        self.names.update(names_in(code))
        self.found.names |= names_in(code)
        self.texts.update(found_by_text(code))
        self._all_texts.update(texts_in(code))
        if computes_names(code):
            self._computes = True
            self._starts |= texts_in(code)
        self.found.methods_of_tensors(names_in(code))
        self._sets(function)
        self._by_text(function)
        if compares_types(code):
            self.found.told[f"{name} {TYPES_COMPARED}"] = None
        if function.__defaults__ or function.__kwdefaults__:
            self._values.content((function.__defaults__, function.__kwdefaults__), f"the defaults of {name}")
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
                self._values.look(function.__globals__, path, "")
            elif root == "module":
                self._values.look(sys.modules, path, "")
            elif root == "cell" and path[0] in code.co_freevars:
                cell = (function.__closure__ or ())[code.co_freevars.index(path[0])]
                self._values.look(Cell(cell), path, f"{function.__qualname__}: ")

    def _by_text(self, function: types.FunctionType) -> None:
        """Variables that code finds by texts: those in it, and those of global variables that it loads."""
        code, names, known = function.__code__, loaded_names(function.__code__), function.__globals__
        loaded = {value for value in map(known.get, names) if isinstance(value, str)}
        texts = sorted((texts_in(code) | loaded) - {function.__doc__ or ""})
        for text in [] if _OF_ENVIRONMENT.isdisjoint(names_in(code)) else texts:
            self._values.look(ENVIRONMENT, [text], "environment variable ")
        for text in [] if _OF_MODULES.isdisjoint(names_in(code)) else texts:
            module = sys.modules.get(text)
            if module is not None and not is_of_library(module):
                for name in names_in(code) & vars(module).keys():
                    self._values.look(sys.modules, [text, name], "")
        by_text = sorted(name for name in names & _OF_TEXTS if name not in known)
        if by_text:
            given = names_among(texts, run=by_text != ["globals"])
            wanted = given | begun(known, given)
            for name in sorted(wanted.difference(code.co_varnames, code.co_cellvars, code.co_freevars)):
                self._values.look(known, [name], "")
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
                self._values.attribute(owner, path, where)
        for name in code.co_names if "super" in code.co_names else ():
            if any(isinstance(vars(base).get(name), types.FunctionType) for base in type(owner).__mro__):
                self._values.attribute(owner, [name], where)

    def _by_class(self, code: types.CodeType, cls: type) -> None:
        """What code may read of the class of an object, found by ``type(...)``."""
        for base in users(cls):
            own = attributes_of(base)
            for name in own.keys() & names_in(code):
                self._values.of_class(base, [name], f"{cls.__name__}.")
            self.found.not_there(base, found_by_text(code) - own.keys())

    def call(self, value: object) -> None:
        """Meet what is called: a function, a method, a partial, an object with ``__call__``."""
        if isinstance(value, types.MethodType):
            self.method(value.__func__, value.__self__)
        elif isinstance(value, functools.partial):
            self._values.content(value.args, "the arguments of a partial")
            self._values.content(value.keywords, "the keywords of a partial")
            self.call(value.func)
        elif isinstance(value, types.FunctionType) or is_wrapper(value):
            registry = vars(value).get("registry")
            if isinstance(registry, Mapping):  # of functools.singledispatch
                self._values.content(registry, "functions registered by class")
            self.method(value, None)
        elif isinstance(value, nn.Module):
            self._module(value)
        else:
            self._values.attribute(value, ["__call__"], f"{type(value).__name__}.")

    def module(self, module: nn.Module) -> None:
        """Meet the code of a module, whose own attributes are read elsewhere."""
        where = f"{type(module).__name__}."
        self._values.attribute(module, ["forward"], where)
        self.found.bases(type(module))
        for base in type(module).__mro__:
            self.found.member(base, "forward", where)
            if "forward" in vars(base):
                break
        for name in _CALLS:
            self.found.member(nn.Module, name, where)
        own = vars(module)
        for value in own.values():
            if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
                self.call(value)
        for kind in ("_forward_hooks", "_forward_pre_hooks"):
            for hook in own.get(kind, {}).values():
                self.call(hook)

    def method(self, function: object, owner: object) -> None:
        """Meet a function as one of an object; behind a decorator of a library, what it decorates."""
        if not is_followed(function):
            self.libraries.meet(function, owner)
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
            self.found.places += [(Computed(function), name, part) for name, part in parts if part is not None]
            self.found.same(function.__code__, f"the code of {function.__qualname__}")
            if is_of_user(owner):
                self.found.reached.append((type(owner).__name__, owner))

    def _module(self, module: nn.Module) -> None:
        if id(vars(module)) not in self.of_model:
            self.of_model.update(id(vars(inner)) for inner in module.modules())
            self.found.modules.append(module)
            for path, inner in module.named_modules():
                self.found.reached.append((f"{type(module).__name__}.{path}".rstrip("."), inner))
                self.module(inner)


def _positions(cls: type) -> set[str]:
    """The attributes that patterns take by their positions in ``Class(first, second)``."""
    given = (vars(base).get("__match_args__") for base in users(cls))
    return {name for names in given if isinstance(names, tuple) for name in names if isinstance(name, str)}


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
