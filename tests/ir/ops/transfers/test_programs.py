"""The transfer ops in traces, compilers and programs, and what is counted of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import graphopt
from graphopt.capture.call.flatten import flatten
from graphopt.ir.node import value_of
from graphopt.ir.ops import schema, transfers
from graphopt.ir.ops.storage import transfer
from graphopt.runtime.programs.binding import Binding
from tests.support.training import Blocks, captured, identical, next_token, results
from tests.support.transferring import TIERS, back, engine_in, held, move_activations, round_trip, started


@pytest.fixture(autouse=True)
def _own_engine(tmp_path: Path) -> Iterator[None]:
    with engine_in(tmp_path):
        yield


# --- statistics ------------------------------------------------------------------------------------------------------


def test_statistics_count_each_tier_and_both() -> None:
    a, b = torch.randn(100), torch.randn(50)
    one, other = held(a, "host"), held(b, "disk")
    back(other, b)
    back(other, b)
    host, disk, both = (transfers.statistics(tier) for tier in ("host", "disk", None))
    assert (host.offloads, host.offloaded_bytes, host.prefetches, host.stored_bytes) == (1, 400, 0, 400)
    assert (disk.offloads, disk.prefetches, disk.prefetched_bytes, disk.stored_bytes) == (1, 2, 400, 200)
    assert (both.offloads, both.prefetched_bytes, both.stored_bytes, both.peak_stored_bytes) == (2, 400, 600, 600)
    assert both.seconds_waited == pytest.approx(host.seconds_waited + disk.seconds_waited)
    assert both.capacity_bytes == host.capacity_bytes + disk.capacity_bytes
    del one
    transfers.reset_statistics()
    now = transfers.statistics()
    assert (now.offloads, now.stored_bytes, now.peak_stored_bytes, now.seconds_waited) == (0, 200, 200, 0)


def test_the_peak_is_of_what_is_held_at_once() -> None:
    for _ in range(3):
        round_trip(torch.randn(100))
    assert transfers.statistics().peak_stored_bytes == 400


# --- tracing ---------------------------------------------------------------------------------------------------------


def there_and_back(x: torch.Tensor) -> torch.Tensor:
    handle = transfer.offload_wait(transfer.offload(x, "host"), x)
    y = transfer.prefetch(handle, x.shape, x.stride(), 0, x.numel(), x.dtype, x.device)
    return transfer.prefetch_wait(y, handle) + 1


@pytest.mark.parametrize("mode", ["fake", "symbolic", "real"])
def test_the_ops_are_traced_and_the_trace_runs(mode: str) -> None:
    x = torch.randn(4, 6)
    graph = make_fx(lambda x: there_and_back(x), tracing_mode=mode)(x)
    names = [node.name for node in graph.graph.nodes if "graphopt" in str(node.target)]
    assert names == ["offload", "offload_wait", "prefetch", "prefetch_wait"]
    assert torch.equal(graph(x), x + 1)
    if mode == "symbolic":
        wide = torch.randn(9, 3)
        assert torch.equal(graph(wide), wide + 1)


def test_dead_code_elimination_keeps_waits() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        handle = transfer.offload(x, "host")
        transfer.offload_wait(handle, x)
        y = transfer.prefetch(handle, x.shape, x.stride(), 0, x.numel(), x.dtype, x.device)
        transfer.prefetch_wait(y, handle)
        return x + 1

    graph = make_fx(function, tracing_mode="fake")(torch.ones(3))
    before = len(graph.graph.nodes)
    graph.graph.eliminate_dead_code()
    assert len(graph.graph.nodes) == before
    waits = [node for node in graph.graph.nodes if "wait" in node.name]
    assert [schema.has_effect(node) for node in waits] == [True, True]


def test_fakes_have_the_layout_of_what_is_fetched() -> None:
    x = torch.randn(7, 5).t()[1:]
    graph = make_fx(lambda handle: started(handle, x), tracing_mode="fake")(torch.ones(1, dtype=torch.int64))
    (value,) = [value_of(node) for node in graph.graph.nodes if node.name == "prefetch"]
    assert (value.shape, value.stride(), value.storage_offset()) == (x.shape, x.stride(), x.storage_offset())
    assert value.untyped_storage().nbytes() == x.untyped_storage().nbytes()


def test_schemas_are_true() -> None:
    x = torch.randn(4)
    checks = ("test_schema", "test_faketensor")
    handle = held(x)
    torch.library.opcheck(transfer.offload, (x, "host"), test_utils=checks)
    torch.library.opcheck(
        transfer.prefetch, (handle, [4], [1], 0, 4, torch.float32, torch.device("cpu")), test_utils=checks
    )


def test_compilers_take_the_ops() -> None:
    x = torch.randn(5, 3)
    compiled = torch.compile(lambda x: there_and_back(x * 2), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), x * 2 + 1)
    torch.compiler.reset()


# --- programs --------------------------------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("tier", TIERS)
def test_a_program_whose_activations_are_moved_computes_the_same(tier: str) -> None:
    model, tokens = Blocks(layers=2), torch.randint(0, 11, (2, 6))
    program = captured(model, tokens, loss=next_token)
    expected, generator = results(program, model, tokens)
    moved = move_activations(program, tier)
    assert moved >= 20
    assert program.erase_dead() == 0
    found, generator_now = results(program, model, tokens)
    assert all(identical(found[spec], value) for spec, value in expected.items())
    assert torch.equal(generator, generator_now)
    assert transfers.statistics(tier).offloads == transfers.statistics(tier).prefetches == moved


@pytest.mark.sweep
def test_moving_activations_lowers_the_peak_by_their_bytes() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64, bias=False), nn.Sigmoid()) for _ in range(8)))
    x = torch.randn(512, 64)
    program = captured(model, x)

    def peak() -> int:
        module, inputs = program.to_graph_module(), Binding(program, model).gather(flatten((x,), paths=False)[0])
        with torch.no_grad():
            return graphopt.measure_peak(lambda: module.forward(inputs)).allocated_peak_bytes

    kept = peak()
    move_activations(program, "host")
    activation = 512 * 64 * 4
    assert kept - peak() >= 5 * activation
