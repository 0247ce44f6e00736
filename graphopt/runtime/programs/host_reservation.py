"""Host memory for what a program offloads, taken before its first step."""

from __future__ import annotations

from torch import fx

from graphopt.ir.host import local_ranks
from graphopt.ir.node import value_of
from graphopt.ir.ops import transfers
from graphopt.ir.ops.storage import transfer
from graphopt.ir.ops.values import storage_bytes
from graphopt.ir.program import Program

__all__ = ["host_bytes", "reserve_host"]


def host_bytes(program: Program) -> dict[str, int]:
    """Bytes of host memory that one run of a program needs at once, for each type of device that it moves from.

    A block is in use from the call that starts its copy away to the last call that reads its handle. What is moved to a
    disk needs none.
    """
    position = {node: index for index, node in enumerate(program.graph.nodes)}
    blocks: dict[str, list[tuple[int, int, int]]] = {}
    for node in program.graph.nodes:
        if node.target is transfer.offload and node.args[1] == "host":
            value = value_of(node.args[0])
            block = storage_bytes(value), position[node], max(position[user] for user in _holders(node))
            blocks.setdefault(value.device.type, []).append(block)
    return {kind: transfers.slab_bytes(found) for kind, found in blocks.items()}


def _holders(handle: fx.Node) -> list[fx.Node]:
    """The calls that hold a handle: those that read it, and those that read what its wait hands on."""
    found = [handle]
    for user in handle.users:
        found.append(user)
        if user.target is transfer.offload_wait:
            found += user.users
    return found


def reserve_host(program: Program) -> None:
    """Take the host memory that a program needs for what it offloads; nothing where it moves nothing to the host.

    To be called when a program has got its passes, before its first run, so that a host without room for all ranks
    (``LOCAL_WORLD_SIZE`` of them) is an error before the first step, and no step waits for memory.

    Raises:
        GraphoptError: with the bytes that all ranks need, and those that are there.
    """
    ranks = local_ranks()
    for kind, nbytes in host_bytes(program).items():
        transfers.reserve(nbytes, device=kind, ranks=ranks)
