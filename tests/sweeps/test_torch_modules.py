"""Every module of torch's own database trains as in eager mode, to the last bit, however it is built and called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.common_modules import module_db
from torch.utils import _pytree as pytree

import graphopt
from tests.support.bits import first_difference

pytestmark = pytest.mark.sweep

MODULES = {info.name: info for info in module_db if "Lazy" not in info.name}
MOST = 40
"""Ways to build and call one module."""


@dataclass(frozen=True)
class Way:
    """How a module is built and called."""

    module: type[nn.Module]
    built: tuple[Sequence[Any], dict[str, Any]]
    given: tuple[Sequence[Any], dict[str, Any]]

    def train(self, *, optimized: bool) -> list[torch.Tensor | None]:
        """Results, gradients of arguments and parameters, and buffers behind one call."""
        torch.manual_seed(0)
        model = self.module(*self.built[0], **self.built[1]).train()
        args, kwargs = pytree.tree_map(_copy, self.given)
        called = graphopt.optimize(model) if optimized else model
        torch.manual_seed(1)
        results = _tensors(called(*args, **kwargs))
        torch.stack([_number(result) for result in results if result.requires_grad]).sum().backward()
        gradients = [tensor.grad for tensor in (*_tensors((args, kwargs)), *model.parameters())]
        return [*(result.detach() for result in results), *gradients, *model.buffers()]


def _copy(value: Any) -> Any:
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _number(result: torch.Tensor) -> torch.Tensor:
    weights = torch.linspace(0.5, 1.0, result.numel(), dtype=torch.float64).view(result.shape)
    return (result.double().abs() * weights).sum()


def ways(name: str) -> list[Way]:
    """The ways to build and call a module that torch's tests have, and that train."""
    info = MODULES[name]
    given = info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=True, training=True)
    found = []
    for one in given[:MOST]:
        if one.forward_input is None:
            continue
        built, called = one.constructor_input, one.forward_input
        way = Way(info.module_cls, (built.args, built.kwargs), (called.args, called.kwargs))
        try:
            way.train(optimized=False)
        except Exception:
            continue
        found.append(way)
    return found


@pytest.mark.parametrize("name", MODULES)
def test_a_module_trains_as_in_eager_mode(name: str) -> None:
    for number, way in enumerate(ways(name)):
        assert first_difference(way.train(optimized=False), way.train(optimized=True)) == "", number
