"""Running calls again where a plan says so: whatever the plan, results, buffers and the generator stay eager's."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import event, given
from hypothesis import strategies as st
from torch import nn

import graphopt
from graphopt import Phase, Policy, Program
from graphopt.ir.node import OutputSpec, info
from graphopt.ir.ops import schema
from graphopt.ir.verify import verify
from graphopt.planning.problem import simulate
from graphopt.rewriting.memory.recompute.recompute_plan import Again, Recomputation, recompute
from tests.runtime.test_random_networks import SHAPE, Network, Recipe, eager, own_loss, recipes
from tests.support.fitting import RandomPlan, RunAgain, calls, planned, random_plan, structure, unplanned, wide
from tests.support.properties import examples
from tests.support.training import (
    Net,
    assert_same_training,
    captured,
    identical,
    mean_square,
    ops,
    peaks,
    results,
)

X = torch.linspace(-1, 1, 32).reshape(4, 8)


def chain() -> Net:
    return Net(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 8), nn.Tanh())


def run_again(program: Program, *runs: tuple[str, str]) -> tuple[Program, Recomputation]:
    """A copy of a program in which calls are recomputed: pairs of a tensor's name and the name of the call behind."""
    changed = program.copy()
    named = changed.names()
    done = recompute(changed, [Again(schema.maker(named[name]), named[before], "a test") for name, before in runs])
    changed.erase_dead()
    verify(changed, before=program)
    return changed, done


def assert_same_results(program: Program, plain: Program, model: nn.Module, *batch: torch.Tensor) -> None:
    """Both programs return the same, leave the same buffers and the same state of the generator."""
    one, other = copy.deepcopy(model), copy.deepcopy(model)
    expected, state = results(plain, one, *batch)
    found, after = results(program, other, *batch)
    assert found.keys() == expected.keys()
    assert [spec for spec, value in found.items() if not identical(value, expected[spec])] == []
    assert [n for n, v in other.named_buffers() if not identical(v, dict(one.named_buffers())[n])] == []
    assert torch.equal(state, after)


def reads(program: Program, name: str) -> list[str]:
    """The names of the arguments of a named call."""
    return [argument.name for argument in program.find(name)[name].all_input_nodes]


# --- any plan --------------------------------------------------------------------------------------------------------


@given(recipes(), st.sampled_from([0.02, 0.1, 0.4, 1.0]), st.integers(0, 99))
@examples(2)
def test_random_plans_for_random_networks_keep_every_promise(recipe: Recipe, density: float, seed: int) -> None:
    torch.manual_seed(0)
    model, x = Network(recipe), torch.randn(SHAPE).requires_grad_()
    fitting = unplanned(captured(model, x, loss=own_loss))
    plan = random_plan(fitting, density, seed)
    if plan is None:
        return
    event(f"recomputed: {min(len(plan.plan.repeats()), 100) // 10 * 10}")
    assert simulate(fitting.planning.problem, plan.plan) == plan
    program = planned(fitting, plan)
    verify(program, before=fitting.program)

    loss, gradients, buffers, generator = eager(model, x)
    held = copy.deepcopy(model)
    found, state = results(program, held, x)
    mine = {spec.target: value for spec, value in found.items() if spec.role == "gradient"}
    assert identical(found[OutputSpec("loss", "loss")], loss)
    assert mine.keys() == gradients.keys()
    assert [name for name, value in mine.items() if not identical(value, gradients[name])] == []
    assert [name for name, value in held.named_buffers() if not identical(value, buffers[name])] == []
    assert torch.equal(state, generator)

    assert program.memory().peak_bytes == plan.peak
    predicted, measured = peaks(program, model, x)
    assert measured == predicted


@pytest.mark.sweep
@pytest.mark.parametrize("density", [0.03, 0.3])
def test_training_with_a_random_plan_equals_eager(density: float) -> None:
    passes = [RandomPlan(density=density, seed=3)]
    assert_same_training(wide(), "momentum", mean_square, [(torch.randn(6, 8),)], passes, steps=3)


# --- what is inserted ------------------------------------------------------------------------------------------------


def test_a_value_runs_again_several_times_and_each_reader_reads_the_newest() -> None:
    plain = captured(chain(), X)
    last, first = "net.5::tanh_backward~", "net.1::tanh_backward~"
    program, done = run_again(plain, ("net.1", "net.3"), ("net.1", last), ("net.1", first))
    (made,) = done.clones.values()
    assert [info(node).names[0] for node in made] == ["net.1'", "net.1''", "net.1'''"]
    assert [info(node).phase for node in made] == [Phase.FORWARD, Phase.RECOMPUTE, Phase.RECOMPUTE]
    assert {info(node).origin for node in made} == {"a test"}
    assert made[2].name in reads(program, first)
    assert info(program.find("net.1")["net.1"]).policy is Policy.MUST_RECOMPUTE
    assert_same_results(program, plain, chain(), X)


@pytest.mark.sweep
def test_what_runs_again_reads_what_ran_again_before_it() -> None:
    plain = captured(chain(), X)
    place = "net.5::tanh_backward~"
    program, done = run_again(plain, ("net.0", place), ("net.1", place), ("net.2", place), ("net.3", place))
    clones = [made[0] for made in done.clones.values()]
    assert clones[0] in clones[1].all_input_nodes
    assert clones[2] in clones[3].all_input_nodes
    order = [node.name for node in program.nodes]
    assert [order.index(node.name) for node in clones] == sorted(order.index(node.name) for node in clones)
    assert_same_results(program, plain, chain(), X)


def test_nothing_to_run_again_leaves_the_program_as_it_is() -> None:
    plain = captured(chain(), X)
    program, done = run_again(plain)
    assert (done.clones, done.replayed) == ({}, [])
    assert structure(program) == structure(plain)


def test_another_node_can_stand_for_a_value_from_a_call_on() -> None:
    plain = captured(chain(), X)
    program = plain.copy()
    named = program.names()
    value, reader = named["net.1"], named["net.1::tanh_backward~"]
    stand_in = program.insert(
        torch.ops.aten.clone.default, (value,), before=reader, phase=Phase.RECOMPUTE, origin="a test"
    )
    done = recompute(program, [Again(value, reader, "a test", stand_in)])
    assert done.clones == {}
    assert stand_in in reader.all_input_nodes
    assert value not in reader.all_input_nodes
    assert_same_results(program, plain, chain(), X)


class Viewed(nn.Module):
    """Views of one tensor, of several kinds, that backward reads: transposed, a slice, expanded, parts of a split."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = graphopt.name(torch.sin(self.a(x)), "base")
        left, right = y.split([3, 5], -1)
        expanded = y[:, None, :].expand(4, 3, 8)
        squares = y.t() @ y
        return squares.sum() + left.cos().sum() * right.exp().sum() + (expanded * expanded.sigmoid()).sum() + x.sum()


def own(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x)


def test_views_are_made_anew_on_what_ran_again() -> None:
    model = Viewed()
    plain = captured(model, X, loss=own)
    backward = next(node for node in plain.phase_nodes(Phase.BACKWARD))
    program = plain.copy()
    node, place = program.find("base")["base"], next(n for n in program.graph.nodes if n.name == backward.name)
    recompute(program, [Again(node, place, "a test")])
    program.erase_dead()
    verify(program, before=plain)
    late = [user for user in schema.readers(node) if info(user).phase is not Phase.FORWARD]
    assert late == []
    assert len([n for n in program.phase_nodes(Phase.RECOMPUTE) if schema.is_view(n)]) > 1
    assert_same_results(program, plain, model, X)
    predicted, measured = peaks(program, model, X)
    assert predicted == measured


@pytest.mark.sweep
def test_a_view_is_made_once_for_all_that_read_it() -> None:
    plain = captured(chain(), X)
    program, _ = run_again(plain, ("net.1", "net.5::tanh_backward~"))
    views = [node for node in program.phase_nodes(Phase.RECOMPUTE) if schema.is_view(node)]
    assert len({(node.target, node.args) for node in views}) == len(views)


class Results(nn.Module):
    """Ops with several results, some of which backward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values, order = graphopt.name(x * 2, "double").sort(-1)
        return self.norm(values.sin()) * x.gather(-1, order).tanh()


@pytest.mark.sweep
def test_an_op_with_several_results_runs_again_once_for_all_of_them() -> None:
    model, x = Results(), torch.randn(4, 8).requires_grad_()
    plain = captured(model, x)
    program = plain.copy()
    sort, place = calls(program, "sort")[0], next(program.phase_nodes(Phase.BACKWARD))
    norm = calls(program, "native_layer_norm")[0]
    done = recompute(program, [Again(node, place, "a test") for node in (sort, norm)])
    program.erase_dead()
    verify(program, before=plain)
    assert [len(made) for made in done.clones.values()] == [1, 1]
    assert ops(program, Phase.RECOMPUTE).count("native_layer_norm") == 1
    assert_same_results(program, plain, model, x)


# --- effects ---------------------------------------------------------------------------------------------------------


def test_batch_norm_runs_again_without_its_statistics() -> None:
    model = Net(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh())
    plain = captured(model, X)
    places = [node for node in plain.phase_nodes(Phase.BACKWARD) if not schema.is_view(node)]
    program = plain.copy()
    named = {node.name: node for node in program.graph.nodes}
    norm = next(node for node in program.phase_nodes(Phase.FORWARD) if "batch_norm" in schema.op_name(node))
    done = recompute(program, [Again(norm, named[place.name], "a test") for place in places[:3]])
    program.erase_dead()
    verify(program, before=plain)
    assert [schema.op_name(node) for node in done.clones[norm]] == ["_native_batch_norm_legit"] * 3
    assert [str(node.target) for node in done.clones[norm]] == ["aten._native_batch_norm_legit.no_stats"] * 3
    assert_same_results(program, plain, model, X)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = graphopt.name(F.dropout(self.a(x), 0.4), "first")
        x = graphopt.name(F.dropout(self.b(torch.sin(x)), 0.4), "second")
        return torch.cos(x) * torch.rand_like(x)


def test_a_random_op_replays_its_numbers_every_time_it_runs_again() -> None:
    model = Noisy()
    plain = captured(model, X)
    program = plain.copy()
    named = program.names()
    places = [node for node in program.phase_nodes(Phase.BACKWARD) if not schema.is_view(node)]
    first, second = (named[name].args[1] for name in ("first", "second"))  # their masks
    runs = [Again(first, named["second"], "a test")]
    runs += [Again(node, place, "a test") for place in places[::3] for node in (first, second)]
    done = recompute(program, runs)
    program.erase_dead()
    verify(program, before=plain)
    assert len(done.replayed) == 2
    assert [len(made) for made in done.clones.values()] == [len(places[::3]) + 1, len(places[::3])]
    assert len(calls(program, "run_and_save_rng_state")) == 2
    assert_same_results(program, plain, model, X)


# --- within forward --------------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_what_runs_again_within_forward_stays_in_the_forward_half() -> None:
    model = Noisy()
    optimized = graphopt.optimize(copy.deepcopy(model), [RunAgain(("a", "first"), ("second",))])
    torch.manual_seed(1)
    optimized(X).sum().backward()
    targets = [node.target for node in optimized.forward_graph.graph.nodes]
    assert targets.count(torch.ops.aten.addmm.default) == 3
    assert not ops(optimized.program, Phase.RECOMPUTE)
    assert_same_training(model, "sgd", mean_square, [(X,)], [RunAgain(("a", "first"), ("second",))], steps=3)


def test_a_value_that_is_dropped_within_forward_takes_no_memory_there() -> None:
    """The peak within forward goes down by a tensor that is made again before its next use."""

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                early = graphopt.name(torch.sin(x), "early")
                wide = graphopt.name((early.mean(-1, keepdim=True).expand(4, 4096) * 2).cos(), "wide")
                late = graphopt.name(early * wide.mean(), "late")
            return self.a(late)

    plain = captured(Late(), X)
    program, _ = run_again(plain, ("early", "late"))
    assert program.memory().peak_bytes == plain.memory().peak_bytes - X.numel() * 4
    assert_same_results(program, plain, Late(), X)
