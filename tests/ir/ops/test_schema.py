"""Facts about calls: who reads a value, what is a view of it (waits are none), and what draws random numbers."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import fx, nn

import graphopt
from graphopt import Phase, Program
from graphopt.analysis.costs.cost import cost_report
from graphopt.errors import PassError
from graphopt.ir.node import Policy, info
from graphopt.ir.ops import schema
from graphopt.ir.ops.communication.collectives import ALL_GATHER, WAIT
from graphopt.passes import Offload, PartitionCheckpoints, Recompute
from graphopt.rewriting.memory.fit.fitting import Fitting, FittingOptions
from graphopt.rewriting.memory.transfers.transfer_insertion import host_lanes
from tests.support.errors import attempt
from tests.support.fitting import applied, calls
from tests.support.training import Net, captured

ROWS = torch.linspace(-1, 1, 256 * 8).reshape(256, 8).cos()


def gathering() -> tuple[Program, fx.Node, fx.Node]:
    """A program in which ``net.0`` is gathered from a group of one, with the collective's start and its wait."""
    model = Net(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    program = captured(model, ROWS)
    source = program.names()["net.0"]
    readers = list(source.users)
    common: dict[str, Any] = {"phase": Phase.FORWARD, "origin": "a test"}
    start = program.insert(ALL_GATHER, (source, 1, "a group"), after=source, names=("started",), **common)
    wait = program.insert(WAIT, (start,), after=start, names=("gathered",), **common)
    for reader in readers:
        reader.replace_input_with(source, wait)
    return program, start, wait


def test_a_wait_is_no_view_and_shares_the_storage() -> None:
    _, start, wait = gathering()
    assert not schema.is_view(wait)
    assert schema.aliased_inputs(wait) == [start]
    assert schema.storage_root(wait) is wait
    assert schema.readers(start) == {wait, *schema.readers(wait)}
    assert schema.readers(wait)


def test_what_a_collective_makes_is_not_moved_before_it_is_awaited() -> None:
    program, start, _ = gathering()
    for name in ("started", "gathered"):
        error = attempt(lambda name=name: applied(program, Offload((name,), min_bytes=0, cost="roofline")))
        assert isinstance(error, PassError)
    by_itself, record = applied(program, Offload(min_bytes=0, cost="roofline", keep_last=0))
    assert record.changed
    assert start.name not in {node.args[0].name for node in calls(by_itself, "offload")}  # type: ignore[union-attr]
    memory = program.memory()
    seconds = cost_report(memory.nodes, method="roofline").seconds
    lanes = functools.partial(host_lanes, room=10**9, smallest=1, rate=1e12)
    fitting = Fitting(program, memory, seconds, FittingOptions(lanes=lanes, recompute=False))
    names = {fitting.planning.problem.names[item.value] for item in fitting.smallest().away}
    assert names
    assert not names & {"started", "gathered"}


def test_a_checkpoint_at_a_gathered_tensor_is_kept_behind_the_wait() -> None:
    """The collective runs once, and partitioning leaves its result whole."""
    program, _, wait = gathering()
    changed, record = applied(program, Recompute(["gathered", "net.3"]))
    kept = [node.name for node in changed.phase_nodes(Phase.FORWARD) if info(node).policy is Policy.MUST_SAVE]
    assert kept == [wait.name, "tanh_1"]
    assert record.changed
    assert len(calls(changed, "all_gather_into_tensor")) == len(calls(changed, "wait_tensor")) == 1
    chosen, left = PartitionCheckpoints(min_bytes=0)._choose(changed)
    assert [item.name for item in chosen] == ["net.3"]
    assert left[0].startswith("gathered is kept whole: a collective makes it")


class Parts(nn.Module):
    """One tensor is read through parts of it, and a part of a part."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        base = graphopt.name(x.sin(), "base")
        left, right = base.split([3, 5], -1)
        inner = right.unbind(-1)
        return left.exp().sum() + inner[2].tanh().sum()


def test_readers_of_a_tensor_read_its_parts() -> None:
    program = captured(Parts(), ROWS.clone().requires_grad_(), loss=lambda model, x: model(x))
    base = program.names()["base"]
    names = {schema.op_name(node) for node in schema.readers(base)}
    assert {"split_with_sizes", "getitem", "unbind", "exp", "tanh"} <= names
    assert schema.storage_root(next(iter(calls(program, "tanh")[0].all_input_nodes))) is base


def test_readers_of_a_tensor_that_is_moved_do_not_read_the_handle() -> None:
    model = Net(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    program, record = applied(captured(model, ROWS), Offload(min_bytes=0, cost="roofline"))
    assert record.changed
    for wait in calls(program, "offload_wait"):
        handle, tensor = wait.args
        assert isinstance(handle, fx.Node)
        assert isinstance(tensor, fx.Node)
        assert schema.op_name(handle) == "offload"
        assert not {"prefetch", "prefetch_wait"} & {schema.op_name(node) for node in schema.readers(tensor)}
        assert {"prefetch", "prefetch_wait"} <= {schema.op_name(node) for node in schema.readers(handle)}
        assert not schema.is_view(wait)


@pytest.mark.sweep(cases=("offload_wait",))
@pytest.mark.parametrize("op", ["offload_wait", "prefetch_wait"])
def test_waits_of_transfers_are_no_views(op: str) -> None:
    model = Net(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    program, _ = applied(captured(model, ROWS), Offload(min_bytes=0, cost="roofline", keep_last=0))
    (node, *_) = calls(program, op)
    assert schema.aliased_inputs(node) == [node.args[0]]
    assert not schema.is_view(node)


@pytest.mark.parametrize(
    ("dropout", "layers", "train", "draws"),
    [(0.0, 2, True, False), (0.5, 1, True, False), (0.5, 2, False, False), (0.5, 2, True, True)],
)
@pytest.mark.parametrize("op", ["gru", "rnn_tanh", "rnn_relu"])
def test_recurrent_layers_draw_where_they_drop_out(
    op: str, dropout: float, layers: int, train: bool, draws: bool
) -> None:
    graph = fx.Graph()
    x, state, weight = (graph.placeholder(name) for name in ("x", "state", "weight"))
    target = getattr(torch.ops.aten, op).input
    node = graph.call_function(target, (x, state, [weight], True, layers, dropout, train, False, True))
    assert schema.is_random(node) == draws


def test_attention_draws_where_it_drops_out() -> None:
    graph = fx.Graph()
    query, key, value = (graph.placeholder(name) for name in ("query", "key", "value"))
    target = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    assert not schema.is_random(graph.call_function(target, (query, key, value)))
    assert not schema.is_random(graph.call_function(target, (query, key, value, 0.0)))
    assert schema.is_random(graph.call_function(torch.ops.aten.native_dropout.default, (query, 0.0, True)))
