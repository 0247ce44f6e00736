"""What goes into and comes out of a model: DeepSpeed's tested shapes, drop-in and whole step, plain and recomputed."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import graphopt
from graphopt import Pass
from graphopt.passes import Recompute
from tests.support.covering import covering
from tests.support.training import assert_same_training, copied

PASSES: dict[str, list[Pass]] = {"plain": [], "recompute": [Recompute(["first", "second"])]}
with_and_without = pytest.mark.parametrize("passes", list(PASSES.values()), ids=list(PASSES))

Pair = namedtuple("Pair", ["hidden", "mask"])


@dataclasses.dataclass
class Result:
    hidden: torch.Tensor
    extra: Any = None


class Layers(nn.Module):
    """Two layers with a dropout; ``then(hidden, x, *args, **kwargs)`` makes the result of it and the arguments."""

    def __init__(self, then: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.then = then

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        hidden = torch.tanh(self.second(F.dropout(torch.tanh(self.first(x)), 0.3, self.training)))
        return self.then(self.last(hidden).tanh(), x, *args, **kwargs)


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if dataclasses.is_dataclass(value):
        return tensors([getattr(value, field.name) for field in dataclasses.fields(value)])
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for item in items for tensor in tensors(item)]


def outline(value: Any) -> Any:
    """The structure and everything in it that is no tensor."""
    if isinstance(value, torch.Tensor):
        return "tensor", value.dtype, value.shape, value.requires_grad
    if dataclasses.is_dataclass(value):
        return type(value), {field.name: outline(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return type(value), [(key, outline(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [outline(item) for item in value]
    return type(value), value


def differentiable_sum(value: Any) -> torch.Tensor:
    parts = [tensor.square().sum() for tensor in tensors(value) if tensor.requires_grad]
    return torch.stack(parts).sum()


def run(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Any]]:
    torch.manual_seed(5)
    inputs = copied(args)
    result = model(*inputs, **kwargs)
    differentiable_sum(result).backward()
    gradients = [p.grad for p in model.parameters()] + [t.grad for t in tensors(inputs)]
    return result, [*tensors(result), *gradients, torch.get_rng_state()]


def assert_drop_in_is_eager(then: Callable[..., Any], passes: list[Pass], *args: Any, **kwargs: Any) -> None:
    """Structure, every number and every gradient, of two calls in a row."""
    torch.manual_seed(0)
    model = Layers(then)
    optimized = graphopt.optimize(copy.deepcopy(model), passes)
    for _ in range(2):
        model.zero_grad(), optimized.zero_grad()
        expected, numbers = run(model, args, kwargs)
        found, others = run(optimized, args, kwargs)
        assert outline(found) == outline(expected)
        for one, other in zip(numbers, others, strict=True):
            assert (one is None and other is None) or torch.equal(one, other)


def total(model: nn.Module, *args: Any) -> torch.Tensor:
    return differentiable_sum(model(*args))


X = torch.linspace(-1, 1, 12).reshape(3, 4)
MASKS = {"bool": X > 0, "float": (X > 0).float(), "float with gradient": X.cos().requires_grad_()}


@pytest.mark.sweep(but=("False-plain",))
@covering(needs_grad=[False, True], passes=PASSES)
def test_one_in_one_out(needs_grad: bool, passes: list[Pass]) -> None:
    x = X.clone().requires_grad_(needs_grad)
    assert_drop_in_is_eager(lambda h, _: h, passes, x)
    assert_same_training(Layers(lambda h, _: h), "sgd", total, [(x,)], passes, steps=2)


OF_TWO: dict[str, Callable[..., Any]] = {
    "one out": lambda h, x, m: h * m,
    "two out": lambda h, x, m: (h, m * 1),
    "three out": lambda h, x, m: (h * 2, x + h, m * 2),
    "three out, other order": lambda h, x, m: (x * m, h * m, h.sum(-1)),
}


@pytest.mark.sweep(but=("three out, other order-bool-recompute",))
@covering(then=OF_TWO, mask=MASKS, passes=PASSES)
def test_two_in(then: Callable[..., Any], mask: torch.Tensor, passes: list[Pass]) -> None:
    assert_drop_in_is_eager(then, passes, X, mask)


@pytest.mark.sweep
@covering(mask=MASKS, passes=PASSES)
def test_two_in_as_whole_steps(mask: torch.Tensor, passes: list[Pass]) -> None:
    model = Layers(lambda h, x, m: (h * m, x + h))
    assert_same_training(model, "momentum", total, [(X, mask)], passes, steps=2)


@pytest.mark.sweep(but=("plain",))
@with_and_without
def test_one_tensor_given_twice(passes: list[Pass]) -> None:
    """A later call with two different tensors is not answered by the program for one."""
    model = Layers(lambda h, x, y: h * y)
    optimized = graphopt.optimize(copy.deepcopy(model), passes)
    a, b = X.clone().requires_grad_(), X.sin().requires_grad_()
    for pair in ((a, a), (a, b), (b, a), (b, b)):
        found = []
        for candidate in (model, optimized):
            a.grad = b.grad = None
            torch.manual_seed(4)
            result = candidate(*pair)
            result.sum().backward()
            found.append((result, *(tensor.grad for tensor in pair)))
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.sweep
@covering(first_is_none=[False, True], passes=PASSES)
def test_none_as_an_argument(first_is_none: bool, passes: list[Pass]) -> None:
    def then(h: torch.Tensor, x: torch.Tensor, a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor:
        return h * (1 if a is None else a) + (0 if b is None else b)

    arguments = (None, X) if first_is_none else (X, None)
    assert_drop_in_is_eager(then, passes, X, *arguments)
    assert_same_training(Layers(then), "sgd", total, [(X, *arguments)], passes, steps=2)


NOT_TENSORS = {
    "none": None,
    "int": 2,
    "bool": True,
    "none and float": (None, 2.5),
    "none, bool and tensor": (None, True, torch.full((3, 4), 0.5)),
    "text": "text",
    "nested": [1, {"a": 2}],
}


def scale(value: Any) -> float:
    """A number that depends on what was passed."""
    if isinstance(value, (list, tuple)):
        return 1 + sum(scale(item) for item in value)
    return {type(None): 0.5, bool: 0.25, int: 2.0, float: 2.5, str: 3.0}.get(type(value), 1.0)


@pytest.mark.sweep(but=("none and float-recompute",))
@covering(extra=NOT_TENSORS, passes=PASSES)
def test_inputs_that_are_not_tensors(extra: Any, passes: list[Pass]) -> None:
    def then(h: torch.Tensor, x: torch.Tensor, given: Any) -> torch.Tensor:
        for tensor in tensors(given):
            h = h * tensor
        return h * scale(given)

    assert_drop_in_is_eager(then, passes, X, extra)
    assert_same_training(Layers(then), "sgd", total, [(X, extra)], passes, steps=2)


@pytest.mark.sweep
@with_and_without
def test_another_number_is_another_program(passes: list[Pass]) -> None:
    model = Layers(lambda h, x, factor: h * factor)
    optimized = graphopt.optimize(model, passes)
    for factor in (2, 3, 2.0, True, 2):
        torch.manual_seed(1)
        found = optimized(X, factor)
        torch.manual_seed(1)
        assert torch.equal(found, model(X, factor))


@pytest.mark.sweep(but=("bool-plain",))
@covering(extra=NOT_TENSORS, passes=PASSES)
def test_outputs_that_are_not_tensors(extra: Any, passes: list[Pass]) -> None:
    assert_drop_in_is_eager(lambda h, x: (h, extra), passes, X)


OUTPUTS: dict[str, Callable[..., Any]] = {
    "tensor, float": lambda h, x: (h, 2.5),
    "none, tensor, bool": lambda h, x: (None, h, True),
    "none, bool, tensor": lambda h, x: (None, True, h),
    "list": lambda h, x: [h, None, [x + h], ()],
    "dict": lambda h, x: {"b": h, "a": None, "c": [x * h, 3]},
    "ordered dict": lambda h, x: OrderedDict(z=h, a=h.sum()),
    "named tuple": lambda h, x: Pair(h, x > 0),
    "dataclass": lambda h, x: Result(h),
    "nested dataclasses": lambda h, x: Result(h, {"inner": Result(x * h, 7)}),
    "one tensor twice": lambda h, x: (h, h),
    "views": lambda h, x: (h, h.detach(), h[0], h.view(-1)),
    "an input": lambda h, x: (h, x),
    "integers": lambda h, x: (h, h > 0, h.argmax(-1)),
}


@pytest.mark.sweep(but=("list-recompute",))
@covering(then=OUTPUTS, passes=PASSES)
def test_outputs_of_every_order_and_kind(then: Callable[..., Any], passes: list[Pass]) -> None:
    assert_drop_in_is_eager(then, passes, X)


@pytest.mark.sweep(but=("plain",))
@with_and_without
def test_keyword_arguments(passes: list[Pass]) -> None:
    def then(h: torch.Tensor, x: torch.Tensor, *, mask: torch.Tensor, factor: float = 1, flag: bool = False) -> Any:
        return {"scaled": h * mask * factor, "flag": flag}

    assert_drop_in_is_eager(then, passes, X, mask=X > 0)
    assert_drop_in_is_eager(then, passes, X, flag=True, factor=2.5, mask=X.exp())


@pytest.mark.sweep
@with_and_without
def test_keyword_arguments_of_whole_steps(passes: list[Pass]) -> None:
    model = Layers(lambda h, x, *, mask, factor: h * mask * factor)
    losses = []
    for optimized in (False, True):
        candidate = copy.deepcopy(model)
        optimizer = torch.optim.SGD(candidate.parameters(), lr=0.1, fused=True)
        torch.manual_seed(2)

        def loss(model: nn.Module, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            return model(x, **kwargs).square().mean()

        step = graphopt.optimize_step(candidate, optimizer, passes, loss=loss)
        for _ in range(3):
            if optimized:
                losses.append(step(X, mask=X > 0, factor=3))
            else:
                optimizer.zero_grad()
                value = loss(candidate, X, mask=X > 0, factor=3)
                value.backward()
                optimizer.step()
                losses.append(value.detach())
    assert all(torch.equal(losses[i], losses[i + 3]) for i in range(3))


@pytest.mark.sweep(cases=("plain",))
@with_and_without
def test_nested_arguments(passes: list[Pass]) -> None:
    def then(h: torch.Tensor, x: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
        (first, number), second = batch["pair"], batch["more"].hidden
        return h * first * number + second

    batch = {"pair": [X.sin(), 2], "more": Result(X.cos())}
    assert_drop_in_is_eager(then, passes, X, batch)


@with_and_without
def test_eval_and_no_grad_run_the_plain_forward(passes: list[Pass]) -> None:
    model = Layers(lambda h, x: (h, 2))
    optimized = graphopt.optimize(model, passes)
    with torch.no_grad():
        torch.manual_seed(1)
        found = optimized(X)[0]
        torch.manual_seed(1)
        assert torch.equal(found, model(X)[0])
    with pytest.raises(graphopt.GraphoptError, match="nothing is captured yet"):
        _ = optimized.program
    optimized.eval()
    assert torch.equal(optimized(X)[0], optimized(X)[0])
    with pytest.raises(graphopt.GraphoptError, match="nothing is captured yet"):
        _ = optimized.program
