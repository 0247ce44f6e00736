"""Stand-ins for tensors that a capture was made with: they look the same to a trace, and take no memory."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["has_memory", "parameter_without_memory", "without_memory"]


def without_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor like another one, without memory of its own; itself where that cannot be.

    Reading its values is an access to memory that there is not, which torch does not check in every op: the process
    may end (``has_memory``).
    """
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        return tensor
    if not tensor.ndim:  # a number, which torch may read where it is one of Python's (a random number, in torch 2.14)
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)
    with torch.no_grad():
        like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        like.untyped_storage().resize_(0)
    return like.requires_grad_(tensor.requires_grad)


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor with data on a device has memory for it, and is no stand-in."""
    return tensor.layout is not torch.strided or not tensor.numel() or tensor.untyped_storage().nbytes() > 0


def parameter_without_memory(parameter: nn.Parameter) -> nn.Parameter:
    """A parameter like another one, without memory of its own."""
    if type(parameter) is not nn.Parameter:
        return parameter
    return nn.Parameter(without_memory(parameter.detach()), parameter.requires_grad)
