"""Variables in the user's Python that code reads or sets: of modules, objects, closures and the environment."""

from __future__ import annotations

import abc
import contextvars
import dataclasses
import functools
import os
import sys
import types
from typing import Any

from graphopt.capture.guards.loaded_names import instructions_of
from graphopt.capture.guards.slots import in_slots

__all__ = [
    "ENVIRONMENT",
    "MISSING",
    "Bases",
    "Cell",
    "Computed",
    "Environment",
    "InContext",
    "InSlots",
    "OfObject",
    "Variable",
    "in_context",
    "variables_set",
]

MISSING = object()
"""What a variable is that is not set."""


@functools.lru_cache(maxsize=10_000)
def variables_set(code: types.CodeType) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The global variables and those of closures that a function's code sets, with the functions inside of it."""
    found: dict[str, dict[str, None]] = {"STORE_GLOBAL": {}, "STORE_DEREF": {}}
    pending = [code]
    while pending:
        current = pending.pop()
        pending += [constant for constant in current.co_consts if isinstance(constant, types.CodeType)]
        for instruction in instructions_of(current):
            if instruction.opname in found:
                found[instruction.opname][str(instruction.argval)] = None
    own = tuple(name for name in found["STORE_DEREF"] if name in code.co_freevars)
    return tuple(found["STORE_GLOBAL"]), own


class Cell:
    """The variable of a closure, looked up as in a dictionary."""

    def __init__(self, cell: types.CellType) -> None:
        self.cell = cell

    def get(self, _name: str, missing: object) -> object:
        """What the variable is, or ``missing``."""
        try:
            return self.cell.cell_contents
        except ValueError:
            return missing

    def __setitem__(self, _name: str, value: object) -> None:
        self.cell.cell_contents = value


class Environment:
    """The variables of the process, likewise: equal texts are one object."""

    def get(self, name: str, _missing: object) -> object:
        """The text of a variable, or None."""
        value = os.environ.get(name)
        return None if value is None else sys.intern(value)

    def __setitem__(self, name: str, value: str | None) -> None:
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


ENVIRONMENT = Environment()


class InContext:
    """A variable of the context that code runs in, likewise."""

    def __init__(self, variable: contextvars.ContextVar[Any]) -> None:
        self.variable = variable

    def get(self, _name: str, missing: object) -> object:
        """What the variable is here, or ``missing``."""
        return next(iter(in_context(self.variable)), missing)


class InSlots:
    """The attributes of an object that are in slots, likewise."""

    def __init__(self, owner: object) -> None:
        self.owner = owner

    def get(self, name: str, missing: object) -> object:
        """What an attribute is, or ``missing``."""
        return dict(in_slots(self.owner)).get(name, missing)


class Computed:
    """What an object has by code of its class, likewise.

    The code of a function and its defaults, which an editor may put in the place of others; a setting of torch's.
    """

    def __init__(self, owner: object) -> None:
        self.owner = owner

    def get(self, name: str, missing: object) -> object:
        """What the object has now, or ``missing``."""
        value = getattr(self.owner, name, missing)
        return sys.intern(value) if isinstance(value, str) else value


class OfObject:
    """The class of an object, which an assignment to ``__class__`` makes another one, likewise."""

    def __init__(self, value: object) -> None:
        self.value = value

    def get(self, _name: str, _missing: object) -> object:
        """Its class now."""
        return type(self.value)


class Bases:
    """The bases of a class, and the classes that are registered with it (``abc.ABCMeta.register``), likewise."""

    def __init__(self, cls: type) -> None:
        self._cls = cls
        self._token = abc.get_cache_token()
        self._mro = cls.__mro__
        self.classes = self._read()

    def get(self, _name: str, _missing: object) -> object:
        """One object as long as they are the same."""
        token, mro = abc.get_cache_token(), self._cls.__mro__
        if token != self._token or mro is not self._mro:
            self._token, self._mro = token, mro
            if (now := self._read()) != self.classes:
                self.classes = now
        return self.classes

    def _read(self) -> tuple[type, ...]:
        return *self._mro, *sorted(_registered(self._cls), key=id)


def _registered(cls: type) -> list[type]:
    """The classes that are registered with an abstract one."""
    dump: Any = getattr(abc, "_get_dump", None)
    if dump is None or not isinstance(cls, abc.ABCMeta):
        return []
    return [each for reference in dump(cls)[0] if (each := reference()) is not None]


def in_context(variable: contextvars.ContextVar[Any]) -> tuple[Any, ...]:
    """What a variable of the context is, its default included; empty where it has none."""
    try:
        return (variable.get(),)
    except LookupError:
        return ()


@dataclasses.dataclass(frozen=True)
class Variable:
    """A variable that code reads or sets.

    Attributes:
        name: for people.
        place: the variables of a module, the attributes of an object, the cell of a closure, or the environment.
        key: its name there.
    """

    name: str
    place: dict[str, Any] | Cell | Environment
    key: str

    @property
    def identity(self) -> tuple[int, str]:
        """What tells it from all others."""
        return id(self.place.cell if isinstance(self.place, Cell) else self.place), self.key

    def get(self) -> object:
        """What it is now; an object of its own where it is not set."""
        return self.place.get(self.key, MISSING)

    def set(self, value: Any) -> None:
        """Set it to what ``get`` gave."""
        if value is not MISSING:
            self.place[self.key] = value
        elif isinstance(self.place, dict):
            self.place.pop(self.key, None)
