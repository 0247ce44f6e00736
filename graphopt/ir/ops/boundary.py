"""The op that marks where a segment begins: it can wait for the device, and note how long segments take.

In a program it stands where a pass puts it, and nothing reads its result::

    y = aten.add(x, h)                                      # the checkpoint blocks.0
    graphopt.boundary(y, "forward blocks.0 .. blocks.1", True, True)    # the next segment begins here

The interval that a mark opens is closed by the next mark, in whichever program that stands. ``timings()`` says how long
the intervals took, ``reset()`` forgets them.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx.node import has_side_effect

__all__ = ["Interval", "Timings", "boundary", "reset", "timings"]


@dataclass(frozen=True, slots=True)
class Interval:
    """What lies between a mark and the next: how often it ran, and the seconds of all its runs together."""

    name: str
    calls: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Timings:
    """Intervals in the order in which they first began; as text, a table with milliseconds per call."""

    intervals: tuple[Interval, ...]

    def __str__(self) -> str:
        if not self.intervals:
            return "no interval has been timed"
        width = max(len("interval"), *(len(row.name) for row in self.intervals))
        lines = [f"{'interval':{width}}  {'calls':>6}  {'ms per call':>12}"]
        for row in self.intervals:
            lines.append(f"{row.name:{width}}  {row.calls:>6}  {row.seconds / row.calls * 1e3:>12.3f}")
        return "\n".join(lines)


@dataclass(slots=True)
class _Clock:
    """Sums of the intervals that are closed, and the one that is open. Backward may run in another thread."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    totals: dict[str, tuple[int, float]] = field(default_factory=dict)
    opened: tuple[str, float] | None = None

    def mark(self, name: str) -> None:
        now = time.perf_counter()
        with self.lock:
            if self.opened is not None:
                before, start = self.opened
                calls, seconds = self.totals.get(before, (0, 0.0))
                self.totals[before] = (calls + 1, seconds + now - start)
            self.opened = (name, now) if name else None

    def read(self) -> Timings:
        with self.lock:
            return Timings(tuple(Interval(name, *total) for name, total in self.totals.items()))

    def clear(self) -> None:
        with self.lock:
            self.totals.clear()
            self.opened = None


_clock = _Clock()


def timings() -> Timings:
    """How long each interval took so far, in this process; ``str(timings())`` is a table."""
    return _clock.read()


def reset() -> None:
    """Forget all intervals, the open one among them."""
    _clock.clear()


_torch_library: Any = torch.library  # torch leaves it untyped
_library = _torch_library.Library("graphopt", "FRAGMENT")
_library.define("boundary(Tensor(a) x, str name, bool synchronize, bool profile) -> Tensor(a)")


def _boundary(x: torch.Tensor, name: str, synchronize: bool, profile: bool) -> torch.Tensor:
    if synchronize and x.device.type == "cuda":
        torch.cuda.synchronize(x.device)
    if profile:
        _clock.mark(name)
    return x


for _device in ("CPU", "CUDA"):
    _library.impl("boundary", _boundary, _device)
_torch_library.register_fake("graphopt::boundary", lambda x, name, synchronize, profile: x, lib=_library)

boundary = torch.ops.graphopt.boundary.default
"""``boundary(Tensor(a) x, str name, bool synchronize, bool profile) -> Tensor(a)``: a mark; returns ``x``.

With ``synchronize``, the thread waits until the device of ``x`` has done all it was given. With ``profile``, the open
interval ends, and one called ``name`` begins; none where the name is empty. Nothing is allocated and nothing drawn.
"""

has_side_effect(boundary)


def _as_it_is(context: Any, *args: Any) -> Any:
    """Let a compiler that removes mutation (inductor does) pass the op, whose result is its argument, as it is."""
    plain = context.unwrap_tensors(args)
    with context.redispatch_to_next():
        return context.wrap_tensors(_op(*plain))


_op: Any = boundary
_op.py_functionalize_impl(_as_it_is)
