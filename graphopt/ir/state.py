"""PassState state: what passes keep between steps, beside the model's parameters and the optimizer's state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from graphopt.errors import GraphoptError

__all__ = ["PassState"]


@dataclass(frozen=True, slots=True)
class PassState:
    """One tensor that a program keeps from one run to the next; ops of the program change it in place.

    Attributes:
        shape: sizes, which never vary.
        dtype: of the elements.
        device: where it lives.
        fill: the value of every element before the first run.
        source: a parameter of which the tensor starts as a copy in its own dtype, instead of ``fill``; "" for none. It
            is contiguous, whatever the parameter is, where it does not follow it.
        follows: whether it is a copy of ``source`` at the beginning of every run, also where the parameter was changed
            from outside; the program renews it where it changes the parameter itself.
        saved: whether it belongs into checkpoints; False for what has a meaning only until the next run.
        local: whether it differs from rank to rank, so that each has to save its own.
        shard: the first element and how many elements of ``source``, in the order of memory, it stands for: the
            parameter itself has no memory then, and what is left of the tensor is zeros. None for other tensors.
        group: the process group over which the parameter is divided.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    fill: float = 0.0
    source: str = ""
    follows: bool = False
    saved: bool = True
    local: bool = False
    shard: tuple[int, int] | None = None
    group: str = ""

    def create(self, source: torch.Tensor | None = None) -> torch.Tensor:
        """The tensor as it is before the first run.

        Args:
            source: the parameter that ``source`` names.

        Raises:
            GraphoptError: where the parameter has another shape.
        """
        if source is None:
            return torch.full(self.shape, self.fill, dtype=self.dtype, device=self.device)
        if self.shard is not None:
            return self._cut(source)
        if tuple(source.shape) != self.shape:
            raise GraphoptError(
                f"pass state of shape {self.shape} cannot start as a copy of {self.source!r}, whose shape is "
                f"{tuple(source.shape)}"
            )
        if self.follows:
            return source.detach().to(device=self.device, dtype=self.dtype, copy=True)
        return torch.empty(self.shape, dtype=self.dtype, device=self.device).copy_(source.detach())

    def _cut(self, source: torch.Tensor) -> torch.Tensor:
        """The part of a parameter that the tensor stands for."""
        assert self.shard is not None
        first, length = self.shard
        found = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        found[:length].copy_(source.detach().as_strided([source.numel()], [1])[first : first + length])
        return found

    def to_json(self) -> dict[str, Any]:
        """Plain data; ``graphopt.ir.files.deserialization`` reads it."""
        return {
            "shape": list(self.shape),
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": str(self.device),
            "fill": repr(float(self.fill)),
            "source": self.source,
            "follows": self.follows,
            "saved": self.saved,
            "local": self.local,
            **({"shard": list(self.shard), "group": self.group} if self.shard is not None else {}),
        }
