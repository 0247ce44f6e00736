"""Records of passes: printed in lines, and found by the name of a pass."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import graphopt
from graphopt import Changed, GraphoptError
from graphopt.passes import FitMemory, MixedPrecision, Recompute
from graphopt.rewriting.pass_ import PassRecord, Records
from tests.support.training import Blocks, next_token


def record(name: str, stage: str = "joint", **changed: object) -> PassRecord:
    what = Changed(**changed)  # type: ignore[arg-type]
    return PassRecord(name, name, stage, "bitwise", what, 0.25, 10, 12, 4000, 2000)  # type: ignore[arg-type]


RECORDS = Records(
    [
        record("mixed-precision", "forward", counts={"casts": 1}, lines=("one line", "another")),
        record("mixed-precision", counts={"casts": 3}),
        record("fit-memory", reason="it fits", details={"frontier": list}),
    ]
)


def test_a_line_for_each_pass_and_its_own_lines_below() -> None:
    said = (
        "mixed-precision: 1 cast; peak 4.0 kB -> 2.0 kB (predicted); 0.25 s\n"
        "  one line\n"
        "  another\n"
        "mixed-precision: 3 casts; peak 4.0 kB -> 2.0 kB (predicted); 0.25 s\n"
        "fit-memory: nothing: it fits; peak 4.0 kB -> 2.0 kB (predicted); 0.25 s"
    )
    assert str(RECORDS) == repr(RECORDS) == said
    assert repr(RECORDS[2]) == said.splitlines()[-1]
    assert "lambda" not in repr([RECORDS[2]]) + repr(RECORDS[2].changed)
    assert str(Records()) == "no passes"


def test_by_name_by_place_and_in_slices() -> None:
    assert RECORDS["fit-memory"] is RECORDS[2] is RECORDS[-1]
    assert isinstance(RECORDS[1:], Records)
    assert RECORDS[1:]["mixed-precision"] is RECORDS[1]
    assert list(RECORDS) == [RECORDS[0], RECORDS[1], RECORDS[2]]
    assert "fit-memory" in RECORDS
    assert "offload" not in RECORDS
    assert RECORDS[0] in RECORDS
    with pytest.raises(IndexError):
        RECORDS[3]
    assert str(copy.copy(RECORDS[:1])) == str(RECORDS[:1])
    assert str(pickle.loads(pickle.dumps(RECORDS[:2]))) == str(RECORDS[:2])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fit_memory", "there is no record of a pass 'fit_memory'; did you mean 'fit-memory'?"),
        ("ofload", "there is no record of a pass 'ofload'; those that ran are mixed-precision, fit-memory"),
        (
            "mixed-precision",
            "'mixed-precision' ran 2 times, once for each program or stage: records[0] (forward stage), records[1]",
        ),
    ],
)
def test_a_name_that_is_not_that_of_one_record(name: str, message: str) -> None:
    with pytest.raises(KeyError) as error:
        RECORDS[name]
    assert isinstance(error.value, GraphoptError)
    assert str(error.value).startswith(message)
    with pytest.raises(KeyError, match="there is no record of a pass 'offload'; no pass ran"):
        Records()["offload"]


def test_the_records_of_models_and_steps() -> None:
    model, tokens = Blocks(layers=2, p=0.0), torch.randint(11, (2, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    passes = [MixedPrecision("bfloat16"), Recompute("blocks.0")]
    step = graphopt.optimize_step(model, optimizer, passes, loss=next_token).prepare(tokens)
    assert step.records["recompute"].changed.counts["recomputed"] > 0
    with pytest.raises(KeyError, match=r"'mixed-precision' ran \d times.* records\[0\] \(forward stage\)"):
        step.records["mixed-precision"]
    optimized = graphopt.optimize(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), [FitMemory("100%")])
    optimized(torch.randn(2, 4)).sum().backward()
    assert optimized.records["fit-memory"].name == "fit-memory"
    assert str(optimized.records).startswith("fit-memory{budget=100%}: nothing: the peak without recomputation, ")
