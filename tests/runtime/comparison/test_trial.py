from __future__ import annotations

import contextlib
import copy
import math
from typing import Any, Literal

import pytest
import torch
from torch import nn

import graphopt
from graphopt import GraphoptError, Pass, Pipeline, Program
from graphopt.ir.node import InputSpec, NodeInfo, Phase, set_info
from graphopt.passes import Recompute
from graphopt.passes.scale_loss import ScaleLoss
from graphopt.runtime.comparison.lockstep import Pair, matched, paired_values
from graphopt.runtime.comparison.tensor_errors import (
    Comparison,
    TensorError,
    compare_programs,
    tensor_error,
    within_tolerance,
)
from graphopt.runtime.comparison.trial import Trial
from tests.support.low_precision import Chain, LowLinear, chain, mean, overflowing, trial
from tests.support.targets import Small
from tests.support.training import OPTIMIZERS, Blocks, mean_square, next_token


def compared(
    target: dict[str, Any], *passes: Pass, stage: Literal["joint", "step"] = "joint", **options: Any
) -> dict[str, TensorError]:
    found = trial(target, stage)
    result = found.compare(found.rewrite(Pipeline(passes)).program, **options)
    assert not result.skipped
    return {row.name: row for row in result.tensors}


# --- errors of one tensor --------------------------------------------------------------------------------------------

INF, NAN = math.inf, math.nan


def row(before: torch.Tensor, after: torch.Tensor) -> TensorError:
    node = torch.fx.Graph().placeholder("x")
    return tensor_error(Pair("x", "value", node, node), before, after)


@pytest.mark.parametrize(
    ("before", "after", "largest", "relative", "overflow", "underflow"),
    [
        ([3.0, 4.0], [3.0, 4.0], 0.0, 0.0, 0.0, 0.0),
        ([3.0, 4.0], [3.0, 4.5], 0.5, 0.1, 0.0, 0.0),
        ([3.0, 4.0], [3.0, 0.0], 4.0, 0.8, 0.0, 0.5),
        ([3.0, 4.0], [3.0, INF], INF, INF, 0.5, 0.0),
        ([3.0, 4.0], [NAN, INF], INF, INF, 1.0, 0.0),
        ([INF, 4.0, NAN], [INF, 4.0, NAN], 0.0, 0.0, 0.0, 0.0),
        ([INF, 4.0], [-INF, 4.0], INF, INF, 0.0, 0.0),
        ([INF, 4.0], [1.0, 4.0], INF, INF, 0.0, 0.0),
        ([0.0, 0.0], [0.0, 1.0], 1.0, INF, 0.0, 0.0),
        ([0.0, 0.0], [0.0, 0.0], 0.0, 0.0, 0.0, 0.0),
        ([], [], 0.0, 0.0, 0.0, 0.0),
    ],
)
def test_errors_of_a_tensor(
    before: list[float], after: list[float], largest: float, relative: float, overflow: float, underflow: float
) -> None:
    found = row(torch.tensor(before), torch.tensor(after))
    assert (found.max_error, found.relative_error) == (largest, pytest.approx(relative))
    assert (found.overflow, found.underflow) == (overflow, underflow)


def test_bitwise_is_about_bits_and_dtype() -> None:
    zero, number = torch.zeros(2), torch.ones(3)
    assert row(number, number.clone()).bitwise
    assert row(torch.tensor(NAN), torch.tensor(NAN)).bitwise
    assert not row(zero, -zero).bitwise
    assert row(zero, -zero).max_error == 0
    assert not row(number, number.half()).bitwise
    assert (row(number, number.half()).before, row(number, number.half()).after) == (torch.float32, torch.float16)
    assert row(torch.ones(4, 2).t(), torch.ones(2, 4)).bitwise


def test_integers_and_complex_numbers() -> None:
    numbers = row(torch.tensor([1, 0, 7]), torch.tensor([1, 0, 0]))
    assert (numbers.max_error, numbers.underflow, numbers.bitwise) == (7, 0, False)
    assert row(torch.tensor([3 + 4j]), torch.tensor([3 + 3j])).relative_error == pytest.approx(0.2)


def test_large_tensors_are_compared_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.rand(17, 5)
    after = before.bfloat16()
    whole = row(before, after)
    monkeypatch.setattr("graphopt.runtime.comparison.tensor_errors._CHUNK", 4)
    parts = row(before, after)
    assert parts.max_error == whole.max_error
    assert parts.relative_error == pytest.approx(whole.relative_error)


# --- programs --------------------------------------------------------------------------------------------------------


def test_rounding_is_found_where_it_happens() -> None:
    step = 2.0**-9  # bfloat16 has 7 bits behind the point: 1 + 2^-9 becomes 1
    rows = compared(chain(1.0, 1 + step, 1.0), LowLinear())
    assert rows["layers.0"].relative_error == 0
    for name in ("layers.1", "layers.2", "loss"):
        assert rows[name].relative_error == pytest.approx(step / (1 + step))
    assert rows["layers.1"].max_error == step
    assert (rows["layers.1"].before, rows["layers.1"].after) == (torch.float32, torch.bfloat16)
    assert (rows["loss"].kind, rows["loss"].max_error) == ("loss", step)


def test_overflow_is_found_where_it_happens() -> None:
    rows = compared(overflowing(), LowLinear(dtype="float16"))
    assert [rows[f"layers.{number}"].overflow for number in range(5)] == [0, 0, 1, 1, 1]
    assert rows["layers.2"].max_error == INF
    assert next(iter(rows)) == "layers.2"  # of what is equally bad, what comes first in the program


def test_underflow_is_found_where_it_happens() -> None:
    rows = compared(chain(1.0, 2.0**-30, 2.0**30), LowLinear(dtype="float16", deny=("layers.2",)))
    lost = rows["layers.1"]
    assert (lost.underflow, lost.overflow, lost.relative_error) == (1, 0, 1)
    assert lost.max_error == 2.0**-30


def test_gradients_and_updated_parameters_have_their_names() -> None:
    step = 2.0**-9
    target = chain(1.0, 1 + step, optimizer=True)
    kept = copy.deepcopy(target["model"].state_dict())
    rows = compared(target, LowLinear(), stage="step")
    kinds = {name: row.kind for name, row in rows.items()}
    assert kinds["layers.0.weight~"] == "gradient"
    assert kinds["layers.0.weight"] == "parameter"
    assert rows["layers.0.weight~"].relative_error == pytest.approx(step / (1 + step))
    assert rows["layers.1.weight"].bitwise  # its gradient does not depend on what was rounded
    update = 0.5 * step / 8  # learning rate · error of the gradient; two rows of ones, mean of eight values
    assert rows["layers.0.weight"].max_error == pytest.approx(2 * update)
    assert all(torch.equal(kept[name], tensor) for name, tensor in target["model"].state_dict().items())


@pytest.mark.sweep
def test_buffers_are_compared_as_they_are_left() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    rows = compared({"model": model, "example_inputs": (torch.randn(8, 4),), "loss": mean_square}, LowLinear())
    assert rows["1.running_mean"].kind == "buffer"
    assert 0 < rows["1.running_mean"].relative_error < 0.01
    assert rows["1.num_batches_tracked"].bitwise
    assert torch.equal(model[1].running_mean, torch.zeros(4))


@pytest.mark.sweep
def test_a_drop_in_program_has_outputs_and_gradients_of_inputs() -> None:
    x = torch.randn(3, 8, requires_grad=True)
    rows = compared({"model": Small(), "example_inputs": (x,)}, LowLinear())
    assert rows["result"].kind == "output"
    assert rows["args[0]~"].kind == "gradient"
    assert 0 < rows["args[0]~"].relative_error < 0.05


def test_parameters_with_equal_gradients_are_all_listed() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.one + self.other

    rows = compared({"model": Twice(), "example_inputs": (torch.ones(4),), "loss": mean})
    assert {"one~", "other~"} <= set(rows)


@pytest.mark.sweep
@pytest.mark.parametrize("stage", ["joint", "step"])
def test_random_numbers_are_the_same_in_both(stage: Literal["joint", "step"]) -> None:
    model = Blocks(layers=1, p=0.3)
    target = {"model": model, "example_inputs": (torch.randint(11, (2, 6)),), "loss": next_token}
    target["optimizer"] = torch.optim.AdamW(model.parameters())
    state = torch.get_rng_state()
    found = trial(target, stage)
    result = found.compare(found.rewrite(Pipeline([Recompute("blocks.*")])).program)
    assert result.bitwise
    assert len(result.tensors) > 20
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled()


@pytest.mark.sweep
def test_each_seed_is_another_dropout() -> None:
    target = {"model": Blocks(layers=1, p=0.5), "example_inputs": (torch.randint(11, (2, 6)),), "loss": next_token}
    one = trial(target)
    other = Trial(one.session, "joint", seed=7)
    low = one.rewrite(Pipeline([LowLinear()])).program
    first, second = ({r.name: r.relative_error for r in t.compare(low).tensors}["loss"] for t in (one, other))
    assert first != second


@pytest.mark.sweep
def test_a_loss_scale_is_taken_out_of_gradients() -> None:
    model = Small()
    target = {"model": model, "example_inputs": (torch.randn(4, 8),), "loss": mean_square}
    for stage in ("joint", "step"):
        target["optimizer"] = torch.optim.AdamW(model.parameters())
        found = trial(target, stage)
        result = found.compare(found.rewrite(Pipeline([ScaleLoss()])).program, kinds=("gradient", "parameter"))
        assert result.bitwise
        assert {row.kind for row in result.tensors} == {"gradient"} | ({"parameter"} if stage == "step" else set())


@pytest.mark.sweep
def test_an_optimizer_that_has_state_makes_its_next_step() -> None:
    model, x = Small(), torch.randn(4, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    mean_square(model, x).backward()
    optimizer.step()
    optimizer.zero_grad()
    found = trial({"model": model, "example_inputs": (x,), "loss": mean_square, "optimizer": optimizer}, "step")
    low = found.rewrite(Pipeline([LowLinear()])).program
    before = copy.deepcopy(optimizer.state_dict())
    worst = max(row.relative_error for row in found.compare(low, kinds=("parameter",)).tensors)
    assert 0 < worst < 0.1
    after = optimizer.state_dict()["state"]
    assert all(torch.equal(before["state"][i]["exp_avg"], after[i]["exp_avg"]) for i in after)


@pytest.mark.sweep(but=("momentum",))
@pytest.mark.parametrize("name", ["adam", "momentum", "rmsprop"])
def test_a_fresh_optimizer_makes_its_first_step(name: str) -> None:
    model, x = Small(depth=1), torch.randn(4, 8)
    optimizer = OPTIMIZERS[name](model.parameters())
    found = trial({"model": model, "example_inputs": (x,), "loss": mean_square, "optimizer": optimizer}, "step")
    pairs = [pair for pair in matched(found.original.program, found.original.program)[0] if pair.kind == "parameter"]
    inputs = found._both(found.original.program)
    program = found.original.program
    with contextlib.closing(paired_values(program, program, pairs, inputs)) as values:
        updated = {pair.name: value.clone() for pair, value, _ in values}
    assert not optimizer.state
    mean_square(model, x).backward()
    optimizer.step()
    assert updated.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(updated[name], parameter) for name, parameter in model.named_parameters())


# --- which tensors ---------------------------------------------------------------------------------------------------


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(graphopt.name(torch.relu(self.up(x)), "hidden"))


def named() -> dict[str, Any]:
    return {"model": Named(), "example_inputs": (torch.randn(2, 8),), "loss": mean_square}


def test_users_names_are_listed_and_ops_only_when_asked_for() -> None:
    rows = compared(named(), LowLinear())
    assert {"hidden", "up", "down", "loss", "up.weight~"} <= set(rows)
    assert not any("::" in name for name in rows)
    assert set(compared(named(), LowLinear(), tensors=["::relu", "down.*~"])) == {
        "::relu",
        "down.weight~",
        "down.bias~",
    }
    assert set(compared(named(), LowLinear(), tensors=["hidden", "::relu"])) == {"hidden"}


@pytest.mark.sweep
def test_ops_that_are_called_more_often_are_not_matched_by_number() -> None:
    found = compared(named(), LowLinear(), tensors=["up::*"])
    assert "up::addmm" in found
    assert not any("_to_copy" in name for name in found)


def test_a_pattern_that_names_nothing_is_an_error_with_near_names() -> None:
    with pytest.raises(GraphoptError, match=r"'hiden' names no tensor that both programs have; did you mean 'hidden'"):
        compared(named(), LowLinear(), tensors=["hiden"])


def program_of(target: dict[str, Any]) -> tuple[Program, dict[InputSpec, Any]]:
    found = trial(target)
    return found.original.program, found._both(found.original.program)


def test_what_cannot_be_compared_is_listed() -> None:
    program, inputs = program_of(named())
    other = program.copy()
    for name, node in other.names().items():
        if name == "hidden":
            set_info(node, NodeInfo(Phase.FORWARD))
    result = compare_programs(program, other, inputs)
    assert result.skipped == ("hidden: only the original program has it",)
    assert result.bitwise


def test_programs_of_two_stages_and_missing_inputs_are_refused() -> None:
    program, inputs = program_of(named())
    forward = trial(named()).original.forward
    with pytest.raises(GraphoptError, match="a forward program and a joint program cannot be compared"):
        compare_programs(forward, program, {})
    del inputs[InputSpec("parameter", "up.weight")]
    with pytest.raises(GraphoptError, match=r"the parameter 'up.weight' of the program has no value"):
        compare_programs(program, program, inputs)


def test_a_step_needs_an_optimizer() -> None:
    with pytest.raises(GraphoptError, match="give an optimizer, or compare at joint"):
        trial(named(), "step")


def test_a_comparison_orders_and_judges() -> None:
    found = trial(chain(1.0, 1 + 2.0**-9))
    result = found.compare(found.rewrite(Pipeline([LowLinear()])).program)
    errors = [row.relative_error for row in result.tensors]
    assert errors == sorted(errors, reverse=True)
    assert result.worst == result.tensors[0]
    assert {row.name for row in result.exceeding(1e-4)} == {row.name for row in result.tensors if row.relative_error}
    assert result.exceeding(1.0) == ()
    assert Comparison(()).worst is None


def test_runs_end_at_the_first_tensor_beyond_the_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def watched(pair: Pair, *values: torch.Tensor) -> TensorError:
        seen.append(pair.name)
        return tensor_error(pair, *values)

    found = trial(overflowing())
    low = found.rewrite(Pipeline([LowLinear(dtype="float16")])).program
    monkeypatch.setattr("graphopt.runtime.comparison.tensor_errors.tensor_error", watched)
    state = torch.get_rng_state()
    assert not within_tolerance(found.original.program, low, found._both(low), 0.1)
    assert seen == ["layers.0", "layers.1", "layers.2"]
    assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), state)
    assert found.within(low, 0.1, tensors=["layers.0"])


@pytest.mark.sweep
def test_memory_is_that_of_two_runs() -> None:
    target = {"model": Chain(*[1.0] * 24), "example_inputs": (torch.rand(20_000, 4),), "loss": mean}
    found = trial(target)
    low = found.rewrite(Pipeline([LowLinear()])).program
    two = sum(program.memory().allocated_peak_bytes for program in (found.original.program, low))
    largest = 20_000 * 4
    measured = graphopt.measure_peak(lambda: found.compare(low)).allocated_peak_bytes
    assert measured < two + 10 * 8 * largest  # a few tensors in float64
