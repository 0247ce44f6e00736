"""What several processes measure of their link, and whether they choose alike by it, for DeepGradientCompression."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import graphopt
from graphopt.ir.ops.communication.groups import find_group
from graphopt.passes import DataParallel, DeepGradientCompression
from graphopt.rewriting.distributed.choice import sparse_or_dense
from graphopt.rewriting.distributed.prediction.measured_link import measure_link
from tests.support.compressing import Found, batch, build, loss, same_on_all, sgd


def found() -> Found:
    """The link, with the bytes that measuring it took; and what is chosen for three costs of work."""
    counted: list[int] = []
    reduce = dist.all_reduce

    def counting(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        counted.append(tensor.numel() * tensor.element_size())
        return reduce(tensor, *arguments, **options)

    with mock.patch.object(dist, "all_reduce", counting):
        link = measure_link(find_group(""), torch.device("cpu"))
        return {
            "link": [*astuple(link), sum(counted)],
            "chosen, measured": chosen("measured", 1e-9, counted),
            "chosen, one rank selects slowly": chosen("1Gbit", 1e-3 if dist.get_rank() else 1e-9, counted),
            "chosen, all select fast": chosen("1Gbit", 1e-9, counted),
        }


def chosen(bandwidth: str, select: float, counted: list[int]) -> list[Any]:
    """In a group of its own, with costs of work of this rank's own."""
    group = dist.new_group().group_name
    model = build()
    compression = DeepGradientCompression(sparsity=(0.98,), rampup_step=1, min_elements=500, bandwidth=bandwidth)
    step = graphopt.optimize_step(model, sgd(model), [DataParallel(group=group), compression], loss=loss)
    same, rates = [], sparse_or_dense.Rates(1e-10, select)
    with mock.patch.object(sparse_or_dense, "rates_of", return_value=rates):
        for number in range(2):
            step(*batch(number))
            same.append(same_on_all(model))
        exchanged, record = len(counted), step.records[-1].changed
        if dist.get_rank() == 0:  # alone: other shapes have the same exchanges, so that nothing is agreed on again
            x, y = batch(0)
            step.prepare(x[:4], y[:4])
    return [same, list(record.tensors), list(record.lines), len(counted) - exchanged]
