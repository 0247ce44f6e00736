"""Attributes that objects keep in ``__slots__``, beside a dictionary or in its place."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

__all__ = ["in_slots", "slots_of"]


def slots_of(value: object) -> tuple[str, ...]:
    """The names in ``__slots__`` of an object's class and its bases, as they are among the attributes."""
    cls: Any = type(value)
    return _names(cls)


@functools.lru_cache(maxsize=10_000)
def _names(cls: type) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for base in cls.__mro__:
        slots: Any = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else tuple(slots):
            private = name.startswith("__") and not name.endswith("__")
            if name not in ("__dict__", "__weakref__"):
                found[f"_{base.__name__.lstrip('_')}{name}" if private else name] = None
    return tuple(found)


def in_slots(value: object) -> Iterator[tuple[str, Any]]:
    """The attributes of an object in slots that are set, by name; none of its code runs."""
    for name in slots_of(value):
        try:
            yield name, object.__getattribute__(value, name)
        except AttributeError:  # not set
            continue
