"""Files and pass texts from strangers: 110,000 are read or refused, nothing is executed, and none takes long."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support.hostile_inputs import KINDS, tried_alone
from tests.support.isolated import Isolated, Outcome

COUNTS = {
    "program": 26_000,
    "program text": 8_000,
    "costs": 6_000,
    "deepspeed": 3_000,
    "paddle": 3_000,
    "state": 4_000,
    "passes": 50_000,
    "recording": 10_000,
}
AT_A_TIME, FEW = 1_000, 100


@pytest.fixture(scope="module")
def tried() -> Iterator[Callable[..., Outcome]]:
    with Isolated("tests.support.hostile_inputs:problems") as call:
        yield call


def check(outcome: Outcome, count: int) -> None:
    """All were read, and nothing was wrong."""
    assert not outcome.died, f"{outcome.died}\n{outcome.said}"
    *wrong, last = outcome.values
    assert wrong == []
    assert last == {"read": count}


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_few_inputs_are_read_or_refused(kind: str, tried: Callable[..., Outcome]) -> None:
    check(tried(kind, 0, FEW), FEW)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("kind", "first"), [(kind, first) for kind, count in COUNTS.items() for first in range(0, count, AT_A_TIME)]
)
def test_inputs_are_read_or_refused(kind: str, first: int, tried: Callable[..., Outcome]) -> None:
    """``python -m tests.support.hostile_inputs KIND NUMBER`` shows one input, and what comes of it."""
    check(tried(kind, first, first + AT_A_TIME), AT_A_TIME)


def test_what_is_executed_is_noticed() -> None:
    """The watch itself: it sees what an input could bring about, and lets parsing and reading one's own file pass."""
    assert "exec" in tried_alone(lambda: exec("1 + 1"))
    assert "os.system" in tried_alone(lambda: __import__("os").system("true"))
    assert "open" in tried_alone(lambda: open("/etc/hostname", encoding="utf-8").close())
    assert tried_alone(lambda: [][0]).startswith("IndexError")
    assert tried_alone(lambda: None) == ""
