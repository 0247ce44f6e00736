"""DeepGradientCompression: its options and their text form, what it is refused with, and a small program of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import graphopt
from graphopt import GraphoptError, Pipeline, PipelineError, Program
from graphopt.ir.context import Context, StepContext
from graphopt.passes import AdaptiveLocalSGD, ClipGradients, DataParallel, DeepGradientCompression, LocalSGD
from graphopt.rewriting.registry import find_pass
from graphopt.rewriting.text.spec import parse_passes
from tests.support.covering import covering

# --- options ---------------------------------------------------------------------------------------------------------

TEXTS = {
    "deep-gradient-compression": {},
    "deep-gradient-compression{sparsity=0.9,0.99 rampup-begin-step=5 rampup-step=10}": {
        "sparsity": (0.9, 0.99), "rampup_begin_step": 5, "rampup_step": 10,
    },
    "deep-gradient-compression{momentum=0.8 nesterov=true weight-decay=0.0001 clip-norm=1.0 masking=false}": {
        "momentum": 0.8, "nesterov": True, "weight_decay": 1e-4, "clip_norm": 1.0, "masking": False,
    },
    "deep-gradient-compression{correction=feedback wire=bfloat16 min-elements=1}": {
        "correction": "feedback", "wire": "bfloat16", "min_elements": 1,
    },
    "deep-gradient-compression{bandwidth=measured}": {"bandwidth": "measured"},
    "deep-gradient-compression{bandwidth=25GB/s}": {"bandwidth": "25GB/s"},
    "deep-gradient-compression{bandwidth=125000000.0}": {"bandwidth": 1.25e8},
}  # fmt: skip


@pytest.mark.parametrize("text", list(TEXTS))
def test_text_form_both_ways(text: str) -> None:
    current = DeepGradientCompression(**TEXTS[text])  # type: ignore[arg-type]
    assert str(current) == text
    assert parse_passes(text, find_pass) == [current]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no sparsity": ({"sparsity": ()}, r"sparsity holds shares .* ascending order, not \(\)"),
    "falling": ({"sparsity": (0.9, 0.8)}, r"ascending order, not \(0.9, 0.8\)"),
    "all of it": ({"sparsity": (0.9, 1.0)}, r"below 1 in ascending order"),
    "below nothing": ({"sparsity": (-0.1,)}, r"shares of at least 0"),
    "not a number": ({"sparsity": (float("nan"),)}, r"shares of at least 0"),
    "begin": ({"rampup_begin_step": -1}, "rampup_begin_step is a number of updates of at least 0, not -1"),
    "length": ({"rampup_step": 0}, "rampup_step is a number of updates of at least 1, not 0"),
    "momentum": ({"momentum": 1.0}, "momentum must be at least 0 and below 1, not 1.0"),
    "decay": ({"weight_decay": -1.0}, "weight_decay must be at least 0, not -1.0"),
    "clip": ({"clip_norm": 0.0}, "clip_norm must be above 0, or None for no limit, not 0.0"),
    "elements": ({"min_elements": 0}, "min_elements must be at least 1, not 0"),
    "correction": ({"correction": "momentun"}, "correction='momentun' is unknown; did you mean 'momentum'"),
    "wire": ({"wire": "int8"}, "wire='int8' is unknown; use 'float32' or 'bfloat16' or 'float16'"),
    "nesterov": ({"correction": "feedback", "nesterov": True}, "nesterov belongs to correction='momentum'"),
    "idle": (
        {"correction": "feedback", "momentum": 0.5, "masking": False},
        "momentum, masking belong to correction='momentum'",
    ),
    "misspelt": ({"bandwidth": "mesured"}, "'mesured' is not a bandwidth: write 10Mbit, .*; did you mean 'measured'?"),
    "no unit": ({"bandwidth": "1G"}, "did you mean '1Gbit' or '1GB/s'\\?; 'measured' lets the ranks measure it"),
    "no speed": ({"bandwidth": 0}, "bandwidth is a number of bytes per second above 0, got 0"),
    "negative": ({"bandwidth": -1e9}, "bandwidth is a number of bytes per second above 0, got -1000000000.0"),
    "negative text": ({"bandwidth": "-1Gbit"}, "'-1Gbit' is not a bandwidth: write 10Mbit"),
    "no limit": ({"bandwidth": float("inf")}, "above 0, got inf"),
    "no figure": ({"bandwidth": float("nan")}, "above 0, got nan"),
    "truth": ({"bandwidth": True}, "above 0, got True"),
    "two": ({"momentum": -1.0, "min_elements": 0}, "momentum must be .*; min_elements must be"),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_wrong_options_say_what_is_right(name: str) -> None:
    options, message = WRONG[name]
    with pytest.raises(GraphoptError, match=message):
        DeepGradientCompression(**options)


@pytest.mark.parametrize("other", [LocalSGD(), AdaptiveLocalSGD(), ClipGradients(max_norm=1.0)], ids=lambda p: p.name)
def test_conflicts_are_refused_by_name(other: graphopt.Pass) -> None:
    with pytest.raises(PipelineError) as caught:
        Pipeline([DataParallel(), DeepGradientCompression(), other])
    assert "deep-gradient-compression" in str(caught.value)
    assert other.name in str(caught.value)


def test_it_needs_data_parallelism() -> None:
    with pytest.raises(PipelineError, match=r"deep-gradient-compression.*data-parallel"):
        Pipeline([DeepGradientCompression()])


def test_a_drop_in_model_has_no_update_to_rewrite() -> None:
    with pytest.raises(PipelineError, match=r"deep-gradient-compression rewrite.* use optimize_step"):
        graphopt.optimize(nn.Linear(4, 4), [DataParallel(), DeepGradientCompression()])


# --- programs --------------------------------------------------------------------------------------------------------


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """A process group of two ranks of which only this one exists; its exchanges do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8, bias=False))


def rewritten(optimizer: Callable[..., torch.optim.Optimizer], form: str = "", **options: Any) -> Program:
    model = two_layers()
    program = graphopt.capture(
        model, (torch.randn(4, 8),), loss=lambda model, x: model(x).square().mean(),
        optimizer=optimizer(model.parameters()),
    )  # fmt: skip
    program.context = Context(step=StepContext(forms={"deep-gradient-compression": form} if form else {}))
    current = DeepGradientCompression(**{"sparsity": (0.5, 0.9), "min_elements": 100, **options})
    Pipeline([DataParallel(), current]).run(program)
    return program


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


MOMENTUM = {"AdamW": torch.optim.AdamW, "RMSprop": torch.optim.RMSprop}


@pytest.mark.sweep
@pytest.mark.usefixtures("two_ranks")
@covering(name=list(MOMENTUM), form=["", "sparsity 0.5", "dense"])
def test_the_state_of_other_optimizers_is_refused(name: str, form: str) -> None:
    with pytest.raises(GraphoptError, match=r"keeps state of its own .* of no other optimizer; .*'feedback' for Adam"):
        rewritten(MOMENTUM[name], form)
    rewritten(MOMENTUM[name], form, correction="feedback")


def statements(program: Program) -> str:
    """The statements from the first of exchange to the end, without comments and ``del``."""
    text = program.to_text()
    body = text[text.index("# ---- backward") : text.index("return (")]
    lines = [re.sub(r"\s+#.*", "", line).strip() for line in body.splitlines()]
    kept = [line for line in lines if line and not line.startswith(("#", "del "))]
    first = next(place for place, line in enumerate(kept) if "as_strided" in line)
    return "\n".join(kept[first:]) + "\n"


@pytest.mark.usefixtures("two_ranks")
def test_the_program_of_a_sparsity() -> None:
    """Each matrix is accumulated and selected from where its gradient is made; the bias goes densely."""
    assert_expected_inline(
        statements(rewritten(sgd)),
        """\
as_strided_default_8 = aten.as_strided(view, [16], [1])
bucket_1 = aten.cat([as_strided_default_8])
mul__scalar_1 = aten.mul_.Scalar(bucket_1, 0.5)
all_reduce_1 = _c10d_functional.all_reduce_(mul__scalar_1, 'sum', '0')
t_8 = aten.t(t_7)
total = aten.sum(t_5, dtype=torch.float32)
finite = aten.isfinite(total)
graphopt.accumulate_(
t_5,
deep_gradient_compression_momentum_1_weight,
deep_gradient_compression_residual_1_weight,
0.9,
False,
keep=finite,
)
selected = graphopt.select(deep_gradient_compression_residual_1_weight, 12)
getitem = selected[0]
getitem_1 = selected[1]
graphopt.clear_at_(deep_gradient_compression_residual_1_weight, getitem)
graphopt.clear_at_(deep_gradient_compression_momentum_1_weight, getitem)
total_1 = aten.sum(t_8, dtype=torch.float32)
finite_1 = aten.isfinite(total_1)
graphopt.accumulate_(
t_8,
deep_gradient_compression_momentum_0_weight,
deep_gradient_compression_residual_0_weight,
0.9,
False,
keep=finite_1,
)
selected_1 = graphopt.select(deep_gradient_compression_residual_0_weight, 12)
getitem_2 = selected_1[0]
getitem_3 = selected_1[1]
graphopt.clear_at_(deep_gradient_compression_residual_0_weight, getitem_2)
graphopt.clear_at_(deep_gradient_compression_momentum_0_weight, getitem_2)
packed = graphopt.pack([getitem, getitem_2], [getitem_1, getitem_3], torch.float32)
all_gather = graphopt.all_gather_into_tensor(packed, 2, '0')
gathered = _c10d_functional.wait_tensor(all_gather)
sums = graphopt.sum_sparse(gathered, 2, [12, 12], [128, 128], torch.float32, torch.float32, 0.5)
getitem_4 = sums[0]
as_strided_default_6 = aten.as_strided(getitem_4, [8, 16], [16, 1])
getitem_5 = sums[1]
as_strided_default_7 = aten.as_strided(getitem_5, [16, 8], [8, 1])
exchanged_1 = _c10d_functional.wait_tensor(all_reduce_1)
as_strided_default_9 = aten.as_strided(exchanged_1, [16], [1], 0)
as_strided_default_10 = aten.as_strided(deep_gradient_compression_momentum_0_bias, [16], [1])
graphopt.apply_momentum_(as_strided_default_9, as_strided_default_10, 0.9, False)
aten._fused_sgd_.tensor_lr(
[t_0_weight, t_0_bias, t_1_weight],
[as_strided_default_7, as_strided_default_9, as_strided_default_6],
[],
weight_decay=0.0,
momentum=0.0,
lr=lr_0,
dampening=0.0,
nesterov=False,
maximize=False,
is_first_step=False,
)
stack_default = aten.stack([finite, finite_1])
logical_not_default = aten.logical_not(stack_default)
sum_default = aten.sum(logical_not_default)
aten.add_.Tensor(deep_gradient_compression_left_out, sum_default)
""",
    )


@pytest.mark.sweep
@pytest.mark.usefixtures("two_ranks")
def test_feedback_keeps_residuals_only_and_leaves_dense_steps_as_they_are() -> None:
    program = rewritten(torch.optim.AdamW, correction="feedback")
    held = {spec.target.split("/")[1] for _, spec in program.inputs_of("pass_state")}
    assert held == {"residual", "left out"}
    model = two_layers()
    plain = graphopt.capture(
        model, (torch.randn(4, 8),), loss=lambda model, x: model(x).square().mean(),
        optimizer=torch.optim.AdamW(model.parameters()),
    )  # fmt: skip
    Pipeline([DataParallel()]).run(plain)
    dense = rewritten(torch.optim.AdamW, "dense", correction="feedback")
    assert statements(dense) == statements(plain)


@pytest.mark.usefixtures("two_ranks")
def test_what_is_kept_is_of_this_rank_and_saved() -> None:
    held = rewritten(sgd).pass_state
    assert {
        name.removeprefix("deep-gradient-compression/"): (value.shape, value.local, value.saved)
        for name, value in held.items()
    } == {
        "momentum/0.weight": ((128,), True, True),
        "residual/0.weight": ((128,), True, True),
        "momentum/1.weight": ((128,), True, True),
        "residual/1.weight": ((128,), True, True),
        "momentum/0.bias": ((16,), True, True),
        "left out": ((), True, True),
    }
