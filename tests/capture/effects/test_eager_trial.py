"""Calls that fail in eager mode fail alike behind every door: the user's exception itself, alone, with its line."""

from __future__ import annotations

import copy
import logging
import random
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import graphopt
from graphopt.errors import GraphBreakError
from graphopt.passes import FitMemory, MixedPrecision
from tests.support.command import Command

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


class OwnError(Exception):
    """The user's: it takes two arguments, so that nobody can make it from a text."""

    def __init__(self, what: str, number: int) -> None:
        super().__init__(what, number)
        self.number = number


class Calls(nn.Module):
    """Computes what it is given, of a layer and a batch."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.words = nn.Linear(4, 4), nn.Embedding(3, 4)
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(self, x)


class RaisesBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        raise OwnError("backward", 1)


def wrong_shape(model: Calls, x: torch.Tensor) -> torch.Tensor:
    return model.layer(x) @ torch.zeros(3, 3)


def wrong_shape_behind_numpy(model: Calls, x: torch.Tensor) -> torch.Tensor:
    return model.layer(x) @ torch.from_numpy(np.zeros((3, 3), dtype=np.float32))


def wrong_dtype(model: Calls, x: torch.Tensor) -> torch.Tensor:
    return model.layer(x.double())


def missing_argument(model: Calls, x: torch.Tensor) -> torch.Tensor:
    return model.layer()  # type: ignore[no-any-return]


def unknown_keyword(model: Calls, x: torch.Tensor) -> torch.Tensor:
    return F.gelu(model.layer(x), approx="tanh")  # type: ignore[call-arg]


def own_error(model: Calls, x: torch.Tensor) -> torch.Tensor:
    raise OwnError("forward", model.layer.in_features)


def chained_error(model: Calls, x: torch.Tensor) -> torch.Tensor:
    try:
        return model.layer({}["nothing"])  # type: ignore[no-any-return]
    except KeyError as error:
        raise OwnError("chained", 2) from error


def assertion(model: Calls, x: torch.Tensor) -> torch.Tensor:
    assert x.shape[1] == 5, "five are wanted"
    return model.layer(x)  # type: ignore[no-any-return]


def missing_key(model: Calls, batch: Any) -> torch.Tensor:
    return model.layer(batch["missing"])  # type: ignore[no-any-return]


def other_device(model: Calls, x: torch.Tensor) -> torch.Tensor:
    return model.layer(x) + torch.zeros(4, device="meta")


def in_training_only(model: Calls, x: torch.Tensor) -> torch.Tensor:
    if model.training:
        raise OwnError("training", 3)
    return model.layer(x)  # type: ignore[no-any-return]


def under_autocast(model: Calls, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model.layer(x)
    return y.view(torch.float32).mm(torch.ones(3, 3)) if y.dtype is torch.bfloat16 else y


def leaf_in_place(model: Calls, x: torch.Tensor) -> torch.Tensor:
    model.layer.weight.add_(1)
    return model.layer(x)  # type: ignore[no-any-return]


def in_backward(model: Calls, x: torch.Tensor) -> torch.Tensor:
    return RaisesBackward.apply(model.layer(x))  # type: ignore[no-any-return]


def overwritten_for_backward(model: Calls, x: torch.Tensor) -> torch.Tensor:
    y = model.layer(x).exp()
    y.add_(1)
    return y  # type: ignore[no-any-return]


def behind_a_gradient(model: Calls, x: torch.Tensor) -> torch.Tensor:
    y = model.layer(x)
    (grad,) = torch.autograd.grad(y.sum(), model.layer.weight, create_graph=True)
    raise OwnError("gradient", len(grad))


def behind_a_transform(model: Calls, x: torch.Tensor) -> torch.Tensor:
    torch.func.grad(lambda z: z.tanh().sum())(x)
    raise OwnError("transform", 4)


def value_and_shape(model: Calls, x: torch.Tensor) -> torch.Tensor:
    y = model.layer(x)
    return y @ torch.zeros(3, 3) if y.sum() < 1e9 else y


CASES: dict[str, tuple[Callable[..., Any], Any]] = {
    "wrong shape": (wrong_shape, X),
    "wrong shape behind numpy": (wrong_shape_behind_numpy, X),
    "missing argument": (missing_argument, X),
    "unknown keyword": (unknown_keyword, X),
    "own error": (own_error, X),
    "chained error": (chained_error, X),
    "assertion": (assertion, X),
    "missing key": (missing_key, {"x": X}),
    "other device": (other_device, X),
    "in training only": (in_training_only, X),
    "under autocast": (under_autocast, X),
    "leaf in place": (leaf_in_place, X),
    "in backward": (in_backward, X),
    "overwritten for backward": (overwritten_for_backward, X),
    "behind a gradient": (behind_a_gradient, X),
    "behind a transform": (behind_a_transform, X),
    "a value and a shape": (value_and_shape, X),
}
ONLY_RUN: dict[str, tuple[Callable[..., Any], Any]] = {
    "wrong dtype": (wrong_dtype, X),
    "index out of range": (lambda model, x: model.words(x), torch.tensor([1, 7])),
}
"""What a trace without values takes, and the run of its program does not."""


def total(model: nn.Module, x: Any) -> torch.Tensor:
    return model(x).sum()  # type: ignore[no-any-return]


def step_of(model: nn.Module, loss: Callable[..., Any] = total) -> graphopt.TrainStep:
    return graphopt.optimize_step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss)


RUNNING: dict[str, Callable[[nn.Module, Any], Any]] = {
    "optimize": lambda model, x: graphopt.optimize(model)(x).sum().backward(),
    "optimize_step": lambda model, x: step_of(model)(x),
}
PREPARING: dict[str, Callable[[nn.Module, Any], Any]] = {
    "example_inputs": lambda model, x: graphopt.optimize(model, example_inputs=(x,)),
    "prepare": lambda model, x: step_of(model).prepare(x),
    "capture": lambda model, x: graphopt.capture(model, (x,)),
    "capture of a loss": lambda model, x: graphopt.capture(model, (x,), loss=total),
}


def raised_by(run: Callable[[], Any]) -> BaseException:
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        run()
    return caught.value


def users_lines(error: BaseException) -> list[str | None]:
    """The user's own lines that an error comes through, the innermost last."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == __file__]
    return [frame.line for frame in frames if not frame.name.startswith(("<", "raised_by", "assert_", "test_"))]


def assert_like_eager(door: Callable[[nn.Module, Any], Any], function: Callable[..., Any], x: Any) -> None:
    eager = raised_by(lambda: Calls(function)(x).sum().backward())
    mine = raised_by(lambda: door(Calls(function), x))
    assert type(mine) is type(eager)
    assert mine.args == eager.args
    assert users_lines(mine)[-1:] == users_lines(eager)[-1:]
    assert type(mine.__cause__) is type(eager.__cause__)
    assert mine.__context__ is mine.__cause__, "no other error is shown above it"


@pytest.mark.parametrize(("function", "x"), (CASES | ONLY_RUN).values(), ids=CASES | ONLY_RUN)
@pytest.mark.parametrize("door", RUNNING.values(), ids=RUNNING)
def test_the_error_of_eager_mode_is_raised(
    door: Callable[..., Any], function: Callable[..., Any], x: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    assert_like_eager(door, function, x)
    assert "torch" not in capfd.readouterr().err.replace("torch/csrc", "")


PREPARED = [
    pytest.param(door, *CASES[case], id=f"{name}-{case}")
    for name, door in PREPARING.items()
    for case in CASES
    if (name, case) != ("example_inputs", "a value and a shape")  # whose parts are captured at the first call
]


@pytest.mark.parametrize(("door", "function", "x"), PREPARED)
def test_and_so_it_is_where_a_call_is_prepared(
    door: Callable[..., Any], function: Callable[..., Any], x: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    assert_like_eager(door, function, x)
    assert capfd.readouterr().err == ""


def with_hook(model: Calls) -> Calls:
    def hook(*_: Any) -> None:
        raise OwnError("hook", 5)

    model.layer.register_forward_hook(hook)
    return model


def plain(model: Calls, x: torch.Tensor) -> torch.Tensor:
    return model.layer(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("door", (RUNNING | PREPARING).values(), ids=RUNNING | PREPARING)
def test_a_hook_of_a_layer_raises(door: Callable[[nn.Module, Any], Any]) -> None:
    with pytest.raises(OwnError) as caught:
        door(with_hook(Calls(plain)), X)
    assert (caught.value.args, caught.value.number) == (("hook", 5), 5)


@pytest.mark.parametrize("prepare", [False, True], ids=["call", "prepare"])
def test_a_loss_raises(prepare: bool) -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (model(x) - torch.zeros(2, 5)).sum()

    step = step_of(Calls(plain), loss)
    with pytest.raises(
        RuntimeError, match=r"^The size of tensor a \(4\) must match the size of tensor b \(5\)"
    ) as caught:
        step.prepare(X) if prepare else step(X)
    assert users_lines(caught.value)[-1] == "return (model(x) - torch.zeros(2, 5)).sum()"


def mixed(model: Calls, x: torch.Tensor) -> torch.Tensor:
    return model.layer(x).view(torch.int32).view(torch.float32)[:, :4].reshape(2, 4)  # twice as many under autocast


def test_what_fails_under_the_autocast_of_a_pass_only() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        eager = raised_by(lambda: Calls(mixed)(X))
    mine = raised_by(lambda: graphopt.optimize(Calls(mixed), MixedPrecision())(X))
    assert (type(mine), mine.args) == (type(eager), eager.args)


@pytest.mark.parametrize("passes", [[], [FitMemory("100%")]], ids=["plain", "fit"])
def test_an_error_that_depends_on_values_is_the_users_own(passes: Any) -> None:
    model = graphopt.optimize(Calls(guarded), passes)
    model(X)
    with pytest.raises(OwnError) as caught:
        model(X + 1e6)
    assert (caught.value.args, caught.value.__context__) == (("too large", 6), None)
    assert torch.equal(model(X), Calls(guarded)(X))


def guarded(model: Calls, x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 1e5:
        raise OwnError("too large", 6)
    return model.layer(x)  # type: ignore[no-any-return]


# --- what is left behind ---------------------------------------------------------------------------------------------


class Traces(nn.Module):
    """Leaves traces of many kinds, and fails, or takes a way that no program has."""

    seen: list[int] = []  # noqa: RUF012

    def __init__(self, fails: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm, self.dropout = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))
        self.count, self.kept, self.fails = 0, {"sizes": [0]}, fails

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.calls += 1
        self.kept["sizes"].append(len(x))
        Traces.seen.append(1)
        with torch.no_grad():
            self.layer.weight.mul_(0.5)
        y = self.dropout(self.norm(self.layer(x)))
        self.norm.eval()
        if self.fails:
            raise OwnError("traces", 7)
        return y * float(np.linalg.norm(self.layer.bias.detach().numpy()))


def state_of(model: Traces) -> list[Any]:
    grad = model.layer.weight.grad
    tensors = [*model.state_dict().values(), *([] if grad is None else [grad]), torch.get_rng_state()]
    flags = [module.training for module in model.modules()]
    own = [model.count, dict(model.kept), list(Traces.seen), random.getstate(), np.random.get_state()[1].tolist()]
    return [copy.deepcopy(tensors), flags, copy.deepcopy(own)]


def same(one: list[Any], other: list[Any]) -> bool:
    return all(map(torch.equal, one[0], other[0])) and one[1:] == other[1:]


@pytest.mark.parametrize("fails", [True, False], ids=["fails", "no program"])
@pytest.mark.parametrize("door", [PREPARING["prepare"], PREPARING["capture"]], ids=["prepare", "capture"])
def test_what_is_prepared_leaves_nothing(door: Callable[[nn.Module, Any], Any], fails: bool) -> None:
    model = Traces(fails)
    model.layer.weight.grad = torch.ones(4, 4)
    before = state_of(model)
    error = raised_by(lambda: door(model, X))
    assert isinstance(error, OwnError if fails else GraphBreakError)
    assert same(state_of(model), before)


@pytest.mark.parametrize("door", RUNNING.values(), ids=RUNNING)
def test_a_call_that_fails_leaves_what_it_leaves_in_eager_mode(door: Callable[[nn.Module, Any], Any]) -> None:
    left = []
    for run in (lambda model, x: model(x), door):
        model = Traces(True)
        Traces.seen.clear()
        torch.manual_seed(1)
        assert raised_by(lambda run=run, model=model: run(model, X)).args == ("traces", 7)  # type: ignore[misc]
        left.append(state_of(model))
    assert same(*left)


def test_a_backward_that_fails_leaves_the_gradients_that_eager_mode_leaves() -> None:
    gradients = []
    for make in (lambda model: model, graphopt.optimize):
        model = nn.Sequential(Calls(in_backward), Calls(plain))
        result = make(model)(X).sum()
        with pytest.raises(OwnError, match="backward"):
            result.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert [grad is None for grad in gradients[0]] == [grad is None for grad in gradients[1]]
    assert any(grad is not None for grad in gradients[0])
    for eager, mine in zip(*gradients, strict=True):
        assert eager is None or torch.equal(eager, mine)


# --- what is said ----------------------------------------------------------------------------------------------------


def with_numpy(model: Calls, x: torch.Tensor) -> torch.Tensor:
    return model.layer(x) * float(model.layer.bias.detach().numpy().sum())  # type: ignore[no-any-return]


def test_numpy_is_spoken_of_where_it_is_used_only() -> None:
    with pytest.raises(GraphBreakError, match="keep NumPy"):
        graphopt.capture(Calls(with_numpy), (X,))
    with pytest.raises(GraphBreakError, match="reduction dim") as caught:
        graphopt.capture(Calls(wrong_shape), (X,), device="h100-80gb")
    assert "NumPy" not in str(caught.value)


def test_loggers_of_torch_are_as_they_were(capfd: pytest.CaptureFixture[str]) -> None:
    names = ("torch._subclasses.fake_tensor", "torch._dynamo.convert_frame", "torch.fx.experimental.symbolic_shapes")
    loggers = [logging.getLogger(name) for name in names]
    before = [(logger.disabled, logger.level, list(logger.filters)) for logger in loggers]
    for door in RUNNING.values():
        raised_by(lambda door=door: door(Calls(value_and_shape), X))  # type: ignore[misc]
    assert [(logger.disabled, logger.level, list(logger.filters)) for logger in loggers] == before
    assert capfd.readouterr().err == ""


def test_another_size_that_fails_is_no_size_that_cannot_vary(caplog: pytest.LogCaptureFixture) -> None:
    model = graphopt.optimize(Calls(plain))
    for rows in (2, 3):
        model(torch.randn(rows, 4))
    caplog.clear()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.randn(2, 5))
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


TARGET = """
import torch
from torch import nn

class OwnError(Exception):
    pass

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        if {fails}:
            raise OwnError("too " + "long")
        return self.layer(x) @ torch.zeros(3, 3)

def build():
    return Net(), (torch.randn(2, 4),)
"""


@pytest.mark.parametrize(
    ("fails", "said"),
    [
        (False, "calling Net raises RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x4 and 3x3)"),
        (True, "calling Net raises OwnError: too long"),
    ],
)
def test_the_command_line_says_it_in_two_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fails: bool, said: str
) -> None:
    file = tmp_path / f"net_{fails}.py"
    file.write_text(TARGET.format(fails=fails), encoding="utf-8")
    outcome = Command(capsys)("memory", f"{file}:build")
    assert (outcome.code, outcome.out) == (1, "")
    first, second = outcome.err.strip().splitlines()
    assert first == f"graphopt: error: {said}"
    assert second.startswith(f"  where: {file}:")
