"""The roofline: its operations and bytes are what one counts by hand, for every kind of op that has matrix products."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn
from torch.export import Dim

import graphopt
from graphopt import Program
from graphopt.analysis.costs.cost import DeviceProfile, flops_of, moved_bytes, op_seconds
from graphopt.analysis.costs.isolated_call import call_key
from graphopt.analysis.costs.profiles import PROFILES
from graphopt.ir.node import value_of
from graphopt.ir.ops import schema
from graphopt.passes import Recompute
from tests.support.costs import TOY, call, small_program, use_folder
from tests.support.training import Blocks, Net, captured, mean_square, next_token, rewritten

aten = torch.ops.aten
TOKENS = torch.arange(24).reshape(2, 12) % 11
FLOAT = 4
BASE = small_program()


def seconds(node: fx.Node, profile: DeviceProfile = TOY) -> float:
    (found,) = op_seconds([node], method="roofline", profile=profile)
    return found


def of(program: Program, name: str) -> list[fx.Node]:
    """The calls of an op."""
    found = [node for node in program.nodes if node.op == "call_function" and schema.op_name(node) == name]
    assert found, name
    return found


MATRIX: dict[str, tuple[Callable[..., Any], list[torch.Tensor], int, int]] = {
    "mm": (aten.mm.default, [torch.empty(3, 5), torch.empty(5, 7)], 2 * 3 * 5 * 7, 15 + 35 + 21),
    "addmm": (aten.addmm.default, [torch.empty(7), torch.empty(3, 5), torch.empty(5, 7)], 210, 7 + 15 + 35 + 21),
    "bmm": (aten.bmm.default, [torch.empty(2, 3, 5), torch.empty(2, 5, 7)], 420, 2 * 71),
    "baddbmm": (
        aten.baddbmm.default, [torch.empty(2, 3, 7), torch.empty(2, 3, 5), torch.empty(2, 5, 7)], 420, 2 * (71 + 21),
    ),
    "a pointwise op": (aten.mul.Tensor, [torch.empty(3, 5), torch.empty(3, 1)], 0, 15 + 3 + 15),
    "a sum": (aten.sum.default, [torch.empty(3, 5)], 0, 16),
    "transposed": (aten.mm.default, [torch.empty(5, 3).t(), torch.empty(5, 7)], 210, 71),
}  # fmt: skip


@pytest.mark.sweep(but=("a sum",))
@pytest.mark.parametrize("case", MATRIX)
def test_matrix_products_are_counted_as_by_hand(case: str) -> None:
    op, args, flops, elements = MATRIX[case]
    node = call(op, *args)
    assert (flops_of(node), moved_bytes(node)) == (flops, FLOAT * elements)
    slow_units = DeviceProfile("", {"float32": 2.0}, 1e30, 0.5, 1.0, 1)
    assert seconds(node, slow_units) == pytest.approx(flops / 2 + 0.5)
    slow_memory = DeviceProfile("", {"float32": 1e30}, 8.0, 0.25, 1.0, 1)
    assert seconds(node, slow_memory) == FLOAT * elements / 8 + 0.25
    assert seconds(node) == max(flops / 1e9, FLOAT * elements / 1e6) + 1


CONVOLUTIONS: dict[str, tuple[nn.Module, tuple[int, ...], int]] = {
    "plain": (nn.Conv2d(3, 8, 3, padding=1), (2, 3, 6, 5), 2 * 2 * 8 * 6 * 5 * 3 * 9),
    "strided": (nn.Conv2d(3, 8, 3, stride=2), (2, 3, 7, 7), 2 * 2 * 8 * 3 * 3 * 3 * 9),
    "grouped": (nn.Conv2d(4, 8, 3, padding=1, groups=4), (2, 4, 6, 5), 2 * 2 * 8 * 6 * 5 * 1 * 9),
    "one dimension": (nn.Conv1d(3, 8, 5), (2, 3, 14), 2 * 2 * 8 * 10 * 3 * 5),
    "transposed": (nn.ConvTranspose2d(3, 8, 2, stride=2), (2, 3, 6, 5), 2 * 2 * 3 * 6 * 5 * 8 * 4),
}


@pytest.mark.sweep(but=("strided",))
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolutions_and_each_of_their_gradients_are_counted_as_by_hand(case: str) -> None:
    layer, shape, flops = CONVOLUTIONS[case]
    program = captured(layer, torch.randn(shape))
    assert flops_of(*of(program, "convolution")) == flops
    assert flops_of(*of(program, "convolution_backward")) == flops  # of the weight alone: nothing asks for the input's
    both = captured(layer, torch.randn(shape, requires_grad=True))
    assert flops_of(*of(both, "convolution_backward")) == 2 * flops


class Attention(nn.Module):
    def __init__(self, causal: bool, p: float = 0.0) -> None:
        super().__init__()
        self.causal, self.p = causal, p

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, dropout_p=self.p)


def heads(length: int) -> torch.Tensor:
    return torch.randn(2, 3, length, 8, requires_grad=True)


def test_attention_takes_as_long_as_its_kernels() -> None:
    """The rate is that of attention at this length, forward and backward; products have theirs."""
    qkv = [torch.randn(2, 4, 64, 32, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    program = graphopt.capture(Attention(True), qkv, device="h100-80gb", loss=lambda model, *qkv: model(*qkv).sum())
    profile = dataclasses.replace(PROFILES["h100-80gb"], overhead=0.0, memory_bandwidth=1e30)
    found = []
    for node in program.nodes:
        if node.op == "call_function" and "attention" in schema.op_name(node):
            backward = "backward" in schema.op_name(node)
            rate = profile.attention_flops(torch.bfloat16, 64, backward=backward)
            assert seconds(node, profile) == pytest.approx(flops_of(node) / rate)
            found.append(backward)
    assert found == [False, True]


@pytest.mark.sweep(cases=("False-5-1",))
@pytest.mark.parametrize(("causal", "queries", "share"), [(False, 12, 1), (False, 5, 1), (True, 12, 2)])
def test_attention_is_two_products_forward_and_five_backward(causal: bool, queries: int, share: int) -> None:
    program = captured(Attention(causal), heads(queries), heads(12), heads(12))
    product = 2 * (2 * 3) * queries * 12 * 8
    name = "_scaled_dot_product_flash_attention_for_cpu"
    assert flops_of(*of(program, name)) == 2 * product // share
    assert flops_of(*of(program, f"{name}_backward")) == 5 * product // share


def test_the_kernels_of_cuda_are_known_without_cuda() -> None:
    q = torch.empty(2, 3, 12, 8)
    product = 2 * (2 * 3) * 12 * 12 * 8
    efficient = aten._scaled_dot_product_efficient_attention.default
    node = call(efficient, q, q, q, None, True)
    assert flops_of(node) == 2 * product
    assert flops_of(call(efficient, q, q, q, None, True, 0.0, True)) == product


def test_a_random_op_whose_state_is_saved_or_replayed_counts_as_itself() -> None:
    dropout = [node for node in captured(Blocks(1), TOKENS, loss=next_token).nodes if schema.is_random(node)]
    program = rewritten(Blocks(1), TOKENS, loss=next_token, passes=[Recompute("blocks.*")])
    wrapped = {name: of(program, name) for name in ("run_and_save_rng_state", "run_with_rng_state")}
    state = torch.get_rng_state().numel()
    own = sorted(moved_bytes(node) for node in dropout)
    assert sorted(moved_bytes(node) for node in wrapped["run_and_save_rng_state"]) == own
    assert sorted(moved_bytes(node) - state for node in wrapped["run_with_rng_state"]) == own
    assert all(flops_of(node) == 0 for nodes in wrapped.values() for node in nodes)


@pytest.mark.sweep
def test_ops_of_a_forward_program_are_counted_by_their_parts() -> None:
    program = graphopt.capture(Blocks(1), (TOKENS,), stage="forward")
    tokens, d = TOKENS.numel(), 8
    linear = {int(value_of(node).shape[-1]): flops_of(node) for node in of(program, "linear")}
    assert linear[3 * d] == 2 * tokens * d * 3 * d
    assert linear[11] == 2 * tokens * d * 11
    (attention,) = of(program, "scaled_dot_product_attention")
    assert flops_of(attention) == 2 * (2 * 2 * 2 * 12 * 12 * 4) // 2
    assert all(s > 0 for s in op_seconds(of(program, "linear"), method="roofline", profile=TOY))


def test_the_peak_is_that_of_the_dtype_that_is_multiplied() -> None:
    profile = DeviceProfile("", {"float32": 1.0, "bfloat16": 4.0}, 1e30, 0.0, 1.0, 1)
    factors = {torch.float32: 1, torch.bfloat16: 4, torch.float64: 1, torch.float16: 1}
    for dtype, factor in factors.items():
        node = call(aten.mm.default, torch.empty(3, 5, dtype=dtype), torch.empty(5, 7, dtype=dtype))
        assert seconds(node, profile) == 210 / factor


def test_bytes_are_those_of_the_elements_that_are_touched() -> None:
    row = torch.empty(1, 6)
    assert moved_bytes(call(aten.clone.default, row.expand(5, 6))) == FLOAT * (6 + 30)
    packed = torch.empty(4, 30)
    assert moved_bytes(call(aten.relu.default, packed[:, 10:20])) == FLOAT * (40 + 40)
    assert moved_bytes(call(aten.cat.default, [torch.empty(3), torch.empty(4)])) == FLOAT * (7 + 7)
    assert moved_bytes(call(aten.relu.default, torch.empty(0, 3))) == 0
    assert moved_bytes(call(aten.add_.Tensor, torch.empty(10), torch.empty(10))) == FLOAT * (20 + 10)
    assert moved_bytes(call(aten.full.default, [8], 0.0)) == FLOAT * 8


def test_a_copy_to_another_device_is_as_fast_as_the_link() -> None:
    node = call(aten._to_copy.default, torch.empty(100), device=torch.device("meta"), dtype=torch.float64)
    assert seconds(node) == 400 / TOY.host_bandwidth + TOY.overhead
    mixed = call(aten.mul.Tensor, torch.empty(100, device="meta"), torch.tensor(2.0))
    assert seconds(mixed) == 804 / TOY.memory_bandwidth + TOY.overhead  # a number on the host is not a transfer


@given(st.tuples(*[st.integers(1, 400)] * 3), st.integers(0, 2), st.integers(1, 400))
def test_a_larger_product_never_costs_less(shape: tuple[int, int, int], axis: int, more: int) -> None:
    m, k, n = shape
    grown = [size + more * (index == axis) for index, size in enumerate(shape)]
    small, large = (
        call(aten.mm.default, torch.empty(a, b, device="meta"), torch.empty(b, c, device="meta"), program=BASE)
        for a, b, c in (shape, grown)
    )
    assert flops_of(small) == 2 * m * k * n
    assert moved_bytes(small) == FLOAT * (m * k + k * n + m * n)
    assert seconds(large) > seconds(small) > TOY.overhead


@pytest.mark.sweep
def test_symbolic_sizes_cost_what_their_example_costs(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    use_folder(tmp_path, monkeypatch)
    model = Net(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    keys = set()
    for rows in (6, 12):
        x = torch.randn(rows, 8)
        fixed = graphopt.capture(model, (x,), loss=mean_square)
        varying = graphopt.capture(model, (x,), loss=mean_square, dynamic_shapes=({0: Dim("rows", min=2, max=64)},))
        assert any(isinstance(size, torch.SymInt) for node in varying.nodes for size in shape_of(node))
        by_op = [
            {schema.op_name(n): seconds(n) for n in program.nodes if n.op == "call_function" and seconds(n)}
            for program in (fixed, varying)
        ]
        assert by_op[0] == {name: value for name, value in by_op[1].items() if name in by_op[0]}
        calls = [node for node in varying.nodes if node.op == "call_function"]
        assert all(value >= 0 for value in op_seconds(calls))
        keys.add(tuple(map(call_key, calls)))
    assert len(keys) == 2


def shape_of(node: fx.Node) -> Any:
    value = value_of(node)
    return value.shape if isinstance(value, torch.Tensor) else ()


@pytest.mark.sweep
def test_numbers_in_symbols_are_told_apart_by_their_example() -> None:
    keys = set()
    for rows in (6, 12):
        program = graphopt.capture(
            Sized(), (torch.randn(rows, 8),), loss=mean_square, dynamic_shapes=({0: Dim("rows", min=2, max=64)},)
        )
        keys |= {call_key(node) for node in of(program, "arange")}
    assert len(keys) == 2


class Sized(nn.Module):
    """An op whose only argument is a size of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + torch.arange(x.shape[0])[:, None]
