"""The frontier as plain data: bytes, seconds and decisions are those of the planner, plan by plan."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from graphopt import Program
from graphopt.analysis.costs.cost import costs_of
from graphopt.planning.problem import lifetimes
from graphopt.rewriting.memory.fit.fitting import Fitted, Fitting, FittingOptions
from graphopt.rewriting.memory.fit.summary import AGAIN, AWAY, KEPT, MOST_PLANS, frontier_data
from graphopt.rewriting.memory.transfers.transfer_insertion import host_lanes
from tests.support.training import Blocks, captured, next_token


@pytest.fixture(scope="module")
def program() -> Program:
    return captured(Blocks(3, p=0.0), torch.randint(0, 11, (8, 32)), loss=next_token)


@pytest.fixture(scope="module")
def fitting(program: Program) -> Fitting:
    memory = program.memory()
    options = FittingOptions(lanes=lambda planning: host_lanes(planning, 10**9, rate=1e12))
    return Fitting(program, memory, costs_of(memory, "roofline").seconds, options)


@pytest.fixture(scope="module")
def fitted(fitting: Fitting) -> Fitted:
    found = fitting.within(fitting.memory.peak_bytes * 7 // 10)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def told(fitting: Fitting, fitted: Fitted) -> dict[str, Any]:
    return frontier_data(fitting, fitted, 123, costs_of(fitting.memory, "roofline"))


def test_it_is_json_and_every_column_is_as_long_as_it_should_be(told: dict[str, Any], program: Program) -> None:
    assert json.loads(json.dumps(told)) == told
    plans, tensors = len(told["peaks"]), len(told["tensors"]["name"])
    assert len(told["extra"]) == len(told["runs"]) == len(told["plans"]) == plans
    assert {len(codes) for codes in told["plans"]} == {tensors}
    assert {len(column) for column in told["tensors"].values()} == {tensors}
    assert len(told["calls"]) == len(program.memory().nodes)
    assert plans <= MOST_PLANS + 2
    assert told["basis"] == "the roofline"


def test_more_bytes_never_take_longer(told: dict[str, Any], fitting: Fitting, fitted: Fitted) -> None:
    assert told["peaks"] == sorted(told["peaks"])
    others = [extra for place, extra in enumerate(told["extra"]) if place != told["chosen"]]
    assert others == sorted(others, reverse=True)
    assert told["extra"][told["plain"]] == 0.0
    assert told["peaks"][told["plain"]] == fitting.memory.peak_bytes
    assert told["peaks"][told["chosen"]] == fitted.peak_bytes
    assert told["extra"][told["chosen"]] == max(fitted.seconds, 0.0)
    assert set(told["plans"][told["plain"]]) <= {KEPT, "."}


def test_decisions_are_those_of_the_plan(told: dict[str, Any], fitting: Fitting, fitted: Fitted) -> None:
    problem, codes = fitting.planning.problem, told["plans"][told["chosen"]]
    again, away = set(fitted.simulated.plan.repeats()), {item.value for item in fitted.away}
    steps = fitted.simulated.plan.steps
    start = steps.index(problem.boundary)
    alive = {value for value, first, last in lifetimes(problem, steps) if first < start <= last}
    numbers = {
        (problem.names[value], fitting.planning.storages[value].owner.name): value
        for value in range(len(problem.sizes))
        if problem.sizes[value]
    }
    tensors = told["tensors"]
    for name, node, code in zip(tensors["name"], tensors["node"], codes, strict=True):
        value = numbers[name, node]
        assert (code == AWAY) == (value in away)
        if code == AGAIN:
            assert problem.makers[value] in again
        if code == KEPT:
            assert value in alive
            assert problem.makers[value] not in again


@pytest.mark.sweep
def test_a_long_frontier_is_thinned_evenly(fitting: Fitting) -> None:
    whole = fitting.trade(10**6)
    few = fitting.trade(5)
    assert 2 <= len(few) <= 5 < len(whole)
    assert few[0].peak_bytes == whole[0].peak_bytes
    assert few[-1].peak_bytes == whole[-1].peak_bytes
    assert {plan.peak_bytes for plan in few} <= {plan.peak_bytes for plan in whole}
