"""The measurements of others beside which predictions stand: each row says all that it takes to make the model."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tomllib
from typing import Any

import pytest

from graphopt.analysis.costs.profiles import PROFILES
from tests.support.paths import BENCHMARKS

DATA: dict[str, Any] = tomllib.loads((BENCHMARKS / "published_memory.toml").read_text(encoding="utf-8"))
ROWS = DATA["rows"]
NEEDED = {
    "what", "model", "config", "batch", "tokens", "precision", "optimizer", "checkpointing", "attention", "device",
    "on", "figure", "published", "source", "where", "leaves_out",
}  # fmt: skip


def keys_of(name: str, file: str) -> set[str]:
    """The keys of a table in a script, which is only read."""
    for node in ast.walk(ast.parse((BENCHMARKS / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name:
            assert isinstance(node.value, ast.Dict)
            return {ast.literal_eval(key) for key in node.value.keys if key is not None}
    raise AssertionError(f"{file} has no {name}")


@pytest.mark.parametrize("row", ROWS, ids=[row["what"] for row in ROWS])
def test_a_row_is_whole(row: dict[str, Any]) -> None:
    assert NEEDED <= set(row) <= NEEDED | {"baseline", "ranks"}
    assert ("ranks" in row) == (row["figure"] == "exchanged_tokens_per_second")
    assert set(DATA["configs"][row["config"]]) - {"groups"} == {"layers", "width", "heads", "ffn", "vocabulary"}
    assert set(DATA["sources"][row["source"]]) == {"title", "date"}
    assert row["device"] in PROFILES
    assert row["model"] in keys_of("MODELS", "published_models.py")
    assert row["figure"] in keys_of("FIGURES", "predictions.py")
    assert row["published"] > row.get("baseline", 0)


def test_there_are_rows_of_several_sources_and_devices() -> None:
    assert len(ROWS) >= 10
    assert len({row["source"] for row in ROWS}) >= 4
    assert len({row["device"] for row in ROWS}) >= 3
    assert len({row["what"] for row in ROWS}) == len(ROWS)


@pytest.mark.sweep
def test_predictions_are_made_and_stand_beside_what_was_published() -> None:
    command = [sys.executable, str(BENCHMARKS / "predictions.py"), "--match", "GPT-3", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)["results"]
    assert abs(found["distance"]) < 0.001
