"""Calls at which the host waits for the device, and what keeps a program from being a CUDA graph, each by its name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import graphopt
from graphopt import GraphoptError, Pipeline, Program
from graphopt.analysis.host_waits import graph_obstacles, host_waits, require_graph
from graphopt.ir.node import info, set_info, set_value, value_of
from graphopt.passes import (
    CheckpointBoundaries,
    ClipGradients,
    FuseUpdate,
    MixedPrecision,
    Offload,
    Recompute,
)
from tests.support.training import mean_square

aten = torch.ops.aten


class Net(nn.Module):
    """Layers with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.drop, self.b = nn.Linear(16, 64), nn.Dropout(0.1), nn.Linear(64, 64)
        self.c, self.d = nn.Linear(64, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.d(self.c(self.b(self.drop(torch.relu(self.a(x)))).sin()).cos())


def captured(*passes: Any, loss: Any = mean_square, optimizer: Any = torch.optim.AdamW, rows: int = 8) -> Program:
    model, x = Net(), torch.randn(rows, 16)
    made = optimizer and optimizer(model.parameters())
    program = graphopt.capture(model, (x,), loss=loss, optimizer=made, device="h100-80gb")
    Pipeline(list(passes)).run(program)
    return program


def appended(program: Program, op: Any, args: tuple[Any, ...], value: Any, **kwargs: Any) -> str:
    """Put a call behind all others; the name of its node."""
    like = next(iter(program.output_values))
    assert isinstance(like, torch.fx.Node)
    with program.graph.inserting_before(next(node for node in program.graph.nodes if node.op == "output")):
        node = program.graph.call_function(op, args, kwargs)
    set_value(node, value)
    set_info(node, info(like))
    return node.name


@pytest.mark.sweep(but=("fused",))
@pytest.mark.parametrize("passes", [(), (FuseUpdate(),), (ClipGradients(1.0),)], ids=["plain", "fused", "clipped"])
def test_a_plain_step_waits_nowhere_and_can_be_a_graph(passes: tuple[Any, ...]) -> None:
    program = captured(*passes)
    assert host_waits(program) == []
    assert graph_obstacles(program) == []
    require_graph(program)


@pytest.mark.sweep
def test_scaled_gradients_are_checked_without_waiting() -> None:
    program = captured(MixedPrecision("float16"), optimizer=None)
    assert host_waits(program) == []


def test_checks_of_linear_algebra_and_masks_wait() -> None:
    inverse = captured(loss=lambda model, x: torch.linalg.inv(model(x)[:8, :8]).sum())
    (wait,) = host_waits(inverse)
    assert "_linalg_check_errors gives the host a value" in str(wait)
    masked = captured(loss=lambda model, x: torch.index_put(model(x), (x[:, 0] > 0,), torch.zeros(16)).sum())
    assert {wait.why.partition(" depends")[0] for wait in host_waits(masked)} == {"the size of what index_put selects"}
    places = captured(loss=lambda model, x: torch.index_put(model(x), (torch.arange(4),), torch.zeros(16)).sum())
    assert host_waits(places) == []


def test_values_that_the_host_reads_and_copies_to_it_wait() -> None:
    program = captured()
    x = next(node for node, spec in zip(program.placeholders, program.inputs, strict=True) if spec.role == "input")
    with FakeTensorMode():
        here = torch.empty(8, 16)
    names = [
        appended(program, aten._local_scalar_dense.default, (x,), 1.0),
        appended(program, aten.nonzero.default, (x,), value_of(x)),
        appended(program, aten._to_copy.default, (x,), here, device=torch.device("cpu")),
    ]
    appended(program, aten._to_copy.default, (x,), value_of(x), dtype=torch.float32)  # stays on the device
    waits = host_waits(program)
    assert [wait.name for wait in waits] == names
    assert "from cuda to cpu" in waits[-1].why
    with pytest.raises(GraphoptError, match=rf"3 things stand in the way:\n  {names[0]}.*\n.*{names[1]}"):
        require_graph(program)


def test_a_boundary_that_synchronizes_waits() -> None:
    program = captured(Recompute(checkpoints=("b",)), CheckpointBoundaries(synchronize=True), optimizer=None)
    assert {wait.why for wait in host_waits(program)} == {"the boundary of a checkpoint that synchronizes"}


@pytest.mark.sweep
@pytest.mark.parametrize(("tier", "waits"), [("host", 0), ("disk", 2)])
def test_transfers_through_streams_do_not_wait_and_are_no_part_of_a_graph(tier: str, waits: int) -> None:
    moving = Offload(tensors=("drop",), tier=tier, min_bytes=0, keep_last=0, cost="roofline")
    program = captured(moving, rows=4096)
    assert len(host_waits(program)) == waits
    obstacles = graph_obstacles(program)
    assert len(obstacles) == 4
    assert all(tier in obstacle.why for obstacle in obstacles)
    with pytest.raises(GraphoptError, match=f"{tier}"):
        require_graph(program)


def test_randomness_that_is_replayed_is_no_part_of_a_graph() -> None:
    program = captured(Recompute(checkpoints=("b",)), optimizer=None)
    replays = [node.name for node in program.graph.nodes if "rng_state" in str(node.target)]
    assert len(replays) == 2
    assert [obstacle.name for obstacle in graph_obstacles(program)] == replays
    assert host_waits(program) == []


@pytest.mark.sweep
def test_updates_in_python_and_numbers_of_the_host_are_no_part_of_a_graph() -> None:
    class Own(torch.optim.SGD):
        """An optimizer that reads its gradients in Python."""

        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.add_(p.grad, alpha=-float(p.grad.abs().max()))

    program = captured(optimizer=lambda parameters: Own(parameters, lr=0.1))
    assert "the optimizer's update runs in eager mode, in Python" in {found.why for found in graph_obstacles(program)}


def test_a_program_on_the_cpu_waits_for_nothing_and_is_refused_as_a_graph() -> None:
    model, x = Net(), torch.randn(8, 16)
    program = graphopt.capture(model, (x,), loss=lambda model, x: torch.linalg.inv(model(x)[:8, :8]).sum())
    assert host_waits(program) == []
    with pytest.raises(GraphoptError, match="on the CPU"):
        graph_obstacles(program)
