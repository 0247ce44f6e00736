"""The machine that passes are chosen for: its devices, what joins them, and the bytes that a program may take."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from graphopt import _torch
from graphopt.analysis.costs.cost import check_cost
from graphopt.analysis.costs.profiles import DeviceProfile, device_profile
from graphopt.errors import ArgumentError
from graphopt.ir.host import local_ranks
from graphopt.ir.words.written_units import format_bytes, parse_bytes
from graphopt.rewriting.distributed.prediction.link import parse_bandwidth
from graphopt.rewriting.memory.free_memory import free_bytes

__all__ = ["Machine", "machine_of", "memory_left"]


@dataclass(frozen=True, slots=True)
class Machine:
    """What is trained on.

    Attributes:
        devices: how many.
        profile: of each, with the links between them; None for the one that is here.
        budget: bytes of each that the program may take.
        cost: where seconds come from.
    """

    devices: int
    profile: DeviceProfile | None
    budget: int
    cost: str = "measured"

    @classmethod
    def of(
        cls, devices: int, profile: DeviceProfile | None, memory: int | None, model: nn.Module, cost: str = "measured"
    ) -> Machine:
        """Devices with so many bytes each; by default with what they have, or with what is left where the model is.

        Raises:
            ArgumentError: where the driver alone takes more.
        """
        if profile is None:
            return cls(devices, None, memory_left(model) if memory is None else memory, cost)
        memory = profile.memory_bytes if memory is None else memory
        if memory <= profile.context_bytes:
            raise ArgumentError(
                f"{format_bytes(memory)} of memory are not enough for the driver of {profile.name}, which takes "
                f"{format_bytes(profile.context_bytes)}"
            )
        return cls(devices, profile, memory - profile.context_bytes, cost)

    @property
    def beside(self) -> int:
        """Bytes of each device's memory that are not the program's."""
        return 0 if self.profile is None else self.profile.context_bytes

    @property
    def hosts(self) -> int:
        """On how many hosts the devices are; 1 where these would not all have as many."""
        per_host = 1 if self.profile is None else self.profile.devices_per_host
        return self.devices // per_host if self.devices % per_host == 0 else 1

    def __str__(self) -> str:
        name = "this device" if self.profile is None else self.profile.name
        return name if self.devices == 1 else f"{self.devices} x {name}"

    @contextlib.contextmanager
    def ranks(self) -> Iterator[None]:
        """While the block runs, this process is one of its ranks: the first, where there are no processes for them.

        Raises:
            ArgumentError: where there are others than these.
        """
        there = dist.get_world_size() if dist.is_available() and dist.is_initialized() else self.devices
        if there != self.devices:
            raise ArgumentError(
                f"{there} ranks have a process group here, and devices={self.devices} are to be planned for: give "
                f"devices={there}, or ask in a process without a group"
            )
        per_host = 1 if self.profile is None else self.profile.devices_per_host
        with _torch.ranks_without_network(self.devices, per_host):
            yield


def memory_left(model: nn.Module) -> int:
    """The bytes that a program may take on the device of a model: what the model holds, and 95 % of what is free.

    On a CPU each rank has its part of that.
    """
    held = [*model.parameters(), *model.buffers()]
    device = held[0].device if held else torch.device("cpu")
    sharing = local_ranks() if device.type == "cpu" else 1
    return sum(tensor.numel() * tensor.element_size() for tensor in held) + int(0.95 * free_bytes(device) / sharing)


def machine_of(
    model: nn.Module, memory: int | str | None, devices: int, device: Any, network: str | None, cost: str
) -> Machine:
    """The machine that the arguments of ``advise`` describe.

    Raises:
        ArgumentError: for what does not go together, or is not written as it has to be.
    """
    profile = None if device is None else device_profile(device)
    check_cost(cost)
    if profile is not None and cost != "measured":
        raise ArgumentError(f"cost={cost!r} is for the device that is here, and device= names another one: give one")
    if profile is None and devices > 1:
        raise ArgumentError(
            f"devices={devices} needs device=, whose seconds and links are planned with: device='h100-80gb'"
        )
    if network is not None:
        if profile is None:
            raise ArgumentError(f"network={network!r} joins devices: give device= and devices= too")
        profile = replace(profile, network_bandwidth=parse_bandwidth(network))
    try:
        given = parse_bytes(memory) if isinstance(memory, str) else memory
    except ValueError as error:
        raise ArgumentError(f"memory={memory!r}: {error}") from None
    return Machine.of(devices, profile, None if given is None else int(given), model, cost)
