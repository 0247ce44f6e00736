"""Measuring what calls cost: what is run and how, what is estimated and why, and that nothing else is touched."""

from __future__ import annotations

import logging
import math
import operator
from pathlib import Path
from typing import Any

import pytest
import torch

import graphopt
from graphopt import GraphoptError, Phase, Program
from graphopt.analysis.costs import cost
from graphopt.analysis.costs.cost import CostReport, cost_report, op_seconds
from graphopt.analysis.costs.isolated_call import call_key
from graphopt.ir.ops import schema
from graphopt.passes import Recompute
from tests.support.costs import TOY, call, kept, small_program, use_folder
from tests.support.training import Blocks, captured, next_token, rewritten

aten = torch.ops.aten
TOKENS = torch.arange(24).reshape(2, 12) % 11


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return use_folder(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def blocks() -> Program:
    return captured(Blocks(2), TOKENS, loss=next_token)


# --- what is measured ------------------------------------------------------------------------------------------------


def test_every_call_has_seconds_and_what_runs_nothing_has_none(blocks: Program) -> None:
    report = cost_report(blocks.nodes)
    assert len(report.seconds) == len(blocks.nodes)
    for node, seconds in zip(blocks.nodes, report.seconds, strict=True):
        free = node.op != "call_function" or node.target is operator.getitem or schema.is_view(node)
        assert seconds == 0.0 if free else 0 < seconds < math.inf, node
    assert report.measured + report.cached + report.estimated + report.free == len(blocks.nodes)
    assert report.cached == report.estimated == 0
    assert 0 < report.runs < report.measured
    assert not report.reasons
    assert op_seconds(blocks.nodes) == list(report.seconds)


def test_calls_that_are_alike_are_measured_once_and_cost_the_same(blocks: Program) -> None:
    first, second = blocks.find("blocks.0.mlp.2", "blocks.1.mlp.2").values()
    assert call_key(first) == call_key(second) != ""
    report = cost_report([first, second, first])
    assert (report.runs, report.measured) == (1, 3)
    assert len(set(report.seconds)) == 1


@pytest.mark.sweep
def test_replayed_random_ops_are_measured_as_the_op_itself() -> None:
    program = rewritten(Blocks(2), TOKENS, loss=next_token, passes=[Recompute("blocks.*")])
    replayed = [node for node in program.nodes if isinstance(node.target, torch._ops.HigherOrderOperator)]
    assert replayed
    report = cost_report(replayed)
    assert report.measured == len(replayed)
    assert report.estimated == 0


def test_the_report_reads_as_text(blocks: Program) -> None:
    nodes = list(blocks.phase_nodes(Phase.FORWARD))
    text = str(cost_report(nodes))
    assert f"s in {len(nodes)} calls" in text
    assert "0 from the cache, 0 by the roofline" in text
    step = CostReport((1.0,), 0, 0, 1, 0, 0, {"mm": "it is a test"})
    assert str(step).endswith("by the roofline: mm: it is a test")


class Watch:
    """An op that looks at what it is given."""

    def __init__(self) -> None:
        self.given: list[tuple[torch.Tensor, ...]] = []
        self.autocast = False


watch = Watch()


@torch.library.custom_op("graphopt_test_cost::look", mutates_args=())
def look(floats: torch.Tensor, integers: torch.Tensor, mask: torch.Tensor, strided: torch.Tensor) -> torch.Tensor:
    watch.given.append((floats.clone(), integers.clone(), mask.clone(), strided))
    watch.autocast = watch.autocast or torch.is_autocast_enabled("cpu")
    return floats + torch.rand(())


@look.register_fake
def _look(floats: Any, integers: Any, mask: Any, strided: Any) -> torch.Tensor:
    return torch.empty_like(floats)


@torch.library.custom_op("graphopt_test_cost::refuse", mutates_args=())
def refuse(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("only tensors of ones\nand nothing else")


@refuse.register_fake
def _refuse(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_calls_run_on_numbers_that_make_kernels_work_in_the_layout_of_the_program() -> None:
    watch.given.clear()
    watch.autocast = False
    strided = torch.empty(8, 6).t()[:, 2:]
    node = call(
        torch.ops.graphopt_test_cost.look.default,
        torch.empty(300, 300), torch.ones(5, dtype=torch.int64), torch.ones(5, dtype=torch.bool), strided,
    )  # fmt: skip
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert cost_report([node]).measured == 1
        assert torch.is_autocast_enabled("cpu")
    assert not watch.autocast
    assert len(watch.given) >= 4
    for floats, integers, mask, like in watch.given:
        assert 0 <= float(floats.min()) < 0.01 < 0.99 < float(floats.max()) < 1
        assert float(floats.std()) > 0.2
        assert not integers.any()
        assert not mask.any()
        assert (like.shape, like.stride()) == (strided.shape, strided.stride())


@pytest.mark.sweep(but=("measured",))
@pytest.mark.parametrize("method", ["measured", "roofline"])
def test_generators_are_left_as_they_were(blocks: Program, method: cost.Method) -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    op_seconds(blocks.nodes, method=method, cache=False)
    assert torch.equal(torch.get_rng_state(), before)


def test_no_memory_is_left_behind(blocks: Program) -> None:
    assert graphopt.measure_peak(lambda: cost_report(blocks.nodes, cache=False)).retained_bytes == 0


def test_progress_counts_distinct_calls_to_the_end(blocks: Program) -> None:
    told: list[tuple[int, int]] = []
    report = cost_report(blocks.nodes, progress=lambda done, total: told.append((done, total)))
    assert told == [(done, report.runs) for done in range(1, report.runs + 1)]
    told.clear()
    op_seconds(blocks.nodes, progress=lambda done, total: told.append((done, total)))
    assert told == []


def test_an_interruption_keeps_what_was_measured(blocks: Program, folder: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        op_seconds(blocks.nodes, progress=stop)
    assert len(kept(folder)["seconds"]) == 3


def test_the_order_of_calls_does_not_matter(
    blocks: Program, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = op_seconds(blocks.nodes)
    assert op_seconds(reversed(blocks.nodes)) == forward[::-1]
    monkeypatch.setenv("GRAPHOPT_CACHE", str(tmp_path / "reversed"))
    op_seconds(reversed(blocks.nodes))
    assert kept(folder)["seconds"].keys() == kept(tmp_path / "reversed")["seconds"].keys()
    by_roofline = op_seconds(blocks.nodes, method="roofline", profile=TOY)
    assert op_seconds(reversed(blocks.nodes), method="roofline", profile=TOY) == by_roofline[::-1]


# --- what cannot be measured -----------------------------------------------------------------------------------------


def test_an_op_that_refuses_is_estimated_and_named_once(caplog: pytest.LogCaptureFixture) -> None:
    op, program = torch.ops.graphopt_test_cost.refuse.default, small_program()
    first, second = (call(op, torch.empty(size), program=program) for size in (10, 20))
    with caplog.at_level(logging.INFO, "graphopt"):
        report = cost_report([first, second], profile=TOY)
    assert (report.measured, report.estimated, report.runs) == (0, 2, 0)
    assert report.seconds == (1 + 80 / 1e6, 1 + 160 / 1e6)
    assert report.reasons == {"refuse": "ValueError: only tensors of ones"}
    assert [r.getMessage() for r in caplog.records if "refuse" in r.getMessage()] == [
        "the time of refuse is estimated, not measured: ValueError: only tensors of ones"
    ]


def test_updates_are_not_run_but_estimated() -> None:
    model = Blocks(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    program = graphopt.capture(model, (TOKENS,), loss=next_token, optimizer=optimizer)
    report = cost_report(program.nodes, profile=TOY)
    assert report.reasons["_fused_adamw_"] == "it writes to its arguments"
    position = next(i for i, node in enumerate(program.nodes) if schema.op_name(node) == "_fused_adamw_")
    parameters = 4 * sum(parameter.numel() for parameter in model.parameters())
    exact = 1 + (4 + 3) * parameters / 1e6  # parameter, gradient and two states are read; all but the gradient written
    assert report.seconds[position] == pytest.approx(exact, rel=0.01)


def test_a_transfer_takes_the_overhead_alone() -> None:
    report = cost_report([call(aten.clone.default, torch.empty(10), phase=Phase.TRANSFER)], profile=TOY)
    assert report.seconds == (TOY.overhead,)
    assert report.reasons == {"clone": "it starts or awaits a transfer"}


def test_a_collective_is_not_run() -> None:
    node = call(torch.ops._c10d_functional.all_reduce.default, torch.empty(10), "sum", "0")
    report = cost_report([node], profile=TOY)
    assert report.reasons == {"all_reduce": "it is a collective"}
    assert report.seconds == (1 + 80 / 1e6,)


def test_a_call_of_many_bytes_is_not_run() -> None:
    node = call(aten.full.default, [1 << 30], 0.0, dtype=torch.float32)
    report = cost_report([node], profile=TOY)
    assert report.reasons == {"full": "the call takes 4.3 GB"}
    assert report.seconds == (1 + (4 << 30) / 1e6,)


def test_a_device_that_is_not_here_needs_a_profile() -> None:
    node = call(aten.zeros.default, [10], device=torch.device("meta"))
    report = cost_report([node], profile=TOY)
    assert report.reasons == {"zeros": "there is no meta device here"}
    assert report.seconds == (1 + 40 / 1e6,)
    for method in ("measured", "roofline"):
        with pytest.raises(GraphoptError, match=r"'meta' here.*PROFILES"):
            op_seconds([node], method=method)


def test_an_unknown_method_is_an_error() -> None:
    with pytest.raises(GraphoptError, match="no method 'guess' of costs: it is 'measured' or 'roofline'"):
        op_seconds([], method="guess")  # type: ignore[arg-type]
    assert op_seconds([]) == []


# --- CUDA ------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_calls_on_cuda_are_measured_there(folder: Path) -> None:
    program = captured(Blocks(2).to("cuda"), TOKENS.to("cuda"), loss=next_token)
    state, allocated = torch.cuda.get_rng_state(), torch.cuda.memory_allocated()
    report = cost_report(program.nodes)
    assert report.measured + report.free == len(program.nodes)
    assert kept(folder)["device"] == torch.cuda.get_device_name()
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert torch.cuda.memory_allocated() == allocated
    assert cost_report(program.nodes).seconds == report.seconds
    assert cost.profile_of("cuda").host_bandwidth == cost.link_bandwidth("cuda", "host")


@pytest.mark.parametrize(
    ("measured", "share", "basis"),
    [
        (0, 0.0, "the roofline"),
        (9, 0.0, "measured ops"),
        (9, 0.25, "measured ops and, for 25%, the roofline"),
        (9, 1.0, "the roofline"),
    ],
)
def test_a_report_says_what_its_seconds_are_made_of(measured: int, share: float, basis: str) -> None:
    assert CostReport((1.0,) * 10, measured, 0, 10 - measured, 0, share=share).basis == basis
