"""What changes between calls, behind both doors: calls have eager mode's bits, or the border's table says so."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import graphopt
from graphopt.capture.border import BORDER
from tests.capture.effects import test_host_reads as numbers
from tests.capture.guards import test_classes_read as classes
from tests.capture.guards import test_contents as contents
from tests.capture.guards import test_fingerprint as fingerprint
from tests.capture.guards import test_variable_guards as variables
from tests.capture.guards import test_ways_to_read as ways
from tests.support.bits import first_difference
from tests.support.reading import Reads

pytestmark = [pytest.mark.sweep, pytest.mark.filterwarnings("ignore")]

Between = Callable[[], Any]
"""What happens between two calls; gives the arguments of the next one where these are others."""

Case = tuple[nn.Module, tuple[Any, ...], list[Between], Callable[[], Any]]
"""A model, the arguments of its first call, what happens then, and what puts everything back."""


def nothing() -> None: ...


def attributes(change: str) -> Case:
    model = fingerprint.Reads()
    return model, (fingerprint.X,), [lambda: (fingerprint.CHANGES[change](model), None)[1]], nothing


def arguments(case: str) -> Case:
    first, then = fingerprint.ARGUMENTS[case]
    args = first()
    return fingerprint.Reads(), args, [lambda: then(args), first], nothing


def values(model: nn.Module, x: torch.Tensor, change: Callable[[float], Any], other: float = 3.0) -> Case:
    """One that reads a value, which is 1 before."""
    change(1.0)
    return model, (x,), [lambda: (change(other), None)[1], lambda: (change(1.0), None)[1]], lambda: change(1.0)


def of_variables(kind: str) -> Case:
    model, change = variables.MODELS[kind]()
    return values(model, variables.X, change)


def of_ways(way: str) -> Case:
    read, change = ways.WAYS[way]
    return values(Reads(read), ways.X, change)


def of_contents(kind: str) -> Case:
    kept, read, change = contents.CASES[kind]()
    return values(contents.Keeps(kept, read), contents.X, change)


def of_numbers(way: str) -> Case:
    tensor = torch.tensor(1.0)
    return values(numbers.Reads(tensor, numbers.READS[way], "attribute"), numbers.X, lambda v: tensor.fill_(v))


def undone(model: nn.Module, change: Callable[[], Callable[[], None]]) -> Case:
    """A change that gives what undoes it."""
    undo: list[Callable[[], None]] = []

    def back() -> None:
        while undo:
            undo.pop()()

    return model, (classes.X,), [lambda: undo.append(change()), back], back


def of_classes(way: str) -> Case:
    read, change = classes.WAYS[way]
    return undone(classes.Acts(read), change)


def of_methods(method: str) -> Case:
    return undone(classes.Acts(lambda: 1.0), classes.METHODS[method])


TABLES: dict[str, tuple[Any, Callable[[str], Case]]] = {
    "attributes": (fingerprint.CHANGES, attributes),
    "arguments": (fingerprint.ARGUMENTS, arguments),
    "variables": (variables.MODELS, of_variables),
    "ways to read": (ways.WAYS, of_ways),
    "contents": (contents.CASES, of_contents),
    "numbers of tensors": (numbers.READS, of_numbers),
    "classes": (classes.WAYS, of_classes),
    "methods": (classes.METHODS, of_methods),
}
CASES = [(table, name) for table, (names, _) in TABLES.items() for name in names]
DOORS: dict[str, Callable[[nn.Module], Any]] = {
    "optimize": lambda model: graphopt.optimize(model),
    "torch.compile": lambda model: torch.compile(model, backend="graphopt"),
}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def trained(call: Callable[..., Any], model: nn.Module, args: tuple[Any, ...]) -> list[Any]:
    model.zero_grad()
    torch.manual_seed(0)
    result = call(*args)
    result.sum().backward()
    return [result.detach(), *(None if p.grad is None else p.grad.clone() for p in model.parameters())]


UNSEEN = {
    ("ways to read", "an attribute that is not there"): "attributes that objects get",
    ("ways to read", "metaclass"): "attributes of metaclasses",
    ("contents", "order of a dictionary"): "the order of dictionaries",
}
"""By case what the border's table says that torch does not look at, and nobody else behind ``torch.compile``."""


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(("table", "name"), CASES, ids=[f"{table}: {name}" for table, name in CASES])
def test_a_call_has_eager_modes_bits_or_the_border_says_that_it_has_not(table: str, name: str, door: str) -> None:
    model, args, changes, back = TABLES[table][1](name)
    call = DOORS[door](model)
    different = []
    with contextlib.ExitStack() as stack:
        stack.callback(back)
        for between in (nothing, *changes):
            args = between() or args
            expected = trained(lambda *given: type(model).__call__(model, *given), model, args)
            different.append(first_difference(trained(call, model, args), expected))
    if door == "torch.compile" and (table, name) in UNSEEN:
        assert any(different), "seen by now: take it out of the table"
        assert any(UNSEEN[table, name] in row.compiled_note for row in BORDER)
    else:
        assert not any(different), different


def test_there_are_enough_cases() -> None:
    assert len(CASES) > 100
    assert set(UNSEEN) <= set(CASES)
