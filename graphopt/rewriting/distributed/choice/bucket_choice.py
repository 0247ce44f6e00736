"""How large buckets of gradients become on a link: those with which the dry run expects the fastest step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graphopt.ir.ops.communication.groups import Group
from graphopt.ir.program import Program
from graphopt.ir.words.written_units import format_seconds
from graphopt.rewriting.distributed.agreed_decision import decided_in_group
from graphopt.rewriting.distributed.dense.buckets import BucketSizes
from graphopt.rewriting.distributed.prediction.link import Link, format_bandwidth
from graphopt.rewriting.distributed.prediction.measured_link import link_between
from graphopt.rewriting.distributed.prediction.predict import predict_workload
from graphopt.rewriting.distributed.prediction.strategies import Dense
from graphopt.rewriting.distributed.prediction.workload import Workload, workload_of

__all__ = ["BucketChoice", "choose_buckets", "fastest_limit"]

_MIB = 2**20

_LIMITS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
"""MiB that are tried."""

_CLOSE = 1.01
"""How much longer than the fastest step one with larger buckets, and fewer messages, may be expected to take."""


@dataclass(frozen=True, slots=True)
class BucketChoice:
    """Sizes of buckets.

    Attributes:
        mib: that close a bucket.
        first_mib: that close the first one.
        line: why, for people; empty where they are as a user has given them.
    """

    mib: float
    first_mib: float
    line: str = ""

    @property
    def sizes(self) -> BucketSizes:
        """The same in bytes."""
        return BucketSizes(int(self.mib * _MIB), int(self.first_mib * _MIB))


def choose_buckets(program: Program, group: Group, device: torch.device, first_mib: float) -> BucketChoice:
    """The sizes of buckets for a program's gradients, by the link between the ranks of a group.

    All ranks come here together for the first time: they measure the link, once in a process, and take what rank 0
    chooses. It stays for all programs of a step or model, and in a run that goes on from a saved state.

    Args:
        program: of stage joint or step, whose gradients are not exchanged yet.
        group: at least two ranks.
        device: of the gradients.
        first_mib: MiB that close the first bucket, where others become no smaller.

    Raises:
        GraphoptError: for a group whose links cannot be measured (backend ``fake``).
    """
    numbers = program.context.step.numbers
    key = f"buckets over {group.name}/MiB"
    if key in numbers:
        line = f"buckets of {numbers[key]:g} MiB, as they were chosen before"
    else:
        link = link_between(program, group, device)
        numbers[key], line = decided_in_group(group, lambda: _chosen(program, group.size, link, first_mib))
    return BucketChoice(numbers[key], min(first_mib, numbers[key]), line)


def _chosen(program: Program, ranks: int, link: Link, first_mib: float) -> tuple[float, str]:
    workload = workload_of(program, "roofline")
    told = ", as measured" if program.context.device is None else f", those of {program.context.device.name}"
    limit, seconds = fastest_limit(workload, ranks, link, first_mib)
    return limit, (
        f"buckets of {limit:g} MiB: a step of {format_seconds(seconds)} is expected with them, by the roofline, on "
        f"links of {format_bandwidth(link.bandwidth)} and {format_seconds(link.latency)} a round{told}"
    )


def fastest_limit(workload: Workload, ranks: int, link: Link, first_mib: float) -> tuple[float, float]:
    """The MiB that close a bucket where the step is expected to be the fastest, and the seconds of that step.

    Args:
        workload: of one rank.
        ranks: 2 or more.
        link: of each.
        first_mib: MiB that close the first bucket, where others become no smaller.
    """
    found = {
        limit: predict_workload(
            workload, ranks, link, Dense(bucket_mb=limit, first_bucket_mb=min(first_mib, limit))
        ).step
        for limit in _LIMITS
    }
    close = _CLOSE * min(found.values())
    limit = max(limit for limit, seconds in found.items() if seconds <= close)
    return limit, found[limit]
