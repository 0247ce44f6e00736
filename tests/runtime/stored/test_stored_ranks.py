"""Captures of several ranks that train together: read by ranks that begin anew, with the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import run_ranks

_TRAIN = """
import os
import graphopt
from graphopt.runtime.stored.program_folder import refusals
from pathlib import Path
from torch import nn

def use(folder):
    os.environ["GRAPHOPT_CACHE"], os.environ["GRAPHOPT_CACHE_PROGRAMS"] = folder, "1"

def model():
    torch.manual_seed(rank)  # which rank 0 gives to all
    inner = [layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.GELU())]
    return nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), *inner, nn.Linear(64, 4))

def mean(model, x, y):
    return nn.functional.cross_entropy(model(x), y)

def train(passes):
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    step = graphopt.optimize_step(net, optimizer, passes, loss=mean)
    losses = []
    for number in range(5):
        draw = torch.Generator().manual_seed(10 * rank + number)
        losses.append(step(torch.randn(256, 8, generator=draw), torch.randint(4, (256,), generator=draw)).item())
    loaded = step.snapshots[-1][0].endswith("loaded from the cache")
    return loaded, losses, [tensor.clone() for tensor in net.state_dict().values()]

def same(one, other):
    return one[1] == other[1] and all(map(torch.equal, one[2], other[2]))
"""

_EACH = """
for passes in PIPELINES:
    use(FOLDER + "/common")
    first = train(passes)
    dist.barrier()
    again = train(passes)
    if rank == 1:
        use(FOLDER + "/empty")
    alone = train(passes)
    say([str(passes), first[0], again[0], alone[0], same(first, again), same(first, alone)])
"""

PIPELINES = [
    ["data-parallel"],
    ["data-parallel", "mixed-precision{level=O1}", "clip-gradients{max-norm=1.0}"],
    ["data-parallel", "fit-memory{budget=90%}"],
    ["data-parallel", "compress-gradients"],
    ["data-parallel", "local-sgd{k-steps=2}"],
    ["data-parallel", "adaptive-local-sgd"],
    ["data-parallel", "diloco{every=2 delay=1}"],
    ["data-parallel", "shard-optimizer"],
]


@pytest.mark.sweep(but=("data-parallel+fit-memory", "data-parallel+shard-optimizer"))
@pytest.mark.parametrize("passes", PIPELINES, ids=lambda passes: "+".join(each.partition("{")[0] for each in passes))
def test_ranks_read_their_programs_and_need_not_all_find_one(passes: list[str], tmp_path: Path) -> None:
    script = _TRAIN + _EACH.replace("PIPELINES", repr([passes])).replace("FOLDER", repr(str(tmp_path)))
    for rank, said in enumerate(run_ranks(script, 2, tmp_path / "store")):
        for name, captured, read, alone, same, same_alone in said:
            assert not captured, name
            assert read, name
            assert alone == (rank == 0), name
            assert same, name
            assert same_alone, name


def test_what_ranks_tell_each_other_while_they_rewrite_is_not_kept(tmp_path: Path) -> None:
    script = _TRAIN + _EACH.replace("alone = train(passes)", "alone = again").replace(
        "PIPELINES", "[['data-parallel{bucket-mb=auto}']]"
    ).replace("FOLDER", repr(str(tmp_path)))
    script += f"say([reason for _, reason in refusals(Path({str(tmp_path)!r}) / 'common' / 'programs')])\n"
    for said in run_ranks(script, 2, tmp_path / "store"):
        (_, captured, read, _, same, _), reasons = said
        assert (captured, read, same) == (False, False, True)
        assert reasons


def test_captures_with_a_pass_of_the_users_are_not_kept_where_ranks_train_together(tmp_path: Path) -> None:
    script = (
        _TRAIN
        + f"""
from dataclasses import dataclass

@dataclass(frozen=True)
class Own(graphopt.Pass):
    name, stage, numerics = "own", "step", "bitwise"
    def apply(self, program):
        return graphopt.Changed(reason="nothing")

use({str(tmp_path)!r})
say([train(["data-parallel", Own()])[0] for _ in range(2)])
say([reason for _, reason in refusals(Path({str(tmp_path)!r}) / "programs")])
"""
    )
    for found, reasons in run_ranks(script, 2, tmp_path / "store"):
        assert found == [False, False]
        assert "own is no pass of graphopt's" in reasons[0]


def test_another_number_of_ranks_has_its_own(tmp_path: Path) -> None:
    script = _TRAIN + f"use({str(tmp_path)!r})\nsay([train(['data-parallel'])[0]])\n"
    found = [run_ranks(script, world, tmp_path / f"store{number}") for number, world in enumerate((1, 2, 2, 1))]
    assert [[said[0][0] for said in ranks] for ranks in found] == [[False], [False, False], [True, True], [True]]
