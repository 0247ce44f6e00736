"""The update of an optimizer that runs in eager mode: one op that hands the gradients over and calls ``step``.

An optimizer that reads tensors' values in Python, or has hooks, is no sequence of ops. In a program its whole update is
one call, so that passes still see which gradients it reads and what it writes.
"""

from __future__ import annotations

import contextlib
import secrets
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch

from graphopt.errors import GraphoptError
from graphopt.ir.ops.define import define

__all__ = ["Evaluate", "evaluated_by", "is_updating", "opaque_update_", "stands_for"]

Evaluate = Callable[[], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""Computes the loss of a batch, and the gradient of each parameter by name."""

_updating: set[int] = set()
_evaluations: dict[int, Callable[[], tuple[torch.Tensor, Sequence[torch.Tensor]]]] = {}
_optimizers: weakref.WeakValueDictionary[int, torch.optim.Optimizer] = weakref.WeakValueDictionary()


def stands_for(optimizer: torch.optim.Optimizer) -> int:
    """The number by which a program names an optimizer; it holds in this process and as long as the optimizer lives."""
    for number, known in _optimizers.items():
        if known is optimizer:
            return number
    number = secrets.randbits(62)  # no file can guess it
    _optimizers[number] = optimizer
    return number


def is_updating(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a program is calling ``optimizer.step`` just now."""
    return id(optimizer) in _updating


@contextlib.contextmanager
def evaluated_by(optimizer: torch.optim.Optimizer, evaluate: Evaluate, order: Sequence[str]) -> Iterator[None]:
    """While the block runs, an optimizer that evaluates the model again does so by this function.

    Args:
        optimizer: whose ``step`` takes a closure.
        evaluate: what the closure calls from the second time on.
        order: the names of the parameters that it updates, as its op has them.
    """
    number = stands_for(optimizer)

    def again() -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        loss, gradients = evaluate()
        return loss, [gradients[name] for name in order]

    _evaluations[number] = again
    try:
        yield
    finally:
        del _evaluations[number]


def _update(
    parameters: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    state: Sequence[torch.Tensor],
    optimizer: int,
    workspace: int,
    found_inf: torch.Tensor | None = None,
    loss: torch.Tensor | None = None,
) -> None:
    known = _optimizers.get(optimizer)
    if known is None:
        raise GraphoptError(
            "the optimizer whose update this program calls is not in this process: a program that was read from a "
            "file, or whose optimizer is gone, has no update of its own"
        )
    owned = {id(parameter) for group in known.param_groups for parameter in group["params"]}
    if not all(id(parameter) in owned for parameter in parameters):
        return  # on copies, as comparisons and measurements make them, nothing is updated
    if found_inf is not None and bool(found_inf):
        return
    results = [(loss, gradients)]

    def evaluate() -> torch.Tensor | None:
        found, made = results.pop() if results else _evaluations[optimizer]()
        for parameter, gradient in zip(parameters, made, strict=True):
            parameter.grad = gradient
        return found

    _updating.add(id(known))
    try:
        if loss is None:
            evaluate()
            known.step()
        else:
            known.step(evaluate)  # type: ignore[arg-type]
    finally:
        _updating.discard(id(known))
        for parameter in parameters:
            parameter.grad = None


def _nothing(*_: object, **__: object) -> None:
    """The op returns nothing."""


opaque_update_ = define(
    "opaque_update_(Tensor(a!)[] parameters, Tensor[] gradients, Tensor(b!)[] state, int optimizer, int workspace, *, "
    "Tensor? found_inf=None, Tensor? loss=None) -> ()",
    _update,
    _nothing,
)
"""Set ``.grad`` of each parameter, call ``step`` of an optimizer, and take the gradients away again.

Nothing happens where ``found_inf`` is not 0, and where the parameters are not the optimizer's own tensors.

Args:
    parameters: the optimizer's own.
    gradients: one for each.
    state: what the optimizer keeps already; read and written by the optimizer, not by the op.
    optimizer: its number (``stands_for``).
    workspace: bytes that the update allocates for itself and for state that it creates.
    found_inf: one element; None to update always.
    loss: for an optimizer whose ``step`` takes a closure, which gives this loss and these gradients at its first call,
        and what ``evaluated_by`` says at later ones; None for others.
"""
