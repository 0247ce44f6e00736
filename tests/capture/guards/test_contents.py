"""Whatever a model keeps in plain Python is read at each call: a call after a change trains as eager mode does."""

from __future__ import annotations

import array
import collections
import contextvars
import copy
import functools
import gc
import logging
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import graphopt
from graphopt.capture.guards.contents import MOST_BYTES, MOST_WATCHED, Contents
from graphopt.capture.guards.fingerprint import ModelFingerprint, by_value, model_key
from tests.support.properties import examples
from tests.support.training import mean_square

X = torch.linspace(-1, 1, 24).view(4, 6)


class Slotted:
    __slots__ = ("__weakref__", "value")

    def __init__(self, value: Any) -> None:
        self.value = value


class Inherits(Slotted):
    __slots__ = ("other",)


class WithDict(Slotted):
    pass


class Numbers(list[float]):
    scale = 1.0


class Options(dict[str, float]):
    scale = 1.0


class Constant:
    scale = 1.0


in_context: contextvars.ContextVar[float] = contextvars.ContextVar("in_context", default=1.0)


def plain(x: torch.Tensor) -> torch.Tensor:
    return x


class Keeps(nn.Module):
    """Scales by what ``read`` finds in what it keeps."""

    def __init__(self, kept: Any, read: Callable[[Any], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.kept, self.read = nn.Linear(6, 6), kept, read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.read(self.kept)


def set_item(kept: Any, key: Any) -> Callable[[Any], None]:
    return lambda value: kept.__setitem__(key, value)


def set_attribute(kept: Any, name: str) -> Callable[[Any], None]:
    return lambda value: setattr(kept, name, value)


Case = tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]
"""What is kept, how it is read, and how another value is put there."""


def of(kept: Any, read: Callable[[Any], Any], change: Callable[[Any], Callable[[Any], Any]]) -> Callable[[], Case]:
    """A case on a copy of ``kept``."""

    def make() -> Case:
        own = copy.deepcopy(kept)
        return own, read, change(own)

    return make


def deep(levels: int) -> list[Any]:
    kept: list[Any] = [1.0]
    for _ in range(levels):
        kept = [kept]
    return kept


def innermost(kept: Any) -> Any:
    while isinstance(kept[0], list):
        kept = kept[0]
    return kept


def in_weak_reference() -> Case:
    own = Slotted(1.0)
    return weakref.ref(own), lambda kept: kept().value, set_attribute(own, "value")


def in_proxy() -> Case:
    own = {"a": 1.0}
    return types.MappingProxyType(own), lambda kept: kept["a"], set_item(own, "a")


def in_function() -> Case:
    def function() -> None: ...

    set_attribute(function, "scale")(1.0)
    return function, lambda kept: kept.scale, set_attribute(function, "scale")


def in_class() -> Case:
    own = type("Own", (), {"scale": 1.0})
    return own, lambda kept: kept.scale, set_attribute(own, "scale")


def in_class_of_object() -> Case:
    own = type("Own", (), {"scale": 1.0})
    return own(), lambda kept: kept.scale, set_attribute(own, "scale")


def another_class() -> Case:
    kept = Constant()
    return (
        kept,
        lambda kept: kept.scale,
        lambda value: set_attribute(kept, "__class__")(type("Own", (), {"scale": value})),
    )


def in_module_of_python() -> Case:
    own = types.ModuleType("own")
    set_attribute(own, "scale")(1.0)
    return own, lambda kept: kept.scale, set_attribute(own, "scale")


def by_order() -> Case:
    own = collections.OrderedDict(a=1.0, b=3.0)
    return own, lambda kept: next(iter(kept.values())), lambda value: own.move_to_end("a", last=value != 1.0)


def last(kept: Any) -> Any:
    return kept[-1]


CASES: dict[str, Callable[[], Case]] = {
    "deque": of(collections.deque([1.0], 3), last, lambda k: k.append),
    "deque in a list in a dictionary": of(
        {"a": [collections.deque([1.0])]}, lambda k: k["a"][0][-1], lambda k: k["a"][0].append
    ),
    "order of a dictionary": by_order,
    "default dictionary": of(collections.defaultdict(float, a=1.0), lambda k: k["a"], lambda k: set_item(k, "a")),
    "chain of mappings": of(collections.ChainMap({"a": 1.0}), lambda k: k["a"], lambda k: set_item(k, "a")),
    "user's dictionary": of(collections.UserDict(a=1.0), lambda k: k["a"], lambda k: set_item(k, "a")),
    "view of a dictionary": in_proxy,
    "bytes": of(bytearray(b"\1"), last, lambda k: lambda value: set_item(k, 0)(int(value))),
    "array of Python": of(array.array("d", [1.0]), last, lambda k: set_item(k, 0)),
    "array of NumPy": of(np.ones(3), lambda k: float(k[0]), lambda k: set_item(k, 0)),
    "array in a list": of([np.ones(3)], lambda k: float(k[0][0]), lambda k: set_item(k[0], 0)),
    "array as a tensor": of(np.ones(6, np.float32), torch.tensor, lambda k: set_item(k, 0)),
    "array of objects": of(np.array([1.0, None]), lambda k: k[0], lambda k: set_item(k, 0)),
    "slots": of(Slotted(1.0), lambda k: k.value, lambda k: set_attribute(k, "value")),
    "slots of a base": of({"a": Inherits(1.0)}, lambda k: k["a"].value, lambda k: set_attribute(k["a"], "value")),
    "slots beside a dictionary": of(WithDict(1.0), lambda k: k.value, lambda k: set_attribute(k, "value")),
    "list in slots": of(Slotted([1.0]), lambda k: k.value[0], lambda k: set_item(k.value, 0)),
    "tensor in slots": of(Slotted(torch.ones(6)), lambda k: k.value, lambda k: lambda v: setattr(k, "value", v * X[0])),
    "weak reference": in_weak_reference,
    "keyword of a partial": of(
        functools.partial(torch.mul, other=1.0), lambda k: k(X[0]), lambda k: set_item(k.keywords, "other")
    ),
    "attribute of a list": of(Numbers([1.0]), lambda k: k.scale, lambda k: set_attribute(k, "scale")),
    "attribute of a dictionary": of(Options(a=1.0), lambda k: k.scale, lambda k: set_attribute(k, "scale")),
    "attribute of a function": in_function,
    "attribute of a class": in_class,
    "attribute of an object's class": in_class_of_object,
    "class of an object": another_class,
    "variable of the context": lambda: (in_context, lambda k: k.get(), in_context.set),
    "deep": of(deep(12), lambda k: innermost(k)[0], lambda k: set_item(innermost(k), 0)),
    "large list": of([1.0] * 50_000, last, lambda k: set_item(k, -1)),
    "large dictionary": of(dict.fromkeys(range(5_000), 1.0), lambda k: k[9], lambda k: set_item(k, 9)),
    "list in a large dictionary": of(
        {n: [1.0] for n in range(5_000)}, lambda k: k[9][0], lambda k: set_item(k[9], 0)
    ),
    "large set": of(
        set(range(5_000)), lambda k: 1.0 + (-1 in k), lambda k: lambda v: k.add(-1) if v > 1 else k.discard(-1)
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", CASES)
def test_a_change_of_what_is_kept_is_another_key(kind: str) -> None:
    kept, read, change = CASES[kind]()
    model = Keeps(kept, read)
    fingerprint = ModelFingerprint()
    first, values = fingerprint(model), [float(torch.as_tensor(read(kept)).sum())]
    assert fingerprint(model) is first, "nothing has changed"
    change(3.0)
    second = fingerprint(model)
    values.append(float(torch.as_tensor(read(kept)).sum()))
    assert values[0] != values[1]
    assert second != first
    assert fingerprint(model) is second


@pytest.mark.sweep(but=("deque-False", "array of NumPy-False", "slots-False", "class of an object-False"))
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("kind", CASES)
def test_a_change_of_what_is_kept_acts_as_in_eager_mode(kind: str, whole: bool) -> None:
    kept, read, change = CASES[kind]()
    model = Keeps(kept, read)
    step = graphopt.optimize_step(model, torch.optim.SGD(model.parameters(), 0.0), loss=mean_square)
    optimized = graphopt.optimize(model)
    for value in (1.0, 3.0, 3.0):
        change(value)
        found = step(X) if whole else mean_square(optimized, X)
        with torch.no_grad():
            assert torch.equal(found, mean_square(model, X)), value


def test_a_module_of_python_in_an_attribute() -> None:
    kept, read, change = in_module_of_python()

    class Reads(Keeps):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * self.kept.scale

    model = Reads(kept, read)
    optimized = graphopt.optimize(model)
    for value in (1.0, 3.0):
        change(value)
        assert torch.equal(optimized(X), model(X)), value


def test_what_a_weak_reference_refers_to_is_not_kept() -> None:
    own, inner = Slotted(1.0), WithDict(2.0)
    own.value, gone = inner, weakref.ref(inner)
    model = Keeps(weakref.ref(own), plain)
    fingerprint = ModelFingerprint()
    first = fingerprint(model)
    del own, inner
    gc.collect()
    assert gone() is None
    assert fingerprint(model) != first


# --- modules outside of the tree -------------------------------------------------------------------------------------


class Hides(nn.Module):
    """Keeps a module in a list, so that it is none of its own: a teacher, or a frozen part."""

    def __init__(self, hidden: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.hidden = nn.Linear(6, 6), [hidden]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.hidden[0](x)


SQUARE = torch.ones(6, 6)
HIDDEN: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Any]]] = {
    "eval mode": (lambda: nn.Dropout(0.5), lambda m: m.eval()),
    "number": (lambda: nn.LeakyReLU(0.1), lambda m: setattr(m, "negative_slope", 0.5)),
    "parameter in place": (lambda: nn.Linear(6, 6), lambda m: m.weight.data.mul_(2)),
    "another parameter": (lambda: nn.Linear(6, 6), lambda m: setattr(m, "weight", nn.Parameter(SQUARE))),
    "state": (lambda: nn.Linear(6, 6), lambda m: m.load_state_dict({"weight": SQUARE, "bias": X[0]}, assign=True)),
    "module inside": (lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU()), lambda m: m.__setitem__(1, nn.Tanh())),
    "hook": (lambda: nn.Linear(6, 6), lambda m: m.register_forward_hook(lambda module, args, y: y * 2)),
}  # fmt: skip


@pytest.mark.sweep(
    but=(
        "eval mode-True",
        "number-True",
        "parameter in place-True",
        "another parameter-True",
        "state-True",
        "module inside-True",
        "hook-True",
    )
)
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("kind", HIDDEN)
def test_a_module_in_a_list_is_read_like_one_of_the_model(kind: str, whole: bool) -> None:
    make, change = HIDDEN[kind]
    torch.manual_seed(1)
    model = Hides(make().requires_grad_(False))
    step = graphopt.optimize_step(model, torch.optim.SGD(model.parameters(), 0.0), loss=mean_square)
    optimized = graphopt.optimize(model)
    for turn in range(3):
        if turn == 1:
            change(model.hidden[0])
        torch.manual_seed(2)
        found = step(X) if whole else mean_square(optimized, X)
        torch.manual_seed(2)
        with torch.no_grad():
            assert torch.equal(found, mean_square(model, X)), turn


@pytest.mark.parametrize("whole", [False, True])
def test_a_module_whose_class_is_another_one(whole: bool) -> None:
    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    model = Hides(nn.Identity())
    step = graphopt.optimize_step(model, torch.optim.SGD(model.parameters(), 0.0), loss=mean_square)
    optimized = graphopt.optimize(model)
    for cls in (nn.Linear, Doubled):
        model.linear.__class__ = cls
        found = step(X) if whole else mean_square(optimized, X)
        with torch.no_grad():
            assert torch.equal(found, mean_square(model, X))


# --- what is not looked at -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [np.ones(MOST_BYTES), [1.0] * (MOST_WATCHED + 1)], ids=["array", "list"])
def test_what_is_too_large_to_be_looked_at_is_told_once_by_name(kept: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = Keeps(kept, plain)
    fingerprint = ModelFingerprint()
    with caplog.at_level(logging.WARNING, "graphopt"):
        fingerprint(model)
        model.other = 1  # type: ignore[assignment]
        fingerprint(model)
    assert [record.getMessage().count("Keeps.kept") for record in caplog.records] == [1]


# --- any container ---------------------------------------------------------------------------------------------------

LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.floats(allow_nan=False), st.text(max_size=3), st.binary(max_size=3)
)


def _keep(items: list[Any]) -> st.SearchStrategy[Any]:
    pairs = {str(number): item for number, item in enumerate(items)}
    return st.sampled_from([
        items, tuple(items), collections.deque(items),
        pairs, collections.OrderedDict(pairs), collections.UserDict(pairs),
        Slotted(items), types.SimpleNamespace(**{f"a{key}": item for key, item in pairs.items()}),
        functools.partial(plain, *items), np.array([*items, None], dtype=object),
    ])  # fmt: skip


KEPT = st.recursive(LEAVES, lambda inner: st.lists(inner, min_size=1, max_size=3).flatmap(_keep), max_leaves=8)


def leaves_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, Callable[[Any], Any]]]:
    """What can be set in a value, with the function that sets it."""
    found: list[tuple[Any, Callable[[Any], Any]]] = []
    if isinstance(value, (dict, collections.UserDict)):
        keys: Any = list(value)
    elif isinstance(value, (list, collections.deque, np.ndarray)):
        keys = range(len(value))
    else:
        keys = ()
        inner: Any = value if isinstance(value, tuple) else value.args if isinstance(value, functools.partial) else ()
        for item in inner:
            found += leaves_in(item)
        names = ["value"] if isinstance(value, Slotted) else list(getattr(value, "__dict__", {}))
        for name in names:
            found.append((getattr(value, name), set_attribute(value, name)))
            found += leaves_in(getattr(value, name))
    for key in keys:
        found.append((value[key], set_item(value, key)))
        found += leaves_in(value[key])
    return found


@examples(60)
@given(kept=KEPT, data=st.data())
def test_the_quick_check_notices_each_leaf_that_is_set(kept: Any, data: st.DataObject) -> None:
    places = leaves_in(kept)
    before, contents = by_value(kept), Contents()
    contents.add(kept)
    assert contents.unchanged()
    assert by_value(kept) == before
    if not places:
        return
    old, put = data.draw(st.sampled_from(places))
    put(object())
    assert not contents.unchanged()
    assert by_value(kept) != before
    put(old)
    assert by_value(kept) == before


def test_what_refers_to_itself_has_a_key() -> None:
    kept = Slotted(None)
    kept.value = [kept, collections.deque([kept])]
    model = Keeps(kept, plain)
    assert model_key(model) == model_key(model)
