"""What each collective of a program moves."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import graphopt
from graphopt.ir.ops import schema
from graphopt.passes import DataParallel, ShardOptimizer
from graphopt.rewriting.distributed.prediction.collective import group_size, moved
from tests.support.training import mean_square


def test_it_is_counted_by_the_bytes_that_a_rank_puts_in_and_the_ranks_of_the_group() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        found = {}
        for passes in ([DataParallel()], [DataParallel(), ShardOptimizer()]):
            model = nn.Linear(16, 8, bias=False)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
            step = graphopt.optimize_step(model, optimizer, passes, loss=mean_square)
            program = step.prepare(torch.randn(4, 16)).program
            starts = [node for node in program.graph.nodes if schema.is_collective(node) and not schema.hands_on(node)]
            assert {group_size(node) for node in starts} == {4}
            found |= {schema.op_name(node): moved(node) for node in starts}
    finally:
        dist.destroy_process_group()
    size = 16 * 8 * 4
    assert (found["all_reduce_"].payload, found["all_reduce_"].sent) == (size, 2 * 3 / 4 * size)
    assert (found["reduce_scatter_sum"].payload, found["reduce_scatter_sum"].received) == (size, 3 / 4 * size)
    gathered = found["all_gather_into_tensor"]
    assert (gathered.payload, gathered.received) == (size / 4, 3 / 4 * size)
