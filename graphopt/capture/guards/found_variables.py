"""What the code of a model and of a loss was found to read and to change: where it is kept, and what it is now."""

from __future__ import annotations

import builtins
import types
from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import nn

from graphopt.capture.guards.code_owner import is_followed, is_iterator, is_of_user, is_of_users
from graphopt.capture.guards.contents import MOST_ITEMS, Contents
from graphopt.capture.guards.fingerprint import Same, by_value
from graphopt.capture.guards.named_values import kept_values
from graphopt.capture.guards.variables import MISSING, Bases, Cell, OfObject, Variable

__all__ = ["FoundVariables"]


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


class FoundVariables:
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
        of_libraries: the plain values and small containers that installed libraries' code reads, by these names.
        names: of attributes and variables that code loads.
        classes: of tensors that code names.
    """

    def __init__(self) -> None:
        self.values: list[tuple[str, Hashable]] = []
        self.plain: dict[str, object] = {}
        self.places: list[tuple[Any, str, object]] = []
        self.contents = Contents()
        self.modules: list[nn.Module] = []
        self.reached: list[tuple[str, object]] = []
        self.iterators: list[str] = []
        self.variables: list[Variable] = []
        self.told: dict[str, None] = {}
        self.of_libraries: dict[str, object] = {}
        self.names: set[str] = set()
        self.classes: set[type] = set()
        self._seen: set[tuple[int, str]] = set()
        self._of_classes: dict[type, types.MappingProxyType[str, Any]] = {}
        self._bases: dict[type, Bases] = {}

    def place(self, place: Any, name: str, value: object) -> bool:
        """Note where something is kept; says whether that is new."""
        inner = place.cell if isinstance(place, Cell) else place.value if isinstance(place, OfObject) else place
        key = id(inner), name
        new = key not in self._seen
        if new:
            self._seen.add(key)
            self.places.append((place, name, value))
        return new

    def not_there(self, owner: object, names: Iterable[str]) -> None:
        """Note attributes that are looked for and that an object or a class does not have."""
        own = self.of_class(owner) if isinstance(owner, type) else getattr(owner, "__dict__", None)
        if own is not None:
            for name in names:
                if name not in own:
                    self.place(own, name, MISSING)

    def of_class(self, cls: type) -> types.MappingProxyType[str, Any]:
        """What a class has by name: one object for each class, as a place."""
        return self._of_classes.setdefault(cls, vars(cls))

    def member(self, cls: type, name: str, where: str = "") -> None:
        """Note what a class has under a name, or that it has nothing there.

        Args:
            cls: one of several that an object's is made of.
            name: of a method, or of something else that counts by its identity.
            where: the class, or an object of it, for people.
        """
        value = vars(cls).get(name, MISSING)
        if self.place(self.of_class(cls), name, value) and value is not MISSING:
            self.same(value, f"{where}{name} of {cls.__name__}")

    def bases(self, cls: type) -> None:
        """Note the bases of a class, and the classes that are registered with it."""
        if cls not in self._bases:
            found = self._bases[cls] = Bases(cls)
            self.places.append((found, "", found.classes))
            self.values.append((f"the bases of {cls.__name__}", tuple(map(Same, found.classes))))

    def builtin(self, name: str) -> None:
        """Note one of Python's own functions and classes, where another one may be put in its place."""
        value = vars(builtins)[name]
        if self.place(vars(builtins), name, value) and getattr(value, "__module__", "builtins") != "builtins":
            self.same(value, f"builtins.{name}")

    def methods_of_tensors(self, names: Iterable[str]) -> None:
        """Note the methods of tensors that code may call, where others may be put in their place."""
        for name in names:
            if hasattr(torch.Tensor, name):
                value = vars(torch.Tensor).get(name, MISSING)
                if self.place(self.of_class(torch.Tensor), name, value) and is_followed(value):
                    self.same(value, f"torch.Tensor.{name}")

    def kind(self, value: object, where: str) -> None:
        """Note of which class an object is, and the bases of that."""
        cls = type(value)
        if self.place(OfObject(value), "__class__", cls):
            self.same(cls, f"the class of {where}")
        if is_of_users(cls):
            self.bases(cls)

    def same(self, value: object, where: str) -> None:
        """Note something that counts by its identity."""
        self.values.append((where, Same(value)))

    def leaf(self, value: object, where: str) -> None:
        """Note a number, a text or a tensor."""
        if isinstance(value, torch.Tensor):
            self.same(value, where)
            self.plain[where] = _Shown(value)
        else:
            self.values.append((where, by_value(value)))
            self.plain[where] = value

    def content(self, value: object, where: str) -> None:
        """Note a container, or an object that counts by what it holds."""
        self.reached.append((where, value))
        self.values.append((where, by_value(value)))
        self.plain |= kept_values(value, where)
        self.contents.add(value)

    def of_library(self, value: object, where: str) -> None:
        """Note a function, a plain value or a container of such that the code of a library reads."""
        if isinstance(value, types.FunctionType):
            self.same(value, where)
            return
        self.values.append((where, by_value(value)))
        self.plain |= kept_values(value, where)
        self.contents.add(value)
        self.of_libraries[where] = value

    def takes(self, value: object, rest: list[str], where: str) -> None:
        """Note an iterator, or a container of some; of a user's one, other methods than ``__next__`` are read.

        Args:
            value: that code reads.
            rest: the names that follow.
            where: its name for people.
        """
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
        reads = bool(rest) and rest[0] != "__next__" and is_of_user(value)
        if not reads and len(inner) <= MOST_ITEMS and any(map(is_iterator, (value, *inner))):
            self.iterators.append(where)
