"""CheckpointBoundaries and the op under it: where marks stand, what they note, and that they change nothing else."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import nn

import graphopt
from graphopt import GraphoptError, Pipeline, Program
from graphopt.ir.node import info
from graphopt.ir.ops import boundary, schema
from graphopt.passes import CheckpointBoundaries, Offload, Recompute
from tests.support.training import (
    Blocks,
    Net,
    assert_same_training,
    captured,
    identical,
    mean_square,
    next_token,
    peaks,
    results,
)

MARK = boundary.boundary


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    boundary.reset()
    yield
    boundary.reset()


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return Net(*(nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.2), nn.GELU(), nn.Linear(64, 4)) for _ in range(3)))


@pytest.fixture(scope="module")
def plain(model: nn.Module) -> Program:
    """With checkpoints, without marks."""
    program = captured(model, torch.zeros(16, 4))
    Pipeline([Recompute(("net.0", "net.1"))]).run(program)
    return program


def marked(program: Program, *passes: graphopt.Pass) -> Program:
    copy = program.copy()
    Pipeline(passes).run(copy)
    return copy


def intervals() -> list[str]:
    return [row.name for row in boundary.timings().intervals]


NAMES = [
    "forward start .. net.0",
    "forward net.0 .. net.1",
    "forward net.1 .. backward",
    "backward net.0 .. net.1",
    "backward start .. net.0",
]


# --- the pass --------------------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_where_marks_stand(plain: Program) -> None:
    program = marked(plain, CheckpointBoundaries())
    marks = [node for node in program.nodes if node.target is MARK]
    assert [node.args[1:] for node in marks] == [(name, True, False) for name in [*NAMES, ""]]
    assert not any(node.users for node in marks)
    named = program.names()
    assert [marks[1].prev, marks[2].prev] == [named["net.0"], named["net.1"]]
    for mark in marks[3:5]:
        name = str(mark.args[1]).removeprefix("backward ")
        assert info(mark.next).origin == f"recompute: {name}"
        before = [node for node in program.nodes if info_origin(node) == f"recompute: {name}"]
        assert before[0] is mark.next


def info_origin(node: torch.fx.Node) -> str:
    return "" if node.op == "output" else info(node).origin


@pytest.mark.sweep(but=("True",))
@pytest.mark.parametrize("profile", [False, True])
def test_marks_change_neither_bits_nor_draws_nor_bytes(model: nn.Module, plain: Program, profile: bool) -> None:
    program, x = marked(plain, CheckpointBoundaries(profile=profile)), torch.randn(16, 4)
    one, other = results(plain, model, x), results(program, model, x)
    assert all(identical(value, other[0][key]) for key, value in one[0].items())
    assert torch.equal(one[1], other[1])
    assert peaks(program, model, x) == peaks(plain, model, x)
    assert intervals() == (NAMES if profile else [])


@pytest.mark.sweep
def test_training_equals_eager_bitwise() -> None:
    passes = [Recompute("blocks.*"), CheckpointBoundaries(profile=True)]
    assert_same_training(Blocks(1), "sgd", next_token, [[torch.randint(11, (2, 6))]], passes, steps=1)


@pytest.mark.sweep
def test_times_of_a_whole_step(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    passes = "recompute{checkpoints=net.0,net.1},checkpoint-boundaries{profile=true}"
    step = graphopt.optimize_step(model, optimizer, passes, loss=mean_square)
    step.prepare(torch.randn(16, 4))
    boundary.reset()
    for _ in range(3):
        step(torch.randn(16, 4))
    rows = boundary.timings().intervals
    assert [(row.name, row.calls) for row in rows] == [(name, 3) for name in NAMES]
    assert all(row.seconds > 0 for row in rows)
    assert step.records[1].changed.lines == ("graphopt.ir.ops.boundary.timings() has the times",)


def test_marks_of_checkpoints_that_are_moved(plain: Program, model: nn.Module) -> None:
    moved = marked(plain, Offload(("net.0",), min_bytes=0, keep_last=0, cost="roofline"), CheckpointBoundaries())
    marks = [str(node.args[1]) for node in moved.nodes if node.target is MARK]
    assert marks == [*NAMES, ""]


def test_nothing_to_mark(model: nn.Module) -> None:
    program = captured(model, torch.zeros(16, 4))
    (record,) = Pipeline([CheckpointBoundaries()]).run(program)
    assert record.changed.reason == "the program has no checkpoints: give Recompute(...) too"


def test_a_second_time_is_nothing(plain: Program) -> None:
    program = marked(plain, CheckpointBoundaries())
    (record,) = Pipeline([CheckpointBoundaries()]).run(program)
    assert record.changed.reason == "the boundaries of this program are marked already"


def test_options() -> None:
    with pytest.raises(GraphoptError, match="neither synchronize nor profile is asked for"):
        CheckpointBoundaries(synchronize=False)
    given = CheckpointBoundaries(synchronize=False, profile=True)
    assert str(given) == "checkpoint-boundaries{synchronize=false profile=true}"
    assert Pipeline(str(given)).passes == (given,)


def test_the_program_as_python_and_as_data(plain: Program, model: nn.Module) -> None:
    program = marked(plain, CheckpointBoundaries(profile=True))
    assert "torch.ops.graphopt.boundary.default(" in program.to_python()
    loaded = Program.from_json(program.to_json())
    assert [node.args[1:] for node in loaded.nodes if node.target is MARK] == [
        node.args[1:] for node in program.nodes if node.target is MARK
    ]


# --- the op ----------------------------------------------------------------------------------------------------------


def test_the_op_returns_what_it_is_given(plain: Program) -> None:
    x = torch.randn(3, 4)[:, ::2]
    y = MARK(x, "a", True, False)
    assert (y.data_ptr(), y.shape, y.stride()) == (x.data_ptr(), x.shape, x.stride())
    node = next(node for node in marked(plain, CheckpointBoundaries()).nodes if node.target is MARK)
    assert schema.has_effect(node)
    assert not schema.is_random(node)


def test_intervals_end_where_the_next_begins() -> None:
    x = torch.zeros(1)
    with mock.patch("graphopt.ir.ops.boundary.time.perf_counter", side_effect=[1.0, 3.0, 3.5, 10.0, 12.0, 20.0]):
        for name in ("a", "b", "a", "", "b", ""):
            MARK(x, name, False, True)
    assert boundary.timings().intervals == (boundary.Interval("a", 2, 8.5), boundary.Interval("b", 2, 8.5))
    assert str(boundary.timings()).splitlines() == [
        "interval   calls   ms per call",
        "a              2      4250.000",
        "b              2      4250.000",
    ]
    boundary.reset()
    assert str(boundary.timings()) == "no interval has been timed"
    MARK(x, "", False, True)
    assert not boundary.timings().intervals


def test_marks_from_another_thread_count() -> None:
    MARK(torch.zeros(1), "a", False, True)
    thread = threading.Thread(target=MARK, args=(torch.zeros(1), "", False, True))
    thread.start()
    thread.join()
    assert intervals() == ["a"]


@pytest.mark.gpu
def test_a_mark_waits_for_the_device() -> None:
    x = torch.randn(4096, 4096, device="cuda")
    done = torch.cuda.Event()
    for _ in range(20):
        x = torch.tanh(x @ x)
    done.record()
    MARK(x, "a", True, False)
    assert done.query()
