"""1,700 random programs, each with a random pipeline, drop-in or as a whole step: the same bits as in eager mode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.isolated import Isolated, Outcome
from tests.support.random_programs import recipe_of
from tests.support.random_trials import Verdict

pytestmark = pytest.mark.sweep

PROGRAMS, AT_A_TIME = 1200, 60
"""Of these numbers one in fifteen is a program that eager mode refuses."""

REFUSED = (
    "the optimizer holds none of the parameters that get a gradient",
    "elements overlap in memory",
    "a tensor being mutated that has internal overlap",
)
"""What messages say about the programs that are refused."""

PAST_DIFFERENTIATING = "has been modified by an inplace operation"
"""The same where a loss leaves outputs out: eager mode never comes to differentiate these."""


@pytest.fixture(scope="module")
def tried() -> Iterator[Callable[..., Outcome]]:
    with Isolated("tests.support.random_trials:try_programs") as call:
        yield call


@pytest.mark.parametrize("first", range(0, PROGRAMS, AT_A_TIME))
def test_random_programs_train_as_in_eager_mode(
    first: int, tried: Callable[..., Outcome], record_property: Callable[[str, Any], None]
) -> None:
    """``python -m tests.support.random_trials NUMBER`` says what a program is, and the least that fails alike."""
    outcome = tried(first, first + AT_A_TIME)
    verdicts = [Verdict(**found) for found in outcome.values]
    record_property("counts", dict(Counter(f"{verdict.way} {verdict.kind}" for verdict in verdicts)))
    assert not outcome.died, f"{outcome.died} in program {first + len(verdicts)}\n{outcome.said}"
    assert [verdict for verdict in verdicts if verdict.kind not in ("equal", "invalid", "refused", "told")] == []
    refused = [verdict for verdict in verdicts if verdict.kind == "refused"]
    assert [verdict for verdict in refused if not is_known(verdict)] == []
    assert sum(verdict.kind == "equal" for verdict in verdicts) > 0.8 * AT_A_TIME


def is_known(refused: Verdict) -> bool:
    """Whether a program is refused for a reason that the limits name."""
    left_out = "dead outputs" in recipe_of(refused.number).parts
    return any(part in refused.detail for part in REFUSED) or (left_out and PAST_DIFFERENTIATING in refused.detail)
