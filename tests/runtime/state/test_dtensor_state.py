"""``step.sharded_state_dict()``: DTensors, which ``torch.distributed.checkpoint`` cuts for any number of ranks."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import graphopt
from graphopt import ArgumentError, GraphoptError, TrainStep
from tests.support.ranks import run_ranks
from tests.support.training import mean_square

PROLOGUE = """
import pathlib
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor
from graphopt import GraphoptError
from graphopt.passes import *
from tests.passes.test_shard_parameters import X, sharded, stepping, trained

FOLDER = pathlib.Path({folder!r})
KINDS = {{
    "stage 3": lambda: stepping(sharded()),
    "stage 1": lambda: stepping(ShardOptimizer(), make="momentum"),
    "O2": lambda: stepping(sharded(), MixedPrecision("bfloat16", level="O2")),
    "plain": lambda: stepping(make="momentum"),
}}

def whole(step):
    # model and optimizer by name, on rank 0
    found = step.full_state_dict()
    if rank:
        return {{}}
    state = {{f"{{i}}/{{key}}": v for i, kept in found["optimizer"]["state"].items() for key, v in kept.items()}}
    return {{**found["model"], **{{key: value for key, value in state.items() if torch.is_tensor(value)}}}}

def same(one, two):
    return len(one) == len(two) and all(map(torch.equal, one, two))

def kinds():
    for name in {kinds!r}:
        yield name, KINDS[name], FOLDER / name.replace(" ", "-")
"""

SAVED = (
    PROLOGUE
    + """
for name, make, folder in kinds():
    step = make()
    trained(step, rank, world, 3)
    state = step.sharded_state_dict()
    flat = [value for value in state["model"].values() if isinstance(value, DTensor)]
    states = [v for kept in state["optimizer"]["state"].values() for v in kept.values() if isinstance(v, DTensor)]
    dcp.save(state, checkpoint_id=folder)
    before = whole(step)
    if rank == 0:
        torch.save(before, folder / "whole.pt")
    expected = trained(step, rank, world, 3, first=3)
    other = make()
    trained(other, rank, world, 1)  # so that everything has other values
    into = other.sharded_state_dict()
    dcp.load(into, checkpoint_id=folder)
    other.load_sharded_state_dict(into)
    say([name, len(flat) > 0, len(states) > 0, same(trained(other, rank, world, 3, first=3), expected)])
"""
)

RESUMED = (
    PROLOGUE
    + """
for name, make, folder in kinds():
    step = make()
    step.prepare(X[rank::world])
    into = step.sharded_state_dict()
    dcp.load(into, checkpoint_id=folder)
    step.load_sharded_state_dict(into)
    found = whole(step)
    saved = {{}} if rank else torch.load(folder / "whole.pt")
    say([name, sorted(found) == sorted(saved) and all(torch.equal(found[key], saved[key]) for key in saved)])
"""
)


WHICH = {  # whether there are DTensors in the model's state, and in the optimizer's
    "stage 3": [True, True],
    "stage 1": [False, True],
    "O2": [True, True],
    "plain": [False, False],
}


@pytest.mark.parametrize(
    "kinds", [("stage 3",), pytest.param(("stage 1", "O2", "plain"), marks=pytest.mark.sweep)], ids=str
)
def test_training_goes_on_bit_for_bit_and_in_other_numbers_of_ranks(kinds: tuple[str, ...], tmp_path: Path) -> None:
    given = {"folder": str(tmp_path), "kinds": kinds}
    expected = [[name, *WHICH[name], True] for name in kinds]
    assert run_ranks(SAVED.format(**given), 2, tmp_path / "store") == [expected] * 2
    found = run_ranks(RESUMED.format(**given), 3, tmp_path / "another store")
    assert found == [[[name, True] for name in kinds]] * 3


# --- one process -----------------------------------------------------------------------------------------------------

X = torch.linspace(-1, 1, 24).reshape(4, 6).cos()


def stepping(seed: int = 0, width: int = 5, **options: Any) -> TrainStep:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **options)
    return graphopt.optimize_step(model, optimizer, loss=mean_square)


@pytest.mark.sweep(but=("0",))
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("before", [0, 2])
def test_a_step_without_ranks_goes_on_where_it_was_saved(before: int, tmp_path: Path) -> None:
    """Before the first update too, when the optimizer has no state: zeros in its place would be dampened."""
    step, other = stepping(dampening=0.5), stepping(seed=1, dampening=0.5).prepare(X)
    step.prepare(X)
    for _ in range(before):
        step(X)
    dcp.save(step.sharded_state_dict(), checkpoint_id=tmp_path, no_dist=True)
    into = other.sharded_state_dict()
    dcp.load(into, checkpoint_id=tmp_path, no_dist=True)
    other.load_sharded_state_dict(into)
    assert [step(X).item() for _ in range(3)] == [other(X).item() for _ in range(3)]
    assert all(map(torch.equal, step.model.parameters(), other.model.parameters()))


def test_before_the_first_capture_it_is_refused() -> None:
    with pytest.raises(GraphoptError, match=r"call the step once, or step\.prepare"):
        stepping().sharded_state_dict()


WRONG: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a part is missing": (lambda state: state.pop("optimizer"), "the state has no 'optimizer'"),
    "no groups": (lambda state: state["optimizer"].pop("param_groups"), "'optimizer' has no 'param_groups'"),
    "a name of the model": (
        lambda state: state["model"].update({"0.wieght": state["model"].pop("0.weight")}),
        "the state has '0.wieght', which the model has not; did you mean '0.weight'",
    ),
    "less of the model": (lambda state: state["model"].pop("2.bias"), "has no '2.bias', which the model has"),
    "a name of the optimizer": (
        lambda state: state["optimizer"]["state"].update({"1.weight": {}}),
        "the state has '1.weight', which the optimizer has not",
    ),
    "groups of the optimizer": (
        lambda state: state["optimizer"]["param_groups"][0]["params"].reverse(),
        "of other groups of parameters than the optimizer's",
    ),
    "the step": (lambda state: state["step"].pop("version"), "this is no state of a TrainStep of this version"),
    "a shape of the model": (
        lambda state: state["model"].update({"0.bias": torch.zeros(4)}),
        "'0.bias' has the shape [4] in the state, and [5] here",
    ),
    "a shape of the optimizer": (
        lambda state: state["optimizer"]["state"]["0.bias"].update(momentum_buffer=torch.zeros(4)),
        "'0.bias/momentum_buffer' has the shape [4] in the state, and [5] here",
    ),
}


@pytest.mark.sweep(cases=("a part is missing", "no groups", "a name of the optimizer", "the step"))
@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_named_and_changes_nothing(case: str) -> None:
    step = stepping()
    step(X)
    given = copy.deepcopy(step.sharded_state_dict())
    change, said = WRONG[case]
    given["model"]["2.weight"].zero_()
    change(given)
    before = [parameter.detach().clone() for parameter in step.model.parameters()]
    with pytest.raises((GraphoptError, ArgumentError), match=re.escape(said)):
        step.load_sharded_state_dict(given)
    assert all(map(torch.equal, step.model.parameters(), before))


def test_what_is_no_state_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"what TrainStep\.sharded_state_dict\(\) returned"):
        stepping().load_sharded_state_dict([])  # type: ignore[arg-type]
