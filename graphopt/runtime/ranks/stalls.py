"""Programs that do not end on a device because of another rank: noticed, and the exchanges that they wait in aborted.

On a device an exchange does not fail in the thread that trains: it waits in a stream, and that thread goes on, or
blocks where it reads a value. So another thread looks. What calls the device has run with stand-ins only (an event that
never becomes ready, a group that notes that it was aborted), not on devices.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from graphopt import _torch
from graphopt.errors import quoted
from graphopt.ir.node import value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.communication.groups import find_group
from graphopt.ir.ops.values import tensors_of
from graphopt.ir.program import Program
from graphopt.runtime.ranks.diagnosis import classify
from graphopt.runtime.ranks.messages import Report, Verdict, read_reports

__all__ = ["Pending", "Stall", "abort", "device_of_exchanges", "groups_of"]

logger = logging.getLogger(__name__)

_SILENT = 6
"""How many times the patience a rank may be silent before it counts as dead."""


@dataclass(slots=True)
class Pending:
    """A program that runs, or that has enqueued calls on a device of which the end has not been seen.

    Attributes:
        step: that it is of.
        ranks: that it exchanges with, this one among them.
        groups: in which it does.
        event: recorded behind its last call; None while the program still runs on the host.
        since: when it began, by ``time.monotonic``.
    """

    step: int
    ranks: Collection[int]
    groups: Sequence[Any]
    event: Any = None
    since: float = field(default_factory=time.monotonic)

    def is_done(self) -> bool:
        """Whether everything that it enqueued has ended; does not wait."""
        return self.event is not None and bool(self.event.query())


class Stall:
    """Which ranks are to blame for a program that does not end, by reports that are looked at now and then.

    Only ranks that died, failed by themselves, or ended their program before this step are: a rank that is merely slow,
    or has not come to its first step, may still come, and the group's own timeout is what bounds that. Nothing has
    failed yet here, and a rank that holds the interpreter's lock for long is silent too, so a rank counts as dead only
    when it has been silent for six times the patience.

    Args:
        rank: this one, which is never to blame here.
        patience: for how many seconds a program may take before the other ranks are looked at.
    """

    def __init__(self, rank: int, patience: float) -> None:
        self._rank = rank
        self._patience = patience
        self._last: dict[int, Report] = {}
        self._changed: dict[int, float] = {}

    def is_stalled(self, pending: Pending) -> bool:
        """Whether a program has not ended within the patience. The device is asked only where it is old enough."""
        try:
            return time.monotonic() - pending.since > self._patience and not pending.is_done()
        except RuntimeError:
            return False  # the device itself has failed, which the thread that trains is told by its next call

    def look(self, store: Any, pending: Pending) -> Verdict:
        """The verdict on a program that has stalled; without ranks where no rank is to blame, or not yet.

        It is certain only when a rank has been watched for as long as it may be silent, so it is to be called again.

        Raises:
            RuntimeError: where the store does not answer.
        """
        now = time.monotonic()
        blamed: dict[int, Report | None] = {}
        for rank, report in read_reports(store, [rank for rank in pending.ranks if rank != self._rank]).items():
            if report is None:
                continue
            if self._last.get(rank) != report:
                self._last[rank], self._changed[rank] = report, now
            silent = now - self._changed[rank] > _SILENT * self._patience
            ended = report.ended and report.step < pending.step
            if report.failed or ended or (silent and not report.ended):
                blamed[rank] = report
        return classify(blamed, ())


def abort(groups: Sequence[Any]) -> threading.Thread:
    """Abort the communicators of process groups, in a thread of its own: a communicator may take long to end.

    Calls that wait for them on a device end, with values that mean nothing. What cannot be aborted is left to the
    group's timeout, and noted at level ``WARNING``.
    """
    thread = threading.Thread(target=_abort_all, args=(groups,), name="graphopt-abort", daemon=True)
    thread.start()
    return thread


def _abort_all(groups: Sequence[Any]) -> None:
    for group in groups:
        try:
            _torch.abort_group(group)
        except Exception as error:
            logger.warning("a process group could not be aborted, and ends with its own timeout: %s", quoted(error))


def device_of_exchanges(program: Program) -> torch.device | None:
    """The CUDA device in whose streams exchanges of a program wait; None where the host makes them, as with gloo."""
    for node in program.graph.nodes:
        if not schema.is_collective(node):
            continue
        if any("nccl" in str(dist.get_backend(group)) for group in groups_of(node)):
            return next((t.device for t in tensors_of(value_of(node)) if t.device.type == "cuda"), None)
    return None


def groups_of(node: fx.Node) -> list[Any]:
    """The process group that a collective call names, as its last text; empty for a call that waits for another."""
    names = [value for value in (*node.args, *node.kwargs.values()) if isinstance(value, str)]
    return [find_group(names[-1]).handle] if names else []
