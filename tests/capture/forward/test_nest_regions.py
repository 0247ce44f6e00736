"""Regions of a model's code, under autocast and without gradients, in any nesting: eager's bits."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import graphopt
from tests.support.properties import examples

BF16 = torch.bfloat16

CONTEXTS: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=BF16),
    "plain": lambda: torch.autocast("cpu", enabled=False),
    "elsewhere plain": lambda: torch.autocast("cuda", enabled=False),
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
}

Code = list[Any]
"""Steps: the number of a layer to apply, or a context and the steps in it."""


class Nested(nn.Module):
    """Runs steps; each adds what a layer gives to a sum."""

    def __init__(self, code: Code) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.last = nn.Linear(6, 6)
        self.code = code

    def run(self, code: Code, x: torch.Tensor) -> torch.Tensor:
        for step in code:
            if isinstance(step, int):
                x = torch.tanh(self.layers[step](x)) + x.float()
            else:
                with CONTEXTS[step[0]]():
                    x = self.run(step[1], x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.run(self.code, x).float())


def trained(model: nn.Module, x: torch.Tensor, outside: bool) -> dict[str, torch.Tensor | None]:
    with torch.autocast("cpu", dtype=BF16, enabled=outside):
        result = model(x)
    result.float().square().mean().backward()
    return {"output": result.detach()} | {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_as_eager(code: Code, outside: bool) -> None:
    model, x = Nested(code), torch.linspace(-1, 1, 24).view(4, 6)
    expected = trained(copy.deepcopy(model), x, outside)
    assert_equal(expected, trained(graphopt.optimize(copy.deepcopy(model)), x, outside))


def assert_equal(expected: dict[str, torch.Tensor | None], found: dict[str, torch.Tensor | None]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        mine = found[name]
        assert (mine is None) == (value is None), name
        assert value is None or mine is None or (mine.dtype == value.dtype and torch.equal(mine, value)), name


@pytest.mark.sweep(
    but=("[['autocast', [['no_grad', []]]], 0]-False", "[['no_grad', [['elsewhere plain', [0]]]]]-False")
)
@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize(
    "code",
    [
        [["autocast", [["no_grad", [0]], 1]]],
        [["no_grad", [["autocast", [0]], 1]]],
        [["autocast", [0, ["plain", [["no_grad", [1]], 0]], 1]]],
        [["no_grad", [["autocast", [0, ["enable_grad", [1]], 0]]]]],
        [["no_grad", [0, ["enable_grad", [1]], 0]]],
        [["autocast", [0, 0, 0]], ["autocast", [0]]],
        [["autocast", [0, ["autocast", [0]], 0]]],
        [["autocast", [["no_grad", []]]], 0],
        [["autocast", [0, ["elsewhere plain", [0, ["plain", [0]]]], 0]]],
        [["no_grad", [["elsewhere plain", [0]]]]],
        [["autocast", [["no_grad", [["elsewhere plain", [0, ["plain", [0]], 1]]]]]]],
    ],
    ids=str,
)
def test_regions_inside_of_regions(code: Code, outside: bool) -> None:
    assert_as_eager(code, outside)


steps = st.recursive(
    st.integers(0, 1),
    lambda inner: st.tuples(st.sampled_from(sorted(CONTEXTS)), st.lists(inner, max_size=3)).map(list),
    max_leaves=6,
)


@pytest.mark.sweep
@examples(6)
@given(st.lists(steps, min_size=1, max_size=3), st.booleans())
def test_any_nesting(code: Code, outside: bool) -> None:
    assert_as_eager(code, outside)


@pytest.mark.sweep
def test_parameters_whose_names_are_numbers() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    x = torch.ones(2, 4)
    expected = trained(copy.deepcopy(model), x, True)
    assert_equal(expected, trained(graphopt.optimize(model), x, True))


@pytest.mark.sweep
def test_a_weight_used_again_under_the_callers_autocast_is_cast_once() -> None:
    """So that its gradients are summed in low precision, as eager mode does."""
    assert_as_eager([0, 0, 0, 1, 0], True)
