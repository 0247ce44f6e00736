"""Variables in the user's Python that code reads or sets: of modules, objects, closures and the environment."""

from __future__ import annotations

import contextvars
import dataclasses
import dis
import functools
import os
import sys
import types
from typing import Any

from graphopt.capture.slots import in_slots

__all__ = [
    "ENVIRONMENT",
    "MISSING",
    "Cell",
    "Environment",
    "InContext",
    "InSlots",
    "OfFunction",
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
        for instruction in dis.get_instructions(current):
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


class OfFunction:
    """The code of a function and its defaults, which an editor may put in the place of others, likewise."""

    def __init__(self, function: types.FunctionType) -> None:
        self.function = function

    def get(self, name: str, missing: object) -> object:
        """What the function has now, or ``missing``."""
        return getattr(self.function, name, missing)


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
