"""Searches for plans that take less time, for tests that look at something else than how good plans are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from graphopt.planning import ladder

__all__ = ["short_search", "whole_search"]

_WHOLE = {name: getattr(ladder, name) for name in ("_WORK_SMALL", "_WORK", "_WORK_ALIKE", "_WORK_DEEP")}
_SHORT = {"_WORK_SMALL": 60_000, "_WORK": 400_000, "_WORK_ALIKE": 400_000, "_WORK_DEEP": 800}


@contextmanager
def short_search() -> Iterator[None]:
    """Within it, plans are searched with a part of the usual effort, as in all tests."""
    with _effort(_SHORT):
        yield


@contextmanager
def whole_search() -> Iterator[None]:
    """Within it, plans are searched as for users, which the fixture of this name does for a file of tests."""
    with _effort(_WHOLE):
        yield


@contextmanager
def _effort(work: dict[str, int]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, count in work.items():
            patch.setattr(ladder, name, count)
        yield
