"""PassState state: what passes keep between steps, beside the model's parameters and the optimizer's state."""

from __future__ import annotations

from collections.abc import Mapping
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
        source: a parameter of which the tensor starts as a copy in its own dtype, instead of ``fill``; "" for none.
        follows: whether it is a copy of ``source`` at the beginning of every run, also where the parameter was changed
            from outside; the program renews it where it changes the parameter itself.
        saved: whether it belongs into checkpoints; False for what has a meaning only until the next run.
        local: whether it differs from rank to rank, so that each has to save its own.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    fill: float = 0.0
    source: str = ""
    follows: bool = False
    saved: bool = True
    local: bool = False

    def create(self, source: torch.Tensor | None = None) -> torch.Tensor:
        """The tensor as it is before the first run.

        Args:
            source: the parameter that ``source`` names.

        Raises:
            GraphoptError: where the parameter has another shape.
        """
        if source is None:
            return torch.full(self.shape, self.fill, dtype=self.dtype, device=self.device)
        if tuple(source.shape) != self.shape:
            raise GraphoptError(
                f"pass state of shape {self.shape} cannot start as a copy of {self.source!r}, whose shape is "
                f"{tuple(source.shape)}"
            )
        return source.detach().to(device=self.device, dtype=self.dtype, copy=True)

    def to_json(self) -> dict[str, Any]:
        """Plain data; ``from_json`` reads it."""
        return {
            "shape": list(self.shape),
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": str(self.device),
            "fill": repr(float(self.fill)),
            "source": self.source,
            "follows": self.follows,
            "saved": self.saved,
            "local": self.local,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PassState:
        """What ``to_json`` described."""
        return cls(
            shape=tuple(data["shape"]),
            dtype=getattr(torch, data["dtype"]),
            device=torch.device(data["device"]),
            fill=float(data["fill"]),
            source=data["source"],
            follows=data["follows"],
            saved=data["saved"],
            local=data["local"],
        )
