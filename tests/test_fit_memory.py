"""FitMemory: every budget is met, results equal eager's to the last bit, more bytes never cost more seconds."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import graphopt
from graphopt import GraphoptError, Phase, Pipeline, Program, freememory, measure_peak
from graphopt.analysis import cost
from graphopt.errors import PassError, PipelineError
from graphopt.fitting import Fitting
from graphopt.moving import host_lanes
from graphopt.passes import FitMemory, Recompute
from graphopt.program import OutputSpec, info
from graphopt.runtime import transfers
from graphopt.verify import verify
from tests.fitting import applied, attempt, drop_in_peak, frontiers_searched_once, step_peaks, structure, told, wide
from tests.support import (
    OPTIMIZERS,
    Blocks,
    Net,
    Passes,
    assert_same_training,
    captured,
    identical,
    mean_square,
    next_token,
    ops,
    peaks,
    results,
)
from tests.test_properties import SHAPE, Network, Recipe, eager, own_loss, recipes
from tests.zoo import ZOO
from tests.zoo import own_loss as models_loss

ROWS = torch.linspace(-1, 1, 256 * 8).reshape(256, 8).cos()
TOKENS = torch.arange(64).reshape(4, 16) % 11


def fit(budget: int | str, **options: Any) -> FitMemory:
    """The pass with figures from the roofline, which measures nothing."""
    return FitMemory(budget, cost=options.pop("cost", "roofline"), **options)


@pytest.fixture(autouse=True, scope="module")
def _searched_once() -> Iterator[None]:
    with frontiers_searched_once():
        yield


def smallest_of(program: Program, **options: Any) -> int:
    """The smallest peak that the error for a budget of nothing names."""
    error = attempt(lambda: applied(program, fit(1, **options)))
    found = re.search(r"the smallest peak found is (\d+) bytes", str(error))
    assert found is not None
    return int(found[1])


def budgets_of(program: Program, count: int) -> list[int]:
    """Budgets from the smallest that is feasible to the peak of the program as it is, both included."""
    low, high = smallest_of(program), program.memory().peak_bytes
    assert low < high
    return [low + (high - low) * number // (count - 1) for number in range(count)]


def conv() -> Net:
    torch.manual_seed(0)
    return Net(
        nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8),
        nn.GELU(), nn.Dropout(0.2), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(144, 4),
    )  # fmt: skip


IMAGES = torch.linspace(-1, 1, 8 * 2 * 64).reshape(8, 2, 8, 8).cos()


# --- bits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("optimizer", "budget"), [("momentum", "90%"), ("momentum", "50%"), ("adamw", "65%")])
def test_training_equals_eager(optimizer: str, budget: str) -> None:
    """Momentum has a program of its own for the first step, which makes its state."""
    batches = [(ROWS,), (ROWS.sin(),)]
    assert_same_training(wide(), optimizer, mean_square, batches, [fit(budget)], steps=3)


def test_training_convolutions_equals_eager() -> None:
    assert_same_training(conv(), "sgd", mean_square, [(IMAGES,), (IMAGES + 1,)], [fit("78%")], steps=2)


def test_training_a_language_model_equals_eager() -> None:
    passes = [fit("70%")]
    assert_same_training(Blocks(1, p=0.2), "adamw", next_token, [(TOKENS,)], passes, steps=2, whole_step=False)


def test_training_a_model_of_transformers_equals_eager() -> None:
    model, few = ZOO["ViT"].build(2)
    batches = [{name: torch.cat([tensor] * 12) for name, tensor in batch.items()} for batch in few]
    found = []
    for passes in ([], [fit("90%", time_limit=0.0)]):
        mine = copy.deepcopy(model)
        step = graphopt.optimize_step(mine, OPTIMIZERS["adamw"](mine.parameters()), passes, loss=models_loss)
        torch.manual_seed(1)
        losses = [step(batch) for batch in batches]
        found.append([*losses, *mine.parameters(), torch.get_rng_state()])
        assert [bool(record.changed) for record in step.records] == [True] * len(passes)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.a, self.head = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.a(F.dropout(torch.tanh(self.a(self.embed(tokens))), 0.3))))


def test_tied_weights_and_shared_modules() -> None:
    assert_same_training(Tied(), "adamw", next_token, [(TOKENS,)], [fit("80%")], steps=2)


def test_frozen_parameters_and_inputs_that_need_gradients() -> None:
    model = wide()
    model.net[3].requires_grad_(False)
    batch = (ROWS.clone().requires_grad_(),)
    assert_same_training(model, "momentum", mean_square, [batch], [fit("75%")], steps=2)


def test_recompute_and_a_budget_together() -> None:
    passes = [Recompute(["net.3"]), fit("92%")]
    assert_same_training(wide(), "sgd", mean_square, [(ROWS,)], passes, steps=2)
    program, _ = applied(captured(wide(), ROWS), *passes)
    origins = {info(node).origin.split(":")[0] for node in program.phase_nodes(Phase.RECOMPUTE)}
    assert origins == {"recompute", "fit-memory"}


@given(recipes(), st.sampled_from([0.0, 0.3, 0.7]))
@settings(max_examples=6, deadline=None, derandomize=True)
def test_random_networks_meet_their_budgets(recipe: Recipe, share: float) -> None:
    torch.manual_seed(0)
    model, x = Network(recipe), torch.randn(SHAPE).requires_grad_()
    plain = captured(model, x, loss=own_loss)
    high = plain.memory().peak_bytes
    low = smallest_of(plain, time_limit=0.0)
    budget = low + int(share * (high - low))
    program, record = applied(plain, fit(budget, time_limit=0.0))
    verify(program, before=plain)
    assert program.memory().peak_bytes <= budget
    assert bool(record.changed) == (budget < high)

    loss, gradients, buffers, generator = eager(model, x)
    held = copy.deepcopy(model)
    found, state = results(program, held, x)
    mine = {spec.target: value for spec, value in found.items() if spec.role == "gradient"}
    assert identical(found[OutputSpec("loss", "loss")], loss)
    assert [name for name, value in mine.items() if not identical(value, gradients[name])] == []
    assert [name for name, value in held.named_buffers() if not identical(value, buffers[name])] == []
    assert torch.equal(state, generator)


# --- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["perceptron", "convolutions"])
def test_at_every_budget_the_peak_is_predicted_measured_and_within_it(case: str) -> None:
    model, x = (wide(), ROWS) if case == "perceptron" else (conv(), IMAGES)
    plain = captured(model, x)
    for budget in budgets_of(plain, 5):
        program, record = applied(plain, fit(budget))
        memory = program.memory()
        assert memory.peak_bytes <= budget
        assert memory.resident_bytes == plain.memory().resident_bytes
        predicted, measured = peaks(program, model, x)
        assert measured == predicted <= budget - memory.resident_bytes
        assert record.peak_after == memory.peak_bytes


@pytest.mark.parametrize("optimizer", ["adamw", "momentum"])
def test_whole_steps_peak_within_their_budgets(optimizer: str) -> None:
    make = OPTIMIZERS[optimizer]
    for budget in ("80%", "65%"):
        step, measured = step_peaks(wide(), make, mean_square, (ROWS,), [fit(budget)])
        (record,) = step.records
        memory = step.program.memory()
        assert record.peak_before is not None
        assert memory.peak_bytes <= int(record.peak_before * float(budget[:-1]) / 100)
        assert measured == memory.allocated_peak_bytes


def test_drop_in_training_peaks_within_its_budget() -> None:
    def total(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).sum()  # takes a number only, so that what the user adds to the program is next to nothing

    before = drop_in_peak(graphopt.optimize(wide()), (ROWS,), total)
    for budget in ("85%", "70%"):
        model = graphopt.optimize(wide(), [fit(budget)])
        measured = drop_in_peak(model, (ROWS,), total)
        memory = model.program.memory()
        assert measured <= memory.allocated_peak_bytes + 64
        assert measured < before


# --- seconds ---------------------------------------------------------------------------------------------------------


def seconds_at(program: Program, budgets: list[int], *, host: int | None = None) -> list[float]:
    """Predicted seconds on top of the program's own at each budget, and every plan is within its budget."""
    memory = program.memory()
    seconds = cost.cost_report(memory.nodes, method="roofline").seconds
    lanes = None if host is None else functools.partial(host_lanes, room=host, smallest=10_000)
    fitting = Fitting(program, memory, seconds, lanes=lanes)
    plans = [fitting.within(budget) for budget in budgets]
    assert [plan is not None and plan.peak_bytes <= budget for plan, budget in zip(plans, budgets, strict=True)]
    return [plan.seconds for plan in plans if plan is not None]


@pytest.mark.parametrize("host", [None, 10**9, 200_000])
def test_more_bytes_never_cost_more_seconds(host: int | None) -> None:
    plain = captured(wide(), ROWS)
    budgets = budgets_of(plain, 24)
    seconds = seconds_at(plain, budgets, host=host)
    assert len(seconds) == len(budgets)
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[-1] == 0.0


def test_the_record_says_what_was_done() -> None:
    plain = captured(wide(), ROWS)
    program, record = applied(plain, fit("70%"))
    text = "\n".join(record.changed.lines)
    clones = [node for node in program.phase_nodes(Phase.RECOMPUTE) if info(node).origin == "fit-memory"]
    assert record.changed.counts["run again"] > 0
    assert clones
    assert record.changed.bytes_saved == plain.memory().peak_bytes - program.memory().peak_bytes > 0
    assert re.search(r"^peak \S+ kB of \S+ kB allowed; the program as it is takes \S+ kB", text)
    assert re.search(r"^run again .* \S+s +cheaper .*support\.py:\d+", text, re.MULTILINE)
    assert re.search(r"^kept ", text, re.MULTILINE)
    assert set(record.changed.tensors) <= set(program.names())


# --- nothing to do, and what cannot be done --------------------------------------------------------------------------


@pytest.mark.parametrize("more", [0, 1, 10**9])
def test_a_budget_above_the_peak_leaves_the_program_as_it_is(more: int) -> None:
    plain = captured(wide(), ROWS)
    program, record = applied(plain, fit(plain.memory().peak_bytes + more))
    assert not record.changed
    assert "is within the budget" in record.changed.reason
    assert structure(program) == structure(plain)


def test_the_smallest_budget_of_the_error_is_met_and_a_byte_less_is_not() -> None:
    plain = captured(wide(), ROWS)
    smallest = smallest_of(plain)
    program, record = applied(plain, fit(smallest))
    assert program.memory().peak_bytes == record.peak_after == smallest
    error = attempt(lambda: applied(plain, fit(smallest - 1)))
    assert isinstance(error, PassError)
    assert f"({smallest - 1} bytes): the smallest peak found is {smallest} bytes" in str(error)


def test_the_error_names_the_largest_tensors() -> None:
    plain = captured(wide(), ROWS)
    smallest, _ = applied(plain, fit(smallest_of(plain)))
    error = told(attempt(lambda: applied(plain, fit("1kB"))))
    largest = smallest.memory().alive[:3]
    assert [item.name for item in largest if item.name not in error] == []
    assert "parameters, optimizer state and inputs" in error
    assert "what to do:" in error
    with pytest.raises(GraphoptError, match="no plan fits"):
        graphopt.optimize(wide(), [fit(5)])(ROWS)


def test_a_program_whose_peak_is_not_in_what_forward_keeps() -> None:
    """Nothing can be dropped: parameters alone are above the budget."""
    plain = captured(Net(nn.Linear(64, 64)), torch.randn(2, 64))
    error = attempt(lambda: applied(plain, fit("50%")))
    assert "no plan fits" in str(error)


def test_applied_twice_it_does_nothing() -> None:
    program, first = applied(captured(wide(), ROWS), fit("70%"))
    again, second = applied(program, fit("60%"))
    assert first.changed
    assert not second.changed
    assert "fitted already" in second.changed.reason
    assert structure(again) == structure(program)


# --- options ---------------------------------------------------------------------------------------------------------


def test_budgets_can_be_written_in_several_ways() -> None:
    plain = captured(wide(), ROWS)
    peak = plain.memory().peak_bytes
    share = int(peak * 70 / 100)
    programs = [structure(applied(plain, fit(budget))[0]) for budget in (share, str(share), "70%", f"{share / 1e3}kB")]
    assert all(program == programs[0] for program in programs)
    assert not applied(plain, fit("8GB"))[1].changed
    assert not applied(plain, fit("512MiB"))[1].changed


def test_auto_is_what_is_there_and_most_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = captured(wide(), ROWS)
    memory = plain.memory()
    free = int(0.7 * memory.allocated_peak_bytes)
    monkeypatch.setattr(freememory, "free_host_bytes", lambda: free)
    program, record = applied(plain, fit("auto"))
    assert record.changed
    assert program.memory().peak_bytes <= memory.resident_bytes + 0.95 * free
    monkeypatch.setattr(freememory, "free_host_bytes", lambda: 10**12)
    assert not applied(plain, fit("auto"))[1].changed
    monkeypatch.setattr(freememory, "free_host_bytes", lambda: None)
    assert "give the budget in bytes" in str(attempt(lambda: applied(plain, fit("auto"))))


@pytest.mark.parametrize("budget", ["", "8 apples", "60 %%", "-5%", "automatic", "GB"])
def test_a_budget_that_means_nothing(budget: str) -> None:
    with pytest.raises(GraphoptError, match="write 8GB, 512MiB or 1000000, 60%"):
        FitMemory(budget)


@pytest.mark.parametrize("budget", [None, True, 0.6, (1,)])
def test_a_budget_of_another_type(budget: Any) -> None:
    with pytest.raises(TypeError, match="budget is a number of bytes"):
        FitMemory(budget)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"allow": ()}, "allow=nothing"),
        ({"allow": ("recompte",)}, "recompute"),
        ({"cost": "roofine"}, "roofline"),
        ({"cost": ""}, "cost model"),
    ],
)
def test_options_that_mean_nothing(options: dict[str, Any], message: str) -> None:
    with pytest.raises(GraphoptError, match=message):
        FitMemory("60%", **options)


@pytest.mark.parametrize(
    "text",
    [
        "fit-memory{budget=60%}",
        "fit-memory{budget=8GB}",
        "fit-memory{budget=auto}",
        "fit-memory{budget=100000}",
        "fit-memory{budget=60% cost=roofline}",
        "fit-memory{budget=60% allow=recompute}",
        "fit-memory{budget=60% time-limit=2.5}",
        "fit-memory{budget=60% host-budget=1GB}",
    ],
)
def test_the_text_form_goes_both_ways(text: str) -> None:
    pipeline = Pipeline(text)
    assert str(pipeline) == text
    assert Pipeline(str(pipeline)).passes == pipeline.passes


def test_the_text_form_runs() -> None:
    model = graphopt.optimize(wide(), "fit-memory{budget=70% cost=roofline}")
    model(ROWS).sum().backward()
    assert model.records[0].changed
    with pytest.raises(PipelineError, match="budget"):
        Pipeline("fit-memory")


def test_by_the_roofline_no_op_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> float:
        raise AssertionError("a call was measured")

    monkeypatch.setattr(cost, "measured_seconds", fail)
    for name in ("roofline", "a100-80gb"):
        assert applied(captured(wide(), ROWS), fit("70%", cost=name))[1].changed


def test_by_measured_seconds() -> None:
    model, x = wide(), ROWS
    program, record = applied(captured(model, x), FitMemory("70%"))
    assert record.changed
    assert "(measured)" in "\n".join(record.changed.lines)
    predicted, measured = peaks(program, model, x)
    assert predicted == measured


def test_a_time_limit_ends_the_search_with_what_was_found() -> None:
    plain = captured(wide(), ROWS)
    program, record = applied(plain, fit("90%", time_limit=0.0))
    assert record.changed
    assert program.memory().peak_bytes <= 0.9 * plain.memory().peak_bytes


def test_without_recomputing_and_without_a_host_nothing_fits() -> None:
    plain = captured(wide(), ROWS)
    assert "no plan fits" in str(attempt(lambda: applied(plain, fit("70%", allow=("offload",)))))


# --- tensors that wait on the host -----------------------------------------------------------------------------------


BIG = torch.linspace(-1, 1, 2048 * 8).reshape(2048, 8).cos()


@pytest.mark.parametrize("allow", [("offload",), ("recompute", "offload")])
def test_with_a_host_budget_tensors_can_wait_there(allow: tuple[str, ...]) -> None:
    model = wide(inner=256)
    plain = captured(model, BIG)
    program, record = applied(plain, fit("70%", host_budget="1GB", allow=allow))
    assert program.memory().peak_bytes <= 0.7 * plain.memory().peak_bytes
    if allow == ("offload",):
        assert record.changed.counts["offloaded"] > 0
        assert record.changed.counts["run again"] == 0
    predicted, measured = peaks(program, model, BIG)
    assert predicted == measured
    expected, state = results(plain, copy.deepcopy(model), BIG)
    found, after = results(program, copy.deepcopy(model), BIG)
    assert all(identical(value, expected[spec]) for spec, value in found.items())
    assert torch.equal(state, after)
    assert transfers.statistics().held_bytes == 0


def test_training_with_tensors_on_the_host_equals_eager() -> None:
    passes = [fit("75%", host_budget="1GB", allow=("offload",))]
    assert_same_training(wide(inner=256), "sgd", mean_square, [(BIG,)], passes, steps=2)


def test_the_host_budget_is_kept() -> None:
    plain = captured(wide(inner=256), BIG)
    error = attempt(lambda: applied(plain, fit("60%", host_budget=1000, allow=("offload",))))
    assert "no plan fits" in str(error)


# --- runtimes --------------------------------------------------------------------------------------------------------


def test_another_shape_is_fitted_on_its_own() -> None:
    model = graphopt.optimize(wide(), [fit("75%")])
    for rows in (ROWS, ROWS[:96]):
        model(rows).sum().backward()
        assert model.records[0].changed
        peak = model.records[0].peak_before
        assert peak is not None
        assert model.program.memory().peak_bytes <= 0.75 * peak


def test_in_eval_mode_the_plain_forward_runs() -> None:
    model, optimized = wide(), None
    optimized = graphopt.optimize(copy.deepcopy(model), [fit("75%")])
    optimized(ROWS).sum().backward()
    model(ROWS)
    model.load_state_dict(optimized.state_dict())
    assert torch.equal(optimized.eval()(ROWS), model.eval()(ROWS))


def test_sizes_that_vary() -> None:
    shapes = ({0: torch.export.Dim("rows", min=2, max=512)},)
    model = graphopt.optimize(wide(p=0.0), [fit("80%")], dynamic_shapes=shapes, example_inputs=(ROWS,))
    assert model.records[0].changed
    plain = wide(p=0.0)
    for rows in (ROWS, ROWS[:40]):
        assert torch.equal(model(rows), plain(rows))


def test_accumulated_gradients() -> None:
    def run(passes: Passes) -> list[torch.Tensor]:
        model = wide()
        step = graphopt.optimize_step(model, OPTIMIZERS["momentum"](model.parameters()), passes, loss=mean_square)
        step.accumulate(2)
        torch.manual_seed(1)
        losses = [step(batch) for batch in (ROWS, ROWS.sin(), ROWS.cos(), ROWS.tanh())]
        return [*losses, *model.parameters(), *model.buffers(), torch.get_rng_state()]

    plain, fitted = run(()), run([fit("80%")])
    assert all(torch.equal(one, other) for one, other in zip(plain, fitted, strict=True))


def test_after_an_exception_between_forward_and_backward_the_next_step_runs() -> None:
    def run(model: nn.Module) -> list[torch.Tensor | None]:
        torch.manual_seed(1)
        with pytest.raises(ZeroDivisionError):
            next(loss / (1 // 0) for loss in [mean_square(model, ROWS)])
        mean_square(model, ROWS).backward()
        return [parameter.grad for parameter in model.parameters()] + [torch.get_rng_state()]

    found = run(wide()), run(graphopt.optimize(wide(), [fit("70%")]))
    assert all(identical(one, other) for one, other in zip(*found, strict=True))


def test_two_forwards_before_one_backward_and_a_second_backward() -> None:
    def run(model: nn.Module) -> list[torch.Tensor | None]:
        torch.manual_seed(1)
        loss = mean_square(model, ROWS) * mean_square(model, ROWS.sin())
        loss.backward(retain_graph=True)
        loss.backward()
        return [parameter.grad for parameter in model.parameters()] + [torch.get_rng_state()]

    found = run(wide()), run(graphopt.optimize(wide(), [fit("70%")]))
    assert all(identical(one, other) for one, other in zip(*found, strict=True))


def test_numerics_can_be_verified() -> None:
    model = graphopt.optimize(wide(), [fit("70%")], verify="numerics")
    model(ROWS).sum().backward()
    assert model.records[0].changed


def test_nothing_stays_behind_between_steps() -> None:
    model = wide()
    step = graphopt.optimize_step(model, OPTIMIZERS["sgd"](model.parameters()), [fit("55%")], loss=mean_square)
    step(ROWS)
    assert measure_peak(lambda: step(ROWS)).retained_bytes == 4  # the loss
    assert ops(step.program, Phase.RECOMPUTE)
