"""Methods that the layers above give to objects of the layers below, such as ``program.memory()``.

The classes of this layer declare such methods and look their functions up here, so that nothing below imports what
stands above. ``graphopt`` fills the table when it is first looked into.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graphopt.errors import GraphoptError
from graphopt.ir.provided import handed_down

__all__ = ["provide", "provided"]

_provided: dict[tuple[type, str], Callable[..., Any]] = {}


def provide(cls: type, name: str, function: Callable[..., Any]) -> None:
    """Let ``function`` be what ``provided(cls, name)`` gives; a later call takes the place of an earlier one."""
    _provided[cls, name] = function


def provided(cls: type, name: str) -> Callable[..., Any]:
    """The function behind a method of ``cls``.

    Raises:
        GraphoptError: where the layer that has it is not imported.
    """
    handed_down.complete()
    found = _provided.get((cls, name))
    if found is None:
        raise GraphoptError(f"{cls.__name__} has no {name!r} here: import graphopt, which brings it along")
    return found
