"""A stand-in in the place of torch's trace: for which models there is one, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from graphopt import GraphoptError, Program
from graphopt.capture import CaptureSession
from graphopt.capture.joint.replayed_trace import not_replayed, replay_trace
from tests.support.running import X, network, sgd
from tests.support.storing import count, drop_in_run, is_loaded, reasons, use_programs
from tests.support.training import assert_same


class Returns(nn.Module):
    """A linear layer, and one of several results."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.linear, self.what = nn.Linear(8, 8), what

    def forward(self, x: torch.Tensor) -> Any:
        y = self.linear(x)
        if self.what == "argument":
            return y, x
        if self.what == "parameter":
            return y, self.linear.weight
        first, second = y[:, :4], y[:, 4:]
        return (first, second) if self.what == "views" else (first * 1.0, second * 1.0)


def _sum(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return sum(result.square().sum() for result in model(x))  # type: ignore[return-value]


@pytest.mark.sweep(but=("parameter",))
@pytest.mark.parametrize("what", ["argument", "parameter", "views"])
def test_results_that_are_other_tensors_are_captured_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    folder = use_programs(tmp_path, monkeypatch)
    torch.manual_seed(0)
    model = Returns(what)
    runs = [drop_in_run(model, sgd, [(X,)] * 2, loss=_sum) for _ in range(2)]
    assert [is_loaded(optimized) for _, optimized in runs] == [False, False]
    assert_same(runs[0][0], runs[1][0], "again")
    assert count(folder) == 0
    assert "returns" in reasons(folder)


def test_several_results_of_their_own_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_programs(tmp_path, monkeypatch)
    torch.manual_seed(0)
    model = Returns("copies")
    first, _ = drop_in_run(model, sgd, [(X,)] * 2, loss=_sum)
    second, loaded = drop_in_run(model, sgd, [(X,)] * 2, loss=_sum)
    assert is_loaded(loaded)
    assert_same(first, second, "loaded")


@pytest.fixture(scope="module")
def joint() -> tuple[CaptureSession, Program]:
    session = CaptureSession(network(), (X,))
    return session, session.lower_forward(session.forward())


@pytest.mark.sweep
def test_the_layout_of_gradients_is_that_of_the_capture(joint: tuple[CaptureSession, Program]) -> None:
    session, program = joint
    assert session.joint is not None
    assert not_replayed(session.joint, program) == ""
    again = replay_trace(program, session.joint.inputs, session.tensors(), [X])
    assert again.trace.backward_layout() == session.joint.trace.backward_layout()
    assert again.trace.gradient_routes() == session.joint.trace.gradient_routes()
    assert again.trace.parameter_order() == session.joint.trace.parameter_order()


def test_a_program_that_does_not_fit_is_an_error(joint: tuple[CaptureSession, Program]) -> None:
    session, program = joint
    assert session.joint is not None
    inputs, tensors = session.joint.inputs, session.tensors()
    with pytest.raises(GraphoptError, match="there is no parameter"):
        replay_trace(program, inputs, {}, [X])
    with pytest.raises(GraphoptError):
        replay_trace(program, inputs[:-1], tensors, [X])
