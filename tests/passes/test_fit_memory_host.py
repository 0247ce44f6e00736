"""FitMemory: tensors that wait on the host."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator

import pytest
import torch

import graphopt
from graphopt.ir.ops import transfers
from graphopt.ir.ops.storage import transfer
from graphopt.rewriting.memory.transfers import transfer_insertion as moving
from tests.support.budgets import fit
from tests.support.errors import attempt
from tests.support.fitting import applied, frontiers_searched_once, wide
from tests.support.training import assert_same_training, captured, identical, mean_square, peaks, results


@pytest.fixture(autouse=True, scope="module")
def _searched_once() -> Iterator[None]:
    with frontiers_searched_once():
        yield


BIG = torch.linspace(-1, 1, 2048 * 8).reshape(2048, 8).cos()


@pytest.mark.sweep
@pytest.mark.parametrize("allow", [("offload",), ("recompute", "offload")])
def test_with_a_host_budget_tensors_can_wait_there(allow: tuple[str, ...]) -> None:
    model = wide(inner=256)
    plain = captured(model, BIG)
    program, record = applied(plain, fit("70%", host_budget="1GB", allow=allow))
    assert program.memory().peak_bytes <= 0.7 * plain.memory().peak_bytes
    if allow == ("offload",):
        assert record.changed.counts["offloaded"] > 0
        assert record.changed.counts["recomputed"] == 0
    predicted, measured = peaks(program, model, BIG)
    assert predicted == measured
    expected, state = results(plain, copy.deepcopy(model), BIG)
    found, after = results(program, copy.deepcopy(model), BIG)
    assert all(identical(value, expected[spec]) for spec, value in found.items())
    assert torch.equal(state, after)
    assert transfers.statistics().stored_bytes == 0


@pytest.mark.sweep
@pytest.mark.parametrize("rate", [1e4, 1e8])
def test_over_a_slow_link_the_computation_waits_and_the_peak_is_met(
    rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiting for copies away costs seconds, and no bytes; the drop-in model frees nothing in backward."""
    monkeypatch.setattr(moving, "link_bandwidth", lambda device, tier: rate)
    model = wide(inner=256)
    plain = captured(model, BIG)
    program, record = applied(plain, fit("60%", host_budget="1GB", allow=("offload",)))
    assert re.search(r"waiting for copies \S+ ?m?s", "\n".join(record.changed.lines))
    predicted, measured = peaks(program, model, BIG)
    assert predicted == measured
    assert program.memory().peak_bytes <= 0.6 * plain.memory().peak_bytes
    optimized = graphopt.optimize(wide(inner=256), [fit("60%", host_budget="1GB", allow=("offload",))])
    mean_square(optimized, BIG).backward()
    late = [node for node in optimized.backward_graph.graph.nodes if node.target is transfer.offload_wait]
    assert late == []


def test_training_with_tensors_on_the_host_equals_eager() -> None:
    passes = [fit("75%", host_budget="1GB", allow=("offload",))]
    assert_same_training(wide(inner=256), "sgd", mean_square, [(BIG,)], passes, steps=2)


def test_the_host_budget_is_kept() -> None:
    plain = captured(wide(inner=256), BIG)
    error = attempt(lambda: applied(plain, fit("60%", host_budget=1000, allow=("offload",))))
    assert "no plan fits" in str(error)
