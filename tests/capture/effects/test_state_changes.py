"""What forward and a loss leave in Python: containers, objects, variables; nothing of a trace, and no change untold."""

from __future__ import annotations

import argparse
import collections
import copy
import enum
import logging
import os
import pathlib
import random
import secrets
import threading
import types
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

import graphopt
from graphopt.errors import CaptureError, GraphBreakError
from graphopt.passes import FitMemory
from tests.support.training import OPTIMIZERS

X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


# --- containers in modules -------------------------------------------------------------------------------------------


class Keeps(nn.Module):
    """Keeps something in a container that it has made."""

    def __init__(self, kept: Any, keep: Callable[[Any, torch.Tensor], None]) -> None:
        super().__init__()
        self.linear, self.kept, self.keep = nn.Linear(4, 4), kept, keep

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.keep(self.kept, y)
        return y.sin()


def cache(kept: dict[str, torch.Tensor], y: torch.Tensor) -> None:
    if "table" not in kept:
        kept["table"] = torch.arange(4.0).sin()
    y += kept["table"]


KEEPING: dict[str, tuple[Callable[[], Any], Callable[[Any, torch.Tensor], None]]] = {
    "dictionary": (dict, cache),
    "list": (list, lambda kept, y: kept.append(y)),
    "deque": (lambda: collections.deque(maxlen=2), lambda kept, y: kept.append(y)),
}


@pytest.mark.sweep(but=("list",))
@pytest.mark.parametrize("kind", KEEPING)
def test_nothing_of_a_trace_stays_in_containers(kind: str) -> None:
    made, keep = KEEPING[kind]
    plain = Keeps(made(), keep)
    model = copy.deepcopy(plain)
    step = graphopt.optimize_step(model, OPTIMIZERS["sgd"](model.parameters()), loss=lambda model, x: model(x).sum())
    with pytest.raises(CaptureError):
        step(X)
    assert model.kept == made()
    drop_in = graphopt.optimize(model)
    for _ in range(3):
        assert torch.equal(drop_in(X), plain(X))
    assert len(model.kept) == len(plain.kept)


def test_containers_and_global_variables_that_change_are_told_by_name(caplog: pytest.LogCaptureFixture) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Keeps([], lambda kept, y: kept.append(len(kept)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            global CALLS
            CALLS += 1
            return self.inner(x)

    graphopt.optimize(Counts())(X)
    (told,) = [record.getMessage() for record in caplog.records if "does not set them" in record.getMessage()]
    assert "sets inner.kept, the global variable CALLS: " in told


CALLS = 0


class KeepsInLibrary(nn.Module):
    """Keeps tensors in an object of an installed library, two objects deep."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.cache = nn.Linear(4, 4), DynamicCache()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)[None, None]
        keys, _ = self.cache.update(y.detach(), y.detach(), 0)
        return y.sin() + keys.sum()


def test_tensors_that_are_kept_in_an_object_of_a_library() -> None:
    eager, model = KeepsInLibrary(), graphopt.optimize(KeepsInLibrary())
    for _ in range(3):
        assert torch.equal(model(X), eager(X))
    assert torch.equal(model.cache.layers[0].keys, eager.cache.layers[0].keys)
    with pytest.raises(GraphBreakError, match=r"forward keeps tensors in cache\.layers"):
        graphopt.capture(KeepsInLibrary(), (X,))


# --- what functions reach --------------------------------------------------------------------------------------------


class Meter:
    """As loops have it."""

    total: Any = 0

    def __init__(self) -> None:
        self.sum: Any = 0
        self.count = 0

    def update(self, value: Any) -> None:
        self.sum = self.sum + value
        self.count += 1


class Held(nn.Module):
    """A module that is not the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Any = None
        self.seen: list[Any] = []

    def forward(self, value: Any) -> None:
        self.last = value
        self.seen.append(value)


LOG: list[Any] = []
STATS: dict[str, Any] = {"all": [], "each": {}}
METER = Meter()
HELD = Held()
METERS = {"each": Meter()}
PLACE = argparse.Namespace(value=None)
LATEST: Any = None


def set_latest(value: Any) -> None:
    global LATEST
    LATEST = value


def closure() -> tuple[Callable[[Any], None], Callable[[], Any]]:
    """A function that sets a variable around it, and what reads that."""
    kept: Any = None

    def keep(value: Any) -> None:
        nonlocal kept
        kept = value

    return keep, lambda: kept


KEEP, KEPT = closure()


def by_default(value: Any, into: list[Any] = []) -> None:  # noqa: B006
    into.append(value)


WAYS: dict[str, tuple[Callable[[Any], Any], Callable[[], Any], str]] = {
    "list": (lambda value: LOG.append(value), lambda: list(LOG), "LOG"),
    "dictionary": (lambda value: STATS.update(last=value), lambda: STATS.get("last"), "STATS"),
    "list in a dictionary": (lambda value: STATS["all"].append(value), lambda: list(STATS["all"]), "STATS"),
    "entry": (lambda value: STATS["each"].__setitem__(len(STATS["each"]), value), lambda: dict(STATS["each"]), "STATS"),
    "object": (lambda value: METER.update(value), lambda: (METER.sum, METER.count), "METER.sum"),
    "class": (lambda value: setattr(Meter, "total", value), lambda: Meter.total, "Meter.total"),
    "namespace": (lambda value: setattr(PLACE, "value", PLACE.value or value), lambda: PLACE.value, "PLACE.value"),
    "object in a dictionary": (
        lambda value: METERS["each"].update(value),
        lambda: (METERS["each"].sum, METERS["each"].count),
        "METERS.sum",
    ),
    "last of a namespace": (
        lambda value: setattr(PLACE, "last", value),
        lambda: getattr(PLACE, "last", None),
        "PLACE.last",
    ),
    "another module": (lambda value: HELD(value), lambda: (HELD.last, list(HELD.seen)), "Held"),
    "global variable": (set_latest, lambda: LATEST, "the global variable LATEST"),
    "closure": (KEEP, lambda: KEPT(), "the variable kept of"),
    "default": (by_default, lambda: list((by_default.__defaults__ or ())[0]), "the defaults of by_default"),
}


def reset() -> None:
    """Leave nothing of what was kept."""
    LOG.clear()
    STATS.clear()
    STATS.update({"all": [], "each": {}})
    METER.__init__()  # type: ignore[misc]
    METERS["each"].__init__()  # type: ignore[misc]
    vars(PLACE).pop("last", None)
    Meter.total, HELD.last, PLACE.value = 0, None, None
    HELD.seen.clear()
    set_latest(None)
    KEEP(None)
    (by_default.__defaults__ or ())[0].clear()


@pytest.fixture(autouse=True)
def as_before() -> None:
    """Each test begins with nothing kept."""
    reset()


class Notes(nn.Module):
    """Hands what it computes, or a number, to a function."""

    def __init__(self, note: Callable[[Any], Any], *, numbers: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.note, self.numbers = nn.Linear(4, 4), note, numbers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x).sin()
        self.note(len(x) if self.numbers else y.detach().mean())
        return y


def plain(value: Any) -> Any:
    """Tensors as numbers."""
    if isinstance(value, torch.Tensor):
        assert type(value) is torch.Tensor
        return value.item()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return type(value)(map(plain, value)) if isinstance(value, (list, tuple)) else value


def trained(model: nn.Module) -> list[float]:
    found = []
    for number in range(3):
        loss = model(X + number).square().mean()
        loss.backward()
        found.append(loss.item())
    return found


@pytest.mark.sweep(cases=("dictionary", "list in a dictionary", "namespace"))
@pytest.mark.parametrize("way", WAYS)
def test_tensors_that_a_model_keeps_elsewhere_are_there_as_in_eager_mode(way: str) -> None:
    note, read, _ = WAYS[way]
    eager = trained(Notes(note)), plain(read())
    reset()
    assert (trained(graphopt.optimize(Notes(note))), plain(read())) == eager


@pytest.mark.sweep(cases=("dictionary", "list in a dictionary", "entry", "namespace", "default"))
@pytest.mark.parametrize("way", WAYS)
def test_tensors_that_a_loss_keeps_elsewhere_are_refused_by_name_and_taken_back(way: str) -> None:
    note, read, name = WAYS[way]

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        value = F.mse_loss(model(x), x)
        note(value.detach())
        return value

    model, before = nn.Linear(4, 4), plain(read())
    step = graphopt.optimize_step(model, OPTIMIZERS["sgd"](model.parameters()), loss=loss)
    with pytest.raises(GraphBreakError, match=rf"forward or the loss keeps tensors in {name}.*; or keep your loop"):
        step(X)
    assert plain(read()) == before


@pytest.mark.sweep(cases=("dictionary", "list in a dictionary", "entry", "namespace", "default"))
@pytest.mark.parametrize("way", WAYS)
def test_numbers_that_are_kept_elsewhere_are_told_by_name(way: str, caplog: pytest.LogCaptureFixture) -> None:
    note, read, name = WAYS[way]
    graphopt.optimize(Notes(note, numbers=True))(X)
    (told,) = [record.getMessage() for record in caplog.records if "does not set them" in record.getMessage()]
    assert told.startswith("forward of Notes sets ")
    assert name in told
    assert read() is not None


def test_variables_of_the_environment_are_told_too(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CALLS_OF_THE_LOSS", "0")

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        os.environ["CALLS_OF_THE_LOSS"] = str(int(os.environ["CALLS_OF_THE_LOSS"]) + 1)
        return F.mse_loss(model(x), x)

    model = nn.Linear(4, 4)
    with caplog.at_level(logging.WARNING):
        graphopt.optimize_step(model, OPTIMIZERS["sgd"](model.parameters()), loss=loss)(X)
    assert "the loss or forward of Linear sets environment variable CALLS_OF_THE_LOSS: " in caplog.text


FIXED = {
    "frozenset": frozenset((1, 2)),
    "proxy": types.MappingProxyType({"a": 1}),
    "enumeration": enum.Enum("Kinds", "FIRST SECOND"),
    "named tuple": collections.namedtuple("Pair", "a b")(1, [2]),
    "range": range(3),
    "counter": collections.Counter("abc"),
    "environment": os.environ,
    "slots": type("Slots", (), {"__slots__": ("a",)})(),
    "lock": threading.Lock(),
    "path": pathlib.Path(),
}


@pytest.mark.parametrize("kind", FIXED)
def test_whatever_code_reads_a_capture_does_without_a_word(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    def read(_: Any) -> object:
        return FIXED[kind], SOME, NAMES, PROXY, Kinds

    SOME.append(FIXED[kind])
    try:
        with caplog.at_level(logging.WARNING):
            assert graphopt.optimize(Notes(read))(X).shape == X.shape
    finally:
        SOME.clear()
    assert caplog.text == ""


def test_a_tensor_without_data_that_was_there_before_is_none_of_the_trace() -> None:
    with FakeTensorMode():
        before = torch.ones(4)

    class Reads(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * len(before)

    assert graphopt.optimize(Reads(4, 4))(X).shape == X.shape


SOME: list[Any] = []
NAMES, PROXY, Kinds = frozenset(("a", "b")), types.MappingProxyType({"a": 1}), enum.Enum("Kinds", "FIRST SECOND")


def test_a_capture_that_fails_leaves_what_was_there() -> None:
    """Eager mode, which runs the call instead, finds it as it was."""
    count = 0

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            nonlocal count
            count += 1
            LOG.append(count)
            y: torch.Tensor = self.linear(x)
            return y.sin() if y.sum() > 0 else y.cos()

    model = graphopt.optimize(Counts())
    for _ in range(3):
        model(X)
    assert (count, LOG) == (3, [1, 2, 3])


# --- arguments and results -------------------------------------------------------------------------------------------


class Box:
    """An object with attributes, as a batch or a result."""

    def __init__(self, x: Any) -> None:
        self.x = x


class Puts(nn.Module):
    """Puts what it computes into its argument."""

    def __init__(self, put: Callable[[Any, torch.Tensor], Any], get: Callable[[Any], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.put, self.get = nn.Linear(4, 4), put, get

    def forward(self, batch: Any) -> torch.Tensor:
        y: torch.Tensor = self.linear(self.get(batch)).sin()
        self.put(batch, y)
        return y


PUTTING: dict[str, tuple[Callable[..., Any], ...]] = {
    "dictionary": (
        lambda x: {"x": x}, lambda batch: batch["x"], lambda batch, y: batch.update(y=y), lambda batch: batch["y"]
    ),
    "list": (lambda x: [x], lambda batch: batch[0], lambda batch, y: batch.append(y), lambda batch: batch[1]),
    "object": (Box, lambda batch: batch.x, lambda batch, y: setattr(batch, "y", y), lambda batch: batch.y),
}  # fmt: skip


@pytest.mark.parametrize("kind", PUTTING)
def test_tensors_put_into_an_argument_are_there_as_in_eager_mode(kind: str) -> None:
    make, get, put, read = PUTTING[kind]
    model = Puts(put, get)
    drop_in = graphopt.optimize(copy.deepcopy(model))
    for number in range(3):
        batch, expected = make(X + number), make(X + number)
        assert torch.equal(drop_in(batch), model(expected))
        assert torch.equal(read(batch), read(expected))
        (read(batch).sum() + read(expected).sum()).backward()
        assert torch.equal(drop_in.linear.weight.grad, model.linear.weight.grad)


@pytest.mark.parametrize("kind", PUTTING)
def test_whole_steps_refuse_to_put_tensors_into_an_argument(kind: str) -> None:
    make, get, put, _ = PUTTING[kind]
    model, batch = Puts(put, get), make(X)
    step = graphopt.optimize_step(
        model, OPTIMIZERS["sgd"](model.parameters()), loss=lambda model, batch: model(batch).sum()
    )
    before = copy.copy(batch if isinstance(batch, (dict, list)) else vars(batch))
    with pytest.raises(GraphBreakError, match=r"tensors are put into argument batch.*: return them"):
        step(batch)
    assert (batch if isinstance(batch, (dict, list)) else vars(batch)) == before


def test_an_entry_taken_from_an_argument_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(4, 4)

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        target = batch.pop("target")
        return F.mse_loss(model(**batch), target)

    step = graphopt.optimize_step(model, OPTIMIZERS["sgd"](model.parameters()), loss=loss)
    for _ in range(2):
        step({"input": X, "target": X})
    assert caplog.text.count("the loss or forward of Linear sets its argument batch: ") == 1


@pytest.mark.parametrize("make", [Box, lambda y: iter([y]), lambda y: (y, [Box({"y": y})])])
def test_results_that_hide_tensors(make: Callable[[torch.Tensor], Any]) -> None:
    class Hides(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return make(super().forward(x))

    def tensor(result: Any) -> torch.Tensor:
        if isinstance(result, tuple):
            return result[1][0].x["y"]
        return result.x if isinstance(result, Box) else next(result)

    torch.manual_seed(0)
    model = Hides(4, 4)
    drop_in = graphopt.optimize(copy.deepcopy(model))
    for _ in range(2):
        assert torch.equal(tensor(drop_in(X)), tensor(model(X)))
    with pytest.raises(GraphBreakError, match="the result holds tensors in an object of "):
        graphopt.capture(model, (X,))


def test_a_cache_for_generating_text_is_left_out_of_a_result_and_told(caplog: pytest.LogCaptureFixture) -> None:
    config = LlamaConfig(
        vocab_size=20, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).train()
    optimized, tokens = graphopt.optimize(copy.deepcopy(model)), torch.arange(12).reshape(2, 6)
    for _ in range(2):
        found, expected = optimized(tokens, labels=tokens), model(tokens, labels=tokens)
        assert torch.equal(found.loss, expected.loss)
        assert torch.equal(found.logits, expected.logits)
        assert found.past_key_values is None
    assert len(optimized.programs) == 1
    assert "LlamaForCausalLM: cache of" in caplog.text or "LlamaForCausalLM: past_key_values of" in caplog.text
    assert caplog.text.count(" of its result is None, since a program returns no cache of keys and values") == 1


def test_an_error_of_python_under_trace_alone_is_named_with_its_kind() -> None:
    class Fussy(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * {torch.Tensor: 2}[type(x)]  # type: ignore[no-any-return]

    with pytest.raises(GraphBreakError, match=r"Fussy cannot be captured: KeyError: <class"):
        graphopt.capture(Fussy(4, 4), (X,))


# --- random generators ----------------------------------------------------------------------------------------------


DRAWN, BUDGET = random.Random(1), FitMemory("100%", cost="roofline")

GENERATORS: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "random.Random": (lambda: random.Random(3), lambda generator: generator.random()),
    "RandomState": (lambda: np.random.RandomState(3), lambda generator: float(generator.rand())),
    "Generator": (lambda: np.random.default_rng(3), lambda generator: float(generator.random())),
    "numpy.random": (lambda: np.random, lambda generator: float(generator.rand())),
    "array": (lambda: np.random, lambda generator: torch.from_numpy(generator.rand(4).astype("float32"))),
    "global": (lambda: None, lambda generator: DRAWN.random()),
}


class Draws(nn.Module):
    """Computes with a number that no tensor holds."""

    def __init__(self, generator: Any, draw: Callable[[Any], float], *, looks: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.generators, self.draw, self.looks = nn.Linear(4, 4), [generator], draw, looks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        if self.looks and y.sum() > 1e9:
            return y
        return y * self.draw(self.generators[0])


@pytest.mark.sweep(cases=("RandomState-False", "RandomState-True", "numpy.random-False", "numpy.random-True"))
@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("kind", GENERATORS)
def test_drop_in_models_draw_from_other_generators_as_eager_mode_does(kind: str, looks: bool) -> None:
    make, draw = GENERATORS[kind]

    def run(around: Callable[[nn.Module], nn.Module]) -> list[float]:
        np.random.seed(2)
        DRAWN.seed(2)
        generator = make()
        model = around(Draws(generator, draw, looks=looks))
        losses = trained(model)
        return [*losses, float(torch.as_tensor(draw(generator)).sum())]

    assert run(graphopt.optimize) == run(lambda model: model)


def test_a_budget_is_refused_for_a_model_that_runs_in_eager_mode() -> None:
    model = graphopt.optimize(Draws(random.Random(3), lambda generator: generator.random(), looks=False), [BUDGET])
    with pytest.raises(GraphBreakError, match="in parts: fit-memory cannot be applied"):
        model(X)


@pytest.mark.sweep(cases=("RandomState", "numpy.random"))
@pytest.mark.parametrize("kind", GENERATORS)
def test_whole_steps_refuse_to_draw_from_other_generators(kind: str) -> None:
    make, draw = GENERATORS[kind]
    generator = make()
    model = Draws(generator, draw, looks=False)
    step = graphopt.optimize_step(
        model, OPTIMIZERS["sgd"](model.parameters()), loss=lambda model, x: model(x).square().mean()
    )
    np.random.seed(2)
    DRAWN.seed(2)
    twin = make()
    with pytest.raises(GraphBreakError, match="forward draws from "):
        step(X)
    drawn = draw(generator)
    np.random.seed(2)
    DRAWN.seed(2)
    assert torch.equal(torch.as_tensor(drawn), torch.as_tensor(draw(twin)))


# --- containers stay the objects that they are ------------------------------------------------------------------------


class Shares(nn.Module):
    """Two blocks that read one dictionary, which the user's loop sets as well."""

    def __init__(self) -> None:
        super().__init__()
        self.scales: dict[str, Any] = {"all": 1.0, "more": [1.0]}
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        for block in self.blocks:
            block.scales = self.scales

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) * block.scales["all"] * block.scales["more"][0]
        return x


@pytest.mark.parametrize("way", ["step", "drop-in", "capture"])
def test_containers_that_modules_share_are_shared_behind_a_capture(way: str) -> None:
    model = Shares()
    kept, inner = model.scales, model.scales["more"]
    step = graphopt.optimize_step(model, torch.optim.SGD(model.parameters(), 0.0), loss=lambda model, x: model(x).sum())
    optimized = graphopt.optimize(model)
    x = torch.linspace(-1, 1, 8).reshape(2, 4)
    run = {
        "step": lambda: step(x),
        "drop-in": lambda: optimized(x).sum(),
        "capture": lambda: graphopt.capture(model, (x,)),
    }
    run[way]()
    assert model.scales is kept
    assert all(block.scales is kept for block in model.blocks)
    assert kept["more"] is inner
    inner[0], kept["all"] = 3.0, 2.0
    if way != "capture":
        with torch.no_grad():
            assert torch.equal(run[way](), model(x).sum())


class Fills(nn.Module):
    """Notes sizes in a list of its own, which somebody else holds too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.sizes = nn.Linear(4, 4), list[int]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.sizes.append(len(x))
        return self.linear(x)


@pytest.mark.parametrize("whole", [False, True])
def test_a_list_that_forward_fills_is_told_and_captured_once(whole: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = Fills()
    kept = model.sizes
    x = torch.linspace(-1, 1, 8).reshape(2, 4)
    step = graphopt.optimize_step(model, torch.optim.SGD(model.parameters(), 0.0), loss=lambda model, x: model(x).sum())
    optimized: Any = graphopt.optimize(model)
    with caplog.at_level(logging.WARNING, "graphopt"):
        for _ in range(3):
            _ = step(x) if whole else optimized(x)
    runner = step._programs.runner if whole else optimized._graphopt.runner
    assert len(runner.captures.all()) == 1
    assert model.sizes is kept
    assert kept == []
    assert sum("sets sizes" in record.getMessage() for record in caplog.records) == 1


DRAWS: dict[str, Callable[[], float]] = {
    "bytes": lambda: float(os.urandom(4)[0]),
    "identifier": lambda: float(uuid.uuid4().int % 1_000_003),
    "secret": lambda: float(secrets.randbelow(1_000_003)),
    "generator": lambda: random.SystemRandom().random(),
}


class DrawsOfSystem(nn.Module):
    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.linear, self.draw = nn.Linear(4, 4), draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * 0 + self.draw()


@pytest.mark.sweep(but=("identifier",))
@pytest.mark.parametrize("kind", DRAWS)
def test_random_numbers_of_the_operating_system_are_drawn_at_each_call_or_refused(kind: str) -> None:
    model = DrawsOfSystem(DRAWS[kind])
    x = torch.linspace(-1, 1, 8).reshape(2, 4)
    step = graphopt.optimize_step(model, torch.optim.SGD(model.parameters(), 0.0), loss=lambda model, x: model(x).sum())
    with pytest.raises(GraphBreakError, match="the operating system's random numbers"):
        step(x)
    optimized = graphopt.optimize(model)
    assert len({float(optimized(x)[0, 0].detach()) for _ in range(6)}) > 1


class WithSlots:
    __slots__ = ("last",)


class PutsIntoSlots(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.kept = nn.Linear(4, 4), WithSlots()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        self.kept.last = y.detach()
        return y


def test_a_tensor_put_into_slots_is_there_as_in_eager_mode_or_refused() -> None:
    model, x = PutsIntoSlots(), torch.linspace(-1, 1, 8).reshape(2, 4)
    step = graphopt.optimize_step(model, torch.optim.SGD(model.parameters(), 0.0), loss=lambda model, x: model(x).sum())
    with pytest.raises(GraphBreakError, match=r"keeps tensors in kept\.last"):
        step(x)
    assert not hasattr(model.kept, "last")
    optimized = graphopt.optimize(model)
    for batch in (x, x * 2):
        assert torch.equal(optimized(batch), model.kept.last)
