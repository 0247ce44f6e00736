"""A backward that raises in the middle: what it leaves, and that a note on the error says so."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import graphopt
from graphopt.passes import FuseUpdate

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


class OwnError(Exception):
    """The user's."""


_raises: list[type[BaseException]] = []
"""What the op raises, once."""


@torch.library.custom_op("graphopt_tests::fails_on_demand", mutates_args=())
def fails_on_demand(x: torch.Tensor) -> torch.Tensor:
    if _raises:
        raise _raises.pop()("on demand")
    return x.clone()


@fails_on_demand.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("graphopt_tests::fails_in_backward", mutates_args=())
def fails_in_backward(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@fails_in_backward.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


fails_in_backward.register_autograd(lambda _context, grad: fails_on_demand(grad))


class Middle(nn.Module):
    """Its backward may fail between its last and its first layer."""

    def __init__(self, branches: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.branches = nn.Linear(4, 4), nn.Linear(4, 4), branches

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = fails_in_backward(self.first(x).tanh())
        if self.branches and y.sum() > 1e9:
            return y
        return self.last(y)  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    yield
    _raises.clear()


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value is other[name]
        for name, value in one.items()
    )


def compiled(model: nn.Module) -> Callable[..., Any]:
    return torch.compile(model, backend="graphopt")  # type: ignore[no-any-return]


DOORS: dict[str, tuple[bool, Callable[[nn.Module], Callable[..., Any]]]] = {
    "drop-in": (False, graphopt.optimize),
    "torch.compile": (False, compiled),
}


@pytest.mark.parametrize("raised", [OwnError, KeyboardInterrupt])
@pytest.mark.parametrize(("branches", "door"), DOORS.values(), ids=DOORS)
def test_no_gradient_of_the_program_is_added_and_the_error_says_so(
    branches: bool, door: Callable[[nn.Module], Callable[..., Any]], raised: type[BaseException]
) -> None:
    model = Middle(branches)
    call = door(model)
    call(X).sum().backward()
    before, same_objects = gradients(model), [parameter.grad for parameter in model.parameters()]
    result = call(X).sum()
    _raises.append(raised)
    with pytest.raises(raised) as caught:
        result.backward()
    assert caught.value.args == ("on demand",)
    (note,) = caught.value.__notes__
    assert note.startswith("of the gradients that this backward of Middle computes, none has been added")
    assert same(gradients(model), before)
    assert all(parameter.grad is kept for parameter, kept in zip(model.parameters(), same_objects, strict=True))
    call(X).sum().backward()
    assert all(torch.equal(p.grad, 2 * before[name]) for name, p in model.named_parameters())  # type: ignore[operator,arg-type]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_parts_that_have_run_backward_before_have_added_theirs() -> None:
    model = Middle(branches=True)
    eager = copy.deepcopy(model)
    optimized = graphopt.optimize(model)
    for call, _ in ((eager, None), (optimized, None)):
        result = call(X).sum()
        _raises.append(OwnError)
        with pytest.raises(OwnError) as caught:
            result.backward()
    assert len(optimized.programs) == 2  # type: ignore[attr-defined]
    assert "this backward of Middle computes, none has been added" in caught.value.__notes__[0]
    assert same(gradients(model), gradients(eager))
    assert model.first.weight.grad is None
    assert model.last.weight.grad is not None


@pytest.mark.parametrize("passes", [[], [FuseUpdate()]], ids=["plain", "early updates"])
def test_a_whole_step_says_what_it_has_changed(passes: list[Any]) -> None:
    model = Middle()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step = graphopt.optimize_step(model, optimizer, passes, loss=lambda model, x: model(x).sum())
    for _ in range(2):
        step(X)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
    _raises.append(OwnError)
    with pytest.raises(OwnError) as caught:
        step(X)
    (note,) = caught.value.__notes__
    kept = [torch.equal(value, before[0][name]) for name, value in model.state_dict().items()]
    kept += [
        torch.equal(value, before[1][number][name])
        for number, values in optimizer.state_dict()["state"].items()
        for name, value in values.items()
    ]
    if passes:
        assert note.startswith("the update of this step had begun, so that parameters")
        assert not all(kept)
    else:
        assert note.startswith("the update of this step had not begun: it has changed no parameter")
        assert all(kept)


def test_an_accumulation_that_fails_in_the_middle_is_to_be_begun_anew() -> None:
    model = Middle()
    step = graphopt.optimize_step(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss=lambda model, x: model(x).sum()
    )
    step.accumulate(3)
    step(X)
    _raises.append(OwnError)
    with pytest.raises(OwnError) as caught:
        step(X)
    assert "begin the accumulation anew" in caught.value.__notes__[0]


def test_a_hook_of_a_parameter_that_raises_is_the_users_own() -> None:
    model = Middle()
    optimized = graphopt.optimize(model)

    def fail(_: torch.Tensor) -> None:
        raise OwnError("hook")

    model.first.weight.register_hook(fail)
    with pytest.raises(OwnError, match="hook") as caught:
        optimized(X).sum().backward()
    assert not getattr(caught.value, "__notes__", [])
    assert model.first.weight.grad is None


@pytest.mark.filterwarnings("error:The .grad attribute of a Tensor that is not a leaf")
def test_code_that_dynamo_fails_to_read_is_told_in_one_line(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Here a warning of Dynamo's own code, which looks at what a custom op returns, is an error."""
    graphopt.optimize(Middle(branches=True))(X).sum().backward()
    (told,) = [record.getMessage() for record in caplog.records if "Dynamo cannot read it" in record.getMessage()]
    assert told.startswith("torch_dynamo_resume_in_forward_at_")
    assert f"{__file__} line " in told
    assert "\n" not in told
    assert "torch/_dynamo" not in capfd.readouterr().err
