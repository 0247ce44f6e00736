"""A folder in which every finished step is kept: killed at any moment, training goes on from the last one."""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import graphopt
from graphopt import GraphoptError, TrainStep
from graphopt.ir.ops.transfers import residents
from graphopt.passes import MixedPrecision, OffloadState
from graphopt.runtime.state.lasting_folder import LastingFolder, finished_step
from tests.support.errors import attempt
from tests.support.forking import start
from tests.support.properties import examples
from tests.support.ranks import run_ranks

RECORD = "finished-step.json"
WAYS: dict[str, tuple[str, ...]] = {"optimizer": ("optimizer",), "all": ("optimizer", "parameters")}


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def training(folder: Path | str = "", way: str = "all", *more: Any) -> TrainStep:
    """A step with dropout, statistics of a norm, and a state for each parameter; without a folder a plain one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 24), nn.BatchNorm1d(24), nn.Dropout(0.5), nn.Linear(24, 6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    passes = [OffloadState(WAYS[way], folder=str(folder), min_bytes=8, cost="roofline")] if folder else []
    return graphopt.optimize_step(model, optimizer, [*passes, *more], loss=loss)


def batch(number: int) -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(number))


def contents(step: TrainStep) -> list[torch.Tensor]:
    state = step.optimizer.state_dict()["state"]
    return [*step.model.state_dict().values(), *(value for kept in state.values() for value in kept.values())]


def same(one: TrainStep, other: TrainStep) -> bool:
    return all(map(torch.equal, contents(one), contents(other)))


def plain(steps: int) -> TrainStep:
    """Training without a stop."""
    step = training()
    for number in range(steps):
        step(batch(number))
    return step


# --- going on --------------------------------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("way", WAYS)
def test_a_new_step_goes_on_from_the_last_finished_one(tmp_path: Path, way: str) -> None:
    step = training(tmp_path, way)
    for number in range(3):
        step(batch(number))
    del step
    gc.collect()
    again = training(tmp_path, way)
    assert graphopt.checkpoint.load(tmp_path, again) == {}
    assert again.steps == 3
    rest = [again(batch(number)) for number in (3, 4, 5)]  # before the others, which draw from the same generator
    expected = training()
    losses = [expected(batch(number)) for number in range(6)]
    assert all(map(torch.equal, rest, losses[3:]))
    assert same(again, expected)


@pytest.mark.sweep
def test_the_state_of_another_way_is_taken_over(tmp_path: Path) -> None:
    step = training(tmp_path, "all", MixedPrecision("float16"))
    for number in range(3):
        step(batch(number))
    del step
    gc.collect()
    again = training(tmp_path, "optimizer", MixedPrecision("float16"))
    graphopt.checkpoint.load(tmp_path, again)
    found = again(batch(3))
    expected = training("", "all", MixedPrecision("float16"))
    losses = [expected(batch(number)) for number in range(4)]
    assert torch.equal(found, losses[3])
    assert same(again, expected)
    assert expected.state_dict()["held"]
    for name, value in expected.state_dict()["held"].items():
        assert torch.equal(again.state_dict()["held"][name], value)


def test_a_finished_step_is_read_without_a_step_of_the_same_passes(tmp_path: Path) -> None:
    step = training(tmp_path)
    step(batch(0))
    other = training()
    graphopt.checkpoint.load(tmp_path, other)
    assert same(step, other)
    state = finished_step(tmp_path)
    assert set(state["step"]) == {"model", "optimizer", "sharded", "shards", "step"}


@pytest.mark.sweep
def test_accumulated_batches_count_when_the_update_is_done(tmp_path: Path) -> None:
    step = training(tmp_path).accumulate(2)
    step(batch(0))
    assert not (tmp_path / RECORD).exists()
    step(batch(1))
    assert json.loads((tmp_path / RECORD).read_text())["steps"] == 1


@pytest.mark.sweep
def test_files_of_earlier_processes_are_removed_when_a_new_step_counts(tmp_path: Path) -> None:
    for number in range(3):
        step = training(tmp_path)
        if number:
            graphopt.checkpoint.load(tmp_path, step)
        step(batch(number))
        del step
        gc.collect()
    assert sorted(path.name for path in tmp_path.iterdir()) == [RECORD, "lock", "state-3.bin"]


# --- what is cut short -----------------------------------------------------------------------------------------------


def train(folder: str, way: str) -> None:
    """Train from the last finished step on, until the process is killed."""
    torch.set_num_threads(1)
    step = training(folder, way)
    if Path(folder, RECORD).exists():
        graphopt.checkpoint.load(folder, step)
    for number in range(step.steps, 100_000):
        step(batch(number))


def steps_in(folder: Path) -> int:
    return int(json.loads((folder / RECORD).read_text())["steps"]) if (folder / RECORD).exists() else 0


def kill_again_and_again(folder: Path, way: str, kills: int, seed: int) -> None:
    moments, before = random.Random(seed), 0
    for _ in range(kills):
        (process,) = start(train, [(str(folder), way)])
        while process.is_alive() and steps_in(folder) <= before:
            time.sleep(0.01)
        time.sleep(moments.random() * 0.1)
        assert process.is_alive()
        process.kill()
        process.join()
        step = training()
        graphopt.checkpoint.load(folder, step)
        assert step.steps > before
        before = step.steps
        assert same(step, plain(before))
    found = training(folder, way)
    graphopt.checkpoint.load(folder, found)
    next_one, expected = found(batch(before)), plain(before)
    assert torch.equal(next_one, expected(batch(before)))
    assert same(found, expected)


@pytest.mark.sweep
@pytest.mark.parametrize("way", WAYS)
def test_killed_at_any_moment(tmp_path: Path, way: str) -> None:
    kill_again_and_again(tmp_path, way, kills=3, seed=7)


@pytest.mark.sweep
@pytest.mark.parametrize("way", WAYS)
def test_killed_at_many_moments(tmp_path: Path, way: str) -> None:
    kill_again_and_again(tmp_path, way, kills=25, seed=11)


@pytest.mark.sweep
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("at", [1, 3, 6])
def test_a_step_that_fails_in_its_update_is_noticed_and_taken_back(
    tmp_path: Path, way: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = training(tmp_path, way)
    for number in range(2):
        step(batch(number))
    calls = 0
    put_back = type(residents()).put_back

    def failing(self: Any, *given: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            raise KeyboardInterrupt
        put_back(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(type(residents()), "put_back", failing)
        with pytest.raises(KeyboardInterrupt):
            step(batch(2))
    error = attempt(lambda: step(batch(2)))
    assert "cut short in the middle of its update" in str(error)
    assert f"graphopt.checkpoint.load({str(tmp_path)!r}, step)" in str(error)
    graphopt.checkpoint.load(tmp_path, step)
    assert step.steps == 2
    rest = [step(batch(number)) for number in (2, 3)]
    expected = training()
    losses = [expected(batch(number)) for number in range(4)]
    assert all(map(torch.equal, rest, losses[2:]))
    assert same(step, expected)


def test_a_step_that_fails_before_its_update_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: Any, *given: Any) -> None:
        raise KeyboardInterrupt

    step = training(tmp_path)
    step(batch(0))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        step(torch.zeros(8, 5))
    with monkeypatch.context() as patch:
        patch.setattr(type(residents()), "wait_fetched", failing)
        with pytest.raises(KeyboardInterrupt):
            step(batch(1))  # in forward, which reads parameters from the disk
    step(batch(1))
    assert step.steps == steps_in(tmp_path) == 2


def state_in(folder: Path) -> list[torch.Tensor]:
    step = training()
    graphopt.checkpoint.load(folder, step)
    return contents(step)


@pytest.mark.sweep(cases=("all",))
@pytest.mark.parametrize("way", WAYS)
def test_a_record_that_cannot_be_written_leaves_the_one_before_whole(
    tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    step = training(tmp_path, way)
    for number in range(2):
        step(batch(number))
    generator = torch.get_rng_state()
    counted = [tensor.clone() for tensor in contents(step)]
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", refused)
        for number in (2, 3):
            with pytest.raises(GraphoptError, match="cannot be written"):
                step(batch(number))
            after = torch.get_rng_state()
            assert all(map(torch.equal, state_in(tmp_path), counted))
            assert torch.equal(torch.get_rng_state(), generator)
            torch.set_rng_state(after)
    step(batch(4))
    after = contents(step)
    assert all(map(torch.equal, state_in(tmp_path), after))
    assert same(step, plain(5))


@pytest.mark.sweep
@pytest.mark.parametrize("way", WAYS)
def test_an_interrupt_between_the_record_and_the_tensors(
    tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Any, tensors: list[torch.Tensor]) -> None:
        commit(self, tensors[: len(tensors) // 2])
        raise KeyboardInterrupt

    step, commit = training(tmp_path, way), type(residents()).commit
    step(batch(0))
    with monkeypatch.context() as patch:
        patch.setattr(type(residents()), "commit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            step(batch(1))
    assert steps_in(tmp_path) == 2
    counted = state_in(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(LastingFolder, "finish", lambda *given: None)
        step(batch(2))  # written, and the process is killed before it counts
    assert all(map(torch.equal, state_in(tmp_path), counted))
    step(batch(3))
    after = contents(step)
    assert all(map(torch.equal, state_in(tmp_path), after))


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_steps_that_nobody_loaded_are_not_written_over(tmp_path: Path) -> None:
    step = training(tmp_path)
    step(batch(0))
    error = attempt(lambda: training(tmp_path)(batch(0)))
    assert "another process, or another step of this one" in str(error)
    del step, error
    gc.collect()
    error = attempt(lambda: training(tmp_path)(batch(0)))
    assert "holds the finished steps of an earlier process" in str(error)
    assert "before the first call, or give another folder" in str(error)
    assert steps_in(tmp_path) == 1


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    error = attempt(lambda: training(tmp_path / "file" / "run")(batch(0)))
    assert "cannot be used" in str(error)


@pytest.mark.sweep
def test_several_ranks_are_refused_with_the_way_out(tmp_path: Path) -> None:
    script = f"""
import graphopt
from tests.runtime.state.test_lasting_folder import batch, training
try:
    training({str(tmp_path / "run")!r})(batch(0))
except graphopt.GraphoptError as error:
    say(str(error))
"""
    for (found,) in run_ranks(script, 2, tmp_path / "store"):
        assert "for one process only" in found
        assert "graphopt.checkpoint.save" in found


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished step."""
    folder = tmp_path_factory.mktemp("finished")
    step = training(folder)
    step(batch(0))
    return folder


VALUES = [None, True, 0, -1, 3, 2**80, 2**62, 0.5, "", "../state-1.bin", "f32", [], [1], {}, {"tensor": "/x"}]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, item in inner for found in places(item, (*path, key)))]


@given(data=st.data())
@examples(60)
def test_a_changed_record_is_read_or_refused(finished: Path, data: st.DataObject) -> None:
    record = json.loads((finished / RECORD).read_text())
    changed = copy.deepcopy(record)
    path = data.draw(st.sampled_from(places(record)[1:]))
    owner = changed
    for key in path[:-1]:
        owner = owner[key]
    owner[path[-1]] = data.draw(st.sampled_from(VALUES))
    folder = finished / "changed"
    folder.mkdir(exist_ok=True)
    if not (folder / "state-1.bin").exists():
        (folder / "state-1.bin").symlink_to(finished / "state-1.bin")
    (folder / RECORD).write_text(json.dumps(changed))
    with contextlib.suppress(GraphoptError):
        assert isinstance(finished_step(folder), dict)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"version": 1}', '{"version": 9}'])
def test_a_record_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / RECORD).write_text(text)
    attempt(lambda: graphopt.checkpoint.load(tmp_path, training()))
