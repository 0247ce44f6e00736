"""Ranks that die, hang or fail: the others end with an error that names them, and training continues where it was."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import graphopt
from graphopt import GraphoptError
from graphopt.passes import DataParallel
from graphopt.runtime.ranks.diagnosis import classify
from graphopt.runtime.ranks.heartbeat import Here, heartbeat, patience
from graphopt.runtime.ranks.messages import Report, Verdict, publish, published, read_reports
from graphopt.runtime.ranks.places import follow, place_of
from tests.support.failing import FailAt, FailSaving, Outcome, Task, resumed, run_tasks
from tests.support.ranks import free_address
from tests.support.sweeping import sweeping

# --- who is at fault -------------------------------------------------------------------------------------------------

WORKING = Report("a", 7, "step 3, backward: mm of 2", False, 4.0, "", False, False)
WAITING = replace(WORKING, where="step 3, exchange: wait_tensor (data-parallel: 2.weight)", exchanges=True)
VICTIM = replace(WAITING, failed="exchange")


def test_a_rank_without_signs_of_life_is_dead() -> None:
    found = classify({0: VICTIM, 1: WORKING, 2: WAITING}, beating={2})
    assert list(found.ranks) == [1]
    assert "gives no sign of life any more" in found.ranks[1]
    assert "last seen in step 3, backward: mm of 2" in found.ranks[1]


def test_a_rank_that_goes_on_without_waiting_for_others_hangs() -> None:
    found = classify({0: VICTIM, 1: WORKING, 2: WAITING}, beating={1, 2})
    assert found.ranks == {1: "hangs, or is far behind: it has been in step 3, backward: mm of 2 for 4.0 s"}


def test_while_one_rank_is_dead_another_that_is_behind_is_not_at_fault() -> None:
    assert list(classify({0: VICTIM, 1: WORKING, 2: WAITING}, beating={1}).ranks) == [2]


def test_ranks_that_end_fail_or_never_come_are_named_so() -> None:
    found = classify(
        {0: VICTIM, 1: replace(WORKING, failed="ValueError: bad"), 2: replace(WORKING, ended=True), 3: None}, {1}
    ).ranks
    assert found[1] == "failed by itself: ValueError: bad (in step 3, backward: mm of 2)"
    assert found[2] == "ended its program (last seen in step 3, backward: mm of 2)"
    assert "gave no sign of life" in found[3]


reports = st.none() | st.builds(
    Report, st.sampled_from("ab"), st.integers(0, 9), st.just("step 1"), st.booleans(), st.floats(0, 9),
    st.sampled_from(["", "exchange", "ValueError: bad"]), st.booleans(), st.booleans(),
)  # fmt: skip


@given(st.dictionaries(st.integers(0, 9), reports, min_size=1), st.sets(st.integers(0, 9)))
def test_victims_are_never_at_fault(found: dict[int, Report | None], beating: set[int]) -> None:
    verdict = classify(found, beating)
    victims = {rank for rank, report in found.items() if report and report.failed == "exchange"}
    waiting = {r for r, report in found.items() if report and report.exchanges and r in beating}
    waiting -= {r for r, report in found.items() if report and (report.failed or report.ended)}
    assert not victims & set(verdict.ranks)
    assert not waiting & set(verdict.ranks)
    assert set(verdict.tokens) == set(verdict.ranks)
    assert (None in found.values()) <= bool(verdict.ranks)


# --- signs of life ---------------------------------------------------------------------------------------------------


@pytest.fixture
def hash_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[dist.HashStore]:
    """The store of a process group of three ranks of which only this one exists."""
    monkeypatch.setenv("GRAPHOPT_RANK_TIMEOUT", "0.15")
    store = dist.HashStore()
    dist.init_process_group("fake", store=store, rank=0, world_size=3)
    yield store
    if dist.is_initialized():
        dist.destroy_process_group()
    until(lambda: not beating())


def beating() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "graphopt-heartbeat"]


def until(condition: object) -> None:
    end = time.monotonic() + 30
    while not condition() and time.monotonic() < end:  # type: ignore[operator]
        time.sleep(0.01)
    assert condition()  # type: ignore[operator]


@pytest.mark.usefixtures("hash_store")
def test_a_rank_reports_what_it_does_until_its_group_ends() -> None:
    here = Here()
    heart = heartbeat(here)
    assert heart is not None
    assert heartbeat(here) is heart

    def own() -> Report:
        report = read_reports(heart.store, [0])[0]
        assert report is not None
        return report

    first = own()
    here.begin(4)
    until(lambda: own().where == "step 4" and own().beat > first.beat)
    here.end("step 4")
    heart.hurry()
    until(lambda: own().where == "what follows step 4")
    assert read_reports(heart.store, [2, 0, 1]) == {2: None, 0: own(), 1: None}
    dist.destroy_process_group()
    until(lambda: not beating())
    assert heartbeat(here) is None


@pytest.mark.usefixtures("hash_store")
def test_the_first_verdict_holds_for_all_ranks_until_its_ranks_start_anew() -> None:
    heart = heartbeat(Here())
    assert heart is not None
    own = read_reports(heart.store, [0])[0]
    assert own is not None
    first = Verdict({0: "hangs", 2: "gave no sign of life"}, {0: own.token, 2: ""})
    assert published(heart.store) is None
    assert publish(heart.store, first) == first
    assert publish(heart.store, Verdict({1: "hangs"}, {1: ""})) == first
    assert published(heart.store) == first
    until(lambda: heart.verdict == first)
    stale = Verdict({0: "hangs"}, {0: "of an earlier process"})
    heart.store.delete_key("graphopt/ranks/verdict")
    publish(heart.store, stale)
    assert published(heart.store) is None
    assert publish(heart.store, first) == first


def test_where_the_store_cannot_be_used_training_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = graphopt.optimize_step(
            model, optimizer, [DataParallel()], loss=lambda model, x: model(x).square().mean()
        )
        with caplog.at_level(logging.DEBUG, "graphopt"):
            for _ in range(2):
                step(torch.randn(2, 4))
    finally:
        dist.destroy_process_group()
    said = [record.message for record in caplog.records if "will not be named" in record.message]
    assert len(said) == 1
    assert not beating()


class Forgetful:
    """A store that takes what is written and forgets it, as that of the fake backend does since torch 2.14."""

    def clone(self) -> Forgetful:
        return self

    def set_timeout(self, seconds: object) -> None:
        pass

    def set(self, key: str, text: str) -> None:
        pass

    def get(self, key: str) -> bytes:
        return b""


@pytest.mark.usefixtures("hash_store")
def test_a_store_that_forgets_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("graphopt._torch.default_store", Forgetful)
    with caplog.at_level(logging.DEBUG, "graphopt"):
        assert heartbeat(Here()) is None
        assert heartbeat(Here()) is None
    (said,) = [record.message for record in caplog.records]
    assert said.startswith("ranks that die will not be named: ")
    assert said.endswith("it does not keep what is written to it")
    assert not beating()


@pytest.mark.parametrize("text", ["soon", "0", "-1", "inf"])
def test_a_wrong_patience_is_an_error(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("GRAPHOPT_RANK_TIMEOUT", text)
    with pytest.raises(GraphoptError, match="GRAPHOPT_RANK_TIMEOUT is "):
        patience()


def test_the_call_that_raised_is_found_by_its_line() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Embedding(4, 4))
    model.forward = lambda x, i: (model[0](x) + model[1](i)).sum()  # type: ignore[method-assign]
    program = graphopt.capture(model, (torch.randn(2, 4), torch.tensor([0, 1])), loss=lambda m, x, i: m(x, i))
    module = program.to_graph_module()
    follow(module)
    inputs = [{"parameter": dict(model.named_parameters()).get(spec.target)}.get(spec.role) for spec in program.inputs]
    batch = iter([torch.randn(2, 4), torch.tensor([0, 9])])
    with pytest.raises(IndexError) as raised:
        module.forward([next(batch) if tensor is None else tensor for tensor in inputs])
    place = place_of(raised.value)
    assert place is not None
    assert (str(place), place.exchanges) == ("forward: embedding of 1", False)
    assert place_of(ValueError()) is None


# --- several processes -----------------------------------------------------------------------------------------------


Folder = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """A new folder by the name of a task."""
    return tmp_path_factory.mktemp


def killed(folder: Path, phase: str) -> tuple[Outcome, Outcome]:
    """How a task ended whose rank 1 was killed in a phase, and the same task continued."""
    task = Task(folder, fail=FailAt(phase, step=4, rank=1))
    outcome = run_tasks({phase: task})[phase]
    return outcome, run_tasks({phase: resumed(task)})[phase]


LONG = ("dies early", "measured", "hangs early", "four", "fewer", "drop-in")
"""Tasks whose tests are left to `make sweep`."""


@pytest.fixture(scope="module")
def ended(folder: Folder, request: pytest.FixtureRequest) -> dict[str, Outcome]:
    """Everything else that happens to ranks, all at once, by name; without the longest where nothing is swept."""
    tasks = {
        "uninterrupted": Task(folder("whole")),
        "hangs": Task(folder("hangs"), fail=FailAt("forward", 3, rank=1, how="hang"), timeout=8),
        "dies early": Task(folder("dies"), early="die", timeout=8),
        "measured": Task(folder("measured"), early="die when measured", way="sparse"),
        "hangs early": Task(folder("early"), early="hang", timeout=8),
        "four": Task(folder("four"), world=4, fail=FailAt("sync", 3, rank=2), address=free_address()),
        "holder": Task(folder("holder"), fail=FailAt("forward", 3, rank=0), address=free_address()),
        "saves": Task(folder("saves"), fail=FailSaving("written", 2, rank=1), steps=(3,), way="shard-parameters"),
        "gathers": Task(folder("gathers"), fail=FailSaving("gathered", 0, rank=1), steps=(3,), way="shard-parameters"),
        "raises": Task(folder("raises"), fail=FailAt("forward", 3, rank=1, how="raise")),
        "fewer": Task(folder("fewer"), steps=(4, 2)),
        "drop-in": Task(folder("drop-in"), fail=FailAt("sync", 3, rank=1), way="drop-in"),
    }
    return run_tasks({name: task for name, task in tasks.items() if name not in LONG or sweeping(request)})


@pytest.mark.parametrize("phase", ["sync", *(pytest.param(p, marks=pytest.mark.sweep) for p in ("forward", "update"))])
def test_a_killed_rank_is_named_and_training_continues_bit_exact(
    phase: str, tmp_path: Path, ended: dict[str, Outcome]
) -> None:
    outcome, again = killed(tmp_path, phase)
    found = outcome.found[0]
    assert outcome.codes == [0, -9]
    assert found["ranks"] == (1,)
    assert "rank 1 gives no sign of life any more" in found["error"]
    assert "(last seen in " in found["error"]
    assert re.search("here: rank 0 was in (step|what ranks exchange behind step) ", found["error"])
    assert "start all ranks again from the state of the last step" in found["error"]
    assert "onnection" in found["cause"]
    uninterrupted = ended["uninterrupted"]
    assert again.codes == uninterrupted.codes == [0, 0]
    expected = uninterrupted.found[0]["parameters"]
    assert all(torch.equal(rank["parameters"], expected) for rank in (*uninterrupted.found, *again.found))


def test_a_hanging_rank_is_named_when_the_group_times_out(ended: dict[str, Outcome]) -> None:
    outcome = ended["hangs"]
    assert outcome.codes == [0, None]
    assert outcome.found[0]["ranks"] == (1,)
    said = outcome.found[0]["error"]
    assert "rank 1 hangs, or is far behind: it has been in step 3, forward: fail" in said


def test_a_rank_killed_while_all_save_a_checkpoint_is_named(ended: dict[str, Outcome]) -> None:
    outcome = ended["saves"]
    assert outcome.codes == [0, -9]
    assert outcome.found[0]["ranks"] == (1,)
    said = outcome.found[0]["error"]
    assert "rank 1 gives no sign of life any more" in said
    assert "here: rank 0 was in the saving of a checkpoint when its exchange failed" in said


def test_a_rank_killed_while_all_gather_parameters_is_named(ended: dict[str, Outcome]) -> None:
    outcome = ended["gathers"]
    assert outcome.codes == [0, -9]
    assert outcome.found[0]["ranks"] == (1,)
    assert "here: rank 0 was in the gathering of whole parameters when" in outcome.found[0]["error"]


@pytest.mark.sweep
def test_a_rank_killed_while_all_load_a_checkpoint_is_named(tmp_path: Path) -> None:
    task = Task(tmp_path, steps=(2,), way="shard-parameters")
    assert run_tasks({"saves": task})["saves"].codes == [0, 0]
    again = replace(task, steps=(3,), resume=True, fail=FailSaving("read", 0, rank=1))
    outcome = run_tasks({"loads": again})["loads"]
    assert outcome.codes == [0, -9]
    assert outcome.found[0]["ranks"] == (1,)
    assert "here: rank 0 was in the loading of a checkpoint when its exchange failed" in outcome.found[0]["error"]


@pytest.mark.sweep
def test_all_survivors_of_four_name_the_same_rank(ended: dict[str, Outcome]) -> None:
    found = ended["four"].found
    assert ended["four"].codes == [0, 0, -9, 0]
    assert [found[rank]["ranks"] for rank in (0, 1, 3)] == [(2,), (2,), (2,)]
    assert len({found[rank]["error"].split("\n")[0] for rank in (0, 1, 3)}) == 1


def test_the_rank_that_holds_the_store_is_named(ended: dict[str, Outcome]) -> None:
    found = ended["holder"].found[1]
    assert ended["holder"].codes == [-9, 0]
    assert found["ranks"] == (0,)
    assert "rank 0 does not answer any more, and with it the store" in found["error"]


def test_a_rank_that_raises_is_named_with_its_error(ended: dict[str, Outcome]) -> None:
    found = ended["raises"].found
    assert ended["raises"].codes == [0, 0]
    assert found[1]["error"] == "this batch is broken"
    assert found[0]["ranks"] == (1,)
    assert "rank 1 failed by itself: ValueError: this batch is broken (in step 3, forward: fail" in found[0]["error"]


@pytest.mark.sweep
def test_a_rank_with_fewer_batches_is_named(ended: dict[str, Outcome]) -> None:
    found = ended["fewer"].found
    assert ended["fewer"].codes == [0, 0]
    assert "parameters" in found[1]
    assert "rank 1 ended its program (last seen in what follows step 2)" in found[0]["error"]


@pytest.mark.sweep
@pytest.mark.parametrize(("early", "code"), [("dies", -9), ("hangs", None)])
def test_a_rank_that_never_comes_is_named(early: str, code: int | None, ended: dict[str, Outcome]) -> None:
    outcome = ended[f"{early} early"]
    assert outcome.codes == [0, code]
    assert outcome.found[0]["ranks"] == (1,)
    said = outcome.found[0]["error"]
    assert "rank 1 gave no sign of life: its process ended before its first step" in said


@pytest.mark.sweep
def test_a_rank_killed_while_ranks_agree_on_what_to_rewrite_is_named(ended: dict[str, Outcome]) -> None:
    found = ended["measured"].found[0]
    assert ended["measured"].codes == [0, -9]
    assert found["ranks"] == (1,)
    assert "rank 1 gives no sign of life any more" in found["error"]
    assert "here: rank 0 was in the capture of a program, behind step 0" in found["error"]
    assert "onnection" in found["cause"]


@pytest.mark.sweep
def test_a_rank_killed_in_a_drop_in_backward_is_named(ended: dict[str, Outcome]) -> None:
    found = ended["drop-in"].found[0]
    assert ended["drop-in"].codes == [0, -9]
    assert found["ranks"] == (1,)
    assert "here: rank 0 was in step 3, exchange: wait_tensor (data-parallel: " in found["error"]


# --- every rank at every phase ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def three(folder: Folder) -> Outcome:
    """Three ranks that nothing happens to."""
    return run_tasks({"three": Task(folder("three"), world=3)})["three"]


@pytest.mark.sweep
@pytest.mark.parametrize("phase", ["forward", "backward", "sync", "update"])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_whoever_is_killed_wherever_is_named_and_training_continues(
    phase: str, rank: int, three: Outcome, folder: Folder
) -> None:
    """At two steps; both survivors name the rank, and the task continued ends as one without a failure."""
    tasks = {
        f"{phase} {step}": Task(folder(f"{phase}-{step}"), world=3, fail=FailAt(phase, step=step, rank=rank))
        for step in (2, 5)
    }
    for outcome in run_tasks(tasks).values():
        survivors = [outcome.found[other] for other in range(3) if other != rank]
        assert outcome.codes == [-9 if other == rank else 0 for other in range(3)]
        assert [found["ranks"] for found in survivors] == [(rank,), (rank,)]
    for again in run_tasks({name: resumed(task) for name, task in tasks.items()}).values():
        assert again.codes == three.codes == [0, 0, 0]
        assert all(torch.equal(found["parameters"], three.found[0]["parameters"]) for found in again.found)
