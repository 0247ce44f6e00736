"""Pointwise calls are taken in place where an operand dies, as autograd does with sums of gradients; nowhere else."""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional

import graphopt
from graphopt import Pass, Phase, Program, measure_peak
from graphopt.ir.lowering import apply_reuse, reused_operands
from graphopt.ir.node import info, value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.communication.collectives import ALL_GATHER, WAIT
from graphopt.ir.ops.inplace import FUNCTIONAL, IN_PLACE, as_functional, as_in_place, in_place
from graphopt.ir.ops.layers.loss_gradient import loss_gradient
from graphopt.passes import Recompute
from graphopt.runtime.programs.binding import Binding
from tests.support.running import X, network, same
from tests.support.training import Blocks, assert_same_training, captured, mean_square, next_token, rewritten

aten = torch.ops.aten
TOKENS = torch.arange(24).reshape(2, 12) % 11


# --- training --------------------------------------------------------------------------------------------------------


class Uses(nn.Module):
    """A value that is used often, a parameter that is used twice, and views on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        z = y.sin() + y.cos() * y + (y * self.scale).exp() + y.view(-1, 4).tanh().view_as(y) + y.T.sigmoid().T
        return self.b(z + self.scale) + self.b(y[:, :1] * z)


class Pictures(nn.Module):
    """Convolutions with BatchNorm, every activation that can overwrite its argument or gradient, and a residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.other = nn.BatchNorm2d(8), nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.a(x)).relu()
        z = functional.silu(self.other(self.b(y))) * functional.gelu(self.b(y))
        return (y + self.b(z)).sigmoid() * functional.dropout(self.norm(z).tanh(), 0.3)


PICTURES = torch.linspace(-1, 1, 2 * 3 * 12 * 12).reshape(2, 3, 12, 12).cos()
ROWS = torch.linspace(-1, 1, 64 * 16).reshape(64, 16)
with_and_without = pytest.mark.parametrize("passes", [[], [Recompute("a")]], ids=["plain", "recompute"])


@pytest.mark.sweep
@with_and_without
def test_training_with_sums_in_place_is_eager_training(passes: list[Pass]) -> None:
    assert len(reused_operands(rewritten(Uses(), ROWS, passes=passes))) >= 5
    assert_same_training(Uses(), "adamw", mean_square, [(ROWS.clone().requires_grad_(),)], passes, steps=3)


def test_training_with_activations_in_place_is_eager_training() -> None:
    found = {schema.op_name(node) for node in reused_operands(captured(Pictures(), PICTURES, loss=mean_square))}
    assert found >= {
        "relu",
        "threshold_backward",
        "silu_backward",
        "gelu_backward",
        "sigmoid_backward",
        "tanh_backward",
    }
    assert_same_training(Pictures(), "adamw", mean_square, [(PICTURES.clone().requires_grad_(),)], steps=3)


@pytest.mark.sweep
def test_backward_can_run_twice() -> None:
    """What forward has kept for backward is not overwritten by it."""
    model = graphopt.optimize(Pictures())
    loss = model(PICTURES).square().mean()
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    assert same(list(first), list(torch.autograd.grad(loss, list(model.parameters()))))


def run(module: fx.GraphModule, program: Program, model: nn.Module, x: torch.Tensor) -> Any:
    torch.manual_seed(1)
    with torch.no_grad():
        return module.forward(Binding(program, model).gather([x]))


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("make", "x", "loss"),
    [(Uses, ROWS, mean_square), (lambda: Blocks(2), TOKENS, next_token), (lambda: Pictures(), PICTURES, mean_square)],
    ids=["uses", "blocks", "pictures"],
)
def test_calls_in_place_change_bytes_and_no_bits(make: Callable[[], nn.Module], x: torch.Tensor, loss: Any) -> None:
    model = make()
    program = captured(model, x, loss=loss)
    in_place, functional = program.to_graph_module(), out_of_place(program)
    assert len(writing(in_place.graph)) == len(reused_operands(program)) > 0
    assert not writing(program.graph)  # the program itself stays functional
    held = copy.deepcopy(model)
    assert same(list(run(in_place, program, held, x)), list(run(functional, program, held, x)))
    less = measure_peak(lambda: run(in_place, program, held, x)).allocated_peak_bytes
    more = measure_peak(lambda: run(functional, program, held, x)).allocated_peak_bytes
    assert program.memory().allocated_peak_bytes == less <= more
    assert bytes_of_results(program) > 0


def writing(graph: fx.Graph) -> list[fx.Node]:
    """The calls that write to an argument, other than of what was there before."""
    return [node for node in graph.nodes if node.target in FUNCTIONAL]


def out_of_place(program: Program) -> fx.GraphModule:
    """The generated module without calls in place, of the same calling convention."""
    made, plain = program.to_graph_module(), program.copy()
    plain.graph.set_codegen(made.graph._codegen)
    return fx.GraphModule({}, plain.graph)


def bytes_of_results(program: Program) -> int:
    """What the calls would allocate if they were not taken in place."""
    return sum(value_of(node).untyped_storage().nbytes() for node in reused_operands(program))


def test_a_tangent_from_outside_is_never_written() -> None:
    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.a(x)
            return y, y.sin() * y

    model = Returns()
    found = []
    for candidate in (copy.deepcopy(model), graphopt.optimize(copy.deepcopy(model))):
        tangents = [ROWS.cos(), ROWS.exp()]
        torch.autograd.backward(candidate(ROWS), tangents)
        assert torch.equal(tangents[0], ROWS.cos())
        assert torch.equal(tangents[1], ROWS.exp())
        found.append([parameter.grad for parameter in candidate.parameters()])
    assert same(*found)


# --- which sums ------------------------------------------------------------------------------------------------------


class Build:
    """Puts backward ops before the end of a joint program; ``u`` and ``v`` are fresh values of 16 x 8 numbers."""

    def __init__(self) -> None:
        self.program = captured(network(), X)
        gradient = next(v for v, s in self.program.outputs_of("gradient") if s.target == "net.0.weight")
        self.before = set(reused_operands(self.program))
        self.end = self.program.output_node
        self.u, self.v = self(aten.mul.Tensor, gradient, 2.0), self(aten.mul.Tensor, gradient, 3.0)

    def __call__(self, target: Any, *args: Any, phase: Phase = Phase.BACKWARD, **kwargs: Any) -> fx.Node:
        return self.program.insert(target, args, kwargs, before=self.end, phase=phase, origin="test")

    def add(self, *args: Any, **kwargs: Any) -> fx.Node:
        return self(aten.add.Tensor, *args, **kwargs)

    def parameter(self) -> fx.Node:
        return next(n for n, s in self.program.inputs_of("parameter") if s.target == "net.0.weight")

    def forward(self, *args: Any) -> fx.Node:
        return self(*args, phase=Phase.FORWARD)

    def again(self, *args: Any) -> fx.Node:
        return self(*args, phase=Phase.RECOMPUTE)

    def read(self, *values: fx.Node) -> None:
        for value in values:
            self(aten.sum.default, value)

    def fresh(self) -> fx.Node:
        """A fresh value of forward."""
        return self.forward(aten.mul.Tensor, self.parameter(), 2.0)

    def normalized(self) -> fx.Node:
        """The three results of a layer norm."""
        return self(aten.native_layer_norm.default, self.u, [8], None, None, 1e-5)

    def relu_of(self, results: fx.Node) -> fx.Node:
        return self(aten.relu.default, self(operator.getitem, results, 0))

    @property
    def found(self) -> list[tuple[fx.Node, fx.Node]]:
        return [(n, o) for n, o in reused_operands(self.program).items() if n not in self.before]


def read_later(b: Build) -> None:
    b.add(b.u, b.v)
    b.read(b.u, b.v)


def view_read_later(b: Build) -> None:
    views = [b(aten.view.default, node, [-1]) for node in (b.u, b.v)]
    b.add(b.u, b.v)
    b.read(*views)


def read_through_base_later(b: Build) -> None:
    views = [b(aten.view.default, node, [-1]) for node in (b.u, b.v)]
    b.add(*views)
    b.read(b.u, b.v)


def parts(b: Build) -> None:
    b.add(*(b(aten.slice.Tensor, node, 0, 0, 2) for node in (b.u, b.v)))


def expanded(b: Build) -> None:
    rows = [b(aten.sum.dim_IntList, node, [0], True) for node in (b.u, b.v)]
    b.add(*(b(aten.expand.default, node, [16, 8]) for node in rows))


def returned(b: Build) -> None:
    b.add(b.u, b.v)
    program = b.program
    program.set_outputs([*program.output_values, b.u, b.v], [*program.outputs, *program.outputs[:2]])


def kept_for_backward(b: Build) -> None:
    value = b.fresh()
    b.forward(aten.relu.default, value)
    b.read(value)


def being_gathered(b: Build) -> None:
    start = b(ALL_GATHER, b.u, 1, "a group")
    b(aten.relu.default, b.u)
    b.read(b(WAIT, start))


def result_read_again(b: Build) -> None:
    results = b.normalized()
    first, same = (b(operator.getitem, results, 0) for _ in range(2))
    b(aten.relu.default, first)
    b.read(same)


def tuple_read(b: Build) -> None:
    results = b.normalized()
    b(aten.relu.default, b(operator.getitem, results, 0))
    program = b.program
    program.set_outputs([*program.output_values, results], [*program.outputs, program.outputs[0]])


UNSAFE: dict[str, Callable[[Build], Any]] = {
    "read later": read_later,
    "read later through a view": view_read_later,
    "its base is read later": read_through_base_later,
    "parts of tensors": parts,
    "expanded tensors": expanded,
    "returned": returned,
    "two views of one tensor": lambda b: b.add(b(aten.view.default, b.u, [16, 8]), b.u),
    "with a factor": lambda b: b.add(b.u, b.v, alpha=2),
    "an input": lambda b: b.add(b.parameter(), 1.0),
    "of forward": lambda b: b.add(b(aten.sin.default, b.parameter(), phase=Phase.FORWARD), 1.0),
    "not in backward": lambda b: b.add(b.u, b.v, phase=Phase.UPDATE),
    "another dtype of the same size": lambda b: b.add(b(aten._to_copy.default, b.u, dtype=torch.int32), b.parameter()),
    "a smaller one": lambda b: b.add(b.parameter(), b(aten.sum.dim_IntList, b.u, [0])),
    "another op": lambda b: b(aten.atan2.default, b.u, b.v),
    "the second operand where only the first may be": lambda b: b(aten.sub.Tensor, b.parameter(), b.u),
    "of forward and read in backward": kept_for_backward,
    "what ran again, in backward": lambda b: b(aten.relu.default, b.again(aten.cumsum.default, b.v, 0)),
    "what was fetched": lambda b: b(aten.relu.default, b(aten.clone.default, b.u, phase=Phase.TRANSFER)),
    "being gathered": being_gathered,
    "of a call that may hand on its argument": lambda b: b(aten.relu.default, b(torch.clone, b.u)),
    "one of two results that may share memory": lambda b: b.relu_of(b(aten.sort.default, b.u)),
    "a result that is read again": result_read_again,
    "a result whose tuple is read": tuple_read,
    "a softmax over another dimension": lambda b: b(aten._softmax.default, b.u, 0, False),
    "a softmax of a transposed tensor": lambda b: b(aten._softmax.default, b(aten.t.default, b.u), 1, False),
}


@pytest.mark.sweep(but=("read later through a view", "what was fetched"))
@pytest.mark.parametrize("build", list(UNSAFE.values()), ids=list(UNSAFE))
def test_where_an_operand_may_not_be_overwritten(build: Callable[[Build], Any]) -> None:
    b = Build()
    build(b)
    assert b.found == []


def one_read_later(b: Build) -> tuple[fx.Node, fx.Node]:
    total = b.add(b.u, b.v)
    b.read(b.u)
    return total, b.v


def after_a_gather(b: Build) -> tuple[fx.Node, fx.Node]:
    b(WAIT, b(ALL_GATHER, b.u, 1, "a group"))
    return b(aten.relu.default, b.u), b.u


def one_result(b: Build) -> tuple[fx.Node, fx.Node]:
    relu = b.relu_of(b.normalized())
    return relu, relu.args[0]  # type: ignore[return-value]


SAFE: dict[str, Callable[[Build], tuple[fx.Node, fx.Node]]] = {
    "both die": lambda b: (b.add(b.u, b.v), b.u),
    "the first is read later": one_read_later,
    "the same tensor twice": lambda b: (b.add(b.u, b.u), b.u),
    "a number": lambda b: (b.add(b.u, 1.0), b.u),
    "an input and a fresh one": lambda b: (b.add(b.parameter(), b.u), b.u),
    "a smaller one": lambda b: (b.add(b(aten.sum.dim_IntList, b.v, [0]), b.u), b.u),
    "a lower dtype": lambda b: (b.add(b(aten._to_copy.default, b.v, dtype=torch.bfloat16), b.u), b.u),
    "a product": lambda b: (b(aten.mul.Tensor, b.parameter(), b.u), b.u),
    "a difference": lambda b: (b(aten.sub.Tensor, b.u, b.parameter()), b.u),
    "an activation": lambda b: (b(aten.relu.default, b.u), b.u),
    "an activation of forward": lambda b: (b.forward(aten.relu.default, value := b.fresh()), value),
    "what is recomputed": lambda b: (b.again(aten.relu.default, v := b.again(aten.cumsum.default, b.v, 0)), v),
    "the gradient of an activation": lambda b: (b(aten.tanh_backward.default, b.u, b.parameter()), b.u),
    "what backward of an activation reads": lambda b: (b(aten.tanh_backward.default, b.parameter(), b.u), b.u),
    "a softmax": lambda b: (b(aten._log_softmax.default, b.u, 1, False), b.u),
    "the gradient of a softmax": lambda b: (
        b(aten._softmax_backward_data.default, b.u, b.parameter(), -1, torch.float32),
        b.u,
    ),
    "gathered before": after_a_gather,
    "one of several results": one_result,
    "a whole view": lambda b: (b.add(view := b(aten.view.default, b.u, [8, 16]), 1.0), view),
}


@pytest.mark.sweep(but=("one of several results",))
@pytest.mark.parametrize("build", list(SAFE.values()), ids=list(SAFE))
def test_where_an_operand_is_overwritten(build: Callable[[Build], tuple[fx.Node, fx.Node]]) -> None:
    b = Build()
    total, operand = build(b)
    assert b.found == [(total, operand)]
    before, others = total.target, [a for a in total.args if a is not operand]
    apply_reuse(b.program)
    assert FUNCTIONAL[total.target] is before
    assert schema.mutated_inputs(total) == [operand]
    assert [a for a in total.args if a is not operand] == others
    as_functional(total)
    assert total.target is before
    assert not schema.mutated_inputs(total)


def test_a_chain_of_sums_uses_one_tensor() -> None:
    b = Build()
    total = b.add(b.add(b.u, b.v), b(aten.mul.Tensor, b.parameter(), 2.0))
    memory = b.program.memory()
    owners = [s.owner for s in memory.storages if s.owner in (total, *total.all_input_nodes, b.u)]
    assert total not in owners
    assert b.u in owners
    assert info(total).phase is Phase.BACKWARD


# --- the ops ---------------------------------------------------------------------------------------------------------

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t(),
    "channels last": lambda x: x.view(2, 8, 33, -1).contiguous(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("op", IN_PLACE, ids=str)
def test_in_place_gives_the_same_bits_where_an_operand_was(op: Any) -> None:
    whole = IN_PLACE[op].dimension is not None or op in (aten.addmm.default, loss_gradient)
    layouts = ["contiguous"] if whole else list(LAYOUTS)
    operands = IN_PLACE[op].operands
    for dtype, layout, place, number in itertools.product(_BITS, layouts, operands, _NUMBERS):
        given = _arguments(op, layout, dtype, number)
        expected = op(*given)
        graph = fx.Graph()
        inputs = [graph.placeholder(f"x{n}") if isinstance(x, torch.Tensor) else x for n, x in enumerate(given)]
        node = graph.call_function(op, tuple(inputs))
        as_in_place(node, inputs[place])
        graph.output(node)
        values = [x.clone() if isinstance(x, torch.Tensor) else x for x in given]
        result = fx.GraphModule({}, graph)(*(x for x in values if isinstance(x, torch.Tensor)))
        assert result.data_ptr() == values[place].data_ptr()
        assert result.stride() == expected.stride()
        assert torch.equal(result.view(_BITS[dtype]), expected.view(_BITS[dtype])), (dtype, layout)


BACKWARDS = [op for op, form in IN_PLACE.items() if form.dimension is None and form.operands == (0, 1)]


@pytest.mark.parametrize("op", BACKWARDS, ids=str)
def test_the_argument_that_gives_the_layout_is_the_one_that_is_named(op: Any) -> None:
    given = _arguments(op, "contiguous", torch.float32, 0.5)
    given = [x.reshape(-1)[:6].reshape(2, 3) if isinstance(x, torch.Tensor) else x for x in given]
    for place in (0, 1):
        turned = [x.t().contiguous().t() if number == place else x for number, x in enumerate(given)]
        assert (op(*turned).stride() == (1, 2)) == (place == IN_PLACE[op].layout)


@pytest.mark.sweep(cases=("aten._softmax_backward_data.default", "aten._log_softmax_backward_data.default"))
@pytest.mark.parametrize("op", [op for op, form in IN_PLACE.items() if form.dimension is not None], ids=str)
def test_softmax_in_place_gives_the_same_bits_at_every_width(op: Any) -> None:
    form, generator = IN_PLACE[op], torch.Generator().manual_seed(0)
    for width, rows, place in itertools.product([2, 33, 1025, 50257], [1, 5, 40], form.operands):
        tensors = [torch.randn(rows, width, generator=generator) for _ in range(form.dimension or 0)]
        rest = (1, torch.float32) if len(tensors) == 2 else (1, False)[: len(op._schema.arguments) - 1]
        expected = op(*tensors, *rest)
        values = [x.clone() for x in tensors]
        out = {form.out: values[place]} if form.out else {}
        assert torch.equal(form.target(*values, *rest, **out), expected), (width, rows)
        assert torch.equal(values[place], expected)


_NUMBERS = (1.5, 0.35355339059327373)
"""One that every dtype holds, and one that each of them rounds."""

_BITS = {
    torch.float32: torch.int32,
    torch.float64: torch.int64,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}


def _arguments(op: Any, layout: str, dtype: torch.dtype, number: float) -> list[Any]:
    """Arguments of an op: tensors of a layout, and a number; half of the first tensor is negative."""
    generator = torch.Generator().manual_seed(0)
    if op is loss_gradient:
        log_probs = torch.randn((264, 66), generator=generator).log_softmax(1).to(dtype)
        target = torch.randint(66, (264,), generator=generator)
        return [log_probs, torch.tensor(number, dtype=dtype), target, None, 1, -100, torch.tensor(264.0, dtype=dtype)]
    found: list[Any] = []
    for argument in op._schema.arguments:
        if argument.kwarg_only or argument.has_default_value():
            continue
        if str(argument.type) == "Tensor":
            sizes = (264, 264) if op is aten.addmm.default else (264, 66)
            found.append(LAYOUTS[layout](torch.randn(sizes, generator=generator).to(dtype)))
        else:
            others = {"threshold": 0, "dim": found[0].dim() - 1, "half_to_float": False, "input_dtype": dtype}
            found.append(others.get(argument.name, number))
    return found


@pytest.mark.sweep
def test_products_of_complex_numbers_are_not_written_over_a_factor() -> None:
    """Written in place, they round otherwise: the gradient of ``torch.linalg.eigvals`` multiplies such numbers."""

    class Values(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.eigvals(x)

    for seed in range(5):
        torch.manual_seed(seed)
        matrix = torch.randn(2, 5, 5)
        gradients = []
        for model in (Values(), graphopt.optimize(Values())):
            given = matrix.clone().requires_grad_()
            values = torch.view_as_real(model(given))
            (values * torch.arange(values.numel()).view(values.shape).cos()).sum().backward()
            gradients.append(given.grad)
        assert torch.equal(*gradients)


class OneByOne(nn.Module):
    """Pointwise ops on images of one pixel, whose memory format strides leave open."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.1, 0.9, 8).view(1, 8, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.exp(-((x * self.weight).transpose(1, 3).contiguous().transpose(1, 3) * 0.5))


@pytest.mark.sweep(but=("strides0",))
@pytest.mark.parametrize("strides", [(8, 1, 8, 8), (8, 1, 1, 1)])
def test_axes_of_one_element_have_the_strides_that_kernels_give(strides: tuple[int, ...]) -> None:
    x = torch.linspace(-1, 1, 16).as_strided((2, 8, 1, 1), strides)
    model = OneByOne()
    expected, found = model(x), graphopt.optimize(model)(x)
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()


@pytest.mark.parametrize("op", [torch.ops.aten.addmm.default, torch.ops.aten._softmax.default])
@pytest.mark.parametrize("first", ["x", 0.5, None, ()])
def test_calls_of_a_strangers_program_that_take_no_tensor_are_not_taken_in_place(op: Any, first: Any) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    arguments = (x, x) if first == () else (first, x, x)
    assert in_place(graph.call_function(op, arguments)) is None
    assert in_place(graph.call_function(op)) is None
