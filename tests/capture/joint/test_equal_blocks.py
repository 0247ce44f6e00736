"""The search for equal blocks: in any sequence, and in the programs of random rows of layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from graphopt import Program
from graphopt.capture import CaptureSession
from graphopt.capture.joint.equal_blocks import KEPT, LEAST, EqualBlocks, equal_blocks, longest_period, without_most
from graphopt.ir.verify import verify
from tests.support.properties import examples

KEYS = st.integers(0, 3)


@given(st.lists(KEYS, max_size=60))
@examples(200)
def test_a_stretch_that_is_found_repeats_itself(keys: Sequence[int]) -> None:
    found = longest_period(keys)
    if found is not None:
        start, period, end = found
        assert end - start >= LEAST * period
        assert all(keys[place] == keys[place + period] for place in range(start, end - period))


@given(
    st.lists(KEYS, max_size=8),
    st.lists(KEYS, min_size=1, max_size=6),
    st.integers(LEAST, 14),
    st.lists(KEYS, max_size=8),
    st.integers(4, 9),
)
@examples(200)
def test_a_row_of_blocks_with_a_call_of_its_own_is_found(
    before: list[int], block: list[int], count: int, behind: list[int], own: int
) -> None:
    found = longest_period([*before, *[own, *block] * count, *behind])
    assert found is not None
    start, period, end = found
    assert period == len(block) + 1
    assert end - start >= count * period


class Kind(nn.Module):
    """A layer of one of several kinds.

    Args:
        kind: what it computes.
        shared: a layer that all of some kinds have for theirs.
    """

    def __init__(self, kind: int, shared: nn.Linear) -> None:
        super().__init__()
        self.kind = kind
        self.own = nn.Linear(4, 4, bias=kind != 1)
        self.shared = shared if kind == 3 else None
        if kind == 4:
            self.own.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        y = self.own(x).relu()
        if self.shared is not None:
            y = self.shared(y)
        return y * first if self.kind == 2 else x + y


class Row(nn.Module):
    """Layers one after the other; some results leave it."""

    def __init__(self, kinds: Sequence[int], returned: Sequence[int]) -> None:
        super().__init__()
        shared = nn.Linear(4, 4)
        self.layers = nn.ModuleList(Kind(kind, shared) for kind in kinds)
        self.returned = set(returned)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = x.sin()
        found = []
        for number, layer in enumerate(self.layers):
            x = layer(x, first)
            if number in self.returned:
                found.append(x)
        return (x.cos(), *found)


def _found(kinds: Sequence[int], returned: Sequence[int] = ()) -> tuple[Program, EqualBlocks | None]:
    torch.manual_seed(0)
    session = CaptureSession(Row(kinds, returned), (torch.randn(2, 4),))
    program = session.forward()
    return program, equal_blocks(program, session.tensors())


ROWS = st.lists(st.tuples(st.integers(0, 4), st.sampled_from([1, 2, 9])), min_size=1, max_size=3)


@given(ROWS, st.lists(st.integers(0, 20), max_size=1))
@examples(12)
def test_blocks_that_are_found_are_alike_and_touch_their_neighbours_alone(
    row: list[tuple[int, int]], returned: list[int]
) -> None:
    program, blocks = _found([kind for kind, times in row for _ in range(times)], returned)
    if blocks is None:
        return
    block_of = {node: number for number, calls in enumerate(blocks.calls) for node in calls}
    owner_of = {node: number for number, nodes in enumerate(blocks.owned) for node in nodes}
    assert len(blocks.calls) >= LEAST
    assert len(block_of) == sum(map(len, blocks.calls))
    assert len(owner_of) == sum(map(len, blocks.owned))
    for column in zip(*blocks.calls, strict=True):
        assert len({(node.op, node.target) for node in column}) == 1
    for node, number in block_of.items():
        assert all(block_of.get(source, number) in (number, number - 1) for source in node.all_input_nodes)
        assert all(owner_of.get(source, number) == number for source in node.all_input_nodes)
        assert number == len(blocks.calls) - 1 or all(user in block_of for user in node.users)
    verify(without_most(program, blocks))


@given(st.integers(0, 3), st.integers(LEAST + 1, 12))
@examples(8)
def test_of_a_row_of_equal_layers_five_are_left(kind: int, count: int) -> None:
    program, blocks = _found([kind] * count)
    assert blocks is not None
    left_out = sum(map(len, blocks.calls[KEPT - 2 : -2])) + sum(map(len, blocks.owned[KEPT - 2 : -2]))
    shorter = without_most(program, blocks)
    assert len(shorter.graph.nodes) == len(program.graph.nodes) - left_out
    assert len(blocks.calls) >= count - 1


def test_a_layer_that_differs_by_a_constant_ends_a_row() -> None:
    layers = [nn.Linear(4, 4) for _ in range(20)]
    slopes = [0.1] * 9 + [0.2] + [0.1] * 10
    model = nn.Sequential(*(part for a, b in zip(layers, slopes, strict=True) for part in (a, nn.LeakyReLU(b))))
    session = CaptureSession(model, (torch.randn(2, 4),))
    blocks = equal_blocks(session.forward(), session.tensors())
    assert blocks is not None
    assert len(blocks.calls) in (9, 10)
    relus = [node for calls in blocks.calls for node in calls if node.target is torch.ops.aten.leaky_relu.default]
    assert {str(node.args[1]) for node in relus} == {"0.1"}
