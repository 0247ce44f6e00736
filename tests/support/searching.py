"""Searches for plans that take less time, for tests that look at something else than how good plans are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest

from graphopt.planning import planner
from graphopt.planning.search import ladder

__all__ = ["short_search", "whole_search"]

_SHORT = {
    (ladder, "_WORK_SMALL"): 60_000,
    (ladder, "_WORK"): 400_000,
    (ladder, "_WORK_ALIKE"): 400_000,
    (ladder, "_WORK_DEEP"): 800,
    (planner, "_AIMED"): 400_000,
    (planner, "_EACH"): 60_000,
    (planner, "_ALL"): 150_000,
}
_WHOLE = {(module, name): getattr(module, name) for module, name in _SHORT}


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
def _effort(work: dict[tuple[ModuleType, str], int]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for (module, name), count in work.items():
            patch.setattr(module, name, count)
        yield
