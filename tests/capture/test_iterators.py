"""Iterators that a model takes from: each call takes an item, and a program would have that of its capture."""

import io
import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import graphopt
from graphopt.errors import GraphBreakError

X = torch.linspace(-1, 1, 8).reshape(2, 4)


def numbers() -> Iterator[float]:
    yield from map(float, range(1, 20))


class Counter:
    """An iterator of the user's own."""

    def __init__(self) -> None:
        self.taken = 0

    def __iter__(self) -> "Counter":
        return self

    def __next__(self) -> float:
        self.taken += 1
        return float(self.taken)

    def so_far(self) -> int:
        return self.taken


ITERATORS: dict[str, Callable[[], Iterator[Any]]] = {
    "chain": lambda: itertools.chain([1.0, 2.0], [3.0, 4.0, 5.0, 6.0]),
    "count": lambda: itertools.count(1.0),
    "cycle": lambda: itertools.cycle([1.0, 3.0]),
    "generator": numbers,
    "list": lambda: iter([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]),
    "map": lambda: map(float, range(1, 9)),
    "user's": Counter,
}
SHARED = itertools.count(1.0)


class Takes(nn.Module):
    """Computes with the next item of what it was given."""

    def __init__(self, kept: Any, take: Callable[[Any], float] = next) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.kept, self.take = nn.Linear(4, 4), kept, take

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        return y * self.take(self.kept)


class TakesInPlace(Takes):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        return y * next(self.kept)


class TakesFromAList(Takes):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        return y * next(self.kept[0])


class TakesFromAGlobal(Takes):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        return y * next(SHARED)


PLACES: dict[str, tuple[type[Takes], Callable[[Iterator[Any]], Any]]] = {
    "attribute": (TakesInPlace, lambda iterator: iterator),
    "given on": (Takes, lambda iterator: iterator),
    "list": (TakesFromAList, lambda iterator: [iterator]),
}


def losses(model: nn.Module) -> list[float]:
    found = []
    for _ in range(4):
        loss = model(X).square().mean()
        loss.backward()
        found.append(loss.item())
    return found


@pytest.mark.sweep(
    but=(
        "chain-attribute",
        "count-attribute",
        "generator-attribute",
        "generator-list",
        "list-attribute",
        "list-list",
        "user's-attribute",
        "user's-list",
    )
)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ITERATORS)
def test_a_drop_in_model_takes_an_item_at_each_call(kind: str, place: str) -> None:
    of, keep = PLACES[place]
    theirs, ours = ITERATORS[kind](), ITERATORS[kind]()
    assert losses(graphopt.optimize(of(keep(ours)))) == losses(of(keep(theirs)))
    assert next(ours) == next(theirs)


@pytest.mark.sweep(
    but=(
        "generator-attribute",
        "generator-list",
        "list-attribute",
        "list-list",
        "map-attribute",
        "map-list",
        "user's-attribute",
        "user's-list",
    )
)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ITERATORS)
def test_a_whole_step_refuses_it_before_an_item_is_gone(kind: str, place: str) -> None:
    of, keep = PLACES[place]
    iterator = ITERATORS[kind]()
    model = of(keep(iterator))
    step = graphopt.optimize_step(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss=lambda model, x: model(x).square().mean()
    )
    with pytest.raises(GraphBreakError, match=r"kept is an iterator, which each call takes from"):
        step(X)
    assert next(iterator) == 1.0


def test_an_iterator_in_a_global_variable_and_one_that_a_loss_takes_from() -> None:
    with pytest.raises(GraphBreakError, match="SHARED is an iterator"):
        graphopt.capture(TakesFromAGlobal(None), X)
    weights = numbers()
    model = nn.Linear(4, 4)
    step = graphopt.optimize_step(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loss=lambda model, x: model(x).square().mean() * next(weights),
    )
    with pytest.raises(GraphBreakError, match="weights is an iterator"):
        step(X)
    assert next(SHARED) == 1.0
    assert next(weights) == 1.0


class TakesFromItsArgument(Takes):
    def forward(self, x: torch.Tensor, items: Iterator[float] | None = None) -> torch.Tensor:
        assert items is not None
        y: torch.Tensor = self.linear(x)
        return y * next(items)


@pytest.mark.sweep(but=("generator", "list", "user's"))
@pytest.mark.parametrize("kind", ITERATORS)
def test_an_iterator_that_is_an_argument(kind: str) -> None:
    def outputs(model: nn.Module) -> list[float]:
        items = ITERATORS[kind]()
        return [*(model(X, items).sum().item() for _ in range(3)), next(items)]

    assert outputs(graphopt.optimize(TakesFromItsArgument(None))) == outputs(TakesFromItsArgument(None))
    items = ITERATORS[kind]()
    with pytest.raises(GraphBreakError, match="argument items is an iterator"):
        graphopt.capture(TakesFromItsArgument(None), (X, items))
    assert next(items) == 1.0


class Looks(nn.Module):
    """Has iterators, and takes from none."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.batches, self.counter, self.log = nn.Linear(4, 4), numbers(), Counter(), io.StringIO()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.log.write("called\n")
        y: torch.Tensor = self.linear(x)
        return y * (1 + self.counter.so_far())


def test_iterators_that_forward_does_not_take_from_are_none_of_its_business(caplog: pytest.LogCaptureFixture) -> None:
    model = Looks()
    expected = model(X)
    with caplog.at_level(logging.WARNING, logger="graphopt"):
        assert torch.equal(graphopt.optimize(model)(X), expected)
    assert "iterator" not in caplog.text
    assert next(model.batches) == 1.0
