"""Calls whose answer is another one at each call, or in a capture: told once, with their name."""

from __future__ import annotations

import datetime
import logging
import re
import time
import warnings
from collections.abc import Callable
from time import perf_counter

import pytest
import torch
from torch import nn

import graphopt
from graphopt.capture.guards.impure_calls import told_call
from graphopt.capture.guards.loaded_names import compares_types

X = torch.linspace(-1, 1, 24).view(4, 6)


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def compiled() -> float:
    return 2.0 if torch.compiler.is_compiling() else 1.0


class Asks(nn.Module):
    def __init__(self, ask: Callable[[], object]) -> None:
        super().__init__()
        self.linear, self.ask = nn.Linear(6, 6), ask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.ask()
        return self.linear(x)


TOLD: dict[str, tuple[Callable[[], object], str]] = {
    "a module's function": (lambda: time.time(), r"reads the clock \(time\.time\)"),
    "a function": (lambda: perf_counter(), r"reads the clock \(time\.perf_counter\)"),
    "a class's method": (lambda: datetime.datetime.now(), r"reads the clock \(datetime\.datetime\.now\)"),
    "a question": (compiled, r"asks torch\.compiler\.is_compiling"),
    "a type": (lambda: type(X) is torch.Tensor, r"compares type\(\.\.\.\) of something"),
}


@pytest.mark.sweep(cases=("a function", "a class's method"))
@pytest.mark.parametrize("kind", TOLD)
def test_what_code_asks_is_told_once(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    ask, words = TOLD[kind]
    model = graphopt.optimize(Asks(ask))
    with caplog.at_level(logging.WARNING, "graphopt"):
        for batch in (X, X, X[:2], X[:3]):
            model(batch)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1
    assert re.search(words, told[0])


def test_functions_of_torch_script_are_told() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that it is deprecated
        scripted = torch.jit.script(doubled)
    assert "doubled, a function of TorchScript" in str(told_call(scripted, []))


def test_other_functions_are_not_told() -> None:
    assert told_call(time, ["sleep"]) is None
    assert told_call(torch, ["compiler", "is_dynamo_compiling"]) is None
    assert told_call(1.0, ["time"]) is None


COMPARED: dict[str, tuple[Callable[[object], bool], bool]] = {
    "is": (lambda x: type(x) is torch.Tensor, True),
    "is not": (lambda x: type(x) is not nn.Parameter, True),
    "equal": (lambda x: type(x) == torch.Tensor, True),  # noqa: E721
    "one of": (lambda x: type(x) in (int, torch.Tensor), True),
    "inside": (lambda x: any(type(y) is torch.Tensor for y in (x,)), True),
    "isinstance": (lambda x: isinstance(x, torch.Tensor), False),
    "another class": (lambda x: type(x) is int, False),
    "a name": (lambda x: type(x).__name__ == "Tensor", False),
}


@pytest.mark.parametrize("kind", COMPARED)
def test_comparisons_of_types_are_found_in_code(kind: str) -> None:
    compare, found = COMPARED[kind]
    assert compares_types(compare.__code__) == found
