"""Noticing that something was assigned to one of many dictionaries."""

from __future__ import annotations

import collections
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphopt import _torch
from graphopt._torch.facts import change_detection

_CHANGES = {
    "assigned": lambda each: each.__setitem__("new", 1),
    "assigned an equal value": lambda each: each.__setitem__("a", float("1.5")),
    "updated": lambda each: each.update(b=2),
    "filled by setdefault": lambda each: each.setdefault("c", 3),
}


@pytest.fixture(params=["torch's guards", "versions one by one"], autouse=True)
def way(request: pytest.FixtureRequest) -> Any:
    """Both ways to compare versions, where torch has the first one."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "versions one by one":
            patch.setattr(change_detection.guards, "RootGuardManager", None)
        yield request.param


def _dictionaries() -> list[dict[str, Any]]:
    return [{}, {"a": 1.5}, collections.OrderedDict(a=1.5), collections.OrderedDict(), {"a": 0, "b": None}]


@pytest.mark.parametrize("change", _CHANGES.values(), ids=_CHANGES.keys())
@pytest.mark.parametrize("place", range(5))
def test_a_change_of_any_dictionary_is_noticed(place: int, change: Any) -> None:
    dictionaries = _dictionaries()
    unchanged = _torch.DictionariesUnchanged(dictionaries)
    assert unchanged()
    assert unchanged()
    change(dictionaries[place])
    assert not unchanged()


@pytest.mark.parametrize("place", [1, 2, 4])
def test_what_is_deleted_or_emptied_is_noticed(place: int) -> None:
    for change in (lambda each: each.pop("a"), lambda each: each.clear()):
        dictionaries = _dictionaries()
        unchanged = _torch.DictionariesUnchanged(dictionaries)
        change(dictionaries[place])
        assert not unchanged()


def test_what_is_only_read_is_unchanged(way: str) -> None:
    dictionaries = _dictionaries()
    unchanged = _torch.DictionariesUnchanged(dictionaries)
    assert (unchanged._check is None) == (way == "versions one by one")
    for each in dictionaries:
        assert each.get("a", 0) is not unchanged
        assert list(each) == list(each.keys())
    assert unchanged()


def test_none_at_all_is_unchanged() -> None:
    assert _torch.DictionariesUnchanged([])()


def test_attributes_of_an_object_count() -> None:
    class Settings:
        scale = 1.0

    settings = Settings()
    unchanged = _torch.DictionariesUnchanged([vars(settings)])
    assert unchanged()
    settings.scale = 2.0
    assert not unchanged()


@given(st.lists(st.dictionaries(st.text(max_size=2), st.integers(), max_size=3), max_size=30), st.data())
def test_any_number_of_dictionaries(dictionaries: list[dict[str, int]], data: st.DataObject) -> None:
    unchanged = _torch.DictionariesUnchanged(dictionaries)
    assert unchanged()
    if dictionaries:
        data.draw(st.sampled_from(dictionaries))["x"] = -1
        assert not unchanged()
