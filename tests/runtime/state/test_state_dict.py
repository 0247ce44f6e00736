"""States of a step for another number of ranks: what has not been exchanged yet is neither lost nor counted twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import graphopt
from graphopt import GraphoptError
from graphopt.runtime.state import state_dict as resume


def state_of(rank: int, ranks: int, residual: torch.Tensor, **changes: Any) -> dict[str, Any]:
    return {
        "version": resume.STATE_VERSION, "rank": rank, "ranks": ranks, "local": ["residual", "count"], "steps": 7,
        "numbers": {"a": 1.0}, "accumulate": 2, "mean": True, "batches": 1, "gradients": {"w": residual * 3},
        "held": {"residual": residual, "count": torch.tensor(rank + 1), "scale": torch.tensor(2.0)}, **changes,
    }  # fmt: skip


def states(ranks: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(ranks)
    return [state_of(rank, ranks, torch.randn(5, dtype=torch.float64, generator=generator)) for rank in range(ranks)]


@given(st.integers(1, 6), st.integers(1, 6))
def test_the_mean_over_the_ranks_stays(old: int, new: int) -> None:
    before, after = states(old), graphopt.redistribute(states(old), new)
    assert [state["rank"] for state in after] == list(range(new))
    assert {state["ranks"] for state in after} == {new}
    for key in (lambda state: state["held"]["residual"], lambda state: state["gradients"]["w"]):
        torch.testing.assert_close(
            torch.stack([key(state) for state in after]).mean(0),
            torch.stack([key(state) for state in before]).mean(0),
            rtol=0, atol=1e-12,
        )  # fmt: skip
    assert sum(int(state["held"]["count"]) for state in after) == sum(range(1, old + 1))
    assert all(state["steps"] == 7 and float(state["held"]["scale"]) == 2 for state in after)


def test_as_many_ranks_as_before_get_their_own_state_to_the_last_bit() -> None:
    before = states(3)
    after = graphopt.redistribute(before[::-1], 3)
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one["held"]["residual"], other["held"]["residual"])


def test_states_that_do_not_belong_together_are_refused() -> None:
    found = states(3)
    with pytest.raises(GraphoptError, match=r"each of the 3 ranks; got those of 0, 2"):
        graphopt.redistribute([found[0], found[2]], 2)
    with pytest.raises(GraphoptError, match=r"'steps' is \[7, 8, 7\]"):
        graphopt.redistribute([found[0], {**found[1], "steps": 8}, found[2]], 2)
    with pytest.raises(GraphoptError, match="no state of a TrainStep of this version"):
        graphopt.redistribute([{**found[0], "version": 1}], 2)
    with pytest.raises(GraphoptError, match="at least 1"):
        graphopt.redistribute(found, 0)


def test_another_ranks_state_is_refused_where_ranks_differ() -> None:
    model = nn.Linear(4, 2)
    step = graphopt.optimize_step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=lambda m, x: m(x).sum())
    with pytest.raises(GraphoptError, match=r"saved by 2 ranks; here are 1: .*graphopt\.redistribute"):
        step.load_state_dict(state_of(1, 2, torch.zeros(5), gradients={"weight": torch.zeros(2, 4)}))
    with pytest.raises(GraphoptError, match=r"is rank 1's; this is rank 0"):
        step.load_state_dict(state_of(1, 1, torch.zeros(5), gradients={}))
    shared = {"local": [], "gradients": {}, "held": {}, "batches": 0}
    step.load_state_dict(state_of(1, 2, torch.zeros(5), **shared))
    assert step.state_dict()["steps"] == 7
    assert step.state_dict()["rank"] == 0


def test_what_is_a_rank_s_own_says_so() -> None:
    found = states(2)
    named = [resume.named_state(state) for state in found]
    assert [set(state["held"]) for state in named] == [
        {f"residual@rank{rank}of2", f"count@rank{rank}of2", "scale"} for rank in range(2)
    ]
    assert [set(state["gradients"]) for state in named] == [{"w@rank0of2"}, {"w@rank1of2"}]
    assert [resume.plain_state({**state, "rank": 0}) == plain for state, plain in zip(named, found, strict=True)] == [
        True,
        True,
    ]
    alone = states(1)[0]
    assert resume.named_state(alone) == alone
    after = graphopt.redistribute(named[::-1], 2)
    assert [set(state["held"]) for state in after] == [{"residual", "count", "scale"}] * 2


def test_states_of_several_ranks_in_one_are_refused() -> None:
    one, other = (resume.named_state(state) for state in states(2))
    with pytest.raises(GraphoptError, match=r"several ranks' own \(0 of 2, 1 of 2\): load one rank's on each"):
        resume.plain_state({**one, "held": {**one["held"], **other["held"]}})
    with pytest.raises(GraphoptError, match="holds 'residual' twice, with the name of a rank and without"):
        resume.plain_state({**one, "held": {**one["held"], "residual": torch.zeros(5)}})
