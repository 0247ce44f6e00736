"""Every architecture of a long list trains as in eager mode under every pass, with the peak that was foretold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.architecture_trials import ARCHITECTURES, PASSES, Verdict
from tests.support.isolated import Isolated, Outcome

pytestmark = pytest.mark.sweep

REFUSED: dict[str, str] = {}
"""By architecture what the message about it says."""

REFUSED_LOW: dict[str, str] = {}
"""The same where only mixed precision is refused."""


@pytest.fixture(scope="module")
def tried() -> Iterator[Callable[..., Outcome]]:
    with Isolated("tests.support.architecture_trials:try_architecture") as call:
        yield call


def ways(name: str) -> list[str]:
    """How an architecture is trained: drop-in and with whole steps in turn."""
    return ["whole step" if list(ARCHITECTURES).index(name) % 2 else "drop-in"]


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_an_architecture_trains_as_in_eager_mode_under_every_pass(
    name: str, tried: Callable[..., Outcome], record_property: Callable[[str, Any], None]
) -> None:
    outcome = tried(name, ways(name), list(PASSES))
    verdicts = [Verdict(**found) for found in outcome.values]
    record_property("row", f"{name} ({', '.join(ways(name))}): " + "; ".join(map(told, verdicts)))
    assert not outcome.died, f"{outcome.died}\n{outcome.said}"
    for verdict in verdicts:
        message = REFUSED.get(name) or (REFUSED_LOW.get(name) if verdict.passes == "mixed" else None)
        if message is None:
            assert verdict.kind in ("equal", "eager fails"), verdict
            assert verdict.foretold, verdict
        else:
            assert verdict.kind == "refused", verdict
            assert message in verdict.detail


def told(verdict: Verdict) -> str:
    """One pass in a row of the table."""
    if verdict.kind != "equal":
        return f"{verdict.passes} {verdict.kind}"
    return f"{verdict.passes} equal, {verdict.measured:,} of {verdict.predicted:,} bytes"


def test_at_least_97_of_100_architectures_are_trained() -> None:
    assert set(REFUSED) | set(REFUSED_LOW) <= set(ARCHITECTURES)
    assert len(ARCHITECTURES) >= 80
    assert len(REFUSED) <= 0.03 * len(ARCHITECTURES)
