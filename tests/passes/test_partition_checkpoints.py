"""PartitionCheckpoints: slices that make the whole again, and two processes that train to the same bits as one.

Starting processes takes seconds, so one pair of them does everything: each test looks at a part of what they said.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from graphopt import GraphoptError, PassError, Pipeline, PipelineError, Program
from graphopt.ir.node import Phase, Policy, info, value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.communication.collectives import ALL_GATHER
from graphopt.ir.ops.communication.groups import Group
from graphopt.passes import PartitionCheckpoints, Recompute
from graphopt.passes.partition_checkpoints import _insert
from tests.support.ranks import run_ranks
from tests.support.training import Net, captured, ops, recomputed

SCRIPT = """
import dataclasses
from torch import nn
from graphopt import Changed, GraphoptError, PassError, Pipeline, measure_peak
from graphopt.ir.ops.communication.groups import find_group
from graphopt.ir.ops.communication.collectives import ALL_GATHER, WAIT
from graphopt.ir.ops.storage import contiguous
from graphopt.passes import ContiguousCheckpoints, Offload, PartitionCheckpoints, Recompute
from graphopt.passes.partition_checkpoints import _insert
from tests.support.training import (
    Blocks, Net, Plain, assert_same_training, captured, identical, mean_square, next_token, peaks, results,
)

torch.manual_seed(0)
pair = dist.new_group([0, 1]).group_name
said, at_once = {}, say

def say(key, value):
    said[key] = value

def trained(model, loss, batch, passes, whole_step=True):
    assert_same_training(model, "sgd", loss, [batch], passes, steps=1, whole_step=whole_step)
    return True

class Wide(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(d, 2 * d), nn.Linear(2 * d, d), nn.Dropout(0.1)
    def forward(self, x):
        return x + self.drop(self.down(torch.nn.functional.gelu(self.up(x))))

@dataclasses.dataclass(frozen=True)
class Always(Plain):
    "PartitionCheckpoints where it does not lower the peak."
    stage = "last"
    def apply(self, program):
        chosen, _ = slices._choose(program)
        assert len(chosen) == 2
        _insert(program, chosen, find_group(""), check=True)
        return Changed(counts={"partitioned": 2})

slices = PartitionCheckpoints(min_bytes=0)
tokens = torch.randint(11, (16, 33))
say("transformer", trained(Blocks(2, d=8), next_token, [tokens], [Recompute("blocks.*"), Always()]))
images = torch.randn(5, 3, 9, 9).contiguous(memory_format=torch.channels_last)
layers = [*(nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU()) for _ in range(2)), nn.Flatten()]
convolution = Net(*layers).to(memory_format=torch.channels_last)
say("channels last", trained(convolution, mean_square, [images], [Recompute(("net.0", "net.1")), Always()], False))

torch.manual_seed(0)
model, x = Net(*(Wide(31) for _ in range(3))), torch.randn(1001, 31)
whole = captured(model, x)
Pipeline([Recompute("net.*")]).run(whole)
parted = whole.copy()
(record,) = Pipeline([PartitionCheckpoints(pair, min_bytes=0)]).run(parted)
(again,) = Pipeline([slices]).run(parted.copy())
say("again", str(again))
say("counts", dict(record.changed.counts))
say("lines", list(record.changed.lines))
say("peaks", [whole.memory().peak_bytes, parted.memory().peak_bytes])

def equal(program):
    one, other = results(whole, model, x), results(program, model, x)
    return all(identical(value, other[0][key]) for key, value in one[0].items()) and torch.equal(one[1], other[1])

say("bitwise", equal(parted))
# gloo's thread may let go of a slice a moment after the wait has returned, so one run in several counts
say("measured", [peaks(parted, model, x) for _ in range(8)])

away = whole.copy()
Pipeline([Offload(min_bytes=0, cost="roofline"), slices]).run(away)
say("with offload", [equal(away), away.memory().peak_bytes, "offload" in away.to_text()])

stored = whole.copy()
Pipeline([slices, ContiguousCheckpoints()]).run(stored)
say("contiguous", [equal(stored), len([node for node in stored.nodes if node.target is contiguous.store])])
say("contiguous measured", [peaks(stored, model, x) for _ in range(4)])

def outcome(program, *batch):
    try:
        results(program, model, *batch)
        return ""
    except GraphoptError as error:
        return str(error)

same = torch.randn(999, 31)  # of a shape that is not compared yet
mine = captured(model, same)
Pipeline([Recompute("net.*"), slices]).run(mine)
trusting = captured(model, same)
Pipeline([Recompute("net.*"), PartitionCheckpoints(pair, min_bytes=0, check=False)]).run(trusting)
other = same.clone()  # ranks of a data-parallel group hold different values
other[998, 30] += rank * 1e-6
say("unchecked", outcome(trusting, other))
say("other values", [outcome(mine, other), outcome(mine, other), outcome(mine, same), outcome(mine, other)])

different = {
    "other plan": PartitionCheckpoints(min_bytes=rank * 10**9),
    "other checkpoints": slices,
    "other check": PartitionCheckpoints(min_bytes=0, check=rank == 0),
}
for rows, (key, options) in enumerate(different.items(), 1002):  # plans that no rank has agreed to before
    program = captured(model, torch.randn(rows, 31))
    try:
        Pipeline([Recompute("net.*" if key != "other checkpoints" or rank else "net.0"), options]).run(program)
        say(key, "")
    except PassError as error:
        say(key, str(error))

def gather():
    return WAIT(ALL_GATHER(torch.ones(1000), 2, pair))

gather()
say("workspace", [measure_peak(gather).allocated_peak_bytes for _ in range(8)])

at_once(said)
dist.barrier()
if rank == 1:
    os._exit(7)
try:
    results(parted, model, x)
    at_once("ran")
except RuntimeError as error:
    at_once(str(error))
os._exit(0)
"""


# --- two processes ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What rank 0 and rank 1 said, and what rank 0 said when rank 1 was gone."""
    store = tmp_path_factory.mktemp("ranks") / "store"
    zero, one = run_ranks(SCRIPT, 2, store, codes=[0, 7])
    return {"0": zero[0], "1": one[0], "left alone": zero[1]}


@pytest.fixture(params=["0", "1"])
def rank(request: pytest.FixtureRequest, said: dict[str, Any]) -> dict[str, Any]:
    """What each rank said."""
    found: dict[str, Any] = said[request.param]
    return found


@pytest.mark.sweep
@pytest.mark.parametrize("model", ["transformer", "channels last"])
def test_training_equals_eager_bitwise(rank: dict[str, Any], model: str) -> None:
    assert rank[model]


@pytest.mark.sweep(but=("1",))
def test_slices_of_uneven_size_give_the_same_bits_at_a_lower_peak(rank: dict[str, Any]) -> None:
    """31031 elements for two ranks."""
    assert rank["bitwise"]
    assert rank["peaks"][1] < rank["peaks"][0]
    assert rank["counts"] == {"partitioned": 3}


def test_the_peak_is_what_was_predicted(rank: dict[str, Any]) -> None:
    assert any(measured == predicted for predicted, measured in rank["measured"]), rank["measured"]


def test_the_record_says_what_each_rank_keeps(said: dict[str, Any]) -> None:
    for number in "01":
        (line,) = said[number]["lines"]
        assert line.startswith(f"rank {number} of 2 of the group ")
        assert line.endswith(" keeps 186.2 kB of 372.4 kB in 3 checkpoints")


def test_the_slices_wait_on_the_host(rank: dict[str, Any]) -> None:
    equal, peak, offloaded = rank["with offload"]
    assert (equal, offloaded) == (True, True)
    assert peak < rank["peaks"][1]


def test_a_second_time_is_nothing(rank: dict[str, Any]) -> None:
    assert "nothing: the checkpoints of this program are partitioned already" in rank["again"]


def test_ranks_that_mean_to_do_different_things_are_told(rank: dict[str, Any]) -> None:
    assert "step 0 is 'net" in rank["other plan"]
    assert "f32[1002, 31]' on rank 0 and 'nothing' on rank 1; run the same model" in rank["other plan"]
    assert "do not mean to do the same" in rank["other checkpoints"]


def test_ranks_that_check_and_others_that_do_not_are_told(rank: dict[str, Any]) -> None:
    assert "is 'check=True' on rank 0 and 'check=False' on rank 1" in rank["other check"]


def test_ranks_with_other_values_are_told_at_the_first_run(rank: dict[str, Any]) -> None:
    """One bit is enough; the check is over once it has passed, and can be left out."""
    first, second, same, later = rank["other values"]
    assert first == second
    assert first.startswith("'net.0' on rank 1 of the group ")
    assert "is not what it is on rank 0" in first
    assert (same, later) == ("", "")
    assert rank["unchecked"] == ""


def test_slices_lie_in_one_block(rank: dict[str, Any]) -> None:
    assert rank["contiguous"] == [True, 3]
    assert any(measured == predicted for predicted, measured in rank["contiguous measured"])


def test_a_gather_takes_what_it_is_given_and_its_result(rank: dict[str, Any]) -> None:
    """A slice of 4,000 bytes, and the result of 8,000."""
    assert set(rank["workspace"]) == {12_000}


def test_a_rank_that_dies_is_an_error_on_the_others(said: dict[str, Any]) -> None:
    assert said["left alone"] != "ran"
    assert "onnection" in said["left alone"]


# --- one process -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def program() -> Program:
    """Three checkpoints of 7 × 5 elements."""
    return recomputed(captured(Net(*(nn.Linear(5, 5) for _ in range(3))), torch.randn(7, 5)), "net.*")


def partitioned(program: Program, group: Group) -> Program:
    """A copy whose checkpoints are cut and gathered for a rank of a group that need not exist."""
    copy = program.copy()
    chosen, left = PartitionCheckpoints(min_bytes=0)._choose(copy)
    assert not left
    _insert(copy, chosen, group, check=False)
    copy.erase_dead()
    return copy


@pytest.mark.parametrize("size", [2, 3, 40])
def test_the_slices_of_all_ranks_make_the_whole(program: Program, size: int) -> None:
    """Also with more ranks than elements."""
    torch.manual_seed(0)
    inputs = [torch.randn(tensor.shape) for tensor in (value_of(node) for node in program.placeholders)]
    slices: dict[str, list[torch.Tensor]] = {}
    for rank in range(size):
        copy = partitioned(program, Group("g", rank, size, None))
        for name, part in copy.find("**/part").items():
            slices.setdefault(name, []).append(computed(copy, part, inputs))
    for name, parts in slices.items():
        whole = computed(program, program.names()[name.removesuffix("/part")], inputs)
        assert len({part.numel() for part in parts}) == 1
        assert torch.equal(torch.cat(parts)[: whole.numel()].view(whole.shape), whole)
        assert not torch.cat(parts)[whole.numel() :].any()
    assert len(slices) == 3


def computed(program: Program, node: Any, inputs: list[torch.Tensor]) -> torch.Tensor:
    """What a node of forward computes."""
    values = dict(zip(program.placeholders, inputs, strict=True))
    for call in program.phase_nodes(Phase.FORWARD):
        args = torch.fx.map_arg(call.args, values.__getitem__)
        values[call] = call.target(*args, **torch.fx.map_arg(call.kwargs, values.__getitem__))
        if call is node:
            return values[call]
    raise AssertionError(node)


def test_the_program(program: Program) -> None:
    copy = partitioned(program, Group("g", 1, 2, None))
    assert ops(copy, Phase.SYNC) == ["all_gather_into_tensor", "wait_tensor", "as_strided"] * 3
    gathers = [node for node in copy.phase_nodes(Phase.SYNC) if node.target is ALL_GATHER]
    assert [(info(node.args[0]).names, node.args[1:]) for node in gathers] == [
        (("net/part",), (2, "g")),
        (("net.1/part",), (2, "g")),
        (("net.0/part",), (2, "g")),
    ]
    assert {info(node).policy for node in copy.find("net.0/part", "net.1/part").values()} == {Policy.MUST_SAVE}
    assert {info(node).policy for node in copy.find("net.0", "net.1").values()} == {None}
    late = [n for n in copy.nodes if n.op == "call_function" and info(n).phase in (Phase.BACKWARD, Phase.RECOMPUTE)]
    wholes = set(copy.find("net.0", "net.1").values())
    assert not any(wholes.intersection(map(schema.storage_root, node.all_input_nodes)) for node in late)


def test_without_process_groups(program: Program) -> None:
    with pytest.raises(PassError, match=r"there is no process group: call torch\.distributed\.init_process_group"):
        Pipeline([PartitionCheckpoints()]).run(program.copy())


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[str]:
    """A process group of one process; its name."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD.group_name
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("named", [False, True])
def test_a_group_of_one(program: Program, alone: str, named: bool) -> None:
    copy = program.copy()
    (record,) = Pipeline([PartitionCheckpoints(alone if named else "", min_bytes=0)]).run(copy)
    assert record.changed.reason == f"the group {alone!r} has one process, which keeps its checkpoints whole"
    assert [node.format_node() for node in copy.nodes] == [node.format_node() for node in program.nodes]


@pytest.mark.usefixtures("alone")
def test_an_unknown_group(program: Program) -> None:
    with pytest.raises(PassError, match="belongs to no process group called 'tensor-parallel'; its groups are 0"):
        Pipeline([PartitionCheckpoints("tensor-parallel")]).run(program.copy())


@pytest.mark.parametrize(
    ("min_bytes", "reason"), [(10_000, "net.0 is kept whole: its 140 B are less than min_bytes"), (0, "")]
)
def test_small_checkpoints_are_kept_whole(program: Program, min_bytes: int, reason: str) -> None:
    chosen, left = PartitionCheckpoints(min_bytes=min_bytes)._choose(program)
    assert [item.name for item in chosen] == ([] if reason else ["net", "net.1", "net.0"])
    assert left[:1] == ([reason] if reason else [])


def test_options() -> None:
    (given,) = Pipeline('partition-checkpoints{group="tensor parallel" min-bytes=0}').passes
    assert given == PartitionCheckpoints("tensor parallel", 0)
    assert str(given) == 'partition-checkpoints{group="tensor parallel" min-bytes=0}'
    assert Pipeline("partition-checkpoints{check=false}").passes == (PartitionCheckpoints(check=False),)
    with pytest.raises(GraphoptError, match="min_bytes is a number of bytes of at least 0, got -1"):
        PartitionCheckpoints(min_bytes=-1)
    with pytest.raises(PipelineError, match="no option 'groups'; did you mean 'group'"):
        Pipeline("partition-checkpoints{groups=x}")


def test_order() -> None:
    order = Pipeline("offload,partition-checkpoints,recompute{checkpoints=net.*}").passes
    assert [item.name for item in order] == ["recompute", "partition-checkpoints", "offload"]
    assert Recompute("net.*") in order
