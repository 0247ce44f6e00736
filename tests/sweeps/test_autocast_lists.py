"""Every differentiable op of torch's own database under mixed precision: the bits of eager mode under autocast.

``tests/rewriting/precision/test_autocast_rules.py`` has torch's own lists, on the arguments that torch tests with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.isolated import Isolated, Outcome
from tests.support.operator_trials import OPERATORS, Verdict

pytestmark = pytest.mark.sweep


@pytest.fixture(scope="module")
def tried() -> Iterator[Callable[..., Outcome]]:
    with Isolated("tests.support.operator_trials:try_under_autocast") as call:
        yield call


@pytest.mark.parametrize("name", list(OPERATORS))
def test_an_op_between_others_has_the_bits_of_eager_autocast(
    name: str, tried: Callable[..., Outcome], record_property: Callable[[str, Any], None]
) -> None:
    outcome = tried(name)
    verdicts = [Verdict(**found) for found in outcome.values]
    record_property("counts", dict(Counter(f"{verdict.way} {verdict.kind}" for verdict in verdicts)))
    assert not outcome.died, f"{outcome.died}\n{outcome.said}"
