"""Sums of gradients are taken in place where nothing else reads an operand, as autograd does, and nowhere else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

import graphopt
from graphopt import Pass, Phase, Program, measure_peak
from graphopt.analysis.reuse import apply_reuse, reused_operands
from graphopt.passes import Recompute
from graphopt.program import info
from graphopt.runtime.binding import Binding
from tests.running import X, network, same
from tests.support import Blocks, assert_same_training, captured, mean_square, next_token, rewritten

aten = torch.ops.aten
TOKENS = torch.arange(24).reshape(2, 12) % 11


# --- training --------------------------------------------------------------------------------------------------------


class Uses(nn.Module):
    """A value that is used often, a parameter that is used twice, and views on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        z = y.sin() + y.cos() * y + (y * self.scale).exp() + y.view(-1, 4).tanh().view_as(y) + y.T.sigmoid().T
        return self.b(z + self.scale) + self.b(y[:, :1] * z)


ROWS = torch.linspace(-1, 1, 64 * 16).reshape(64, 16)
with_and_without = pytest.mark.parametrize("passes", [[], [Recompute("a")]], ids=["plain", "recompute"])


@with_and_without
def test_training_with_sums_in_place_is_eager_training(passes: list[Pass]) -> None:
    assert len(reused_operands(rewritten(Uses(), ROWS, passes=passes))) >= 5
    assert_same_training(Uses(), "adamw", mean_square, [(ROWS.clone().requires_grad_(),)], passes, steps=3)


def run(module: fx.GraphModule, program: Program, model: nn.Module, x: torch.Tensor) -> Any:
    torch.manual_seed(1)
    with torch.no_grad():
        return module.forward(Binding(program, model).gather([x]))


@pytest.mark.parametrize(
    ("make", "x", "loss"), [(Uses, ROWS, mean_square), (lambda: Blocks(2), TOKENS, next_token)], ids=["uses", "blocks"]
)
def test_sums_in_place_change_bytes_and_no_bits(make: Callable[[], nn.Module], x: torch.Tensor, loss: Any) -> None:
    model = make()
    program = captured(model, x, loss=loss)
    in_place, functional = program.to_graph_module(), out_of_place(program)
    written = [n for n in in_place.graph.nodes if n.target is aten.add_.Tensor]
    assert len(written) == len(reused_operands(program)) > 0
    assert not [n for n in program.graph.nodes if n.target is aten.add_.Tensor]  # the program itself stays functional
    held = copy.deepcopy(model)
    assert same(list(run(in_place, program, held, x)), list(run(functional, program, held, x)))
    less = measure_peak(lambda: run(in_place, program, held, x)).allocated_peak_bytes
    more = measure_peak(lambda: run(functional, program, held, x)).allocated_peak_bytes
    assert program.memory().allocated_peak_bytes == less <= more
    assert bytes_of_sums(program) > 0


def out_of_place(program: Program) -> fx.GraphModule:
    """The generated module without sums in place, of the same calling convention."""
    made, plain = program.to_graph_module(), program.copy()
    plain.graph.set_codegen(made.graph._codegen)
    return fx.GraphModule({}, plain.graph)


def bytes_of_sums(program: Program) -> int:
    """What the sums would allocate if they were not taken in place."""
    return sum(node.meta["val"].untyped_storage().nbytes() for node in reused_operands(program))


def test_a_tangent_from_outside_is_never_written() -> None:
    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.a(x)
            return y, y.sin() * y

    model = Returns()
    found = []
    for candidate in (copy.deepcopy(model), graphopt.optimize(copy.deepcopy(model))):
        tangents = [ROWS.cos(), ROWS.exp()]
        torch.autograd.backward(candidate(ROWS), tangents)
        assert torch.equal(tangents[0], ROWS.cos())
        assert torch.equal(tangents[1], ROWS.exp())
        found.append([parameter.grad for parameter in candidate.parameters()])
    assert same(*found)


# --- which sums ------------------------------------------------------------------------------------------------------


class Build:
    """Puts backward ops before the end of a joint program; ``u`` and ``v`` are fresh values of 16 x 8 numbers."""

    def __init__(self) -> None:
        self.program = captured(network(), X)
        gradient = next(v for v, s in self.program.outputs_of("gradient") if s.target == "net.0.weight")
        self.before = set(reused_operands(self.program))
        self.end = self.program.output_node
        self.u, self.v = self(aten.mul.Tensor, gradient, 2.0), self(aten.mul.Tensor, gradient, 3.0)

    def __call__(self, target: Any, *args: Any, phase: Phase = Phase.BACKWARD, **kwargs: Any) -> fx.Node:
        return self.program.insert(target, args, kwargs, before=self.end, phase=phase, origin="test")

    def add(self, *args: Any, **kwargs: Any) -> fx.Node:
        return self(aten.add.Tensor, *args, **kwargs)

    def parameter(self) -> fx.Node:
        return next(n for n, s in self.program.inputs_of("parameter") if s.target == "net.0.weight")

    @property
    def found(self) -> list[tuple[fx.Node, fx.Node]]:
        return [(n, o) for n, o in reused_operands(self.program).items() if n not in self.before]


def read_later(b: Build) -> None:
    b.add(b.u, b.v)
    b(aten.mul.Tensor, b.u, b.v)


def view_read_later(b: Build) -> None:
    views = [b(aten.view.default, node, [-1]) for node in (b.u, b.v)]
    b.add(b.u, b.v)
    b(aten.mul.Tensor, *views)


def read_through_base_later(b: Build) -> None:
    views = [b(aten.view.default, node, [-1]) for node in (b.u, b.v)]
    b.add(*views)
    b(aten.mul.Tensor, b.u, b.v)


def parts(b: Build) -> None:
    b.add(*(b(aten.slice.Tensor, node, 0, 0, 2) for node in (b.u, b.v)))


def expanded(b: Build) -> None:
    rows = [b(aten.sum.dim_IntList, node, [0], True) for node in (b.u, b.v)]
    b.add(*(b(aten.expand.default, node, [16, 8]) for node in rows))


def returned(b: Build) -> None:
    b.add(b.u, b.v)
    program = b.program
    program.set_outputs([*program.output_values, b.u, b.v], [*program.outputs, *program.outputs[:2]])


UNSAFE: dict[str, Callable[[Build], Any]] = {
    "read later": read_later,
    "read later through a view": view_read_later,
    "its base is read later": read_through_base_later,
    "parts of tensors": parts,
    "expanded tensors": expanded,
    "returned": returned,
    "two views of one tensor": lambda b: b.add(b(aten.view.default, b.u, [16, 8]), b.u),
    "with a factor": lambda b: b.add(b.u, b.v, alpha=2),
    "an input": lambda b: b.add(b.parameter(), 1.0),
    "of forward": lambda b: b.add(b(aten.sin.default, b.parameter(), phase=Phase.FORWARD), 1.0),
    "not in backward": lambda b: b.add(b.u, b.v, phase=Phase.UPDATE),
    "another dtype of the same size": lambda b: b.add(b(aten._to_copy.default, b.u, dtype=torch.int32), b.parameter()),
    "a smaller one": lambda b: b.add(b.parameter(), b(aten.sum.dim_IntList, b.u, [0])),
    "another op": lambda b: b(aten.sub.Tensor, b.u, b.v),
}


@pytest.mark.parametrize("build", list(UNSAFE.values()), ids=list(UNSAFE))
def test_where_an_operand_may_not_be_overwritten(build: Callable[[Build], Any]) -> None:
    b = Build()
    build(b)
    assert b.found == []


def one_read_later(b: Build) -> tuple[fx.Node, fx.Node]:
    total = b.add(b.u, b.v)
    b(aten.mul.Tensor, b.u, 1.0)
    return total, b.v


SAFE: dict[str, Callable[[Build], tuple[fx.Node, fx.Node]]] = {
    "both die": lambda b: (b.add(b.u, b.v), b.u),
    "the first is read later": one_read_later,
    "the same tensor twice": lambda b: (b.add(b.u, b.u), b.u),
    "a number": lambda b: (b.add(b.u, 1.0), b.u),
    "an input and a fresh one": lambda b: (b.add(b.parameter(), b.u), b.u),
    "a smaller one": lambda b: (b.add(b(aten.sum.dim_IntList, b.v, [0]), b.u), b.u),
    "a lower dtype": lambda b: (b.add(b(aten._to_copy.default, b.v, dtype=torch.bfloat16), b.u), b.u),
    "a whole view": lambda b: (b.add(view := b(aten.view.default, b.u, [8, 16]), 1.0), view),
}


@pytest.mark.parametrize("build", list(SAFE.values()), ids=list(SAFE))
def test_where_an_operand_is_overwritten(build: Callable[[Build], tuple[fx.Node, fx.Node]]) -> None:
    b = Build()
    total, operand = build(b)
    assert b.found == [(total, operand)]
    other = next((a for a in total.args if a is not operand), operand)
    apply_reuse(b.program)
    assert total.target is aten.add_.Tensor
    assert total.args == (operand, other)


def test_a_chain_of_sums_uses_one_tensor() -> None:
    b = Build()
    total = b.add(b.add(b.u, b.v), b(aten.mul.Tensor, b.parameter(), 2.0))
    memory = b.program.memory()
    owners = [s.owner for s in memory.storages if s.owner in (total, *total.all_input_nodes, b.u)]
    assert total not in owners
    assert b.u in owners
    assert info(total).phase is Phase.BACKWARD
