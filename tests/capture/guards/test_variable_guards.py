"""Variables that the code of a model or a loss reads: a call after one has changed trains as eager mode does."""

from __future__ import annotations

import argparse
import contextvars
import copy
import functools
import logging
import os
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import graphopt
from graphopt.capture.guards.fingerprint import by_value
from graphopt.capture.guards.variable_guards import VariablesRead
from tests.support.properties import examples
from tests.support.training import mean_square

X = torch.linspace(-1, 1, 24).view(4, 6)

weight = 1.0
settings = types.SimpleNamespace(weight=1.0, table={"weights": [1.0, 2.0]})
called = types.ModuleType("called")
called.weight = 1.0  # type: ignore[attr-defined]
history: list[float] = []


@dataclass
class Options:
    weight: float = 1.0
    seen: list[float] = field(default_factory=list)


class Constants:
    weight = 1.0


def helper(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean() * weight


class Net(nn.Module):
    factor = 1.0

    def __init__(self, then: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.then = nn.Linear(6, 6), then

    def around(self, y: torch.Tensor) -> torch.Tensor:
        return y * self.factor

    @property
    def share(self) -> float:
        return Constants.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.around(self.layer(x)) * self.share
        return y if self.then is None else self.then(y)


class Trainer:
    """Its method is the loss."""

    def __init__(self) -> None:
        self.weight, self.steps, self.teacher = 1.0, 0, nn.Linear(6, 6)
        self.options = Options()

    def loss(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        self.options.seen.append(0.0)
        return (model(x) - self.teacher(x)).square().mean() * self.weight * self.options.weight


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for owner, name in ((globals(), "weight"), (os.environ, "GRAPHOPT_TEST_WEIGHT")):
        if name in owner:
            monkeypatch.setitem(owner, name, owner[name])  # type: ignore[arg-type]
    for other, name in ((Constants, "weight"), (Net, "factor"), (Net, "around"), (called, "weight")):
        monkeypatch.setattr(other, name, getattr(other, name))
    monkeypatch.setitem(globals(), "settings", copy.deepcopy(settings))
    yield
    os.environ.pop("GRAPHOPT_TEST_WEIGHT", None)


def set_global(value: float) -> None:
    globals()["weight"] = value


def closure() -> tuple[Any, Any]:
    share = 1.0

    def change(value: float) -> None:
        nonlocal share
        share = value

    return lambda model, x: model(x).square().mean() * share, change


def of_default() -> tuple[Any, Any]:
    def loss(model: nn.Module, x: torch.Tensor, shares: list[float] = [1.0]) -> torch.Tensor:  # noqa: B006
        result: torch.Tensor = model(x).square().mean() * shares[0]
        return result

    return loss, lambda value: loss.__defaults__[0].__setitem__(0, value)  # type: ignore[index]


def of_partial() -> tuple[Any, Any]:
    shares = {"first": 1.0}
    loss = functools.partial(lambda model, x, shares: model(x).square().mean() * shares["first"], shares=shares)
    return loss, lambda value: shares.update(first=value)


def of_trainer(change: Callable[[Trainer, float], Any]) -> tuple[Any, Any]:
    trainer = Trainer()
    return trainer.loss, lambda value: change(trainer, value)


def of_criterion() -> tuple[Any, Any]:
    criterion = nn.HuberLoss()
    return lambda model, x: criterion(model(x), x), lambda value: setattr(criterion, "delta", 0.1 * value)


LOSSES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "global": lambda: (lambda model, x: model(x).square().mean() * weight, set_global),
    "of a helper": lambda: (lambda model, x: helper(model(x)), set_global),
    "attribute of a namespace": lambda: (
        lambda model, x: model(x).square().mean() * settings.weight,
        lambda value: setattr(settings, "weight", value),
    ),
    "item in a namespace": lambda: (
        lambda model, x: model(x).square().mean() * settings.table["weights"][1],
        lambda value: settings.table["weights"].__setitem__(1, value),
    ),
    "of a module": lambda: (
        lambda model, x: model(x).square().mean() * called.weight,
        lambda value: setattr(called, "weight", value),
    ),
    "of a class": lambda: (
        lambda model, x: model(x).square().mean() * Constants.weight,
        lambda value: setattr(Constants, "weight", value),
    ),
    "closure": closure,
    "default": of_default,
    "partial": of_partial,
    "object": lambda: of_trainer(lambda trainer, value: setattr(trainer, "weight", value)),
    "object in an object": lambda: of_trainer(lambda trainer, value: setattr(trainer.options, "weight", value)),
    "teacher": lambda: of_trainer(lambda trainer, value: setattr(trainer, "teacher", nn.Linear(6, 6))),
    "criterion": of_criterion,
    "environment": lambda: (
        lambda model, x: model(x).square().mean() * float(os.environ.get("GRAPHOPT_TEST_WEIGHT", "1")),
        lambda value: os.environ.__setitem__("GRAPHOPT_TEST_WEIGHT", str(value)),
    ),
}


@pytest.mark.sweep(but=("global",))
@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_reads_what_has_changed(kind: str) -> None:
    loss, change = LOSSES[kind]()
    model = Net()
    step = graphopt.optimize_step(model, torch.optim.SGD(model.parameters(), 0.0), loss=loss)
    for value in (1.0, 3.0, 3.0, 1.0):
        change(value)
        assert torch.equal(step(X), loss(model, X)), value
    captures = len(step._programs.runner.captures.all())
    assert captures == (4 if kind == "teacher" else 2)


def patched(value: float) -> None:
    Net.around = (lambda self, y: y * value) if value != 1.0 else Net.around  # type: ignore[method-assign]


def from_closure() -> tuple[nn.Module, Any]:
    shares = {"k": 1.0}
    return Net(lambda y: y * shares["k"]), lambda value: shares.update(k=value)


MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "class attribute": lambda: (Net(), lambda value: setattr(Net, "factor", value)),
    "method": lambda: (Net(), patched),
    "property": lambda: (Net(), lambda value: setattr(Constants, "weight", value)),
    "global of a function": lambda: (Net(helper), set_global),
    "closure of a function": from_closure,
}


@pytest.mark.sweep(but=("method-False", "closure of a function-False"))
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_reads_what_has_changed(kind: str, whole: bool) -> None:
    model, change = MODELS[kind]()
    plain = copy.deepcopy(model)
    step = graphopt.optimize_step(model, torch.optim.SGD(model.parameters(), 0.0), loss=mean_square)
    optimized = graphopt.optimize(copy.deepcopy(model))
    for value in (1.0, 3.0):
        change(value)
        found = step(X) if whole else mean_square(optimized, X)
        assert torch.equal(found, mean_square(plain, X)), value


def test_what_is_not_read_costs_nothing() -> None:
    trainer = Trainer()
    model = Net()
    step = graphopt.optimize_step(model, torch.optim.SGD(model.parameters(), 0.1, foreach=True), loss=trainer.loss)
    for number in range(6):
        trainer.steps = number
        trainer.options.seen.append(1.0)
        history.append(1.0)
        step(X)
    assert len(step._programs.runner.captures.all()) == 1


def test_a_value_that_changes_at_each_call_is_told(caplog: pytest.LogCaptureFixture) -> None:
    loss, change = LOSSES["object"]()
    model = Net()
    step = graphopt.optimize_step(model, torch.optim.SGD(model.parameters(), 0.1, foreach=True), loss=loss)
    with caplog.at_level(logging.WARNING, "graphopt"):
        for number in range(4):
            change(float(number))
            step(X)
    (text,) = [record.getMessage() for record in caplog.records if "values of Python" in record.getMessage()]
    assert "Trainer.weight was 0.0, 1.0, 2.0;" in text
    assert "hand Trainer.weight over in the call, as a tensor" in text


def test_a_tensor_that_is_another_one_at_each_call_is_read_and_told(caplog: pytest.LogCaptureFixture) -> None:
    target = torch.zeros(4, 6)
    model = Net()
    step = graphopt.optimize_step(
        model, torch.optim.SGD(model.parameters(), 0.0), loss=lambda model, x: (model(x) - target).square().mean()
    )
    with caplog.at_level(logging.WARNING, "graphopt"):
        for number in range(4):
            target = torch.full((4, 6), float(number))
            assert torch.equal(step(X), (model(X) - target).square().mean())
    (text,) = [record.getMessage() for record in caplog.records if "values of Python" in record.getMessage()]
    assert "target was a tensor at 0x" in text


def reader(name: str) -> tuple[Callable[[torch.Tensor], torch.Tensor], dict[str, Any]]:
    """A function of another file, with a global variable of the same name as that of others."""
    variables: dict[str, Any] = {"share": 1.0}
    exec(compile("def read(y):\n    return y * share", f"{name}.py", "exec"), variables)
    return variables["read"], variables


def test_variables_of_one_name_are_told_apart() -> None:
    (first, of_first), (second, of_second) = reader("first"), reader("second")
    model = Net()
    step = graphopt.optimize_step(
        model,
        torch.optim.SGD(model.parameters(), 0.0),
        loss=lambda model, x: (first(model(x)) + second(model(x)).square()).mean(),
    )
    for variables in (of_first, of_second, of_first):
        variables["share"] += 1
        assert torch.equal(step(X), (first(model(X)) + second(model(X)).square()).mean())


def test_a_function_in_the_place_of_another_one_is_never_taken_for_it() -> None:
    model = Net()
    optimized = graphopt.optimize(model)
    for number in range(6):  # of which each may lie where the one before the last was
        model.then = eval(f"lambda y: y * {number}")
        assert torch.equal(optimized(X), Net.forward(model, X)), number


CONTAINERS = st.recursive(
    st.integers(0, 3),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        st.tuples(inner, inner),
        st.sets(st.integers(0, 3), max_size=3),
        st.builds(lambda weight: Options(weight), inner),
    ),
    max_leaves=8,
)


def containers_in(value: Any) -> Iterator[Any]:
    if isinstance(value, Options):
        yield value
        yield from containers_in(value.weight)
    elif isinstance(value, (list, dict, tuple, set)):
        yield value
        for item in value.values() if isinstance(value, dict) else value:
            yield from containers_in(item)


def change(container: Any, value: int) -> None:
    """Put a number into a container; where it is there already, nothing has changed."""
    if isinstance(container, Options):
        container.weight = value
    elif isinstance(container, list):
        container[:1] = [value]
    elif isinstance(container, dict):
        container["a"] = value
    else:
        container.add(value)


@given(kept=CONTAINERS, data=st.data())
@examples(60)
def test_a_key_changes_where_what_a_container_holds_does(kept: Any, data: st.DataObject) -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> Any:
        return kept

    variables, model = VariablesRead(), nn.Linear(2, 2)
    before, value = variables(model, loss, 1), by_value(kept)
    assert variables(model, loss, 1) == before
    places = [container for container in containers_in(kept) if not isinstance(container, tuple)]
    for container in data.draw(st.lists(st.sampled_from(places), max_size=3)) if places else ():
        change(container, data.draw(st.integers(0, 3)))
    assert (variables(model, loss, 1) == before) == (by_value(kept) == value)


def test_what_a_loss_sets_and_reads_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    count, model = 0, Net()

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        result: torch.Tensor = model(x).sum() * count
        return result

    step = graphopt.optimize_step(model, torch.optim.SGD(model.parameters(), 0.1, foreach=True), loss=loss)
    with caplog.at_level(logging.WARNING, "graphopt"):
        for _ in range(4):
            step(X)
    assert caplog.text.count("sets the variable count of ") == 1


class Base(Net):
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(x) * weight
        return result


class Derived(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().encode(x)


@pytest.mark.sweep
def test_methods_behind_super_are_followed() -> None:
    model = Derived()
    optimized = graphopt.optimize(model)
    for value in (1.0, 2.0):
        set_global(value)
        assert torch.equal(optimized(X), Derived.forward(model, X))


# --- variables of the context, and functions of libraries -------------------------------------------------------------

in_context: contextvars.ContextVar[float] = contextvars.ContextVar("in_context", default=1.0)


def scaled(y: torch.Tensor) -> torch.Tensor:
    return y * in_context.get()


def softened(y: torch.Tensor) -> torch.Tensor:
    return F.softplus(y)


def patched_softplus(value: float) -> None:
    F.softplus = SOFTPLUS if value == 1.0 else F.relu


SOFTPLUS = F.softplus


@pytest.fixture
def own_softplus() -> Iterator[None]:
    yield
    F.softplus = SOFTPLUS


@pytest.mark.usefixtures("own_softplus")
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(("then", "change"), [(scaled, in_context.set), (softened, patched_softplus)])
def test_variables_of_the_context_and_functions_of_libraries_are_read(then: Any, change: Any, whole: bool) -> None:
    model = Net(then)
    step = graphopt.optimize_step(model, torch.optim.SGD(model.parameters(), 0.0), loss=mean_square)
    optimized: Any = graphopt.optimize(copy.deepcopy(model))
    for value in (1.0, 3.0, 3.0, 1.0):
        change(value)
        found = step(X) if whole else mean_square(optimized, X)
        assert torch.equal(found, mean_square(model, X)), value
    assert len((step._programs if whole else optimized._graphopt).runner.captures.all()) == 2


class Schedule:
    """An object of the user's, which counts steps that no code reads."""

    def __init__(self) -> None:
        self.scale, self.steps = 1.0, 0

    def __getitem__(self, number: int) -> float:
        return self.scale


class Slotted:
    __slots__ = ("scale", "steps")


slotted = Slotted()
schedule, arguments = Schedule(), argparse.Namespace(scale=1.0, steps=0)


def scaled_by(options: Any, y: torch.Tensor) -> torch.Tensor:
    return y * options.scale


HANDED_ON: dict[str, tuple[Any, Callable[[torch.Tensor], torch.Tensor]]] = {
    "object": (schedule, lambda y: scaled_by(schedule, y)),
    "arguments of a command": (arguments, lambda y: scaled_by(arguments, y)),
    "operator": (schedule, lambda y: y * schedule[0]),
    "object with slots": (slotted, lambda y: scaled_by(slotted, y)),
    "attribute in slots": (slotted, lambda y: y * slotted.scale),
}


@pytest.mark.parametrize("kind", HANDED_ON)
def test_an_object_that_code_hands_on_is_read_where_code_reads_it(kind: str) -> None:
    options, then = HANDED_ON[kind]
    model = Net(then)
    optimized: Any = graphopt.optimize(model)
    options.scale, options.steps = 1.0, 0
    for steps, value in enumerate((1.0, 3.0, 3.0, 1.0)):
        options.scale, options.steps = value, steps
        with torch.no_grad():
            expected = mean_square(model, X)
        assert torch.equal(mean_square(optimized, X), expected), value
    assert len(optimized._graphopt.runner.captures.all()) == 2


def imported_whole(y: torch.Tensor) -> torch.Tensor:
    import own_settings

    return y * own_settings.scale


def imported_name(y: torch.Tensor) -> torch.Tensor:
    from own_settings import scale, unused  # noqa: F401

    return y * scale


def imported_as(y: torch.Tensor) -> torch.Tensor:
    import own_settings as settings_of_own

    return y * settings_of_own.scale


@pytest.mark.parametrize("then", [imported_whole, imported_name, imported_as])
def test_what_a_function_imports_is_read(then: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own = types.ModuleType("own_settings")
    monkeypatch.setitem(sys.modules, "own_settings", own)
    vars(own).update(scale=1.0, unused=0)
    model = Net(then)
    optimized: Any = graphopt.optimize(model)
    for value, unused in ((1.0, 0), (3.0, 1), (3.0, 2)):
        vars(own).update(scale=value, unused=unused)
        with torch.no_grad():
            expected = mean_square(model, X)
        assert torch.equal(mean_square(optimized, X), expected), value
    assert len(optimized._graphopt.runner.captures.all()) == 2


class Distils:
    """Its method is the loss; the teacher's parameters are others later on."""

    def __init__(self) -> None:
        self.teacher = nn.Linear(6, 6).requires_grad_(False)

    def loss(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (model(x) - self.teacher(x)).square().mean()


def test_parameters_of_a_module_outside_of_the_model_that_are_replaced() -> None:
    distils, model = Distils(), Net()
    step = graphopt.optimize_step(model, torch.optim.SGD(model.parameters(), 0.0), loss=distils.loss)
    for value in (1.0, 2.0):
        distils.teacher.weight = nn.Parameter(torch.full((6, 6), value), requires_grad=False)
        assert torch.equal(step(X), distils.loss(model, X)), value
