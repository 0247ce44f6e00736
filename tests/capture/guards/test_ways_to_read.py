"""Ways in which Python reads values: a key is another one where eager mode reads another value, and only then."""

from __future__ import annotations

import array
import collections
import contextlib
import ctypes
import functools
import importlib
import multiprocessing
import operator
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import graphopt
from graphopt.capture.guards.code_analysis import found_by
from graphopt.capture.guards.variable_guards import VariablesRead
from tests.support.reading import Reads

X = torch.linspace(-1, 1, 8).view(2, 4)

share = 1.0
NAME = "share"


class Meta(type):
    gain = 1.0

    @property
    def own(cls) -> float:
        return cls._own  # type: ignore[attr-defined, no-any-return]


class OfMeta(metaclass=Meta):
    _own = 1.0


class Descriptor:
    def __init__(self) -> None:
        self.value = 1.0

    def __get__(self, owner: object, cls: type) -> float:
        return self.value


class Options:
    described = Descriptor()
    shared = functools.partial(lambda value: value, 1.0)

    def __init__(self) -> None:
        self.share = 1.0

    @classmethod
    def of_class(cls) -> float:
        return share

    @functools.cached_property
    def cached(self) -> float:
        return share

    def method(self) -> float:
        return share

    def __float__(self) -> float:
        return share


class Lazy:
    """Has its attributes by ``__getattr__``."""

    def __init__(self) -> None:
        self.__dict__["kept"] = {"share": 1.0}

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["kept"][name]


@functools.singledispatch
def dispatched(value: object) -> float:
    return 1.0


@functools.lru_cache(maxsize=1)
def cached() -> float:
    return share


def with_attribute() -> float:
    return with_attribute.share  # type: ignore[attr-defined, no-any-return]


def with_default(value: float = 1.0) -> float:
    return value


def plain() -> float:
    return share


def thrice() -> float:
    return 3.0


def tried() -> float:
    try:
        return options.later  # type: ignore[attr-defined, no-any-return]
    except AttributeError:
        return 1.0


def tried_global() -> float:
    try:
        return share_of_later  # type: ignore[name-defined, no-any-return]
    except NameError:
        return 1.0


options = Options()
lazy = Lazy()
reference = weakref.ref(options)
numbers = np.ones(2)
zero_dimensional = np.array(1.0)
of_python = array.array("d", [1.0])
of_c = ctypes.c_double(1.0)
raw = bytearray(b"\x01")
view = memoryview(raw)
shared = multiprocessing.Value("d", 1.0)
functions: dict[str, Callable[[], float]] = {"a": plain}
classes = [Options]
objects = collections.deque([Options()])


def set_global(value: float, name: str = "share") -> None:
    if name != "share" and value == 1.0:
        globals().pop(name, None)
    else:
        globals()[name] = value


def set_attribute(owner: object, name: str) -> Callable[[float], None]:
    def change(value: float) -> None:
        if name == "later" and value == 1.0:
            with contextlib.suppress(AttributeError):
                delattr(owner, name)
        else:
            setattr(owner, name, value)

    return change


def set_item(owner: Any, key: Any, kind: type = float) -> Callable[[float], None]:
    return lambda value: owner.__setitem__(key, kind(value))


def one_of(value: object) -> float:
    return 1.0


def three_of(value: object) -> float:
    return 3.0


def register(value: float) -> None:
    dispatched.register(torch.Tensor)(three_of if value != 1.0 else one_of)


def set_code(value: float) -> None:
    plain.__code__ = thrice.__code__ if value != 1.0 else CODE


CODE = plain.__code__


def set_defaults(value: float) -> None:
    with_default.__defaults__ = (value,)


WAYS: dict[str, tuple[Callable[[], Any], Callable[[float], None]]] = {
    "globals()": (lambda: globals()["share"], set_global),
    "globals() and a name": (lambda: globals()[NAME], set_global),
    "globals().get": (lambda: globals().get("later_one", 1.0), lambda value: set_global(value, "later_one")),
    "eval": (lambda: eval("share * 1.0"), set_global),
    "sys.modules": (lambda: sys.modules[__name__].share, set_global),
    "import_module": (lambda: importlib.import_module(__name__).share, set_global),
    "a name that is not there": (tried_global, lambda value: set_global(value, "share_of_later")),
    "getattr": (lambda: getattr(options, "share"), set_attribute(options, "share")),  # noqa: B009
    "getattr of a name that is made": (lambda: getattr(options, f"sha{'re'}"), set_attribute(options, "share")),
    "globals() of a name that is made": (lambda: globals()["sha" + NAME[3:]], set_global),
    "getattr with a default": (lambda: getattr(options, "later", 1.0), set_attribute(options, "later")),
    "hasattr": (lambda: 3.0 if hasattr(options, "later") else 1.0, set_attribute(options, "later")),
    "getattr of a class": (lambda: getattr(Options, "later", 1.0), set_attribute(Options, "later")),
    "an attribute that is not there": (tried, set_attribute(options, "later")),
    "attrgetter": (lambda: operator.attrgetter("share")(options), set_attribute(options, "share")),
    "vars": (lambda: vars(options)["share"], set_attribute(options, "share")),
    "__dict__": (lambda: options.__dict__["share"], set_attribute(options, "share")),
    "weak reference": (lambda: reference().share, set_attribute(options, "share")),  # type: ignore[union-attr]
    "metaclass": (lambda: OfMeta.gain, set_attribute(Meta, "gain")),
    "property of a metaclass": (lambda: OfMeta.own, set_attribute(OfMeta, "_own")),
    "descriptor": (lambda: options.described, set_attribute(vars(Options)["described"], "value")),
    "__getattr__": (lambda: lazy.share, set_item(vars(lazy)["kept"], "share")),
    "class method": (lambda: Options.of_class(), set_global),
    "cached property": (lambda: Options().cached, set_global),
    "method of an object that is made": (lambda: Options().method(), set_global),
    "operator of an object that is made": (lambda: float(Options()), set_global),
    "class in a container": (lambda: classes[0]().method(), set_global),
    "object in a container": (lambda: objects[0].method(), set_global),
    "function in a container": (lambda: functions["a"](), set_global),
    "singledispatch": (lambda: dispatched(X), register),
    "lru_cache": (lambda: cached(), lambda value: (cached.cache_clear(), set_global(value))[1]),
    "attribute of a function": (with_attribute, set_attribute(with_attribute, "share")),
    "code of a function": (plain, set_code),
    "defaults of a function": (lambda: with_default(), set_defaults),
    "array of NumPy": (lambda: float(numbers[1]), set_item(numbers, 1)),
    "number of NumPy": (lambda: float(zero_dimensional), set_item(zero_dimensional, ())),
    "array of Python": (lambda: of_python[0], set_item(of_python, 0)),
    "number of C": (lambda: of_c.value, set_attribute(of_c, "value")),
    "bytes": (lambda: float(raw[0]), set_item(raw, 0, int)),
    "view of bytes": (lambda: float(view[0]), set_item(raw, 0, int)),
    "number that processes share": (lambda: shared.value, set_attribute(shared, "value")),
}


@pytest.fixture
def as_before() -> Iterator[Callable[[Callable[[float], None]], None]]:
    changes: list[Callable[[float], None]] = []
    yield lambda change: (changes.append(change), change(1.0))[1]
    for change in changes:
        change(1.0)


@pytest.mark.parametrize("way", WAYS)
def test_a_key_follows_what_is_read(way: str, as_before: Callable[[Callable[[float], None]], None]) -> None:
    read, change = WAYS[way]
    as_before(change)
    variables, model = VariablesRead(), nn.Linear(2, 2)

    def loss(model: nn.Module, x: torch.Tensor) -> Any:
        return model(x).sum() * read()

    keys = []
    for value in (1.0, 1.0, 3.0, 3.0, 1.0):
        change(value)
        assert read() == value
        keys.append(variables(model, loss, 1))
    first, again, other, other_again, back = keys
    assert first == again
    assert other == other_again
    assert first != other
    assert first == back


@pytest.mark.sweep(
    but=(
        "globals()",
        "eval",
        "getattr",
        "getattr of a name that is made",
        "weak reference",
        "descriptor",
        "__getattr__",
        "function in a container",
        "lru_cache",
        "code of a function",
        "array of NumPy",
        "number that processes share",
    )
)
@pytest.mark.parametrize("way", WAYS)
def test_a_model_reads_as_in_eager_mode(way: str, as_before: Callable[[Callable[[float], None]], None]) -> None:
    read, change = WAYS[way]
    as_before(change)
    model = Reads(read)
    optimized = graphopt.optimize(model)
    for value in (1.0, 3.0, 1.0):
        change(value)
        assert torch.equal(optimized(X), Reads.forward(model, X)), value


def test_the_class_of_a_model_may_get_an_attribute() -> None:
    class Later(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * getattr(type(self), "later", 1.0)

    model = Later()
    optimized = graphopt.optimize(model)
    for value in (None, 2.0, 5.0):
        if value is not None:
            Later.later = value  # type: ignore[attr-defined]
        assert torch.equal(optimized(X), Later.forward(model, X)), value


def test_texts_that_are_not_in_the_code_are_told() -> None:
    made = [""]
    found = found_by(Reads(lambda: globals()[made[0]]), None)
    assert any("finds variables by a text (globals)" in sentence for sentence in found.told)


def test_what_a_weak_reference_refers_to_is_not_kept() -> None:
    owner: Any = Options()
    held = weakref.ref(owner)
    variables, model = VariablesRead(), Reads(lambda: held().share)
    before = variables(model, None, 1)
    del owner
    assert held() is None
    assert variables(Reads(lambda: 1.0), None, 1) != before


def test_other_variables_do_not_count() -> None:
    other = types.SimpleNamespace(share=1.0, other=1.0)
    variables, model = VariablesRead(), Reads(lambda: getattr(options, "share") * other.share)  # noqa: B009
    before = variables(model, None, 1)
    options.unrelated = 5.0  # type: ignore[attr-defined]
    globals()["unrelated"] = 5.0
    try:
        assert variables(model, None, 1) == before
    finally:
        del options.unrelated  # type: ignore[attr-defined]
        del globals()["unrelated"]


def test_texts_that_are_no_names_do_not_count() -> None:
    def scaled(y: torch.Tensor) -> torch.Tensor:
        """Say what unrelated does: its words are no names, and a variable of its own is none of the module's."""
        factor = getattr(options, "share", 1.0)  # noqa: F841
        return y * eval("factor * 1.0")

    model = Reads(lambda: 1.0)
    variables = VariablesRead()
    before = variables(model, scaled, 1)
    for name in ("unrelated", "factor"):
        globals()[name] = 5.0
    options.unrelated = 5.0  # type: ignore[attr-defined]
    try:
        assert variables(model, scaled, 1) == before
    finally:
        del options.unrelated  # type: ignore[attr-defined]
        for name in ("unrelated", "factor"):
            del globals()[name]
