"""Distributed tensors of ``torch.distributed.tensor``, taken to pieces and put together so that autograd goes through.

What torch has for this (``from_local``, ``to_local``) redistributes gradients on the way back; a program leaves them as
they come, and says what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from graphopt._torch.private_names import DISTRIBUTED, require

__all__ = [
    "PlacementsOfGradient",
    "distributed_from",
    "gradient_like",
    "is_distributed",
    "local_from",
    "local_part",
    "local_result",
    "placements_of_gradient",
]

Spec = Any
"""Mesh, placements, and the size of the whole tensor (``DTensorSpec``)."""

PlacementsOfGradient = Callable[[Sequence[Any], torch.Size], Sequence[Any]]
"""Takes the placements of a gradient, with the size of this rank's part; returns those that it is to have."""


def is_distributed(value: object) -> bool:
    """Whether a value is a ``DTensor``; torch's module of these is not imported for the question."""
    return any(cls.__name__ == "DTensor" and cls.__module__.startswith("torch.") for cls in type(value).__mro__)


def local_part(value: object) -> torch.Tensor | None:
    """This rank's part of a ``DTensor``, in its memory; None for anything else."""
    found: torch.Tensor | None = getattr(value, "_local_tensor", None)
    return found


def _made(local: torch.Tensor, spec: Spec) -> Any:
    from torch.distributed.tensor import DTensor

    require(DISTRIBUTED)
    return DTensor(local, spec, requires_grad=local.requires_grad)  # type: ignore[call-arg]


def _same(tensor: torch.Tensor) -> torch.Tensor:
    """Another object for a tensor, as autograd wants it; in a program it is the tensor."""
    return torch.ops.aten.alias.default(tensor)  # type: ignore[no-any-return]


class _Distributed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, spec: Spec, note: PlacementsOfGradient) -> Any:
        ctx.spec, ctx.note = spec, note
        return _made(_same(local), spec)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        placements = ctx.note(tuple(gradient.placements), gradient._local_tensor.shape)
        if placements != gradient.placements:
            gradient = gradient.redistribute(ctx.spec.mesh, placements)
        return gradient._local_tensor, None, None


class _Local(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, distributed: Any) -> torch.Tensor:
        ctx.spec = _of_gradient(distributed._spec)
        local: torch.Tensor = distributed._local_tensor
        return _same(local)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _made(gradients[0], ctx.spec)


class _Result(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, spec: Spec) -> Any:
        ctx.spec = _of_gradient(spec)
        return _made(_same(local), spec)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        if gradient.placements != ctx.spec.placements:
            gradient = gradient.redistribute(ctx.spec.mesh, ctx.spec.placements)
        return gradient._local_tensor, None


def _of_gradient(spec: Spec) -> Spec:
    """What the gradient of a tensor is in eager mode: that of a sum over ranks is the same on all of them."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    require(DISTRIBUTED)
    placements = tuple(Replicate() if each.is_partial() else each for each in spec.placements)
    return DTensorSpec(spec.mesh, placements, tensor_meta=spec.tensor_meta)


def placements_of_gradient(spec: Spec) -> PlacementsOfGradient:
    """Decides for the placements that the gradient of a leaf has: its own, and the same on all ranks for a sum."""
    placements: Sequence[Any] = _of_gradient(spec).placements
    return lambda _found, _size: placements


def distributed_from(local: torch.Tensor, spec: Spec, note: PlacementsOfGradient) -> Any:
    """A ``DTensor`` of this rank's part.

    Args:
        local: which gets this rank's part of the gradient.
        spec: of the result.
        note: decides about the placements of the gradient when it comes.
    """
    return _Distributed.apply(local, spec, note)


def local_from(distributed: Any) -> torch.Tensor:
    """This rank's part of a ``DTensor`` that a program returns."""
    found: torch.Tensor = _Local.apply(distributed)
    return found


def local_result(local: torch.Tensor, spec: Spec) -> Any:
    """The ``DTensor`` that a call returns, for what its program has returned; of that, spec says the rest."""
    return _Result.apply(local, spec)


def gradient_like(tensor: Any, placements: Sequence[Any] | None) -> torch.Tensor:
    """This rank's part of a user's ``DTensor``, which gets what comes back as a gradient with these placements."""
    found: torch.Tensor = tensor.to_local(grad_placements=placements)
    return found
