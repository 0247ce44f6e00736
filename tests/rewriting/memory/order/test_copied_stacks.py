"""Stacks of gradients that are copied in another order: bits, strides, bytes, and what is left as it is."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from graphopt import Phase, Program
from graphopt.ir.node import info, value_of
from graphopt.ir.verify import verify
from graphopt.passes import FitMemory, Microbatch
from graphopt.rewriting.memory.order.copied_stacks import stacks_as_copied
from tests.support.fitting import step_peaks
from tests.support.properties import examples
from tests.support.training import OPTIMIZERS, assert_same_training, captured, mean_square, results

aten = torch.ops.aten


class Attention(nn.Module):
    """Queries, keys and values in one projection."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, 8))


class Parts(nn.Module):
    """Features of a projection as several axes in another order, cut along one of them."""

    def __init__(self, sizes: tuple[int, ...], order: tuple[int, ...], axis: int, whole: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, math.prod(sizes))
        self.sizes, self.order, self.axis, self.whole = sizes, order, axis, whole

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).view(x.shape[0], *self.sizes).permute(self.order)
        parts = y.split(1, self.axis) if self.whole else y.unbind(self.axis)
        return torch.stack([part.sin().sum() * (1 + place) for place, part in enumerate(parts)])


def deep() -> nn.Module:
    return nn.Sequential(*(Attention() for _ in range(3)))


def batch() -> torch.Tensor:
    return torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1))


def targets_of(program: Program) -> list[Any]:
    return [node.target for node in program.nodes if node.op == "call_function"]


def copies(program: Program) -> int:
    return targets_of(program).count(aten.clone.default)


def same_results(program: Program, rewritten: Program, model: nn.Module, x: torch.Tensor) -> bool:
    expected, mine = (results(given, model, x)[0] for given in (program, rewritten))
    return expected.keys() == mine.keys() and all(torch.equal(mine[spec], value) for spec, value in expected.items())


def test_the_gradients_of_attention_are_copied_once() -> None:
    program = captured(Attention(), batch())
    found = stacks_as_copied(program, "a test")
    assert found is not None
    rewritten, line = found
    assert line.startswith("1 stack of gradients is made in the order in which it is copied")
    (copy,) = [node for node in program.nodes if node.target is aten.clone.default]
    (stack,) = [node for node in rewritten.nodes if node.target is aten.stack.default]
    assert value_of(stack).shape == value_of(copy).shape
    assert value_of(stack).stride() == value_of(copy).stride()
    assert info(stack).names == info(copy).names
    assert copies(rewritten) == 0
    verify(rewritten, before=program)
    assert same_results(program, rewritten, Attention(), batch())
    assert rewritten.memory().peak_bytes <= program.memory().peak_bytes


@st.composite
def parts(draw: st.DrawFn) -> Parts:
    sizes = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    order = tuple(draw(st.permutations(range(len(sizes) + 1))))
    return Parts(sizes, order, draw(st.integers(-len(order), len(order) - 1)), draw(st.booleans()))


@given(model=parts(), rows=st.integers(1, 4))
@examples(15)
def test_any_order_has_the_same_bits(model: Parts, rows: int) -> None:
    x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(2))
    program = captured(model, x)
    found = stacks_as_copied(program, "a test")
    moved = model.order != tuple(range(len(model.order)))
    assert moved or found is None
    if found is not None:
        assert copies(found[0]) == copies(program) - 1
        verify(found[0], before=program)
        assert same_results(program, found[0], model, x)


def test_orders_are_followed() -> None:
    """All orders of three axes, most of which need a copy."""
    rewritten = 0
    for whole in (False, True):
        for order in itertools.permutations(range(3)):
            model = Parts((2, 3), order, axis=1, whole=whole)
            program = captured(model, torch.ones(2, 3))
            needed = copies(program)
            found = stacks_as_copied(program, "a test")
            assert copies(program if found is None else found[0]) == 0
            assert (found is not None) == (needed > 0)
            rewritten += needed
    assert rewritten == 8  # of 12: one order is the usual one, and in one the stack is laid out as its copy would be


def test_what_another_call_reads_too_stays() -> None:
    program = captured(Attention(), batch())
    (stack,) = [node for node in program.nodes if node.target is aten.stack.default]
    (order,) = stack.users
    common: dict[str, Any] = {"after": order, "phase": Phase.BACKWARD, "origin": "a test", "like": order}
    program.insert(aten.sum.default, (order,), **common)
    assert stacks_as_copied(program, "a test") is None


@pytest.mark.parametrize("passes", [[], [Microbatch(3)]], ids=["whole", "slices"])
def test_fitted_steps_copy_once(passes: list[Any]) -> None:
    budget = FitMemory("90%", cost="roofline")
    step, measured = step_peaks(deep(), OPTIMIZERS["sgd"], mean_square, (batch(),), [*passes, budget])
    slices = 3 if passes else 1
    assert targets_of(step.program).count(aten.stack.default) == 3 * slices
    assert copies(step.program) == 0
    assert f"{3 * slices} stacks of gradients are made" in "\n".join(step.records[-1].changed.lines)
    assert step.program.memory().allocated_peak_bytes == measured


def test_it_trains_as_eager_mode_does() -> None:
    assert_same_training(deep(), "adamw", mean_square, [(batch(),)], [FitMemory("90%", cost="roofline")], steps=3)
