"""A timeline for each device that values are on, out of the storages of all of them together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import fx

from graphopt import _torch
from graphopt.analysis.costs.isolated_call import call_tensors
from graphopt.ir.memory.timeline import MemoryTimeline, Storage

__all__ = ["alive_bytes", "device_of", "split_by_device"]


def device_of(tensor: torch.Tensor) -> str:
    """The device that a tensor is on, ``cpu`` or ``cuda:0``; the type of the device that it stands for one on."""
    return str(tensor.device) if tensor.device.type != "cpu" else _torch.device_kind(tensor)


def alive_bytes(storages: Sequence[Storage], temporaries: Sequence[int]) -> tuple[list[int], int]:
    """Bytes alive at each call, its temporaries among them, and the bytes of inputs, which are alive throughout."""
    change = [0] * (len(temporaries) + 2)
    for storage in storages:
        if not storage.is_input:
            change[storage.first] += storage.bytes
            change[storage.last + 1] -= storage.bytes
    resident = sum(storage.bytes for storage in storages if storage.is_input)
    alive, found = resident, []
    for index, temporary in enumerate(temporaries):
        alive += change[index]
        found.append(alive + temporary)
    return found, resident


def split_by_device(together: MemoryTimeline) -> MemoryTimeline:
    """The timeline of the device of most interest, with those of the others.

    Args:
        together: of a program, with the storages of all devices.
    """
    total: Counter[str] = Counter()
    for storage in together.storages:
        total[storage.device] += storage.bytes
    if len(total) < 2:
        return replace(together, where=next(iter(total), "cpu"))
    first = max(sorted(total), key=lambda device: (device != "cpu", total[device]))
    others = {device: _only(together, device) for device in sorted(total) if device != first}
    return replace(_only(together, first), others=others)


def _only(together: MemoryTimeline, device: str) -> MemoryTimeline:
    """What is on one device: storages elsewhere count no bytes, and calls that run elsewhere no temporaries."""
    mine = {id(s): s if s.device == device else replace(s, bytes=0) for s in together.storages}
    pairs = zip(together.nodes, together.temporaries, strict=True)
    temporaries = [size if size and _runs_on(node, device) else 0 for node, size in pairs]
    storages = list(mine.values())
    alive, resident = alive_bytes(storages, temporaries)
    refers = {node: [mine[id(storage)] for storage in owned] for node, owned in together.refers.items()}
    return replace(
        together,
        bytes=alive,
        resident_bytes=resident,
        storages=storages,
        temporaries=temporaries,
        refers=refers,
        where=device,
    )


def _runs_on(node: fx.Node, device: str) -> bool:
    """Whether a call runs on a device: on the accelerator that one of its tensors is on, else on the CPU."""
    found = {device_of(tensor) for tensor in call_tensors(node)} - {"cpu"}
    return device in found if found else device == "cpu"
