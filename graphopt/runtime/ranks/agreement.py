"""Ranks that know of each other, before every call that exchanges, that all of them exchange the same.

A rank may take another branch in one step, freeze another layer, or get a size of batch that it has no program for. So
each call begins with a round: every rank of a group gathers one record of a few bytes from all of them, which holds a
digest of what its program exchanges. The record is on its way while the call's inputs are collected, and is waited for
before anything else is sent. Where a rank still makes its program when passes want to talk to the other ranks, it says
that instead; the others answer it with rounds until it has one. Where records differ, all ranks exchange their plans
line by line, and raise the same error.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from graphopt import _torch
from graphopt.errors import GraphoptError, RankError
from graphopt.ir.ops.communication.groups import Group, find_group, making_programs, require_together, talking
from graphopt.rewriting.progress import working
from graphopt.runtime.ranks.exchange_plan import ExchangePlan, digest_of

__all__ = ["Agreement", "Round"]

_READY, _MAKING, _FAILED = range(3)
"""What a rank says of itself: it has a program, it makes one, it could not make one."""

_PATIENCE = timedelta(seconds=5)
"""For how long a rank that could not make its program waits for the others to hear of that."""

_MOST = 6
"""Names of parameters that an error shows."""

_LONGEST = 160
"""Letters of a line of a plan that an error shows."""


class _Record(NamedTuple):
    """What one rank says in a round: one of the three states, and a digest of its exchanges, or of what it makes."""

    state: int
    digest: int


@dataclass(frozen=True)
class _Said:
    """What one rank tells the others where records differ.

    Attributes:
        title: of its program.
        trained: the parameters that this computes gradients for (``ExchangePlan.trained``).
        lines: what it exchanges.
        error: why there is none; empty where there is one.
    """

    title: str = ""
    trained: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    error: str = ""

    @property
    def compared(self) -> tuple[tuple[str, ...], ...]:
        """What has to be the same on all ranks."""
        return self.trained, self.lines


class Agreement:
    """Compares what programs exchange across ranks at every call.

    Args:
        declared: the names of the groups that passes are to exchange over.
    """

    def __init__(self, declared: Collection[str] = ()) -> None:
        self._declared = declared
        self._world: object = None
        self._names: dict[str, str] = {}  # of groups, as passes and programs name them
        self._groups: dict[str, _Meeting] = {}
        self._seen: set[frozenset[tuple[str, int]]] = set()

    def begin(self, plan: ExchangePlan, *, silent: bool = False) -> Round:
        """Begin a round with what a call's program exchanges; all ranks of its groups have to begin one.

        Args:
            plan: of the program.
            silent: whether a program without exchanges is one that all ranks run without meeting (local steps, batches
                that are accumulated); otherwise a rank without exchanges takes part, since others may have some.
        """
        self._seen.add(frozenset(plan.digests.items()))
        if silent and not plan.lines:
            return Round((), plan)
        return Round(self._meetings(plan.lines), plan)

    def compare_new(self, plan: ExchangePlan) -> None:
        """Compare the exchanges of a program that is made before any call, unless one before it exchanges the same.

        Raises:
            RankError: as ``Round.wait`` raises it.
        """
        if plan.lines and frozenset(plan.digests.items()) not in self._seen:
            self.begin(plan).wait()

    @contextlib.contextmanager
    def making(self, what: str) -> Iterator[None]:
        """While this rank makes a program, passes talk to other ranks where all of these make one of the same kind.

        Args:
            what: kind of program, for the comparison.
        """
        key = digest_of(what)
        known: dict[str, bool] = {}

        def together(group: Group) -> bool:
            if group.name not in known:
                mine = _Record(_MAKING, key)
                meeting = self._meeting(group.name) if self._joined() else None
                known[group.name] = meeting is None or set(meeting.round(mine)) == {mine}
            return known[group.name]

        with making_programs(together):
            yield

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Around everything that gives a call its program: ranks that wait for this one are told of what ends it."""
        try:
            yield
        except RankError:
            raise  # which the others know of, or are at fault for
        except Exception as error:
            # of a rank that does not come, or a group that there is not: there is an error to raise already
            with contextlib.suppress(RuntimeError, GraphoptError):
                self._tell(error)
            raise

    def require_together(self, what: str) -> None:
        """Inside of ``making``: refuse what all ranks have to do together where not all of them make a program.

        Raises:
            GraphoptError: with ``what`` it is.
        """
        for meeting in self._meetings(()):
            require_together(meeting.group, what)

    def _tell(self, error: Exception) -> None:
        """Let ranks that wait for this one's program know that there will be none."""
        said = _Said(error=f"{type(error).__name__}: {error}".split("\n")[0])
        for meeting in self._meetings(()):
            mine = _Record(_FAILED, 0)
            records = meeting.round(mine, _PATIENCE)
            while any(record.state == _MAKING for record in records):
                records = meeting.round(mine, _PATIENCE)
            if any(record.state == _READY for record in records):
                meeting.details(said)

    def _meetings(self, names: Collection[str]) -> tuple[_Meeting, ...]:
        """What ranks meet in: the groups of the passes and of every program so far, in one order on all ranks."""
        if not self._joined():
            return ()
        for name in (*self._declared, *names):
            self._meeting(name)
        return tuple(self._groups[name] for name in sorted(self._groups))

    def _joined(self) -> bool:
        """Whether there are process groups; where they are others than before, what was known of those goes."""
        world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        if world is not self._world:
            self._world, self._names, self._groups = world, {}, {}
        return world is not None

    def _meeting(self, name: str) -> _Meeting | None:
        """That of a group; None for one of one rank, and for one whose backend moves nothing."""
        if name not in self._names:
            group = find_group(name)
            self._names[name] = group.name
            if group.size > 1 and group.name not in self._groups:
                handle = _torch.group_on_host(group.handle)
                if handle is not None:
                    self._groups[group.name] = _Meeting(group, handle)
        return self._groups.get(self._names[name])


class _Meeting:
    """The ranks of one group, and how they gather records: on the host, so that nothing waits for a device."""

    def __init__(self, group: Group, handle: Any) -> None:
        self.group = group
        self._handle = handle

    def start(self, mine: _Record) -> tuple[list[torch.Tensor], Any]:
        """Begin a round; what ``finish`` takes."""
        with _torch.without_dispatch_modes():  # those of a capture that asks
            gathered = [torch.empty(len(mine), dtype=torch.int64) for _ in range(self.group.size)]
            given = torch.tensor(mine, dtype=torch.int64)
            return gathered, dist.all_gather(gathered, given, group=self._handle, async_op=True)

    def finish(self, started: tuple[list[torch.Tensor], Any], patience: timedelta | None = None) -> list[_Record]:
        """Wait for a round; the records of all ranks of the group, in their order."""
        gathered, work = started
        with talking(), _torch.without_dispatch_modes():
            work.wait() if patience is None else work.wait(patience)
            return [_Record(*record.tolist()) for record in gathered]

    def round(self, mine: _Record, patience: timedelta | None = None) -> list[_Record]:
        """One round."""
        return self.finish(self.start(mine), patience)

    def details(self, said: _Said) -> list[_Said]:
        """What every rank of the group has to say where records differ."""
        found: list[Any] = [None] * self.group.size
        with talking():
            dist.all_gather_object(found, said, group=self._handle)
        return found


class Round:
    """A round that has begun in each of some groups."""

    def __init__(self, meetings: Sequence[_Meeting], plan: ExchangePlan) -> None:
        self._plan = plan
        self._started = [(meeting, self._mine(meeting), meeting.start(self._mine(meeting))) for meeting in meetings]

    def _mine(self, meeting: _Meeting) -> _Record:
        return _Record(_READY, self._plan.digests.get(meeting.group.name, 0))

    def __bool__(self) -> bool:
        """Whether there is anything to wait for."""
        return bool(self._started)

    def wait(self) -> None:
        """Wait until all ranks have said that they are going to exchange the same.

        Raises:
            RankError: on all ranks, before anything else is exchanged, naming those that differ, their programs, and
                the first exchange that does.
        """
        for meeting, mine, started in self._started:
            records = meeting.finish(started)
            making = [meeting.group.ranks[i] for i, record in enumerate(records) if record.state == _MAKING]
            if making:
                names = " and ".join(f"rank {rank}" for rank in making)
                with working(f"waiting for {names}, where a program is being made"):
                    while any(record.state == _MAKING for record in records):
                        records = meeting.round(mine)
            if any(record != mine for record in records):
                lines = self._plan.lines.get(meeting.group.name, ())
                said = _Said(self._plan.title, self._plan.trained, lines)
                raise _difference(meeting.group, meeting.details(said))


def _difference(group: Group, said: Sequence[_Said]) -> RankError:
    """The error for ranks that do not exchange the same."""
    failed = [rank for rank, each in enumerate(said) if each.error]
    if failed:
        why = [f"rank {group.ranks[rank]} could not make its program ({said[rank].error})" for rank in failed]
        return RankError(
            f"{'; '.join(why)}: no rank of the group {group.name!r} runs this call. {_NOTHING_DONE}",
            tuple(group.ranks[rank] for rank in failed),
        )
    usual, _ = Counter(each.compared for each in said).most_common(1)[0]
    like = next(rank for rank, each in enumerate(said) if each.compared == usual)
    others = [rank for rank, each in enumerate(said) if each.compared != usual]
    one, names = others[0], [f"rank {group.ranks[rank]}" for rank in (*others, like)]
    more = f", and so {'does' if len(others) == 2 else 'do'} {', '.join(names[1:-1])}" if len(others) > 1 else ""
    return RankError(
        f"the ranks of the group {group.name!r} do not run the same program in this call: {names[0]} "
        f"({said[one].title}) differs from {names[-1]} ({said[like].title}){more}\n"
        f"  first difference: {_first_difference(said[one], said[like], names[0], names[-1])}\n"
        "  what to do: let every rank take the same branches, freeze the same parameters, and have the same passes, "
        f"settings and number of batches to accumulate. {_NOTHING_DONE}",
        tuple(group.ranks[rank] for rank in others),
    )


_NOTHING_DONE = "Nothing was exchanged, and nothing has changed"


def _first_difference(one: _Said, other: _Said, one_name: str, other_name: str) -> str:
    """Where what two ranks exchange begins to differ."""
    sides = [(one.trained, one_name, other.trained), (other.trained, other_name, one.trained)]
    trained = [f"{_listed(alone)} on {name} alone" for mine, name, theirs in sides if (alone := _without(mine, theirs))]
    if trained:
        return f"gradients are computed of {' and of '.join(trained)}"
    length = max(len(one.lines), len(other.lines))
    padded = [[*each.lines, *["nothing"] * (length - len(each.lines))] for each in (one, other)]
    place = next(index for index, (mine, theirs) in enumerate(zip(*padded, strict=True)) if mine != theirs)
    shown = _shortened(padded[0][place], padded[1][place])
    return f"exchange {place} is {shown[0]!r} on {one_name} and {shown[1]!r} on {other_name}"


def _without(names: Sequence[str], others: Sequence[str]) -> list[str]:
    return [name for name in names if name not in others]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_MOST]) + (f" and {len(names) - _MOST} more" if len(names) > _MOST else "")


def _shortened(one: str, other: str) -> tuple[str, str]:
    """Two lines around the place where they begin to differ, without what is far from it."""
    pairs = enumerate(zip(one, other, strict=False))
    differs = next((place for place, (mine, theirs) in pairs if mine != theirs), min(len(one), len(other)))
    start = max(differs - _LONGEST // 2, 0)
    cut = [f"{'…' * (start > 0)}{line[start : start + _LONGEST]}" for line in (one, other)]
    first, second = (text + "…" * (start + _LONGEST < len(line)) for text, line in zip(cut, (one, other), strict=True))
    return first, second
