"""Who is told that a model or a step is about to train: nobody here; the layers above add those who want to know."""

from __future__ import annotations

from collections.abc import Callable

from graphopt.ir import handed_down
from graphopt.runtime.rewrite import Rewritten

__all__ = ["Observer", "observe_captures", "tell_observers"]

Observer = Callable[[Rewritten, bool], None]
"""Called behind each capture of a model or a step with what came of it, and whether it was the first one."""

_observers: list[Observer] = []


def observe_captures(observer: Observer) -> None:
    """Tell ``observer`` of every capture from now on; a second time is the same as once."""
    if observer not in _observers:
        _observers.append(observer)


def tell_observers(rewritten: Rewritten, first: bool) -> None:
    """Call every observer."""
    handed_down.complete()
    for observer in _observers:
        observer(rewritten, first)
