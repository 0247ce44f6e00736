"""Exchanges over gloo, from rank to rank and around a ring: what arrives, in which memory, and when a rank is gone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from graphopt.ir.ops.communication.collectives import REDUCE_SCATTER_SUM
from tests.support.ranks import run_ranks

SAME = """
from graphopt import measure_peak
from graphopt.ir.ops.communication.collectives import ALL_GATHER, REDUCE_SCATTER_SUM, WAIT
from graphopt.ir.ops.communication.ring import PIECE

group, wrong = dist.group.WORLD.group_name, []
most = PIECE // 4
generator = torch.Generator().manual_seed(0)
for length in (0, 1, 7, most - 1, most, most + 1, 3 * most + 5):
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        sent = [torch.randint(0, 30, (world * length, 2), generator=generator).to(dtype) for _ in range(world)]
        summed = sum(mine[rank * length : (rank + 1) * length].to(torch.int64) for mine in sent).to(dtype)
        one = REDUCE_SCATTER_SUM(sent[rank].clone(), world, group)
        two = ALL_GATHER(sent[rank][:length], world, group)
        wholes = torch.cat([mine[:length] for mine in sent])
        if not (torch.equal(WAIT(two), wholes) and torch.equal(WAIT(one), summed)):
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
from graphopt.ir.ops.communication.collectives import ALL_GATHER, REDUCE_SCATTER_SUM, WAIT
import graphopt

group, wrong = dist.group.WORLD.group_name, 0
for step in range(60):
    parts = [torch.arange(world * 8.0) + 100 * rank + number + step for number in range(16)]
    started = [REDUCE_SCATTER_SUM(part, world, group) for part in parts]
    gathered = [ALL_GATHER(torch.full((3,), 16.0 * rank + number), world, group) for number in range(16)]
    sums = torch.full((4,), float(rank))
    dist.all_reduce(sums)
    for number, exchanged in reversed(list(enumerate(started))):
        expected = sum(torch.arange(8.0) + 8 * rank + 100 * other + number + step for other in range(world))
        wrong += not torch.equal(WAIT(exchanged), expected)
        expected = torch.cat([torch.full((3,), 16.0 * other + number) for other in range(world)])
        wrong += not torch.equal(WAIT(gathered[number]), expected)
say(wrong)
sent = torch.ones(1_000_000)
WAIT(ALL_GATHER(sent, world, group))
result = [None]

def gather():
    result[0] = WAIT(ALL_GATHER(sent, world, group))

say(graphopt.measure_peak(gather).allocated_peak_bytes)
whole = torch.ones(world * 1_000_000)

def scatter():
    result[0] = WAIT(REDUCE_SCATTER_SUM(whole, world, group))

say(graphopt.measure_peak(scatter).allocated_peak_bytes)

def scatter_and_forget():
    sent = torch.ones(world * 1_000_000)
    started = REDUCE_SCATTER_SUM(sent, world, group)
    del sent
    result[0] = WAIT(started)
    torch.ones(world * 1_000_000)

say(graphopt.measure_peak(scatter_and_forget).allocated_peak_bytes)
"""


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.sweep), 3])
def test_many_are_under_way_and_nothing_but_the_result_takes_memory(tmp_path: Path, world: int) -> None:
    for wrong, gathered, scattered, forgotten in run_ranks(MANY, world, tmp_path / "store"):
        assert wrong == 0
        assert gathered == world * 4_000_000
        assert scattered == 4_000_000
        assert forgotten == 4_000_000 + world * 4_000_000, "what was sent is gone when it has been waited for"


GONE = """
import time
from graphopt.ir.ops.communication.collectives import ALL_GATHER, REDUCE_SCATTER_SUM, WAIT

group = dist.group.WORLD.group_name
WAIT(ALL_GATHER(torch.ones(4), world, group))
if rank == 1:
    os._exit(3)
time.sleep(0.5)
started = [REDUCE_SCATTER_SUM(torch.ones(world * 300_000), world, group) for _ in range(3)]
for exchange in [*started, None]:
    try:
        WAIT(ALL_GATHER(torch.ones(3_000_000), world, group) if exchange is None else exchange)
        say("nothing")
    except RuntimeError as error:
        say("imed out" not in str(error))
sys.exit(0)
"""


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.sweep), 3])
def test_a_rank_that_is_gone_is_an_error_and_no_wait(tmp_path: Path, world: int) -> None:
    codes = [3 if rank == 1 else 0 for rank in range(world)]
    found = run_ranks(GONE, world, tmp_path / "store", codes=codes)
    assert found == [[] if code else [True] * 4 for code in codes]


INTERRUPTED = """
import signal, threading
from graphopt.ir.ops.communication.collectives import REDUCE_SCATTER_SUM, WAIT

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell runs the tests in the background
group = dist.group.WORLD.group_name
first = WAIT(REDUCE_SCATTER_SUM(torch.ones(world), world, group))
store = dist.distributed_c10d._get_default_store()
if rank == 0:
    started = REDUCE_SCATTER_SUM(torch.ones(world), world, group)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        WAIT(started)
        say("nothing")
    except KeyboardInterrupt:
        say("interrupted")
    store.set("interrupted", "yes")
else:
    store.wait(["interrupted"])
    started = REDUCE_SCATTER_SUM(torch.ones(world), world, group)
    say(WAIT(started).tolist())
say(WAIT(REDUCE_SCATTER_SUM(torch.full((world,), 2.0), world, group)).tolist())
"""


def test_an_interruption_is_heard_while_the_others_are_waited_for_and_what_follows_is_right(tmp_path: Path) -> None:
    assert run_ranks(INTERRUPTED, 2, tmp_path / "store") == [["interrupted", [4.0]], [[2.0], [4.0]]]


def test_an_example_run_knows_the_shape() -> None:
    with torch._subclasses.FakeTensorMode():
        found = REDUCE_SCATTER_SUM(torch.empty(4, 5), 2, "0")
    assert (tuple(found.shape), found.is_contiguous()) == ((2, 5), True)
