"""Offload: what is declined, and options that mean nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from graphopt import GraphoptError, Phase, Pipeline, Program
from graphopt.errors import PassError
from graphopt.ir.node import info
from graphopt.passes import FitMemory, Offload
from graphopt.rewriting.pass_ import PassRecord
from tests.support.errors import attempt
from tests.support.fitting import applied, structure
from tests.support.offloading import ROWS, layers, nothing_held_afterwards, off
from tests.support.training import captured


@pytest.fixture(autouse=True)
def _nothing_is_held_afterwards() -> Iterator[None]:
    with nothing_held_afterwards():
        yield


# --- what is declined ------------------------------------------------------------------------------------------------


def declined(plain: Program, options: Offload) -> PassRecord:
    program, record = applied(plain, options)
    assert not record.changed
    assert structure(program) == structure(plain)
    return record


@pytest.mark.sweep
def test_where_it_cannot_lower_the_peak_nothing_is_moved() -> None:
    class Peaked(nn.Module):
        """The peak is inside of backward's first op, where nothing waits."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 64), nn.Linear(64, 4096)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x).tanh()).sum(-1)

    record = declined(captured(Peaked(), ROWS), off("**tanh*", keep_last=0))
    assert "would not lower it" in record.changed.reason
    assert "the peak of" in record.changed.reason


def test_tensors_that_are_too_small_stay() -> None:
    record = declined(captured(layers(), ROWS), off(min_bytes=10**9))
    assert "large enough" in record.changed.reason


@pytest.mark.sweep
def test_applied_twice_it_does_nothing() -> None:
    program, _ = applied(captured(layers(), ROWS), off())
    again, record = applied(program, off(tier="disk"))
    assert "already" in record.changed.reason
    assert structure(again) == structure(program)


@pytest.mark.sweep(but=("net.0.weight-it is an input",))
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("net.44", "net.4"),
        ("net.3::t_1~", "backward"),
        ("args[0]", "it is an input"),
        ("net.0.weight", "it is an input"),
        ("net.3", "nothing after forward reads it"),
    ],
)
def test_a_name_that_cannot_be_moved(name: str, message: str) -> None:
    plain = captured(layers(), ROWS)
    if name.endswith("~"):
        name = next(info(node).names[0] for node in plain.phase_nodes(Phase.BACKWARD) if info(node).names)
    error = attempt(lambda: applied(plain, off(name)))
    assert isinstance(error, PassError)
    assert message in str(error)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tier": "dsk"}, "disk"),
        ({"tier": ""}, "host"),
        ({"prefetch": "soon"}, "prefetch is auto or a number"),
        ({"prefetch": -1}, "at least 0"),
        ({"prefetch": True}, "at least 0"),
        ({"keep_last": -1}, "at least 0"),
        ({"min_bytes": -1}, "at least 0"),
        ({"cost": "guess"}, "'measured', 'roofline'"),
    ],
)
def test_options_that_mean_nothing(options: dict[str, Any], message: str) -> None:
    with pytest.raises(GraphoptError, match=message):
        Offload(**options)


def test_a_name_stands_for_a_tuple_of_one() -> None:
    assert Offload("net.1") == Offload(("net.1",))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    [
        "offload",
        "offload{tensors=net.1,net.3}",
        "offload{tier=disk prefetch=2}",
        "offload{tensors=blocks.* min-bytes=0 keep-last=0}",
        "offload{prefetch=0 cost=roofline}",
    ],
)
def test_the_text_form_goes_both_ways(text: str) -> None:
    assert Pipeline(str(Pipeline(text))).passes == Pipeline(text).passes
    assert str(Pipeline(text)) == text


def test_it_follows_a_budget() -> None:
    passes = [off(), FitMemory("80%", cost="roofline")]
    assert [current.name for current in Pipeline(passes).passes] == ["fit-memory", "offload"]
