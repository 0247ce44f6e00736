"""`graphopt.advise`: the choice is the best of a grid, fits, and can be pasted; what cannot be is said by name."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import graphopt
from graphopt import Pipeline, Program, _torch
from graphopt.analysis.allocator.rules import PLAIN
from graphopt.analysis.costs.profiles import PROFILES, DeviceProfile
from graphopt.capture.devices.for_device import without_data_for
from graphopt.errors import ArgumentError
from graphopt.ir.context import Context, PlanStore
from graphopt.rewriting.distributed.prediction.predicted_step import predicted_step
from graphopt.rewriting.memory.fit.budget import BudgetError
from graphopt.runtime.advice.candidate_pipelines import Candidate
from graphopt.runtime.advice.evaluation import Evaluator, SharedCapture
from graphopt.runtime.advice.recommendation import Advice
from graphopt.runtime.programs.rewrite import rewrite
from tests.support.training import mean_square

WIDTH, ROWS = 256, 2048
PROFILE = replace(
    PROFILES["h100-80gb"], name="small", memory_bytes=10**9, context_bytes=0, devices_per_host=2, workspaces={},
    network_bandwidth=1e9,
)  # fmt: skip
"""A device whose allocator keeps freed blocks; two of them share a host."""


class Layers(nn.Module):
    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(torch.sigmoid(layer(x)))
        return x


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), fused=True)


def advised(memory: int | str | None = None, profile: DeviceProfile = PROFILE, **options: Any) -> Advice:
    model = Layers()
    batch = (torch.zeros(ROWS, WIDTH),)
    return graphopt.advise(model, adamw(model), batch, loss=mean_square, memory=memory, device=profile, **options)


def measured(pipeline: str, profile: DeviceProfile, devices: int) -> tuple[int, float]:
    """Bytes and seconds of a pipeline, rewritten by itself."""
    model = Layers()
    twins = without_data_for(profile, model, adamw(model), (torch.zeros(ROWS, WIDTH),), {})
    session = SharedCapture(twins.model, twins.args, twins.kwargs, loss=mean_square, optimizer=twins.optimizer)
    with _torch.ranks_without_network(devices, profile.devices_per_host):
        program = rewrite(
            session, Pipeline(pipeline), until="step", context=Context(device=profile, plans=PlanStore())
        ).program
        reserved = program.reserved()
        return reserved.reserved_peak_bytes, predicted_step(program, "measured", devices).seconds


def test_where_everything_fits_nothing_is_done() -> None:
    advice = advised()
    assert advice.pipeline == ""
    assert advice.passes.passes == ()
    assert (advice.limit, advice.changes, advice.runner_up) == ("compute", [], None)
    assert advice.chosen.taken == measured("", PROFILE, 1)[0]


def test_what_does_not_fit_gets_a_plan_that_does_when_it_is_pasted() -> None:
    plain = advised()
    budget = int(0.7 * plain.chosen.taken)
    advice = advised(budget)
    assert [current.name for current in advice.passes.passes] == ["fit-memory"]
    assert advice.limit == "memory"
    assert advice.chosen.recomputed > 0
    (change,) = advice.changes
    assert "no pass" in change
    taken, seconds = measured(advice.pipeline, PROFILE, 1)
    assert taken == advice.chosen.taken <= budget
    assert seconds == pytest.approx(advice.step.seconds)
    assert seconds > plain.step.seconds


GRID = ("data-parallel", "data-parallel,shard-optimizer", "data-parallel,shard-parameters")
HYBRID = "data-parallel,shard-parameters{group=host replicas=hosts}"


@pytest.mark.sweep(but=("2 devices, 60 %",))
@pytest.mark.parametrize(
    ("devices", "share", "network"),
    [(2, 0.6, 1e9), (2, 0.9, 1e9), (4, 0.6, 1e7), (4, 0.6, 1e10), (4, 0.8, 1e8)],
    ids=["2 devices, 60 %", "2 devices, 90 %", "4 devices, 60 %, slow", "4 devices, 60 %, fast", "4 devices, 80 %"],
)
def test_the_choice_is_the_best_of_all_that_fit(devices: int, share: float, network: float) -> None:
    """Against a grid of every exchange with every kind of plan, within five per cent."""
    profile = replace(PROFILE, network_bandwidth=network)
    budget = int(share * measured("data-parallel", profile, devices)[0])
    advice = advised(budget, profile, devices=devices)
    grid = {}
    for exchange in (*GRID, *([HYBRID] if devices == 4 else [])):
        for allow in ("recompute", "recompute,offload", "recompute,offload,state"):
            pipeline = f"{exchange},fit-memory{{budget={budget} allow={allow}}}"
            try:
                taken, seconds = measured(pipeline, profile, devices)
            except graphopt.PassError:
                continue
            assert taken <= budget
            grid[pipeline] = seconds
    best = min(grid.values())
    assert advice.chosen.taken <= budget
    assert advice.step.seconds <= 1.05 * best
    taken, seconds = measured(advice.pipeline, profile, devices)
    assert (taken, pytest.approx(seconds)) == (advice.chosen.taken, advice.step.seconds)


@pytest.mark.sweep
def test_what_changes_results_is_looked_at_where_it_may() -> None:
    texts = {
        numerics: _passes(advised(devices=4, numerics=numerics)) for numerics in ("bitwise", "tolerant", "changes")
    }
    assert texts["bitwise"] == texts["tolerant"] <= texts["changes"]
    more = ",".join(texts["changes"] - texts["bitwise"])
    assert all(name in more for name in ("mixed-precision", "deep-gradient-compression", "local-sgd"))


def _passes(advice: Advice) -> set[str]:
    return {one.candidate.pipeline for one in advice.evaluated}


@pytest.mark.sweep
def test_sums_in_another_order_are_tried_within_a_budget() -> None:
    budget = int(0.7 * advised().chosen.taken)
    assert "microbatch" in ",".join(_passes(advised(budget, numerics="tolerant")))


def test_steps_that_alternate_count_by_how_often_they_come() -> None:
    """One step in eight averages the parameters, and the others exchange nothing."""
    profile = replace(PROFILE, network_bandwidth=1e7, devices_per_host=1)
    found = {one.candidate.pipeline: one for one in advised(None, profile, devices=2, numerics="changes").evaluated}
    every, eighth = found["data-parallel"].step, found["data-parallel,local-sgd{k-steps=8}"].step
    assert every is not None
    assert eighth is not None
    assert eighth.sent_bytes == pytest.approx(every.sent_bytes / 8, rel=0.01)
    assert eighth.waited < every.waited / 4


def test_of_pipelines_that_are_as_fast_the_one_that_changes_least_is_taken() -> None:
    fast = replace(PROFILE, network_bandwidth=1e15, network_latency=0.0, flops={"float32": 1e20}, peer_bandwidth=1e15)
    advice = advised(None, fast, devices=2, numerics="changes")
    assert advice.pipeline == "data-parallel"


def test_where_nothing_fits_the_bytes_and_the_devices_that_would_do_are_said() -> None:
    with pytest.raises(BudgetError, match="the least that one of 2 x small has to hold") as caught:
        advised("4MB", devices=2)
    assert caught.value.smallest_bytes > 4_000_000
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(24)))
    size = 4 * sum(parameter.numel() for parameter in model.parameters())
    profile = replace(PROFILE, devices_per_host=1, allocator=PLAIN)

    def advise(devices: int) -> Advice:
        batch = (torch.zeros(16, 1024),)
        return graphopt.advise(
            model, adamw(model), batch, loss=mean_square, device=profile, memory=int(0.9 * size), devices=devices
        )

    with pytest.raises(BudgetError) as caught:
        advise(1)
    assert caught.value.smallest_bytes > 0.9 * size
    found = re.search(r"what to do: (\d+) devices can hold it", str(caught.value))
    assert found is not None
    assert "shard-parameters" in advise(int(found[1])).pipeline


def test_no_number_of_devices_is_said_where_more_of_them_do_not_help() -> None:
    """Activations alone take more than a device has."""
    profile = replace(PROFILE, devices_per_host=1, allocator=PLAIN)
    with pytest.raises(BudgetError) as caught:
        advised(2_500_000, profile)
    assert "what to do" not in str(caught.value)


def test_a_plan_goes_by_the_cost_that_is_given() -> None:
    model = Layers()

    def advise(memory: int | None = None) -> Advice:
        batch = (torch.zeros(ROWS, WIDTH),)
        return graphopt.advise(model, adamw(model), batch, loss=mean_square, memory=memory, cost="roofline")

    assert "cost=roofline" in advise(int(0.8 * advise().chosen.taken)).pipeline


def test_a_drop_in_model_is_advised_without_an_update() -> None:
    model = Layers()
    batch = (torch.zeros(ROWS, WIDTH),)
    plain = graphopt.advise(model, None, batch, device=PROFILE)
    assert plain.pipeline == ""
    advice = graphopt.advise(model, None, batch, device=PROFILE, memory=int(0.7 * plain.chosen.taken))
    assert [current.name for current in advice.passes.passes] == ["fit-memory"]
    assert graphopt.advise(model, None, batch, device=PROFILE, devices=2).pipeline == "data-parallel"


def test_the_device_that_is_here_is_measured() -> None:
    model = Layers(1)
    advice = graphopt.advise(model, adamw(model), (torch.zeros(8, WIDTH),), loss=mean_square, cost="roofline")
    assert advice.machine == "this device"
    assert advice.step.seconds > 0
    assert model.layers[0].weight.grad is None


def test_text_and_data_say_the_same() -> None:
    advice = advised(int(0.7 * advised().chosen.taken), devices=2, network="10Gbit")
    text, data = str(advice), json.loads(json.dumps(advice.to_json()))
    assert text.startswith(f"passes               {advice.pipeline}\n")
    assert data["pipeline"] == advice.pipeline
    assert data["machine"] == "2 x small" in text
    assert advice.runner_up is not None
    assert data["runner_up"]["passes"] == advice.runner_up.candidate.pipeline
    assert all(one["passes"] in text for one in data["candidates"])
    assert data["step"]["utilization"] == advice.step.utilization > 0
    assert data["not_considered"]
    seconds = [one["step"]["seconds"] for one in data["candidates"] if one["fits"]]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"numerics": "bitwize"}, "did you mean 'bitwise'"),
        ({"device": "h101"}, "h100-80gb"),
        ({"devices": 0}, "devices is a whole number of at least 1"),
        ({"devices": 2, "device": None}, "needs device="),
        ({"network": "1Gbit", "device": None}, "give device="),
        ({"network": "fast"}, "is not a bandwidth"),
        ({"example_inputs": torch.zeros(2, WIDTH)}, "as a tuple of positional arguments"),
        ({"memory": "8 apples"}, "8 apples"),
        ({"cost": "roofline"}, "is for the device that is here"),
        ({"cost": "rufline", "device": None}, "did you mean 'roofline'"),
        ({"memory": 10, "device": "h100-80gb"}, "not enough for the driver"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_arguments_say_what_to_write(options: dict[str, Any], words: str) -> None:
    model = Layers(1)
    given = {"device": PROFILE, "example_inputs": (torch.zeros(2, WIDTH),), **options}
    with pytest.raises(graphopt.GraphoptError, match=words) as caught:
        graphopt.advise(model, adamw(model), loss=mean_square, **given)
    assert isinstance(caught.value, ArgumentError) or {"network", "cost"} & options.keys()


def test_what_is_evaluated_together_is_what_each_is_by_itself() -> None:
    """Programs are lowered once for several pipelines, which is not to be seen in any."""
    advice = advised(devices=4, numerics="changes")
    for one in advice.evaluated:
        if "local-sgd" in one.candidate.pipeline:
            continue  # a mean of two programs
        assert one.step is not None
        assert measured(one.candidate.pipeline, PROFILE, 4) == (one.taken, pytest.approx(one.seconds))


def test_a_model_that_cannot_be_captured_says_so_itself() -> None:
    class Branching(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if x.sum().item() > 0 else x

    with pytest.raises(graphopt.CaptureError, match="Branching cannot be captured") as caught:
        graphopt.advise(Branching(1), None, (torch.ones(2, WIDTH),), device=PROFILE)
    assert "what to do" in str(caught.value)


def test_a_process_group_of_other_ranks_is_refused(tmp_path: Path) -> None:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(ArgumentError, match="give devices=1"):
            advised(devices=2)
    finally:
        torch.distributed.destroy_process_group()


def test_no_parameter_is_touched() -> None:
    model = Layers()
    before = [parameter.clone() for parameter in model.parameters()]
    optimizer = adamw(model)
    graphopt.advise(model, optimizer, (torch.zeros(ROWS, WIDTH),), loss=mean_square, device=PROFILE, devices=2)
    assert all(torch.equal(one, two) for one, two in zip(before, model.parameters(), strict=True))
    assert not optimizer.state
    assert not torch.distributed.is_initialized()


# --- the rows of a call ----------------------------------------------------------------------------------------------


def batch_advised(rows: int, global_batch: int, memory: int | None = None, **options: Any) -> Advice:
    model = Layers(2)
    batch = (torch.zeros(rows, WIDTH),)
    return graphopt.advise(
        model,
        adamw(model),
        batch,
        loss=mean_square,
        memory=memory,
        cost="roofline",
        global_batch=global_batch,
        **options,
    )


def test_calls_as_large_as_fit_are_chosen_and_the_step_takes_what_was_predicted() -> None:
    whole = batch_advised(512, 512)
    assert (whole.rows, whole.calls, whole.pipeline) == (512, 1, "")
    budget = int(0.5 * whole.chosen.taken)
    advice = batch_advised(512, 512, budget)
    assert advice.rows * advice.calls == 512
    assert advice.chosen.taken <= budget
    model = Layers(2)
    x = torch.randn(advice.rows, WIDTH)
    step = graphopt.optimize_step(model, adamw(model), advice.passes, loss=mean_square).accumulate(advice.calls)
    for _ in range(2 * advice.calls):
        step(x)
    assert max(program.memory().peak_bytes for program in step.programs.values()) == advice.chosen.taken


def test_rows_that_divide_the_batch_are_tried_as_long_as_an_update_gets_faster() -> None:
    """Each call takes some time for itself, so that few large ones are faster than many small ones."""
    advice = batch_advised(2, 24)
    assert (advice.rows, advice.calls) == (24, 1)
    assert [text.partition(":")[0] for text in advice.batches] == ["2 rows", "4 rows", "8 rows"]
    assert str(advice).splitlines()[2] == "batch                24 rows on each device, an update in one call"
    assert advice.to_json()["accumulation"] == 1
    assert not any("global_batch" in text for text in advice.unconsidered)


@pytest.mark.sweep
def test_several_calls_take_the_sum_of_their_seconds_and_items() -> None:
    advice = batch_advised(2048, 2048, batch_advised(2048, 2048).chosen.taken // 4)
    assert advice.calls > 1
    assert f"{advice.rows} rows on each device, an update in {advice.calls} calls" in str(advice)
    assert f"step.accumulate({advice.calls})" in str(advice)
    once = batch_advised(advice.rows, advice.rows, advice.budget)
    assert advice.step.items == advice.calls * once.step.items == 2048
    # there is one update for all of them; gradients so far leave less of the budget to activations
    assert 0.5 < advice.step.seconds / (advice.calls * once.step.seconds) < 1.5


def test_programs_that_alternate_are_weighed_with_the_gradients_so_far() -> None:
    """Local SGD lowers a program for each of its forms: each takes the gradients of the calls before, too."""
    session = SharedCapture(model := Layers(2), (torch.zeros(8, WIDTH),), loss=mean_square, optimizer=adamw(model))
    lowered: list[Program] = []
    lower = session.lower_joint
    session.lower_joint = lambda program, **more: lowered.append(lower(program, **more)) or lowered[-1]  # type: ignore
    context = Context(device=PROFILE)
    candidate = Candidate(("data-parallel", "local-sgd{k-steps=8}"))
    with _torch.ranks_without_network(2, 2):
        found = Evaluator(session, "step", context, "roofline", 2, 10**9, calls=4)(candidate)
    assert found.step is not None, found.problem
    assert len(lowered) > 1
    assert all(program.inputs_of("gradient") for program in lowered)
    assert found.step.items == 4 * 8


def test_a_batch_that_devices_cannot_share_is_refused() -> None:
    with pytest.raises(ArgumentError, match="global_batch=9 is not a multiple of devices=2"):
        advised(devices=2, global_batch=9)
    with pytest.raises(ArgumentError, match="global_batch is of a whole step"):
        graphopt.advise(Layers(), None, (torch.zeros(2, WIDTH),), cost="roofline", global_batch=4)
    with pytest.raises(ArgumentError, match="sizes 2, 3, and it is not clear which are its rows: global_batch chooses"):
        graphopt.advise(
            model := Layers(), adamw(model), (torch.zeros(2, 1), torch.zeros(3)), cost="roofline", global_batch=4
        )
