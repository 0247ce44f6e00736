"""A step of several ranks that breaks on one of them: each rank's error says what the step has changed there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import run_ranks

SCRIPT = """
import os, time
os.environ["GRAPHOPT_RANK_TIMEOUT"] = "4"
from torch import nn
import graphopt
from graphopt.passes import DataParallel, FuseUpdate, ShardOptimizer, ShardParameters
from graphopt.runtime.state.sharded_parameter import is_sharded
from tests.support import failing

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
passes = [DataParallel(bucket_mb=0.01, first_bucket_mb=0.001), *PASSES, failing.FailAt("PHASE", 4, 1, "raise")]
step = graphopt.optimize_step(
    model,
    torch.optim.AdamW(model.parameters(), lr=0.1, fused=True),
    passes,
    loss=lambda model, x: model(x).square().mean(),
)
step.accumulate(EVERY)

def trained():
    found = [parameter for parameter in model.parameters() if not is_sharded(parameter)]
    found += [value for kept in step.optimizer.state.values() for value in kept.values()]
    return [tensor.detach().clone() for tensor in (*found, *step._store.tensors())]

def gradients():
    return [tensor.clone() for tensor in step._progress.gradients.values()]

x = torch.randn(8, 16)
for number in range(1, 4):
    failing._step = number
    step(x)
failing._step, before = 4, (trained(), gradients())
try:
    step(x)
    say("nothing was raised")
except Exception as error:
    same = [all(map(torch.equal, one, other)) for one, other in zip(before, (trained(), gradients()), strict=True)]
    say([type(error).__name__, str(error).partition("\\n")[0], getattr(error, "__notes__", []), *same])
time.sleep(1.5)  # for the other rank to ask why
sys.stdout.flush()
os._exit(0)  # the group cannot be left in order any more
"""

PASSES = {
    "plain": "[]",
    "early updates": "[FuseUpdate()]",
    "sharded state": "[ShardOptimizer()]",
    "sharded": "[ShardParameters(min_bytes=0, cost='roofline')]",
}

UNCHANGED = "the update of this step had not begun: it has changed no parameter, no gradient and no optimizer state"
ADDED = "the update of this step had not begun, but gradients of this batch have been added to those that are"
TORN = "the update of this step had begun, so that parameters and the optimizer's state are of two steps"


@pytest.mark.sweep(but=("plain-1-sync", "sharded-2-forward"))
@pytest.mark.parametrize("phase", ["forward", "sync", "update"])
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("passes", PASSES)
def test_each_rank_is_told_what_a_broken_step_has_changed(passes: str, every: int, phase: str, tmp_path: Path) -> None:
    script = SCRIPT.replace("PASSES", PASSES[passes]).replace("PHASE", phase).replace("EVERY", str(every))
    ((other,), (broken,)) = run_ranks(script, 2, tmp_path / "store", codes=[0, 0])
    assert broken[:2] == ["ValueError", "this batch is broken"]
    if other == "nothing was raised":
        assert phase == "update"
        assert passes != "sharded state"  # which sends parameters behind the update; nothing follows it elsewhere
    else:
        assert other[0] == "RankError"
        assert other[1].startswith("rank 1 failed by itself: ValueError: this batch is broken (in step 4, ")
    for _, _, (note,), same, gradients in [broken] if isinstance(other, str) else [broken, other]:
        if note.startswith(TORN):
            assert not same
        else:
            assert note == UNCHANGED or note.startswith(ADDED)
            assert same
            assert gradients == (note == UNCHANGED)
    assert broken[2][0].startswith(TORN if phase == "update" else UNCHANGED[:37])
