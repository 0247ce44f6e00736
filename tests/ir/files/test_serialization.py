"""Programs as data and as source: what is written can be read again, and computes the same."""

from __future__ import annotations

import copy
import json
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim
from torch.utils.checkpoint import checkpoint

import graphopt
from graphopt import GraphoptError, Phase, Program
from graphopt.ir.context import Context
from graphopt.ir.files.serialization import SCHEMA_VERSION
from graphopt.ir.node import BatchSlice, NodeInfo, info, set_info, value_of
from graphopt.passes.recompute import Recompute
from graphopt.rewriting.pipeline import Pipeline
from tests.support.covering import covering
from tests.support.training import mean_square

STAGES = ("forward", "joint", "step")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.drop = nn.LayerNorm(4), nn.Linear(4, 4), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(torch.relu(self.linear(self.norm(x))))


class Dropped(nn.Module):
    """Recomputed at every block; see ``build``."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.conv(x)))


class Linear(nn.Module):
    """What the models below have in common."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return factor * x**3

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return 3 * ctx.factor * x**2 * gradient, None


class Custom(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Cube.apply(self.linear(x), 0.5)


class Cast(Linear):
    """An autocast region, and one inside of a region without gradients."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.linear(x)
        with torch.no_grad():
            z = x * 2
            with torch.autocast("cpu", dtype=torch.bfloat16):
                z = self.linear(z)
        return y.float() + z.float()


class Segment(Linear):
    """A constant, and a part under ``torch.utils.checkpoint``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.tensor([1.0, 2.0, 3.0, 4.0])
        return checkpoint(lambda t: F.dropout(self.linear(t), 0.5), x, use_reentrant=False) * scale


class Sizes(Linear):
    """Sizes that are expressions, and a number computed from sizes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, d = x.shape
        y = self.linear(x.reshape(batch * length, d)).view(batch, length, d)
        y = torch.cat([y[:, : length // 2], y[:, 1::3]], 1)
        return F.max_pool2d(y.unsqueeze(1), (3, 1), stride=2) * (batch / length)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], Callable[[], dict[str, Any]]]] = {
    "dropout": (Dropped, (3, 4), dict),
    "batch-norm": (Normed, (2, 1, 5, 5), dict),
    "custom-function": (Custom, (3, 4), dict),
    "autocast": (Cast, (3, 4), dict),
    "checkpoint": (Segment, (3, 4), dict),
    "dynamic-batch": (Dropped, (3, 4), lambda: {"dynamic_shapes": ({0: Dim("b", min=2, max=64)},)}),
    "dynamic-expressions": (Sizes, (3, 16, 4), lambda: {"dynamic_shapes": ({0: Dim.AUTO, 1: Dim.AUTO},)}),
}


def build(case: str, stage: str, *, recompute: bool = True) -> tuple[Program, nn.Module, torch.Tensor]:
    """The program of a case, recomputed at its blocks where it has some, its model and an input."""
    make, shape, options = CASES[case]
    model, x = make(), torch.randn(shape)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if case in ("batch-norm", "checkpoint"):  # their learning rate is a number, AdamW's a tensor
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
    program = graphopt.capture(model, (x,), loss=mean_square, optimizer=optimizer, stage="forward", **options())
    while True:
        if recompute and isinstance(model, Dropped):
            Pipeline([Recompute(["blocks.*"])]).run(program)
        if program.stage == stage:
            return program, model, x
        assert program.lower is not None
        history, program = program.history, program.lower(program)
        program.context = Context(history=history)


def real_inputs(program: Program, model: nn.Module, x: torch.Tensor) -> list[Any]:
    """Copies of the model's tensors, the input, and an optimizer state that has seen one step."""
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    found: list[Any] = []
    for node, spec in zip(program.placeholders, program.inputs, strict=True):
        value = value_of(node)
        if spec.role in ("parameter", "buffer"):
            found.append(held[spec.target].detach().clone())
        elif spec.role == "constant":
            found.append(program.constants[node.name].clone())
        elif spec.role == "input":
            found.append(x.clone())
        elif not isinstance(value, torch.Tensor):
            found.append(0.5)
        else:
            found.append(torch.full(tuple(value.shape), 0.5, dtype=value.dtype))
    return found


def run(function: Callable[[list[Any]], Any], inputs: list[Any]) -> list[torch.Tensor]:
    """Everything that a run leaves behind: results, inputs it may have written to, the generator's state."""
    kept, given = list(inputs), list(inputs)
    torch.manual_seed(7)
    with torch.no_grad():
        results = function(given)
    assert not given, "the list of arguments is emptied"
    return [torch.as_tensor(value) for value in (*results, *kept, torch.get_rng_state())]


def assert_same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert len(found) == len(wanted)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in wanted)
    assert [torch.equal(a, b) for a, b in zip(found, wanted, strict=True)] == [True] * len(wanted)


def source_function(program: Program) -> Callable[[list[Any]], Any]:
    space: dict[str, Any] = {}
    exec(program.to_python(), space)
    return space["step"]  # type: ignore[no-any-return]


# --- JSON ------------------------------------------------------------------------------------------------------------


@pytest.mark.sweep(but=("autocast-forward",))
@covering(case=list(CASES), stage=STAGES)
def test_json_round_trip(case: str, stage: str) -> None:
    program, _, _ = build(case, stage)
    data = program.to_json()
    restored = Program.from_json(json.loads(json.dumps(data)))
    assert restored.to_json() == data
    assert restored.to_text() == program.to_text()
    assert restored.to_python() == program.to_python()
    assert restored.memory().bytes == program.memory().bytes
    assert restored.diff(program).endswith("the programs are equal\n")


@pytest.mark.sweep(but=("custom-function-joint",))
@covering(case=list(CASES), stage=["joint", "step"])
def test_restored_program_computes_the_same(case: str, stage: str) -> None:
    program, model, x = build(case, stage)
    restored = Program.from_json(json.loads(json.dumps(program.to_json())))
    inputs = real_inputs(program, model, x)
    wanted = run(program.to_graph_module().forward, copy.deepcopy(inputs))
    assert_same(run(restored.to_graph_module().forward, real_inputs(restored, model, x)), wanted)


def test_restored_sizes_still_compute() -> None:
    program, _, _ = build("dynamic-expressions", "joint")
    restored = Program.from_json(program.to_json())
    old = {node.name: value_of(node) for node in program.graph.nodes}
    sizes = {
        node.name: size
        for node in restored.graph.nodes
        if isinstance(value_of(node), torch.Tensor)
        for size in value_of(node).shape
        if "//" in str(size)
    }
    assert sizes, "the case has sizes with a division"
    for name, size in sizes.items():
        wanted = next(other for other in old[name].shape if str(other) == str(size))
        assert str(size * 2 + 1) == str(wanted * 2 + 1)
    cut = next(node for node in restored.graph.nodes if node.name in sizes and node.op == "call_function")
    added = restored.insert(torch.ops.aten.neg.default, (cut,), after=cut, phase=Phase.FORWARD, origin="test")
    assert [str(size) for size in value_of(added).shape] == [str(size) for size in value_of(cut).shape]


def test_json_keeps_nested_subgraphs() -> None:
    program, _, _ = build("autocast", "forward")
    nested = [name for name in program.to_json()["attributes"] if "." in name]
    assert nested
    restored = Program.from_json(program.to_json())
    outer, inner = nested[0].split(".")
    assert "linear" in getattr(restored.attributes[outer], inner).code


def test_json_errors_say_what_to_do() -> None:
    program, _, _ = build("dynamic-batch", "forward")
    data = program.to_json()
    with pytest.raises(GraphoptError, match=f"schema 0, and this version reads {SCHEMA_VERSION}.*graphopt dump"):
        Program.from_json({**data, "schema": 0})
    text = json.dumps(data).replace("aten.relu.default", "aten.rleu.default")
    with pytest.raises(GraphoptError, match=r"no op 'aten\.rleu\.default'"):
        Program.from_json(json.loads(text))
    symbol = next(iter(data["symbols"]))
    text = json.dumps(data).replace(f'"expression": "{symbol}"', '"expression": "Bogus(3)"')
    with pytest.raises(GraphoptError, match=r"shape\[0\]\.expression: 'Bogus' is not known here; known are Max"):
        Program.from_json(json.loads(text))


# --- Python ----------------------------------------------------------------------------------------------------------


@pytest.mark.sweep(cases=("True",))
@pytest.mark.parametrize("recompute", [False, True])
def test_python_replays_dropout_as_the_module_does(recompute: bool) -> None:
    program, model, x = build("dropout", "joint", recompute=recompute)
    assert ("run_with_rng_state" in program.to_python()) == recompute
    inputs = real_inputs(program, model, x)
    wanted = run(program.to_graph_module().forward, copy.deepcopy(inputs))
    assert_same(run(source_function(program), inputs), wanted)
    torch.manual_seed(7)
    mean_square(model, x).backward()
    assert torch.equal(wanted[-1], torch.get_rng_state())
    gradients = [value for value, spec in zip(wanted, program.outputs, strict=False) if spec.role == "gradient"]
    targets = [spec.target for spec in program.outputs if spec.role == "gradient"]
    known = dict(model.named_parameters())
    assert_same(gradients, [known[target].grad for target in targets if known[target].grad is not None])


@pytest.mark.sweep(but=("autocast-forward",))
@covering(case=sorted(set(CASES) - {"custom-function"}), stage=STAGES)
def test_python_computes_what_the_module_does(case: str, stage: str) -> None:
    program, model, x = build(case, stage)
    inputs = real_inputs(program, model, x)
    wanted = run(program.to_graph_module().forward, copy.deepcopy(inputs))
    assert_same(run(source_function(program), inputs), wanted)


def test_python_runs_custom_functions() -> None:
    program, model, x = build("custom-function", "forward")
    results = source_function(program)(real_inputs(program, model, x))
    assert torch.equal(results[0], mean_square(model, x))


def test_python_avoids_the_names_it_uses_itself() -> None:
    class Clash(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in ("args", "operator", "torch_", "step"):
                self.register_parameter(name, nn.Parameter(torch.randn(3)))

        def forward(self, math: torch.Tensor) -> torch.Tensor:
            return self.args * self.operator + self.torch_ * self.step * math

    model, x = Clash(), torch.randn(3)
    program = graphopt.capture(model, (), {"math": x}, loss=lambda m, math: m(math).sum(), stage="forward")
    results = source_function(program)(real_inputs(program, model, x))
    assert torch.equal(results[0], model(x).sum())


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([0, "relu"], "a number, the name of a call and a phase"),
        (["0", "relu", "forward"], "a whole number"),
        ([-1, "relu", "forward"], "a whole number from 0"),
        ([0, 1, "forward"], "text"),
        ([0, "relu", "foward"], "did you mean 'forward'"),
        ("relu", "a list"),
    ],
)
def test_slices_of_the_batch_are_read_with_care(found: Any, message: str) -> None:
    program, _, _ = build("dynamic-batch", "forward")
    data = program.to_json()
    calls = [node for node in data["nodes"] if node["op"] == "call_function"]
    calls[0]["batch_slice"] = [2, "relu", "forward"]
    read = Program.from_json(data)
    assert [info(node).batch_slice for node in read.nodes if node.name == calls[0]["name"]] == [
        BatchSlice(2, "relu", Phase.FORWARD)
    ]
    assert read.to_json() == data
    calls[0]["batch_slice"] = found
    with pytest.raises(GraphoptError, match=message) as refused:
        Program.from_json(data)
    assert ".batch_slice" in str(refused.value)


@pytest.mark.sweep
def test_python_errors_say_what_cannot_be_written() -> None:
    program, _, _ = build("autocast", "forward")
    name = next(iter(program.attributes))
    with pytest.raises(GraphoptError, match=f"attribute '{name}'.*does not exist"):
        replace(program, attributes={}).to_python()

    class Local(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x + 1

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient

    class Uses(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Local.apply(self.linear(x))

    local = graphopt.capture(Uses(), (torch.randn(3, 4),), stage="forward")
    with pytest.raises(GraphoptError, match=r"Local cannot be written as Python.*top level of a module"):
        local.to_python()
    program, _, _ = build("dropout", "joint")
    with program.graph.inserting_before(program.output_node):
        node = program.graph.call_function(sorted, ([operator.add],))
    set_info(node, NodeInfo(Phase.BACKWARD))
    with pytest.raises(GraphoptError, match=r"sorted.*torch\.library\.custom_op"):
        program.to_python()
