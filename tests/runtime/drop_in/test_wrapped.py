"""Models in DistributedDataParallel: what is inside is optimized, and training is the wrapper's to the last bit."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.data_parallel import CASES
from tests.support.ranks import run_ranks

ALL = """
import graphopt
from torch.nn.parallel import DistributedDataParallel
from tests.support.data_parallel import CASES, differences
say({name: differences(case) for name, case in CASES.items()})
for make in (
    lambda: graphopt.optimize(DistributedDataParallel(torch.nn.Linear(2, 2)), "data-parallel"),
    lambda: graphopt.capture(DistributedDataParallel(torch.nn.Linear(2, 2)), (torch.zeros(1, 2),)),
):
    try:
        say(str(make()))
    except graphopt.GraphoptError as error:
        say(str(error))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """What each of two ranks says."""
    return run_ranks(ALL, 2, tmp_path_factory.mktemp("ranks") / "store")


@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_by_itself(name: str, found: list[list[Any]]) -> None:
    assert [rank[0][name] for rank in found] == [[], []]


def test_what_it_does_not_go_with_is_refused_by_name(found: list[list[Any]]) -> None:
    for _, exchange, wrapped in found:
        assert "data-parallel exchanges gradients" in exchange
        assert "leave the pass out" in exchange
        assert "graphopt.optimize takes it as it is" in wrapped
