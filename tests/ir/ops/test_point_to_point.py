"""Exchanges from rank to rank over gloo: what arrives, in which memory, and what happens when a rank is gone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from graphopt.ir.ops.collectives import ALL_TO_ALL
from tests.support.ranks import run_ranks

SAME = """
from graphopt import measure_peak
from graphopt.ir.ops.collectives import ALL_GATHER, ALL_TO_ALL, WAIT
from graphopt.ir.ops.point_to_point import PIECE

group, wrong = dist.group.WORLD.group_name, []
most = PIECE // 4
generator = torch.Generator().manual_seed(0)
for length in (0, 1, 7, most - 1, most, most + 1, 3 * most + 5):
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        sent = [torch.randint(0, 100, (world * length, 2), generator=generator).to(dtype) for _ in range(world)]
        one = ALL_TO_ALL(sent[rank], world, group)
        two = ALL_GATHER(sent[rank][:length], world, group)
        parts = torch.cat([mine[rank * length : (rank + 1) * length] for mine in sent])
        wholes = torch.cat([mine[:length] for mine in sent])
        if not (torch.equal(WAIT(two), wholes) and torch.equal(WAIT(one), parts)):
            wrong.append([length, str(dtype)])
say(wrong)
"""


@pytest.mark.parametrize(
    "world", [2, pytest.param(3, marks=pytest.mark.sweep), pytest.param(4, marks=pytest.mark.sweep)]
)
def test_what_arrives_is_what_was_sent(tmp_path: Path, world: int) -> None:
    """For lengths around those of a piece, and two exchanges that are awaited in the other order."""
    assert run_ranks(SAME, world, tmp_path / "store") == [[[]]] * world


MANY = """
from graphopt.ir.ops.collectives import ALL_GATHER, ALL_TO_ALL, WAIT
import graphopt

group, wrong = dist.group.WORLD.group_name, 0
for step in range(60):
    parts = [torch.arange(world * 8.0) + 100 * rank + number + step for number in range(16)]
    started = [ALL_TO_ALL(part, world, group) for part in parts]
    sums = torch.full((4,), float(rank))
    dist.all_reduce(sums)
    for number, exchanged in reversed(list(enumerate(started))):
        expected = torch.cat([torch.arange(8.0) + 8 * rank + 100 * other + number + step for other in range(world)])
        wrong += not torch.equal(WAIT(exchanged), expected)
say(wrong)
sent = torch.ones(1_000_000)
WAIT(ALL_GATHER(sent, world, group))
result = [None]

def gather():
    result[0] = WAIT(ALL_GATHER(sent, world, group))

say(graphopt.measure_peak(gather).allocated_peak_bytes)
"""


def test_many_are_under_way_and_nothing_but_the_result_takes_memory(tmp_path: Path) -> None:
    for wrong, peak in run_ranks(MANY, 2, tmp_path / "store"):
        assert wrong == 0
        assert peak == 8_000_000


GONE = """
import time
from graphopt.ir.ops.collectives import ALL_GATHER, WAIT

group = dist.group.WORLD.group_name
WAIT(ALL_GATHER(torch.ones(4), world, group))
if rank == 1:
    os._exit(3)
time.sleep(0.5)
begun = time.perf_counter()
try:
    WAIT(ALL_GATHER(torch.ones(3_000_000), world, group))
    say("nothing")
except RuntimeError as error:
    say(time.perf_counter() - begun < 30)
os._exit(0)
"""


def test_a_rank_that_is_gone_is_an_error_and_no_wait(tmp_path: Path) -> None:
    assert run_ranks(GONE, 2, tmp_path / "store", codes=[0, 3]) == [[True], []]


def test_an_example_run_knows_the_shape() -> None:
    with torch._subclasses.FakeTensorMode():
        found = ALL_TO_ALL(torch.empty(5, 4).t(), 2, "0")
    assert (tuple(found.shape), found.is_contiguous()) == ((4, 5), True)
