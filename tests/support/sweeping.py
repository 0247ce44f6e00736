"""Which cases of a test ``make test`` leaves to ``make sweep``: what ``pytest.mark.sweep`` says at the test."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

__all__ = ["sweep_cases"]


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


def _some(mark: pytest.Mark) -> bool:
    return mark.name == "sweep" and bool(mark.args or mark.kwargs)


def _id(item: pytest.Item) -> str:
    return item.callspec.id if hasattr(item, "callspec") else ""
