"""Sharded updates that take whole matrices in between (Muon): those of DataParallel alone, work divided among ranks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.matrix_optimizers import CASES
from tests.support.ranks import run_ranks

ALL = """
from tests.support.matrix_optimizers import after_fully_shard, beside_whole, counted, resumed
say(beside_whole())
say(resumed())
say(counted())
say(after_fully_shard())
"""


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_ranks(ALL, 2, tmp_path_factory.mktemp("ranks") / "store")


def test_parameters_are_those_of_whole_updates_to_the_last_bit(two_ranks: list[Any]) -> None:
    for off, *_ in two_ranks:
        assert off == {name: [0.0, 0.0] for name in CASES}


def test_training_goes_on_from_saved_shards(two_ranks: list[Any]) -> None:
    assert [resumed for _, resumed, *_ in two_ranks] == [[True, True]] * 2


def test_state_and_products_are_divided_and_the_peak_is_what_was_predicted(two_ranks: list[Any]) -> None:
    elements = 12 * 25 + 3 * 25 * 25 + 25 * 5
    assert sum(counted[0] for _, _, counted, _ in two_ranks) == elements
    for _, _, (_, products, predicted, measured), _ in two_ranks:
        assert products == (1 + 2 + 1) * 5 * 3, "a tall matrix, two of three square ones, a wide one; five steps each"
        assert measured == predicted


def test_after_fully_shard_training_is_that_of_one_process(two_ranks: list[Any]) -> None:
    assert [trained for *_, trained in two_ranks] == [[True, True, True] * 2] * 2
