"""Programs for other viewers: traces for Perfetto, graph collections for Model Explorer."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import graphopt
from graphopt import GraphoptError, Pipeline, Program
from graphopt.analysis.costs.cost import cost_report
from graphopt.ir.node import info
from graphopt.ir.ops import schema
from graphopt.ir.provided.formats import find_format
from graphopt.passes import DataParallel, Recompute
from graphopt.report.formats.perfetto import to_perfetto
from graphopt.rewriting.distributed.prediction.collective import moved
from graphopt.rewriting.distributed.prediction.run_schedule import LANES
from tests.support.hostile import ATTACK, LONG, TURNED, hostile
from tests.support.offloading import ROWS, layers, off
from tests.support.training import captured, mean_square

COST = "a100-80gb"
"""Seconds that no machine's load changes."""


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))


@pytest.fixture(scope="module")
def stepping() -> Program:
    model = small()
    return graphopt.capture(
        model, (torch.randn(8, 16),), loss=mean_square, optimizer=torch.optim.AdamW(model.parameters(), fused=True)
    )


@pytest.fixture(scope="module")
def exchanging() -> Iterator[Program]:
    """Buckets of gradients among four ranks, of which only this one exists."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        model = small()
        program = graphopt.capture(
            model, (torch.randn(8, 16),), loss=mean_square, optimizer=torch.optim.AdamW(model.parameters(), fused=True)
        )
        Pipeline([DataParallel(bucket_mb=0.01, first_bucket_mb=0.001)]).run(program)
        yield program
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def offloading() -> Program:
    program = captured(layers(), ROWS, loss=mean_square)
    Pipeline([off()]).run(program)
    return program


def calls(program: Program) -> list[torch.fx.Node]:
    return [node for node in program.graph.nodes if node.op not in ("placeholder", "output")]


# --- Perfetto --------------------------------------------------------------------------------------------------------


def of(trace: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == kind]


def slices(trace: dict[str, Any], lane: str) -> list[dict[str, Any]]:
    return [event for event in of(trace, "X") if LANES[event["tid"] - 1] == lane]


def end(event: dict[str, Any]) -> float:
    return event["ts"] + event["dur"]


def test_one_slice_for_each_call_as_long_as_the_cost_model_says(stepping: Program) -> None:
    trace = to_perfetto(stepping, cost=COST)
    found = of(trace, "X")
    assert [event["args"]["node"] for event in found] == [node.name for node in calls(stepping)]
    costs = graphopt.analysis.costs.cost.costs_of(stepping.memory(), COST)
    assert [event["dur"] for event in found] == [round(seconds * 1e6, 3) for seconds in costs.seconds]
    for event, node in zip(found, calls(stepping), strict=True):
        known = info(node)
        assert (event["name"], event["cat"]) == (schema.op_name(node), known.phase.value)
        assert event["args"].get("module", "") == known.module
        assert event["args"].get("source", "") == known.source
    assert slices(trace, "compute") == found


@pytest.mark.sweep
def test_lanes_are_named_and_nothing_overlaps_on_one(
    stepping: Program, exchanging: Program, offloading: Program
) -> None:
    for program in (stepping, exchanging, offloading):
        trace = json.loads(json.dumps(to_perfetto(program, cost=COST)))
        names = {event["tid"]: event["args"]["name"] for event in of(trace, "M") if event["name"] == "thread_name"}
        assert names == dict(enumerate(LANES, 1))
        assert {event["pid"] for event in trace["traceEvents"]} == {1}
        for lane in LANES:
            on_it = slices(trace, lane)
            for one, other in itertools.pairwise(on_it):
                assert other["ts"] >= end(one) - 0.01


def test_memory_by_category_is_counted(stepping: Program) -> None:
    trace = to_perfetto(stepping, cost=COST)
    timeline = stepping.memory()
    counters = of(trace, "C")
    assert {event["name"] for event in counters} == {"memory (bytes)"}
    assert max(sum(event["args"].values()) for event in counters) == timeline.peak_bytes
    assert sum(counters[0]["args"].values()) == timeline.bytes[0]
    assert counters[-1]["args"] | timeline.categories_at(len(timeline.nodes) - 1) == counters[-1]["args"]
    assert all(one["ts"] <= other["ts"] for one, other in itertools.pairwise(counters))


def test_collectives_run_beside_and_the_call_that_waits_ends_with_them(exchanging: Program) -> None:
    trace = to_perfetto(exchanging, cost=COST)
    starts = [node.name for node in calls(exchanging) if schema.is_collective(node) and not schema.hands_on(node)]
    waits = [node for node in calls(exchanging) if schema.is_collective(node) and schema.hands_on(node)]
    assert [event["args"]["node"] for event in slices(trace, "network")] == starts
    assert len(starts) == len(waits) >= 2
    by_node = {event["args"]["node"]: event for event in of(trace, "X")}
    for wait in waits:
        assert end(by_node[wait.name]) >= end(by_node[schema.maker(wait.args[0]).name]) - 0.01  # type: ignore[arg-type]
    first = by_node[starts[0]]
    computing = [event for event in slices(trace, "compute") if event["ts"] < end(first) and end(event) > first["ts"]]
    assert computing, "backward goes on while the first bucket is exchanged"


def test_collectives_take_what_they_do_on_the_link(exchanging: Program) -> None:
    slow, fast = (to_perfetto(exchanging, cost=COST, link=link) for link in ("1Mbit", "1Gbit"))
    for one, other in zip(slices(slow, "network"), slices(fast, "network"), strict=True):
        assert one["dur"] == pytest.approx(1000 * other["dur"], rel=0.01)
    starts = [node for node in calls(exchanging) if schema.is_collective(node) and not schema.hands_on(node)]
    for node, event in zip(starts, slices(slow, "network"), strict=True):
        assert event["dur"] == pytest.approx(moved(node).sent / 0.125, abs=0.01)  # bytes over 1 Mbit/s, in microseconds
    assert "over a link of 1 Mbit/s" in slow["otherData"]["exchanges"]
    with pytest.raises(GraphoptError, match="not a bandwidth"):
        to_perfetto(exchanging, cost=COST, link="fast")


def test_copies_run_on_the_link_to_the_host(offloading: Program) -> None:
    trace = to_perfetto(offloading, cost=COST)
    away, back = slices(trace, "host link, away"), slices(trace, "host link, back")
    assert len(away) == len(back) == sum(schema.op_name(node) == "offload" for node in calls(offloading)) > 0
    assert max(end(event) for event in away) <= min(event["ts"] for event in back) + 0.01
    assert {event["cat"] for event in away + back} == {"transfer"}


def test_arrows_go_from_what_is_started_to_what_waits(exchanging: Program, offloading: Program) -> None:
    for program in (exchanging, offloading):
        trace = to_perfetto(program, cost=COST)
        starts = {event["id"]: event for event in of(trace, "s")}
        ends = defaultdict(list)
        for event in of(trace, "f"):
            ends[event["id"]].append(event)
        assert starts.keys() == ends.keys()
        assert len(starts) == len(of(trace, "s"))
        for number, event in starts.items():
            assert all(LANES[other["tid"] - 1] == "compute" and other["bp"] == "e" for other in ends[number])
            assert LANES[event["tid"] - 1] != "compute"


def test_seconds_can_be_given_and_have_to_fit(stepping: Program) -> None:
    nodes = stepping.memory().nodes
    costs = cost_report(nodes, method="roofline", profile=graphopt.analysis.costs.cost.PROFILES[COST])
    assert to_perfetto(stepping, costs=costs)["traceEvents"] == to_perfetto(stepping, cost=COST)["traceEvents"]
    fewer = cost_report(nodes[:-1], method="roofline", profile=graphopt.analysis.costs.cost.PROFILES[COST])
    with pytest.raises(GraphoptError, match=f"seconds of {len(nodes) - 1} calls, and the program has {len(nodes)}"):
        to_perfetto(stepping, costs=fewer)
    with pytest.raises(GraphoptError, match=r"no cost model 'a100'"):
        stepping.to_perfetto(cost="a100")


def test_a_trace_says_that_it_is_predicted(stepping: Program) -> None:
    about = stepping.to_perfetto()["otherData"]
    assert about["title"] == "Sequential, step stage"
    assert about["times"].startswith("predicted: ")


# --- Model Explorer --------------------------------------------------------------------------------------------------


def graph_of(program: Program) -> dict[str, Any]:
    data = json.loads(json.dumps(program.to_model_explorer()))
    assert set(data) == {"label", "graphs"}
    (graph,) = data["graphs"]
    return graph


def test_ids_are_unique_and_edges_refer_to_nodes(stepping: Program, exchanging: Program, offloading: Program) -> None:
    for program in (stepping, exchanging, offloading):
        nodes = graph_of(program)["nodes"]
        known = {node["id"] for node in nodes}
        assert len(known) == len(nodes) == len(calls(program)) + len(program.inputs) + len(program.outputs)
        edges = {(edge["sourceNodeId"], node["id"]) for node in nodes for edge in node["incomingEdges"]}
        assert {source for source, _ in edges} <= known
        expected = {(source.name, node.name) for node in calls(program) for source in node.all_input_nodes}
        assert {(source, target) for source, target in edges if not target.startswith("output.")} == expected


def test_groups_are_phases_and_modules() -> None:
    program = captured(nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.GELU()), nn.Linear(4, 4)), torch.randn(2, 4))
    Pipeline([Recompute(("0",))]).run(program)
    nodes = {node["id"]: node for node in graph_of(program)["nodes"]}
    for node in calls(program):
        known = info(node)
        assert nodes[node.name]["namespace"].split("/") == [known.phase.value, *filter(None, known.module.split("."))]
        assert nodes[node.name]["label"] == schema.op_name(node)
    groups = {node["namespace"] for node in nodes.values()}
    assert {"forward/0/1", "backward/0/1", "inputs/parameter/0/0", "inputs/input", "outputs/gradient/1"} <= groups


def test_nodes_say_what_is_known_of_them(stepping: Program) -> None:
    graph = graph_of(stepping)
    nodes = {node["id"]: node for node in graph["nodes"]}
    gelu = next(node for node in calls(stepping) if schema.op_name(node) == "gelu")
    attributes = {item["key"]: item["value"] for item in nodes[gelu.name]["attrs"]}
    assert attributes["names"].startswith("1")
    assert attributes.get("source", "") == info(gelu).source
    (shape, size) = nodes[gelu.name]["outputsMetadata"][0]["attrs"]
    assert (shape["value"], size["value"]) == ("f32[8, 64]", "2.0 kB")
    assert all(isinstance(i["value"], str) for node in nodes.values() for i in node["attrs"])
    assert graph["groupNodeAttributes"][""]["stage"] == "step"
    assert "predicted peak" in graph["groupNodeAttributes"][""]


@pytest.mark.sweep(but=("perfetto",))
@pytest.mark.parametrize("form", ["perfetto", "model-explorer"])
def test_hostile_names_survive_as_data(form: str) -> None:
    program = hostile()
    text = find_format(form).text(program)
    text.encode("ascii")
    assert "\x1b" not in text
    data = json.loads(text)
    found = json.dumps(data, ensure_ascii=False)
    assert ATTACK in found
    assert TURNED in found
    assert LONG in found


@pytest.mark.sweep
def test_a_slash_in_a_name_is_no_group_of_its_own() -> None:
    nodes = graph_of(hostile())["nodes"]
    depths = {node["namespace"].count("/") for node in nodes if not node["namespace"].startswith(("inputs", "outputs"))}
    assert depths <= {0, 1}
