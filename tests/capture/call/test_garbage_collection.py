"""The garbage collector rests while programs are made, and is afterwards as it was."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import final

import pytest
import torch
from torch import nn

import graphopt
from graphopt import Changed, GraphoptError, Pass, Program
from graphopt.capture.call.garbage_collection import no_collection


@final
@dataclass(frozen=True)
class Look(Pass):
    """Notes whether the collector is on while passes run; fails where that is asked for."""

    name, stage, numerics = "look", "joint", "bitwise"
    seen: list[bool] = field(default_factory=list)
    fails: bool = False

    def apply(self, program: Program) -> Changed:
        self.seen.append(gc.isenabled())
        if self.fails:
            raise GraphoptError("asked for")
        return Changed(reason="it only looks")


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """The collector is on around each test."""
    gc.enable()
    yield
    gc.enable()


def capture(look: Look) -> None:
    model = graphopt.optimize(nn.Linear(2, 2), [look])
    model(torch.randn(1, 2))


@pytest.mark.parametrize("fails", [False, True])
def test_the_collector_rests_while_a_call_is_captured(fails: bool) -> None:
    look = Look(fails=fails)
    if fails:
        with pytest.raises(GraphoptError, match="asked for"):
            capture(look)
    else:
        capture(look)
    assert look.seen == [False]
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    look = Look()
    capture(look)
    assert look.seen == [False]
    assert not gc.isenabled()


def test_it_comes_back_at_the_end_of_the_outermost_block() -> None:
    with no_collection():
        with no_collection():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
