"""Passes of two functions: what a pattern finds, what is left alone and why, and that replacing keeps every bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, final

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import graphopt
from graphopt import Changed, GraphoptError, PassError, Phase, Pipeline, Program, Rewrite
from graphopt.ir.node import info, value_of
from graphopt.rewriting.patterns.pattern import Match, Mismatch, Pattern
from tests.support.training import Blocks, assert_same_training, next_token, results

aten = torch.ops.aten


@final
@dataclass(frozen=True)
class FoldTransposes(Rewrite):
    """Replace the transpose of a transpose by the matrix itself."""

    name, numerics = "fold-transposes", "bitwise"

    def pattern(self, x: Any) -> Any:
        return aten.t(aten.t(x))

    def replacement(self, x: Any) -> Any:
        return x


@final
@dataclass(frozen=True)
class FuseProducts(Rewrite):
    """Add to a product in one call."""

    name, numerics = "fuse-products", "tolerant"

    largest: int = 1000

    def pattern(self, x: Any, w: Any, y: Any) -> Any:
        return aten.mm(x, w) + y

    def replacement(self, x: Any, w: Any, y: Any) -> Any:
        return aten.addmm(y, x, w)

    def accepts(self, match: Match) -> str:
        return "" if value_of(match.root).numel() <= self.largest else "the result is large"


class Function(nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(shape) for shape in shapes)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, *self.weights)


def captured(function: Callable[..., torch.Tensor], *shapes: tuple[int, ...], x: tuple[int, ...] = (4, 8)) -> Program:
    return graphopt.capture(Function(function, *shapes), (torch.randn(x, requires_grad=True),))


def run(program: Program, current: Rewrite) -> Changed:
    return Pipeline([current]).run(program)[0].changed


def ops(program: Program) -> list[str]:
    return [str(node.target) for node in program.phase_nodes(Phase.FORWARD)]


# --- what a pattern finds --------------------------------------------------------------------------------------------


def found(pattern: Callable[..., Any], function: Callable[..., torch.Tensor]) -> list[Match]:
    program = captured(function)
    wanted = Pattern(pattern)
    matches = [wanted.match(node) for node in program.phase_nodes(Phase.FORWARD) if wanted.could_start(node)]
    return [match for match in matches if isinstance(match, Match)]


@pytest.mark.sweep(
    cases=("<lambda>-<lambda>-1_0", "<lambda>-<lambda>-1_4", "<lambda>-<lambda>-1_5", "<lambda>-<lambda>-0_7")
)
@pytest.mark.parametrize(
    ("pattern", "function", "count"),
    [
        (lambda x: aten.relu(aten.neg(x)), lambda x: torch.relu(-x), 1),
        (lambda x: aten.relu(-x), lambda x: torch.relu(-x), 1),
        (lambda x: aten.relu(-x), lambda x: -torch.relu(x), 0),
        (lambda x: aten.mul.Tensor(x, 2), lambda x: x * 2, 1),
        (lambda x: aten.mul(x, 2), lambda x: x * 2, 1),
        (lambda x: aten.mul(x, 2.0), lambda x: x * 2, 0),
        (lambda x: aten.mul(x, 3), lambda x: x * 2, 0),
        (lambda x, n: aten.mul(x, n), lambda x: x * 2 * 3, 2),
        (lambda x: aten.mul(x, x), lambda x: x * x, 1),
        (lambda x: aten.mul(x, x), lambda x: x * (x + 1), 0),
        (lambda x: aten.cos(x) + aten.sin(x), lambda x: x.sin() + x.cos(), 1),
        (lambda x: aten.cos(x) - aten.sin(x), lambda x: x.sin() - x.cos(), 0),
        (lambda x, y: aten.add(x, y, alpha=2), lambda x: torch.add(x, x.cos(), alpha=2), 1),
        (lambda x, y: aten.add(x, y), lambda x: torch.add(x, x.cos(), alpha=2), 0),
        (lambda x: aten.sum(x, [0]), lambda x: x.sum(0), 1),
        (lambda x: aten.sum(x, [0], False), lambda x: x.sum(0), 1),
        (lambda x: aten.sum(x, [0], True), lambda x: x.sum(0), 0),
        (lambda x, y: aten.cat([x, y]), lambda x: torch.cat([x, x.cos()]), 1),
        (lambda x, y: aten.cat([x, y, x]), lambda x: torch.cat([x, x.cos()]), 0),
        (lambda x: aten.topk(x, 2)[0], lambda x: x.topk(2)[0], 1),
        (lambda x: aten.topk(x, 3)[0], lambda x: x.topk(2)[0], 0),
    ],
)
def test_a_pattern_is_found_by_ops_operands_and_options(
    pattern: Callable[..., Any], function: Callable[..., torch.Tensor], count: int
) -> None:
    assert len(found(pattern, function)) == count


def test_wildcards_stand_for_values_and_numbers() -> None:
    (match,) = found(lambda x, n: aten.mul(aten.cos(x), n), lambda x: x.cos() * 3)
    assert match.values["n"] == 3
    assert match.values["x"].op == "placeholder"
    assert len(match.calls) == 2


def test_a_mismatch_says_how_far_it_got_and_what_differs() -> None:
    program = captured(lambda x: torch.relu(x.cos()))
    relu = next(node for node in program.nodes if node.target is aten.relu.default)
    mismatch = Pattern(lambda x: aten.relu(aten.sin(x))).match(relu)
    assert isinstance(mismatch, Mismatch)
    assert mismatch.found == 1
    assert mismatch.reason == "argument self of relu: cos is cos, not sin"


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: torch.relu(x), "'relu' is none: write torch.ops.aten.relu"),
        (lambda x: x.cos(), "'cos' is none: write torch.ops.aten.cos"),
        (lambda x: x, "returns the result of one op"),
        (lambda x, y: aten.cos(x), "argument 'y' stands nowhere in it"),
    ],
)
def test_what_is_no_pattern_is_refused_by_name(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(GraphoptError, match=message):
        Pattern(function)


# --- what is replaced ------------------------------------------------------------------------------------------------


def test_two_ops_become_one_with_metadata_names_and_provenance() -> None:
    program = captured(lambda x, w, b: torch.relu(x @ w + b).cos(), (8, 8), (4, 8))
    old = program.names()["::add"]
    source, module = info(old).source, info(old).module
    record = Pipeline([FuseProducts()]).run(program)[0]
    assert record.changed == Changed({"replaced": 1}, tensors=("::add",), bytes_saved=record.changed.bytes_saved)
    assert ops(program) == ["aten.addmm.default", "aten.relu.default", "aten.cos.default"]
    new = program.names()["::add"]
    assert new.target is aten.addmm.default
    assert (info(new).source, info(new).module, info(new).phase, info(new).origin) == (
        source,
        module,
        Phase.FORWARD,
        "fuse-products",
    )
    assert value_of(new).shape == (4, 8)


def test_a_replacement_without_calls_takes_the_old_names_along() -> None:
    program = captured(lambda x: torch.relu(aten.t(aten.t(x.cos()))))
    assert run(program, FoldTransposes()).counts == {"replaced": 2}  # the other one in backward
    assert program.names()["::t_1"] is program.names()["::cos"]
    assert ops(program) == ["aten.cos.default", "aten.relu.default"]


def test_chains_are_replaced_as_far_as_they_go() -> None:
    program = captured(lambda x: aten.t(aten.t(aten.t(aten.t(aten.t(x.cos()))))))
    assert run(program, FoldTransposes()).counts == {"replaced": 4}  # two in forward, two in backward
    assert ops(program) == ["aten.cos.default", "aten.t.default"]


def test_a_second_application_changes_nothing() -> None:
    @final
    @dataclass(frozen=True)
    class Twice(Rewrite):
        """Negate twice more: the result holds the pattern again."""

        name, numerics = "twice", "bitwise"

        def pattern(self, x: Any) -> Any:
            return aten.neg(x)

        def replacement(self, x: Any) -> Any:
            return aten.neg(aten.neg(aten.neg(x)))

    program = captured(lambda x: -x.cos())
    assert run(program, Twice()).counts == {"replaced": 3}  # two of them in backward
    again = run(program, Twice())
    assert not again
    assert "neg" in again.reason


def test_options_are_read_by_the_functions() -> None:
    program = captured(lambda x, w, b: torch.relu(x @ w + b), (8, 8), (4, 8))
    left = run(program, FuseProducts(largest=3))
    assert not left
    assert left.reason == "1 left alone: the result is large"
    assert run(program, FuseProducts()).counts == {"replaced": 1}


def test_a_value_that_is_read_elsewhere_is_computed_once() -> None:
    program = captured(lambda x, w, b: torch.relu(x @ w + b) * (x @ w).detach(), (8, 8), (4, 8))
    shared = captured(lambda x, w, b: (lambda y: torch.relu(y + b) * y)(x @ w), (8, 8), (4, 8))
    assert run(program, FuseProducts()).counts == {"replaced": 1}
    left = run(shared, FuseProducts())
    assert left.reason == "1 left alone: a value inside of it is read elsewhere"


def test_nothing_found_says_what_came_nearest() -> None:
    program = captured(lambda x, w: torch.relu(x @ w), (8, 8))
    assert run(program, FuseProducts()).reason == "the program has no op add"
    program = captured(lambda x, b: x.cos() + b, (4, 8))
    reason = run(program, FuseProducts()).reason
    assert reason == "no occurrence; the nearest begins at add: argument self of add: cos is cos, not mm"


def test_what_is_written_in_between_is_not_read_later() -> None:
    @final
    @dataclass(frozen=True)
    class LateProduct(Rewrite):
        """Subtract what was multiplied in one call."""

        name, numerics, stage = "late", "tolerant", "step"

        def pattern(self, p: Any, g: Any) -> Any:
            return aten.neg(aten.mul(p, g))

        def replacement(self, p: Any, g: Any) -> Any:
            return aten.mul(p, aten.neg(g))

    model = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    program = graphopt.capture(model, (torch.randn(2, 4),), loss=lambda m, x: m(x).sum(), optimizer=optimizer)
    weight = next(node for node, spec in program.inputs_of("parameter"))
    writer = next(node for node in program.phase_nodes(Phase.UPDATE))
    last = program.output_node
    for before, after, count in ((writer, last, 0), (last, last, 1)):
        copy = program.copy()
        places = {node.name: node for node in copy.nodes}
        common = {"phase": Phase.UPDATE, "origin": "a test", "like": places[weight.name]}
        w = places[weight.name]
        product = copy.insert(aten.mul.Tensor, (w, w), before=places[before.name], **common)
        kept = copy.insert(aten.neg.default, (product,), before=places[after.name], **common)
        copy.insert(aten.copy_.default, (w, kept), before=places[after.name], **common)
        changed = Pipeline([LateProduct()]).run(copy, verify=False)[0].changed
        assert changed.counts.get("replaced", 0) == count
        assert count or "writes to what it reads in between" in changed.reason


def test_a_replacement_of_another_shape_is_an_error_that_shows_both() -> None:
    @final
    @dataclass(frozen=True)
    class Wrong(Rewrite):
        """Replace a cosine by a sum."""

        name, numerics = "wrong", "changes"

        def pattern(self, x: Any) -> Any:
            return aten.cos(x)

        def replacement(self, x: Any) -> Any:
            return aten.sum(x, [0])

    with pytest.raises(PassError, match=r"wrong: the replacement of cos .* is f32\[8\], and what .* is f32\[4, 8\]"):
        run(captured(lambda x: x.cos()), Wrong())


def test_a_replacement_takes_the_arguments_of_its_pattern() -> None:
    @final
    @dataclass(frozen=True)
    class Strange(Rewrite):
        """Take an argument that nothing stands for."""

        name, numerics = "strange", "changes"

        def pattern(self, x: Any) -> Any:
            return aten.cos(x)

        def replacement(self, y: Any) -> Any:
            return y

    with pytest.raises(PassError, match="replacement takes 'y', which is no argument of its pattern; those are x"):
        run(captured(lambda x: x.cos()), Strange())


@pytest.mark.sweep
def test_training_with_transposes_folded_equals_eager_training() -> None:
    model, tokens = Blocks(layers=2, p=0.1), [torch.randint(11, (2, 5)) for _ in range(3)]
    assert_same_training(model, "adamw", next_token, [(batch,) for batch in tokens], [FoldTransposes()])


# --- random programs -------------------------------------------------------------------------------------------------

_STEPS: dict[str, Callable[[Any], Any]] = {
    "t": lambda x: aten.t(x),
    "cos": lambda x: x.cos(),
    "neg": lambda x: -x,
    "add": lambda x: x + x.sin(),
    "mul": lambda x: x * 2,
}


@final
@dataclass(frozen=True)
class FoldNegations(Rewrite):
    """Replace the negation of a negation by the value itself."""

    name, numerics = "fold-negations", "bitwise"

    def pattern(self, x: Any) -> Any:
        return aten.neg(aten.neg(x))

    def replacement(self, x: Any) -> Any:
        return x


@given(st.lists(st.sampled_from(sorted(_STEPS)), min_size=1, max_size=10))
def test_folding_in_random_programs_keeps_every_bit(steps: list[str]) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x @ w
        for step in steps:
            y = _STEPS[step](y)
        return y

    model, x = Function(function, (4, 4)), torch.randn(4, 4)
    program = graphopt.capture(model, (x,), loss=lambda model, x: model(x).square().sum())
    before, _ = results(program, model, x)
    Pipeline([FoldTransposes(), FoldNegations()]).run(program)
    after, _ = results(program, model, x)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[spec], after[spec]) for spec in before)
    forward = [str(node.target) for node in program.phase_nodes(Phase.FORWARD)]
    assert not any(pair in (("aten.t.default",) * 2, ("aten.neg.default",) * 2) for pair in pairwise(forward))
