"""What the model runs under ``torch.utils.checkpoint`` is undone: the program is that of the model without it."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from graphopt import Phase, Pipeline, Policy, Program
from graphopt.ir.node import info, own_phase
from graphopt.ir.verify import verify
from graphopt.passes import Microbatch, Recompute
from graphopt.rewriting.memory.recompute.checkpoint_segments import undo_recomputation
from tests.support.covering import covering
from tests.support.training import captured, identical, results

D = 16
ROWS = torch.linspace(-1, 1, 64 * D).reshape(64, D).cos()


class Block(nn.Module):
    def __init__(self, p: float = 0.2) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 64), nn.GELU(), nn.Dropout(p), nn.Linear(64, D))
        self.norm = nn.BatchNorm1d(D)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x + scale * self.net(x)


class Model(nn.Module):
    """Three blocks, run by ``way``, which is given the model and what checkpoints a function; it may do nothing."""

    def __init__(self, way: str, on: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(D, D)
        self.way, self.reentrant = way, on

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args) if self.reentrant is None else checkpoint(function, *args, use_reentrant=self.reentrant)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(WAYS[self.way](self, x))


def each_block(model: Model, x: torch.Tensor) -> torch.Tensor:
    for block in model.blocks:
        x = model.run(block, x)
    return x


def some_blocks(model: Model, x: torch.Tensor) -> torch.Tensor:
    first, second, third = model.blocks
    return third(model.run(second, first(x)))


def nested(model: Model, x: torch.Tensor) -> torch.Tensor:
    first, second, third = model.blocks
    return model.run(lambda y: model.run(second, model.run(first, y)).tanh() * third(y), x)


def whole(model: Model, x: torch.Tensor) -> torch.Tensor:
    return model.run(lambda y: model.head(model.blocks[1](model.blocks[0](y))), x)


def tied(model: Model, x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = model.run(model.blocks[0], x)
    return x


def batch_norm(model: Model, x: torch.Tensor) -> torch.Tensor:
    for block in model.blocks:
        x = model.run(lambda y, b=block: b.norm(b(y)).relu(), x)
    return x


def autocast(model: Model, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return each_block(model, x).float()


def several_outputs(model: Model, x: torch.Tensor) -> torch.Tensor:
    def run(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        c = model.blocks[0](a)
        return c, c.sin(), b * 2

    a, b, c = model.run(run, x, x.cos())
    return sum(model.run(run, a + b, c))


def keywords(model: Model, x: torch.Tensor) -> torch.Tensor:
    if model.reentrant is not False:
        return model.run(functools.partial(model.blocks[0], scale=0.5), x)
    return checkpoint(model.blocks[0], x, use_reentrant=False, scale=0.5)


def sequential(model: Model, x: torch.Tensor) -> torch.Tensor:
    if model.reentrant is None:
        return nn.Sequential(*model.blocks)(x)
    return checkpoint_sequential(list(model.blocks), 2, x, use_reentrant=model.reentrant)


def the_same_twice(model: Model, x: torch.Tensor) -> torch.Tensor:
    """The same values, made in two segments and outside of them."""
    again = lambda y: model.blocks[0].net[1](y).tanh().sin()  # noqa: E731
    return (model.run(again, x) * again(x) * model.run(again, x))[:, :D]


def attention(model: Model, x: torch.Tensor) -> torch.Tensor:
    def run(y: torch.Tensor, block: Block) -> torch.Tensor:
        q = block(y).view(4, 4, -1, D // 2)
        attended = F.scaled_dot_product_attention(q, q, q, dropout_p=0.1).reshape(y.shape)
        return attended.masked_fill(y > 0.3, 0.1).clamp(max=2.0) + torch.rand_like(y) * y

    for block in model.blocks:
        x = model.run(run, x, block)
    return x


WAYS = {
    way.__name__: way
    for way in (
        each_block, some_blocks, nested, whole, tied, batch_norm, autocast, several_outputs, keywords, sequential,
        the_same_twice, attention,
    )
}  # fmt: skip


def program_of(way: str, on: bool | None) -> tuple[Model, Program, torch.Tensor]:
    model, x = Model(way, on), ROWS.clone().requires_grad_()
    return model, captured(model, x), x


def ops_of(program: Program) -> Counter[str]:
    return Counter(str(node.target) for node in program.nodes)


@covering(way=list(WAYS), reentrant=[False, True])
def test_the_program_is_that_of_the_model_without_checkpoints(way: str, reentrant: bool) -> None:
    model, program, x = program_of(way, reentrant)
    plain = program_of(way, None)[1]
    undone = undo_recomputation(program)
    assert undone is not None
    changed, segments = undone
    verify(changed, before=program)
    assert ops_of(changed) == ops_of(plain) != ops_of(program)
    assert changed.memory().peak_bytes == plain.memory().peak_bytes
    assert segments.drops
    assert not any(info(node).policy is Policy.MUST_RECOMPUTE for node in changed.nodes if node.op == "call_function")

    one, other = copy.deepcopy(model), copy.deepcopy(model)
    expected, found = results(program, one, x), results(changed, other, x)
    assert torch.equal(expected[1], found[1])
    assert all(identical(value, found[0][spec]) for spec, value in expected[0].items())
    assert all(map(torch.equal, one.buffers(), other.buffers()))


def test_a_model_without_checkpoints_has_nothing_to_undo() -> None:
    program = program_of("each_block", None)[1]
    Pipeline([Recompute(["blocks.1"])]).run(program)
    assert undo_recomputation(program) is None


def test_what_passes_have_run_again_still_does() -> None:
    """A first run that ``Recompute`` repeats keeps its mark, and the state of its generator."""
    _, program, x = program_of("some_blocks", False)
    Pipeline([Recompute(["blocks.0", "blocks.2"])]).run(program)
    undone = undo_recomputation(program)
    assert undone is not None
    again = [node for node in undone[0].nodes if node.op == "call_function" and own_phase(node) is Phase.RECOMPUTE]
    assert again
    assert all(info(node).origin.startswith("recompute: ") for node in again)
    model = Model("some_blocks", False)
    expected, found = (results(each, copy.deepcopy(model), x) for each in (program, undone[0]))
    assert torch.equal(expected[1], found[1])
    assert all(identical(value, found[0][spec]) for spec, value in expected[0].items())


def test_each_slice_of_a_batch_is_undone() -> None:
    peaks = []
    for on in (False, None):
        program = program_of("each_block", on)[1]
        Pipeline([Microbatch(3)]).run(program)
        undone = undo_recomputation(program)
        assert (undone is None) == (on is None)
        changed = program if undone is None else undone[0]
        verify(changed)
        peaks.append(changed.memory().peak_bytes)
        assert not [node for node in changed.nodes if node.op == "call_function" and own_phase(node) is Phase.RECOMPUTE]
    assert peaks[0] == peaks[1]


@pytest.mark.parametrize(
    ("passes", "name"),
    [
        ("recompute{checkpoints=blocks.1}", "recompute"),
        ("recompute-evenly{number=2}", "recompute-evenly"),
        ("recompute{checkpoints=blocks.1},offload{cost=roofline}", "offload"),
        ("recompute{checkpoints=blocks.1},checkpoint-boundaries{profile=true}", "checkpoint-boundaries"),
        ("compress-activations", "compress-activations"),
    ],
)
def test_passes_that_leave_segments_as_they_are_say_so(passes: str, name: str) -> None:
    lines = []
    for on in (False, None):
        program = program_of("each_block", on)[1]
        segments = [node.name for node in program.phase_nodes(Phase.RECOMPUTE)]
        (record,) = [record for record in Pipeline(passes).run(program) if record.name == name]
        lines.append([line for line in record.changed.lines if "checkpoint() segments stay as they are" in line])
        assert {node.name for node in program.phase_nodes(Phase.RECOMPUTE)}.issuperset(segments)
    assert [len(each) for each in lines] == [1, 0]
