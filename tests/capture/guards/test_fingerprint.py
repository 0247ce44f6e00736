"""What changes between calls is seen: the call after a change trains as eager mode does, like the one before."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import graphopt
from graphopt.capture.guards.fingerprint import ModelFingerprint, by_value
from graphopt.errors import CaptureError
from tests.support.properties import examples
from tests.support.training import mean_square

X = torch.linspace(-1, 1, 16).reshape(4, 4)


class Reads(nn.Module):
    """Reads whatever a case changes, and does something else for each of its values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop, self.act = nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh()
        self.scale, self.names, self.options = 2.0, ["a"], {"shift": 1}
        self.config = SimpleNamespace(power=1, nested=SimpleNamespace(sizes=[1, 2]))
        self.register_buffer("bias", None)
        self.register_buffer("table", torch.ones(4))

    def forward(self, x: torch.Tensor, extra: Any = (), sign: float = 1.0) -> torch.Tensor:
        y = self.linear(x) * self.scale + self.options["shift"] + len(self.names) + len(self.config.nested.sizes)
        y = y * math.copysign(1.0, sign) + len(extra) + self.config.power
        if self.bias is not None:
            y = y + self.bias
        y = y * self.table if x.is_contiguous() else y - self.table
        if self.linear.weight.is_contiguous():
            y = y + 1
        return self.act(self.drop(y))


def set_item(module: nn.Module, name: str, value: Any) -> None:
    setattr(module, name, value)


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, column by column in memory."""
    return tensor.t().contiguous().t()


CHANGES: dict[str, Callable[[Reads], Any]] = {
    "a number of a module": lambda m: set_item(m.drop, "p", 0.0),
    "a number of the model": lambda m: set_item(m, "scale", 3.0),
    "zero to minus zero": lambda m: set_item(m, "scale", -0.0),
    "an int for a float": lambda m: set_item(m, "scale", 2),
    "an item of a list": lambda m: m.names.append("b"),
    "an entry of a dictionary": lambda m: m.options.update(shift=5),
    "an attribute of a config": lambda m: set_item(m.config, "power", 4),
    "a list inside of a config": lambda m: m.config.nested.sizes.append(3),
    "a module by name": lambda m: set_item(m, "act", nn.ReLU()),
    "a buffer that was None": lambda m: set_item(m, "bias", torch.full((4,), 0.5)),
    "a buffer of another dtype": lambda m: set_item(m, "table", torch.ones(4, dtype=torch.float64)),
    "a buffer of another shape": lambda m: set_item(m, "table", torch.ones(4, 1)),
    "a parameter of other strides": lambda m: set_item(m.linear.weight, "data", transposed(m.linear.weight.data)),
    "a frozen parameter": lambda m: m.linear.bias.requires_grad_(False),
    "another parameter": lambda m: set_item(m.linear, "bias", nn.Parameter(torch.ones(4, 1))),
    "a forward hook": lambda m: m.linear.register_forward_hook(lambda module, args, y: y * 3),
    "a forward pre-hook": lambda m: m.linear.register_forward_pre_hook(lambda module, args: (args[0] * 3,)),
    "a module in eval mode": lambda m: m.drop.eval(),
}  # fmt: skip


def assert_same(model: nn.Module, optimized: nn.Module, *args: Any) -> None:
    results = []
    for current in (model, optimized):
        current.zero_grad()
        torch.manual_seed(0)
        y = current(*args)
        y.sum().backward()
        results.append([y.detach(), *(p.grad.clone() for p in current.parameters() if p.grad is not None)])
    assert [t.dtype for t in results[0]] == [t.dtype for t in results[1]]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.sweep(but=("a number of the model",))
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_after_the_first_call_acts_as_in_eager_mode(change: str) -> None:
    model = Reads()
    optimized = graphopt.optimize(copy.deepcopy(model))
    assert_same(model, optimized, X)
    CHANGES[change](model)
    CHANGES[change](optimized)
    assert_same(model, optimized, X)
    assert_same(model, optimized, X)
    assert len(optimized._graphopt.runner.captures.all()) == 2


ARGUMENTS: dict[str, tuple[Callable[[], tuple[Any, ...]], Callable[[tuple[Any, ...]], tuple[Any, ...]]]] = {
    "strides": (lambda: (X.clone(),), lambda args: (args[0].t(),)),
    "a set that grew": (lambda: (X, {0}), lambda args: (args[0], args[1] | {1})),
    "the same set, grown": (lambda: (X, {0}), lambda args: (args[0], args[1].add(1) or args[1])),
    "a list that grew": (lambda: (X, [0]), lambda args: (args[0], [0, 1])),
    "minus zero": (lambda: (X, (), 0.0), lambda args: (X, (), -0.0)),
}


@pytest.mark.sweep(but=("minus zero",))
@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments_count_by_value_and_tensors_by_strides(case: str) -> None:
    first, then = ARGUMENTS[case]
    model = Reads()
    optimized = graphopt.optimize(model)
    args = first()
    assert_same(model, optimized, *args)
    args = then(args)
    assert_same(model, optimized, *args)
    assert_same(model, optimized, *first())
    assert len(optimized._graphopt.runner.captures.all()) == 2


class Conjugates(nn.Module):
    """Does something else for a view that stands for the conjugate of its elements, or their negative."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4, dtype=torch.complex64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x if x.is_complex() else torch.complex(x, x))
        return (y * 2 if x.is_conj() or x.is_neg() else y).abs()


@pytest.mark.parametrize("views", [lambda x: (x, x.conj()), lambda x: (x.imag, x.conj().imag)], ids=["conj", "neg"])
def test_views_that_stand_for_other_values_are_other_arguments(views: Callable[[torch.Tensor], Any]) -> None:
    model = Conjugates()
    optimized = graphopt.optimize(model)
    plain, view = views(torch.randn(4, 4, dtype=torch.complex64))
    for x in (plain, view, plain, view):
        assert_same(model, optimized, x)
    assert len(optimized._graphopt.runner.captures.all()) == 2


def test_a_hook_that_is_removed_acts_no_more() -> None:
    model = Reads()
    handle = model.linear.register_forward_hook(lambda module, args, y: y * 3)
    optimized = graphopt.optimize(model)
    assert_same(model, optimized, X)
    handle.remove()
    assert_same(model, optimized, X)


@pytest.fixture(params=["deterministic", "attention", "default dtype", "matmul precision"])
def setting(request: pytest.FixtureRequest) -> Iterator[Callable[[], None]]:
    """Changes one of torch's settings, which is put back afterwards."""
    kept = torch.get_default_dtype(), torch.get_float32_matmul_precision(), torch.backends.cuda.flash_sdp_enabled()
    changes: dict[str, Callable[[], None]] = {
        "deterministic": lambda: torch.use_deterministic_algorithms(True),
        "attention": lambda: torch.backends.cuda.enable_flash_sdp(not kept[2]),
        "default dtype": lambda: torch.set_default_dtype(torch.float64),
        "matmul precision": lambda: torch.set_float32_matmul_precision("medium"),
    }
    yield changes[request.param]
    torch.use_deterministic_algorithms(False)
    torch.set_default_dtype(kept[0])
    torch.set_float32_matmul_precision(kept[1])
    torch.backends.cuda.enable_flash_sdp(kept[2])


@pytest.mark.sweep
def test_settings_of_torch_are_part_of_the_signature(setting: Callable[[], None]) -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = (x @ self.weight).reshape(1, 1, 4, 4)
            return F.scaled_dot_product_attention(q, q, q) + torch.ones(4).sum()

    model = Attends()
    optimized = graphopt.optimize(model)
    assert_same(model, optimized, X)
    setting()
    assert_same(model, optimized, X)
    assert len(optimized._graphopt.runner.captures.all()) == 2


def test_attributes_that_forward_sets_at_every_call_are_named_and_captured_twice(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.calls = nn.Linear(4, 4), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.linear(x)

    optimized = graphopt.optimize(nn.Sequential(Counts()))
    for _ in range(4):
        optimized(X).sum().backward()
    (said,) = caplog.messages
    assert said.startswith("forward of Sequential sets 0.calls: a program computes tensors only")
    assert len(optimized._graphopt.runner.captures.all()) == 2


def test_equal_values_share_a_program() -> None:
    model = Reads()
    optimized = graphopt.optimize(model)
    optimized(X, [1, 2])
    model.scale, model.names, model.config.power = 2.0, ["a"], 1
    model.options = {"shift": 1}
    optimized(X.clone(), [1, 2])
    assert len(optimized._graphopt.runner.captures.all()) == 1


# --- the key itself --------------------------------------------------------------------------------------------------


@dataclass
class Thing:
    a: Any = None


SIMPLE = st.none() | st.booleans() | st.integers(-3, 3) | st.floats(allow_nan=False) | st.text(max_size=3)
VALUES = st.recursive(
    SIMPLE,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        | st.sets(st.integers(-3, 3), max_size=3)
    ),
    max_leaves=8,
)


def alike(one: Any, other: Any) -> bool:
    """Equal, of the same types throughout, and with the same signs of zero."""
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(alike(one[key], other[key]) for key in one)
    return repr(one) == repr(other) if isinstance(one, float) else one == other


@given(VALUES, VALUES)
@examples(200)
def test_keys_are_equal_just_where_values_are(one: Any, other: Any) -> None:
    assert by_value(one) == by_value(copy.deepcopy(one))
    assert (by_value(one) == by_value(other)) == alike(one, other)
    hash(by_value(one))


def test_what_refers_to_itself_has_a_key() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    thing = Thing()
    thing.a = thing
    assert by_value(loop) == by_value(loop)
    assert by_value(thing) == by_value(thing)


@given(st.lists(st.sampled_from(sorted(CHANGES)), min_size=1, max_size=6))
@examples(40)
def test_the_quick_check_notices_what_the_key_notices(changes: list[str]) -> None:
    model, fingerprint = Reads(), ModelFingerprint()
    for change in changes:
        fingerprint(model)
        CHANGES[change](model)
        assert fingerprint(model) == ModelFingerprint()(model)


def test_a_key_that_is_made_again_is_the_same_object_where_nothing_has_changed() -> None:
    model, fingerprint = Reads(), ModelFingerprint()
    first = fingerprint(model)
    model.linear.register_forward_hook(lambda module, args, y: None).remove()
    assert fingerprint(model) is first
    model.eval()
    assert fingerprint(model) != first
    model.train()
    assert fingerprint(model) == first


@pytest.mark.sweep(but=("captured",))
@pytest.mark.parametrize("way", ["drop-in", "whole step", "captured"])
def test_a_model_without_sizes_is_refused_by_name_and_trained_behind_its_first_batch(way: str) -> None:
    model, x = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d()), torch.linspace(-1, 1, 8).view(4, 2)

    def call() -> object:
        if way == "captured":
            return graphopt.capture(model, (x,))
        if way == "drop-in":
            return graphopt.optimize(model)(x)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=True)
        return graphopt.optimize_step(model, optimizer, loss=mean_square)(x)

    with pytest.raises(CaptureError, match=r"LazyLinear has no sizes yet \(weight, bias\)(.|\n)*under torch\.no_grad"):
        call()
    with torch.no_grad():
        model(x)
    assert call() is not None


def test_a_lazy_model_is_refused_by_name_before_its_first_batch() -> None:
    model, x = nn.LazyLinear(3), torch.linspace(-1, 1, 8).view(4, 2)
    with pytest.raises(CaptureError, match="LazyLinear has no sizes yet"):
        graphopt.optimize(model)
    with torch.no_grad():
        model(x)
    assert torch.equal(graphopt.optimize(model)(x), model(x))


class Tied(nn.Module):
    """Two layers with one weight, and two results, on which each call registers hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.first(x)
        return y, self.second(y)


def test_tied_weights_and_several_results_are_not_read_again_at_each_call() -> None:
    optimized: Any = graphopt.optimize(Tied())
    for _ in range(2):
        optimized(X)[1].sum().backward()
    before = optimized._graphopt.runner.serving.changes
    for _ in range(3):
        optimized(X)[1].sum().backward()
    assert optimized._graphopt.runner.serving.changes == before
    optimized.first.register_forward_hook(lambda module, args, output: output * 2)
    optimized(X)
    assert optimized._graphopt.runner.serving.changes > before
