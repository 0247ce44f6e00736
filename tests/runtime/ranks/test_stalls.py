"""Exchanges that wait on a device for a rank at fault, with stand-ins for the device's events and for its groups."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import graphopt
from graphopt import RankError
from graphopt.ir.ops.communication.collectives import ALL_REDUCE
from graphopt.passes import DataParallel
from graphopt.runtime.ranks import heartbeat as heartbeats
from graphopt.runtime.ranks import stalls, watch
from graphopt.runtime.ranks.messages import Report, published, write_report
from graphopt.runtime.ranks.stalls import Pending, Stall, device_of_exchanges
from tests.support.forking import end, start

PATIENCE = 0.15

_distributed: Any = dist  # torch exports the classes of stores to no checker


class Event:
    """A stand-in for an event of a device, which is ready at once, or never where it is made while ``ready`` is not."""

    ready = True

    def __init__(self) -> None:
        self.ready = type(self).ready

    def record(self, stream: object) -> None:
        pass

    def query(self) -> bool:
        return self.ready


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on exchanges pass for those of a device."""
    monkeypatch.setattr(watch, "device_of_exchanges", lambda program: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(Event, "ready", True)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The store of a group of two ranks, of which only this one exists, and whose exchanges pass for a device's."""
    monkeypatch.setenv("GRAPHOPT_RANK_TIMEOUT", str(PATIENCE))
    stand_in(monkeypatch)
    dist.init_process_group("fake", store=_distributed.HashStore(), rank=0, world_size=2)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def aborted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The groups that have been aborted."""
    found: list[Any] = []
    monkeypatch.setattr("graphopt._torch.abort_group", found.append)
    return found


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch, store: None) -> Any:
    monkeypatch.setattr("graphopt.ir.ops.communication.groups.Group.agree", lambda *given: None)
    return make_step()


def make_step() -> Any:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return graphopt.optimize_step(model, optimizer, [DataParallel()], loss=lambda model, x: model(x).square().mean())


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 30
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    assert condition()


def tell(**changes: Any) -> None:
    """What rank 1 writes of itself."""
    beating = heartbeats._beating
    assert beating is not None
    write_report(beating.store, 1, replace(Report("b", 1, "step 1, forward: mm of 2"), **changes))


@pytest.mark.sweep(but=("changes1-rank 1 ended its program",))
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"failed": "ValueError: bad"}, "rank 1 failed by itself: ValueError: bad"),
        ({"ended": True, "step": 1}, "rank 1 ended its program"),
        ({}, "rank 1 gives no sign of life any more"),
    ],
)
def test_the_next_step_names_the_rank_at_fault(
    step: Any, aborted: list[Any], monkeypatch: pytest.MonkeyPatch, changes: Any, said: str
) -> None:
    step(torch.randn(2, 4))
    monkeypatch.setattr(Event, "ready", False)
    step(torch.randn(2, 4))
    tell(**changes)
    until(lambda: aborted)
    assert aborted == [dist.group.WORLD]
    assert heartbeats._beating is not None
    verdict = published(heartbeats._beating.store)
    assert verdict is not None
    assert list(verdict.ranks) == [1]
    for _ in range(2):
        with pytest.raises(RankError, match=said) as caught:
            step(torch.randn(2, 4))
        assert caught.value.ranks == (1,)
        assert "from step 2 on mean nothing" in str(caught.value.__cause__)


def test_a_step_that_blocks_until_its_exchange_is_aborted_gives_no_result(
    step: Any, aborted: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def blocks(device: object) -> None:
        until(lambda: aborted)

    step(torch.randn(2, 4))
    tell(failed="ValueError: bad")
    monkeypatch.setattr(torch.cuda, "current_stream", blocks)
    with pytest.raises(RankError, match="rank 1 failed by itself"):
        step(torch.randn(2, 4))


def test_nothing_is_aborted_while_programs_end(step: Any, aborted: list[Any]) -> None:
    step(torch.randn(2, 4))
    tell(failed="ValueError: bad")
    time.sleep(3 * PATIENCE)
    step(torch.randn(2, 4))
    assert not aborted


@pytest.mark.parametrize(
    "report",
    [
        None,
        Report("b", 1, "step 2", failed="exchange"),
        Report("b", 1, "what follows step 2", ended=True, step=2),
        Report("b", 1, "step 2, backward: mm of 2", step=2, seconds=9.0),
    ],
)
def test_a_rank_that_may_still_come_is_not_to_blame(report: Report | None) -> None:
    store = _distributed.HashStore()
    if report is not None:
        write_report(store, 1, report)
    stall = Stall(0, patience=10.0)
    assert not stall.look(store, Pending(2, (0, 1), ())).ranks


def test_a_program_has_stalled_when_it_does_not_end_within_the_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    stall = Stall(0, PATIENCE)
    monkeypatch.setattr(Event, "ready", False)
    assert not stall.is_stalled(Pending(1, (0, 1), (), Event()))
    old = Pending(1, (0, 1), (), Event(), since=time.monotonic() - 1)
    assert stall.is_stalled(old)
    assert stall.is_stalled(replace(old, event=None))
    monkeypatch.setattr(Event, "ready", True)
    assert not stall.is_stalled(replace(old, event=Event()))


def test_a_group_that_cannot_be_aborted_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses(group: Any) -> None:
        raise RuntimeError("no abort")

    monkeypatch.setattr("graphopt._torch.abort_group", refuses)
    stalls.abort(["group"]).join()
    assert caplog.messages == [
        "a process group could not be aborted, and ends with its own timeout: RuntimeError: no abort"
    ]


@pytest.mark.parametrize(
    ("backend", "device", "found"),
    [
        ("nccl", "cuda:1", torch.device("cuda", 1)),
        ("cpu:gloo,cuda:nccl", "cuda:1", torch.device("cuda", 1)),
        ("cpu:gloo,cuda:nccl", "cpu", None),
        ("gloo", "cpu", None),
        ("gloo", "cuda:1", None),
    ],
)
@pytest.mark.usefixtures("store")
def test_exchanges_wait_on_a_device_where_nccl_makes_them(
    backend: str, device: str, found: torch.device | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = fx.Graph()
    call = graph.call_function(ALL_REDUCE, (graph.placeholder("x"), "sum", _distributed.group.WORLD.group_name))
    with FakeTensorMode():
        call.meta["val"] = torch.empty(4, device=device)
    monkeypatch.setattr(dist, "get_backend", lambda group: backend)
    program: Any = SimpleNamespace(graph=graph)
    assert device_of_exchanges(program) == found


def two_ranks(folder: Path, rank: int) -> None:
    """Rank 1 dies behind step 2, of which the end never comes on rank 0's device."""
    torch.set_num_threads(1)
    os.environ["GRAPHOPT_RANK_TIMEOUT"] = "0.3"
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    with pytest.MonkeyPatch.context() as monkeypatch:
        aborted: list[Any] = []
        stand_in(monkeypatch)
        monkeypatch.setattr("graphopt._torch.abort_group", aborted.append)
        step = make_step()
        step(torch.ones(2, 4))
        Event.ready = False
        step(torch.ones(2, 4))
        if rank == 1:
            until((folder / "done").exists)
            os.kill(os.getpid(), signal.SIGKILL)
        (folder / "done").touch()
        until(lambda: aborted)
        try:
            step(torch.ones(2, 4))
        except RankError as error:
            torch.save((error.ranks, str(error), str(error.__cause__)), folder / "found.pt")


@pytest.mark.sweep
def test_a_rank_that_dies_while_another_reads_a_loss_is_named(tmp_path: Path) -> None:
    processes = start(two_ranks, [(tmp_path, 0), (tmp_path, 1)])
    assert end(processes, seconds=60) == [0, -9]
    ranks, said, cause = torch.load(tmp_path / "found.pt")
    assert ranks == (1,)
    assert "rank 1 gives no sign of life any more" in said
    assert "here: rank 0 was in what follows step 2" in said
    assert "from step 2 on mean nothing" in cause
