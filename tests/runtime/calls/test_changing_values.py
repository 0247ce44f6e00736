"""Values of Python that change from call to call: the third one is told, and what it says to write works."""

from __future__ import annotations

import gc
import logging
import re
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import graphopt
from graphopt.runtime.calls import captures, varying_sizes
from tests.support.training import mean_square

X = torch.ones(2, 4)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, scale: Any = 1.0, options: Any = None) -> torch.Tensor:
        out = self.layer(x) * scale
        return out if options is None else out + options["bias"]


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in map(logging.LogRecord.getMessage, caplog.records) if "values of Python" in text]


def test_what_it_says_to_write_captures_once(caplog: pytest.LogCaptureFixture) -> None:
    model = graphopt.optimize(Scaled())
    for scale in (0.5, 0.25):
        model(X, scale)
    assert told(caplog) == []
    for scale in (0.125, 0.0625, 0.03125):
        model(X, scale)
    (text,) = told(caplog)
    assert text.startswith("Scaled: 3 captures took ")
    assert re.search(r"3 captures took \d+\.\d s so far", text)
    assert "scale was 0.5, 0.25, 0.125" in text
    assert "torch.tensor(scale)" in text
    again = graphopt.optimize(Scaled())
    for scale in (0.5, 0.25, 0.125):
        again(X, torch.tensor(scale))
    assert len(again._graphopt.runner.captures.all()) == 1  # type: ignore[attr-defined]


@pytest.mark.sweep
def test_values_in_containers_are_named_by_their_place(caplog: pytest.LogCaptureFixture) -> None:
    model = graphopt.optimize(Scaled())
    for bias in (1, 2, 3):
        model(X, options={"bias": bias, "kind": "plain"})
    (text,) = told(caplog)
    assert "options['bias'] was 1, 2, 3;" in text
    assert "kind" not in text


def test_a_step_names_the_arguments_of_the_loss(caplog: pytest.LogCaptureFixture) -> None:
    model = Scaled()

    def loss(model: nn.Module, x: torch.Tensor, mode: str) -> torch.Tensor:
        return model(x).square().mean() if mode != "sum" else model(x).sum()

    step = graphopt.optimize_step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss)
    for mode in ("mean", "sum", "a word that is much too long to be shown in a warning", "other"):
        step(X, mode)
    (text,) = told(caplog)
    assert "mode was 'mean', 'sum', 'a word that is much too long…;" in text
    assert "keep to a few values" in text
    assert "torch.tensor" not in text


def test_sizes_alone_are_not_values(caplog: pytest.LogCaptureFixture) -> None:
    model = graphopt.optimize(Scaled())
    for rows in (2, 3, 4):
        model(torch.ones(rows, 4), 0.5)
    assert told(caplog) == []


def test_attributes_of_modules_are_named(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1))
    optimized = graphopt.optimize(model)
    for p in (0.1, 0.2, 0.3, 0.4):
        optimized[1].p = p
        optimized(X)
    (text,) = told(caplog)
    assert "model.1.p was 0.1, 0.2, 0.3; change model.1.p less often, or compute with a buffer" in text


def test_private_attributes_are_named_too(caplog: pytest.LogCaptureFixture) -> None:
    class Private(nn.Linear):
        _scale = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self._scale

    model = graphopt.optimize(Private(4, 4))
    for scale in (0.1, 0.2, 0.3):
        model._scale = scale
        model(X)
    (text,) = told(caplog)
    assert "model._scale was 0.1, 0.2, 0.3" in text


def test_items_of_containers_that_code_reads_are_named(caplog: pytest.LogCaptureFixture) -> None:
    weights, model = {"penalty": [1.0, 2.0], "other": 3}, nn.Linear(4, 4)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean() * weights["penalty"][0]

    step = graphopt.optimize_step(model, torch.optim.SGD(model.parameters(), lr=0.1, fused=True), loss=loss)
    for weight in (0.1, 0.2, 0.3, 0.4):
        weights["penalty"][0] = weight
        step(X)
    (text,) = told(caplog)
    assert "loss: weights['penalty'][0] was 0.1, 0.2, 0.3; hand " in text
    assert "weights['penalty'][0] over in the call, as a tensor" in text


def test_of_many_places_the_first_are_named(caplog: pytest.LogCaptureFixture) -> None:
    model = graphopt.optimize(Scaled())
    for number in range(4):
        model(X, options={"bias": 0, "files": [f"{number}-{place}.png" for place in range(256)]})
    (text,) = told(caplog)
    assert "options['files'][7] was '0-7.png', '1-7.png', '2-7.png'; and 248 more; keep to a few values" in text


@pytest.mark.parametrize("whole", [False, True], ids=["drop-in", "step"])
def test_captures_that_are_not_used_again_are_let_go(
    whole: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(captures, "_MOST", 3)
    monkeypatch.setattr(varying_sizes, "_MOST_KINDS", 3)
    model = Scaled()
    if whole:
        step: Any = graphopt.optimize_step(model, torch.optim.SGD(model.parameters(), lr=0.0), loss=mean_square)
        runner = step._runner
    else:
        optimized: Any = graphopt.optimize(model)
        step, runner = lambda *batch: mean_square(optimized, *batch), optimized._graphopt.runner
    sessions = []
    for scale in (1.0, 2.0, 3.0, 1.0, 4.0, 5.0, 1.0, 6.0):
        assert torch.equal(step(X, scale), mean_square(model, X, scale))
        sessions.append(weakref.ref(runner.captures.latest.rewritten.session))
    gc.collect()
    assert len(runner.captures.all()) == 3
    assert len({id(session()) for session in sessions if session() is not None}) <= 5
    assert sessions[0]() is sessions[6]() is not None  # used again in between
    assert len([record for record in caplog.records if "the one that was not used for longest" in record.message]) == 1
