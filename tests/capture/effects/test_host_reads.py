"""Numbers that Python reads of tensors which are no arguments: a program is for these, and others have their own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import graphopt
from graphopt.capture.effects.tensor_effects import NumbersRead
from tests.support.running import sgd
from tests.support.storing import reasons, step_run, use_programs

X = torch.linspace(-1, 1, 8).view(2, 4)
GLOBAL = torch.tensor(2.0)
READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda t: t.item(),
    "float": lambda t: float(t),
    "int": lambda t: int(t),
    "tolist": lambda t: t.view(1).tolist()[0],
    "index": lambda t: [1.0, 2.0, 3.0, 4.0][t.long()],
    "bool": lambda t: 2.0 if t > 2 else 3.0,
    "range": lambda t: sum(2.0 for _ in range(int(t))),
    "text": lambda t: float(f"{t}"),
    "in": lambda t: 2.0 if 3.0 in t.view(1) else 1.0,
}


class Reads(nn.Module):
    def __init__(self, tensor: torch.Tensor, read: Callable[[torch.Tensor], Any], place: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.read, self.place = nn.Linear(4, 4), read, place
        self.held = {"tensor": tensor}
        self.tensor = tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = {"attribute": self.tensor, "container": self.held["tensor"], "global": GLOBAL}
        return self.linear(x) * self.read(places[self.place])


@pytest.mark.sweep(
    but=(
        "item-attribute",
        "item-container",
        "item-global",
        "float-attribute",
        "int-attribute",
        "tolist-attribute",
        "index-attribute",
        "bool-attribute",
        "range-attribute",
        "text-attribute",
        "in-attribute",
    )
)
@pytest.mark.parametrize("place", ["attribute", "container", "global"])
@pytest.mark.parametrize("way", READS)
def test_a_model_has_the_number_that_is_there_at_the_call(way: str, place: str) -> None:
    tensor = GLOBAL if place == "global" else torch.tensor(2.0)
    model = Reads(tensor, READS[way], place)
    optimized = graphopt.optimize(model)
    try:
        for value in (2.0, 3.0, 2.0):
            tensor.fill_(value)
            assert torch.equal(optimized(X), Reads.forward(model, X)), value
    finally:
        GLOBAL.fill_(2.0)


def test_a_number_that_comes_again_has_its_program() -> None:
    tensor = torch.tensor(2.0)
    optimized: Any = graphopt.optimize(Reads(tensor, READS["item"], "attribute"))
    for value in (2.0, 3.0, 2.0, 3.0, 2.0, float("nan"), float("nan")):
        tensor.fill_(value)
        optimized(X)
    assert len({id(each) for each in optimized._graphopt.runner.captures.all()}) == 3


def test_what_is_written_without_an_op_is_noticed() -> None:
    tensor = torch.tensor(2.0)
    model = Reads(tensor, READS["item"], "attribute")
    optimized = graphopt.optimize(model)
    optimized(X)
    tensor.numpy()[()] = 5.0
    assert torch.equal(optimized(X), Reads.forward(model, X))
    tensor.data.mul_(2)
    assert torch.equal(optimized(X), Reads.forward(model, X))


def test_a_whole_step_reads_them_too() -> None:
    tensor = torch.tensor(2.0)
    losses = []
    for whole in (False, True):
        tensor.fill_(2.0)
        model = Reads(tensor, READS["item"], "attribute")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step: Any = graphopt.optimize_step(model, optimizer, loss=_loss) if whole else None
        for value in (2.0, 3.0, 2.0):
            tensor.fill_(value)
            if step is None:
                optimizer.zero_grad()
                loss = _loss(model, X)
                loss.backward()
                optimizer.step()
            else:
                loss = step(X)
            losses.append(loss.item())
    assert losses[:3] == losses[3:]


def _loss(model: nn.Module, x: torch.Tensor) -> Any:
    return model(x).square().mean()


def test_numbers_that_keep_changing_are_told_with_the_line(caplog: pytest.LogCaptureFixture) -> None:
    tensor = torch.tensor(2.0)
    optimized = graphopt.optimize(Reads(tensor, READS["item"], "attribute"))
    with caplog.at_level(logging.WARNING, "graphopt"):
        for value in (2.0, 3.0, 4.0):
            tensor.fill_(value)
            optimized(X)
    told = [record.getMessage() for record in caplog.records if "the number that is read at" in record.getMessage()]
    assert len(told) == 1
    assert "test_host_reads.py" in told[0]


def test_a_capture_that_read_some_is_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = use_programs(tmp_path, monkeypatch)
    model = Reads(torch.tensor(2.0), READS["item"], "attribute")
    step_run(model, sgd, [(X,)], loss=_loss)
    assert "reads a tensor's numbers" in reasons(folder)


class ReadsArgument(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * getattr(x, "factor", 1.0)


def test_attributes_of_arguments_count() -> None:
    model = ReadsArgument()
    optimized = graphopt.optimize(model)
    x = X.clone()
    for value in (None, 2.0, 3.0, 2.0):
        if value is not None:
            x.factor = value  # type: ignore[attr-defined]
        assert torch.equal(optimized(x), ReadsArgument.forward(model, x)), value
    del x.factor  # type: ignore[attr-defined]
    assert torch.equal(optimized(x), model.linear(x))


def test_attributes_of_arguments_that_keep_changing_are_told(caplog: pytest.LogCaptureFixture) -> None:
    optimized = graphopt.optimize(ReadsArgument())
    with caplog.at_level(logging.WARNING, "graphopt"):
        for value in (1.0, 2.0, 3.0):
            x = X.clone()
            x.factor = value  # type: ignore[attr-defined]
            optimized(x)
    assert "the attribute factor of an argument" in caplog.text


@pytest.mark.parametrize("tensor", [torch.ones(2_000), torch.ones(2, 2).to_sparse()], ids=["large", "sparse"])
def test_other_tensors_count_by_whether_ops_have_written(tensor: torch.Tensor) -> None:
    read = NumbersRead(tensor, "here")
    before = read.now()
    assert read.now() == before
    tensor.mul_(2)
    assert read.now() != before
