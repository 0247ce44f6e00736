"""The invariant table: for each row, a pass that breaks it is caught, named, and told which rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import graphopt
from graphopt import Changed, Pass, Phase, Pipeline, Program, VerifyError
from graphopt.ir.node import NodeInfo, OutputSpec, Stage, set_info
from graphopt.ir.verify import INVARIANTS, verify
from graphopt.passes import Recompute
from tests.support.training import Net, captured

aten = torch.ops.aten


@dataclass(frozen=True)
class Rewrite(Pass):
    """Runs a function on the program."""

    name: ClassVar[str] = "rewrite"
    stage: ClassVar[Stage] = "joint"
    numerics: ClassVar[Any] = "bitwise"

    function: Callable[[Program], None]

    def __str__(self) -> str:
        return self.name

    def apply(self, program: Program) -> Changed:
        self.function(program)
        return Changed(counts={"rewritten": 1})


class Redescribe(Rewrite):
    """The same, with a declared change of inputs and outputs."""

    changes_signature: ClassVar[bool] = True


def network() -> Net:
    return Net(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4), nn.Dropout(0.5))


def program_of(kind: str = "loss") -> Program:
    x = torch.randn(3, 4)
    return captured(network(), x) if kind == "loss" else graphopt.capture(network(), (x,))


def node(program: Program, op: str, phase: Phase = Phase.FORWARD, *, number: int = 0) -> torch.fx.Node:
    """The ``number``-th call of an aten op in a phase."""
    return [n for n in program.phase_nodes(phase) if str(n.target).split(".")[1:2] == [op]][number]


def replace_output(program: Program, role: str, value: Any) -> None:
    """Return another value in place of the first output of a role."""
    values = list(program.output_values)
    values[next(i for i, spec in enumerate(program.outputs) if spec.role == role)] = value
    program.set_outputs(values, program.outputs)


def add_output(program: Program, value: torch.fx.Node) -> None:
    program.set_outputs([*program.output_values, value], [*program.outputs, OutputSpec("output", "more")])


# --- passes that break a rule ----------------------------------------------------------------------------------------


def use_before_definition(program: Program) -> None:
    node(program, "mean").prepend(node(program, "masked_dropout", number=1))
    node(program, "pow").prepend(node(program, "mean"))


def forget_a_description(program: Program) -> None:
    program.inputs.pop()


def add_a_bare_node(program: Program) -> None:
    loss = program.outputs_of("loss")[0][0]
    with program.graph.inserting_after(loss):
        replace_output(program, "loss", program.graph.call_function(aten.neg.default, (loss,)))


def add_a_node_without_value(program: Program) -> None:
    add_a_bare_node(program)
    set_info(program.outputs_of("loss")[0][0], NodeInfo(Phase.FORWARD))


def read_backward_in_forward(program: Program) -> None:
    loss, seed = program.outputs_of("loss")[0][0], program.find("loss~")["loss~"]
    added = program.insert(aten.add.Tensor, (loss, seed), after=seed, phase=Phase.FORWARD, origin="test")
    replace_output(program, "loss", added)


def return_a_transposed_gradient(program: Program) -> None:
    gradient = program.outputs_of("gradient")[0][0]
    wrong = program.insert(aten.unsqueeze.default, (gradient, 0), after=gradient, phase=Phase.BACKWARD, origin="test")
    replace_output(program, "gradient", wrong)


def return_a_half_gradient(program: Program) -> None:
    gradient = program.outputs_of("gradient")[0][0]
    wrong = program.insert(
        aten._to_copy.default,
        (gradient,),
        {"dtype": torch.float16},
        after=gradient,
        phase=Phase.BACKWARD,
        origin="test",
    )
    replace_output(program, "gradient", wrong)


def return_an_input(program: Program) -> None:
    x = program.inputs_of("input")[0][0]
    first = next(program.phase_nodes(Phase.FORWARD))
    view = program.insert(aten.view.default, (x, [3, 4]), before=first, phase=Phase.FORWARD, origin="test")
    replace_output(program, "output", view)


def run_dropout_again(program: Program) -> None:
    drawn, first = node(program, "dropout_mask"), node(program, "masked_dropout", Phase.BACKWARD)
    program.insert(drawn.target, drawn.args, drawn.kwargs, before=first, phase=Phase.RECOMPUTE, origin="test")


def draw_once_more(program: Program) -> None:
    last = node(program, "mean")
    program.insert(aten.rand.default, ([2],), before=last, phase=Phase.FORWARD, origin="test")


def draw_in_another_order(program: Program) -> None:
    """A draw for another tensor first: both are dropouts, so their kinds alone do not tell."""
    early, late = node(program, "dropout_mask"), node(program, "dropout_mask", number=1)
    early.prepend(late)


def write_in_a_recomputation(program: Program) -> None:
    writer = node(program, "copy_")
    first = next(program.phase_nodes(Phase.BACKWARD))
    program.insert(aten.copy_.default, writer.args, before=first, phase=Phase.RECOMPUTE, origin="test")


def read_what_is_overwritten(program: Program) -> None:
    statistic = node(program, "copy_").args[0]
    loss = program.outputs_of("loss")[0][0]
    late = program.insert(aten.sum.default, (statistic,), after=loss, phase=Phase.FORWARD, origin="test")
    replace_output(program, "loss", late)


def read_a_view_of_what_is_overwritten(program: Program) -> None:
    statistic = program.find("net.1.running_mean")["net.1.running_mean"]
    loss, first = program.outputs_of("loss")[0][0], next(program.phase_nodes(Phase.FORWARD))
    view = program.insert(aten.view.default, (statistic, [2, -1]), before=first, phase=Phase.FORWARD, origin="test")
    late = program.insert(aten.sum.default, (view,), after=loss, phase=Phase.FORWARD, origin="test")
    replace_output(program, "loss", late)


def drop_an_output(program: Program) -> None:
    program.set_outputs(program.output_values[:-1], program.outputs[:-1])


def rename_an_input(program: Program) -> None:
    program.inputs[0] = type(program.inputs[0])("parameter", "another")


def change_an_outputs_type(program: Program) -> None:
    loss = program.outputs_of("loss")[0][0]
    other = program.insert(aten.unsqueeze.default, (loss, 0), after=loss, phase=Phase.FORWARD, origin="test")
    replace_output(program, "loss", other)


def leave_a_stale_value(program: Program) -> None:
    summed = node(program, "sum", Phase.BACKWARD)
    summed.args = (summed.args[0], [1], True)


RULES: dict[Callable[[Program], None], str] = {
    use_before_definition: "nodes are in topological order",
    forget_a_description: "nodes are in topological order and every input and output is described",
    add_a_bare_node: "every node has a value, a phase and a module",
    add_a_node_without_value: "every node has a value, a phase and a module",
    read_backward_in_forward: "nothing in backward feeds forward",
    return_a_transposed_gradient: "a gradient has the shape and dtype of its tensor",
    return_a_half_gradient: "a gradient has the shape and dtype of its tensor",
    return_an_input: "no output shares memory with an input",
    run_dropout_again: "random numbers are drawn once and in order",
    draw_once_more: "random numbers are drawn once and in order",
    draw_in_another_order: "random numbers are drawn once and in order",
    write_in_a_recomputation: "collectives and writes run once",
    read_what_is_overwritten: "an input is not read after it is overwritten",
    read_a_view_of_what_is_overwritten: "an input is not read after it is overwritten",
    drop_an_output: "inputs and outputs stay as they are",
    rename_an_input: "inputs and outputs stay as they are",
    change_an_outputs_type: "inputs and outputs stay as they are",
    leave_a_stale_value: "values are what the ops compute",
}


@pytest.mark.sweep(but=("draw_once_more", "leave_a_stale_value"))
@pytest.mark.parametrize("break_it", list(RULES), ids=lambda f: f.__name__)
def test_a_pass_that_breaks_a_rule_is_named_with_the_rule(break_it: Callable[[Program], None]) -> None:
    program = program_of("outputs" if break_it is return_an_input else "loss")
    with pytest.raises(VerifyError) as caught:
        Pipeline([Recompute(()), Rewrite(break_it)]).run(program)
    assert "pass 2/2 of the joint stage, 'rewrite', left a program that is not valid" in str(caught.value)
    assert f"rule: {RULES[break_it]}" in str(caught.value)
    assert isinstance(caught.value.__cause__, VerifyError)
    assert "pipeline: recompute" in caught.value.__notes__[0]


def test_every_row_of_the_table_is_broken_by_some_pass() -> None:
    tried = set(RULES.values())
    assert all(any(invariant.rule.startswith(rule) for rule in tried) for invariant in INVARIANTS)


def test_messages_say_which_node_and_what_to_do() -> None:
    with pytest.raises(VerifyError) as caught:
        Pipeline([Rewrite(add_a_bare_node)]).run(program_of())
    assert "= aten.neg.default has no phase and module; add nodes with Program.insert" in str(caught.value)
    with pytest.raises(VerifyError) as caught:
        Pipeline([Rewrite(return_an_input)]).run(program_of("outputs"))
    assert "shares memory with the input 'args_0'; clone it" in str(caught.value)


def test_broken_rules_are_reported_together() -> None:
    def both(program: Program) -> None:
        drop_an_output(program)
        draw_once_more(program)

    with pytest.raises(VerifyError) as caught:
        Pipeline([Rewrite(both)]).run(program_of())
    assert str(caught.value).count("rule: ") == 2


@pytest.mark.sweep
def test_a_declared_change_of_the_signature_is_allowed() -> None:
    program = program_of()
    Pipeline([Redescribe(lambda p: add_output(p, node(p, "mean")))]).run(program)
    assert program.outputs[-1] == OutputSpec("output", "more")
    Pipeline([Redescribe(change_an_outputs_type)]).run(program)


@pytest.mark.sweep(cases=("return_a_half_gradient",))
@pytest.mark.parametrize("break_it", [return_a_transposed_gradient, return_a_half_gradient], ids=lambda f: f.__name__)
def test_a_declared_change_does_not_excuse_a_wrong_gradient(break_it: Callable[[Program], None]) -> None:
    with pytest.raises(VerifyError, match="a gradient has the shape and dtype of its tensor"):
        Pipeline([Redescribe(break_it)]).run(program_of())


@pytest.mark.sweep
def test_verification_can_be_left_out() -> None:
    program = program_of()
    (record,) = Pipeline([Rewrite(rename_an_input)]).run(program, verify=False)
    assert record.changed
    assert program.inputs[0].target == "another"


def test_what_capture_gives_is_valid() -> None:
    for kind in ("loss", "outputs"):
        verify(program_of(kind))
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    for stage in ("forward", "joint", "step"):
        verify(
            graphopt.capture(
                model, (torch.randn(3, 4),), loss=lambda m, x: m(x).sum(), optimizer=optimizer, stage=stage
            )
        )


def test_dead_nodes_of_a_pass_are_removed() -> None:
    def add_dead(program: Program) -> None:
        loss = program.outputs_of("loss")[0][0]
        program.insert(aten.neg.default, (loss,), after=loss, phase=Phase.FORWARD, origin="test")

    program = program_of()
    before = [n.name for n in program.nodes]
    Pipeline([Rewrite(add_dead)]).run(program)
    assert [n.name for n in program.nodes] == before


@dataclass(frozen=True)
class Doubled(Rewrite):
    """Claims to be bitwise and doubles a gradient."""

    name: ClassVar[str] = "doubled"
    function: Callable[[Program], None] = verify

    def apply(self, program: Program) -> Changed:
        gradient = program.outputs_of("gradient")[0][0]
        wrong = program.insert(aten.mul.Tensor, (gradient, 2.0), after=gradient, phase=Phase.BACKWARD, origin="test")
        replace_output(program, "gradient", wrong)
        return Changed(counts={"doubled": 1})


@pytest.mark.sweep
def test_numerics_are_compared_where_asked() -> None:
    x = torch.randn(3, 4)
    graphopt.optimize(network(), [Recompute("net.3")], verify="numerics", example_inputs=(x,))
    graphopt.optimize(network(), [Doubled()], example_inputs=(x,))
    with pytest.raises(VerifyError, match=r"the gradient net\.0\.weight differs by up to"):
        graphopt.optimize(network(), [Doubled()], verify="numerics", example_inputs=(x,))


def test_layers_that_are_alike_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check of what a pass made takes as many calls without data for eight layers as for three."""

    def computed(layers: int) -> int:
        blocks = [nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU()) for _ in range(layers)]
        program = captured(Net(*blocks), torch.randn(3, 4))
        before = program.copy()
        Pipeline([Recompute("net.*.*::addmm")]).run(program)
        asked: list[str] = []
        plain = Program.propagate
        with monkeypatch.context() as patched:
            patched.setattr(Program, "propagate", lambda self, node: asked.append(node.name) or plain(self, node))
            verify(program, before=before)
        return len(asked)

    assert computed(8) == computed(3) > 0
