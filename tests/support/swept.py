"""The tests that ``make test`` leaves to ``make sweep``, by the patterns of ``tests/swept.txt``."""

from __future__ import annotations

from pathlib import Path

import pytest

SWEPT = [
    line
    for line in Path(__file__).parents[1].joinpath("swept.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
]
"""What is swept beside notebooks and the tests that are marked where they stand."""

UNMATCHED = pytest.StashKey[list[str]]()
"""Where a session keeps the patterns that no test has; none unless all tests are collected."""
