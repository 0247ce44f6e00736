"""Programs as text: goldens of tiny models, and what the text promises."""
# ruff: noqa: E501  (the text of a program is as wide as it is)

from __future__ import annotations

import inspect
import re

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

import graphopt
from graphopt.ir.files.text import ends_of_life, is_bare
from graphopt.ir.node import value_of
from graphopt.ir.ops.values import tensors_of
from tests.support.reporting import Block, Drop, Net, Tiny, joint, plain, total
from tests.support.training import recomputed


class Cast(Tiny):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.linear(x)


def test_joint_program_with_recomputation() -> None:
    assert_expected_inline(
        plain(recomputed(joint(Drop(), 3, 4), "::exp").to_text()),
        """\
# Drop, joint stage: 17 nodes, 14 of them ops
# passes: recompute{checkpoints=::exp}
# predicted peak: ...

def step(
    weight: f32[4],  # parameter weight
    args_0: f32[3, 4],  # input args[0]
):
    # ---- forward
    # top level (reporting.py:N in forward)
    add = aten.add.Tensor(args_0, weight)  # f32[3, 4] ::add
    # module drop (reporting.py:N in forward)
    dropout_mask_random = record_random(graphopt.dropout_mask, [3, 4], [4, 1], 0.1, device='cpu')  # (u8[5056], b8[3, 4]) | keeps the generator's state for a replay
    dropout_mask_state = dropout_mask_random[0]  # u8[5056] | keeps the generator's state for a replay
    dropout_mask_result = dropout_mask_random[1]  # b8[3, 4] drop::dropout_mask | MUST_RECOMPUTE | keeps the generator's state for a replay
    del dropout_mask_random
    masked_dropout = graphopt.masked_dropout(add, dropout_mask_result, 0.1)  # f32[3, 4] drop
    del add, dropout_mask_result
    # top level (reporting.py:N in forward)
    exp = aten.exp(masked_dropout)  # f32[3, 4] ::exp | MUST_SAVE | in place of masked_dropout
    del masked_dropout
    sum_1 = aten.sum(exp)  # f32[] ::sum
    # ---- backward
    # top level
    seed = aten.full([], 1.0, dtype=torch.float32, device='cpu', pin_memory=False)  # f32[] loss~ | the seed of the backward
    expand = aten.expand(seed, [3, 4])  # f32[3, 4] ::expand~
    del seed
    # reporting.py:N in forward
    mul = aten.mul.Tensor(expand, exp)  # f32[3, 4] ::mul~
    del exp, expand
    # ---- recompute
    # module drop (reporting.py:N in forward)
    run_with_rng_state = replay_random(
        dropout_mask_state, graphopt.dropout_mask, [3, 4], [4, 1], 0.1, device='cpu'
    )  # b8[3, 4] drop::dropout_mask' | recompute: start .. ::exp
    del dropout_mask_state
    # ---- backward
    # module drop (reporting.py:N in forward)
    masked_dropout_1 = graphopt.masked_dropout(mul, run_with_rng_state, 0.1)  # f32[3, 4] drop::masked_dropout~
    del mul, run_with_rng_state
    # top level (reporting.py:N in forward)
    sum_2 = aten.sum.dim_IntList(masked_dropout_1, [0], True)  # f32[1, 4] ::sum~
    del masked_dropout_1
    view = aten.view(sum_2, [4])  # f32[4] weight~
    del sum_2
    return (
        sum_1,  # loss
        view,  # gradient weight
    )""",
    )


def test_step_program_ends_with_the_update() -> None:
    model = Tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    text = graphopt.capture(model, (torch.randn(3, 2),), loss=total, optimizer=optimizer).to_text()
    assert "    lr_0: float,  # hyperparameter lr[0]\n" in text
    assert_expected_inline(
        text[text.index("    # ---- update") :],
        """\
    # ---- update
    # top level
    neg = operator.neg(lr_0)  # float | optimizer.step
    # module linear
    aten._foreach_add_.List([linear_weight, linear_bias], [t_3, view], alpha=neg)  # optimizer.step
    del view, t_3
    return (
        sum_1,  # loss
    )
""",
    )


def test_forward_program_with_a_subgraph() -> None:
    program = graphopt.capture(Cast(), (torch.randn(3, 2),), stage="forward")
    assert_expected_inline(
        plain(program.to_text()),
        """\
# Cast, forward stage: 7 nodes, 3 of them ops
# passes: none

def step(
    linear_weight: f32[2, 2],  # parameter linear.weight
    linear_bias: f32[2],  # parameter linear.bias
    args_0: f32[3, 2],  # input args[0]
):
    # ---- forward
    def region_0(tensors_0: f32[3, 2], linear_weight: f32[2, 2], linear_bias: f32[2]):
        # module linear (test_text.py:N in forward)
        linear = aten.linear(tensors_0, linear_weight, linear_bias)  # bf16[3, 2] linear
        return (linear,)
    # top level
    wrap_with_autocast = autocast('cpu', torch.bfloat16, enabled=True, cache_enabled=False)(region_0)(
        args_0, linear_weight, linear_bias
    )  # (bf16[3, 2])
    # module linear (test_text.py:N in forward)
    getitem = wrap_with_autocast[0]  # bf16[3, 2] linear
    del wrap_with_autocast
    return (
        getitem,  # output result
    )""",
    )


def test_sizes_that_vary_are_symbols() -> None:
    batch = torch.export.Dim("b", min=2, max=64)
    program = graphopt.capture(Tiny(), (torch.randn(3, 2),), dynamic_shapes=({0: batch},), stage="forward")
    symbol = str(value_of(program.placeholders[-1]).shape[0])
    assert_expected_inline(
        plain(program.to_text()).replace(symbol, "S"),
        """\
# Tiny, forward stage: 5 nodes, 1 of them ops
# passes: none
# sizes in the example inputs: S = 3

def step(
    linear_weight: f32[2, 2],  # parameter linear.weight
    linear_bias: f32[2],  # parameter linear.bias
    args_0: f32[S, 2],  # input args[0]
):
    # ---- forward
    # module linear (reporting.py:N in forward)
    linear = aten.linear(args_0, linear_weight, linear_bias)  # f32[S, 2] linear
    return (
        linear,  # output result
    )""",
    )


def test_text_names_the_line_of_the_user() -> None:
    text = joint(Net(), 3, 4).to_text()
    lines, start = inspect.getsourcelines(Block.forward)
    assert f"# module blocks.1.linear (reporting.py:{start + len(lines) - 1} in forward)" in text
    assert "/" not in re.sub(r" / ", "", text)


def test_equal_programs_give_equal_text() -> None:
    first, second = joint(Net(), 3, 4), joint(Net(), 3, 4)
    assert first.to_text() == second.to_text() == first.copy().to_text()
    assert "0x" not in first.to_text()


def test_long_calls_are_broken_over_lines() -> None:
    model = Net(9)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    text = graphopt.capture(model, (torch.randn(3, 4),), loss=total, optimizer=optimizer).to_text()
    update = text[text.index("# ---- update") :]
    assert "    aten._fused_adamw_.tensor_lr(\n        [\n            blocks_0_linear_weight, " in update
    assert max(len(line) for line in update.split("\n")) <= 120


@pytest.mark.sweep(but=("checkpoints1",))
@pytest.mark.parametrize("checkpoints", [(), ("blocks.*",), ("blocks.1",)])
def test_ends_of_life_are_those_of_the_generated_code(checkpoints: tuple[str, ...]) -> None:
    program = joint(Net(3), 3, 4)
    if checkpoints:
        program = recomputed(program, *checkpoints)
    ends = ends_of_life(program.graph, everything=True)
    found = {node.name: {dead.name for dead in dying} for node, dying in ends.items()}
    wanted = {}
    for line in program.to_graph_module().code.split("\n"):
        made, _, freed = line.strip().partition(";  ")
        if freed:
            wanted[made.split(" = ")[0]] = set(freed.removesuffix(" = None").split(" = "))
    assert found == wanted
    inside = {n.name for n in program.graph.nodes if n.op == "call_function" and tensors_of(value_of(n))}
    dels = re.findall(r"^    del (.*)$", program.to_text(), re.MULTILINE)
    assert sorted(name for line in dels for name in line.split(", ")) == sorted(
        name for dying in wanted.values() for name in dying if name in inside
    )


@pytest.mark.sweep
def test_sums_taken_in_place_are_marked() -> None:
    program = joint(Net(), 3, 4)
    assert "add_.Tensor" in program.to_graph_module().code
    assert re.search(
        r"= aten\.add\.Tensor\((\w+), (\w+)\)  # f32\[3, 4\] .* \| in place of (\1|\2)\n", program.to_text()
    )
    assert "torch.ops.aten.add_.Tensor(" in program.to_python()


def test_nodes_without_description_are_shown() -> None:
    program = joint(Tiny(), 3, 2)
    with program.graph.inserting_before(program.output_node):
        program.graph.call_function(torch.ops.aten.neg.default, (program.placeholders[0],))
    assert "neg_default = aten.neg(linear_weight)  # added to the graph directly" in program.to_text()


def test_bare_calls_are_those_that_only_write() -> None:
    model = nn.BatchNorm1d(2)
    program = joint(model, 3, 2)
    bare = [node for node in program.graph.nodes if node.op == "call_function" and is_bare(node)]
    assert [str(node.args[0]) for node in bare] == ["num_batches_tracked", "running_mean", "running_var"]
    assert "\n    aten.copy_(running_mean, " in program.to_text()
