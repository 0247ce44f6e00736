"""The comparison with PyTorch's own ways, at a tiny size: budgets met, results equal, what is printed and written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.paths import BENCHMARKS

pytestmark = pytest.mark.sweep

BENCHMARK = BENCHMARKS / "memory_frontier.py"
PEERS = [
    "eager PyTorch", "checkpoint() per block", "selective, keeps sdpa", "selective, keeps products",
    "aot_eager, budget 1.0", "aot_eager, budget 0.4", "save_on_cpu",
]  # fmt: skip


@dataclass
class Run:
    """One run of the benchmark on one model with dropout."""

    printed: str
    result: dict[str, Any]
    picture: ElementTree.Element

    @property
    def rows(self) -> dict[str, dict[str, Any]]:
        (model,) = self.result["models"]
        return {row["way"]: row for row in model["rows"]}

    @property
    def ours(self) -> list[dict[str, Any]]:
        return [row for row in self.rows.values() if row["series"] == "graphopt"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("frontier")
    figures, picture = folder / "figures.json", folder / "chart.svg"
    command = [sys.executable, str(BENCHMARK), "--quick", "--models", "gpt-dropout", "--threads", "1"]
    environment = {**os.environ, "GRAPHOPT_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--json", str(figures), "--chart", str(picture)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return Run(done.stdout, json.loads(figures.read_text()), ElementTree.parse(picture).getroot())


def test_every_way_ran_and_has_figures(run: Run) -> None:
    assert list(run.rows)[: len(PEERS)] == PEERS
    assert [row["way"] for row in run.rows.values() if row["error"]] == []
    assert all(row["peak_bytes"] > 0 and row["time_ratio"] > 0 for row in run.rows.values())
    assert run.rows["eager PyTorch"]["time_ratio"] == 1
    for way in run.rows:
        assert way in run.printed


def test_ours_meets_each_budget_as_predicted(run: Run) -> None:
    budgets = [row["budget_bytes"] for row in run.ours if row["budget_bytes"] is not None]
    assert len(budgets) == 2
    eager = run.rows["eager PyTorch"]["peak_bytes"]
    assert min(budgets) < max(budgets) < eager
    for row in run.ours:
        assert row["predicted_peak_bytes"] == pytest.approx(row["peak_bytes"], rel=1e-3)
        if row["budget_bytes"] is not None:
            assert row["peak_bytes"] <= row["budget_bytes"] + 8  # the loss and its gradient, which the caller holds


def test_ours_is_equal_to_eager_with_dropout(run: Run) -> None:
    assert all(row["difference"] == 0 and row["buffers_equal"] for row in run.ours)


def test_it_shows_that_torch_draws_other_dropout_masks_below_budget_one(run: Run) -> None:
    assert run.rows["aot_eager, budget 1.0"]["difference"] == 0
    assert run.rows["aot_eager, budget 0.4"]["difference"] > 1e-2


def test_each_peer_meets_the_fastest_of_ours_that_fits(run: Run) -> None:
    (model,) = run.result["models"]
    assert [duel["way"] for duel in model["duels"]] == PEERS[1:-1]  # on a CPU, save_on_cpu saves nothing
    for duel in model["duels"]:
        fitting = [row for row in run.ours if row["peak_bytes"] <= duel["peak_bytes"]]
        fastest = min(fitting, key=lambda row: row["time_ratio"], default={"way": None})
        assert duel["ours"] == fastest["way"]


def test_the_picture_has_a_point_for_every_way(run: Run) -> None:
    titles = [element.text or "" for element in run.picture.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == len(run.rows) - 1
    assert sum(title.startswith("graphopt:") for title in titles) == len(run.ours)
