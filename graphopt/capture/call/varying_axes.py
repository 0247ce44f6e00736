"""Axes of the tensors of a call whose sizes a capture keeps open, by the place of the tensor."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["VaryingAxes", "marks_undone"]


@dataclass(frozen=True, slots=True)
class VaryingAxes:
    """For each tensor of a call, in its order, the axes that vary.

    Unlike what a user declares with ``torch.export.Dim``, tracing finds by itself which of them are equal, within which
    bounds, and which the model needs as a fixed number.
    """

    axes: tuple[frozenset[int], ...]

    def __bool__(self) -> bool:
        return any(self.axes)

    @classmethod
    def between(cls, shapes: Sequence[Sequence[torch.Size]]) -> VaryingAxes:
        """The axes whose sizes differ among calls with the same ranks.

        Args:
            shapes: of the tensors of each call.
        """
        by_tensor: list[tuple[torch.Size, ...]] = list(zip(*shapes, strict=True))
        return cls(
            tuple(
                frozenset(axis for axis, sizes in enumerate(zip(*shape, strict=True)) if len(set(sizes)) > 1)
                for shape in by_tensor
            )
        )

    def without(self, others: VaryingAxes) -> VaryingAxes:
        """The axes that are not among others."""
        return VaryingAxes(tuple(mine - theirs for mine, theirs in zip(self.axes, others.axes, strict=True)))

    def along_with(self, others: VaryingAxes) -> VaryingAxes:
        """These axes and others."""
        return VaryingAxes(tuple(mine | theirs for mine, theirs in zip(self.axes, others.axes, strict=True)))

    def where(self, shapes: Sequence[torch.Size], least: int) -> VaryingAxes:
        """The axes that are ``least`` or larger in a call."""
        return VaryingAxes(
            tuple(
                frozenset(axis for axis in mine if shape[axis] >= least)
                for mine, shape in zip(self.axes, shapes, strict=True)
            )
        )

    def for_export(self) -> Any:
        """The same as ``torch.export.export`` takes it for a function of ``*tensors``."""
        auto: Any = torch.export.Dim.AUTO
        return (tuple(dict.fromkeys(sorted(axes), auto) or None for axes in self.axes),)


@contextlib.contextmanager
def marks_undone(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Tensors have the marks of axes that vary behind the block that they had before it.

    An export with such axes marks them in attributes of the tensors, and leaves these there where it fails: whatever is
    traced with the same tensors later would have the axes open.
    """
    kept = [(tensor, _marks(tensor)) for tensor in tensors]
    try:
        yield
    finally:
        for tensor, marks in kept:
            for name in _marks(tensor).keys() - marks.keys():
                delattr(tensor, name)
            vars(tensor).update(marks)


def _marks(tensor: torch.Tensor) -> dict[str, Any]:
    return {name: copy.copy(value) for name, value in vars(tensor).items() if "dynamo" in name}
