"""The published golden cases of recomputation, as exact op sequences and as text.

The cases are those of Paddle's ``TestRecomputeOptimizer``: a matrix product, two steps with a bias each and a mean, cut
at every kind of checkpoint list. The biases multiply here, so that backward reads what forward made (it reads nothing
of a sum, and nothing that backward does not read is recomputed).
"""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn

import graphopt
from graphopt import PassError, Phase, Program
from graphopt.ir.node import OutputSpec, info
from graphopt.passes import Recompute
from tests.support.training import assert_same_training, captured, ops, results, rewritten, saved

X = torch.linspace(-1, 1, 8).reshape(2, 4)
FORWARD = ["mm", "mul", "mul", "mean"]
BEFORE_B1 = ["full", "expand", "div", "mul", "mul", "sum", "view"]
AFTER_B1 = ["mul", "mul", "sum", "view", "t", "mm"]


class Chain(nn.Module):
    """``mul_out`` → ``b1_out`` → ``b2_out`` → mean."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 16).reshape(4, 4))
        self.b1, self.b2 = nn.Parameter(torch.linspace(1, 2, 4)), nn.Parameter(torch.linspace(2, 3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mul_out = graphopt.name(x @ self.weight, "mul_out")
        b1_out = graphopt.name(mul_out * self.b1, "b1_out")
        b2_out = graphopt.name(b1_out * self.b2, "b2_out")
        return b2_out.mean()


class Dropped(Chain):
    """The same with dropout between the two biases."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mul_out = graphopt.name(x @ self.weight, "mul_out")
        b1_out = graphopt.name(mul_out * self.b1, "b1_out")
        dropped = graphopt.name(F.dropout(b1_out, 0.5), "dropped")
        return graphopt.name(dropped * self.b2, "b2_out").mean()


def own_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x)


def recomputed(*checkpoints: str, model: nn.Module | None = None) -> Program:
    return rewritten(model or Chain(), X, passes=[Recompute(checkpoints)], loss=own_loss)


def late(program: Program) -> list[str]:
    """The ops after forward, as they run."""
    return ops(program, Phase.RECOMPUTE, Phase.BACKWARD)


def backward_text(program: Program) -> str:
    """The statements after forward, without comments."""
    text = program.to_text()
    body = text[text.index("# ---- backward") : text.index("return (")]
    lines = [re.sub(r"\s+#.*", "", line).strip() for line in body.splitlines()]
    return "\n".join(line for line in lines if line and not line.startswith("#")) + "\n"


def test_no_checkpoint() -> None:
    program = recomputed()
    assert ops(program, Phase.FORWARD) == FORWARD
    assert late(program) == BEFORE_B1 + AFTER_B1
    assert saved(program) == ["mul_out", "b1_out"]


def test_one_checkpoint() -> None:
    """The product is recomputed, where the gradient of ``b1`` reads it and not earlier; ``b2_out`` is not."""
    program = recomputed("b1_out")
    assert ops(program, Phase.FORWARD) == FORWARD
    assert late(program) == [*BEFORE_B1, "mm", *AFTER_B1]
    assert saved(program) == ["b1_out"]
    assert_expected_inline(
        backward_text(program),
        """\
seed = aten.full([], 1.0, dtype=torch.float32, device='cpu', pin_memory=False)
expand = aten.expand(seed, [2, 4])
del seed
div = aten.div.Scalar(expand, 8)
del expand
mul_2 = aten.mul.Tensor(div, mul)
del mul
mul_3 = aten.mul.Tensor(div, b2)
del div
sum_1 = aten.sum.dim_IntList(mul_2, [0], True)
del mul_2
view = aten.view(sum_1, [4])
del sum_1
mm_2 = aten.mm(args_0, weight)
mul_4 = aten.mul.Tensor(mul_3, mm_2)
del mm_2
mul_5 = aten.mul.Tensor(mul_3, b1)
del mul_3
sum_2 = aten.sum.dim_IntList(mul_4, [0], True)
del mul_4
view_1 = aten.view(sum_2, [4])
del sum_2
t = aten.t(args_0)
mm_1 = aten.mm(t, mul_5)
del mul_5, t
""",
    )


def test_a_checkpoint_as_text() -> None:
    one = rewritten(Chain(), X, passes="recompute{checkpoints=b1_out}", loss=own_loss)
    assert late(one) == [*BEFORE_B1, "mm", *AFTER_B1]
    assert backward_text(one) == backward_text(recomputed("b1_out"))
    assert backward_text(rewritten(Chain(), X, passes=[Recompute("b1_out")], loss=own_loss)) == backward_text(one)


def test_several_checkpoints() -> None:
    program = recomputed("mul_out", "b2_out")
    assert ops(program, Phase.RECOMPUTE) == ["mul"]
    assert late(program) == [*BEFORE_B1[:3], "mul", *BEFORE_B1[3:], *AFTER_B1]
    assert saved(program) == ["mul_out"]
    assert_expected_inline(
        backward_text(program),
        """\
seed = aten.full([], 1.0, dtype=torch.float32, device='cpu', pin_memory=False)
expand = aten.expand(seed, [2, 4])
del seed
div = aten.div.Scalar(expand, 8)
del expand
mul_6 = aten.mul.Tensor(mm, b1)
mul_2 = aten.mul.Tensor(div, mul_6)
del mul_6
mul_3 = aten.mul.Tensor(div, b2)
del div
sum_1 = aten.sum.dim_IntList(mul_2, [0], True)
del mul_2
view = aten.view(sum_1, [4])
del sum_1
mul_4 = aten.mul.Tensor(mul_3, mm)
del mm
mul_5 = aten.mul.Tensor(mul_3, b1)
del mul_3
sum_2 = aten.sum.dim_IntList(mul_4, [0], True)
del mul_4
view_1 = aten.view(sum_2, [4])
del sum_2
t = aten.t(args_0)
mm_1 = aten.mm(t, mul_5)
del mul_5, t
""",
    )


def test_adjacent_checkpoints() -> None:
    program = recomputed("mul_out", "b1_out")
    assert late(program) == BEFORE_B1 + AFTER_B1
    assert saved(program) == ["mul_out", "b1_out"]


@pytest.mark.sweep
def test_checkpoints_out_of_order() -> None:
    shuffled, ordered = recomputed("b2_out", "mul_out"), recomputed("mul_out", "b2_out")
    assert late(shuffled) == late(ordered) == [*BEFORE_B1[:3], "mul", *BEFORE_B1[3:], *AFTER_B1]
    assert backward_text(shuffled) == backward_text(ordered)


def test_an_input_as_checkpoint() -> None:
    program = recomputed("args[0]", "b2_out")
    assert ops(program, Phase.RECOMPUTE) == ["mm", "mul"]
    assert late(program) == [*BEFORE_B1[:3], "mm", "mul", *BEFORE_B1[3:], *AFTER_B1]
    assert saved(program) == []
    assert_expected_inline(
        backward_text(program),
        """\
seed = aten.full([], 1.0, dtype=torch.float32, device='cpu', pin_memory=False)
expand = aten.expand(seed, [2, 4])
del seed
div = aten.div.Scalar(expand, 8)
del expand
mm_2 = aten.mm(args_0, weight)
mul_6 = aten.mul.Tensor(mm_2, b1)
mul_2 = aten.mul.Tensor(div, mul_6)
del mul_6
mul_3 = aten.mul.Tensor(div, b2)
del div
sum_1 = aten.sum.dim_IntList(mul_2, [0], True)
del mul_2
view = aten.view(sum_1, [4])
del sum_1
mul_4 = aten.mul.Tensor(mul_3, mm_2)
del mm_2
mul_5 = aten.mul.Tensor(mul_3, b1)
del mul_3
sum_2 = aten.sum.dim_IntList(mul_4, [0], True)
del mul_4
view_1 = aten.view(sum_2, [4])
del sum_2
t = aten.t(args_0)
mm_1 = aten.mm(t, mul_5)
del mul_5, t
""",
    )


def test_an_input_alone_changes_nothing() -> None:
    assert late(recomputed("args[0]")) == BEFORE_B1 + AFTER_B1


def test_what_follows_the_last_checkpoint_is_not_recomputed() -> None:
    program = recomputed("mul_out")
    assert late(program) == BEFORE_B1 + AFTER_B1
    assert saved(program) == ["mul_out", "b1_out"]


def test_dropout() -> None:
    """Both the mask and the result come out of one replay of the saved generator state."""
    program = recomputed("mul_out", "b2_out", model=Dropped())
    assert ops(program, Phase.FORWARD) == ["mm", "mul", "run_and_save_rng_state", "masked_dropout", "mul", "mean"]
    assert ops(program, Phase.RECOMPUTE) == ["mul", "run_with_rng_state", "masked_dropout"]
    assert_expected_inline(
        backward_text(program),
        """\
seed = aten.full([], 1.0, dtype=torch.float32, device='cpu', pin_memory=False)
expand = aten.expand(seed, [2, 4])
del seed
div = aten.div.Scalar(expand, 8)
del expand
mul_6 = aten.mul.Tensor(mm, b1)
run_with_rng_state = replay_random(
dropout_mask_state, graphopt.dropout_mask, [2, 4], [4, 1], 0.5, device='cpu'
)
del dropout_mask_state
masked_dropout_2 = graphopt.masked_dropout(mul_6, run_with_rng_state, 0.5)
del mul_6
mul_2 = aten.mul.Tensor(div, masked_dropout_2)
del masked_dropout_2
mul_3 = aten.mul.Tensor(div, b2)
del div
sum_1 = aten.sum.dim_IntList(mul_2, [0], True)
del mul_2
view = aten.view(sum_1, [4])
del sum_1
masked_dropout_1 = graphopt.masked_dropout(mul_3, run_with_rng_state, 0.5)
del run_with_rng_state, mul_3
mul_4 = aten.mul.Tensor(masked_dropout_1, mm)
del mm
mul_5 = aten.mul.Tensor(masked_dropout_1, b1)
del masked_dropout_1
sum_2 = aten.sum.dim_IntList(mul_4, [0], True)
del mul_4
view_1 = aten.view(sum_2, [4])
del sum_2
t = aten.t(args_0)
mm_1 = aten.mm(t, mul_5)
del mul_5, t
""",
    )


def test_dropout_that_is_a_checkpoint_is_not_replayed() -> None:
    """Its mask is kept with it: nothing between these checkpoints is left to recompute but the product."""
    program = recomputed("dropped", model=Dropped())
    assert ops(program, Phase.FORWARD) == ["mm", "mul", "dropout_mask", "masked_dropout", "mul", "mean"]
    assert ops(program, Phase.RECOMPUTE) == ["mm"]


def test_dropout_after_the_last_checkpoint_is_an_ordinary_op() -> None:
    program = recomputed("b1_out", model=Dropped())
    assert ops(program, Phase.FORWARD) == ["mm", "mul", "dropout_mask", "masked_dropout", "mul", "mean"]
    assert ops(program, Phase.RECOMPUTE) == ["mm"]


def test_seeded_dropout_repeats() -> None:
    """The same seed gives the same loss and gradients, run after run and with and without recomputation."""
    model = Dropped()
    plain, once = captured(model, X, loss=own_loss), recomputed("mul_out", "b2_out", model=model)
    runs = [results(program, model, X, seed=7) for program in (plain, once, once)]
    other, _ = results(once, model, X, seed=8)
    for found, state in runs[1:]:
        assert all(torch.equal(found[spec], value) for spec, value in runs[0][0].items())
        assert torch.equal(state, runs[0][1])
    assert not all(torch.equal(other[spec], value) for spec, value in runs[0][0].items())


def test_the_recomputed_mask_is_the_mask_of_forward() -> None:
    program, model = recomputed("mul_out", "b2_out", model=Dropped()), Dropped()
    mask = program.find("dropped")["dropped"].args[1]
    again = next(n for n in program.phase_nodes(Phase.RECOMPUTE) if any("dropout_mask'" in x for x in info(n).names))
    outputs = {OutputSpec("output", "mask"): mask, OutputSpec("output", "mask'"): again}
    program.set_outputs([*program.output_values, *outputs.values()], [*program.outputs, *outputs])
    found, _ = results(program, model, X, seed=3)
    first, second = (found[spec] for spec in outputs)
    assert torch.equal(first, second)
    assert 0 < first.sum() < first.numel()


def test_an_unknown_name_is_an_error_with_near_names() -> None:
    with pytest.raises(PassError, match="'b1_outt' names no tensor; did you mean 'b1_out', 'b2_out'"):
        recomputed("mul_out", "b1_outt")


def test_copies_carry_the_names_of_what_they_copy() -> None:
    names = recomputed("args[0]", "b2_out").names()
    assert {"mul_out", "mul_out'", "b1_out", "b1_out'", "b2_out"} <= set(names)
    assert "b2_out'" not in names


@pytest.mark.sweep
@pytest.mark.parametrize("checkpoints", ["b1_out", "mul_out,b2_out", "mul_out,b1_out", "args[0],b2_out", "dropped"])
def test_every_case_trains_like_eager(checkpoints: str) -> None:
    assert_same_training(Dropped(), "momentum", own_loss, [(X,)], [Recompute(checkpoints.split(","))], steps=3)


def test_the_whole_program_as_text() -> None:
    text = re.sub(r"\w+\.py:\d+", "FILE", recomputed("b1_out").to_text())
    assert text.splitlines()[1] == "# passes: recompute{checkpoints=b1_out}"
    assert_expected_inline(
        text[text.index("def step") : text.index("# ---- backward")],
        """\
def step(
    weight: f32[4, 4],  # parameter weight
    b1: f32[4],  # parameter b1
    b2: f32[4],  # parameter b2
    args_0: f32[2, 4],  # input args[0]
):
    # ---- forward
    # top level (FILE in forward)
    mm = aten.mm(args_0, weight)  # f32[2, 4] mul_out | MUST_RECOMPUTE
    # FILE in forward
    mul = aten.mul.Tensor(mm, b1)  # f32[2, 4] b1_out | MUST_SAVE | in place of mm
    del mm
    # FILE in forward
    mul_1 = aten.mul.Tensor(mul, b2)  # f32[2, 4] b2_out
    # FILE in forward
    mean = aten.mean(mul_1)  # f32[] ::mean
    del mul_1
    """,
    )
