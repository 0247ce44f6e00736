"""``step.join``: ranks that run out of batches at different times, and batches of different sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import graphopt
from graphopt import GraphoptError
from graphopt.runtime.step.uneven_ends import joined_group
from tests.support.ranks import run_ranks
from tests.support.training import mean_square

PROLOGUE = """
import graphopt
from graphopt.passes import *
from torch import nn

def made():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 40), nn.BatchNorm1d(40), nn.GELU(), nn.Linear(40, 8))

def loss(model, x):
    return model(x).square().mean()

def batch(of, number, rows=4):
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(100 * of + number))

def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

def reference(counts, rows=None, every=1):
    # All ranks in one process: the mean over those that have a batch, and each one's own running statistics.
    model = made()
    optimizer = sgd(model)
    buffers = [[b.clone() for b in model.buffers()] for _ in counts]
    for number in range(max(counts)):
        active = [of for of, count in enumerate(counts) if number < count]
        weights = {of: rows[of] if rows else 1 for of in active}
        for of in active:
            with torch.no_grad():
                for b, kept in zip(model.buffers(), buffers[of]):
                    b.copy_(kept)
            value = loss(model, batch(of, number, rows[of] if rows else 4))
            (value * weights[of] / sum(weights.values()) / every).backward()
            buffers[of] = [b.clone() for b in model.buffers()]
        if number % every == every - 1:
            optimizer.step()
            optimizer.zero_grad()
    return model, buffers

def close(model, expected):
    pairs = zip(model.parameters(), expected.parameters())
    return all(torch.allclose(one, other, rtol=1e-4, atol=1e-6) for one, other in pairs)

def train(counts, *passes, rows=None, every=1, **options):
    model = made()
    added = [DataParallel(buffers="local"), *passes]
    step = graphopt.optimize_step(model, sgd(model), added, loss=loss)
    if every > 1:
        step.accumulate(every)
    with step.join(by_rows=rows is not None, **options):
        for number in range(counts[rank]):
            step(batch(rank, number, rows[rank] if rows else 4))
    return step

def same_everywhere(step):
    with step.whole_parameters():
        flat = torch.cat([p.detach().flatten() for p in step.model.parameters()])
        found = [torch.empty_like(flat) for _ in range(world)]
        dist.all_gather(found, flat)
    return all(torch.equal(flat, other) for other in found)
"""


def run(script: str, world: int, folder: Path) -> list[list[Any]]:
    return run_ranks(PROLOGUE + script, world, folder / "store")


def test_the_mean_is_over_those_that_have_a_batch(tmp_path: Path) -> None:
    script = """
for counts in ([5, 3, 2], [1, 4, 4]):
    expected, buffers = reference(counts)
    step = train(counts)
    say([step.steps, close(step.model, expected), same_everywhere(step)])
    say(all(torch.allclose(b, kept, atol=1e-5) for b, kept in zip(step.model.buffers(), buffers[rank])))
"""
    assert run(script, 3, tmp_path) == [[[5, True, True], True, [4, True, True], True]] * 3


@pytest.mark.sweep
def test_beside_other_passes_and_accumulation(tmp_path: Path) -> None:
    script = """
counts = [4, 2]
expected, _ = reference(counts)
for passes in ([ShardOptimizer()], [ShardParameters(min_bytes=64, cost="roofline")], [Recompute("auto")]):
    step = train(counts, *passes)
    with step.whole_parameters():
        say([close(step.model, expected), step.steps])
step = train([4, 3], every=2)
say([close(step.model, reference([4, 3], every=2)[0]), step.steps])
step = train(counts, MixedPrecision("bfloat16"))
say([same_everywhere(step), step.steps])
"""
    assert run(script, 2, tmp_path) == [[[True, 4], [True, 4], [True, 4], [True, 2], [True, 4]]] * 2


@pytest.mark.sweep
def test_ranks_weigh_by_their_rows(tmp_path: Path) -> None:
    script = """
rows = [6, 2]
step = train([3, 2], rows=rows)
say([close(step.model, reference([3, 2], rows=rows)[0]), same_everywhere(step)])
even = train([2, 2], rows=[4, 4])
plain = train([2, 2])
say([torch.equal(one, other) for one, other in zip(even.model.parameters(), plain.model.parameters())].count(False))
say(sorted(even.programs))
"""
    first, second = run(script, 2, tmp_path)
    assert first == second == [[True, True], 0, ["first update", "update"]]


@pytest.mark.sweep
def test_a_rank_without_any_batch(tmp_path: Path) -> None:
    script = """
step = train([2, 0], example=(batch(1, 0),))
say([close(step.model, reference([2, 0])[0]), same_everywhere(step), step.steps])
try:
    train([2, 0])
except graphopt.GraphoptError as error:
    say("join(example=batch)" in str(error))
"""
    assert run(script, 2, tmp_path) == [[[True, True, 2], True]] * 2


@pytest.mark.sweep
def test_an_exception_inside_is_not_waited_for(tmp_path: Path) -> None:
    script = """
step = train([1, 1])
try:
    with step.join():
        raise KeyError("mine")
except KeyError as error:
    say(error.args[0])
with step.join():
    step(batch(rank, 7))
try:
    with step.join(), step.join():
        pass
except graphopt.GraphoptError as error:
    say("one around all batches" in str(error))
"""
    assert run(script, 2, tmp_path) == [["mine", True]] * 2


@pytest.mark.sweep
def test_what_takes_all_ranks_is_refused_inside(tmp_path: Path) -> None:
    script = f"""
step = train([1, 1], ShardParameters(min_bytes=64, cost="roofline"))
found = []
with step.join():
    for call in (lambda: step.evaluate(batch(0, 0)), step.full_state_dict, step.synchronize,
                 lambda: graphopt.checkpoint.save({str(tmp_path / "run")!r}, step),
                 lambda: graphopt.checkpoint.load({str(tmp_path / "run")!r}, {{"step": step}})):
        try:
            call()
        except graphopt.GraphoptError as error:
            found.append("some may have ended" in str(error))
say(found)
say(step.evaluate(batch(0, 0)).isfinite().item())
plain = train([1, 1])
with plain.join():
    say(plain.evaluate(batch(0, 0)).isfinite().item())
"""
    assert run(script, 2, tmp_path) == [[[True] * 5, True, True]] * 2


def test_one_process_trains_as_without() -> None:
    x, results = torch.randn(3, 4), []
    for joined in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        step = graphopt.optimize_step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=mean_square)
        with step.join() if joined else torch.enable_grad():
            results.append([step(x) for _ in range(3)])
    assert all(map(torch.equal, *results))


def test_what_averages_something_else_is_refused() -> None:
    with pytest.raises(GraphoptError, match="local-sgd lets ranks train by themselves"):
        joined_group(graphopt.Pipeline("data-parallel,local-sgd"))
