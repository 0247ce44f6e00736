"""Calls of ops seen from below: which ops reach the device, and which ops a composite op is made of.

Watches calls with a mode of ``torch.utils._python_dispatch``, takes composite ops apart with their own ``decompose``,
and silences the log of ``torch._subclasses.fake_tensor``, which has no public switch.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["CallRecorder", "parts_of", "refusals_expected"]


class CallRecorder(TorchDispatchMode):
    """While it is active, adds each op that reaches the device to ``calls``, with its arguments.

    Questions about a tensor's device are left out. With ``run=False`` casts alone are run; the first other op is added,
    and ``StopIteration`` raised.
    """

    def __init__(self, calls: list[tuple[OpOverload, tuple[Any, ...], dict[str, Any]]], *, run: bool = True) -> None:
        super().__init__()
        self.calls = calls
        self._run = run

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.prim.device.default:
            self.calls.append((func, args, dict(kwargs or {})))
            if not self._run and func is not torch.ops.aten._to_copy.default:
                raise StopIteration
        return func(*args, **(kwargs or {}))


_REFUSALS = [
    logging.getLogger(f"torch.{name}") for name in ("_subclasses.fake_tensor", "fx.experimental.symbolic_shapes")
]


@contextlib.contextmanager
def refusals_expected() -> Iterator[None]:
    """While calls are tried that may be refused, keep torch from logging each refusal as an error or a warning."""
    saved = [logger.disabled for logger in _REFUSALS]
    for logger in _REFUSALS:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in zip(_REFUSALS, saved, strict=True):
            logger.disabled = disabled


def parts_of(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[fx.Graph, list[int]]:
    """The ops that a composite op is made of, one level down, as a graph.

    Args:
        op: for which ``is_composite`` holds.
        args: fake tensors, other values, and lists of them.
        kwargs: the same by keyword.

    Returns:
        A graph with one placeholder for each distinct tensor argument, and, for each tensor argument in order, the
        number of its placeholder.
    """
    leaves, structure = pytree.tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    distinct = list({id(tensor): tensor for tensor in tensors}.values())
    numbers = {id(tensor): number for number, tensor in enumerate(distinct)}

    def call(given: list[torch.Tensor]) -> Any:
        values = [given[numbers[id(leaf)]] if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        inner_args, inner_kwargs = pytree.tree_unflatten(values, structure)
        return op(*inner_args, **inner_kwargs)

    traced = make_fx(call, decomposition_table={op: op.decompose}, pre_dispatch=True)(distinct)
    return traced.graph, [numbers[id(tensor)] for tensor in tensors]
