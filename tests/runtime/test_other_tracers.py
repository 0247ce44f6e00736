"""Tracers of torch that meet an optimized model: they see its plain forward, or an error says what to trace."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

import graphopt
from graphopt.errors import CaptureError

X = torch.linspace(-1, 1, 8).view(2, 4)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def test_torch_jit_traces_its_forward() -> None:
    model = _model()
    optimized = graphopt.optimize(model)
    optimized(X)
    with pytest.deprecated_call():
        traced = torch.jit.trace(optimized, X)
    assert torch.equal(traced(X), model(X))


def test_symbolic_tracing_goes_through_it_as_a_part() -> None:
    model = _model()
    optimized = graphopt.optimize(model)
    traced = fx.symbolic_trace(nn.Sequential(optimized, nn.ReLU()))
    assert torch.equal(traced(X), model(X).relu())
    assert any(node.op == "call_module" for node in traced.graph.nodes)


def test_symbolic_tracing_of_itself_is_refused() -> None:
    optimized = graphopt.optimize(_model())
    with pytest.raises(CaptureError, match="trace the one that was given"):
        fx.symbolic_trace(optimized)
    assert torch.equal(optimized(X), _model()(X))


def test_torch_export_takes_it_as_it_is() -> None:
    model = _model()
    optimized = graphopt.optimize(model)
    assert torch.equal(torch.export.export(optimized, (X,)).module()(X), model(X))
