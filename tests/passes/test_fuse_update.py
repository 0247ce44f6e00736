"""`FuseUpdate`: every parameter is updated as soon as its gradient is final, and nothing else changes."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn

import graphopt
from graphopt import Changed, Pass, PassError, Phase, Pipeline, Program, TrainStep, VerifyError
from graphopt.ir.node import Stage, info, set_value, value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.updates import foreach
from graphopt.ir.verify import verify
from graphopt.passes import FitMemory, FuseUpdate, Recompute
from graphopt.report.pictures.layout import lay_out
from graphopt.rewriting.memory.recompute.planning_problem import planning_problem
from tests.support.covering import covering, some_of
from tests.support.properties import examples
from tests.support.running import Compiler
from tests.support.training import (
    Blocks,
    Loss,
    MakeOptimizer,
    Net,
    Passes,
    Plain,
    Training,
    assert_same,
    copied,
    mean_square,
    next_token,
    ops,
    train,
)

FUSED: list[Pass] = [FuseUpdate()]
X = torch.linspace(-1, 1, 32).reshape(4, 8).cos()
BATCHES = [(X.roll(number, 0),) for number in range(3)]
TOKENS = [(torch.arange(20).reshape(2, 10).roll(number, 1) * 7 % 11,) for number in range(3)]


def network() -> Net:
    """Three linear layers with a norm and dropout between them."""
    torch.manual_seed(0)
    return Net(nn.Linear(8, 16), nn.Tanh(), nn.LayerNorm(16), nn.Dropout(0.3), nn.Linear(16, 16), nn.Linear(16, 8))


def deep(layers: int = 6, width: int = 96) -> Net:
    """Wide layers, which a batch of few rows gives gradients that are larger than all activations."""
    torch.manual_seed(0)
    return Net(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)))


def rows(width: int = 96) -> torch.Tensor:
    return torch.linspace(-1, 1, 3 * width).reshape(3, width).sin()


def step_program(
    model: nn.Module, make: MakeOptimizer, *batch: Any, passes: Passes = FUSED, loss: Loss = mean_square
) -> Program:
    """The step program of any step but the first, after passes of all stages."""
    return graphopt.optimize_step(model, make(model.parameters()), passes, loss=loss).prepare(*batch).program


def trained(
    model: nn.Module, make: MakeOptimizer, loss: Loss, batches: Sequence[Sequence[Any]], passes: Passes, **options: Any
) -> tuple[Training, TrainStep]:
    """A copy of ``model`` after whole steps, and the step."""
    model = copy.deepcopy(model)
    optimizer, found = make(model.parameters()), Training()
    step = graphopt.optimize_step(model, optimizer, passes, loss=loss, **options)
    torch.manual_seed(1)
    for number, batch in enumerate(batches):
        inputs = copied(batch)
        found.add(f"{number}.loss", step(*inputs))
        found.add(f"{number}.gradient of inputs", [x.grad for x in inputs if isinstance(x, torch.Tensor)])
    return found.end(model, optimizer), step


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, fused=True)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, fused=True)


def momentum(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True)


# --- what the program is afterwards ----------------------------------------------------------------------------------


def test_updates_stand_behind_their_gradients() -> None:
    torch.manual_seed(0)
    model = Net(nn.Linear(8, 16, bias=False), nn.Tanh(), nn.Linear(16, 8, bias=False))
    program = step_program(model, sgd, X)
    late = [op for op in ops(program, Phase.BACKWARD, Phase.UPDATE) if op not in ("t", "detach")]
    first = late.index("_fused_sgd_")
    assert late.count("_fused_sgd_") == 2
    assert late[first - 2 : first] == ["mm", "mm"], "the weight is read once more behind its own gradient"
    assert late[first + 1 :] == ["tanh_backward", "mm", "_fused_sgd_"]
    updates = list(program.phase_nodes(Phase.UPDATE))
    assert [(info(n).module, info(n).origin) for n in updates] == [
        ("net.2", "fuse-update: one of 2 elements of _fused_sgd_"),
        ("net.0", "fuse-update: one of 2 elements of _fused_sgd_"),
    ]


def test_the_record_says_what_moved_and_what_it_saves() -> None:
    model = deep()
    step = graphopt.optimize_step(model, sgd(model.parameters()), FUSED, loss=mean_square)
    step.prepare(rows())
    record = step.records[0]
    assert record.changed.counts == {"updates moved": 11, "list ops split": 1}
    assert record.changed.tensors[:2] == ("net.0.0.bias", "net.1.0.weight")
    before = dict(step.snapshots)["captured step"].memory().peak_bytes
    saved = before - step.program.memory().peak_bytes
    assert record.changed.bytes_saved == saved > 4 * 4 * 96 * 96
    first, second = record.changed.lines
    assert first == "11 of 12 parameters are updated while backward still runs"
    assert second.startswith("the predicted peak falls by ")
    assert str(record).startswith("fuse-update: 11 updates moved, 1 list op split; peak ")


@pytest.mark.sweep
def test_a_peak_that_is_elsewhere_stays_and_the_record_says_where() -> None:
    model = Net(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    step = graphopt.optimize_step(model, sgd(model.parameters()), FUSED, loss=mean_square)
    step.prepare(torch.randn(64, 8))
    changed = step.records[0].changed
    assert changed.counts["updates moved"] == 3
    assert changed.bytes_saved == 0
    assert any(line.startswith("the predicted peak stays ") and "it is reached at" in line for line in changed.lines)


@pytest.mark.sweep
def test_a_second_application_does_nothing() -> None:
    program = step_program(network(), adamw, X)
    before = str(program.graph)
    (record,) = Pipeline(FUSED).run(program)
    assert not record.changed
    assert record.changed.reason == "every update runs as early as it can already"
    assert str(program.graph) == before


@pytest.mark.sweep
def test_programs_without_an_update() -> None:
    model = graphopt.optimize(network(), FUSED)
    mean_square(model, X).backward()
    assert str(model.records[0].changed).startswith("nothing: there is no update in this program")


def test_one_parameter_has_nothing_to_run_before() -> None:
    model = Net(nn.Linear(8, 8, bias=False))
    program = graphopt.capture(model, (X,), loss=mean_square, optimizer=sgd(model.parameters()))
    (record,) = Pipeline(FUSED).run(program)
    assert record.changed.reason == "every update runs as early as it can already"


# --- bitwise equal to eager ------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "fused": True}),
    "SGD foreach": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1, "foreach": True}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "fused": True}),
    "momentum foreach": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "foreach": True}),
    "nesterov loop": (
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": False, "fused": False},
    ),
    "Adam": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True, "fused": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.05, "lr_decay": 0.1, "fused": True}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.5, "foreach": True}),
    "RMSprop loop": (torch.optim.RMSprop, {"lr": 0.01, "foreach": False}),
    "Adadelta": (torch.optim.Adadelta, {"weight_decay": 0.1, "foreach": True}),
    "Adadelta loop": (torch.optim.Adadelta, {"foreach": False}),
    "Rprop": (torch.optim.Rprop, {"foreach": True}),
}


def scheduled(kind: str, model: nn.Module, passes: Passes | None) -> Training:
    """Three steps with two parameter groups and a learning rate that changes after each step; eager without passes."""
    cls, options = OPTIMIZERS[kind]
    named = dict(model.named_parameters())
    weights = [p for n, p in named.items() if n.endswith("weight")]
    biases = [p for n, p in named.items() if n.endswith("bias")]
    optimizer = cls([{"params": biases, "lr": 0.03}, {"params": weights}], **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.7)
    step = None if passes is None else graphopt.optimize_step(model, optimizer, passes, loss=mean_square)
    found = Training()
    torch.manual_seed(1)
    for number, batch in enumerate(BATCHES):
        if step is None:
            optimizer.zero_grad()
            loss = mean_square(model, *batch)
            loss.backward()
            optimizer.step()
        else:
            loss = step(*batch)
        found.add(f"{number}.loss", loss)
        scheduler.step()
    if step is not None:
        assert step.records[-1].changed.counts["updates moved"] > 3
    return found.end(model, optimizer)


@pytest.mark.sweep(but=("SGD",))
@pytest.mark.parametrize(
    "kind", some_of(OPTIMIZERS, "SGD", "momentum foreach", "nesterov loop", "Adam", "AdamW", "RMSprop", "Rprop")
)
def test_training_equals_eager(kind: str) -> None:
    assert_same(scheduled(kind, network(), None), scheduled(kind, network(), FUSED), kind)


@pytest.mark.sweep
@covering(every=[2, 3], make={"adamw": adamw, "momentum": momentum})
def test_accumulation_equals_eager(every: int, make: MakeOptimizer) -> None:
    batches = [(X.roll(number, 0),) for number in range(2 * every)]
    model = network()
    optimizer, expected = make(model.parameters()), Training()
    torch.manual_seed(1)
    for number, batch in enumerate(batches):
        loss = mean_square(model, *batch)
        (loss / every).backward()
        expected.add(f"{number}.loss", loss)
        if number % every == every - 1:
            optimizer.step()
            optimizer.zero_grad()
    model_too = network()
    optimizer_too, found = make(model_too.parameters()), Training()
    step = graphopt.optimize_step(model_too, optimizer_too, FUSED, loss=mean_square).accumulate(every)
    torch.manual_seed(1)
    for number, batch in enumerate(batches):
        found.add(f"{number}.loss", step(*batch))
    assert_same(expected.end(model, optimizer), found.end(model_too, optimizer_too), f"accumulate({every})")


class Shared(nn.Module):
    """Parameters that are added to the stream, one of them twice: their gradients are the stream's own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.linspace(0, 1, 32).reshape(4, 8)), nn.Parameter(torch.ones(4, 8))
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.a + self.b
        y = y + self.linear(y).tanh()
        return (y * self.b).exp() + self.linear(y)


class Convolutions(nn.Module):
    """Convolutions in channels-last layout, BatchNorm and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)
        self.head = nn.Linear(4, 3)
        self.to(memory_format=torch.channels_last)
        self.b.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.b(self.norm(self.a(x)).relu()).mean((2, 3)))


MODELS: dict[str, tuple[Callable[[], nn.Module], Loss, Sequence[Sequence[Any]]]] = {
    "shared gradients": (Shared, mean_square, BATCHES),
    "convolutions": (Convolutions, mean_square, [(torch.linspace(-2, 1, 100).reshape(2, 2, 5, 5).sin(),)] * 3),
    "blocks": (lambda: Blocks(2), next_token, TOKENS),
}
COMBINED = [
    ("shared gradients", adamw, "eager"),
    ("shared gradients", momentum, Compiler()),
    ("convolutions", adamw, Compiler()),
    ("convolutions", momentum, "eager"),
    ("blocks", adamw, "eager"),
    ("blocks", momentum, Compiler()),
]


@pytest.mark.sweep
@pytest.mark.parametrize(("kind", "make", "backend"), COMBINED, ids=[f"{c[0]} {n}" for n, c in enumerate(COMBINED)])
def test_models_train_as_in_eager_mode(kind: str, make: MakeOptimizer, backend: Any) -> None:
    build, loss, batches = MODELS[kind]
    torch.manual_seed(0)
    model = build()
    found, step = trained(model, make, loss, batches, FUSED, backend=backend)
    assert step.records[-1].changed
    assert_same(train(copy.deepcopy(model), make, loss, batches), found, kind, skip=".gradient.")


LAYERS: dict[str, Callable[[int, int], nn.Module]] = {
    "linear": lambda i, o: nn.Linear(i, o),
    "without bias": lambda i, o: nn.Linear(i, o, bias=False),
    "normed": lambda i, o: nn.Sequential(nn.Linear(i, o), nn.LayerNorm(o)),
    "convolution": lambda i, o: nn.Sequential(
        nn.Unflatten(1, (1, i)), nn.Conv1d(1, 2, 3, padding=1), nn.Flatten(), nn.GELU(), nn.Linear(2 * i, o)
    ),
    "dropped": lambda i, o: nn.Sequential(nn.Linear(i, o), nn.Dropout(0.2), nn.Tanh()),
}
WIDTHS = st.sampled_from([3, 8, 24])


@given(
    kinds=st.lists(st.sampled_from(list(LAYERS)), min_size=1, max_size=4),
    widths=st.lists(WIDTHS, min_size=5, max_size=5),
    make=st.sampled_from([sgd, adamw, momentum]),
    count=st.integers(1, 6),
)
@examples(3)
def test_random_networks(kinds: list[str], widths: list[int], make: MakeOptimizer, count: int) -> None:
    torch.manual_seed(0)
    model = Net(*(LAYERS[kind](widths[i], widths[i + 1]) for i, kind in enumerate(kinds)))
    batches = [(torch.linspace(-1, 1, count * widths[0]).reshape(count, widths[0]).sin(),)] * 2
    found, step = trained(model, make, mean_square, batches, FUSED)
    assert_same(train(copy.deepcopy(model), make, mean_square, batches), found, str(kinds), skip=".gradient.")
    assert step.program.memory().peak_bytes <= dict(step.snapshots)["captured step"].memory().peak_bytes


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.sweep(but=("adamw",))
@pytest.mark.parametrize("make", [sgd, adamw, momentum], ids=["sgd", "adamw", "momentum"])
def test_gradients_die_one_by_one(make: MakeOptimizer) -> None:
    layers, width = 6, 96
    weight = 4 * width * width
    found = {}
    for name, passes in {"plain": [], "fused": FUSED}.items():
        model = deep(layers, width)
        step = graphopt.optimize_step(model, make(model.parameters()), passes, loss=mean_square)
        step(rows(width))
        measured = graphopt.measure_peak(lambda step=step: step(rows(width))).allocated_peak_bytes  # type: ignore[misc]
        predicted = step.program.memory().allocated_peak_bytes + rows(width).nbytes
        assert 0 <= measured - predicted <= 8 * (make is adamw), "the step count's increment wraps a number"
        found[name] = predicted
    assert found["plain"] > layers * weight
    assert found["fused"] < 3 * weight


def test_gradients_are_told_from_the_rest() -> None:
    program = step_program(deep(), sgd, rows())
    memory = program.memory()
    gradients = [s for s in memory.storages if s.category == "gradients" and s.bytes == 4 * 96 * 96]
    assert len(gradients) == 6
    alive = [sum(s.first <= place <= s.last for s in gradients) for place in range(len(memory.nodes))]
    assert max(alive) == 1


@pytest.mark.sweep
def test_the_first_step_creates_state_where_that_does_not_raise_the_peak() -> None:
    torch.manual_seed(0)
    model = Net(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))
    x = torch.linspace(-1, 1, 200 * 16).reshape(200, 16)
    peaks = {}
    for name, passes in {"plain": [], "fused": FUSED}.items():
        copied_model = copy.deepcopy(model)
        step = graphopt.optimize_step(copied_model, adamw(copied_model.parameters()), passes, loss=mean_square)
        step.prepare(x)
        peaks[name] = graphopt.measure_peak(lambda step=step: step(x)).allocated_peak_bytes  # type: ignore[misc]
    assert peaks["fused"] <= peaks["plain"]


# --- with other passes -----------------------------------------------------------------------------------------------


def test_the_order_in_which_passes_are_given_is_free() -> None:
    given: list[Pass] = [FitMemory("60%"), Recompute("blocks.*"), FuseUpdate()]
    orders = {tuple(p.name for p in Pipeline(order).passes) for order in itertools.permutations(given)}
    assert orders == {("recompute", "fuse-update", "fit-memory")}
    assert Pipeline("fuse-update").passes == (FuseUpdate(),)


@pytest.mark.sweep
def test_with_recompute() -> None:
    torch.manual_seed(0)
    model = Blocks(2)
    found, step = trained(model, adamw, next_token, TOKENS, [FuseUpdate(), Recompute("blocks.*")])
    assert_same(train(model, adamw, next_token, TOKENS), found, "recompute", skip=".gradient.")
    assert any(step.program.phase_nodes(Phase.RECOMPUTE))
    assert step.records[-1].changed.counts["updates moved"] > 20


@pytest.mark.sweep
@pytest.mark.parametrize("share", [60, 85])
def test_with_fit_memory(share: int) -> None:
    torch.manual_seed(0)
    model = Net(*(nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Dropout(0.2)) for _ in range(5)))
    x = torch.linspace(-1, 1, 64 * 24).reshape(64, 24)
    plain = graphopt.capture(model, (x,), loss=mean_square, optimizer=sgd(model.parameters())).memory()
    budget = plain.resident_bytes + plain.allocated_peak_bytes * share // 100
    passes: list[Pass] = [FitMemory(budget, cost="roofline", allow=("recompute",)), FuseUpdate()]
    found, step = trained(model, sgd, mean_square, [(x,)] * 3, passes)
    assert_same(train(model, sgd, mean_square, [(x,)] * 3), found, f"{share} %", skip=".gradient.")
    assert [record.name for record in step.records] == ["fuse-update", "fit-memory"]
    assert all(record.changed for record in step.records)
    assert step.program.memory().peak_bytes <= budget


class Delayed(Plain):
    """Let the last layer's weight gradient come last in backward, as schedules do that fill bubbles in pipelines."""

    name: ClassVar[str] = "delayed"
    stage: ClassVar[Stage] = "joint"

    def apply(self, program: Program) -> Changed:
        gradients = {spec.target: value for value, spec in program.outputs_of("gradient")}
        chain = [gradients["net.6.weight"]]
        while schema.is_view(chain[-1]):
            chain.append(chain[-1].all_input_nodes[0])
        for moved in reversed(chain):
            program.output_node.prepend(moved)
        return Changed(counts={"delayed": 1})


def repeatable(program: Program) -> dict[str, bool]:
    """Whether the planner may run the calls of forward again, by the name of their results."""
    memory = program.memory()
    planning = planning_problem(program, [1.0] * len(memory.nodes))
    return {
        info(node).names[0]: operation.repeatable
        for node, operation in zip(planning.nodes, planning.problem.operations, strict=True)
        if node is not None and info(node).names and info(node).phase is Phase.FORWARD
    }


@pytest.mark.sweep
def test_nothing_runs_again_on_parameters_that_are_updated() -> None:
    """The delayed gradient reads what the third layer computed, behind the update of that layer."""
    torch.manual_seed(0)
    model = Net(
        nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)
    )
    x = torch.linspace(-1, 1, 512).reshape(64, 8)
    plain = repeatable(step_program(copy.deepcopy(model), sgd, x, passes=[Delayed()]))
    program = step_program(copy.deepcopy(model), sgd, x, passes=[FuseUpdate(), Delayed()])
    fused = repeatable(program)
    assert all(plain[f"net.{number}"] for number in range(6))
    assert [number for number in range(6) if not fused[f"net.{number}"]] == [4]
    assert all(repeatable(step_program(copy.deepcopy(model), sgd, x))[f"net.{number}"] for number in range(6))
    memory = program.memory()
    fits, too_small = (memory.resident_bytes + memory.allocated_peak_bytes * share // 100 for share in (86, 80))
    with pytest.raises(PassError, match="no plan fits"):
        Pipeline([FitMemory(too_small, cost="roofline", allow=("recompute",))]).run(program.copy())
    (record,) = Pipeline([FitMemory(fits, cost="roofline", allow=("recompute",))]).run(program)
    assert record.changed
    assert program.memory().peak_bytes <= fits


# --- what needs all gradients first ----------------------------------------------------------------------------------


class Clipped(torch.optim.SGD):
    """SGD that clips by the norm of all gradients."""

    def step(self, closure: Any = None) -> Any:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        torch._foreach_mul_(gradients, (1.0 / (norm + 1e-6)).clamp(max=1.0))
        return super().step(closure)


class Checked(torch.optim.SGD):
    """SGD that makes no step where a gradient is not finite."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            finite = torch.ones((), dtype=torch.bool)
            for parameter in group["params"]:
                finite.logical_and_(parameter.grad.isfinite().all())
            for parameter in group["params"]:
                parameter.grad.copy_(torch.where(finite, parameter.grad, torch.zeros_like(parameter.grad)))
        return super().step(closure)


class Tempered(torch.optim.SGD):
    """SGD whose other gradients are divided by one plus that of its first parameter, which is one number."""

    def step(self, closure: Any = None) -> Any:
        first, *others = (p for group in self.param_groups for p in group["params"])
        for parameter in others:
            parameter.grad.div_(first.grad.abs() + 1)
        return super().step(closure)


class Temperature(nn.Module):
    """A number that everything is multiplied by in front of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature, self.net = nn.Parameter(torch.tensor(0.7)), network().net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) * self.temperature


def test_an_update_may_depend_on_one_number_and_its_own_gradient() -> None:
    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return Tempered(parameters, lr=0.1, foreach=True)

    model = Temperature()
    expected = train(copy.deepcopy(model), make, mean_square, BATCHES)
    found, step = trained(model, make, mean_square, BATCHES, FUSED)
    assert_same(expected, found, "one number", skip=".gradient.")
    (record,) = step.records
    assert record.changed, record.changed.reason


@pytest.mark.sweep
@pytest.mark.parametrize(("optimizer", "op"), [(Clipped, "stack"), (Checked, "logical_and_")])
def test_an_update_that_needs_all_gradients_stays(optimizer: type[torch.optim.SGD], op: str) -> None:
    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return optimizer(parameters, lr=0.1, foreach=True)

    model = network()
    expected = train(copy.deepcopy(model), make, mean_square, BATCHES)
    found, step = trained(model, make, mean_square, BATCHES, FUSED)
    assert_same(expected, found, op, skip=".gradient.")
    (record,) = step.records
    assert str(step.program.graph) == str(dict(step.snapshots)["captured step"].graph)
    assert f"({op}) depends on " in record.changed.reason
    assert record.changed.reason.endswith("so the update has to wait for all of them")


class Overlapping(nn.Module):
    """Two parameters that are not the same object, in the same memory."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.linspace(-1, 1, 64).reshape(8, 8)
        self.a, self.b = nn.Parameter(memory), nn.Parameter(memory)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x @ self.a).tanh() @ self.b).tanh() @ self.a


def test_parameters_that_share_memory_stay() -> None:
    model = Overlapping()
    optimizer, found = sgd(model.parameters()), Training()
    step = graphopt.optimize_step(model, optimizer, FUSED, loss=mean_square)
    for number, batch in enumerate(BATCHES):
        found.add(f"{number}.loss", step(*batch))
    assert step.records[0].changed.reason.startswith("a and b share memory, so that ")
    expected = train(Overlapping(), sgd, mean_square, BATCHES)
    wrong = [name for name, value in found.tensors.items() if not torch.equal(value, expected.tensors[name])]
    assert not wrong


class Scaled(Plain):
    """Multiply every gradient by a number that is made of all of them, in front of the update."""

    name: ClassVar[str] = "scaled"
    stage: ClassVar[Stage] = "joint"

    def apply(self, program: Program) -> Changed:
        common: dict[str, Any] = {"before": program.output_node, "phase": Phase.SYNC, "origin": "scaled"}
        gradients = [value for value, _ in program.outputs_of("gradient")]
        sums = [program.insert(torch.ops.aten.sum.default, (value,), **common) for value in gradients]
        whole = program.insert(torch.ops.aten.stack.default, (sums,), **common)
        factor = program.insert(torch.ops.aten.mean.default, (whole,), **common)
        scaled = {v: program.insert(torch.ops.aten.mul.Tensor, (v, factor), **common) for v in gradients}
        program.set_outputs([scaled.get(value, value) for value in program.output_values], program.outputs)
        return Changed(counts={"scaled": len(scaled)})


def test_gradients_that_another_pass_makes_final_late() -> None:
    model = network()
    plain, _ = trained(model, adamw, mean_square, BATCHES, [Scaled()])
    fused, step = trained(model, adamw, mean_square, BATCHES, [Scaled(), FuseUpdate()])
    assert_same(plain, fused, "scaled")
    program = step.program
    order = {node.name: index for index, node in enumerate(program.nodes)}
    factor = next(n for n in program.phase_nodes(Phase.SYNC) if schema.op_name(n) == "mean")
    assert all(order[node.name] > order[factor.name] for node in program.phase_nodes(Phase.UPDATE))


# --- what relied on the update coming last ---------------------------------------------------------------------------


@pytest.mark.sweep
def test_an_update_in_front_of_a_reader_is_not_valid() -> None:
    program = step_program(network(), sgd, X)
    weight = next(node for node, spec in program.inputs_of("parameter") if spec.target == "net.4.weight")
    update = next(n for n in program.phase_nodes(Phase.UPDATE) if weight in schema.mutated_inputs(n))
    reader = max(schema.readers(weight) - {update}, key=program.nodes.index)
    assert program.nodes.index(reader) < program.nodes.index(update)
    update.append(reader)
    with pytest.raises(VerifyError, match=r"(?s)an input is not read after it is overwritten.*net_4_weight"):
        verify(program)


@pytest.mark.sweep
def test_the_picture_keeps_its_rows() -> None:
    plain, fused = (step_program(network(), adamw, X, passes=passes) for passes in ([], FUSED))
    before, after = (lay_out([program])[0] for program in (plain, fused))
    assert [row.label for row in before.rows] == [row.label for row in after.rows]
    assert {(b.row, b.lane, b.phase) for b in before.boxes} == {(b.row, b.lane, b.phase) for b in after.boxes}
    (update,) = (box for box in after.boxes if box.phase is Phase.UPDATE)
    assert len(update.nodes) == sum(1 for _ in fused.phase_nodes(Phase.UPDATE))
    assert "optimizer.step" in fused.to_svg()


@pytest.mark.sweep
def test_the_program_prints_loads_and_runs() -> None:
    program = step_program(network(), adamw, X)
    loaded = Program.from_json(program.to_json())
    assert [node.name for node in loaded.nodes] == [node.name for node in program.nodes]
    assert program.to_text().count("# ---- update") > 3
    assert "_fused_adamw_" in program.to_python()
    assert str(program.memory())


# --- list ops --------------------------------------------------------------------------------------------------------

aten = torch.ops.aten
A, B, C = ([torch.linspace(0.1, 2.0, n * n).reshape(n, n) * k for n in (3, 5, 33)] for k in (1.0, 1.7, 0.3))
SCALAR = torch.tensor(1.3)
LIST_OPS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "add list": (aten._foreach_add.List, (A, B)),
    "add tensor": (aten._foreach_add.Tensor, (A, SCALAR)),
    "mul numbers": (aten._foreach_mul.ScalarList, (A, [1.1, 2.2, 3.3])),
    "addcmul": (aten._foreach_addcmul.Scalar, (A, B, C, 0.7)),
    "addcdiv": (aten._foreach_addcdiv.ScalarList, (A, B, C, [0.1, 0.2, 0.3])),
    "lerp": (aten._foreach_lerp.Scalar, (A, B, 0.3)),
    "norm": (aten._foreach_norm.Scalar, (A, 2)),
    "sqrt": (aten._foreach_sqrt.default, (A,)),
    "max": (aten._foreach_max.default, (A,)),
    "number to powers": (aten._foreach_pow.ScalarAndTensor, (1.5, A)),
}


def call(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> fx.Node:
    """A call in a graph of its own; tensors become placeholders that know their values."""
    graph = fx.Graph()

    def placed(value: Any) -> Any:
        if isinstance(value, list):
            return [placed(item) for item in value]
        if not isinstance(value, torch.Tensor):
            return value
        node = graph.placeholder("x")
        set_value(node, value)
        return node

    return graph.call_function(target, tuple(map(placed, args)), {k: placed(v) for k, v in (kwargs or {}).items()})


def values(arguments: Any) -> Any:
    return fx.node.map_arg(arguments, lambda node: value_of(node))


@pytest.mark.parametrize("kind", list(LIST_OPS))
def test_a_list_op_equals_its_elements(kind: str) -> None:
    target, args = LIST_OPS[kind]
    node = call(target, args)
    whole = target(*args)
    assert foreach.elements(node) == len(A)
    for index in range(len(A)):
        op, one, kwargs = foreach.element_call(node, index)
        (result,) = op(*values(one), **values(kwargs))
        assert torch.equal(result, whole[index])


FUSED_ARGUMENTS: dict[str, Any] = {"weight_decay": 0.1, "momentum": 0.0, "lr": 0.1, "dampening": 0.0}
FLAGS = {"nesterov": False, "maximize": False, "is_first_step": False}
GRADS = {"grad_scale": None, "found_inf": None}


def test_lists_that_an_option_switches_off_are_empty() -> None:
    node = call(aten._fused_sgd_.default, (A, B, []), FUSED_ARGUMENTS | FLAGS | GRADS)
    assert foreach.elements(node) == 3
    op, args, kwargs = foreach.element_call(node, 1)
    assert (op, values(args)) == (aten._fused_sgd_.default, ([A[1]], [B[1]], []))
    assert kwargs == node.kwargs


NOT_ELEMENTWISE: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "a flag for all": (aten._amp_foreach_non_finite_check_and_unscale_.default, (A, torch.zeros(1), SCALAR)),
    "not a list op": (aten.stack.default, (A,)),
    "two dtypes": (aten._foreach_sqrt.default, ([A[0], A[1].double()],)),
    "two lengths": (aten._foreach_add.List, (A, B[:2])),
}


@pytest.mark.parametrize("kind", list(NOT_ELEMENTWISE))
def test_what_is_not_split(kind: str) -> None:
    target, args = NOT_ELEMENTWISE[kind]
    assert foreach.elements(call(target, args)) == 0


def test_layouts_decide_where_the_device_is_not_a_cpu() -> None:
    meta = [[torch.empty(4, 6, device="meta") for _ in range(2)] for _ in range(2)]
    assert foreach.elements(call(aten._foreach_add.List, tuple(meta))) == 2
    meta[1][0] = torch.empty(6, 4, device="meta").t()
    assert foreach.elements(call(aten._foreach_add.List, tuple(meta))) == 0
