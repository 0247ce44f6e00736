"""How much memory is free on a device."""

from __future__ import annotations

import torch

from graphopt.errors import GraphoptError
from graphopt.runtime.transfers.hostmemory import available_host_bytes

__all__ = ["free_bytes"]


def free_bytes(device: torch.device) -> int:
    """Bytes that could be allocated on a device now: on CUDA what its driver and torch's cache have free, on a CPU what
    the system and this process's limits leave.

    Raises:
        GraphoptError: for another kind of device.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    if device.type == "cpu":
        found = available_host_bytes()
        if found is not None:
            return found
    raise GraphoptError(f"it is not known how much memory is free on {device}: give the budget in bytes")
