"""Temporaries on CUDA devices that are only named: which device is asked, and what stands where none can be."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from graphopt.analysis import workspace
from graphopt.analysis.costs.isolated_call import LARGEST_CALL
from graphopt.analysis.smaller_calls import SmallerCall
from graphopt.ir.node import NodeInfo, Phase, set_info, set_value

THERE = torch.device("cuda:1")


def call(op: Any, *shapes: tuple[int, ...], device: torch.device = THERE, more: tuple[Any, ...] = ()) -> fx.Node:
    """A call of an op on example values on a device."""
    graph = fx.Graph()
    with FakeTensorMode():
        values = [torch.empty(shape, device=device) for shape in shapes]
        inputs = [graph.placeholder(f"x{index}") for index in range(len(values))]
        for node, value in zip(inputs, values, strict=True):
            set_value(node, value)
        node = graph.call_function(op, (*inputs, *more))
        set_value(node, values[0])
        set_info(node, NodeInfo(Phase.FORWARD))
    return node


@pytest.fixture(autouse=True)
def _measured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "_measured", {})


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, torch.device]]:
    """What is asked of two devices; the call leaves 100 bytes, 40 below its peak, on whichever is current."""
    found: list[tuple[str, torch.device]] = []

    @contextlib.contextmanager
    def current(device: torch.device) -> Iterator[None]:
        found.append(("current", device))
        yield

    def answer(name: str, value: int) -> Any:
        def ask(device: torch.device) -> int:
            found.append((name, device))
            return value

        return ask

    cuda = SimpleNamespace(
        is_available=lambda: True, device=current, synchronize=answer("synchronize", 0),
        reset_peak_memory_stats=answer("reset", 0), max_memory_allocated=answer("peak", 140),
        memory_allocated=answer("end", 100),
    )  # fmt: skip
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: contextlib.nullcontext())
    monkeypatch.setattr(workspace, "prepare", lambda node, fill: (lambda: None, (), {}))
    return found


def test_the_device_of_the_call_is_asked_whatever_device_is_current(asked: list[tuple[str, torch.device]]) -> None:
    (usage,) = workspace.measured_usage([call(torch.ops.aten.sin.default, (8, 8))])
    assert usage.temporary == 40
    assert [name for name, _ in asked] == ["current", "synchronize", "reset", "synchronize", "peak", "end"]
    assert {device for _, device in asked} == {THERE}


def test_a_call_of_a_program_without_data_is_run_on_the_device_that_is_named(
    asked: list[tuple[str, torch.device]],
) -> None:
    ops = (torch.ops.aten._fft_r2c.default, torch.ops.aten.sin.default)  # the second takes nothing that is chosen
    found = workspace.measured_temporaries([call(op, (8, 8), device=torch.device("cpu")) for op in ops], THERE)
    assert found == {"aten._fft_r2c.default(float32[8, 8])": 40}
    assert {device for _, device in asked} == {THERE}


def test_arguments_are_made_on_the_device_that_is_named() -> None:
    node = call(torch.ops.aten._fft_r2c.default, (8, 8), device=torch.device("cpu"))
    made: list[torch.device] = []

    def fill(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        made.append(device)
        return torch.zeros(count, dtype=dtype)

    workspace._There(node, THERE).prepare(fill)
    assert made == [THERE]


BACKWARD = torch.ops.aten.embedding_dense_backward.default


def embedding(rows: int) -> fx.Node:
    node = call(BACKWARD, (rows, 64), (rows,), more=(1000, -1, False))
    with FakeTensorMode():
        set_value(node.all_input_nodes[1], torch.empty((rows,), dtype=torch.int64, device=THERE))
    return node


def test_a_call_that_cannot_be_measured_is_bounded_by_formula_with_a_warning(
    asked: list[tuple[str, torch.device]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> Any:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(workspace, "prepare", fails)
    with caplog.at_level(logging.WARNING):
        (usage,) = workspace.measured_usage([embedding(8192)])
    assert usage.temporary > 8192 * 8
    assert "could not be measured" in caplog.text
    assert "CUDA out of memory" in caplog.text


def test_a_call_above_the_limit_takes_more_than_a_smaller_one() -> None:
    small, large = workspace.measured_usage([embedding(2**20), embedding(2**25)])
    assert large.temporary >= 16 * small.temporary > 0


def test_a_call_above_the_limit_is_run_smaller_on_its_own_device(
    asked: list[tuple[str, torch.device]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[int, int]] = []

    def prepare(smaller: SmallerCall, fill: object) -> Any:
        made.append((smaller.new, smaller.nbytes))
        return (lambda: None), (), {}

    monkeypatch.setattr(SmallerCall, "prepare", prepare)
    (usage,) = workspace.measured_usage([call(torch.ops.aten.sin.default, (2**20, 1024))])
    assert all(nbytes <= LARGEST_CALL // 32 for _, nbytes in made)
    assert [made[0][0] // made[1][0], len(made)] == [2, 2]
    assert usage.temporary >= 40 * 2**20 // made[0][0]
    assert {device for _, device in asked} == {THERE}


def test_a_call_on_a_device_that_is_not_here_is_bounded_by_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (usage,) = workspace.measured_usage([embedding(8192)])
    assert usage.temporary > 8192 * 8
