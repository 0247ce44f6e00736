"""The variables that a model's code and a loss read, as a key: global ones, of closures, of classes, and so on.

A coefficient in a global variable, in a closure, or on the object whose method is the loss is a number of the program.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable
from typing import Any

from torch import nn

from graphopt import _torch
from graphopt.capture.guards.code_analysis import found_by
from graphopt.capture.guards.fingerprint import ModelFingerprint, by_value
from graphopt.capture.guards.variables import MISSING

__all__ = ["VariablesRead"]

logger = logging.getLogger("graphopt")


class VariablesRead:
    """The variables that a model's code and a loss read, as a key, computed again only where one has changed.

    Attributes:
        values: the numbers, texts and tensors among them, by names for people.
    """

    def __init__(self) -> None:
        self._unchanged: Callable[[nn.Module, object, int], bool] = lambda model, called, changes: False
        self._key: Hashable = None
        self._told: set[str] = set()
        self._of_libraries: dict[str, Hashable] = {}
        self._changing: set[str] = set()
        self.values: dict[str, object] = {}

    def __call__(self, model: nn.Module, called: object, changes: int) -> Hashable:
        """The key as it is now.

        Args:
            model: that is captured.
            called: a function that is captured around it, a loss for instance; None for the model alone.
            changes: how often the model itself was found changed (``ModelFingerprint.changes``).
        """
        if not self._unchanged(model, called, changes):
            self._read(model, called, changes)
        return self._key

    def captured(self, model: nn.Module, called: object, changes: int) -> None:
        """Leave out of later keys what the code of libraries has changed while a capture ran it: its counts and caches.

        Args: as for a call, before the capture.
        """
        before = self._of_libraries
        self(model, called, changes)
        own = {name for name, key in self._of_libraries.items() if before.get(name, key) != key}
        if own:
            self._changing |= own
            self._read(model, called, changes)

    def _read(self, model: nn.Module, called: object, changes: int) -> None:
        found = found_by(model, called, self._changing)
        prints = [(module, ModelFingerprint(lasting=True)) for module in found.modules]
        keys: list[Hashable] = [fingerprint(module) for module, fingerprint in prints]
        places, contents = (
            _Places(found.places),
            found.contents,
        )  # what else was found may hold what weak references refer to
        self.values = found.plain
        self._of_libraries = {name: by_value(value) for name, value in found.of_libraries.items()}
        self._key = (*found.values, *keys)
        for sentence in found.told.keys() - self._told:
            logger.warning("%s", sentence)
        self._told |= found.told.keys()

        def unchanged(current: nn.Module, now: object, count: int) -> bool:
            if current is not model or now is not called or count != changes:
                return False
            return (
                places.unchanged()
                and contents.unchanged()
                and all(fingerprint(module) is key for (module, fingerprint), key in zip(prints, keys, strict=True))
            )

        self._unchanged = unchanged


class _Places:
    """Where variables are kept: dictionaries that nothing was assigned to are not looked at one variable at a time.

    Args:
        places: where to look, the name there, and the object that was found.
    """

    def __init__(self, places: Iterable[tuple[Any, str, object]]) -> None:
        self._one_by_one: list[tuple[Any, str, object]] = []
        self._inside: dict[int, list[tuple[Any, str, object]]] = {}
        self._versions: dict[int, int] = {}
        for place, name, value in places:
            if type(place) is dict:
                self._inside.setdefault(id(place), []).append((place, name, value))
                self._versions[id(place)] = _torch.dict_version(place)
            else:
                self._one_by_one.append((place, name, value))
        self._same = self._watched()

    def _watched(self) -> _torch.DictionariesUnchanged:
        return _torch.DictionariesUnchanged([inside[0][0] for inside in self._inside.values()])

    def unchanged(self) -> bool:
        """Whether every variable is the object that was found."""
        if not self._same():
            for key, inside in list(self._inside.items()):
                if _torch.dict_version(inside[0][0]) != self._versions[key]:
                    self._one_by_one += self._inside.pop(key)
            self._same = self._watched()
        return all(place.get(name, MISSING) is value for place, name, value in self._one_by_one)
