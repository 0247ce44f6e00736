"""Whether a captured program fits a call: shapes, dtypes, structure, training flags, precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from graphopt.capture.flatten import Structure
from graphopt.ir.autocast import autocast_state

__all__ = ["signature"]


def signature(
    model: nn.Module, structure: Structure, tensors: list[torch.Tensor], *, sizes: bool = True
) -> tuple[Any, ...]:
    """Everything about a call that a capture depends on; equal signatures can share one program.

    Args:
        model: its training flags and its parameters' metadata count.
        structure: of the arguments, with the values of those that are not tensors.
        tensors: the tensors among the arguments.
        sizes: whether sizes count (not where they may vary).
    """
    return (
        structure.key,
        tuple((tuple(t.shape) if sizes else t.dim(), t.dtype, t.device, t.requires_grad) for t in tensors),
        tuple(module.training for module in model.modules()),
        tuple((p.dtype, p.device, p.requires_grad, p.shape) for p in model.parameters()),
        autocast_state(),
    )
