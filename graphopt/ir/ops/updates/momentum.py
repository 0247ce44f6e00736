"""The op that applies momentum to a gradient outside of the optimizer: ``apply_momentum_``."""

from __future__ import annotations

import torch

from graphopt.ir.ops.define import define, described, require

__all__ = ["apply_momentum_"]


def _apply(
    gradient: torch.Tensor,
    u: torch.Tensor,
    momentum: float,
    nesterov: bool,
    keep: torch.Tensor | None = None,
    parameter: torch.Tensor | None = None,
    weight_decay: float = 0.0,
) -> None:
    _check(gradient, u, momentum, nesterov, keep, parameter, weight_decay)
    before = None if keep is None else u.clone()
    if parameter is not None and weight_decay:
        gradient.add_(parameter, alpha=weight_decay)
    if nesterov:
        u.add_(gradient)
        gradient.add_(u, alpha=momentum)  # rounded as torch.optim.SGD rounds it
        u.mul_(momentum)
    else:
        u.mul_(momentum).add_(gradient)
        gradient.copy_(u)
    if keep is not None and before is not None:
        torch.where(keep.reshape(()) != 0, u, before, out=u)


def _check(
    gradient: torch.Tensor,
    u: torch.Tensor,
    momentum: float,
    nesterov: bool,
    keep: torch.Tensor | None = None,
    parameter: torch.Tensor | None = None,
    weight_decay: float = 0.0,
) -> None:
    op = "apply_momentum_"
    require(
        u.shape == gradient.shape, op, f"u must have the gradient's shape {list(gradient.shape)}, not be {described(u)}"
    )
    require(keep is None or keep.numel() == 1, op, f"keep must be one element, not {described(keep)}")
    same = parameter is None or parameter.shape == gradient.shape
    require(
        same, op, f"the parameter must have the gradient's shape {list(gradient.shape)}, not be {described(parameter)}"
    )


apply_momentum_ = define(
    "apply_momentum_(Tensor(a!) gradient, Tensor(b!) u, float momentum, bool nesterov, Tensor? keep=None, "
    "Tensor? parameter=None, float weight_decay=0.0) -> ()",
    _apply,
    _check,
)
"""``apply_momentum_(Tensor(a!) gradient, Tensor(b!) u, float momentum, bool nesterov, ...) -> ()``.

Replace a gradient by the direction that momentum gives it, and update the momentum ``u`` of the same shape:
``u = momentum * u + g; g = u``, or with Nesterov's ``u = momentum * (u + g); g = g + u``. This is what
``torch.optim.SGD`` does, where ``u`` is its buffer (times ``momentum`` with Nesterov's).

Args (after the first four):
    keep: one element; where it is 0, ``u`` stays as it was (and the gradient has no meaning).
    parameter: of the gradient's shape; ``weight_decay`` times it is added to the gradient first.
"""
