"""Random networks at random checkpoints: every rewrite is valid, bitwise equal to eager, and predicted to the byte."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import event, given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import graphopt
from graphopt import Pipeline, Program
from graphopt.ir.node import OutputSpec
from graphopt.ir.verify import verify
from graphopt.passes import Recompute
from graphopt.rewriting.pass_ import PassRecord
from tests.support.properties import examples
from tests.support.training import captured, identical, peaks, results

ROWS, D = 24, 8
SHAPE = (ROWS, D)


class Layers(nn.Module):
    """One layer of each kind that has parameters or buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.wide, self.norm = nn.Linear(D, D), nn.Linear(D, 2 * D), nn.LayerNorm(D)
        self.batch_norm = nn.BatchNorm1d(D)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, D))
        self.register_buffer("average", torch.zeros(D))


def swap_halves(x: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat([right, left], -1)


def split_unevenly(x: torch.Tensor) -> torch.Tensor:
    a, b, c = x.split([2, 5, D - 7], -1)
    return torch.cat([c.sin(), a, b.cos()], -1)


def statistics(x: torch.Tensor) -> torch.Tensor:
    variance, mean = torch.var_mean(x, -1, keepdim=True)
    return (x - mean) * torch.rsqrt(variance + 1)


def ordered(x: torch.Tensor) -> torch.Tensor:
    values, indices = x.sort(-1)
    return values + x.gather(-1, indices.flip(-1))


def in_place(x: torch.Tensor) -> torch.Tensor:
    y = x * 0.5
    y.add_(1)
    y[:, :2] = 0
    return y.mul_(2)


def attention(x: torch.Tensor) -> torch.Tensor:
    parts = x.view(1, 2, ROWS // 2, D)
    return F.scaled_dot_product_attention(parts, parts, parts, dropout_p=0.2).view(SHAPE)


def running_average(layers: Layers, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        layers.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
    return x - layers.average


Op = Callable[[Layers, torch.Tensor, torch.Tensor], torch.Tensor]

OPS: dict[str, Op] = {
    "tanh": lambda _, x, y: torch.tanh(x),
    "gelu": lambda _, x, y: F.gelu(x),
    "sin": lambda _, x, y: torch.sin(x),
    "relu": lambda _, x, y: F.relu(x),
    "softmax": lambda _, x, y: x.softmax(-1),
    "add": lambda _, x, y: x + y,
    "mul": lambda _, x, y: x * torch.tanh(y),
    "sub the detached": lambda _, x, y: x - y.detach(),
    "scale": lambda layers, x, y: x * layers.scale,
    "linear": lambda layers, x, y: layers.linear(x),
    "gated": lambda layers, x, y: F.glu(layers.wide(x), -1) + y,
    "layer norm": lambda layers, x, y: layers.norm(x),
    "batch norm": lambda layers, x, y: layers.batch_norm(x.contiguous()),
    "matmul": lambda _, x, y: torch.tanh(x @ y.t() / D) @ y,
    "transpose": lambda _, x, y: x.t().contiguous().sin().t(),
    "reshape": lambda _, x, y: x.reshape(D, ROWS).cumsum(0).reshape(SHAPE) / D,
    "view": lambda _, x, y: x.view(2, -1, D).flip(0).view(SHAPE),
    "swap halves": lambda _, x, y: swap_halves(x),
    "split": lambda _, x, y: split_unevenly(x),
    "statistics": lambda _, x, y: statistics(x),
    "sort": lambda _, x, y: ordered(x),
    "in place": lambda _, x, y: in_place(x),
    "dropout": lambda _, x, y: F.dropout(x, 0.3),
    "noise": lambda _, x, y: x + 0.1 * torch.rand_like(y),
    "bernoulli": lambda _, x, y: x * torch.bernoulli(torch.sigmoid(y.detach())),
    "attention": lambda _, x, y: attention(x),
    "running average": lambda layers, x, y: running_average(layers, x),
    "checkpoint": lambda layers, x, y: checkpoint(
        lambda z: F.dropout(torch.tanh(layers.linear(z)), 0.2), x, use_reentrant=False
    ),
}


READ_BOTH = {"add", "mul", "sub the detached", "gated", "matmul", "bernoulli"}


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
@examples(6, many=200)
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
    """Whether the record has a line about a higher peak exactly where there is one."""
    assert record.peak_after is not None
    rises = bool(record.changed) and record.peak_after > plain.memory().peak_bytes
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
"""Networks in which what is computed again is more than what forward kept."""


@pytest.mark.parametrize("recipe", list(RAISING.values()), ids=list(RAISING))
def test_recomputing_more_than_was_kept_says_that_the_peak_rises(recipe: Recipe) -> None:
    plain = captured(Network(recipe), torch.randn(SHAPE).requires_grad_(), loss=own_loss)
    program = plain.copy()
    (record,) = Pipeline([Recompute(recipe.names())]).run(program)
    assert program.memory().peak_bytes > plain.memory().peak_bytes
    assert says_so_where_the_peak_rises(record, plain)
