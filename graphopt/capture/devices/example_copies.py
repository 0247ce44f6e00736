"""Copies without data of a model, its optimizer and a batch, from which a program for another device is captured."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from graphopt import _torch
from graphopt.capture.step.opaque import stand_in
from graphopt.errors import CaptureError

__all__ = ["Twins", "twins_without_data"]


@dataclass(frozen=True)
class Twins:
    """A model, its optimizer and a batch, whose tensors are all without data."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def twins_without_data(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    mode: _torch.FakeTensorMode,
) -> Twins:
    """Copies in which each tensor is an example value of ``mode``; nothing that is given is changed or allocated again.

    Args:
        model: with or without data, or partly on ``meta``.
        optimizer: over the model's parameters; None for none.
        args: positional example inputs.
        kwargs: keyword example inputs.
        mode: in which the values compute.

    Raises:
        CaptureError: for tensors that are not dense, for parameters of the optimizer that are not the model's, and for
            a model that Python cannot copy.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    named = {**parameters, **dict(model.named_buffers(remove_duplicate=False))}
    batch = [leaf for leaf in _torch.pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    found = {id(tensor): tensor for tensor in (*named.values(), *batch)}
    for name, tensor in named.items():
        _check(name, tensor)
    twins = dict(zip(found, _twins_of(list(found.values()), mode), strict=True))
    memo: dict[int, Any] = dict(twins)
    try:
        with _CopiesWithoutData(mode):
            copied = copy.deepcopy(model, memo)
    except Exception as error:
        raise CaptureError(
            f"{type(model).__name__} cannot be copied without its data ({type(error).__name__}: {error})\n"
            "  what to do: keep locks, files and generators out of its attributes, or define __deepcopy__"
        ) from error
    own: dict[torch.Tensor, torch.Tensor] = {parameter: twins[id(parameter)] for parameter in parameters.values()}
    positional, by_name = _torch.pytree.tree_map(lambda leaf: twins.get(id(leaf), leaf), (tuple(args), dict(kwargs)))
    return Twins(copied, None if optimizer is None else stand_in(optimizer, own), positional, by_name)


def _check(name: str, tensor: torch.Tensor) -> None:
    plain = type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer) or _torch.has_no_data(tensor)
    if not plain or tensor.layout is not torch.strided:
        what = type(tensor).__name__ if not plain else f"a tensor of layout {tensor.layout}"
        raise CaptureError(f"{name!r} is {what}: without data, dense tensors of torch itself can be captured")


def _twins_of(tensors: Sequence[torch.Tensor], mode: _torch.FakeTensorMode) -> list[torch.Tensor]:
    plain = _torch.example_twins([tensor.detach() for tensor in tensors], mode, torch.device("cpu"))
    results: list[torch.Tensor] = []
    with mode:
        for tensor, twin in zip(tensors, plain, strict=True):
            if isinstance(tensor, nn.Parameter):
                results.append(nn.Parameter(twin, requires_grad=tensor.requires_grad))
            else:
                results.append(twin.requires_grad_(tensor.requires_grad))
    return results


class _CopiesWithoutData(TorchFunctionMode):
    """While a model is copied, tensors that it keeps elsewhere than in parameters and buffers get no data either."""

    def __init__(self, mode: _torch.FakeTensorMode) -> None:
        super().__init__()
        self._mode = mode

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch."""
        if func is not torch.Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        memo[id(tensor)] = result = _twins_of([tensor], self._mode)[0]
        return result
