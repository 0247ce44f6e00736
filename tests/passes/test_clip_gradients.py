"""Clipping inside of a step against ``torch.nn.utils`` between backward and step."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import graphopt
from graphopt import GraphoptError, Phase, Pipeline
from graphopt.ir.node import value_of
from graphopt.ir.ops import schema
from graphopt.passes import ClipGradients, FuseUpdate, Recompute, ScaleLoss
from tests.support.scaling import Fragile, batches, loss_of
from tests.support.scaling import eager as eager_scaled
from tests.support.training import OPTIMIZERS, Blocks, MakeOptimizer, Training, assert_same, mean_square, next_token

Clip = Callable[[Any], Any]
norm_, value_ = torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_

CASES: dict[str, tuple[ClipGradients, Clip]] = {
    "norm": (ClipGradients(0.05), lambda p: norm_(p, 0.05)),
    "a norm that is never reached": (ClipGradients(1e6), lambda p: norm_(p, 1e6)),
    "sum": (ClipGradients(0.05, norm_type=1.0), lambda p: norm_(p, 0.05, norm_type=1.0)),
    "third": (ClipGradients(0.05, norm_type=3.0), lambda p: norm_(p, 0.05, norm_type=3.0)),
    "largest": (ClipGradients(0.01, norm_type=math.inf), lambda p: norm_(p, 0.01, norm_type=math.inf)),
    "value": (ClipGradients(max_value=0.003), lambda p: value_(p, 0.003)),
}


def eager(
    model: nn.Module, make: MakeOptimizer, run: list[Any], clip: Clip, *, loss: Any = mean_square, every: int = 1
) -> Training:
    optimizer, found = make(model.parameters()), Training()
    torch.manual_seed(1)
    for number, inputs in enumerate(run):
        value = loss(model, *inputs)
        (value / every if every > 1 else value).backward()
        found.add(f"{number}.loss", value)
        if number % every == every - 1:
            clip([p for p in model.parameters() if any(p is q for g in optimizer.param_groups for q in g["params"])])
            optimizer.step()
            optimizer.zero_grad()
    return found.end(model, optimizer)


def stepping(
    model: nn.Module, make: MakeOptimizer, run: list[Any], passes: Any, *, loss: Any = mean_square, every: int = 1
) -> tuple[Training, graphopt.TrainStep]:
    optimizer, found = make(model.parameters()), Training()
    step = graphopt.optimize_step(model, optimizer, passes, loss=loss).accumulate(every)
    torch.manual_seed(1)
    for number, inputs in enumerate(run):
        found.add(f"{number}.loss", step(*inputs))
    return found.end(model, optimizer), step


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


RUN = [(torch.randn(5, 6, generator=torch.Generator().manual_seed(i)),) for i in range(4)]


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "kind"), [*((name, "adamw") for name in CASES), ("norm", "rmsprop")])
def test_clips_as_torch_does(name: str, kind: str) -> None:
    option, clip = CASES[name]
    expected = eager(small(), OPTIMIZERS[kind], RUN, clip)
    found, _ = stepping(small(), OPTIMIZERS[kind], RUN, [option])
    assert_same(expected, found, name)


@pytest.mark.sweep
def test_a_language_model() -> None:
    torch.manual_seed(0)
    model, run = Blocks(layers=1), [(torch.randint(11, (3, 6)),) for _ in range(3)]
    option, clip = CASES["norm"]
    expected = eager(copy.deepcopy(model), OPTIMIZERS["adamw"], run, clip, loss=next_token)
    found, _ = stepping(
        copy.deepcopy(model), OPTIMIZERS["adamw"], run, [option, Recompute("blocks.*")], loss=next_token
    )
    assert_same(expected, found, "recompute and clip")


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weights behind biases, and one frozen."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [{"params": [p for p in parameters if p.dim() == 1]}, {"params": [p for p in parameters if p.dim() > 1]}]


@pytest.mark.sweep
def test_groups_and_frozen_parameters() -> None:
    option, clip = CASES["norm"]
    results = []
    for mine in (False, True):
        model = small()
        model[2].weight.requires_grad_(False)  # type: ignore[index, union-attr, operator]
        make = partial(lambda model, _: OPTIMIZERS["adamw"](groups(model)), model)  # type: ignore[arg-type]
        results.append(stepping(model, make, RUN, [option])[0] if mine else eager(model, make, RUN, clip))
    assert_same(*results, "groups")


class Unused(nn.Module):
    """One parameter without a gradient, and two with the same one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Parameter(torch.randn(5, 6)), nn.Parameter(torch.randn(5, 6))
        self.idle = nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.a + self.b


@pytest.mark.sweep(but=("norm",))
@pytest.mark.parametrize("name", ["norm", "value"])
def test_equal_and_missing_gradients(name: str) -> None:
    option, clip = CASES[name]
    expected = eager(Unused(), OPTIMIZERS["momentum"], RUN, clip)
    found, _ = stepping(Unused(), OPTIMIZERS["momentum"], RUN, [option])
    assert_same(expected, found, name)


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["norm", "value"])
def test_accumulated_gradients_are_clipped_once(name: str) -> None:
    option, clip = CASES[name]
    expected = eager(small(), OPTIMIZERS["adamw"], RUN * 2, clip, every=4)
    found, _ = stepping(small(), OPTIMIZERS["adamw"], RUN * 2, [option], every=4)
    assert_same(expected, found, name)


@pytest.mark.sweep(but=("norm-adamw",))
@pytest.mark.parametrize(("name", "kind"), [("norm", "adamw"), ("value", "rmsprop")])
def test_unscaled_gradients_are_clipped(name: str, kind: str) -> None:
    option, clip = CASES[name]
    for order in ([ScaleLoss(growth_interval=2), option], [option, ScaleLoss(growth_interval=2)]):
        expected, _ = eager_scaled(Fragile(), OPTIMIZERS[kind], batches("ggbgbbgg"), clip=clip, growth_interval=2)
        found, step = stepping(Fragile(), OPTIMIZERS[kind], batches("ggbgbbgg"), order, loss=loss_of)
        assert_same(expected, found, name, skip="generator")
        ops = [schema.op_name(node) for node in step.program.phase_nodes(Phase.UPDATE)]
        clipping = "_foreach_norm" if name == "norm" else "_foreach_clamp_min_"
        assert ops.index("check_and_unscale_") < ops.index("amax") < ops.index(clipping)


@pytest.mark.sweep
def test_norms_of_half_precision_are_taken_in_float32() -> None:
    model = small().half()
    with torch.no_grad():
        for parameter in model[4].parameters():  # type: ignore[index]
            parameter.mul_(300.0)
    run, start = [(RUN[0][0].half(),)], copy.deepcopy(model)

    def scalar(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).float().square().mean()

    reference = copy.deepcopy(model)
    scalar(reference, *run[0]).backward()
    gradients = [p.grad.double() for p in reference.parameters()]  # type: ignore[union-attr]
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    assert norm > 256  # its square is beyond float16
    make = partial(torch.optim.SGD, lr=1.0, foreach=True)  # torch's fused SGD leaves float16 as it is on a CPU
    _, step = stepping(model, make, run, [ClipGradients(1.0)], loss=scalar)
    for new, old, gradient in zip(model.parameters(), start.parameters(), gradients, strict=True):
        assert torch.allclose(new.double(), old.double() - gradient / norm, rtol=2e-3, atol=2e-3)
    assert not torch.equal(model[0].weight, start[0].weight)  # type: ignore[index]
    node = next(n for n in step.program.phase_nodes(Phase.UPDATE) if schema.op_name(n) == "_foreach_norm")
    assert all(value.dtype is torch.float32 for value in value_of(node))


def test_options() -> None:
    assert str(ClipGradients(1.0)) == "clip-gradients{max-norm=1.0}"
    (made,) = Pipeline("clip-gradients{max-value=0.5}").passes
    assert made == ClipGradients(max_value=0.5)
    (made,) = Pipeline("clip-gradients{max-norm=2 norm-type=1.0}").passes
    assert made == ClipGradients(2.0, norm_type=1.0)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({}, "takes one limit: max_norm, for all gradients together, or max_value"),
        ({"max_norm": 1.0, "max_value": 1.0}, "takes one limit"),
        ({"max_norm": 0.0}, "the limit must be above 0 and finite, not 0.0"),
        ({"max_value": -1.0}, "the limit must be above 0"),
        ({"max_norm": math.inf}, "not inf"),
        ({"max_norm": 1.0, "norm_type": 0.0}, "norm_type must be above 0, not 0.0"),
    ]
    for options, message in wrong:
        with pytest.raises(GraphoptError, match=message):
            ClipGradients(**options)


def test_records() -> None:
    _, step = stepping(small(), OPTIMIZERS["adamw"], RUN, [ClipGradients(0.05), FuseUpdate()])
    clip, fuse = step.records
    assert clip.changed.counts == {"gradients clipped": 6}
    assert "depends on 6 gradients" in fuse.changed.reason
    (again,) = Pipeline([ClipGradients(0.05)]).run(step.program)
    assert again.changed.reason == "the gradients are clipped already"


def test_predicted_and_measured_peak() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    step = graphopt.optimize_step(model, optimizer, [ClipGradients(0.05)], loss=mean_square)
    x = torch.randn(16, 64)
    for _ in range(2):
        step(x)
    measured = graphopt.measure_peak(lambda: step(x)).allocated_peak_bytes
    assert abs(measured - step.program.memory().allocated_peak_bytes) <= 16
