"""Who is told that a model or a step is about to train: nobody here; the layers above add those who want to know.

The line at the end of what the first step waits for, and of programs that are made later: what took how long.
"""

from __future__ import annotations

from collections.abc import Callable

from graphopt.ir.provided import handed_down
from graphopt.rewriting.progress import leave_line
from graphopt.runtime.programs.rewrite import Rewritten

__all__ = ["Observer", "observe_captures", "tell_later_program", "tell_observers", "tell_seconds", "times_line"]

Observer = Callable[[Rewritten, bool], None]
"""Called behind each capture of a model or a step with what came of it, and whether it was the first one."""

_observers: list[Observer] = []


def observe_captures(observer: Observer) -> None:
    """Tell ``observer`` of every capture from now on; a second time is the same as once."""
    if observer not in _observers:
        _observers.append(observer)


def tell_observers(rewritten: Rewritten, first: bool) -> None:
    """Call every observer."""
    handed_down.complete()
    for observer in _observers:
        observer(rewritten, first)


_LONG = 2.0
"""Seconds from which what is made behind the first capture is worth a line."""


def tell_seconds(rewritten: Rewritten, *, first: bool) -> None:
    """Say what a capture took, and what later steps take, when all that its first step needs is made.

    Args:
        rewritten: what came of the passes.
        first: whether it is the first capture of a model or step; of others those are told that took long.
    """
    if first or rewritten.seconds + rewritten.compiling > _LONG:
        leave_line(times_line(rewritten))


def tell_later_program(title: str, what: str, seconds: float) -> None:
    """Say what another program of a capture took, where that was long."""
    if seconds > _LONG:
        leave_line(f"{title}: another program, {what}: {seconds:.1f} s")


def times_line(rewritten: Rewritten) -> str:
    """``LM: captured 1.9 s, planned 0.8 s, recomputes 13 %; later steps ×1.13 of baseline``, as far as that is known.

    Passes that keep the program within a number of bytes plan; what the others take is called rewritten. What is
    recomputed is a share of a step's seconds, and written where nothing else makes later steps longer.
    """
    title = rewritten.session.title or "program"
    if rewritten.loaded:
        return f"{title}: read from the cache {rewritten.seconds:.1f} s"
    limits = {current.name for current in rewritten.pipeline.passes if current.has_limit}
    planned = sum(record.seconds for record in rewritten.records if record.name in limits) + rewritten.ahead
    others = sum(record.seconds for record in rewritten.records if record.name not in limits)
    parts = [f"captured {max(0.0, rewritten.seconds - planned - others):.1f} s"]
    parts += [f"rewritten {others:.1f} s"] if others else []
    parts += [f"planned {planned:.1f} s"] if limits else []
    parts += [f"compiled {rewritten.compiling:.1f} s"] if rewritten.compiling else []
    told = [record.changed for record in rewritten.records if record.changed.slowdown is not None]
    slowdown = sum(changed.slowdown or 0.0 for changed in told)
    if any(changed.counts.get("recomputed") for changed in told) and not any(c.counts.get("offloaded") for c in told):
        parts.append(f"recomputes {100 * slowdown:.0f} %")
    later = f"; later steps ×{1 + slowdown:.2f} of baseline" if told else ""
    return f"{title}: {', '.join(parts)}{later}"
