"""Calls too large to be run by themselves: what they take is read off smaller ones that are alike."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from graphopt.analysis import workspace
from graphopt.analysis.smaller_calls import smaller_calls
from graphopt.ir.node import NodeInfo, Phase, set_info, set_value

ATEN = torch.ops.aten


@pytest.fixture(autouse=True)
def _measured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "_measured", {})


def call(op: Any, *tensors: tuple[tuple[int, ...], torch.dtype], more: tuple[Any, ...] = ()) -> fx.Node:
    """A call of an op on example values of these shapes and types, on the CPU."""
    graph = fx.Graph()
    with FakeTensorMode(allow_non_fake_inputs=True):
        values = [torch.empty(shape, dtype=dtype) for shape, dtype in tensors]
        inputs = [graph.placeholder(f"x{index}") for index in range(len(values))]
        for node, value in zip(inputs, values, strict=True):
            set_value(node, value)
        node = graph.call_function(op, (*inputs, *more))
        set_value(node, op(*values, *more))
        set_info(node, NodeInfo(Phase.FORWARD))
    return node


def taken(node: fx.Node) -> int:
    (usage,) = workspace.measured_usage([node])
    return usage.temporary


@pytest.mark.sweep(cases=("convolution",))
@pytest.mark.parametrize("make", [
    lambda rows: call(ATEN.add.Tensor, ((rows, 4096), torch.float32), ((rows, 4096), torch.float64)),
    lambda rows: call(ATEN.mse_loss.default, *[((rows, 4096), torch.float32)] * 2),
    lambda rows: call(ATEN.convolution.default, ((16 * rows, 16, 16, 16), torch.float32),
                      ((16, 16, 3, 3), torch.float32), more=(None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)),
], ids=["converted", "reduced", "convolution"])  # fmt: skip
def test_a_call_above_the_limit_takes_as_much_more_as_it_is_larger(make: Any) -> None:
    measured, large = taken(make(64)), taken(make(2**17))
    assert measured > 0
    assert large == pytest.approx(measured * 2**11, rel=0.05)


def test_bytes_grow_with_the_power_that_two_calls_show(monkeypatch: pytest.MonkeyPatch) -> None:
    node = call(ATEN.sin.default, ((2**20, 1024), torch.float32))
    monkeypatch.setattr(workspace, "_temporaries", lambda calls, _: tuple(c.new**2 for c in calls))
    assert taken(node) == pytest.approx(2**40, rel=0.01)
    monkeypatch.setattr(workspace, "_measured", {})
    monkeypatch.setattr(workspace, "_temporaries", lambda calls, _: tuple(100 * c.new for c in calls))
    assert taken(node) == pytest.approx(100 * 2**20, rel=0.01)


def test_what_does_not_grow_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "_temporaries", lambda *_: (1000, 1000))
    assert taken(call(ATEN.sin.default, ((2**20, 1024), torch.float32))) >= 1000


def test_smaller_calls_keep_the_order_of_strides_and_what_is_expanded() -> None:
    node = call(ATEN.sin.default, ((2**12, 8, 2**16), torch.float32))
    with FakeTensorMode():
        set_value(node.all_input_nodes[0], torch.empty(2**16, 1, 2**12).permute(2, 1, 0).expand(2**12, 8, 2**16))
    made: list[torch.Tensor] = []
    for first, _ in smaller_calls(node, 2**20):
        _, (x,), _ = first.prepare(lambda count, dtype, device: torch.zeros(count, dtype=dtype, device=device))
        made.append(x)
    assert made
    for x in made:
        assert x.stride(1) == 0
        assert x.stride(0) < x.stride(2)
        assert x.untyped_storage().nbytes() <= 2**20


def test_a_call_of_which_no_smaller_one_runs_is_said(caplog: pytest.LogCaptureFixture) -> None:
    node = call(ATEN.sin.default, ((2**20, 1024), torch.float32))
    with FakeTensorMode():
        set_value(node, torch.empty(7))  # what it returns is not what sin returns
    with caplog.at_level(logging.WARNING):
        assert taken(node) == 0
    assert "no smaller call like it runs" in caplog.text
