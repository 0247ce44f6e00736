"""The variables that a model's code and a loss read, as a key: global ones, of closures, of classes, and so on.

A coefficient in a global variable, in a closure, or on the object whose method is the loss is a number of the program.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable

from torch import nn

from graphopt.capture.code_of_model import found_by
from graphopt.capture.fingerprint import ModelFingerprint
from graphopt.capture.variables import MISSING

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

    def _read(self, model: nn.Module, called: object, changes: int) -> None:
        found = found_by(model, called)
        prints = [(module, ModelFingerprint(lasting=True)) for module in found.modules]
        keys: list[Hashable] = [fingerprint(module) for module, fingerprint in prints]
        places, contents = found.places, found.contents  # what else was found may hold what weak references refer to
        self.values = found.plain
        self._key = (*found.values, *keys)
        for sentence in found.told.keys() - self._told:
            logger.warning("%s", sentence)
        self._told |= found.told.keys()

        def unchanged(current: nn.Module, now: object, count: int) -> bool:
            if current is not model or now is not called or count != changes:
                return False
            for place, name, value in places:
                if place.get(name, MISSING) is not value:
                    return False
            return contents.unchanged() and all(
                fingerprint(module) is key for (module, fingerprint), key in zip(prints, keys, strict=True)
            )

        self._unchanged = unchanged
