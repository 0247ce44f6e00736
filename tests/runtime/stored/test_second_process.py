"""What a process that reads a capture does not do again, however large the model is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

import graphopt
from graphopt._torch.capture import written_joint
from graphopt.passes import FitMemory
from graphopt.planning import planner
from graphopt.rewriting.pipeline import Pipeline
from graphopt.runtime.stored import stored_capture
from tests.support.running import adamw, network, rows
from tests.support.storing import drop_in_run, is_loaded, step_run, use_programs
from tests.support.training import assert_same, mean_square


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return use_programs(tmp_path, monkeypatch)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str], list[Any]]:
    """Lists the calls of a function from now on, by their first argument."""

    def count(owner: Any, name: str) -> list[Any]:
        found: list[Any] = []
        own = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            found.append(args[0])
            return own(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)
        return found

    return count


def deep(layers: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))


def test_the_names_of_parameters_are_looked_up_as_often_for_many_as_for_few(
    counted: Callable[[Any, str], list[Any]],
) -> None:
    looks = []
    for layers in (2, 12):
        batch = [(torch.randn(3, 4),)]
        step_run(deep(layers), adamw, batch)
        found = counted(nn.Module, "named_parameters")
        _, step = step_run(deep(layers), adamw, batch)
        assert is_loaded(step)
        looks.append(len(found))
    assert looks[0] == looks[1]


def test_a_step_reads_the_program_of_a_call_when_it_is_called(counted: Callable[[Any, str], list[Any]]) -> None:
    model, batches = network(0.0), [(rows(3),)] * 3
    expected, _ = step_run(model, adamw, batches)
    read = counted(stored_capture.StoredCapture, "read")
    copied = copy.deepcopy(model)
    step = graphopt.optimize_step(copied, adamw(copied.parameters()), loss=mean_square)
    programs = []
    for batch in batches:
        step(*batch)
        programs.append(len(read))
    assert programs == [1, 2, 2]  # the first update, the update
    assert is_loaded(step)
    assert_same(step_run(model, adamw, batches)[0], expected, "read")


def test_no_graph_is_traced_printed_or_copied_for_a_drop_in_model(counted: Callable[[Any, str], list[Any]]) -> None:
    model, batches = network(0.0), [(rows(3),)] * 2
    expected, _ = drop_in_run(model, adamw, batches)
    printed, copied = counted(fx.GraphModule, "print_readable"), counted(fx.GraphModule, "__deepcopy__")
    written = counted(written_joint, "_graph")
    found, optimized = drop_in_run(model, adamw, batches)
    assert is_loaded(optimized)
    assert_same(found, expected, "read")
    assert (printed, copied, len(written)) == ([], [], 1)


def test_graphs_are_printed_where_torch_is_asked_for_them(capfd: pytest.CaptureFixture[str]) -> None:
    torch._logging.set_logs(aot_graphs=True)
    try:
        drop_in_run(network(0.0), adamw, [(rows(3),)])
    finally:
        torch._logging.set_logs()
    assert "Backward graph" in capfd.readouterr().err


@pytest.mark.parametrize("accumulate", [1, 3])
def test_later_calls_find_their_plans(accumulate: int, counted: Callable[[Any, str], list[Any]]) -> None:
    """The calls that accumulate, the first update, the update, and those of a second update on."""
    model, batches = network(0.0), [(rows(512),)] * 7
    passes = [FitMemory("90%", allow=("recompute",), cost="roofline")]
    expected, _ = step_run(model, adamw, batches, passes, accumulate=accumulate)
    ran, searched = counted(Pipeline, "run"), counted(planner, "find_frontier")
    found, step = step_run(model, adamw, batches, passes, accumulate=accumulate)
    assert is_loaded(step)
    assert_same(found, expected, "read")
    assert (ran, searched) == ([], [])


def test_a_drop_in_model_for_any_sizes_reads_each_program_once(counted: Callable[[Any, str], list[Any]]) -> None:
    model, batches = network(0.0), [(rows(size),) for size in (512, 300)]
    drop_in_run(model, adamw, batches)
    made = counted(stored_capture, "from_json")
    drop_in_run(model, adamw, batches)
    assert len(made) == 2


def test_sizes_find_their_plans(counted: Callable[[Any, str], list[Any]]) -> None:
    model, passes = network(0.0), [FitMemory("90%", allow=("recompute",), cost="roofline")]
    batches = [(rows(size),) for size in (512, 300, 200, 512, 300)]
    expected, _ = step_run(model, adamw, batches, passes)
    ran = counted(Pipeline, "run")
    read = counted(stored_capture.StoredCapture, "read")
    found, step = step_run(model, adamw, batches, passes)
    assert is_loaded(step)
    assert_same(found, expected, "read")
    assert ran == []
    assert len({id(each) for each in read}) == 2  # the first size, and all others
