"""Custom autograd functions are differentiated by their own backward, however the model calls them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import graphopt
from graphopt.passes import Recompute

X = torch.linspace(-1, 1, 8).reshape(2, 4)


class Through(torch.autograd.Function):
    """A gradient that is not the derivative."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
        return (x * 4).round() / 4 * factor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * 3, None


class Child(Through):
    """Has its forward from another one."""

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * 11, None


class Same(torch.autograd.Function):
    """Returns its argument."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 5


class Square(torch.autograd.Function):
    """Its state is set up apart."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.saved_tensors[0] * 7


class Doubled(torch.autograd.Function):
    """Changes its argument."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x.mul_(2))
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2.5


class Two(torch.autograd.Function):
    """Two results, one of them without a gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        positive = x > 0
        ctx.mark_non_differentiable(positive)
        ctx.save_for_backward(x)
        return x.sin(), positive

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: None) -> torch.Tensor:
        return gradient * ctx.saved_tensors[0]


class Around(torch.autograd.Function):
    """Its forward applies another one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = through(x) + 1
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 0.5


through, child, same, square, doubled, two, around = (
    function.apply for function in (Through, Child, Same, Square, Doubled, Two, Around)
)
"""The methods themselves, as many take them once for a file."""


def gradient_inside(x: torch.Tensor) -> torch.Tensor:
    y = square(x)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y + gradient.square()


CALLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "taken before": through,
    "with a number": lambda x: through(x, 3.0),
    "inherited": lambda x: child(x) + through(x),
    "returns its argument": lambda x: same(x) * x,
    "set up apart": square,
    "by name": lambda x: square(x=x),
    "changes its argument": lambda x: doubled(y := x * 1) + y,
    "two results": lambda x: two(x)[0] * two(x)[1],
    "inside of another": around,
    "one after another": lambda x: Square.apply(through(x)),
    "its forward itself": lambda x: Square.forward(x) + Through.forward(None, x.sin()),
    "a gradient inside": gradient_inside,
}


class Calls(nn.Module):
    """Has a function called on what it computes."""

    def __init__(self, call: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.call = nn.Linear(4, 4), call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self.linear(x)).sin()


@pytest.mark.parametrize("kind", CALLS)
def test_the_gradient_is_that_of_the_function(kind: str) -> None:
    def run(model: nn.Module) -> list[torch.Tensor]:
        found = []
        for _ in range(2):
            loss = model(X).square().mean()
            loss.backward()
            found += [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
        return found

    passes = [Recompute("auto")] if kind in ("taken before", "two results") else []
    expected, found = run(Calls(CALLS[kind])), run(graphopt.optimize(Calls(CALLS[kind]), passes))
    assert all(map(torch.equal, found, expected))


def test_classes_are_as_before_once_a_model_is_captured() -> None:
    before = {cls: dict(vars(cls)) for cls in (Through, Child, Square)}
    graphopt.capture(Calls(through), X)
    assert {cls: dict(vars(cls)) for cls in before} == before
    assert torch.autograd.Function.apply.__qualname__.endswith("apply")
