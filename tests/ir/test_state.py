"""Pass state: what passes keep across runs, in whole steps and drop-in models, saved and loaded."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import dataclass
from typing import Any, ClassVar, final

import pytest
import torch
from torch import nn

import graphopt
from graphopt import Changed, GraphoptError, Pass, Phase, Program
from graphopt.ir.node import InputSpec, info, value_of
from graphopt.ir.state import PassState
from graphopt.rewriting.pass_ import Numerics, PassStage
from graphopt.runtime.state.state_store import StateStore
from tests.support.running import Compiler, X, network, same, sgd
from tests.support.training import mean_square

CPU = torch.device("cpu")
aten = torch.ops.aten


@final
@dataclass(frozen=True)
class Count(Pass):
    """Counts runs of backward, and keeps a running sum of one gradient and a rounded copy of its parameter."""

    name: ClassVar[str] = "count"
    stage: ClassVar[PassStage] = "joint"
    numerics: ClassVar[Numerics] = "bitwise"
    changes_signature: ClassVar[bool] = True

    parameter: str = "net.0.weight"

    def apply(self, program: Program) -> Changed:
        gradient = next(value for value, spec in program.outputs_of("gradient") if spec.target == self.parameter)
        weight = next(node for node, spec in program.inputs_of("parameter") if spec.target == self.parameter)
        shape = tuple(value_of(weight).shape)
        runs = program.add_state("count/runs", PassState((), torch.int64, CPU, fill=10))
        total = program.add_state(f"count/sum/{self.parameter}", PassState(shape, torch.float32, CPU))
        rounded = PassState(shape, torch.bfloat16, CPU, source=self.parameter)
        program.add_state(f"count/rounded/{self.parameter}", rounded)
        scratch = program.add_state("count/scratch", PassState((3,), torch.float32, CPU, saved=False))
        options: dict[str, Any] = {"before": program.output_node, "phase": Phase.BACKWARD, "origin": "count"}
        program.insert(aten.add_.Tensor, (runs, 1), **options)
        program.insert(aten.add_.Tensor, (total, gradient), **options)
        program.insert(aten.add_.Tensor, (scratch, runs), **options)
        return Changed(counts={"counters": 1})


SUM, ROUNDED = "count/sum/net.0.weight", "count/rounded/net.0.weight"


def step_of(model: nn.Module) -> graphopt.TrainStep:
    return graphopt.optimize_step(model, sgd(model.parameters()), [Count()], loss=mean_square)


def plain_sums(rows: list[torch.Tensor]) -> torch.Tensor:
    """The sum of the gradients of the first weight over plain steps."""
    model = network(0.0)
    optimizer, total = sgd(model.parameters()), torch.zeros(16, 8)
    for x in rows:
        optimizer.zero_grad()
        mean_square(model, x).backward()
        total += model.net[0].weight.grad  # type: ignore[operator, arg-type]
        optimizer.step()
    return total


ROWS = [X.roll(number, 0) for number in range(4)]


# --- programs --------------------------------------------------------------------------------------------------------


def test_an_input_like_any_other() -> None:
    program = graphopt.capture(network(0.0), (X,), loss=mean_square)
    held = PassState((2, 3), torch.float16, CPU, fill=0.5)
    node = program.add_state("mine/level", held)
    assert program.add_state("mine/level", held) is node
    assert program.inputs[-1] == InputSpec("pass_state", "mine/level")
    assert info(node).names == ("mine/level",)
    assert (tuple(value_of(node).shape), value_of(node).dtype) == ((2, 3), torch.float16)
    with pytest.raises(GraphoptError, match=r"'mine/level' is kept as .* choose another name"):
        program.add_state("mine/level", PassState((2, 3), torch.float32, CPU))
    timeline = program.memory()
    assert timeline.categories["pass state"] == 12
    assert program.copy().pass_state == program.pass_state
    program.copy().pass_state.clear()
    assert program.pass_state


def test_the_program_survives_a_file() -> None:
    program = graphopt.capture(network(0.0), (X,), loss=mean_square)
    program.add_state("mine/level", PassState((), torch.float32, CPU, fill=2.0**-126))
    program.add_state("mine/limit", PassState((), torch.float32, CPU, fill=math.inf, saved=False))
    program.add_state("mine/copy", PassState((16, 8), torch.bfloat16, CPU, source="net.0.weight"))
    data = json.loads(json.dumps(program.to_json()))
    assert Program.from_json(data).pass_state == program.pass_state
    del data["pass_state"]
    data["inputs"] = [spec for spec in data["inputs"] if spec[0] != "pass_state"]
    data["nodes"] = [node for node in data["nodes"] if not node["name"].startswith("mine")]
    assert Program.from_json(data).pass_state == {}  # written before programs held anything


def test_how_tensors_start() -> None:
    parameter = torch.randn(3, 2)
    assert torch.equal(PassState((2,), torch.int32, CPU, fill=3).create(), torch.tensor([3, 3], dtype=torch.int32))
    made = PassState((3, 2), torch.float16, CPU, source="w").create(parameter)
    assert torch.equal(made, parameter.half())
    same_dtype = PassState((3, 2), torch.float32, CPU, source="w").create(parameter)
    assert same_dtype.data_ptr() != parameter.data_ptr()
    with pytest.raises(
        GraphoptError, match=r"of shape \(2, 3\) cannot start as a copy of 'w', whose shape is \(3, 2\)"
    ):
        PassState((2, 3), torch.float32, CPU, source="w").create(parameter)


# --- whole steps -----------------------------------------------------------------------------------------------------


def test_a_step_keeps_its_state() -> None:
    model = network(0.0)
    start = model.net[0].weight.detach().clone()  # type: ignore[operator, union-attr]
    step = step_of(model)
    assert step.state_dict()["held"] == {}
    for x in ROWS:
        step(x)
    held = step.state_dict()["held"]
    assert sorted(held) == sorted(["count/runs", SUM, ROUNDED])
    assert int(held["count/runs"]) == 14
    assert torch.equal(held[SUM], plain_sums(ROWS))
    assert torch.equal(held[ROUNDED], start.bfloat16())
    held["count/runs"].zero_()  # a copy
    assert int(step.state_dict()["held"]["count/runs"]) == 14


def test_all_variants_and_signatures_share_it() -> None:
    step = step_of(network(0.0)).accumulate(3)
    for number in range(6):
        step(X[: 2 + number % 2])
    assert int(step.state_dict()["held"]["count/runs"]) == 16
    assert len(step._runner.captures.all()) == 2


@pytest.mark.sweep
def test_behind_a_compiler() -> None:
    model = network(0.0)
    step = graphopt.optimize_step(model, sgd(model.parameters()), [Count()], loss=mean_square, backend=Compiler())
    for x in ROWS:
        step(x)
    assert torch.equal(step.state_dict()["held"][SUM], plain_sums(ROWS))


@pytest.mark.sweep(cases=("True",))
@pytest.mark.parametrize("captured", [False, True])
def test_loading(captured: bool) -> None:
    model = network(0.0)
    step = step_of(model)
    for x in ROWS[:2]:
        step(x)
    state, weights = copy.deepcopy(step.state_dict()), copy.deepcopy(model.state_dict())
    optimizer_state = copy.deepcopy(step._optimizer.state_dict())
    other = network(0.0)
    again = step_of(other)
    if captured:
        again(ROWS[3])
    other.load_state_dict(weights)
    again._optimizer.load_state_dict(optimizer_state)
    again.load_state_dict(state)
    assert same(list(again.state_dict()["held"].values()), list(state["held"].values()))
    for x in ROWS[2:]:
        again(x)
    assert torch.equal(again.state_dict()["held"][SUM], plain_sums(ROWS))
    assert int(again.state_dict()["held"]["count/runs"]) == 14


def changed(state: dict[str, Any], **held: Any) -> dict[str, Any]:
    kept = {name: tensor for name, tensor in state["held"].items() if held.get(name.split("/")[1], 0) is not None}
    return {**state, "held": {**kept, **{f"count/{name}": value for name, value in held.items() if value is not None}}}


@pytest.mark.sweep
@pytest.mark.parametrize("captured", [False, True])
def test_loading_what_does_not_fit(captured: bool) -> None:
    step = step_of(network(0.0))
    step(X)
    state = step.state_dict()
    wrong = {
        "an unknown name": (
            changed(state, rnus=torch.ones(())),
            "'count/rnus' is kept by no pass here; did you mean 'count",
        ),
        "a shape": (
            changed(state, runs=torch.ones(2, dtype=torch.int64)),
            r"of 'count/runs' is torch.int64 of shape \(2,\)",
        ),
        "a dtype": (changed(state, runs=torch.ones(())), "of 'count/runs' is torch.float32 .* it must be torch.int64"),
        "no tensor": (changed(state, runs=3), "'held' of 'count/runs' is a tensor, got 3 .int."),
    }
    for what, (given, message) in wrong.items():
        other = step_of(network(0.0))
        if captured:
            other(X)

        def load(other: graphopt.TrainStep = other, given: dict[str, Any] = given) -> None:
            other.load_state_dict(given)
            other(X)

        with pytest.raises(GraphoptError, match=f"(?s){message}"):
            load()
        assert what
    with pytest.raises(GraphoptError, match="'count/runs' is missing"):
        step.load_state_dict(changed(state, runs=None))
    with pytest.raises(GraphoptError, match=r"expected the keys .*'held'.* and version 4, got .* version 1"):
        step.load_state_dict({"version": 1, "accumulate": 1, "batches": 0, "gradients": {}})


# --- drop-in ---------------------------------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_keeps_its_state(compiled: bool) -> None:
    model = graphopt.optimize(network(0.0), [Count()], backend=Compiler() if compiled else "eager")
    optimizer = sgd(model.parameters())
    for x in ROWS:
        optimizer.zero_grad()
        mean_square(model, x).backward()
        optimizer.step()
    store: StateStore = model._graphopt.runner.store  # type: ignore[assignment]
    assert int(store["count/runs"]) == 14
    assert torch.equal(store[SUM], plain_sums(ROWS))
    mean_square(model, X[:2]).backward()  # another signature
    assert int(store["count/runs"]) == 15
    assert sorted(model.state_dict()) == sorted(network(0.0).state_dict())


def test_copies_go_on_from_it() -> None:
    model = graphopt.optimize(network(0.0), [Count()])
    for x in ROWS:
        mean_square(model, x).backward()
    store: StateStore = model._graphopt.runner.store  # type: ignore[assignment]
    twin = copy.deepcopy(model)
    mean_square(twin, X).backward()
    assert int(twin._graphopt.runner.store["count/runs"]) == 15  # type: ignore[operator, index]
    assert int(store["count/runs"]) == 14


def test_halves_refer_to_it() -> None:
    model = graphopt.optimize(network(0.0), [Count()], example_inputs=(X,))
    buffers = dict(model.backward_graph.named_buffers())  # type: ignore[operator, union-attr]
    assert buffers["count_runs"] is model._graphopt.runner.store["count/runs"]  # type: ignore[operator, index]
    assert not dict(model.forward_graph.named_buffers())  # type: ignore[operator, union-attr]


def test_a_moved_model_is_refused() -> None:
    store = StateStore(network(0.0).get_parameter)
    store.require({"a": PassState((), torch.float32, CPU)})
    with pytest.raises(GraphoptError, match=r"'a' is kept as .* on cpu, and a program wants .* on meta: make a new"):
        store.require({"a": PassState((), torch.float32, torch.device("meta"))})


def test_a_parameter_that_is_changed_from_outside_beside_its_copy_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Of outer steps, for one: what ranks have in common is what it was."""
    model = network(0.0)
    store = StateStore(model.get_parameter)
    name, weight = next(iter(model.named_parameters()))
    store.require({f"diloco/global/{name}": PassState(tuple(weight.shape), weight.dtype, CPU, source=name)})
    for own in (True, False):
        store.refresh()
        with torch.no_grad():
            weight.add_(1.0)
        if own:
            store.settle()  # behind a run, which has changed it
    assert not caplog.records
    store.refresh()
    store.refresh()
    (told,) = caplog.records
    assert f"{name!r} was changed outside of the step, and 'diloco/global/{name}'" in told.getMessage()


def test_sharing() -> None:
    one, two, three = (StateStore(network(0.0).get_parameter) for _ in range(3))
    held = {"a": PassState((), torch.float32, CPU, fill=4.0)}
    two.share("a", one)
    two.require(held)
    assert one["a"] is two["a"]
    three.require(held)
    with pytest.raises(GraphoptError, match="'a' exists already"):
        three.share("a", one)
