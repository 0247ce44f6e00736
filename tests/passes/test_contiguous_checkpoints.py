"""ContiguousCheckpoints: checkpoints of one shape share a block; results, and the predicted peak, stay exact."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import graphopt
from graphopt import Pipeline, Program
from graphopt.ir.node import Phase, Policy, info, value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.communication.groups import Group
from graphopt.ir.ops.storage import contiguous
from graphopt.ir.verify import verify
from graphopt.passes import CheckpointBoundaries, ContiguousCheckpoints, Offload, PartitionCheckpoints, Recompute
from graphopt.passes.partition_checkpoints import _insert
from tests.support.fitting import applied, calls, drop_in_peak, step_peaks, structure
from tests.support.training import (
    OPTIMIZERS,
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

ROWS = torch.linspace(-1, 1, 64 * 7).reshape(64, 7).cos()


def layers(count: int = 4, d: int = 7, p: float = 0.2) -> Net:
    """Each layer makes a tensor of 64 × 7 numbers, which is 1,792 bytes."""
    torch.manual_seed(0)
    return Net(
        *(nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Dropout(p), nn.Linear(4 * d, d)) for _ in range(count))
    )


def stored(program: Program) -> list[torch.fx.Node]:
    """The calls that copy a checkpoint to its place."""
    return [node for node in program.nodes if node.target is contiguous.store]


BOTH = [Recompute("net.*"), ContiguousCheckpoints()]


# --- bits and bytes --------------------------------------------------------------------------------------------------


@pytest.mark.sweep(but=("adamw",))
@pytest.mark.parametrize("optimizer", ["adamw", "momentum"])
def test_training_equals_eager(optimizer: str) -> None:
    assert_same_training(layers(), optimizer, mean_square, [(ROWS,), (ROWS.sin(),)], BOTH, steps=3)


@pytest.mark.sweep
def test_training_a_transformer_equals_eager() -> None:
    tokens = torch.arange(64).reshape(4, 16) % 11
    passes = [Recompute("blocks.*"), ContiguousCheckpoints()]
    assert_same_training(Blocks(2), "sgd", next_token, [(tokens,)], passes, steps=2, whole_step=False)


@pytest.mark.sweep
def test_convolutions_whose_channels_are_last() -> None:
    torch.manual_seed(0)
    images = torch.randn(4, 3, 9, 9).to(memory_format=torch.channels_last)
    blocks = [nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU()) for _ in range(3)]
    model = Net(*blocks, nn.Flatten()).to(memory_format=torch.channels_last)
    passes = [Recompute(("net.0", "net.1", "net.2")), ContiguousCheckpoints()]
    program, record = applied(captured(model, images), *passes)
    assert record.changed
    assert {value_of(node).stride() for node in stored(program)} == {(243, 1, 27, 3)}
    predicted, measured = peaks(program, model, images)
    assert predicted == measured
    assert_same_training(model, "sgd", mean_square, [(images,)], passes, steps=2)


def test_the_peak_is_the_predicted_one() -> None:
    model = layers()
    plain = captured(model, ROWS)
    program, record = applied(plain, *BOTH)
    verify(program, before=plain)
    predicted, measured = peaks(program, model, ROWS)
    assert predicted == measured
    assert record.peak_after == program.memory().peak_bytes
    (expected, state), (found, after) = (results(one, copy.deepcopy(model), ROWS) for one in (plain, program))
    assert all(identical(value, expected[spec]) for spec, value in found.items())
    assert torch.equal(state, after)


@pytest.mark.sweep
def test_whole_steps_and_drop_in_models_peak_as_predicted() -> None:
    step, measured = step_peaks(layers(), OPTIMIZERS["adamw"], mean_square, (ROWS,), BOTH)
    assert measured == step.program.memory().allocated_peak_bytes
    model = graphopt.optimize(layers(), BOTH)
    peak = drop_in_peak(model, (ROWS,), lambda model, x: model(x).sum())
    assert peak <= model.program.memory().allocated_peak_bytes + 64


def test_the_places_lie_in_one_piece_of_memory_and_do_not_overlap() -> None:
    """In a drop-in model the last layer's result is returned, and stays as it is."""
    model = graphopt.optimize(layers(), BOTH, example_inputs=(ROWS,))
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x), x)[1], lambda x: x):
        model(ROWS)
    places = sorted((x for x in kept if x.shape == ROWS.shape and x.untyped_storage().nbytes() > 1792), key=_place)
    assert len({x.untyped_storage().data_ptr() for x in places}) == 1
    assert [_place(x) - _place(places[0]) for x in places] == [0, 1792, 3584]


def _place(x: torch.Tensor) -> int:
    return x.data_ptr()


@pytest.mark.sweep
def test_places_are_aligned_as_memory_of_their_own_would_be() -> None:
    """33 × 7 numbers are 924 bytes; each place starts at a multiple of 64."""
    program, _ = applied(captured(layers(), ROWS[:33]), *BOTH)
    assert [node.args[2] for node in stored(program)] == [0, 240, 480, 720]
    (block,) = calls(program, "block")
    assert value_of(block).shape == (720 + 231,)
    assert {info(node).policy for node in stored(program)} == {Policy.MUST_SAVE}


@pytest.mark.sweep
def test_everything_reads_a_checkpoint_at_its_place() -> None:
    program, record = applied(captured(layers(), ROWS), *BOTH)
    for node in stored(program):
        made = node.args[1]
        assert isinstance(made, torch.fx.Node)
        assert set(made.users) == {node}
        assert any(info(user).phase is not Phase.FORWARD for user in schema.readers(node))
    assert record.changed.tensors == tuple(info(node).names[0] for node in stored(program))


# --- with other passes -----------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_what_stays_on_the_device_is_stored_and_the_rest_waits_on_the_host() -> None:
    passes = [*BOTH, Offload(min_bytes=0, cost="roofline", keep_last=2), CheckpointBoundaries()]
    names = [current.name for current in Pipeline(passes).passes]
    assert names.index("offload") < names.index("contiguous-checkpoints")
    rows = ROWS.repeat(16, 1)
    program, _ = applied(captured(layers(6), rows), *passes)
    assert (len(calls(program, "offload")), len(stored(program))) == (4, 2)
    assert_same_training(layers(6), "sgd", mean_square, [(rows,)], passes, steps=2)


@pytest.mark.sweep
@pytest.mark.parametrize("size", [2, 3])
def test_slices_of_partitioned_checkpoints_are_stored(size: int) -> None:
    program, _ = applied(captured(layers(p=0.0), ROWS), Recompute("net.*"))
    chosen, _ = PartitionCheckpoints(min_bytes=0)._choose(program)
    _insert(program, chosen, Group("g", size - 1, size, None), check=False)
    program.erase_dead()
    changed, record = applied(program, ContiguousCheckpoints())
    assert len(chosen) == len(stored(changed)) == 4
    assert {name.rpartition("/")[2] for name in record.changed.tensors} == {"part"}
    gathers = calls(changed, "all_gather_into_tensor")
    assert {node.args[0] for node in gathers} == set(stored(changed))


@pytest.mark.sweep
def test_checkpoints_of_two_shapes_get_two_blocks() -> None:
    model = Net(*list(layers(2, 7).net), nn.Linear(7, 14), *list(layers(2, 14).net))
    program, record = applied(captured(model, ROWS), Recompute(("net.0", "net.1", "net.3", "net.4")), BOTH[1])
    assert record.changed.counts == {"stored": 4, "blocks": 2}
    assert len(calls(program, "block")) == 2
    assert len({node.args[3] for node in calls(program, "block")}) == 2
    predicted, measured = peaks(program, model, ROWS)
    assert predicted == measured


# --- what is said and what is left -----------------------------------------------------------------------------------


def test_the_record_says_what_it_is_for_and_what_it_costs() -> None:
    _, record = applied(captured(layers(), ROWS), *BOTH)
    assert record.changed.lines[0].startswith(
        "4 checkpoints f32[64, 7] (1.8 kB each) lie in one block of 7.2 kB: one allocation against fragmentation, held "
        "until backward has read net"
    )
    assert record.peak_before is not None
    assert record.peak_after is not None
    rises = [line for line in record.changed.lines if line.startswith("the predicted peak rises by")]
    assert bool(rises) == (record.peak_after > record.peak_before)


class Returned(nn.Module):
    """The first checkpoint is returned, the last is seen from the start of its storage, two are like each other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = graphopt.name(self.layers[0](x).tanh(), "first")
        second = graphopt.name(self.layers[1](first).tanh(), "second")
        third = graphopt.name(self.layers[2](second).tanh(), "third")
        fourth = graphopt.name(self.layers[3](third).tanh(), "fourth")
        return fourth.as_strided((64, 7), (7, 1), 0).sin().exp(), first


@pytest.mark.sweep
def test_checkpoints_that_cannot_be_stored_are_named() -> None:
    program = graphopt.capture(Returned(), (ROWS,))
    changed, record = applied(program, Recompute(("first", "second", "third", "fourth")), ContiguousCheckpoints())
    assert [info(node).names[0] for node in stored(changed)] == ["second", "third"]
    said = "\n".join(record.changed.lines)
    assert "first stays as it is: the program returns it" in said
    assert "fourth stays as it is: a view of it counts from the start of its storage" in said


@pytest.mark.sweep
def test_one_checkpoint_alone_stays() -> None:
    plain, _ = applied(captured(layers(), ROWS), Recompute("net.1"))
    program, record = applied(plain, ContiguousCheckpoints())
    assert record.changed.reason == "net.1 stays as it is: no other is like it"
    assert structure(program) == structure(plain)


def test_without_checkpoints_and_a_second_time() -> None:
    plain = captured(layers(), ROWS)
    assert "give Recompute(...) too" in applied(plain, ContiguousCheckpoints())[1].changed.reason
    program, _ = applied(plain, *BOTH)
    again, record = applied(program, ContiguousCheckpoints())
    assert record.changed.reason == "the checkpoints of this program lie in blocks already"
    assert structure(again) == structure(program)


@pytest.mark.sweep
def test_as_text_and_as_json() -> None:
    assert Pipeline("contiguous-checkpoints").passes == (ContiguousCheckpoints(),)
    model = layers(p=0.0)
    program, _ = applied(captured(model, ROWS), *BOTH)
    loaded = Program.from_json(program.to_json())
    expected, found = (results(one, copy.deepcopy(model), ROWS)[0] for one in (program, loaded))
    assert all(identical(found[spec], value) for spec, value in expected.items())


def test_the_ops() -> None:
    block = contiguous.block(12, torch.float64, torch.device("cpu"), 0)
    assert (block.shape, block.dtype) == ((12,), torch.float64)
    x = torch.randn(3, 2, dtype=torch.float64).t()
    y = contiguous.store(block, x, 6)
    assert torch.equal(y, x)
    assert (y.stride(), y.storage_offset()) == (x.stride(), 6)
    assert y.untyped_storage().data_ptr() == block.untyped_storage().data_ptr()
    torch.library.opcheck(contiguous.block, (12, torch.float64, torch.device("cpu"), 0), test_utils="test_faketensor")
