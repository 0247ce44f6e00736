"""A joint graph that is written down says what the traced one says; what is more than that is traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import graphopt
from graphopt import _torch
from graphopt._torch.capture import written_joint
from graphopt.capture.joint.replayed_trace import _StandIn
from graphopt.ir.node import InputSpec
from tests.support.running import network


class Several(nn.Module):
    """Two results, one of whole numbers; a parameter that nothing reads, a frozen one, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.idle = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 4)
        self.second.weight.requires_grad_(False)
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = F.relu(self.first(x * self.scale)) * y
        return self.second(hidden), hidden.argmax(1)


Given = tuple[nn.Module, tuple[torch.Tensor, ...]]

CASES: dict[str, Callable[[], Given]] = {
    "a network": lambda: (network(), (torch.randn(3, 8),)),
    "several results": lambda: (Several(), (torch.randn(3, 4), torch.randn(3, 4, requires_grad=True))),
    "the same tensor twice": lambda: (Several(), (torch.ones(3, 4),) * 2),
}


def stand_in(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> _StandIn:
    """What takes and returns what the model's joint program does."""
    optimized: Any = graphopt.optimize(model, example_inputs=inputs)
    program = optimized.snapshots[-1][1]
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    held: list[InputSpec] = [spec for _, spec in program.inputs_of("parameter", "buffer", "constant")]
    return _StandIn(program, held, tensors)


def said(trace: _torch.JointTrace) -> list[Any]:
    """All that is read of a trace."""
    return [
        [role for _, role in trace.inputs()],
        [role for _, role in trace.outputs()],
        trace.backward_layout(),
        trace.parameter_order(),
        trace.gradient_routes(),
        trace.returns_arguments(),
        trace._joint._aot_state.fw_metadata,
        trace._joint._aot_graph_capture.updated_flat_args_descs,
        trace._joint._aot_graph_capture.maybe_subclass_meta,
    ]


def calls(trace: _torch.JointTrace) -> list[fx.Node]:
    return [node for node in trace.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("case", CASES)
def test_it_says_what_the_traced_one_says(case: str) -> None:
    model, inputs = CASES[case]()
    module = stand_in(model, inputs)
    traced, written = _torch.JointTrace(module, inputs), _torch.JointTrace(module, inputs, module.has_gradient)
    assert said(written) == said(traced)
    assert calls(traced)
    assert not calls(written)


@pytest.mark.parametrize(("name", "other"), [("_TAKES", ("flat_fn",)), ("_is_plain", lambda *_: False)])
def test_what_is_said_otherwise_or_is_more_than_plain_is_traced(
    name: str, other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = CASES["a network"]()
    module = stand_in(model, inputs)
    monkeypatch.setattr(written_joint, name, other)
    trace = _torch.JointTrace(module, inputs, module.has_gradient)
    assert calls(trace)
    assert said(trace) == said(_torch.JointTrace(module, inputs))
