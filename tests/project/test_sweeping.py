"""The marks ``sweep`` and ``core``: which cases they leave out, and what they refuse when tests are collected."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.metadata import entry_points
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.core_passes import DOORS, MODELS
from tests.support.sweeping import check_core, sweep_cases


@dataclass
class Case:
    """As much of pytest's item as the hooks read."""

    id: str
    own_markers: list[pytest.Mark]
    params: dict[str, Any] = field(default_factory=dict)

    @property
    def nodeid(self) -> str:
        return f"test_it[{self.id}]"

    @property
    def callspec(self) -> SimpleNamespace:
        return SimpleNamespace(id=self.id, params=self.params)

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next((mark for mark in self.own_markers if mark.name == name), None)


def cases(*marks: pytest.MarkDecorator) -> Any:
    """Three cases of one test."""
    return [Case(name, [mark.mark for mark in marks]) for name in "abc"]


def swept(items: Any) -> str:
    return "".join(case.id for case in items if case.get_closest_marker("sweep"))


@pytest.mark.parametrize(
    ("mark", "expected"),
    [
        (pytest.mark.sweep, "abc"),
        (pytest.mark.sweep(but=("b",)), "ac"),
        (pytest.mark.sweep(cases=("a", "b")), "ab"),
        (pytest.mark.gpu, ""),
    ],
    ids=["all", "but", "cases", "none"],
)
def test_the_cases_that_are_named_are_swept_or_stay(mark: pytest.MarkDecorator, expected: str) -> None:
    found = cases(mark)
    sweep_cases(found)
    assert swept(found) == expected


def test_a_case_that_is_marked_itself_is_swept_whatever_the_test_says() -> None:
    found = cases(pytest.mark.sweep(but=("b", "c")))
    found[2].own_markers.append(pytest.mark.sweep.mark)
    sweep_cases(found)
    assert swept(found) == "ac"


@pytest.mark.parametrize("form", ["but", "cases"])
def test_an_id_that_no_case_has_is_an_error_with_those_that_there_are(form: str) -> None:
    with pytest.raises(pytest.Collector.CollectError, match=r"names \['d'\].* these are: \['a', 'b', 'c'\]"):
        sweep_cases(cases(pytest.mark.sweep(**{form: ("a", "d")})))


@pytest.mark.parametrize("mark", [pytest.mark.sweep("a"), pytest.mark.sweep(only=("a",))], ids=["by place", "other"])
def test_other_arguments_are_an_error(mark: pytest.MarkDecorator) -> None:
    with pytest.raises(pytest.Collector.CollectError, match="sweep takes"):
        sweep_cases(cases(mark))


def test_a_core_test_that_is_swept_is_an_error() -> None:
    found = cases(pytest.mark.core)
    check_core(found, whole=False)
    found[1].own_markers.append(pytest.mark.sweep.mark)
    with pytest.raises(pytest.UsageError, match=r"never swept: test_it\[b\]"):
        check_core(found, whole=False)


def test_a_pass_without_a_core_test_is_an_error_of_a_whole_collection() -> None:
    names = [entry.name for entry in entry_points(group="graphopt.passes") if entry.value.startswith("graphopt.")]
    found: Any = [
        Case("x", [pytest.mark.core.mark], {"name": name, "door": door, "kind": kind})
        for name, door, kind in product(names, DOORS, MODELS)
    ]
    check_core(found, whole=True)
    left = [case for case in found if case.params != {"name": "recompute", "door": "drop-in", "kind": "tied"}]
    check_core(left, whole=False)
    with pytest.raises(pytest.UsageError, match="these have no core test: recompute, drop-in, tied"):
        check_core(left, whole=True)
