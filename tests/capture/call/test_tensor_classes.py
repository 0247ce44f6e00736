"""Arguments that are tensors of a class of their own: trained as in eager mode, or refused by name."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import graphopt
from graphopt.errors import GraphBreakError

X = torch.linspace(-1, 1, 24).view(4, 6)


class Image(torch.Tensor):
    """Adds nothing to how torch computes."""

    @property
    def wide(self) -> int:
        return self.shape[-1]


class Thumbnail(Image):
    pass


class Unwrapped(torch.Tensor):
    """Gives plain tensors, as the classes of torchvision do."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


class Doubled(torch.Tensor):
    """Computes otherwise."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **(kwargs or {}))
        return result * 2 if function is nn.functional.linear else result


class Added(torch.Tensor):
    def __add__(self, other: Any) -> Any:
        return torch.add(self, other, alpha=2)


Inside = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Net(nn.Module):
    def __init__(self, inside: Inside) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.inside = nn.Linear(6, 6), inside

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None) -> Any:
        y = self.inside(self.layer, x)
        return y if other is None else (y, self.layer(other))


def plain(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.relu(layer(x)) + 1


def asks(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(x) + (1 if isinstance(x, Image) else 0)


def asks_later(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = layer(x)
    return y * (2 if isinstance(y, Image) else 1)


def asks_for_members(layer: nn.Module, x: Any) -> torch.Tensor:
    return layer(x) * (x.wide if hasattr(x, "wide") else 1)


def mean(result: torch.Tensor) -> torch.Tensor:
    return result.square().mean()


def data(value: Any) -> torch.Tensor:
    return value.a if isinstance(value, TwoTensor) else value.as_subclass(torch.Tensor)


def train(model: Any, given: Any) -> tuple[type, torch.Tensor, list[torch.Tensor]]:
    for parameter in model.parameters():
        parameter.grad = None
    result = model(given)
    mean(result).backward()
    return type(result), data(result.detach()), [data(each.grad) for each in model.parameters()]


def of(cls: type[torch.Tensor]) -> torch.Tensor:
    return X.clone().as_subclass(cls)


@pytest.mark.parametrize("inside", [plain, asks, asks_later, asks_for_members])
@pytest.mark.parametrize("cls", [Image, Thumbnail, Unwrapped, Doubled, TwoTensor])
def test_drop_in_models_train_as_eager_mode_does(cls: type[torch.Tensor], inside: Inside) -> None:
    given = TwoTensor(X.clone(), X.clone()) if cls is TwoTensor else of(cls)
    model = Net(inside)
    eager, optimized = copy.deepcopy(model), graphopt.optimize(model)
    for _ in range(2):
        wanted, found = train(eager, given), train(optimized, given)
        assert found[0] is wanted[0]
        assert torch.equal(found[1], wanted[1])
        assert all(map(torch.equal, found[2], wanted[2]))


def test_a_class_that_adds_nothing_is_captured_whole_and_has_a_program_of_its_own() -> None:
    optimized: Any = graphopt.optimize(Net(plain))
    for given in (of(Image), X, of(Image), of(Thumbnail), X):
        assert type(optimized(given)) is type(given)
    assert len(optimized._graphopt.runner.captures.all()) == 3


def test_each_result_has_the_class_of_what_it_is_made_of() -> None:
    optimized = graphopt.optimize(Net(plain))
    first, second = optimized(of(Image), X)
    assert (type(first), type(second)) == (Image, torch.Tensor)


def test_gradients_and_attributes_of_an_argument_are_its_own() -> None:
    def scaled(layer: nn.Module, x: Any) -> torch.Tensor:
        result: torch.Tensor = layer(x) * x.factor
        return result

    model = Net(scaled)
    eager, optimized = copy.deepcopy(model), graphopt.optimize(model)
    found = []
    for each in (eager, optimized):
        for factor in (1.0, 3.0):
            given: Any = of(Image).requires_grad_()
            given.factor = factor
            mean(each(given)).backward()
            found.append(given.grad)
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])
    assert not torch.equal(found[0], found[1])


def test_the_same_tensor_twice_is_one() -> None:
    model = Net(plain)
    eager, optimized = copy.deepcopy(model), graphopt.optimize(model)
    given = of(Image)
    for found, wanted in zip(optimized(given, given), eager(given, given), strict=True):
        assert torch.equal(data(found), data(wanted))


def test_a_whole_step_computes_with_the_data() -> None:
    model = Net(plain)
    other = copy.deepcopy(model)
    steps = [
        graphopt.optimize_step(each, torch.optim.SGD(each.parameters(), 0.1), loss=lambda m, x: mean(m(x)))
        for each in (model, other)
    ]
    for _ in range(3):
        found, wanted = steps[0](of(Image)), steps[1](X)
        assert type(found) is Image
        assert torch.equal(data(found), wanted)
    assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))


@pytest.mark.parametrize(
    ("given", "inside", "words"),
    [
        (of(Image), asks, "tensor of the class Image, and its code asks for Image"),
        (of(Thumbnail), asks, "tensor of the class Thumbnail, and its code asks for Image"),
        (of(Image), asks_for_members, r"its code reads \.wide"),
        (of(Unwrapped), plain, "class Unwrapped .* decides itself what an op does"),
        (of(Doubled), plain, "class Doubled .* decides itself what an op does"),
        (of(Added), plain, "class Added .* decides itself what an op does"),
        (TwoTensor(X, X), plain, "class TwoTensor .* decides itself what an op does"),
        (torch.nested.nested_tensor_from_jagged(X, torch.tensor([0, 2, 4])), plain, r"nested tensor.*\n.*\.values\(\)"),
    ],
)
def test_a_whole_step_says_what_it_cannot_do(given: torch.Tensor, inside: Inside, words: str) -> None:
    model = Net(inside)
    step = graphopt.optimize_step(model, torch.optim.SGD(model.parameters(), 0.1), loss=lambda m, x: mean(m(x)))
    with pytest.raises(GraphBreakError, match=words):
        step(given)


def test_a_parameter_of_such_a_class_is_named() -> None:
    model = Net(plain)
    weight = torch.linspace(-1, 1, 36).view(6, 6)
    model.layer.weight = nn.Parameter(TwoTensor(weight, weight.clone()))
    with pytest.raises(GraphBreakError, match=r"its layer\.weight is a tensor of the class TwoTensor"):
        graphopt.capture(model, (X,), loss=lambda m, x: mean(m(x)))


def test_a_stored_program_of_another_class_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHOPT_CACHE", str(tmp_path))
    monkeypatch.delenv("GRAPHOPT_CACHE_PROGRAMS", raising=False)
    for given, stored in ((X, False), (of(Image), False), (of(Image), True)):
        optimized: Any = graphopt.optimize(Net(plain))
        assert type(optimized(given)) is type(given)
        assert optimized._graphopt.runner.captures.latest.rewritten.loaded is stored


def test_why_a_model_runs_in_parts_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "graphopt"):
        graphopt.optimize(Net(asks))(of(Image))
    assert any("its code asks for Image" in text for text in caplog.messages)
