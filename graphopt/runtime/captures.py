"""Captured programs by call signature, and which of them serves a call."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import torch

from graphopt.runtime.size_rules import SizeRules

__all__ = ["Captures", "HasRules"]

logger = logging.getLogger(__name__)
_MANY = 8
"""The captures at each multiple of which a user hears of them."""

_MOST = 256
"""The captures for fixed sizes that are kept: a run whose calls never repeat would fill the memory otherwise."""


class HasRules(Protocol):
    """What is kept per signature."""

    rules: SizeRules


E = TypeVar("E", bound=HasRules)


@dataclass
class Captures(Generic[E]):
    """Keeps one capture per signature, and says when captures pile up; of very many, those that were used last."""

    _found: dict[Hashable, list[E]] = field(default_factory=dict)
    latest: E | None = None
    _told: int = 0
    _lets_go: bool = False

    def find(self, key: Hashable, tensors: list[torch.Tensor]) -> E | None:
        """The capture that serves a call; None where there is none yet.

        Raises:
            GraphoptError: for sizes that are outside of what a user has declared.
        """
        for capture in self._found.get(key, ()):
            if not capture.rules or capture.rules.match(tensors) is not None:
                if len(self._found) > _MOST // 2:
                    self._found[key] = self._found.pop(key)
                self.latest = capture
                return capture
        return None

    def add(self, key: Hashable, capture: E) -> E:
        """Keep a capture for calls of a signature; one can serve several."""
        self._found.setdefault(key, []).append(capture)
        self.latest = capture
        self._let_go()
        count = len(self.all())
        if count % _MANY == 0 and count != self._told:
            self._told = count
            logger.warning(
                "captured %d programs for different calls; sizes or Python arguments that change from call to call "
                "each need one: pad the batch, pass numbers as tensors, or give dynamic_shapes=",
                count,
            )
        return capture

    def _let_go(self) -> None:
        """Forget the captures for fixed sizes that have not been used for longest, where there are too many."""
        fixed = {id(capture): key for key, found in self._found.items() for capture in found if not capture.rules}
        for identity, key in list(fixed.items())[: max(0, len(fixed) - _MOST)]:
            self._found[key] = [capture for capture in self._found[key] if id(capture) != identity]
            if not self._found[key]:
                del self._found[key]
            if not self._lets_go:
                self._lets_go = True
                logger.warning(
                    "there are more than %d programs for different calls: the one that was not used for longest is let "
                    "go, and is captured anew when it is called for",
                    _MOST,
                )

    def all(self) -> list[E]:
        """Every capture, once."""
        return list({id(capture): capture for captures in self._found.values() for capture in captures}.values())

    def clear(self) -> None:
        """Forget every entry."""
        self._found.clear()
        self.latest = None
