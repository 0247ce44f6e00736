"""Interrupts at random lines, memory that runs out, homes that are read-only: the next steps are eager mode's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.faults import WAYS
from tests.support.isolated import Isolated, Outcome

pytestmark = pytest.mark.sweep

TIMES = {"first step": 12, "later step": 24}

cases = pytest.mark.parametrize(
    ("way", "pipeline", "when"),
    [(way, pipeline, when) for way, pipelines in WAYS.items() for pipeline in pipelines for when in TIMES],
)


@pytest.fixture(scope="module")
def interrupted() -> Iterator[Callable[..., Outcome]]:
    with Isolated("tests.support.faults:interrupted") as call:
        yield call


@pytest.fixture(scope="module")
def starved() -> Iterator[Callable[..., Outcome]]:
    with Isolated("tests.support.faults:starved") as call:
        yield call


@cases
def test_an_interrupt_at_any_line_leaves_the_next_steps_right(
    way: str, pipeline: str, when: str, interrupted: Callable[..., Outcome], record_property: Callable[[str, Any], None]
) -> None:
    outcome = interrupted(way, pipeline, when, TIMES[when])
    assert not outcome.died, f"{outcome.died}\n{outcome.said}"
    record_property("counts", {"interrupts": sum(found["fired"] for found in outcome.values)})
    assert len(outcome.values) == TIMES[when]
    assert [found for found in outcome.values if found["wrong"]] == []


@cases
def test_memory_that_runs_out_is_an_error_and_the_next_steps_are_right(
    way: str, pipeline: str, when: str, starved: Callable[..., Outcome], record_property: Callable[[str, Any], None]
) -> None:
    outcome = starved(way, pipeline, when, 8)
    assert not outcome.died, f"{outcome.died}\n{outcome.said}"
    errors = [found["error"] for found in outcome.values if found["error"]]
    record_property("counts", dict(Counter(f"out of memory: {error.partition(':')[0]}" for error in errors)))
    assert errors
    assert [error for error in errors if "memory" not in error.lower()] == []
    assert [found for found in outcome.values if found["wrong"]] == []
