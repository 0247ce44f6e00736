"""A sign of life that every rank writes into the store of the process group, and where the rank is."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import uuid
import weakref
from collections.abc import Collection
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.util import Finalize
from typing import Any

import torch.distributed as dist

from graphopt import _torch
from graphopt.errors import GraphoptError
from graphopt.ir.ops.communication.groups import is_talking
from graphopt.runtime.ranks.diagnosis import classify, collect, wait_for_readers
from graphopt.runtime.ranks.messages import Report, Verdict, is_kept, publish, published, read_reports, write_report
from graphopt.runtime.ranks.places import place_now
from graphopt.runtime.ranks.stalls import Pending, Stall, abort

__all__ = ["Heartbeat", "Here", "heartbeat", "patience"]

logger = logging.getLogger(__name__)

_PATIENCE = 5.0
_INTERVAL = 1.0


def patience() -> float:
    """For how many seconds a rank may give no sign of life before it counts as dead: ``GRAPHOPT_RANK_TIMEOUT``, or 5.

    Raises:
        GraphoptError: where the variable holds no number above 0.
    """
    text = os.environ.get("GRAPHOPT_RANK_TIMEOUT")
    if text is None:
        return _PATIENCE
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise GraphoptError(
            f"GRAPHOPT_RANK_TIMEOUT is {text!r}: give the seconds, above 0, after which a silent rank counts as dead"
        )
    return seconds


@dataclass(slots=True)
class Here:
    """What the thread that trains says of itself, by setting attributes; the heartbeat reads them.

    Attributes:
        step: how many steps have begun.
        where: what goes on, for people, as far as it is not told by the call of a program that is running.
        running: whether a program is running.
        failed: empty; ``exchange`` after an exchange failed here; otherwise the error that ended the last step here.
        told: whether this rank knows which ranks are at fault.
        ended: whether the process is on its way out.
        pending: the oldest program whose exchanges wait on a device and that has not been seen to end.
        stalled: the verdict for which the exchanges of ``pending`` were aborted: what follows it is no result.
    """

    step: int = 0
    where: str = "what comes before the first step"
    running: bool = False
    failed: str = ""
    told: bool = False
    ended: bool = False
    pending: Pending | None = None
    stalled: Verdict | None = None

    def begin(self, step: int) -> None:
        """A program begins to run."""
        self.step, self.where, self.failed, self.running = step, f"step {step}", "", True

    def end(self, what: str) -> None:
        """A program has run; ``what`` of it, for people."""
        self.running, self.where = False, f"what follows {what}"

    def stop(self, failed: str) -> None:
        """Something failed, with ``failed`` as the class describes it."""
        self.running, self.failed = False, failed
        if self.pending is not None and self.pending.event is None:
            self.pending = None


class Heartbeat:
    """Writes this rank's report into the store every second, in a thread of its own.

    It ends with the process group, with the process, and where the store no longer answers.

    Args:
        store: of the default process group. A client of it serves one thread at a time, so it is cloned.
        here: what the training thread says.

    Attributes:
        rank: of this process in the default group.
        size: how many ranks there are.
        holder: the rank with whose process the store ends, if any.
        patience: for how many seconds a rank may be silent before it counts as dead.
        interval: seconds between two reports.
        verdict: on the ranks at fault, as soon as any rank has published one.
        store: a client of the store for the thread that looks for the ranks at fault.

    Raises:
        RuntimeError: where the store cannot be cloned or written to, or does not keep what is written.
    """

    def __init__(self, store: Any, here: Here) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.holder = _holder(store)
        self.patience = patience()
        self.interval = min(_INTERVAL, self.patience / 3)
        self.verdict: Verdict | None = None
        self.store = store.clone()
        self._own = store.clone()
        for client in (self.store, self._own):
            client.set_timeout(timedelta(seconds=self.patience))
        self._here = here
        self._world = weakref.ref(dist.group.WORLD)
        self._process = os.getpid()
        self._wake = threading.Event()
        self._report = Report(uuid.uuid4().hex)
        self._since = (time.monotonic(), here.step)
        here.told, here.failed = False, ""
        here.pending, here.stalled = None, None
        self._stall = Stall(self.rank, self.patience)
        self._write()
        if not is_kept(self._own, self.rank, self._report):
            raise RuntimeError("it does not keep what is written to it")
        self._thread = threading.Thread(target=self._run, name="graphopt-heartbeat", daemon=True)
        self._thread.start()

    @property
    def current(self) -> bool:
        """Whether it belongs to the default process group of now."""
        return self._world() is dist.group.WORLD

    def hurry(self) -> None:
        """Let the next report be written at once."""
        self._wake.set()

    def tell(self) -> None:
        """Write a report now, and wait until it is written, for as long as a rank may be silent at most."""
        before = self._report.beat
        end = time.monotonic() + self.patience
        self.hurry()
        while self._report.beat == before and self._thread.is_alive() and time.monotonic() < end:
            time.sleep(0.01)

    def collect(self, ranks: Collection[int]) -> Verdict:
        """Which ranks are at fault where an exchange failed here; takes as long as a rank may be silent at most.

        The rank that holds the store then waits until the others know as well, as long again at most.

        Args:
            ranks: that could be at fault.

        Raises:
            RuntimeError: where the store does not answer.
        """
        self.verdict = self.verdict or collect(self.store, ranks, self.patience, self.interval)
        self._here.told = True
        self.hurry()
        if self.holder == self.rank:
            others = [rank for rank in ranks if rank != self.rank and rank not in self.verdict.ranks]
            wait_for_readers(self.store, others, self.patience, self.interval)
        return self.verdict

    def stop(self) -> None:
        """Write a last report that says that the process ends, and stop; to be called at the end of the process.

        The rank that holds the store waits for up to two intervals until no other uses it: torch would print a
        warning with a stack there.
        """
        if self._process != os.getpid() or not self._thread.is_alive():
            return
        self._here.ended = True
        self.hurry()
        self._thread.join(timeout=self.interval)
        if self.holder == self.rank and dist.is_initialized() and self.current:
            with contextlib.suppress(RuntimeError):
                others = [rank for rank in range(self.size) if rank != self.rank]
                wait_for_readers(self.store, others, 2 * self.interval, self.interval)

    def _run(self) -> None:
        try:
            while True:
                self._wake.wait(self.interval)
                self._wake.clear()
                if not dist.is_initialized() or not self.current:
                    break
                self._write()
                if self._report.ended or not self._listen():
                    break
                self._end_stall()
        except Exception as error:  # the store has gone; whoever misses this rank says so
            logger.debug("rank %d gives no more signs of life: its store does not answer: %s", self.rank, error)

    def _write(self) -> None:
        here, place = self._here, place_now() if self._here.running else None
        where = f"{here.where}, {place}" if place else here.where
        if (where, here.step) != (self._report.where, self._since[1]):
            self._since = (time.monotonic(), here.step)
        noted = replace(self._report, failed=here.failed, told=here.told, ended=here.ended, step=here.step)
        seconds = time.monotonic() - self._since[0]
        exchanges = place.exchanges if place else is_talking()
        self._report = replace(noted, beat=noted.beat + 1, where=where, seconds=seconds, exchanges=exchanges)
        write_report(self._own, self.rank, self._report)

    def _listen(self) -> bool:
        """Note in time which ranks are at fault, for this one's exchange may fail when the store has gone.

        Returns:
            whether to go on: not when the process that holds the store is on its way out.
        """
        self.verdict = self.verdict or published(self._own)
        ends = self.holder is not None and self.holder != self.rank and self._ends(self.holder)
        if (self.verdict is not None or ends) and not self._here.told:
            self._here.told = True
            self._write()
        return not ends

    def _end_stall(self) -> None:
        """Where a program waits on the device for a rank that is at fault: tell all ranks, and abort its exchanges."""
        pending = self._here.pending
        if pending is None or self._here.stalled is not None or not self._stall.is_stalled(pending):
            return
        found = self.verdict or self._stall.look(self._own, pending)
        if not found.ranks:
            return
        self.verdict = self.verdict or publish(self._own, found)
        self._here.stalled = self.verdict  # before anything ends, so that nothing is taken for a result
        self._here.failed = "exchange"
        self._write()
        abort(pending.groups)

    def _ends(self, rank: int) -> bool:
        """Whether a rank's process is on its way out; it is then the one at fault if an exchange still comes."""
        report = read_reports(self._own, [rank])[rank]
        if report is None or not report.ended:
            return False
        self.verdict = self.verdict or classify({rank: report}, ())
        return True


def _holder(store: Any) -> int | None:
    """The rank with whose process a store ends: rank 0 for one over TCP, unless torchrun's agent holds it."""
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return 0 if _torch.is_tcp_store(store) and not agent else None


_lock = threading.Lock()
_beating: Heartbeat | None = None
_refused: weakref.ref[Any] | None = None


def heartbeat(here: Here) -> Heartbeat | None:
    """The heartbeat of this process, started at the first call and again for another default process group.

    None where torch.distributed is not initialised, where the group has one process, and where its store cannot be used
    (that of the fake backend).
    """
    global _beating, _refused
    if not dist.is_initialized():
        return None
    if _beating is not None and _beating.current:
        return _beating
    with _lock:
        world: Any = dist.group.WORLD
        if dist.get_world_size() < 2 or (_refused is not None and _refused() is world):
            return None
        first = _beating is None
        try:
            _beating = Heartbeat(_torch.default_store(), here)
        except RuntimeError as error:
            logger.debug("ranks that die will not be named: the store of the process group cannot be used: %s", error)
            _refused = weakref.ref(world)
            return None
        if first:
            Finalize(None, _stop, exitpriority=10)  # unlike atexit's, it also runs at the end of a child process
        return _beating


def _stop() -> None:
    if _beating is not None:
        _beating.stop()
