"""The link of each rank: that of the device a program is planned for, or measured by all ranks of a group together."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from graphopt.analysis.costs.cost import DeviceProfile, profile_of_cost
from graphopt.errors import GraphoptError
from graphopt.ir.ops.communication.groups import Group, require_together, talking
from graphopt.ir.program import Program
from graphopt.rewriting.distributed.prediction.link import HostLink, Link
from graphopt.rewriting.distributed.prediction.volume import all_reduce

__all__ = ["agreed_link", "largest_of_all", "link_between", "link_of_profile", "measure_link"]

_ELEMENT = torch.float32.itemsize

_SMALLEST, _LARGEST = 2**16, 2**23
"""Bytes of the all-reduces that carry enough to be timed: doubled from the one to at most the other."""

_LONG_ENOUGH = 0.05
"""Seconds of an all-reduce, beside its latency, from which on its size is not doubled any more."""

_RUNS, _SMALL_RUNS = 5, 9
"""How many all-reduces of many bytes, and of one element, the medians are of."""

_SHORTEST = 1e-9
"""Seconds that are never gone below, so that a bandwidth is a number."""


_agreed: WeakKeyDictionary[Any, Link] = WeakKeyDictionary()
"""The links that were measured in this process, by the handles of their groups.

A rank may capture a program alone (another size of batch), so that nothing may be exchanged for a second one.
"""


def link_of_profile(profile: DeviceProfile, ranks: Sequence[int]) -> Link:
    """What joins devices of a profile: the links of a host, and the network where they are on several hosts.

    Args:
        profile: of all of them.
        ranks: theirs; those of a host follow one another.

    Raises:
        GraphoptError: where they are on several hosts and the profile says nothing of the network between these.
    """
    hosts = [rank // profile.devices_per_host for rank in ranks]
    inside = hosts.count(hosts[0]) if profile.peer_bandwidth else 1
    host = HostLink(inside, profile.peer_bandwidth, profile.peer_latency) if inside > 1 else None
    if len(ranks) > inside and not profile.network_bandwidth:
        raise GraphoptError(
            f"the profile of {profile.name} does not say what joins {len(ranks)} devices: give --network 400Gbit "
            "(network='400Gbit' in Python), or network_bandwidth in a file with a profile"
        )
    return Link(profile.network_bandwidth or profile.peer_bandwidth, profile.network_latency, host=host)


def link_between(program: Program, group: Group, device: torch.device, cost: str = "measured") -> Link:
    """The link between the ranks of a group.

    Args:
        program: planned for the ranks; where it is for a device that is not here, the links are those of its profile.
        group: of any size.
        device: as ``measure_link`` takes it.
        cost: where seconds come from, which may be a device.

    Raises:
        GraphoptError: as ``link_of_profile`` and ``measure_link`` raise it.
    """
    if group.size < 2:
        return Link(1.0)  # over which nothing goes
    profile = profile_of_cost(cost, program.context.device)
    if profile is not None and program.context.device is not None:
        return link_of_profile(profile, dist.get_process_group_ranks(group.handle))
    if profile is not None and (rate := profile.peer_bandwidth or profile.network_bandwidth):
        return Link(rate)  # ranks that are here, whose seconds are those of another device
    return agreed_link(group, device)


def agreed_link(group: Group, device: torch.device) -> Link:
    """The link between the ranks of a group, measured where it is asked for first, by all of them together.

    Args:
        group: of two ranks or more.
        device: as ``measure_link`` takes it.

    Raises:
        GraphoptError: as ``measure_link`` raises it.
    """
    if group.handle not in _agreed:
        require_together(group, "the link between them has not been measured")
        with talking():
            _agreed[group.handle] = measure_link(group, device)
    return _agreed[group.handle]


def measure_link(group: Group, device: torch.device) -> Link:
    """Measure what joins the ranks of a group; every rank of it has to call this, and gets the same figures.

    Moves all-reduces of zeros and nothing else: about ten of one element for the latency, then sizes that are doubled
    from 64 KiB until one takes a twentieth of a second or has 8 MiB, and five of that size for the bandwidth. That is
    less than a second on links of 10 Mbit/s and more. What the collective does besides (adding up, copying to and from
    the device) counts as time of the link, since exchanges of gradients do it too.

    Args:
        group: of two ranks or more.
        device: where the zeros are: that of the tensors which will be exchanged.

    Returns:
        the bandwidth in bytes per second of one rank in each direction, and the latency in seconds of each round of a
        ring; of the slowest rank, from the medians of the runs.

    Raises:
        GraphoptError: for a group of one rank, and for one whose backend moves nothing (``fake``).
    """
    if group.size < 2:
        raise GraphoptError(f"the process group {group.name!r} has one rank, and no link to measure")
    if dist.get_backend(group.handle) == "fake":
        raise GraphoptError(
            f"the process group {group.name!r} has the backend 'fake', which moves nothing: its links cannot be "
            "measured; give the bandwidth as a figure, such as '1Gbit', and buckets in MiB"
        )
    empty = _seconds(group, device, _ELEMENT, _SMALL_RUNS)
    size = _SMALLEST
    while size < _LARGEST and _seconds(group, device, size, 1) - empty < _LONG_ENOUGH:
        size *= 2
    taken = _seconds(group, device, size, _RUNS)
    bandwidth = all_reduce(size, group.size).sent / max(taken - empty, _SHORTEST)
    return Link(bandwidth, empty / (2 * (group.size - 1)))


def largest_of_all(figures: Sequence[float], group: Group, device: torch.device) -> list[float]:
    """The largest of each figure over the ranks of a group, which all have to call this.

    Args:
        figures: as many on every rank.
        group: the ranks.
        device: that the group's backend exchanges tensors of.
    """
    shared = torch.tensor(figures, dtype=torch.float64, device=device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=group.handle)
    return [float(figure) for figure in shared.tolist()]


def _seconds(group: Group, device: torch.device, size: int, runs: int) -> float:
    """The median of the seconds of all-reduces of ``size`` bytes, on the rank where it is largest."""
    zeros = torch.zeros(size // _ELEMENT, device=device)
    taken = []
    for _ in range(runs):
        _finish(device)
        begin = time.perf_counter()
        dist.all_reduce(zeros, group=group.handle)
        _finish(device)
        taken.append(time.perf_counter() - begin)
    return largest_of_all([median(taken)], group, device)[0]


def _finish(device: torch.device) -> None:
    """Wait for what runs on a device; NCCL's collectives only wait in line behind it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
