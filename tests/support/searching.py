"""Searches for plans that take less time, for tests that look at something else than how good plans are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from graphopt.planning import planner

__all__ = ["short_search"]


@contextmanager
def short_search() -> Iterator[None]:
    """Within it, programs of more than 60 operations are planned with a part of the usual effort."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "_WORK", 400_000)
        patch.setattr(planner, "_WORK_ALIKE", 400_000)
        yield
