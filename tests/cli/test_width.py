"""Tables at 80 columns: nothing is wider, and what is cut says so; in a pipe nothing is cut."""

from __future__ import annotations

import pytest

from graphopt.ir.words.columns import aligned, filled, table_width
from tests.support.command import RECOMPUTE, Command, target

A100 = ("--cost", "a100-80gb")
TABLES: dict[str, tuple[str, ...]] = {
    "passes": ("passes",),
    "all options": ("passes", "--long"),
    "a pass": ("passes", "fit-memory"),
    "formats": ("formats",),
    "tensors": ("tensors", target("plain")),
    "checkpoints": ("tensors", target("plain"), "--checkpoints"),
    "memory": ("memory", target("step"), "-p", RECOMPUTE),
    "precision": ("memory", target("step"), "-p", "mixed-precision", "--precision"),
    "compare": ("compare", target("with_loss"), "-p", "mixed-precision"),
    "bisect": ("compare", target("with_loss"), "-p", "mixed-precision", "--bisect", "0.01"),
    "plan": ("plan", target("step"), *A100, "--budget", "90%", "--budget", "1GB"),
    "exchange": ("plan", target("step"), *A100, "--world-size", "8", "--bandwidth", "1Gbit"),
    "help": ("help",),
    **{f"help {name}": ("help", name) for name in ("tensors", "dump", "memory", "compare", "view", "plan", "cache")},
}


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


@pytest.mark.sweep(cases=("tensors", "checkpoints", "memory", "precision", "compare", "bisect", "plan", "exchange"))
@pytest.mark.parametrize("command", TABLES.values(), ids=list(TABLES))
def test_nothing_is_wider_than_80_columns(
    run: Command, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    outcome = run(*command)
    assert outcome.code == 0, outcome.err
    assert [line for line in outcome.out.splitlines() if len(line) > 80] == []
    assert len(outcome.out.splitlines()) > 2


def test_a_pipe_gets_every_cell_whole(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    whole = run("tensors", target("plain")).out
    assert "…" not in whole
    assert max(map(len, whole.splitlines())) > 80
    assert run("plan", target("step"), *A100, "--budget", "90%").out.count("dropping it is not worth its time") > 0


def test_a_cell_that_is_cut_has_an_ellipsis_and_numbers_are_never_cut() -> None:
    rows = [
        ("name", "bytes", "why", "at"),
        ("blocks.0.attention.query.weight", "1234567", "a reason of many words", ""),
    ]
    with table_width(53):
        head, line = aligned(rows, right=(1,))
    assert (len(head) <= 53, len(line) <= 53) == (True, True)
    assert "1234567" in line
    assert line.split()[0] == "blocks.0.att…uery.weight"
    assert line.endswith("a reason of m…")
    assert aligned(rows, right=(1,))[1] == "blocks.0.attention.query.weight  1234567  a reason of many words"


def test_a_table_of_numbers_is_divided_and_repeats_its_first_column() -> None:
    rows = [("way", *("12345678",) * 8), ("dense", *("1",) * 8)]
    with table_width(40):
        lines = aligned(rows, right=range(1, 9))
    assert max(map(len, lines)) <= 40
    assert sum(line.startswith("dense") for line in lines) == 3
    assert " ".join(lines).count("12345678") == 8


def test_sentences_are_broken_under_their_beginning() -> None:
    with table_width(60):
        text = filled("network      8 ranks with a link of one gigabit a second for each of them, in a ring")
        remark = filled("# recompute: " + "word " * 20)
    assert text.splitlines()[1].startswith(" " * 13)
    assert all(line.startswith("#") for line in remark.splitlines())
    assert filled("word " * 40) == "word " * 40
