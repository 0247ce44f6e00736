"""What every pass promises, on small models: a plain loop's results, and a peak that is known to the byte.

Each registered pass behind both doors, for a plain model, one with dropout, with tied weights and with frozen ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest

import graphopt
from graphopt import GraphoptError
from tests.support.core_passes import DOORS, MODELS, ROWS, verdict_of
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.core

Verdicts = Callable[[str], list[Mapping[str, Any]]]


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> Verdicts:
    """What each rank found, by door and model, for a pass of several; they run when the first case asks."""

    @cache
    def found(name: str) -> list[Mapping[str, Any]]:
        script = f"from tests.support.core_passes import verdicts_of_rank\nsay(verdicts_of_rank({name!r}))"
        return [said for (said,) in run_ranks(script, ROWS[name].ranks, tmp_path_factory.mktemp("ranks") / "store")]

    return found


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", ROWS)
def test_training_is_a_plain_loops_and_the_peak_is_predicted(
    name: str, door: str, kind: str, of_ranks: Verdicts
) -> None:
    row = ROWS[name]
    if door == "drop-in" and row.refused:
        with pytest.raises(GraphoptError, match=row.refused):
            graphopt.optimize(row.model(kind), row.passes)(*row.batch(0))
        return
    found = [said[f"{door}, {kind}"] for said in of_ranks(name)] if row.ranks > 1 else [verdict_of(name, door, kind)]
    assert len(found) == row.ranks
    for verdict in found:
        assert verdict["wrong"] == []
        assert verdict["predicted"] == verdict["measured"]
        if door == "drop-in" and row.nothing:
            assert f"nothing: {row.nothing}" in verdict["record"]
        else:
            assert verdict["did"], verdict["record"]
