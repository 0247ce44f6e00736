"""The trade between peak bytes and time that the planner found for a program, as a table and as data."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import Any

import torch

from graphopt.analysis.costs.cost import CostReport, DeviceProfile
from graphopt.analysis.program_replay import reserved_where_cached
from graphopt.ir.memory.timeline import MemoryTimeline, ReservedMemory
from graphopt.ir.program import Program
from graphopt.ir.version import VERSION
from graphopt.ir.words.columns import aligned
from graphopt.ir.words.written_units import format_bytes, format_seconds
from graphopt.planning import Simulated
from graphopt.rewriting.memory.fit.fitting import Fitted, Fitting

__all__ = ["SCHEMA_VERSION", "FrontierPoint", "FrontierReport", "fitted_point", "frontier_report"]

SCHEMA_VERSION = 1
"""Of ``FrontierReport.to_json``."""

_CUT_SHORT = {
    "time limit": "the search ended at its time limit: with more time, lower peaks and faster plans may be found",
    "interrupted": "the search was interrupted: these are the best plans found until then",
}


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """One plan, next to the unmodified program.

    Attributes:
        peak_bytes: the most bytes alive at once.
        extra_seconds: on top of the unmodified program: what is recomputed, and waiting for copies.
        ratio: its time over that of the unmodified program, 1 or more.
        runs_again: how many runs of ops it adds.
    """

    peak_bytes: int
    extra_seconds: float
    ratio: float
    runs_again: int


@dataclass(frozen=True, slots=True)
class FrontierReport:
    """What is known of a program's trade between bytes and time.

    Attributes:
        title: of the program.
        stage: ``joint`` or ``step``.
        passes: the text of the passes that ran before.
        plain_bytes: the peak of the unmodified program.
        resident_bytes: what is there all the time: parameters, optimizer state, inputs.
        seconds: of the program's calls, each run once.
        cost: the cost model's name: ``measured``, ``roofline``, or a device's.
        costs: how the seconds of its calls are known, in words, line by line.
        cut_short: ``time limit`` or ``interrupted`` where the search ended early; else empty.
        smallest_bytes: the smallest peak that was found; below that of every point where moving tensors to the host
            lowers it further.
        device: what is said of the device that the program was captured for; empty for one that is here.
        points: plans that run ops again, of which none is better in both bytes and time, from few bytes to many; one at
            least.
        first: what is done to the program before anything is recomputed, line by line.
    """

    title: str
    stage: str
    passes: tuple[str, ...]
    plain_bytes: int
    resident_bytes: int
    seconds: float
    cost: str
    costs: str
    cut_short: str
    smallest_bytes: int
    points: tuple[FrontierPoint, ...]
    device: str = ""
    first: tuple[str, ...] = ()

    @property
    def remark(self) -> str:
        """A sentence about a search that ended early; empty after a whole one."""
        return _CUT_SHORT.get(self.cut_short, "")

    def within(self, budget: int) -> FrontierPoint | None:
        """The fastest plan whose peak is at most ``budget`` bytes, or None."""
        place = bisect_right(self.points, budget, key=attrgetter("peak_bytes"))
        return self.points[place - 1] if place else None

    def spread(self, most: int) -> list[FrontierPoint]:
        """The plans for ``most`` budgets (2 at least), evenly spread from the smallest peak to the largest."""
        low, high = self.points[0].peak_bytes, self.points[-1].peak_bytes
        budgets = [low + (high - low) * number // (most - 1) for number in range(most)]
        return list(dict.fromkeys(point for point in map(self.within, budgets) if point is not None))

    def to_text(self, most: int = 16) -> str:
        """The peaks, and a table of up to ``most`` plans; bytes in powers of ten."""
        share = f"{format_bytes(self.resident_bytes)} of it parameters, optimizer state and inputs"
        first, *more = self.costs.splitlines() or [""]
        moved = ", with tensors moved to the host" if self.smallest_bytes < self.points[0].peak_bytes else ""
        lines = [
            f"{self.title or 'program'}, {self.stage} stage; passes: {', '.join(self.passes) or 'none'}",
            *([f"device               {self.device}"] if self.device else []),
            f"baseline peak        {format_bytes(self.plain_bytes)} ({self.plain_bytes} bytes), {share}",
            f"smallest peak found  {format_bytes(self.smallest_bytes)} ({self.smallest_bytes} bytes){moved}",
            f"baseline time        {first}",
            *(f"{'':21}{line}" for line in more),
            *(f"done first           {line}" for line in self.first),
        ]
        lines += [self.remark] if self.remark else []
        return "\n".join([*lines, "", *self._table(most)]) + "\n"

    def _table(self, most: int) -> list[str]:
        shown = self.spread(most)
        rows = [self._row(point) for point in shown]
        head = ("peak", "bytes", "of the peak", "recomputed", "of the step", "ops recomputed")
        rest = len(self.points) - len(shown)
        more = [f"and {rest} more plans between these"] if rest else []
        return [*aligned([head, *rows], right=range(len(head))), *more]

    def _row(self, point: FrontierPoint) -> tuple[str, ...]:
        peak, share = point.peak_bytes, _share(point.peak_bytes, self.plain_bytes)
        time = (format_seconds(point.extra_seconds), f"{point.ratio - 1:.1%}")
        return (format_bytes(peak), str(peak), share, *time, str(point.runs_again))

    def to_json(self) -> dict[str, Any]:
        """All of it as plain data, every plan included; sizes in bytes, times in seconds."""
        plain = {"peak_bytes": self.plain_bytes, "resident_bytes": self.resident_bytes, "seconds": self.seconds}
        return {
            "schema": SCHEMA_VERSION,
            "versions": {"graphopt": VERSION, "torch": str(torch.__version__)},
            "title": self.title,
            "stage": self.stage,
            "passes": list(self.passes),
            "device": self.device,
            "plain": plain,
            "done_first": list(self.first),
            "smallest_peak_bytes": self.smallest_bytes,
            "cost": self.cost,
            "costs": self.costs,
            "cut_short": self.cut_short,
            "frontier": [asdict(point) for point in self.points],
        }


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "100.0%"


def frontier_report(
    fitting: Fitting, cost: str, costs: CostReport, before: Program | None = None, first: tuple[str, ...] = ()
) -> FrontierReport:
    """What the search of ``fitting`` found.

    Args:
        fitting: of the program.
        cost: the name of the cost model that gave its seconds.
        costs: those seconds, and how they are known.
        before: the unmodified program, where something was done to it before it was planned.
        first: what that was, line by line.
    """
    program = fitting.program if before is None else before
    memory = fitting.memory if before is None else before.memory()
    simulated = [(point.peak, fitting.simulate(point)) for point in fitting.frontier]
    return FrontierReport(
        title=fitting.program.title,
        stage=fitting.program.stage,
        passes=fitting.program.history,
        plain_bytes=memory.peak_bytes,
        resident_bytes=fitting.memory.resident_bytes,
        seconds=fitting.seconds,
        cost=cost,
        costs=str(costs),
        cut_short=fitting.frontier.cut_short,
        smallest_bytes=fitting.smallest_peak,
        points=tuple(_point(fitting, peak, plan, plan.again) for peak, plan in simulated),
        device=_device_line(memory, reserved_where_cached(program, memory)),
        first=first,
    )


def _device_line(memory: MemoryTimeline, reserved: ReservedMemory | None) -> str:
    """The device of a program without data, with its bytes, and whether the program fits as it is."""
    profile = memory.device
    if not isinstance(profile, DeviceProfile):
        return "" if profile is None else profile.name
    room = profile.memory_bytes - profile.context_bytes
    taken = memory.peak_bytes if reserved is None else reserved.reserved_peak_bytes
    more = "" if reserved is None else f", {format_bytes(taken)} reserved"
    fits = f"unmodified, the program {'fits' if taken <= room else 'does not fit'}{more}"
    return f"{profile.name}, {format_bytes(room)} of {format_bytes(profile.memory_bytes)} for tensors: {fits}"


def fitted_point(fitting: Fitting, fitted: Fitted) -> FrontierPoint:
    """A plan that was made for a budget, as a point beside those of the frontier."""
    return _point(fitting, fitted.peak_bytes, fitted.simulated, fitted.seconds)


def _point(fitting: Fitting, peak: int, simulated: Simulated, extra: float) -> FrontierPoint:
    extra = max(extra, 0.0)
    ratio = 1.0 + extra / fitting.seconds if fitting.seconds else 1.0
    return FrontierPoint(peak, extra, ratio, len(simulated.plan.repeats()))
