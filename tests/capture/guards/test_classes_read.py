"""What decides by classes: which one an object has, its bases, what is registered, methods that others replace."""

from __future__ import annotations

import abc
import builtins
import collections
import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import graphopt
from graphopt.capture.guards.loaded_names import computes_names
from tests.support.reading import Reads

X = torch.linspace(-1, 1, 8).view(2, 4)


class One:
    def value(self) -> float:
        return 1.0

    def __call__(self) -> float:
        return 1.0

    def __getattr__(self, name: str) -> float:
        if name.startswith("__"):
            raise AttributeError(name)
        return 1.0


class Three:
    def value(self) -> float:
        return 3.0


class OneToo(One):
    def value(self) -> float:
        return 3.0


class Child(One):
    pass


class Abstract(abc.ABC):  # noqa: B024
    pass


class Settings:
    def __init__(self) -> None:
        self.rate_1 = 1.0
        self.inner = Inner()


class Inner:
    __match_args__ = ("rate",)

    def __init__(self) -> None:
        self.rate = 1.0


one, child, settings, inner = One(), Child(), Settings(), Inner()
names = {"which": "rate_1"}
rate_of = operator.attrgetter("rate_1")
made = collections.defaultdict[str, float](lambda: 1.0)
this = sys.modules[__name__]
share = 1.0


def lookup(owner: object, path: str) -> Any:
    for name in path.split("."):
        owner = getattr(owner, name)
    return owner


def by_default(name: str = "rate_1") -> Any:
    return getattr(settings, name)


def by_pattern() -> Any:
    match inner:
        case Inner(rate):
            return rate


def by_keyword_pattern() -> Any:
    match settings:
        case Settings(rate_1=rate):
            return rate


def missing() -> float:
    value = made["share"]
    made.clear()
    return value


def set_of(owner: object, name: str) -> Callable[[], Callable[[], None]]:
    def change() -> Callable[[], None]:
        before = getattr(owner, name)
        setattr(owner, name, 3.0)
        return lambda: setattr(owner, name, before)

    return change


def put(owner: Any, name: str, value: Any) -> Callable[[], Callable[[], None]]:
    """Set something on an object or a class, and give what undoes it."""

    def change() -> Callable[[], None]:
        own = getattr(owner, "__dict__", {})
        always = name in ("__class__", "__bases__", "default_factory")
        there, before = always or name in own, getattr(owner, name) if always else own.get(name)
        setattr(owner, name, value)
        return lambda: setattr(owner, name, before) if there else delattr(owner, name)

    return change


def with_benchmarks() -> Callable[[], None]:
    """By the context manager, since torch may have been told to refuse assignments."""
    flags = torch.backends.cudnn.flags(enabled=True, benchmark=True)
    flags.__enter__()
    return lambda: flags.__exit__(None, None, None)


WAYS: dict[str, tuple[Callable[[], Any], Callable[[], Callable[[], None]]]] = {
    "class of an object": (lambda: one.value(), put(one, "__class__", OneToo)),
    "method of the class": (lambda: one.value(), put(One, "value", lambda self: 3.0)),
    "method of the object": (lambda: child.value(), put(child, "value", lambda: 3.0)),
    "operator": (lambda: one(), put(One, "__call__", lambda self: 3.0)),
    "__getattr__": (lambda: one.unknown, put(One, "__getattr__", lambda self, name: 3.0)),
    "name from a container": (lambda: getattr(settings, names["which"]), set_of(settings, "rate_1")),
    "name from a default": (by_default, set_of(settings, "rate_1")),
    "name in the call of a helper": (lambda: lookup(settings, "rate_1"), set_of(settings, "rate_1")),
    "path in the call of a helper": (lambda: lookup(settings, "inner.rate"), set_of(settings.inner, "rate")),
    "name that is put together": (lambda: getattr(settings, "r" + "ate_1"[:]), set_of(settings, "rate_1")),
    "name of a module's variable": (lambda: getattr(this, ["share"][0]), set_of(this, "share")),
    "getter made elsewhere": (lambda: rate_of(settings), set_of(settings, "rate_1")),
    "pattern": (by_pattern, set_of(inner, "rate")),
    "pattern by keyword": (by_keyword_pattern, set_of(settings, "rate_1")),
    "factory of a dictionary": (missing, put(made, "default_factory", lambda: 3.0)),
    "function of Python's": (lambda: float(len(bin(1))) - 2.0, put(builtins, "bin", lambda number: "12345")),
    "name that hides one of Python's": (lambda: float(abs(-1.0)), put(this, "abs", lambda number: 3.0)),
    "setting of torch's": (
        lambda: 3.0 if torch.backends.cudnn.benchmark else 1.0,
        with_benchmarks,
    ),
}  # fmt: skip


class Acts(Reads):
    """One whose forward calls a method of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.linear(x)) * self.read()

    def act(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu()


@pytest.fixture
def undo() -> Iterator[list[Callable[[], None]]]:
    changes: list[Callable[[], None]] = []
    yield changes
    for change in reversed(changes):
        change()


def _follows(model: nn.Module, change: Callable[[], Callable[[], None]], undo: list[Callable[[], None]]) -> None:
    """A change acts on an optimized model as in eager mode, and is undone as it is there."""
    optimized: Any = graphopt.optimize(model)
    before = type(model).forward(model, X)
    assert torch.equal(optimized(X), before)
    undo.append(change())
    after = type(model).forward(model, X)
    assert not torch.equal(after, before)
    assert torch.equal(optimized(X), after)
    undo.pop()()
    assert torch.equal(optimized(X), before)


@pytest.mark.parametrize("way", WAYS)
def test_a_model_reads_as_in_eager_mode(way: str, undo: list[Callable[[], None]]) -> None:
    read, change = WAYS[way]
    _follows(Acts(read), change, undo)


def test_bases_of_a_class(undo: list[Callable[[], None]]) -> None:
    class Base:
        pass

    class First(Base):
        factor = 1.0

    class Second(Base):
        factor = 3.0

    class Mixed(First):
        pass

    mixed = Mixed()
    for read in (lambda: mixed.factor, lambda: Mixed.factor, lambda: 1.0 if isinstance(mixed, First) else 3.0):
        _follows(Acts(read), put(Mixed, "__bases__", (Second,)), undo)


def test_classes_that_are_registered() -> None:
    class Own:
        pass

    own = Own()
    model = Acts(lambda: 3.0 if isinstance(own, Abstract) else 1.0)
    optimized = graphopt.optimize(model)
    before = optimized(X)
    Abstract.register(Own)
    assert torch.equal(optimized(X), before * 3.0)


METHODS = {
    "of a tensor": put(torch.Tensor, "relu", lambda self: self * 3.0),
    "of a layer": put(nn.Linear, "forward", lambda self, x: F.linear(x, self.weight)),
    "of the model": put(Acts, "act", lambda self, x: x * 3.0),
    "forward of the model": put(Acts, "forward", lambda self, x: self.linear(x) * 5.0),
}


@pytest.mark.parametrize("method", METHODS)
def test_methods_that_are_replaced(method: str, undo: list[Callable[[], None]]) -> None:
    _follows(Acts(lambda: 1.0), METHODS[method], undo)


def test_what_is_set_on_the_class_of_an_optimized_model_acts_on_its_program(undo: list[Callable[[], None]]) -> None:
    model = Acts(lambda: 1.0)
    optimized: Any = graphopt.optimize(model)
    optimized(X)
    undo.append(put(Acts, "act", lambda self, x: x * 3.0)())
    type(optimized).act = lambda self, x: x * 7.0
    assert torch.equal(optimized(X), model.linear(X) * 7.0)
    type(optimized).forward = lambda self, x: self.linear(x) * 2.0
    undo.append(lambda: setattr(Acts, "forward", FORWARD))
    assert torch.equal(optimized(X), model.linear(X) * 2.0)
    with torch.no_grad():
        assert torch.equal(optimized(X), model(X))
    type(optimized).later = 1.0
    assert Acts.later == 1.0  # type: ignore[attr-defined]
    del type(optimized).later
    assert not hasattr(Acts, "later")


FORWARD = Acts.forward


def test_what_is_made_of_the_class_of_an_optimized_model_is_a_plain_model() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    optimized = graphopt.optimize(model)
    assert torch.equal(optimized(X), model(X))
    tail = optimized[1:]
    assert type(tail) is nn.Sequential
    assert torch.equal(tail(optimized[:1](X)), model(X))
    assert type(type(optimized)(nn.Linear(2, 2))) is nn.Sequential


def test_a_model_of_an_abstract_class() -> None:
    class Model(Acts, abc.ABC):
        pass

    model = Model(lambda: 1.0)
    optimized = graphopt.optimize(model)
    assert torch.equal(optimized(X), model(X))
    assert isinstance(type(optimized), abc.ABCMeta)


def test_which_code_computes_the_names_of_attributes() -> None:
    by_constant: list[Callable[..., Any]] = [
        lambda o: getattr(o, "x"),  # noqa: B009
        lambda o: getattr(o.p[3].q(1, 2), "x", None),
        lambda o: getattr(o, "x") if hasattr(o, "x") else 1,  # noqa: B009
        lambda o: [getattr(each, "x") for each in o],  # noqa: B009
        lambda o: o.getattr("x"),
    ]
    by_others: list[Callable[..., Any]] = [
        lambda o, name: getattr(o, name),
        lambda o, i: getattr(o.p, f"k{i}", None),
        lambda o, i: getattr(o, "k" + str(i)),
        lambda o: o.__dict__,
        lambda o: list(map(getattr, o, ["x"])),
        by_pattern,
    ]
    assert not any(computes_names(function.__code__) for function in by_constant)
    assert all(computes_names(function.__code__) for function in by_others)
