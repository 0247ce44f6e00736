"""Offload: tensors wait on the host or on the disk, come back as they were, and leave the peak that was predicted."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import graphopt
from graphopt import Phase, Policy, measure_peak
from graphopt.ir.node import info
from graphopt.ir.ops import schema, transfers
from graphopt.ir.ops.storage import transfer
from graphopt.ir.verify import verify
from graphopt.passes import Offload, Recompute
from tests.support.covering import covering
from tests.support.fitting import applied, calls, step_peaks
from tests.support.offloading import ROWS, layers, moved, nothing_held_afterwards, off
from tests.support.training import (
    OPTIMIZERS,
    Net,
    assert_same_training,
    captured,
    identical,
    mean_square,
    peaks,
    results,
)


@pytest.fixture(autouse=True)
def _nothing_is_held_afterwards() -> Iterator[None]:
    with nothing_held_afterwards():
        yield


# --- bits and bytes --------------------------------------------------------------------------------------------------


@pytest.mark.sweep(but=("host-auto",))
@covering(tier=transfers.TIERS, prefetch=["auto", 0, 1, 3])
def test_results_are_the_programs_and_the_peak_is_the_predicted_one(tier: str, prefetch: int | str) -> None:
    model = layers()
    plain = captured(model, ROWS)
    program, record = applied(plain, off(tier=tier, prefetch=prefetch))
    verify(program, before=plain)
    assert record.changed
    assert program.memory().peak_bytes == record.peak_after < plain.memory().peak_bytes
    predicted, measured = peaks(program, model, ROWS)
    assert measured == predicted
    one, other = copy.deepcopy(model), copy.deepcopy(model)
    (expected, state), (found, after) = results(plain, one, ROWS), results(program, other, ROWS)
    assert [spec for spec, value in found.items() if not identical(value, expected[spec])] == []
    assert torch.equal(state, after)


@pytest.mark.sweep(but=("host-adamw",))
@pytest.mark.parametrize(("tier", "optimizer"), [("host", "adamw"), ("disk", "momentum")])
def test_training_equals_eager(tier: str, optimizer: str) -> None:
    batches = [(ROWS,), (ROWS.sin(),)]
    assert_same_training(layers(), optimizer, mean_square, batches, [off(tier=tier)], steps=3)


@pytest.mark.sweep
def test_training_with_recomputation_and_offloaded_checkpoints_equals_eager() -> None:
    passes = [Recompute(["net.3", "net.5", "net.7"]), off()]
    assert_same_training(layers(), "sgd", mean_square, [(ROWS,)], passes, steps=2)
    program, record = applied(captured(layers(p=0.0), ROWS), *passes)
    assert record.changed, record.changed.reason
    assert set(moved(program)) <= {"net.3", "net.5", "net.7"}


def conv() -> nn.Module:
    torch.manual_seed(0)
    return Net(
        nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8),
        nn.GELU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(144, 4),
    ).to(memory_format=torch.channels_last)  # fmt: skip


@pytest.mark.sweep
def test_convolutions_whose_channels_are_last_come_back_with_their_strides() -> None:
    images = torch.randn(8, 4, 16, 16).to(memory_format=torch.channels_last)
    passes = [off(min_bytes=1000, keep_last=0)]
    model = Net(*list(conv().net)[:7], nn.Flatten(), nn.Linear(512, 4)).to(memory_format=torch.channels_last)
    program, record = applied(captured(model, images), *passes)
    assert record.changed
    strides = {node.args[2][1] for node in calls(program, "prefetch") if len(node.args[1]) == 4}  # type: ignore[index,arg-type]
    assert 1 in strides
    predicted, measured = peaks(program, model, images)
    assert predicted == measured
    assert_same_training(model, "sgd", mean_square, [(images,)], passes, steps=2)


def test_a_whole_step_peaks_as_predicted() -> None:
    plain, _ = step_peaks(layers(), OPTIMIZERS["adamw"], mean_square, (ROWS,), [])
    step, measured = step_peaks(layers(), OPTIMIZERS["adamw"], mean_square, (ROWS,), [off()])
    assert step.records[0].changed
    assert measured == step.program.memory().allocated_peak_bytes < plain.program.memory().allocated_peak_bytes


@pytest.mark.sweep
def test_drop_in_training_peaks_lower() -> None:
    def peak(model: nn.Module) -> int:
        model(ROWS).sum().backward()
        model.zero_grad()
        return measure_peak(lambda: model(ROWS).sum().backward()).allocated_peak_bytes

    assert peak(graphopt.optimize(layers(), [off()])) < peak(graphopt.optimize(layers()))


# --- what is moved ---------------------------------------------------------------------------------------------------


def test_names_globs_and_everything() -> None:
    plain = captured(layers(), ROWS)
    by_name, _ = applied(plain, off("net.4", "net.6", keep_last=0))
    assert moved(by_name) == ["net.4", "net.6"]
    by_glob, _ = applied(plain, off("net.*"))
    assert set(moved(by_glob)) <= {f"net.{number}" for number in range(14)}
    everything, record = applied(plain, off())
    assert set(moved(by_name)) < set(moved(everything))
    assert set(record.changed.tensors) == set(moved(everything))
    assert record.changed.counts == {"offloaded": len(moved(everything))}
    policies = [info(node).policy for node in everything.find(*moved(everything)).values()]
    assert set(policies) == {Policy.MUST_CPU_OFFLOAD}


def test_the_tensors_that_backward_needs_first_stay() -> None:
    plain = captured(layers(), ROWS)
    _, one = applied(plain, off(keep_last=1))
    _, two = applied(plain, off(keep_last=2))
    _, none = applied(plain, off(keep_last=0))
    counts = [record.changed.counts["offloaded"] for record in (none, one, two)]
    assert counts == [counts[0], counts[0] - 1, counts[0] - 2]
    assert "net.12 stays: backward begins with it" in "\n".join(one.changed.lines)
    assert "net.12" in none.changed.tensors
    assert "net.12" not in one.changed.tensors


def test_what_is_moved_is_not_read_by_backward_itself() -> None:
    program, record = applied(captured(layers(), ROWS), off())
    for name in record.changed.tensors:
        readers = {info(user).phase for user in program.find(name)[name].users}
        assert readers <= {Phase.FORWARD, Phase.TRANSFER}


@pytest.mark.sweep
def test_how_far_ahead_copies_back_start() -> None:
    plain = captured(layers(), ROWS)
    together = {}
    for prefetch in (0, 1, 3):
        program, _ = applied(plain, off(prefetch=prefetch))
        level, most = 0, 0
        for node in program.phase_nodes(Phase.TRANSFER):
            level += {"prefetch": 1, "prefetch_wait": -1}.get(schema.op_name(node), 0)
            most = max(most, level)
        together[prefetch] = most
    assert together[0] == 1
    assert together[0] < together[1] < together[3]


@pytest.mark.sweep
def test_whatever_the_link_the_peak_goes_as_low(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a slow link the computation waits, and in drop-in training no copy away goes on in backward."""
    plain, found = captured(layers(), ROWS), set()
    for rate in (1e3, 1e8, 1e15):
        monkeypatch.setattr(sys.modules[Offload.__module__], "link_bandwidth", lambda device, tier, rate=rate: rate)
        program, _ = applied(plain, off())
        found.add(program.memory().peak_bytes)
        model = graphopt.optimize(layers(), [off()], example_inputs=(ROWS,))
        halves = [model.forward_graph, model.backward_graph]
        waits = [[node for node in half.graph.nodes if node.target is transfer.offload_wait] for half in halves]
        assert [len(nodes) for nodes in waits] == [model.records[0].changed.counts["offloaded"], 0]
    assert len(found) == 1
    assert found.pop() < 0.65 * plain.memory().peak_bytes


@pytest.mark.sweep
def test_the_record_says_where_tensors_wait_and_for_how_long() -> None:
    _, record = applied(captured(layers(), ROWS), off(tier="disk"))
    text = "\n".join(record.changed.lines)
    assert "tensors wait on the disk, over a link of" in text
    for name in record.changed.tensors:
        assert f"  {name}: 65.5 kB, freed" in text


class Views(nn.Module):
    """Backward reads views of one large tensor only: transposed, a slice, expanded, parts of a split, one of a view."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = graphopt.name(self.b(self.a(x).tanh()).sin(), "base")
        left, right = y.split([24, 40], -1)
        gram = y.t() @ y
        spread = y[:32, None, 3:7].expand(32, 5, 4)
        total = left.cos().sum(-1) * right.exp().sum(-1) + gram.sum() + (spread * spread).sum()
        z = torch.tanh(total[:, None] * y[:1, ::9].sigmoid().sum() * self.a(x))
        return self.b(self.b(z).tanh()).sigmoid()


@pytest.mark.sweep
def test_views_are_made_anew_on_what_came_back() -> None:
    model = Views()
    plain = captured(model, ROWS)
    program, record = applied(plain, off("base", keep_last=0))
    verify(program, before=plain)
    assert record.changed, record.changed.reason
    assert moved(program) == ["base"]
    assert Phase.BACKWARD not in {info(node).phase for node in program.find("base")["base"].users}
    predicted, measured = peaks(program, model, ROWS)
    assert predicted == measured
    assert_same_training(model, "sgd", mean_square, [(ROWS,)], [off("base", keep_last=0)], steps=2)


class Parts(nn.Module):
    """An op with several large results, of which backward reads some."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values, order = self.a(x).sort(-1)
        z = self.b(values.tanh()).sigmoid()
        return (z * values.gather(-1, order)).sin().cos().tanh()


@pytest.mark.sweep
def test_results_of_an_op_with_several_are_moved_one_by_one() -> None:
    model = Parts()
    plain = captured(model, ROWS)
    program, record = applied(plain, off(keep_last=0))
    assert record.changed, record.changed.reason
    predicted, measured = peaks(program, model, ROWS)
    assert predicted == measured
    assert_same_training(model, "sgd", mean_square, [(ROWS,)], [off(keep_last=0)], steps=2)


def test_the_ops_are_those_of_the_transfers() -> None:
    program, record = applied(captured(layers(), ROWS), off())
    count = record.changed.counts["offloaded"]
    for op in (transfer.offload, transfer.offload_wait, transfer.prefetch, transfer.prefetch_wait):
        assert len([node for node in program.nodes if node.target is op]) == count
