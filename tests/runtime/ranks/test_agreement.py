"""Ranks that differ in one step are told so, on every rank, before anything is exchanged."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.differing_ranks import ALLOWED, PIPELINES, SITUATIONS
from tests.support.ranks import run_ranks

DEFAULT = ("data-parallel", "drop-in", "shard-parameters", "local-sgd")
"""The others take the same way into a call."""

Said = tuple[str, list[dict[str, Any]]]

SCRIPT = """
from tests.support.differing_ranks import train
for situation in {situations}:
    say(train(rank, {pipeline!r}, situation))
"""


@pytest.fixture(
    scope="module",
    params=[name if name in DEFAULT else pytest.param(name, marks=pytest.mark.sweep) for name in PIPELINES],
)
def said(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Said:
    """The pipeline, and what each of two ranks found, by situation."""
    script = SCRIPT.format(situations=list(SITUATIONS), pipeline=request.param)
    ranks = run_ranks(script, 2, tmp_path_factory.mktemp("ranks") / "store")
    return request.param, [dict(zip(SITUATIONS, found, strict=True)) for found in ranks]


@pytest.mark.parametrize(
    "situation", [name for name in SITUATIONS if name not in ("another size", "a forward that raises")]
)
def test_both_ranks_say_which_rank_differs_and_in_what(said: Said, situation: str) -> None:
    pipeline, ranks = said
    for found in ranks:
        error = found[situation]["error"]
        if (pipeline, situation) in ALLOWED:
            assert error == ""
            continue
        assert error.startswith(
            "RankError: the ranks of the group '0' do not run the same program in this call: rank 1"
        )
        assert "first difference: " in error
        assert ("a.weight" if "frozen" in situation else "b.") in error
        assert found[situation]["ranks"] == [1]


@pytest.mark.parametrize("situation", SITUATIONS)
def test_nothing_is_changed_by_the_call_and_training_goes_on(said: Said, situation: str) -> None:
    first, second = (found[situation] for found in said[1])
    assert first["unchanged"]
    assert second["unchanged"]
    assert first["parameters"] == second["parameters"]


def test_a_rank_may_make_a_program_for_another_size_alone(said: Said) -> None:
    assert [found["another size"]["error"] for found in said[1]] == ["", ""]


def test_a_rank_whose_forward_raises_is_named_on_the_others(said: Said) -> None:
    first, second = (found["a forward that raises"] for found in said[1])
    assert first["error"].startswith("RankError: rank 1 could not make its program (")
    assert "no such batch" in first["error"]
    assert first["ranks"] == [1]
    assert "no such batch" in second["error"]
