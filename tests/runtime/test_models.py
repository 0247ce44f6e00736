"""What models and users do in training keeps its meaning, drop-in and as whole steps; what cannot be is refused."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, final

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

import graphopt
from graphopt import CaptureError, Changed, Pass, Phase, Program, VerifyError
from graphopt.ir.node import Stage
from graphopt.passes import Recompute
from graphopt.rewriting.pass_ import Numerics
from tests.support.covering import covering
from tests.support.running import X, adamw, gradients, network, same, sgd
from tests.support.training import Net, Training, assert_same, assert_same_training, mean_square

aten = torch.ops.aten


class Layers(nn.Module):
    """Two layers with ``then(self, hidden)`` between them."""

    def __init__(self, then: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.then = nn.Linear(8, 8), nn.Linear(8, 8), then
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.register_buffer("seen", torch.zeros(8))
        self.register_buffer("count", torch.tensor(0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.then(self, self.a(x)).tanh())


PASSES: dict[str, list[Pass]] = {"recompute": [Recompute("b")], "plain": []}


def assert_same_both_ways(then: Callable[[Any, torch.Tensor], torch.Tensor], passes: list[Pass]) -> None:
    torch.manual_seed(0)
    assert_same_training(Layers(then), "momentum", mean_square, [(X,), (X.sin(),)], passes, steps=3)


# --- in place --------------------------------------------------------------------------------------------------------


def changed_in_place(model: Layers, x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y.mul_(2)
    y[:, 0] = 0
    y[:, 1:3].sub_(x[:, 1:3])
    y.T[3].fill_(0.5)
    return F.relu(y, inplace=True) * model.scale


def counted(model: Layers, x: torch.Tensor) -> torch.Tensor:
    model.count.add_(1)
    model.seen.mul_(0.5).add_(x.detach().mean(0))
    return x + model.seen * model.count


def averaged(model: Layers, x: torch.Tensor) -> torch.Tensor:
    model.seen = model.seen * 0.5 + x.detach().mean(0)
    model.count = model.count + 1
    return x - model.seen / model.count


@pytest.mark.sweep(but=("counted-plain",))
@covering(
    then={function.__name__: function for function in (changed_in_place, counted, averaged)},
    passes=PASSES,
)
def test_writes_inside_of_forward(then: Callable[[Any, torch.Tensor], torch.Tensor], passes: list[Pass]) -> None:
    assert_same_both_ways(then, passes)


def test_an_input_changed_in_place_is_changed() -> None:
    class Shifts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.add_(1)
            return self.a(x).tanh()

    found = []
    for candidate in (Shifts(), graphopt.optimize(Shifts(), [Recompute("a")])):
        torch.nn.init.constant_(candidate.a.weight, 0.1)
        torch.nn.init.zeros_(candidate.a.bias)
        x = X.clone()
        found.append([*gradients(candidate, x), *gradients(candidate, x), x])
    assert same(*found)
    assert torch.equal(found[1][-1], X + 1 + 1)


def test_tensors_kept_in_attributes_are_refused() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.kept = nn.Linear(8, 8), None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.kept = self.a(x)
            return self.kept.tanh()

    with pytest.raises(CaptureError, match=r"forward keeps tensors in kept.*return them, or register them as buffers"):
        graphopt.capture(Keeps(), (X,))


@pytest.mark.sweep(cases=("spectral_norm",))
@pytest.mark.parametrize(
    ("change", "way_out"),
    [
        (nn.utils.weight_norm, "use torch.nn.utils.parametrizations.weight_norm"),
        (nn.utils.spectral_norm, "use torch.nn.utils.parametrizations.spectral_norm"),
        (lambda layer: prune.l1_unstructured(layer, "weight", 0.5), "permanent by torch.nn.utils.prune.remove"),
    ],
    ids=["weight_norm", "spectral_norm", "prune"],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_weights_that_hooks_of_torch_set_are_refused_with_the_way_out(
    change: Callable[[nn.Module], object], way_out: str
) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    change(model[0])
    with pytest.raises(CaptureError, match=r"forward keeps tensors in 0\.weight.*" + re.escape(way_out)):
        graphopt.capture(model, (X,))


# --- custom functions ------------------------------------------------------------------------------------------------


class Rounded(torch.autograd.Function):
    """A gradient that is not the derivative: straight through, times a number."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return gradient * ctx.factor * (x.abs() < 0.8), None


class Split(torch.autograd.Function):
    """Two results, one of them without a gradient; the state is set up apart."""

    @staticmethod
    def forward(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * scale, x > 0

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
        ctx.save_for_backward(*inputs, output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: None) -> tuple[torch.Tensor, torch.Tensor | None]:
        x, scale, mask = ctx.saved_tensors
        return gradient * scale * mask, (gradient * x).sum(0) * 7 if ctx.needs_input_grad[1] else None


class Outer(torch.autograd.Function):
    """Its forward applies another one, and has a default."""

    @staticmethod
    def forward(x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
        return rounded(x * factor, 1.0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.saved_tensors[0].cos(), None


rounded, split, outer = Rounded.apply, Split.apply, Outer.apply
"""The methods themselves, as many take them once for a file."""

FUNCTIONS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "taken before": lambda model, x: rounded(split(x.sin(), model.scale)[0], 3.0),
    "taken before, one inside of another": lambda model, x: outer(outer(x) + Outer.apply(x * 0.5)),
    "arguments by name": lambda model, x: outer(x, factor=3.0) + Outer.apply(x=x.sin(), factor=0.5),
    "straight through": lambda model, x: Rounded.apply(x, 3.0),
    "two results": lambda model, x: torch.where(*reversed(Split.apply(x.sin(), model.scale)), x),
    "one inside of another's argument": lambda model, x: Rounded.apply(Split.apply(x, model.scale)[0], 0.5),
}


@pytest.mark.sweep
@covering(then=FUNCTIONS, passes=PASSES)
def test_custom_functions_keep_their_backward(then: Callable[..., torch.Tensor], passes: list[Pass]) -> None:
    assert_same_both_ways(then, passes)


# --- frozen parameters -----------------------------------------------------------------------------------------------

FREEZES = ["net.0", None, "net.3", None, "net.0"]


def trained_in_phases(way: str, passes: list[Pass]) -> Training:
    model = network()
    called = graphopt.optimize(model, passes) if way == "drop-in" else model
    optimizer, found = adamw(model.parameters()), Training()
    step = graphopt.optimize_step(model, optimizer, passes, loss=mean_square)
    torch.manual_seed(1)
    for number, frozen in enumerate(FREEZES):
        model.requires_grad_(True)
        if frozen:
            model.get_submodule(frozen).requires_grad_(False)
        if way == "step":
            found.add(f"{number}.loss", step(X))
            continue
        value = mean_square(called, X)
        value.backward()
        found.add(f"{number}.loss", value)
        found.add(f"{number}.gradient.", [parameter.grad for parameter in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    return found.end(model, optimizer)


@pytest.mark.sweep
@pytest.mark.parametrize("passes", [[], [Recompute("net.3")]], ids=["plain", "recompute"])
def test_parameters_may_be_frozen_and_unfrozen(passes: list[Pass]) -> None:
    eager = trained_in_phases("eager", [])
    assert_same(eager, trained_in_phases("drop-in", passes), "drop-in")
    assert_same(eager, trained_in_phases("step", passes), "step", skip=".gradient.")


def test_nothing_to_train_is_an_error() -> None:
    model = network().requires_grad_(False)
    with pytest.raises(CaptureError, match="nothing in Net requires a gradient"):
        graphopt.optimize(model)(X)
    with pytest.raises(CaptureError, match="nothing in Net requires a gradient"):
        graphopt.optimize_step(model, sgd(model.parameters()), loss=mean_square)(X)
    model.net[5].requires_grad_(True)
    assert gradients(graphopt.optimize(model), X)[-1] is not None


# --- what cannot be captured -----------------------------------------------------------------------------------------

WRAPPED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "torch.compile": (lambda: torch.compile(network(), backend="eager"), r"torch\.compile; pass the bare module"),
    "DataParallel": (lambda: nn.DataParallel(network()), r"pass the bare module \(model\.module\)"),
    "a part": (lambda: Net(nn.Linear(8, 8), nn.DataParallel(nn.Linear(8, 8))), r"its submodule 'net\.1' cannot"),
}


@pytest.mark.parametrize(("make", "message"), list(WRAPPED.values()), ids=list(WRAPPED))
def test_wrapped_models_are_refused_with_the_way_out(make: Callable[[], nn.Module], message: str) -> None:
    model = make()
    with pytest.raises(CaptureError, match=message):
        graphopt.optimize(model)
    with pytest.raises(CaptureError, match=message):
        graphopt.optimize_step(model, sgd(model.parameters()))


def test_what_is_no_model_or_is_optimized_already_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"to be an nn\.Module, got the function"):
        graphopt.optimize(lambda x: x)  # type: ignore[type-var]
    with pytest.raises(CaptureError, match="optimized already: give all passes to one call"):
        graphopt.optimize(graphopt.optimize(network()))


class Decides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        if y.sum() > 0:
            return y * 2
        return y


@pytest.mark.sweep(but=("step",))
@pytest.mark.parametrize("way", ["capture", "step"])
def test_control_flow_on_values_names_the_line(way: str) -> None:
    model = Decides()
    lines, start = inspect.getsourcelines(Decides)
    line = start + next(number for number, text in enumerate(lines) if "if y.sum()" in text)
    step = graphopt.optimize_step(model, sgd(model.parameters()))
    run = step if way == "step" else lambda x: graphopt.capture(model, (x,))
    with pytest.raises(CaptureError, match=rf"test_models\.py:{line} in forward: if y\.sum\(\) > 0") as caught:
        run(X)
    assert "torch.where" in str(caught.value)


class Asks(nn.Module):
    """Leaves out a mask where it is told that it is compiled, and cannot do without it."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = None if torch.compiler.is_compiling() else torch.ones(x.shape[-1])
        return self.a(x) * mask[None, :]  # type: ignore[index]


def test_a_model_that_only_eager_mode_can_run_is_captured_as_eager_mode_runs_it() -> None:
    model = Asks()
    assert torch.equal(graphopt.optimize(model)(X), model(X))


class Fails(nn.Module):
    """Raises after it has drawn random numbers, counted, and entered a region."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.norm = network(), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor, good: bool) -> torch.Tensor:
        y = self.norm(self.net(x))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if not good:
                raise ValueError("out of luck")
            return self.net(y).float()


def test_an_exception_in_the_model_of_a_step_leaves_what_eager_mode_leaves() -> None:
    found = []
    for eager in (True, False):
        model = Fails()
        step = graphopt.optimize_step(model, sgd(model.parameters()), [Recompute("norm")], loss=mean_square)
        torch.manual_seed(1)
        with pytest.raises(ValueError, match="out of luck"):
            mean_square(model, X, False) if eager else step(X, False)
        assert torch.is_grad_enabled()
        assert not torch.is_autocast_enabled("cpu")
        assert not torch.compiler.is_compiling()
        found.append([step(X, True), *model.parameters(), *model.buffers(), torch.get_rng_state()])
    assert same(*found)


@pytest.mark.sweep
def test_an_exception_in_a_drop_in_model_leaves_what_eager_mode_leaves() -> None:
    found = []
    for optimized in (False, True):
        model: Any = Fails()
        if optimized:
            model = graphopt.optimize(model, [Recompute("norm")])
        torch.manual_seed(1)
        with pytest.raises(ValueError, match="out of luck"):
            mean_square(model, X, False)
        assert torch.is_grad_enabled()
        assert not torch.is_autocast_enabled("cpu")
        values = [mean_square(model, X, True)]
        values[0].backward()
        values += [parameter.grad for parameter in model.parameters()]
        found.append([*values, *model.parameters(), *model.buffers(), torch.get_rng_state()])
    assert same(*found)


class Cut(nn.Module):
    """Looks at a value, behind which there is no norm."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.norm = network(), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.net(x))
        return self.net(y if y.sum().item() < 1e9 else y * 2)


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's
def test_checkpoints_of_another_part_of_a_model_are_told_and_not_refused(caplog: pytest.LogCaptureFixture) -> None:
    model = graphopt.optimize(Cut(), [Recompute("norm")])
    mean_square(model, X).backward()
    assert "in this part of Cut 'norm' names no tensor" in caplog.text


# --- comparing numbers -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scaled(Pass):
    """Multiplies the gradient of one parameter."""

    name: ClassVar[str] = "scaled"
    stage: ClassVar[Stage] = "joint"
    numerics: ClassVar[Numerics] = "bitwise"

    factor: float = 2.0

    def apply(self, program: Program) -> Changed:
        values = list(program.output_values)
        index = next(
            i for i, spec in enumerate(program.outputs) if spec.role == "gradient" and "net.0.w" in spec.target
        )
        values[index] = program.insert(
            aten.mul.Tensor, (values[index], self.factor), after=values[index], phase=Phase.BACKWARD, origin="scaled"
        )
        program.set_outputs(values, program.outputs)
        return Changed(counts={"scaled": 1})


@final
@dataclass(frozen=True)
class NearlyScaled(Scaled):
    name: ClassVar[str] = "nearly-scaled"
    numerics: ClassVar[Numerics] = "tolerant"


@final
@dataclass(frozen=True)
class OtherwiseScaled(Scaled):
    name: ClassVar[str] = "otherwise-scaled"
    numerics: ClassVar[Numerics] = "changes"


def compared(way: str, *passes: Pass) -> None:
    """Capture with the comparison, and hold that it changes neither the model nor the generator."""
    model = Net(*network(p=0.5).net, nn.BatchNorm1d(8))
    before, state = copy.deepcopy(model), torch.get_rng_state()
    if way == "drop-in":
        graphopt.optimize(model, passes, verify="numerics", example_inputs=(X,))
    else:
        graphopt.optimize_step(
            model, sgd(model.parameters()), passes, loss=mean_square, verify="numerics", example_inputs=(X,)
        )
    assert same([*model.parameters(), *model.buffers()], [*before.parameters(), *before.buffers()])
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.sweep(but=("step",))
@pytest.mark.parametrize("way", ["drop-in", "step"])
def test_comparing_numbers_finds_wrong_passes_and_passes_right_ones(way: str, caplog: pytest.LogCaptureFixture) -> None:
    compared(way, Recompute("net.3"))
    compared(way, NearlyScaled(1 + 1e-6), Recompute("net.3"))
    with pytest.raises(VerifyError, match=r"the gradient net\.0\.weight differs by up to"):
        compared(way, Scaled(1 + 1e-6))
    with pytest.raises(VerifyError, match=r"the gradient net\.0\.weight: "):
        compared(way, NearlyScaled(1.01))
    assert "compares nothing" not in caplog.text
    compared(way, OtherwiseScaled(2.0))
    assert "verify='numerics' compares nothing: otherwise-scaled change numerics by design" in caplog.text
