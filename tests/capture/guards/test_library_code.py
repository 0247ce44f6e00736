"""Variables that an installed library's code reads: a call after one has changed trains as eager mode does."""

from __future__ import annotations

import copy
import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import graphopt
from tests.support.training import mean_square

X = torch.linspace(-1, 1, 24).view(4, 6)

ACOUSTICS = """
import functools
import os

import acoustics.sub
from acoustics import sub
from acoustics.sub import OFFSET, Levels, levels, limits
import acoustics.sub as other

GAIN = 1.0
SCALES = {"loud": 1.0, "quiet": [0.5]}
ORDER = (1.0, 2.0)
MODE = "loud"
UNUSED = 1.0
calls = 0
seen = {"last": 0.0}


def gain(x):
    return x * GAIN


def indirectly(x):
    return _inner(x)


def _inner(x):
    return gain(x)


def by_module(x):
    return x * sub.FACTOR


def by_path(x):
    return x * acoustics.sub.FACTOR


def by_alias(x):
    return x * other.FACTOR


def imported_inside(x):
    from acoustics.sub import FACTOR

    return x * FACTOR


def imported_outside(x):
    return x + OFFSET


def of_class(x):
    return x * Levels.level


def of_object(x):
    return x * levels.level


def of_method(x):
    return levels.apply(x)


def of_alias(x):
    chosen = levels
    return x * chosen.level


def of_slots(x):
    return x * limits.upper


def in_table(x):
    return x * SCALES["loud"]


def in_nested_table(x):
    return x * SCALES["quiet"][0]


def in_order(x):
    return x * ORDER[0]


def by_mode(x):
    return x if MODE == "loud" else -x


def by_text(x):
    return x * getattr(sub, "HIDDEN", 1.0)


def by_environment(x):
    return x * float(os.environ.get("ACOUSTICS_GAIN", "1"))


def counting(x):
    global calls
    calls += 1
    seen["last"] = float(calls)
    levels.used += 1
    return x * (1.0 if calls and seen["last"] and levels.used else 2.0)


def decorated(function):
    @functools.wraps(function)
    def inner(x):
        return function(x) * GAIN

    return inner


@functools.lru_cache
def cached(mode):
    return GAIN


def closure(start):
    value = start

    def apply(x):
        return x * value

    def change(new):
        nonlocal value
        value = new

    return apply, change


scaled, change_scale = closure(1.0)
REGISTRY = {"gain": gain}


def by_registry(x):
    return REGISTRY["gain"](x)


def with_default(x, levels=[1.0]):
    return x * levels[0]


class Layer(__import__("torch").nn.Module):
    level = 1.0

    def forward(self, x):
        return self.scaled(x) * GAIN

    def scaled(self, x):
        return x * self.level
"""

SUB = """
FACTOR = 1.0
OFFSET = 1.0


class Limits:
    __slots__ = ("upper",)

    def __init__(self):
        self.upper = 1.0


class Base:
    base = 1.0


class Levels(Base):
    level = 1.0

    def __init__(self):
        self.used = 0
        self.own = 1.0

    def apply(self, x):
        return x * self.own * self.base


levels = Levels()
limits = Limits()
"""


@pytest.fixture
def acoustics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    folder = tmp_path / "site-packages" / "acoustics"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(ACOUSTICS)
    (folder / "sub.py").write_text(SUB)
    monkeypatch.syspath_prepend(str(folder.parent))
    importlib.invalidate_caches()
    yield importlib.import_module("acoustics")
    os.environ.pop("ACOUSTICS_GAIN", None)
    for name in [name for name in sys.modules if name.partition(".")[0] == "acoustics"]:
        del sys.modules[name]


class Net(nn.Module):
    def __init__(self, then: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.then = nn.Linear(6, 6), then

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.then(self.layer(x))


def on(owner: Callable[[Any], Any], name: str) -> Callable[[Any, float], None]:
    return lambda lib, value: setattr(owner(lib), name, value)


Change = Callable[[Any, Any], None]
CHANGES: dict[str, Change] = {
    "gain": on(lambda lib: lib, "GAIN"),
    "indirectly": on(lambda lib: lib, "GAIN"),
    "by_module": on(lambda lib: lib.sub, "FACTOR"),
    "by_path": on(lambda lib: lib.sub, "FACTOR"),
    "by_alias": on(lambda lib: lib.sub, "FACTOR"),
    "imported_inside": on(lambda lib: lib.sub, "FACTOR"),
    "imported_outside": on(lambda lib: lib, "OFFSET"),
    "of_class": on(lambda lib: lib.Levels, "level"),
    "of_object": on(lambda lib: lib.levels, "level"),
    "of_method": on(lambda lib: lib.levels, "own"),
    "of_alias": on(lambda lib: lib.levels, "level"),
    "of_slots": on(lambda lib: lib.limits, "upper"),
    "in_table": lambda lib, value: lib.SCALES.update(loud=value),
    "in_nested_table": lambda lib, value: lib.SCALES["quiet"].__setitem__(0, value),
    "in_order": lambda lib, value: setattr(lib, "ORDER", (value, 2.0)),
    "by_mode": lambda lib, value: setattr(lib, "MODE", "loud" if value == 1.0 else "quiet"),
    "by_text": on(lambda lib: lib.sub, "HIDDEN"),
    "by_environment": lambda lib, value: os.environ.update(ACOUSTICS_GAIN=str(value)),
    "scaled": lambda lib, value: lib.change_scale(value),
    "by_registry": on(lambda lib: lib, "GAIN"),
    "with_default": lambda lib, value: lib.with_default.__defaults__[0].__setitem__(0, value),
}


def check(model: nn.Module, change: Callable[[float], None], whole: bool, programs: int = 2) -> None:
    """Train before and after a change, beside eager mode."""
    step = graphopt.optimize_step(model, torch.optim.SGD(model.parameters(), 0.0), loss=mean_square)
    optimized: Any = graphopt.optimize(copy.deepcopy(model))
    for value in (1.0, 3.0, 3.0, 1.0):
        change(value)
        found = step(X) if whole else mean_square(optimized, X)
        assert torch.equal(found, mean_square(model, X)), value
    assert len((step._programs if whole else optimized._graphopt).runner.captures.all()) == programs


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_what_a_library_reads_makes_a_program_of_its_own(acoustics: Any, name: str, whole: bool) -> None:
    check(Net(getattr(acoustics, name)), lambda value: CHANGES[name](acoustics, value), whole)


BY_THE_USER: dict[str, tuple[Callable[[Any], Callable[[torch.Tensor], torch.Tensor]], Change]] = {
    "a function of a module": (lambda lib: lambda x: lib.indirectly(x), CHANGES["gain"]),
    "a global variable": (lambda lib: lambda x: x * lib.GAIN, CHANGES["gain"]),
    "an item": (lambda lib: lambda x: x * lib.SCALES["loud"], CHANGES["in_table"]),
    "an attribute of a class": (lambda lib: lambda x: x * lib.Levels.level, CHANGES["of_class"]),
    "an attribute of an object": (lambda lib: lambda x: x * lib.levels.level, CHANGES["of_object"]),
    "a method of an object": (lambda lib: lambda x: lib.levels.apply(x), CHANGES["of_method"]),
    "a method of a base": (lambda lib: lib.levels.apply, lambda lib, value: setattr(lib.sub.Base, "base", value)),
    "a decorator": (lambda lib: lib.decorated(lambda x: x + 1), CHANGES["gain"]),
    "a layer": (lambda lib: lib.Layer(), CHANGES["gain"]),
    "a class of layers": (lambda lib: lib.Layer(), on(lambda lib: lib.Layer, "level")),
    "a method put in the place of another": (
        lambda lib: lambda x: lib.of_method(x),
        lambda lib, value: setattr(lib.Levels, "apply", lambda self, x: x * value),
    ),
    "a function put in the place of another": (
        lambda lib: lib.indirectly,
        lambda lib, value: setattr(lib, "_inner", _double if value != 1.0 else _same),
    ),
}


def _double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("name", BY_THE_USER)
def test_what_the_users_code_has_of_a_library(acoustics: Any, name: str, whole: bool) -> None:
    make, change = BY_THE_USER[name]
    anew = name == "a method put in the place of another"
    check(Net(make(acoustics)), lambda value: change(acoustics, value), whole, programs=4 if anew else 2)


@pytest.mark.parametrize("whole", [False, True])
def test_what_no_code_reads_makes_no_program(acoustics: Any, whole: bool) -> None:
    check(Net(acoustics.gain), lambda value: setattr(acoustics, "UNUSED", value), whole, programs=1)


@pytest.mark.parametrize("whole", [False, True])
def test_what_a_library_changes_itself_is_left_out_behind_the_first_capture(
    acoustics: Any, whole: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "graphopt"):
        check(Net(acoustics.counting), lambda value: None, whole)
    assert not any("values of Python change" in text for text in caplog.messages)


def test_a_stored_program_is_not_one_for_another_value(
    acoustics: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHOPT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("GRAPHOPT_CACHE_PROGRAMS", raising=False)
    for value, stored in ((1.0, False), (3.0, False), (3.0, True), (1.0, True)):
        acoustics.GAIN = value
        model = Net(acoustics.gain)
        optimized: Any = graphopt.optimize(model)
        assert torch.equal(mean_square(optimized, X), mean_square(model, X))
        assert optimized._graphopt.runner.captures.latest.rewritten.loaded is stored


def test_code_that_is_too_much_to_be_read_is_told(
    acoustics: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys.modules["graphopt.capture.guards.library_code"], "_MOST", 1)
    with caplog.at_level(logging.WARNING, "graphopt"):
        mean_square(graphopt.optimize(Net(acoustics.indirectly)), X)
    assert any("more functions of installed libraries than are read" in text for text in caplog.messages)
