"""What is shown while plans are searched."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from graphopt.ir.words.written_units import format_bytes
from graphopt.planning import find_frontier
from graphopt.rewriting import progress
from tests.planning.search.test_refinement import layered


class Recorded:
    """Keeps what a bar is told."""

    def __init__(self) -> None:
        self.told: list[tuple[float, str]] = []

    @contextlib.contextmanager
    def bar(self, message: str) -> Iterator[Callable[[float, str], None]]:
        """A bar that remembers."""
        yield lambda share, remark: self.told.append((share, remark))


def test_a_search_that_goes_on_behind_its_bar_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Recorded()
    monkeypatch.setattr(progress, "_shown", lambda: shown)
    frontier = find_frontier(layered(4))
    with progress.searching("a hint") as show:
        show(0.5, frontier)
    show(1.0, frontier)
    assert shown.told == [(0.5, f"smallest peak {format_bytes(frontier.lowest.peak)}; a hint")]
