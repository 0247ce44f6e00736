"""The first call of what torch has compiled runs as every later one, behind every door."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import graphopt
from tests.support.bits import first_difference

pytestmark = pytest.mark.filterwarnings("ignore")
DOORS: dict[str, Callable[[nn.Module], Any]] = {
    "optimize": lambda model: graphopt.optimize(model),
    "parts": lambda model: graphopt.optimize(InParts(model)),
    "torch.compile": lambda model: torch.compile(model, backend="graphopt"),
}


class InParts(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return y * 2 if y.abs().max() > 1e9 else y


class Inverse(nn.Module):
    """Its complex kernel gives other values under a dispatch mode of Python's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.pinv(self.weight) @ x


SEEN: list[tuple[Any, ...]] = []


def look() -> None:
    """Note what is around an op beside its arguments."""
    if not torch.compiler.is_compiling():
        SEEN.append(
            (
                torch._C._len_torch_dispatch_stack(),
                torch._C._len_torch_function_stack(),
                torch._C._autograd._saved_tensors_hooks_is_enabled(),
                torch.is_inference_mode_enabled(),
                torch.is_autocast_enabled("cpu"),
                torch.are_deterministic_algorithms_enabled(),
                torch.is_anomaly_enabled(),
                torch.get_default_dtype(),
                torch.get_num_threads(),
                torch.backends.mkldnn.enabled,
            )
        )


@torch.library.custom_op("graphopt_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    look()
    return x * 2


doubled.register_fake(torch.empty_like)
doubled.register_autograd(lambda ctx, grad: doubled(grad))


class Doubles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return doubled(self.linear(x))


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def trained(call: Callable[..., Any], model: nn.Module, x: torch.Tensor) -> list[torch.Tensor | None]:
    model.zero_grad()
    result = call(x)
    result.abs().sum().backward()
    return [result.detach(), *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("door", DOORS)
def test_a_kernel_that_is_wrong_under_a_dispatch_mode_is_right_in_the_first_call(door: str) -> None:
    model, x = Inverse(), torch.randn(4, 2, dtype=torch.complex64)
    expected = trained(model, model, x)
    call = DOORS[door](model)
    for _ in range(3):
        assert first_difference(trained(call, model, x), expected) == ""


@pytest.mark.parametrize("door", DOORS)
def test_nothing_is_around_the_ops_of_a_first_call_that_is_not_around_those_of_later_ones(door: str) -> None:
    model, x = Doubles(), torch.randn(2, 3)
    call = DOORS[door](model)
    trained(call, model, x)  # which measures what ops allocate as well
    first = SEEN[-2:]
    SEEN.clear()
    trained(call, model, x)
    assert len(SEEN) == 2
    assert first == SEEN
    SEEN.clear()
