"""Random networks at random checkpoints: every rewrite is valid, bitwise equal to eager, and predicted to the byte."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st
from torch import nn

import graphopt
from graphopt import Pipeline, Program
from graphopt.ir.node import OutputSpec
from graphopt.ir.verify import verify
from graphopt.passes import Recompute
from graphopt.rewriting.pass_ import PassRecord
from tests.support.properties import examples
from tests.support.random_ops import OPS, READ_BOTH, SHAPE, Layers
from tests.support.training import captured, identical, peaks, results


@dataclass(frozen=True)
class Recipe:
    """A network: each line applies an op to two earlier tensors, counted from the latest; and where to cut it."""

    lines: tuple[tuple[str, int, int], ...]
    also: int
    checkpoints: tuple[int, ...] | str

    def names(self) -> str | list[str]:
        """The checkpoints' names; lines that the result does not depend on leave no tensor to name."""
        if isinstance(self.checkpoints, str):
            return self.checkpoints
        return [f"t{n}" for n in self.checkpoints if n + 1 in self.live()]

    def live(self) -> set[int]:
        """The places in the pool of tensors (0 is the input) that the result depends on."""
        found = {len(self.lines), self.also % (len(self.lines) + 1)}
        for place in range(len(self.lines), 0, -1):
            op, first, second = self.lines[place - 1]
            if place in found:
                found.add(place - 1 - first % place)
                if op in READ_BOTH:
                    found.add(place - 1 - second % place)
        return found


class Network(nn.Module):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.layers, self.recipe = Layers(), recipe

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pool = [x]
        for number, (op, first, second) in enumerate(self.recipe.lines):
            value = OPS[op](self.layers, pool[-1 - first % len(pool)], pool[-1 - second % len(pool)])
            pool.append(graphopt.name(value, f"t{number}"))
        return pool[-1].square().mean() + self.layers.linear(pool[self.recipe.also % len(pool)]).mean()


lines = st.lists(
    st.tuples(st.sampled_from(list(OPS)), st.sampled_from([0, 0, 0, 1, 2, 5]), st.sampled_from([0, 1, 2, 3])),
    min_size=1,
    max_size=9,
)


@st.composite
def recipes(draw: Any) -> Recipe:
    chosen = tuple(draw(lines))
    numbers = st.lists(st.integers(0, len(chosen) - 1), max_size=4, unique=True).map(tuple)
    everything = tuple(range(len(chosen)))
    return Recipe(chosen, draw(st.integers(0, 9)), draw(numbers | numbers | st.sampled_from(["auto", everything])))


def own_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x)


def eager(
    model: nn.Module, x: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, Any], torch.Tensor]:
    """Loss, gradients, buffers and the generator's state after one eager step from seed 0."""
    model, x = copy.deepcopy(model), x.detach().clone().requires_grad_()
    torch.manual_seed(0)
    loss = model(x)
    loss.backward()
    gradients = {name: tensor.grad for name, tensor in [*model.named_parameters(), ("args[0]", x)]}
    gradients = {name: gradient for name, gradient in gradients.items() if gradient is not None}
    return loss.detach(), gradients, dict(model.named_buffers()), torch.get_rng_state()


def structure(program: Program) -> list[tuple[str, str]]:
    return [(node.name, str(node.args)) for node in program.nodes]


@given(recipes())
@examples(4)
def test_recompute_keeps_every_promise_on_random_networks(recipe: Recipe) -> None:
    torch.manual_seed(0)
    model, x = Network(recipe), torch.randn(SHAPE).requires_grad_()
    plain = captured(model, x, loss=own_loss)
    program = plain.copy()
    passes = Pipeline([Recompute(recipe.names())])
    (record,) = passes.run(program)
    event(f"recomputes: {bool(record.changed)}")
    verify(program, before=plain)

    loss, gradients, buffers, generator = eager(model, x)
    held = copy.deepcopy(model)
    found, state = results(program, held, x)
    assert identical(found[OutputSpec("loss", "loss")], loss)
    mine = {spec.target: value for spec, value in found.items() if spec.role == "gradient"}
    assert mine.keys() == gradients.keys()
    assert [name for name, value in mine.items() if not identical(value, gradients[name])] == []
    assert [name for name, value in held.named_buffers() if not identical(value, buffers[name])] == []
    assert torch.equal(state, generator)

    predicted, measured = peaks(program, model, x)
    assert measured == pytest.approx(predicted, rel=1e-3)
    assert record.peak_after == program.memory().peak_bytes
    assert says_so_where_the_peak_rises(record, plain)

    before = structure(program)
    (again,) = passes.run(program)
    assert not again.changed
    assert structure(program) == before


def says_so_where_the_peak_rises(record: PassRecord, plain: Program) -> bool:
    """Whether the record has a line about a higher peak exactly where it is higher by more than a block of memory."""
    assert record.peak_after is not None
    peak = plain.memory().peak_bytes
    rises = bool(record.changed) and record.peak_after > peak + max(512, peak // 1000)
    return rises == any("peak rises" in line for line in record.changed.lines)


RAISING = {
    "a new buffer value": Recipe((("running average", 0, 0), ("running average", 0, 0), ("sin", 0, 0)), 0, (0, 2)),
    "a temporary": Recipe((("sin", 0, 2), ("batch norm", 1, 0), ("layer norm", 1, 1), ("sort", 5, 1)), 8, (0, 3)),
    "a mask": Recipe(
        (("softmax", 0, 2), ("add", 0, 1), ("gated", 0, 3), ("dropout", 5, 2), ("noise", 0, 3), ("noise", 1, 3)),
        9,
        (1, 5),
    ),
}
"""Networks in which what is recomputed is more than what forward kept."""


@pytest.mark.sweep(but=("a new buffer value",))
@pytest.mark.parametrize("recipe", list(RAISING.values()), ids=list(RAISING))
def test_recomputing_more_than_was_kept_says_so_where_the_peak_rises_by_more_than_a_block(recipe: Recipe) -> None:
    plain = captured(Network(recipe), torch.randn(SHAPE).requires_grad_(), loss=own_loss)
    program = plain.copy()
    (record,) = Pipeline([Recompute(recipe.names())]).run(program)
    assert program.memory().peak_bytes > plain.memory().peak_bytes
    assert says_so_where_the_peak_rises(record, plain)
