"""Which cases of a test ``make test`` leaves to ``make sweep``: what ``pytest.mark.sweep`` says at the test."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.metadata import entry_points
from itertools import product

import pytest

from tests.support.core_passes import DOORS, MODELS

__all__ = ["check_core", "sweep_cases", "sweeping"]


def sweep_cases(items: Sequence[pytest.Item]) -> None:
    """Leave the mark on those cases of a test that it sweeps.

    ``sweep(but=ids)`` sweeps all cases but these, ``sweep(cases=ids)`` these alone, ``sweep`` the whole test.

    Args:
        items: all cases of one test.

    Raises:
        pytest.Collector.CollectError: an id that no case has, which would change in silence what runs.
    """
    for mark in {id(mark): mark for item in items for mark in item.own_markers if _some(mark)}.values():
        if mark.args or set(mark.kwargs) not in ({"but"}, {"cases"}):
            raise pytest.Collector.CollectError(f"{items[0].nodeid}: sweep takes but=(ids) or cases=(ids)")
        ((form, named),) = mark.kwargs.items()
        ids = {_id(item): item for item in items}
        if unknown := [name for name in named if name not in ids]:
            raise pytest.Collector.CollectError(
                f"{items[0].nodeid}: sweep({form}=...) names {unknown}, and no case is called so; these are: {[*ids]}"
            )
        for name, item in ids.items():
            if (name in named) == (form == "but"):
                item.own_markers.remove(mark)


def sweeping(request: pytest.FixtureRequest) -> bool:
    """Whether something of the file is run that is swept: a fixture may leave out what nobody asks for."""
    return any(item.path == request.path and item.get_closest_marker("sweep") for item in request.session.items)


def check_core(items: Iterable[pytest.Item], *, whole: bool) -> None:
    """Core tests run by default, and each pass has them.

    Args:
        items: what was collected.
        whole: whether that is everything, so that a pass has a case or none.

    Raises:
        pytest.UsageError: what is marked ``core`` and ``sweep``; a registered pass without a case for a door and model.
    """
    core = [item for item in items if item.get_closest_marker("core")]
    if swept := [item.nodeid for item in core if item.get_closest_marker("sweep")]:
        raise pytest.UsageError(f"core tests are never swept: {', '.join(swept)}")
    if not whole:
        return
    params = [item.callspec.params for item in core if hasattr(item, "callspec")]
    cases = {tuple(p.get(key) for key in ("name", "door", "kind")) for p in params}
    registered = [entry.name for entry in entry_points(group="graphopt.passes") if entry.value.startswith("graphopt.")]
    if missing := [case for case in product(registered, DOORS, MODELS) if case not in cases]:
        raise pytest.UsageError(
            "these have no core test: " + "; ".join(map(", ".join, missing)) + " (tests/support/core_passes.py)"
        )


def _some(mark: pytest.Mark) -> bool:
    return mark.name == "sweep" and bool(mark.args or mark.kwargs)


def _id(item: pytest.Item) -> str:
    return item.callspec.id if hasattr(item, "callspec") else ""
