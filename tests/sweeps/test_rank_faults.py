"""Any of three ranks ends or hangs in any phase of a step: the others name it, and a restart goes on bit for bit."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch

from tests.support.failing import FailAt, FailSaving, Outcome, Task, resumed, run_tasks

pytestmark = pytest.mark.sweep

PHASES = ("forward", "backward", "sync", "update")
CODES = {"kill": -9, "terminate": -15, "exit": 0, "hang": None}
WAYS = ("whole step", "shard-optimizer", "shard-parameters")
WORLD = 3


@pytest.fixture(scope="module", params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def whole(way: str, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Ranks that nothing happens to."""
    return run_tasks({way: Task(tmp_path_factory.mktemp("whole"), world=WORLD, way=way)})[way]


@pytest.mark.parametrize(("how", "rank"), list(product(CODES, range(WORLD))))
def test_the_others_name_the_rank_and_a_restart_continues(
    way: str, how: str, rank: int, whole: Outcome, tmp_path: Path
) -> None:
    """In each of four phases."""
    tasks = {
        phase: Task(
            tmp_path / phase, world=WORLD, way=way, fail=FailAt(phase, step=3, rank=rank, how=how), timeout=10,
        )
        for phase in PHASES
    }  # fmt: skip
    for phase, outcome in run_tasks(tasks).items():
        others = [outcome.found[other] for other in range(WORLD) if other != rank]
        assert outcome.codes == [CODES[how] if other == rank else 0 for other in range(WORLD)], phase
        assert [found["ranks"] for found in others] == [(rank,)] * (WORLD - 1), (phase, others)
    for again in run_tasks({phase: resumed(task) for phase, task in tasks.items()}).values():
        assert again.codes == whole.codes == [0] * WORLD
        for found, expected in zip(again.found, whole.found, strict=True):
            assert torch.equal(found["parameters"], expected["parameters"])


@pytest.mark.parametrize("how", ["kill", "hang"])
def test_a_rank_that_fails_while_all_save_is_named_and_the_checkpoint_before_is_whole(how: str, tmp_path: Path) -> None:
    """While any of three ranks puts its state together or writes it, and while the first one finishes."""
    moments = [*product(("packed", "written"), range(WORLD)), ("finished", 0)]
    way = "shard-parameters"
    tasks = {
        f"{moment} {rank}": Task(
            tmp_path / f"{moment}-{rank}", world=WORLD, way=way, fail=FailSaving(moment, 3, rank, how), timeout=10,
        )
        for moment, rank in moments
    }  # fmt: skip
    outcomes = run_tasks({way: Task(tmp_path / "whole", world=WORLD, way=way), **tasks})
    whole = outcomes.pop(way)
    for (name, outcome), (_, rank) in zip(outcomes.items(), moments, strict=True):
        others = [outcome.found[other] for other in range(WORLD) if other != rank]
        assert outcome.codes == [CODES[how] if other == rank else 0 for other in range(WORLD)], name
        assert [found.get("ranks") for found in others] == [(rank,)] * (WORLD - 1), (name, others)
        assert all("the saving of a checkpoint" in found["error"] for found in others), (name, others)
    for again in run_tasks({name: resumed(task) for name, task in tasks.items()}).values():
        assert again.codes == whole.codes == [0] * WORLD
        for found, expected in zip(again.found, whole.found, strict=True):
            assert torch.equal(found["parameters"], expected["parameters"])
