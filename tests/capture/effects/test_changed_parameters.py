"""Parameters that forward changes behind autograd's back: eager mode's values and gradients, or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import graphopt
from graphopt.errors import CaptureError
from graphopt.passes import FitMemory, FuseUpdate, Recompute
from tests.support.covering import covering
from tests.support.properties import examples
from tests.support.training import mean_square

X = torch.linspace(-1, 1, 48).reshape(8, 6)
TOKENS = torch.arange(192).reshape(64, 3) % 7


class Changes(nn.Module):
    """Changes a weight, and uses it then."""

    def __init__(self, *changes: Callable[[nn.Parameter], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.weight, self.changes = nn.Linear(6, 6), nn.Parameter(torch.randn(6, 4) * 2), changes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x).tanh()
        for change in self.changes:
            change(self.weight)
        return (y @ self.weight) * self.weight.sum()


class Codebook(nn.Module):
    """Of a quantizing autoencoder: moved by what it stands for, and by no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encode, self.codes, self.decode = nn.Linear(6, 6), nn.Embedding(5, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.encode(x)
        place = torch.cdist(z.detach(), self.codes.weight.detach()).argmin(1)
        code = self.codes(place).detach()
        chosen = F.one_hot(place, 5).float()
        self.codes.weight.data.lerp_((chosen.t() @ z.detach()) / (chosen.sum(0)[:, None] + 1), 0.1)
        result: torch.Tensor = self.decode(z + (code - z).detach())
        return result


CHANGES: dict[str, Callable[[nn.Parameter], Any]] = {
    "clamp": lambda w: w.data.clamp_(-1, 1),
    "detach": lambda w: w.detach().div_(w.detach().norm()),
    "row": lambda w: w.data[0].mul_(0.5),
    "copy": lambda w: w.data.copy_(w.data.sign()),
    "rows": lambda w: w.data.div_(w.data.norm(dim=0, keepdim=True)),
}
MODELS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
    **{name: (lambda change=change: Changes(change), X) for name, change in CHANGES.items()},
    "two": (lambda: Changes(CHANGES["clamp"], CHANGES["rows"]), X),
    "no_grad": (lambda: Changes(torch.no_grad()(lambda w: w.clamp_(-1, 1))), X),
    "max_norm": (
        lambda: nn.Sequential(nn.Embedding(7, 6, max_norm=0.5), nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 4)),
        TOKENS,
    ),
    "codebook": (Codebook, X),
}
PASSES: dict[str, list[Any]] = {
    "none": [],
    "recompute": [Recompute("auto")],
    "fit": [FitMemory("95%", cost="roofline")],
    "fuse": [FuseUpdate()],
}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """One that changes a parameter whose gradient is zero, and leaves one alone that has none."""
    return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5, fused=True)


def trained(model: nn.Module, x: torch.Tensor, call: Any) -> list[torch.Tensor]:
    optimizer, losses = optimizer_of(model), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = mean_square(call, x)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *model.parameters()]


@pytest.mark.sweep
@covering(kind=MODELS, passes=PASSES, whole=[False, True])
def test_training_is_eagers(kind: tuple[Callable[[], nn.Module], torch.Tensor], passes: list[Any], whole: bool) -> None:
    make, x = kind
    torch.manual_seed(0)
    model = make()
    expected = trained(plain := copy.deepcopy(model), x, plain)
    passes = copy.deepcopy(passes)
    if not whole:
        kept = [current for current in passes if current.stage != "step"]
        found = trained(model, x, graphopt.optimize(model, kept))
    else:
        step = graphopt.optimize_step(model, optimizer_of(model), passes, loss=mean_square)
        found = [*[step(x) for _ in range(3)], *model.parameters()]
        predicted = step.program.memory().allocated_peak_bytes
        assert graphopt.measure_peak(lambda: step(x)).allocated_peak_bytes == predicted
        found, expected = found[:3], expected[:3]
    assert all(map(torch.equal, found, expected))


def test_what_has_no_gradient_in_eager_mode_has_none() -> None:
    model = Codebook()
    graphopt.optimize(model)(X).square().mean().backward()
    assert model.codes.weight.grad is None
    assert model.encode.weight.grad is not None


@given(names=st.lists(st.sampled_from(sorted(CHANGES)), min_size=1, max_size=4), whole=st.booleans())
@examples(5)
def test_any_changes_one_after_the_other(names: list[str], whole: bool) -> None:
    model = Changes(*map(CHANGES.__getitem__, names))
    expected = trained(plain := copy.deepcopy(model), X, plain)
    if whole:
        step = graphopt.optimize_step(model, optimizer_of(model), loss=mean_square)
        found = [*[step(X) for _ in range(3)], *model.parameters()]
    else:
        found = trained(model, X, graphopt.optimize(model))
    assert all(map(torch.equal, found, expected))


class ChangesLate(Changes):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x) @ self.weight
        self.changes[0](self.weight)
        return y + self.weight.sum()


@pytest.mark.parametrize("whole", [False, True])
def test_a_change_behind_a_use_fails_where_eager_mode_does(whole: bool) -> None:
    model = ChangesLate(CHANGES["detach"])
    call: Any = graphopt.optimize_step(model, optimizer_of(model), loss=mean_square) if whole else model
    with pytest.raises(RuntimeError, match=r"^one of the variables needed for gradient computation has been modified"):
        call(X) if whole else graphopt.optimize(model)(X).sum().backward()


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("kind", ["clamp", "row"])
def test_a_change_behind_a_use_is_refused(kind: str, whole: bool) -> None:
    model = ChangesLate(CHANGES[kind])
    call: Any = graphopt.optimize_step(model, optimizer_of(model), loss=mean_square) if whole else model
    with pytest.raises(CaptureError, match=r"modified by an inplace operation(.|\n)*before its first use in forward"):
        (call if whole else graphopt.optimize(model))(X)
