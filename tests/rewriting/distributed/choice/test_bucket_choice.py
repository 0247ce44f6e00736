"""``bucket_mb="auto"``: sizes of buckets by the link, the same on all ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphopt import GraphoptError
from graphopt.passes import DataParallel
from graphopt.rewriting.distributed.choice.bucket_choice import fastest_limit
from graphopt.rewriting.distributed.prediction.link import Link
from graphopt.rewriting.distributed.prediction.predict import predict_workload
from graphopt.rewriting.distributed.prediction.strategies import Dense
from graphopt.rewriting.distributed.prediction.workload import Workload
from tests.support.exchanging import links, workload, workloads
from tests.support.properties import examples
from tests.support.ranks import run_ranks

LARGE = [(1024, 1024)] * 16
"""Gradients of 4 MiB each, in backward at equal distances."""


def test_a_link_that_answers_late_gets_few_messages() -> None:
    made = workload(*LARGE)
    late, _ = fastest_limit(made, 4, Link(1e9, latency=1.0), 1.0)
    assert late >= 64


def test_a_link_without_latency_gets_small_buckets() -> None:
    """What is exchanged behind the last gradient of backward is the last bucket, which nothing hides."""
    made = workload(*LARGE)
    limit, seconds = fastest_limit(made, 4, Link(5e7), 1.0)
    assert limit <= 4
    default = predict_workload(made, 4, Link(5e7), Dense()).step
    assert seconds < 0.9 * default


@given(workloads(), st.integers(2, 64), links, st.floats(0, 64))
@examples(30)
def test_the_choice_is_within_a_percent_of_any_size(made: Workload, ranks: int, link: Link, first: float) -> None:
    limit, seconds = fastest_limit(made, ranks, link, first)
    for other in (0.25, 1.0, 8.0, 32.0, 128.0):
        strategy = Dense(bucket_mb=other, first_bucket_mb=min(first, other))
        assert seconds <= 1.01 * predict_workload(made, ranks, link, strategy).step
    chosen = Dense(bucket_mb=limit, first_bucket_mb=min(first, limit))
    assert seconds == predict_workload(made, ranks, link, chosen).step


def test_ranks_measure_once_and_take_the_same_size(tmp_path: Path) -> None:
    script = """
import graphopt
from graphopt.passes import *
from graphopt.rewriting.distributed.prediction import measured_link
from graphopt.rewriting.distributed.prediction.link import Link
from tests.support.training import mean_square

measured = []
def measure_link(group, device):
    measured.append(group.name)
    return Link(1e9 * (rank + 1), latency=1e-6)
measured_link.measure_link = measure_link

def trained(bucket):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = graphopt.optimize_step(model, optimizer, [DataParallel(bucket)], loss=mean_square)
    generator = torch.Generator().manual_seed(rank)
    losses = [step(torch.randn(8, 256, generator=generator)) for _ in range(2)]
    lines = [line for record in step.records for line in record.changed.lines if line.startswith("buckets of")]
    losses.append(step(torch.randn(4, 256, generator=generator)))
    lines += [line for record in step.records for line in record.changed.lines if line.startswith("buckets of")]
    return step, lines, [*losses, *model.parameters()]

step, lines, ours = trained("auto")
say(len(measured))
say(all(map(torch.equal, ours, trained(32.0)[-1])))
say(lines)
trained("auto")
say(len(measured))
"""
    one, two = run_ranks(script, 2, tmp_path / "store")
    assert one == two
    times, equal, (line, known), again = one
    assert times == again == 1
    assert equal
    assert "on links of 8 Gbit/s and 1.00 µs a round, as measured" in line  # by rank 0
    assert known == f"{line.split(':')[0]}, as they were chosen before"


def test_other_texts_are_refused() -> None:
    with pytest.raises(GraphoptError, match="bucket_mb is a number of MiB of at least 0, or 'auto', got 'some'"):
        DataParallel("some")
    with pytest.raises(GraphoptError, match="first_bucket_mb"):
        DataParallel("auto", -1.0)
