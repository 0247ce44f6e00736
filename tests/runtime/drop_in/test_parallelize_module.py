"""Models whose parameters are distributed tensors: drop-in and in whole steps, equal to torch's own to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_ranks
from tests.support.tensor_parallel import CASES, STEPS

ALL = """
from tests.support.tensor_parallel import CASES, STEPS, torchs_far_apart
say({name: torchs_far_apart(case) for name, case in CASES.items()})
say({name: torchs_far_apart(case, step=True) for name, case in STEPS.items()})
"""

LOOKED_AT = """
import logging
from torch.distributed.device_mesh import init_device_mesh
import graphopt
from graphopt.ir.node import info
from tests.support.fully_sharded import whole_loss
from tests.support.tensor_parallel import CASES, ParallelCase, tensor_parallel
logging.getLogger("graphopt").setLevel(logging.ERROR)

def refused(call):
    try:
        call()
    except graphopt.GraphoptError as error:
        return str(error)
    return ""

x, VARY = torch.randint(0, 11, (4, 8)), ({0: torch.export.Dim.AUTO},)
program = graphopt.capture(tensor_parallel(ParallelCase(plan="sequence")), (x,))
modules = [info(node).module for node in program.graph.nodes if "gather_shards" in node.name]
say([program.to_text(), modules])
model = tensor_parallel(ParallelCase(plan="sequence"))
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
step = graphopt.optimize_step(model, optimizer, "fit-memory{budget=90%}", loss=whole_loss)
step(x, x), step(x, x)
measured = [graphopt.measure_peak(lambda: step(x, x)).allocated_peak_bytes for _ in range(6)]
say([min(measured), step.program.memory().allocated_peak_bytes])
states = [value for state in optimizer.state.values() for value in state.values()]
say([type(value).__name__ for value in (*model.parameters(), *states) if value.dim()])

from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

def results(optimized, *placements):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))
    mesh = init_device_mesh("cpu", (world,))
    last = RowwiseParallel(output_layouts=Shard(0), use_local_output=False)
    parallelize_module(model, mesh, {"0": ColwiseParallel(use_local_output=False), "2": last})
    model = graphopt.optimize(model) if optimized else model
    batch = distribute_tensor(torch.randn(4, 8), mesh, placements).requires_grad_()
    result = model(batch)
    loss = result.square().sum()
    loss.backward()
    found = [result, loss, batch.grad, *(parameter.grad for parameter in model.parameters())]
    return [str(result.placements), *(each.full_tensor() for each in found)]

say([
    one == other if isinstance(one, str) else torch.equal(one, other)
    for place in (Replicate(), Shard(0))
    for one, other in zip(results(False, place), results(True, place), strict=True)
])

def norm_and_layer():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 8))
    plan = {"0": SequenceParallel(), "1": ColwiseParallel(input_layouts=Shard(1))}
    return parallelize_module(model, init_device_mesh("cpu", (world,)), plan)

plain = torch.randn(2, 4, 8)
mesh = init_device_mesh("cpu", (world,))
batches = [plain, distribute_tensor(plain, mesh, [Replicate()])]
switched = []
for first, second in (batches, batches[::-1]):
    changing = parallelize_module(torch.nn.Sequential(torch.nn.Linear(8, 8)), mesh, {"0": ColwiseParallel()})
    changing = graphopt.optimize(changing)
    changing(first)
    switched.append(refused(lambda: changing(second)))

theirs, ours = (norm_and_layer() for _ in range(2))
ours = graphopt.optimize(ours)
for each in (theirs, ours):  # another parameter with the same part, behind a program for the first one
    each(plain).sum().backward()
    each[0].weight = torch.nn.Parameter(each[0].weight.detach().clone())
    each(plain).sum().backward()
same = torch.equal(theirs[0].weight.grad.full_tensor(), ours[0].weight.grad.full_tensor())
replicated = ours[1].weight.detach().redistribute(mesh, [Replicate()])
ours[1].weight = torch.nn.Parameter(replicated)
say([same, *switched, refused(lambda: ours(plain))])
say([
    refused(lambda: graphopt.optimize(tensor_parallel(ParallelCase()), "data-parallel")),
    refused(lambda: graphopt.optimize_step(model, optimizer, "clip-gradients{max-norm=1}", loss=whole_loss)(x, x)),
    refused(lambda: graphopt.optimize(tensor_parallel(ParallelCase()), "mixed-precision")(x)),
    refused(lambda: graphopt.optimize(tensor_parallel(ParallelCase()), dynamic_shapes=VARY)(x)),
])
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """What each of two ranks found: drop-in, in whole steps, and what a program says."""
    return run_ranks(ALL + LOOKED_AT, 2, tmp_path_factory.mktemp("ranks") / "store")


def is_equal(case: dict[str, Any], what: set[str]) -> None:
    assert case["far"].keys() == what
    assert set(case["far"].values()) == {0.0}
    assert case["lower"]


@pytest.mark.parametrize("name", CASES)
def test_a_drop_in_model_trains_as_with_torch(name: str, found: list[list[Any]]) -> None:
    is_equal(found[0][0][name], {"loss", "gradients", "parameters", "state", "evaluation"})


@pytest.mark.parametrize("name", STEPS)
def test_a_whole_step_trains_as_with_torch(name: str, found: list[list[Any]]) -> None:
    is_equal(found[0][1][name], {"loss", "parameters", "state", "evaluation"})


def test_batches_and_results_may_be_distributed(found: list[list[Any]]) -> None:
    for *_, same, _, _ in found:
        assert all(same)


def test_a_program_is_for_the_placements_that_it_was_captured_with(found: list[list[Any]]) -> None:
    for *_, (same, first, second, parameter), _ in found:
        assert same
        assert all("give one placement for each size" in refusal for refusal in (first, second))
        assert "'1.weight' of Sequential is distributed otherwise" in parameter


def test_collectives_are_ops_of_their_modules(found: list[list[Any]]) -> None:
    for _, _, (text, modules), *_ in found:
        assert "all_reduce" in text
        assert "blocks.0.1" in modules


def test_the_peak_of_this_rank_is_predicted(found: list[list[Any]]) -> None:
    for *_, (measured, predicted), _, _, _, _ in found:  # gloo's threads may let go of an exchange a moment late
        assert measured == pytest.approx(predicted, rel=0.01)


def test_parameters_and_state_stay_distributed(found: list[list[Any]]) -> None:
    for *_, kinds, _, _, _ in found:
        assert set(kinds) == {"DTensor"}


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (0, "has the ranks exchange them already"),
        (1, "takes the norm of all gradients"),
        (2, "autocast around"),
        (3, "by itself"),
    ],
    ids=["exchange", "clip", "casts", "sizes"],
)
def test_what_cannot_be_is_refused(place: int, said: str, found: list[list[Any]]) -> None:
    for *_, refusals in found:
        assert said in refusals[place]


MORE = """
from tests.support.tensor_parallel import MORE_CASES, MORE_STEPS, torchs_far_apart
for case in MORE_CASES.values():
    say(torchs_far_apart(case))
for case in MORE_STEPS.values():
    say(torchs_far_apart(case, step=True))
"""

TWO_DIMENSIONS = """
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from tests.support.tensor_parallel import ParallelCase, torchs_far_apart
half = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
for plan in ("sequence", "loss"):
    for policy in (None, (half, half)):
        for passes in ("", "fit-memory{budget=92%}"):
            case = ParallelCase(plan=plan, mesh=(2, 2), passes=passes, policy=policy)
            say(torchs_far_apart(case))
            say(torchs_far_apart(case, step=True))
"""


@pytest.mark.sweep
@pytest.mark.parametrize(("script", "ranks"), [(MORE, 2), (TWO_DIMENSIONS, 4)], ids=["more", "with fully_shard"])
def test_more_cases_and_ranks(script: str, ranks: int, tmp_path: Path) -> None:
    for rank in run_ranks(script, ranks, tmp_path / "store"):
        assert [set(case["far"].values()) for case in rank] == [{0.0}] * len(rank)
