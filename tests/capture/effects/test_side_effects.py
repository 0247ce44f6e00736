"""What a program would lose is refused by name while it is captured; what acts around a program acts as ever."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import graphopt
from graphopt import CaptureError
from tests.support.running import sgd

X = torch.linspace(-1, 1, 16).reshape(4, 4)


class Branches(nn.Module):
    """Runs one of two bodies, by a value."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (self.a(x),))


def test_bodies_that_a_value_chooses_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"Branches calls cond, which runs one body or another(.|\n)*torch\.where"):
        graphopt.capture(Branches(), (X,))


class Calls(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.linear(x))


def hooked(y: torch.Tensor) -> torch.Tensor:
    y.register_hook(lambda gradient: gradient * 3)
    return y


def seeded(y: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(5)
    return y * torch.rand_like(y)


@pytest.mark.parametrize(
    ("function", "message"), [(hooked, "a hook on a tensor"), (seeded, "torch.manual_seed inside")]
)
@pytest.mark.parametrize("whole_step", [False, True])
def test_what_a_program_would_lose_is_refused_with_its_line(
    function: Callable[[torch.Tensor], torch.Tensor], message: str, whole_step: bool
) -> None:
    model = Calls(function)
    original = torch.Tensor.register_hook, torch.manual_seed
    run: Callable[[torch.Tensor], torch.Tensor] = (
        graphopt.optimize_step(model, sgd(model.parameters()), loss=lambda model, x: model(x).sum())
        if whole_step
        else graphopt.optimize(model)
    )
    with pytest.raises(CaptureError, match=rf"{message}[\s\S]*test_side_effects\.py:\d+ in {function.__name__}"):
        run(X)
    assert (torch.Tensor.register_hook, torch.manual_seed) == original


seed_taken_before = torch.manual_seed


@pytest.mark.sweep(cases=("True",))
@pytest.mark.parametrize("same", [True, False])
def test_a_seed_by_a_function_that_was_taken_before_is_refused(same: bool) -> None:
    """Also where the generator has had that very seed; its state stays what it was."""

    def seeds(y: torch.Tensor) -> torch.Tensor:
        seed_taken_before(5)
        return y * torch.rand_like(y)

    model = graphopt.optimize(Calls(seeds))
    torch.manual_seed(5 if same else 6)
    state = torch.get_rng_state()
    with pytest.raises(CaptureError, match="forward seeds the random generator, or sets its state"):
        model(X)
    assert torch.equal(torch.get_rng_state(), state)


def with_pythons_numbers(y: torch.Tensor) -> torch.Tensor:
    return y.sin() if random.random() < 0.5 else y.cos()


def with_numpys_numbers(y: torch.Tensor) -> torch.Tensor:
    return y * float(np.random.rand())


def in_inference_mode(y: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        z = y.sin()
    return y * z.clone()


OUTSIDE = {
    with_pythons_numbers: "forward draws from Python's random",
    with_numpys_numbers: r"forward draws from numpy\.random",
    in_inference_mode: r"forward uses torch\.inference_mode[\s\S]*test_side_effects\.py:\d+ in in_inference_mode",
}


@pytest.mark.sweep
@pytest.mark.parametrize("function", OUTSIDE)
def test_what_a_program_cannot_do_again_is_refused_and_a_drop_in_model_does_it(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    def trained(around: Callable[[nn.Module], nn.Module]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        plain = Calls(function)
        model = around(plain)
        random.seed(1)
        np.random.seed(1)
        losses = []
        for _ in range(5):
            loss = model(X).square().mean()
            loss.backward()
            losses.append(loss.detach())
        return [*losses, *(p.grad for p in plain.parameters() if p.grad is not None), torch.tensor(random.random())]

    expected, found = trained(lambda model: model), trained(graphopt.optimize)
    assert len(found) == len(expected)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    model = Calls(function)
    step = graphopt.optimize_step(model, sgd(model.parameters()), loss=lambda model, x: model(x).sum())
    states = random.getstate(), np.random.get_state()[1].tobytes()  # type: ignore[index]
    with pytest.raises(CaptureError, match=OUTSIDE[function]):
        step(X)
    assert states == (random.getstate(), np.random.get_state()[1].tobytes())  # type: ignore[index]


def test_a_part_in_inference_mode_runs_as_it_is_behind_torch_compile() -> None:
    plain, model = Calls(in_inference_mode), Calls(in_inference_mode)
    model.load_state_dict(plain.state_dict())
    for module in (plain, torch.compile(model, backend="graphopt")):
        module(X).sum().backward()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


def test_a_generator_of_the_models_own_is_refused_with_the_way_out() -> None:
    generator = torch.Generator().manual_seed(0)
    model = Calls(lambda y: y * torch.rand(y.shape, generator=generator))
    with pytest.raises(CaptureError, match=r"draws from a torch\.Generator of its own[\s\S]*RandomStreams"):
        graphopt.optimize(model)(X)


HOOKS: dict[str, Callable[[nn.Module], object]] = {
    "full backward": lambda m: m.linear.register_full_backward_hook(lambda module, gi, go: (gi[0] * 3,)),
    "full backward pre": lambda m: m.linear.register_full_backward_pre_hook(lambda module, go: (go[0] * 3,)),
}


@pytest.mark.sweep(but=("full backward pre-False",))
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("kind", HOOKS)
def test_backward_hooks_of_submodules_are_refused_whenever_they_come(kind: str, later: bool) -> None:
    model = Calls(torch.tanh)
    optimized = graphopt.optimize(model)
    if later:
        optimized(X)
    handle = HOOKS[kind](model)
    with pytest.raises(CaptureError, match="the submodule 'linear' has a backward hook"):
        optimized(X)
    handle.remove()  # type: ignore[attr-defined]
    optimized(X).sum().backward()


def test_a_backward_hook_of_the_model_itself_acts() -> None:
    gradients = []
    for around in (lambda model: model, graphopt.optimize):
        torch.manual_seed(0)
        model = around(Calls(torch.tanh))
        model.register_full_backward_hook(lambda module, gi, go: tuple(g if g is None else g * 3 for g in gi))
        x = X.clone().requires_grad_()
        model(x).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


@pytest.fixture
def for_all_modules() -> Iterator[None]:
    handle = nn.modules.module.register_module_full_backward_hook(lambda module, gi, go: None)
    yield
    handle.remove()


@pytest.mark.usefixtures("for_all_modules")
def test_a_backward_hook_for_all_modules_is_refused() -> None:
    with pytest.raises(CaptureError, match="a backward hook for all modules"):
        graphopt.optimize(Calls(torch.tanh))(X)


@pytest.mark.sweep(cases=("True",))
@pytest.mark.parametrize("captured", [False, True])
def test_an_optimized_model_inside_of_a_checkpoint(captured: bool) -> None:
    model = Calls(torch.tanh)
    gradients = []
    for current in (copy.deepcopy(model), graphopt.optimize(copy.deepcopy(model))):
        if captured:
            current(X).sum().backward()
            current.zero_grad()
        checkpoint(current, X, use_reentrant=False).sum().backward()
        gradients.append(current.linear.weight.grad)
    assert torch.equal(*gradients)


class Late(nn.Module):
    """Makes a part of itself at its first call."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.last = nn.Identity()
        self.make = make

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.last, nn.Identity):
            self.last = self.make()
        result: torch.Tensor = self.last(self.linear(x))
        return result


def draws_and_drops() -> nn.Module:
    torch.rand(3)
    return nn.Dropout(0.5)


@pytest.mark.sweep
def test_a_module_made_at_the_first_call_is_not_made_again() -> None:
    torch.manual_seed(0)
    model = Late(draws_and_drops)
    optimized, x = graphopt.optimize(copy.deepcopy(model)), torch.randn(3, 4)
    for seed in range(3):
        found = []
        for current in (model, optimized):
            torch.manual_seed(seed)
            found.append((current(x), torch.get_rng_state()))
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_parameters_made_at_the_first_call_are_refused_and_nothing_is_left() -> None:
    model, x = Late(lambda: nn.Linear(4, 4)), torch.randn(3, 4)
    optimized = graphopt.optimize(model)
    message = r"(?s)makes 'last\.weight' while it is traced.*call the model once without"
    with pytest.raises(CaptureError, match=message):
        optimized(x)
    assert isinstance(optimized.last, nn.Identity)
    model(x)
    assert torch.equal(graphopt.optimize(model)(x), model(x))


def test_the_first_call_from_several_threads() -> None:
    model = Calls(torch.tanh)
    optimized, wanted = graphopt.optimize(model), model(X)
    found: list[torch.Tensor] = []
    threads = [threading.Thread(target=lambda: found.append(optimized(X))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert all(torch.equal(y, wanted) for y in found)


class Warms(nn.Module):
    """Does something else at its first call, and notes it in a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.a.phase = "first"  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.a.phase == "first"
        self.a.phase = "second"  # type: ignore[assignment]
        y = self.b(self.a(x))
        return y.sin() if first else y


@pytest.mark.sweep(but=("drop-in-True",))
@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("way", ["drop-in", "step"])
def test_what_the_first_call_sets_is_found_by_the_second(inner: bool, way: str) -> None:
    torch.manual_seed(0)
    model = Warms() if inner else WarmsItself()
    eager = copy.deepcopy(model)
    if way == "drop-in":
        optimized = graphopt.optimize(model)
        found = [optimized(X) for _ in range(4)]
        assert [torch.equal(one, eager(X)) for one in found] == [True] * 4
        assert len(optimized._graphopt.runner.captures.all()) == 2  # type: ignore[union-attr]
    else:
        step = graphopt.optimize_step(model, sgd(model.parameters()), loss=lambda m, x: m(x).square().mean())
        optimizer = sgd(eager.parameters())
        for _ in range(4):
            optimizer.zero_grad()
            loss = eager(X).square().mean()
            loss.backward()
            optimizer.step()
            assert torch.equal(step(X), loss)


class WarmsItself(nn.Module):
    """The same with the note on the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.warm = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.b(self.a(x))
        if not self.warm:
            self.warm = True
            return y.sin()
        return y


class NotesSizes(nn.Module):
    """Notes the size of what it is given, as many vision models do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.rows = nn.Linear(4, 4), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows = x.shape[0]
        return self.a(x).reshape(self.rows, 2, 2)


def test_sizes_that_forward_notes_cost_one_capture_each() -> None:
    model = NotesSizes()
    optimized = graphopt.optimize(copy.deepcopy(model))
    for rows in (2, 3, 4, 2, 3, 4, 3, 2):
        x = torch.ones(rows, 4)
        assert torch.equal(optimized(x), model(x))
    assert len(optimized._graphopt.runner.captures.all()) <= 4  # type: ignore[union-attr]


def test_capture_changes_nothing() -> None:
    model = WarmsItself()
    graphopt.capture(model, (X,))
    assert model.warm is False


class WritesInto(nn.Module):
    """Writes into tensors that are neither parameters nor buffers."""

    def __init__(self, write: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.a, self.write = nn.Linear(4, 4), write
        self.kept = [torch.ones(4), torch.ones(3, 4)]
        self.mean = self.kept[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.a(x)
        self.write(self, y)
        return y * self.mean + self.kept[1].sum(0)


WRITES: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "an attribute": lambda model, y: model.mean.add_(1),
    "of results": lambda model, y: model.mean.lerp_(y.detach().mean(0), 0.1),
    "a row": lambda model, y: model.kept[1][1].mul_(2),
    "an item": lambda model, y: model.kept[1].__setitem__((0, 1), 5.0),
    "out=": lambda model, y: torch.mul(model.kept[0], 2, out=model.kept[0]),
    "random": lambda model, y: model.mean.uniform_(),
    "twice": lambda model, y: (model.mean.add_(1), model.kept[1].sub_(model.mean)),
}


@pytest.mark.sweep(but=("an attribute-False", "twice-False"))
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("kind", WRITES)
def test_a_capture_writes_into_no_tensor_of_the_model(kind: str, whole: bool) -> None:
    plain, x = WritesInto(WRITES[kind]), torch.ones(2, 4)
    model = copy.deepcopy(plain)

    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).sum()
        return loss

    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    optimized = graphopt.optimize(model)
    step = graphopt.optimize_step(model, optimizer, loss=loss_of)
    for number in range(3):
        torch.manual_seed(number)
        expected = loss_of(plain, x)
        torch.manual_seed(number)
        assert torch.equal(step(x) if whole else loss_of(optimized, x), expected), number
        assert all(map(torch.equal, model.kept, plain.kept)), number
