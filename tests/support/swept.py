"""The tests that ``make test`` leaves to ``make sweep``, by the patterns of ``tests/swept.txt``."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import pytest

SWEPT = [
    line
    for line in Path(__file__).parents[1].joinpath("swept.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
]
"""What is swept beside notebooks and the tests that are marked where they stand; the part in front of :: is a file."""

_BY_NAME: dict[str, str] = {}
"""Those that stand for one test, by its name; translating each to a regular expression would take a second."""

_BY_FILE: dict[str, list[str]] = {}
for _pattern in SWEPT:
    _plain = _pattern.replace("[[]", "")
    if "*" in _plain or "?" in _plain or "[" in _plain:
        _BY_FILE.setdefault(_pattern.partition("::")[0], []).append(_pattern)
    else:
        _BY_NAME[_pattern.replace("[[]", "[")] = _pattern

UNMATCHED = pytest.StashKey[list[str]]()
"""Where a session keeps the patterns that no test has; none unless all tests are collected."""


def swept_by(test: str) -> list[str]:
    """The patterns that leave a test to ``make sweep``."""
    name = test.removeprefix("tests/")
    plain = [_BY_NAME[name]] if name in _BY_NAME else []
    return plain + [pattern for pattern in _BY_FILE.get(name.partition("::")[0], ()) if fnmatchcase(name, pattern)]
