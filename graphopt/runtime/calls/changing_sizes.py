"""Calls whose sizes change from one to the next, each of which needs a capture: which, and what to write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["ChangingSizes"]

_TOLD_AT = 3
"""The capture at which a user hears of it."""

Shapes = dict[str, tuple[int, ...]]


@dataclass
class ChangingSizes:
    """Notes the sizes of the tensors of each call that is captured, and says once which of them change."""

    _seen: dict[tuple[tuple[str, int], ...], list[Shapes]] = field(default_factory=dict)
    _seconds: float = 0.0
    _told: bool = False

    def note(self, names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any], seconds: float) -> str:
        """Note a capture; what to tell the user, at the third for sizes that change, and nothing otherwise.

        Args:
            names: of the positional arguments, as far as they have names.
            args: positional arguments of the call.
            kwargs: those given by keyword.
            seconds: that the capture took.
        """
        self._seconds += seconds
        if len(names) < len(args):
            return ""  # dynamic_shapes has no names for them
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        shapes = {name: tuple(value.shape) for name, value in given.items() if isinstance(value, torch.Tensor)}
        alike = self._seen.setdefault(tuple((name, len(shape)) for name, shape in shapes.items()), [])
        alike.append(shapes)
        changing = _changing(alike)
        if self._told or len(alike) < _TOLD_AT or not changing:
            return ""
        self._told = True
        sizes = "; ".join(
            f"axis {axis} of {name} was {', '.join(map(str, dict.fromkeys(seen)))}"
            for (name, axis), seen in changing.items()
        )
        return (
            f"{len(alike)} captures for sizes that change took {self._seconds:.1f} s so far: {sizes}; pad to a few "
            f"sizes, or capture once with dynamic_shapes={_written(changing)}"
        )


def _changing(alike: Sequence[Shapes]) -> dict[tuple[str, int], tuple[int, ...]]:
    """The sizes that were seen of each axis that changes."""
    axes = [(name, axis) for name, shape in alike[0].items() for axis in range(len(shape))]
    seen = {(name, axis): tuple(shapes[name][axis] for shapes in alike) for name, axis in axes}
    return {place: sizes for place, sizes in seen.items() if len(set(sizes)) > 1}


def _written(changing: Mapping[tuple[str, int], tuple[int, ...]]) -> str:
    """``dynamic_shapes`` for the axes that change; those that have always been equal have one ``Dim``."""
    dims: dict[tuple[int, ...], str] = {}
    entries: dict[str, list[str]] = {}
    for (name, axis), sizes in changing.items():
        dim = dims.setdefault(sizes, f"{name}_{axis}")
        entries.setdefault(name, []).append(f"{axis}: torch.export.Dim({dim!r})")
    return "{" + ", ".join(f"{name!r}: {{{', '.join(found)}}}" for name, found in entries.items()) + "}"
