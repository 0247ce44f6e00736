"""One training step with its exchanges, simulated: a lane that computes, and a lane that transfers.

The computing lane runs forward, backward and the work around each exchange (copying into a bucket, selecting) in order.
The network lane runs one message after the other, in the order in which they become ready. Computation waits for a
message where it is needed: at the end of backward, before the update reads it, or, for what is gathered, where a call
reads it. All ranks do the same at the same time, so that one of them stands for any number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graphopt.rewriting.distributed.prediction.link import Link
from graphopt.rewriting.distributed.prediction.volume import Gradient, Volume

__all__ = ["Message", "Messages", "Timeline", "simulate"]


@dataclass(frozen=True, slots=True)
class Message:
    """Something exchanged in one go.

    Attributes:
        volume: what crosses the link.
        ready: seconds of the step's own computation before it can start; not read of what is sent after the update.
        before: seconds of work on the computing lane that make it: copies, selection.
        after: seconds of work on its result.
        needed: seconds of the step's own computation before what waits for it; None for the end of backward.
    """

    volume: Volume
    ready: float = 0.0
    before: float = 0.0
    after: float = 0.0
    needed: float | None = None


@dataclass(frozen=True, slots=True)
class Messages:
    """What a way sends.

    Attributes:
        beside: started beside backward.
        second: started in front of the update, made of what has arrived by then.
        late: started behind the update.
        period: how many steps one exchange serves.
        update: the share of the update that each rank runs.
        kept_dense: the gradients that a compressing way sends as they are.
    """

    beside: tuple[Message, ...] = ()
    second: tuple[Message, ...] = ()
    late: tuple[Message, ...] = ()
    period: int = 1
    update: float = 1.0
    kept_dense: tuple[Gradient, ...] = ()

    @property
    def volume(self) -> Volume:
        """All messages of one exchange together."""
        return sum((message.volume for message in (*self.beside, *self.second, *self.late)), Volume())


@dataclass(frozen=True, slots=True)
class Timeline:
    """A step as simulated; all figures in seconds.

    Attributes:
        step: from the beginning of forward to the end of the update and of what is exchanged after it.
        compute: of the step's own computation.
        work: of the work around exchanges.
        alone: that the exchanges would take with nothing else running.
        exposed: for which computation waits for the network.
        spans: when each message is on the network: start and end, in the order in which they start.
    """

    step: float
    compute: float
    work: float
    alone: float
    exposed: float
    spans: tuple[tuple[float, float], ...]


def simulate(messages: Messages, link: Link, ranks: int, *, backward: float, update: float = 0.0) -> Timeline:
    """Run a step.

    Args:
        messages: what is sent beside backward, in front of the update and behind it.
        link: of each rank.
        ranks: that take part.
        backward: seconds from the beginning of forward to the end of backward.
        update: seconds of the update as this rank runs it, which needs what is sent before it.
    """
    ordered = sorted(messages.beside, key=lambda message: message.ready)
    spans: list[tuple[float, float]] = []
    shift = free = stalled = 0.0
    due: list[tuple[float, float]] = []
    for message in ordered:
        stall = _stall(due, message.ready, shift)
        shift, stalled = shift + stall + message.before, stalled + stall
        free = _send(message, max(message.ready + shift, free), link, ranks, spans)
        if message.needed is not None:
            due.append((message.needed, free))
    stall = _stall(due, backward, shift)
    shift, stalled = shift + stall, stalled + stall
    now, exposed = _wait(ordered, spans, backward + shift)
    exposed += stalled
    for message in messages.second:
        now += message.before
        free = _send(message, max(now, free), link, ranks, spans)
    now, waited = _wait(messages.second, spans[len(ordered) :], now)
    now, exposed = now + update, exposed + waited
    for message in messages.late:
        exposed += message.volume.seconds(link, ranks)
        now = _send(message, now + message.before, link, ranks, spans) + message.after
    everything = [*ordered, *messages.second, *messages.late]
    return Timeline(
        step=now,
        compute=backward + update,
        work=sum(message.before + message.after for message in everything),
        alone=sum(message.volume.seconds(link, ranks) for message in everything),
        exposed=exposed,
        spans=tuple(spans),
    )


def _stall(due: list[tuple[float, float]], until: float, shift: float) -> float:
    """For how long computation waits for messages that it needs before a time; these are taken out.

    Args:
        due: when each is needed, in seconds of the step's own computation, and when it has arrived.
        until: the time, in the same seconds.
        shift: for how long computation has been held up before.
    """
    stall = 0.0
    for needed, arrived in sorted(item for item in due if item[0] <= until):
        stall += max(arrived - (needed + shift + stall), 0.0)
    due[:] = [item for item in due if item[0] > until]
    return stall


def _wait(messages: Sequence[Message], spans: Sequence[tuple[float, float]], now: float) -> tuple[float, float]:
    """Wait for messages in turn and work on each: the time then, and how much of it was waiting."""
    exposed = 0.0
    for message, (_, end) in zip(messages, spans, strict=True):
        exposed += max(end - now, 0.0)
        now = max(now, end) + message.after
    return now, exposed


def _send(message: Message, start: float, link: Link, ranks: int, spans: list[tuple[float, float]]) -> float:
    end = start + message.volume.seconds(link, ranks)
    spans.append((start, end))
    return end
