"""Every public class and function has an example in its docstring, and it prints what it says."""

from __future__ import annotations

from typing import Any

import pytest

import graphopt
from tests.support.docstring_examples import PREAMBLE, examples, failures, namespace, public_objects

PUBLIC = public_objects()


def test_every_public_object_has_an_example() -> None:
    assert len(PUBLIC) > 50
    assert [name for name, value in PUBLIC.items() if not examples(value)] == []


@pytest.mark.sweep(cases=("graphopt.passes.Chunk",))
@pytest.mark.parametrize("name", PUBLIC)
def test_an_example_does_what_it_says(name: str) -> None:
    graphopt.available_formats()  # has the formats registered that graphopt brings along
    before = dict(graphopt.ir.provided.formats._registered)
    try:
        assert failures(name, PUBLIC[name]) == ""
    finally:
        graphopt.ir.provided.formats._registered.clear()
        graphopt.ir.provided.formats._registered.update(before)


def test_a_wrong_example_is_found() -> None:
    class Wrong:
        """It is wrong.

        Example:
            >>> x.shape[0]
            63
        """

    assert "Expected:\n    63" in failures("Wrong", Wrong)


def test_what_documents_show_makes_the_names_of_the_examples() -> None:
    shown: dict[str, Any] = {}
    exec(compile(PREAMBLE, "<preamble>", "exec", dont_inherit=True), shown)
    assert set(namespace()) <= set(shown)
    offered = namespace()
    assert (shown["model"](shown["x"]) == offered["model"](offered["x"])).all()
    assert shown["problem"] == offered["problem"]
