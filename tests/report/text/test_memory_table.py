"""Where the bytes are: the memory report and the table of tensors."""

from __future__ import annotations

import json
import re

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx, nn

import graphopt
from graphopt import GraphoptError, Program
from graphopt.ir.node import info, value_of
from graphopt.ir.words.written_units import format_bytes
from graphopt.report.text.memory_chart import chart
from graphopt.report.text.memory_table import memory_json, memory_text
from graphopt.report.text.tensor_table import tensors_json, tensors_table
from tests.support.reporting import Net, Tiny, joint, total, without_line_numbers
from tests.support.toy_devices import on_device, toy_device
from tests.support.training import recomputed


class Gate(nn.Module):
    """Ops that take no memory for themselves while they run."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(torch.tanh(x * self.weight) * x)


MEMORY = """\
Gate, joint stage; passes: none
peak        5.1 kB (5128 bytes)
where       sigmoid_backward (::sigmoid_backward~), op 8 of 11, in backward, test_memory_table.py:N in forward
persistent  2.0 kB before and after; running adds up to 3.1 kB

at the peak, by category
  activations  2.1 kB  40.0%  ██████████
  gradients    1.0 kB  20.0%  █████
  inputs       1.0 kB  20.0%  █████
  parameters   1.0 kB  20.0%  █████
  backward        4 B   0.1%  █

alive at the peak, largest 3 of 7
  weight   1.0 kB  parameters
  args[0]  1.0 kB  inputs
  ::tanh   1.0 kB  activations  test_memory_table.py:N in forward
  and 4 more, 2.1 kB together

bytes over the 11 ops, from persistent memory up to the peak (▲)
5.1 kB │       │  █     │
       │       │  █     │
       │  ▃▃▃  │▃▃█▃▃   │
       │  ███  │█████   │
       │  ███  │█████   │
       │▅▅███  │█████▅  │
       │█████  │██████  │
2.0 kB │█████  │██████  │
       └───────┴──▲─────┴
        forward backward
forward: 5 ops, up to 4.1 kB
backward: 6 ops, up to 5.1 kB
"""
"""The report of ``Gate``; expecttest writes ASCII only."""


def test_memory_text() -> None:
    text = memory_text(joint(Gate(), 64, 4), top=3, width=60)
    assert without_line_numbers(text) == MEMORY


@pytest.mark.sweep
def test_memory_text_says_what_the_timeline_says() -> None:
    program = recomputed(joint(Net(8), 64, 4), "blocks.*")
    timeline = program.memory()
    text = memory_text(program, top=1000, width=72)
    assert f"({timeline.peak_bytes} bytes)" in text
    assert f"op {timeline.nodes.index(timeline.peak_at) + 1} of {len(timeline.nodes)}" in text
    alive = text[text.index("alive at the peak") : text.index("bytes over")].strip().split("\n")
    assert len(alive) == 1 + len(timeline.alive)
    chart = [line for line in text.split("\n") if "│" in line]
    assert len({len(line) for line in chart}) == 1
    assert len(chart[0]) <= 72
    assert sum(line.count("▲") for line in text.split("\n") if line.lstrip().startswith("└")) == 1


def test_memory_chart_has_the_update() -> None:
    model = Tiny()
    program = graphopt.capture(
        model, (torch.randn(3, 2),), loss=total, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)
    )
    text = memory_text(program, width=1)
    assert re.search(r"forward +backward +update$", text, re.MULTILINE)
    assert re.search(r"^update: [1-9]\d* ops?, up to", text, re.MULTILINE)


def test_a_chart_has_the_scale_and_the_line_that_are_asked_for() -> None:
    timeline = joint(Gate(), 64, 4).memory()
    plain, scaled = (
        ["".join(text for text, _ in line) for line in chart(timeline, 60, **options)]
        for options in ({}, {"top": 3 * timeline.peak_bytes, "limit": 2 * timeline.peak_bytes})
    )
    assert len(plain) == len(scaled)
    assert "┄" not in "".join(plain)
    assert scaled[1].lstrip().startswith("15.4 kB │")
    (crossed,) = [index for index, line in enumerate(scaled) if "┄" in line]
    assert scaled[crossed].lstrip().startswith("10.3 kB │┄")
    assert not any("█" in line for line in scaled[1 : crossed + 1])
    assert any("█" in line for line in scaled[crossed + 1 :])


def test_a_chart_reaches_up_to_a_limit_above_the_peak_and_none_below_its_base() -> None:
    timeline = joint(Gate(), 64, 4).memory()
    above = chart(timeline, 60, limit=2 * timeline.peak_bytes)
    assert above[1][0][0].lstrip().startswith("10.3 kB │")
    below = chart(timeline, 60, limit=timeline.resident_bytes - 1)
    assert "┄" not in "".join(text for line in below for text, _ in line)


def test_memory_json_adds_up() -> None:
    program = joint(Net(), 64, 4)
    data = json.loads(json.dumps(memory_json(program)))
    timeline = program.memory()
    assert [call["bytes"] for call in data["timeline"]] == timeline.bytes
    assert sum(data["categories"].values()) == data["peak_bytes"] == sum(item["bytes"] for item in data["alive"])
    assert data["timeline"][data["peak_at"]["call"]] == data["peak_at"]
    assert data["peak_bytes"] - data["resident_bytes"] == data["allocated_peak_bytes"]


def test_memory_on_a_device_with_a_caching_allocator_has_what_is_reserved() -> None:
    plain = joint(Gate(), 64, 4)
    device = toy_device(workspaces={"nccl": 8192}, context_bytes=1_000_000)
    program = on_device(plain, device)
    reserved = plain.reserved(device)
    lines = memory_text(program).splitlines()
    assert (
        f"reserved    49.2 kB ({reserved.reserved_peak_bytes} bytes) on toy in {reserved.segments} segments" in lines[4]
    )
    assert lines[5].startswith(f"unused      {format_bytes(reserved.unused_bytes)} of it then, ")
    assert lines[6] == "            nccl 8.2 kB of it for workspaces of libraries"
    assert lines[7] == "device      fits into 67.1 MB, 1.0 MB outside of the allocator"
    data = memory_json(program)
    assert json.loads(json.dumps(data)) == data
    assert data["reserved"]["reserved_peak_bytes"] == reserved.reserved_peak_bytes
    assert data["reserved"]["fits"] is True
    small = on_device(plain, toy_device(memory_bytes=4096))
    assert "device      does not fit into 4.1 kB" in memory_text(small)
    assert memory_json(plain)["reserved"] is None
    assert "reserved" not in memory_text(plain)


def test_memory_of_a_program_without_calls() -> None:
    program = Program(fx.Graph(), "forward", [], [])
    program.graph.output(())
    assert memory_text(program) == "program, forward stage; passes: none\nno ops; 0 B persistent\n"
    assert memory_json(program)["peak_at"] is None


def test_tensors_table() -> None:
    table = tensors_table(joint(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 3, 4), phase="forward")
    assert_expected_inline(
        without_line_numbers(str(table)),
        """\
name      type       bytes  phase    role        saved  also
0.weight  f32[4, 4]   64 B  forward  parameter
0.bias    f32[4]      16 B  forward  parameter
1.weight  f32[4, 4]   64 B  forward  parameter
1.bias    f32[4]      16 B  forward  parameter
args[0]   f32[3, 4]   48 B  forward  input       saved
0::t      f32[4, 4]   view  forward  activation
0         f32[3, 4]   48 B  forward  activation  saved  0::addmm
1::t      f32[4, 4]   view  forward  activation  saved
1         f32[3, 4]   48 B  forward  activation         1::addmm
::sum     f32[]        4 B  forward  activation
10 tensors, 308 B
""",
    )


def test_table_rows_are_the_tensors_of_the_program() -> None:
    program = joint(Net(3), 3, 4)
    table = tensors_table(program)
    assert sorted(name for row in table.rows for name in (row.tensor.name, *row.also)) == sorted(
        tensor.name for tensor in program.tensors
    )
    assert len({row.tensor.node for row in table.rows}) == len(table.rows)
    named = tensors_table(program, ["blocks.*", "blocks.*::sigmoid"]).rows
    assert [row.tensor.name for row in named] == [f"blocks.{i}{rest}" for i in range(3) for rest in ("::sigmoid", "")]


def test_table_filters() -> None:
    program = joint(Net(3), 3, 4)
    rows = tensors_table(program, module="blocks.1", saved=True, min_bytes=40).rows
    assert rows
    for row in rows:
        known = info(next(node for node in program.graph.nodes if node.name == row.tensor.node))
        assert known.module == "blocks.1" or known.module.startswith("blocks.1.")
        assert row.tensor.saved
        assert row.tensor.bytes >= 40
    assert len(rows) < len(tensors_table(program, module="blocks.1").rows)


def test_table_errors_name_near_ones() -> None:
    program = joint(Net(3), 3, 4)
    with pytest.raises(GraphoptError, match=r"phase 'foward'; did you mean 'forward'"):
        tensors_table(program, phase="foward")
    with pytest.raises(GraphoptError, match=r"module 'block\.1'; did you mean 'blocks\.1'"):
        tensors_json(program, module="block.1")
    with pytest.raises(GraphoptError, match=r"'blocks\.7' names no tensor"):
        tensors_table(program, ["blocks.7"])


def test_tensors_json_is_plain_data() -> None:
    batch = torch.export.Dim("b", min=2, max=64)
    program = graphopt.capture(Tiny(), (torch.randn(3, 2),), dynamic_shapes=({0: batch},), stage="forward")
    rows = json.loads(json.dumps(tensors_json(program, ["linear"])))
    symbol = str(value_of(program.placeholders[-1]).shape[0])
    assert [(row["name"], row["also"], row["shape"], row["dtype"], row["bytes"]) for row in rows] == [
        ("linear", ["linear::linear"], [symbol, 2], "float32", 24)
    ]
