"""Programs that exchange with other ranks, watched: where an exchange fails, the error names the ranks at fault.

While such a program runs, every rank tells the others where it is, through the store of the process group (see
``heartbeat``). The thread that trains only sets attributes for that.

On a device an exchange fails in no call: where it waits for a rank that is at fault, the heartbeat aborts it (see
``stalls``), and the program that runs then, or else the next one, raises ``RankError``. A user who reads the loss,
parameters or optimizer state between the abort and that error reads values that mean nothing: the error says from which
step on. What waits on a device has been tried with stand-ins for events and groups only.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import fx

from graphopt.errors import GraphoptError, RankError
from graphopt.ir.ops.communication.groups import find_group, talking
from graphopt.ir.program import Program
from graphopt.runtime.compile.backend import Boxed
from graphopt.runtime.ranks.exchange_plan import exchange_groups
from graphopt.runtime.ranks.heartbeat import Heartbeat, Here, heartbeat
from graphopt.runtime.ranks.messages import Verdict
from graphopt.runtime.ranks.places import follow, place_of
from graphopt.runtime.ranks.stalls import Pending, device_of_exchanges

__all__ = ["StepWatch", "meeting"]

logger = logging.getLogger(__name__)

_EXCHANGE = re.compile(r"gloo|NCCL|Connection (closed|reset)|Application timeout|Timed out waiting")
"""How backends word the failure of an exchange; only read where the error does not come from a call that is known."""

_here = Here()


class StepWatch:
    """Watches the programs of one training step, or of one drop-in model, and counts their steps.

    Where some of the programs exchange and others do not (accumulation, local steps), all of them are watched.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._ranks: set[int] = set()

    @contextlib.contextmanager
    def meeting(self, program: Program) -> Iterator[None]:
        """Watch what ranks tell each other outside of programs: before the first run of one, or behind the last.

        Raises:
            RankError: in place of the error of an exchange that fails inside.
        """
        self._ranks |= _ranks_of(program)
        with _meeting(f"what ranks exchange behind step {self._steps}", self._ranks):
            yield

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Watch a capture and its passes, some of which agree with other ranks on what they rewrite.

        Raises:
            RankError: in place of the error of an exchange that fails inside.
        """
        if not _is_distributed():
            yield
            return
        before = _here.where
        _here.where, _here.failed = f"the capture of a program, behind step {self._steps}", ""
        heart = heartbeat(_here)
        try:
            yield
        except Exception as error:
            _explain(heart, self._ranks, _cause(error), at_exchange=False)
            raise
        _here.where = before

    def guard(
        self, run: Boxed, module: fx.GraphModule, program: Program, part: Literal["step", "forward", "backward"]
    ) -> Boxed:
        """What runs a program, watched; ``run`` itself without a process group.

        Args:
            run: runs the module, or what a compiler made of it.
            module: the generated module of the part.
            program: the whole program.
            part: what of the program runs; a step begins with ``step`` or ``forward``.

        Returns:
            a callable that raises ``RankError`` in place of the error of an exchange that fails, and in place of a
            result once an exchange has been aborted.
        """
        self._ranks |= _ranks_of(program)
        if not _is_distributed():
            return run
        follow(module)
        device = device_of_exchanges(program)
        groups = [find_group(name).handle for name in exchange_groups(program)] if device is not None else []

        def guarded(args: list[Any]) -> Any:
            heart = heartbeat(_here) if self._ranks else None
            self._steps += part != "backward"
            if device is not None:
                _refuse_aborted(heart)
            _here.begin(self._steps)
            if device is not None:
                _expect(self._steps, self._ranks, groups)
            try:
                result = run(args)
            except Exception as error:
                place = place_of(error)
                if place is not None:
                    _here.where = f"{_here.where}, {place}"
                _explain(heart, self._ranks, error, at_exchange=place is not None and place.exchanges)
                raise
            if device is not None:
                _mark_end(device)
                _refuse_aborted(heart)
            _here.end(f"step {self._steps}" if part == "step" else f"{part} of step {self._steps}")
            return result

        guarded._boxed_call = True  # type: ignore[attr-defined]
        return guarded


@contextlib.contextmanager
def meeting(what: str) -> Iterator[None]:
    """Watch what all ranks of the default group tell each other outside of steps, such as a checkpoint's bytes.

    Args:
        what: goes on, for people.

    Raises:
        RankError: in place of the error of an exchange that fails inside.
    """
    distributed = _is_distributed() and dist.get_world_size() > 1
    with _meeting(what, range(dist.get_world_size())) if distributed else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _meeting(where: str, ranks: Collection[int]) -> Iterator[None]:
    if not _is_distributed():
        yield
        return
    before = _here.where
    heart = heartbeat(_here) if ranks else None
    _refuse_aborted(heart)  # before others are asked: that some results mean nothing is lost with the error of asking
    _here.where, _here.failed = where, ""
    try:
        with talking():
            yield
    except Exception as error:
        _explain(heart, ranks, error, at_exchange=type(error) is RuntimeError)
        raise
    _here.where = before


def _expect(step: int, ranks: Collection[int], groups: Sequence[Any]) -> None:
    """A program with exchanges on a device begins: it is watched where what was watched before has ended."""
    if torch.cuda.is_current_stream_capturing():
        _here.pending = None  # while a CUDA graph is captured, events must not be asked
    elif _here.pending is None or _here.pending.event is None or _here.pending.is_done():
        _here.pending = Pending(step, tuple(ranks), groups)


def _mark_end(device: torch.device) -> None:
    """Record behind the last call of the program that is watched, if it is the one that has just run."""
    pending = _here.pending
    if pending is not None and pending.event is None:
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        pending.event = event


def _refuse_aborted(heart: Heartbeat | None) -> None:
    """Raise where exchanges on the device were aborted: nothing that was computed since is a result.

    Raises:
        RankError: with the verdict, and with the first step whose results mean nothing.
    """
    verdict, pending = _here.stalled, _here.pending
    if heart is None or verdict is None:
        return
    since = "an unknown step" if pending is None else f"step {pending.step}"
    seconds = f"{heart.patience:g} s"
    error = RuntimeError(
        f"what {since} enqueued on the device did not end within {seconds}, and its exchanges were aborted: the loss, "
        f"parameters and optimizer state from {since} on mean nothing"
    )
    _here.stop("exchange")
    raise _rank_error(heart.rank, verdict, error) from error


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _ranks_of(program: Program) -> set[int]:
    """The ranks of the default group that a program exchanges with, this one among them; none without exchanges."""
    groups = [find_group(name).handle for name in exchange_groups(program)]
    return {rank for group in groups for rank in dist.get_process_group_ranks(group)}


def _explain(heart: Heartbeat | None, ranks: Collection[int], error: Exception, *, at_exchange: bool) -> None:
    """Tell the other ranks that this one failed; raise what names the ranks at fault, where an exchange failed.

    Raises:
        RankError: with ``error`` as its cause.
    """
    exchange = not isinstance(error, GraphoptError) and _exchange_failed(error, at_exchange)
    _here.stop("exchange" if exchange else f"{type(error).__name__}: {_first_line(error)}")
    heart = heart or (heartbeat(_here) if exchange else None)
    if heart is None:
        return
    heart.tell()
    if exchange:
        raise _rank_error(heart.rank, _diagnose(heart, ranks or range(heart.size)), error) from error


def _cause(error: Exception) -> Exception:
    """What made a pass fail, behind the errors that say which pass it was."""
    while isinstance(error, GraphoptError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    return error


def _exchange_failed(error: Exception, at_exchange: bool) -> bool:
    """Whether an error is that of an exchange: by its class, by where it comes from, or by its words."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and (at_exchange or _EXCHANGE.search(str(error)) is not None)


def _diagnose(heart: Heartbeat, ranks: Collection[int]) -> Verdict:
    """The verdict that all ranks get, found in a thread that may be left behind: the store may never answer."""
    found: list[Verdict] = []

    def ask() -> None:
        try:
            found.append(heart.collect(ranks))
        except Exception as error:
            logger.debug("the store of the process group does not answer: %s", error)

    thread = threading.Thread(target=ask, name="graphopt-inquiry", daemon=True)
    thread.start()
    thread.join(timeout=3 * heart.patience)
    return found[0] if found else heart.verdict or _without_store(heart)


def _without_store(heart: Heartbeat) -> Verdict:
    if heart.holder is None or heart.holder == heart.rank:
        return Verdict({}, {})
    what = "does not answer any more, and with it the store of the process group, which it holds"
    return Verdict({heart.holder: what}, {})


def _rank_error(rank: int, verdict: Verdict, error: Exception) -> RankError:
    here = f"\n  here: rank {rank} was in {_here.where} when its exchange failed: {_first_line(error)}"
    if not verdict.ranks:
        return RankError(
            "an exchange between ranks failed, and no rank can be named: those that can be asked still answer and wait "
            f"for each other{here}\n  what to do: look at the network between the machines, and at what each rank "
            "printed last; then start all ranks again from the state of the last step that all of them have saved"
        )
    said = "; ".join(f"rank {culprit} {what}" for culprit, what in verdict.ranks.items())
    which = " and ".join(f"rank {culprit}" for culprit in verdict.ranks)
    return RankError(
        f"{said}{here}\n  what to do: see what {which} printed last; then start all ranks again from the state of the "
        "last step that all of them have saved",
        tuple(verdict.ranks),
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
