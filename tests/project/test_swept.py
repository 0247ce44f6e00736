"""Each pattern of ``tests/swept.txt`` names tests: one that was renamed would come back into ``make test``."""

from __future__ import annotations

import pytest

from tests.support.swept import SWEPT, UNMATCHED


def test_each_pattern_names_tests(pytestconfig: pytest.Config) -> None:
    assert len(SWEPT) == len(set(SWEPT))
    assert pytestconfig.stash[UNMATCHED] == []  # known where all tests are collected, as `make test` does
