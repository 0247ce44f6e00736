"""Numbers and texts by names for people: in nested containers, and in the attributes of modules."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from graphopt import _torch
from graphopt.capture.guards.locations import OF_MODULES

__all__ = ["GETTERS", "attribute_values", "kept_values", "names_of", "texts_among", "values_in"]

GETTERS = (operator.attrgetter, operator.methodcaller)
"""What finds attributes by texts that it was made with."""

_MOST = 2000
"""The items of the largest container that is looked at in attributes and variables."""


def values_in(value: object, name: str) -> Iterator[tuple[str, object]]:
    """What is no tensor in nested containers, by place: ``config['depth']``.

    Args:
        value: any value; one that is no container stands for itself.
        name: what it is called.
    """
    leaves, _ = _torch.pytree.tree_flatten_with_path(value)
    for path, leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            yield f"{name}{_torch.pytree.keystr(path)}", leaf


def kept_values(value: object, name: str) -> Iterator[tuple[str, object]]:
    """The numbers and texts in a value that is kept in an attribute or a variable, unless it is a large container."""
    if isinstance(value, (int, float, str)):
        yield name, value
    elif isinstance(value, (dict, list, tuple)) and len(value) <= _MOST:
        yield from ((place, leaf) for place, leaf in values_in(value, name) if isinstance(leaf, (int, float, str)))


def attribute_values(model: nn.Module) -> Iterator[tuple[str, object]]:
    """The numbers and texts that modules have in attributes and in containers there: ``model.layers.0.drop.p``."""
    for path, module in model.named_modules():
        where = f"model.{path}" if path else "model"
        for name, value in vars(module).items():
            if name not in OF_MODULES and not name.startswith("_graphopt"):
                yield from kept_values(value, f"{where}.{name}")


def texts_among(values: Mapping[str, object]) -> set[str]:
    """The texts among named values."""
    return {value for value in values.values() if isinstance(value, str)}


def names_of(getter: Any) -> set[str]:
    """The attributes that an ``attrgetter`` or a ``methodcaller`` finds.

    >>> sorted(names_of(operator.attrgetter("optimizer.rate", "depth")))
    ['depth', 'optimizer', 'rate']
    """
    made, given = getter.__reduce__()[:2]
    texts = (*getattr(made, "args", ()), *given)
    return {name for text in texts if isinstance(text, str) for name in text.split(".")}
