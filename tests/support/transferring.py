"""What the tests of the transfer ops share: round trips, programs whose activations are moved, gates on copies."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from graphopt import Phase, Program
from graphopt.ir.node import info, value_of
from graphopt.ir.ops import schema, transfers
from graphopt.ir.ops.storage import transfer
from graphopt.ir.ops.transfers import Engine
from graphopt.ir.ops.transfers.disk import DiskSpace
from graphopt.ir.ops.transfers.slab import HostSpace
from graphopt.ir.ops.values import storage_bytes

TIERS = transfers.TIERS


def elements(x: torch.Tensor) -> int:
    """How many elements the storage of ``x`` has."""
    return x.untyped_storage().nbytes() // x.element_size()


def held(x: torch.Tensor, tier: str = "host") -> torch.Tensor:
    """A handle of ``x``, whose copy away is done."""
    return transfer.offload_wait(transfer.offload(x, tier), x)


def started(handle: torch.Tensor, x: torch.Tensor, **other: Any) -> torch.Tensor:
    """A tensor like ``x`` into which what ``handle`` holds is being copied; ``other`` replaces arguments."""
    args = {
        "size": list(x.shape), "stride": list(x.stride()), "storage_offset": x.storage_offset(),
        "storage_size": elements(x), "dtype": x.dtype, "device": x.device,
    }  # fmt: skip
    return transfer.prefetch(handle, **{**args, **other})


def back(handle: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A tensor like ``x`` that has been copied back."""
    return transfer.prefetch_wait(started(handle, x), handle)


def round_trip(x: torch.Tensor, tier: str = "host") -> torch.Tensor:
    """``x``, away and back."""
    return back(held(x, tier), x)


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same storage to the last bit, and see it in the same way."""
    seen = [(t.shape, t.stride(), t.storage_offset(), t.dtype, t.device) for t in (one, other)]
    left, right = (torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage()) for t in (one, other))
    return seen[0] == seen[1] and torch.equal(left, right)


def stored_bytes() -> int:
    """Bytes held now."""
    return transfers.statistics().stored_bytes


@contextmanager
def engine_in(folder: Path) -> Iterator[Engine]:
    """While inside, the process has another engine, whose file is in ``folder``; it must hold nothing at the end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfers._process, "engine", Engine(disk_directory=folder))
        for name in ("disk_directory", "disk_limit"):  # of the process, which a test may configure
            patch.setattr(transfers._process, name, getattr(transfers._process, name))
        yield transfers.engine()
        if stored_bytes():
            gc.collect()  # profiles and torch's checks leave cycles behind
            round_trip(torch.ones(1))  # copies are done in order: this one is behind those that nobody waited for
        assert stored_bytes() == 0
        transfers.engine().close()


def engine_of(**settings: Any) -> Engine:
    """A test's own engine, in place of the one that the process has."""
    transfers.engine().close()
    transfers._process.engine = Engine(**settings)
    return transfers._process.engine


class Gate:
    """Copies to and from blocks wait until it is opened; ``log`` says which were begun, in order."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.log: list[tuple[str, int]] = []

    def open(self) -> None:
        """Let all copies go on."""
        self.opened.set()


@contextmanager
def gated() -> Iterator[Gate]:
    """While inside, no copy between a tensor and a block begins before the gate is opened."""
    gate = Gate()
    with pytest.MonkeyPatch.context() as patch:
        for space in (HostSpace, DiskSpace):
            for way in ("write", "read"):
                _delay(patch, gate, space, way)
        try:
            yield gate
        finally:
            gate.open()


def _delay(patch: pytest.MonkeyPatch, gate: Gate, space: type, way: str) -> None:
    original = getattr(space, way)

    def wait(self: Any, address: int, nbytes: int, *more: int) -> None:
        gate.log.append((way, nbytes))
        assert gate.opened.wait(60)
        original(self, address, nbytes, *more)

    patch.setattr(space, way, wait)


def move_activations(program: Program, tier: str) -> int:
    """Offload every activation of a joint program that backward reads, as soon as it is made; returns how many."""
    order = {node: index for index, node in enumerate(program.graph.nodes)}
    moved = 0
    for node in program.nodes:
        uses = sorted((user for user in node.users if user.op != "output"), key=order.__getitem__)
        late = [user for user in uses if info(user).phase is not Phase.FORWARD]
        if node.op == "call_function" and info(node).phase is Phase.FORWARD and late and not schema.is_view(node):
            _move(program, node, [user for user in uses if user not in late], late, tier)
            moved += 1
    return moved


def _move(program: Program, node: fx.Node, early: list[fx.Node], late: list[fx.Node], tier: str) -> None:
    value = value_of(node)
    settings: dict[str, Any] = {"origin": "a test", "like": node}
    handle = program.insert(transfer.offload, (node, tier), after=node, phase=Phase.FORWARD, **settings)
    last = early[-1] if early else handle
    safe = program.insert(transfer.offload_wait, (handle, node), after=last, phase=Phase.FORWARD, **settings)
    layout = [list(value.shape), list(value.stride()), 0, storage_bytes(value) // value.element_size()]
    settings |= {"before": late[0], "phase": Phase.BACKWARD}
    fetched = program.insert(transfer.prefetch, (safe, *layout, value.dtype, value.device), **settings)
    ready = program.insert(transfer.prefetch_wait, (fetched, safe), **settings)
    for user in late:
        user.replace_input_with(node, ready)
