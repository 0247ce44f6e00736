"""Numbers that Dynamo's graphs take: eager mode's bits for each value, one program for all where that can be."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import graphopt
from tests.support.bits import first_difference
from tests.support.covering import covering

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def in_place(tensor: torch.Tensor, number: float) -> torch.Tensor:
    made = tensor * 1
    made *= number
    made -= number
    return made.div_(number).add_(number)


OPEN: dict[str, Callable[[Any, Any], torch.Tensor]] = {
    "product": operator.mul,
    "product, number first": lambda tensor, number: number * tensor,
    "sum": operator.add,
    "sum, number first": lambda tensor, number: number + tensor,
    "difference": operator.sub,
    "difference, number first": lambda tensor, number: number - tensor,
    "quotient": operator.truediv,
    "quotient, number first": lambda tensor, number: number / (tensor.abs() + 1),
    "functions": lambda tensor, number: torch.mul(torch.add(torch.div(tensor, number), number), number).sub(number),
    "comparison": lambda tensor, number: torch.where(tensor > number / 9, tensor, tensor * number),
    "values of where": lambda tensor, number: (
        torch.where(tensor > 0, number, tensor) + torch.where(tensor < 0, tensor, number)
    ),
    "numbers of numbers": lambda tensor, number: tensor * (1 - number * 0.3) / (number / 2 + 1) + (-number),
    "rounded": lambda tensor, number: tensor * int(number * 10) - int(number * 10),
    "rounded and not": lambda tensor, number: tensor * (number + int(number * 10)),
}
CLOSED: dict[str, Callable[[Any, Any], torch.Tensor]] = {
    "power": lambda tensor, number: tensor.abs() ** number + tensor.abs() ** 2,
    "bound": lambda tensor, number: tensor.clamp(max=number),
    "rate": lambda tensor, number: nn.functional.dropout(tensor, number / 9),
    "size": lambda tensor, number: tensor.repeat(int(number), 1) if tensor.dim() else tensor.repeat(int(number)),
    "divided by itself": lambda tensor, number: tensor * (2 / number),
    "one open, one not": lambda tensor, number: (tensor * number).clamp(max=number),
}


class Read(nn.Module):
    """Computes with the value of an argument, which Python reads, and returns a result of ``dtype``."""

    def __init__(self, compute: Callable[[Any, Any], torch.Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self.compute, self.dtype = compute, dtype
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        number = factor.item()
        value = self.first(x).to(self.dtype)
        made = self.compute(value, number)
        return made * 3 + self.second(x).sum().to(made.dtype)


class Scalar(Read):
    """The same with a tensor without dimensions."""

    def forward(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        number = factor.item()
        value = self.first(x).sum().to(self.dtype)
        return self.compute(value, number) + self.second(x).sum().to(self.dtype)


class Whole(Read):
    """The same with a tensor of whole numbers, which has no gradient."""

    def forward(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        number = factor.item()
        value = (x * 100).to(self.dtype)
        return self.second(x) * self.compute(value, number)


def results(call: Callable[..., Any], model: nn.Module, values: list[torch.Tensor]) -> list[Any]:
    found = []
    for step, value in enumerate(values):
        torch.manual_seed(step)
        x = torch.randn(3, 4, requires_grad=True)
        model.zero_grad()
        result = call(x, value)
        result.double().sum().backward()
        found.append([result, x.grad, [parameter.grad for parameter in model.parameters()]])
    return found


def check(model: nn.Module, values: list[torch.Tensor], door: str) -> int:
    """Compare with eager mode, and give the number of programs."""
    eager = copy.deepcopy(model)
    expected = results(eager, eager, values)
    if door == "optimize":
        optimized = graphopt.optimize(model)
        assert first_difference(results(optimized, model, values), expected) == ""
        return len(optimized.programs)
    compiled = torch.compile(model, backend="graphopt")
    assert first_difference(results(compiled, model, values), expected) == ""
    return sum(graph.program is not None for graph in graphopt.compiled_graphs(compiled))


def floats(*values: float) -> list[torch.Tensor]:
    return [torch.tensor(value, dtype=torch.float64) for value in values]


VALUES = floats(1.7, 2.3, 3.14159, 2.7182818, 1e-3, -1.25)
DTYPES = {
    "float32": (Read, torch.float32),
    "bfloat16": (Read, torch.bfloat16),
    "float16": (Read, torch.float16),
    "float64": (Read, torch.float64),
    "a float32 without dimensions": (Scalar, torch.float32),
    "a bfloat16 without dimensions": (Scalar, torch.bfloat16),
    "int64": (Whole, torch.int64),
    "int8": (Whole, torch.int8),
}
DOORS = ("optimize", "torch.compile")


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", ["product", "quotient, number first", "numbers of numbers", "rounded and not"])
def test_one_program_serves_all_values_of_a_number(name: str, door: str) -> None:
    assert check(Read(OPEN[name], torch.float32), VALUES, door) <= 3


@pytest.mark.parametrize("dtype", ["bfloat16", "int64", "a bfloat16 without dimensions"])
def test_a_number_gives_the_dtype_that_it_gives_in_eager_mode(dtype: str) -> None:
    kind, made = DTYPES[dtype]
    check(kind(operator.mul, made), VALUES, "optimize")


@covering(name=list(OPEN), dtype=list(DTYPES), door=DOORS)
def test_numbers_have_eager_modes_bits(name: str, dtype: str, door: str) -> None:
    if dtype in ("int64", "int8") and name in ("rounded", "rounded and not", "values of where", "comparison"):
        dtype = "float32"
    kind, made = DTYPES[dtype]
    compute = OPEN[name]
    programs = check(kind(compute, made), VALUES, door)
    if dtype in ("float32", "bfloat16", "float16", "float64"):
        assert programs <= 3


@pytest.mark.parametrize("name", [*CLOSED])
def test_what_needs_the_number_itself_has_a_program_for_each(name: str) -> None:
    values = floats(1.0, 2.0, 2.5, 3.0)
    assert check(Read(CLOSED[name], torch.float32), values, "optimize") >= 4


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whole_numbers(dtype: torch.dtype, door: str) -> None:
    values = [torch.tensor(value) for value in (3, 7, 16_777_217, -5, 12)]
    assert check(Read(lambda tensor, number: (tensor * number - number) / number, dtype), values, door) <= 4


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_whole_numbers_beside_tensors_of_such(dtype: torch.dtype) -> None:
    values = [torch.tensor(value) for value in (3, 7, 300, 5, 12)]
    check(Whole(lambda tensor, number: tensor * number + number, dtype), values, "optimize")


def test_not_a_number_and_infinity() -> None:
    values = floats(1.5, float("nan"), 2.5, float("inf"), -0.0, 0.0, 3.5)
    check(Read(operator.mul, torch.float32), values, "optimize")
