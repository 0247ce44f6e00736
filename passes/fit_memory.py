"""Fitting a program into a number of bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from graphopt.analysis.cost import PROFILES, CostReport, cost_report
from graphopt.analysis.liveness import MemoryTimeline
from graphopt.errors import GraphoptError, did_you_mean
from graphopt.fitting import Fitted, Fitting
from graphopt.freememory import free_bytes
from graphopt.pipeline import Changed, Numerics, Pass, PassStage
from graphopt.program import Phase, Program, info
from graphopt.report.plan import plan_lines
from graphopt.values import format_bytes, parse_bytes

__all__ = ["FitMemory"]

_ORIGIN = "fit-memory"
_WAYS = ("recompute", "offload")


@final
@dataclass(frozen=True)
class FitMemory(Pass):
    """Meet a peak in bytes at the least cost in time.

    The peak counts everything that is alive: parameters, gradients, the optimizer's state, the batch, activations,
    temporaries, copies in flight. What is dropped is computed again just before it is needed, several times where that
    pays; random ops replay the generator's state, so results, gradients and the random stream equal eager's to the last
    bit. A budget above the peak of the program as it is changes nothing; one that cannot be met is an error with the
    smallest peak that was found. More budget never costs more of the predicted time.

    Plans come from one frontier of bytes and seconds: minimum cuts with a price for each moment, then a local search
    that drops and keeps single values, every candidate simulated to the byte (``graphopt.planning``).

    Args:
        budget: the peak in bytes: a number, ``"8GB"`` (powers of ten), ``"512MiB"``, ``"60%"`` of the peak of the program
            as it is, or ``"auto"``, what the program holds already and 95 % of what is free on its device.
        host_budget: bytes on the host that offloading may take; None for what is free there.
        allow: what may be done: ``recompute``, ``offload``.
        time_limit: seconds that the search may take; what it has by then is used. Without a limit the effort depends on
            the program alone, and so do the plans.
        cost: where seconds come from: ``measured`` (each distinct call is run on this device, and the figures are kept
            on disk), ``roofline`` (nothing of the program is run), or the name of a device whose roofline is taken
            (``a100-80gb``).

    Raises:
        GraphoptError: where no plan is within the budget, with the smallest peak and the largest tensors alive there;
            for options that mean nothing.
    """

    name: ClassVar[str] = "fit-memory"
    stage: ClassVar[PassStage] = "last"
    numerics: ClassVar[Numerics] = "bitwise"
    after: ClassVar[tuple[str, ...]] = ("fuse-update",)

    budget: int | str
    host_budget: int | str | None = None
    allow: tuple[str, ...] = _WAYS
    time_limit: float | None = None
    cost: str = "measured"

    def __post_init__(self) -> None:
        _check_budget(self.budget)
        unknown = [way for way in self.allow if way not in _WAYS]
        if unknown or not self.allow:
            hint = did_you_mean(unknown[0], _WAYS) if unknown else "give recompute, offload or both"
            raise GraphoptError(f"allow={','.join(self.allow) or 'nothing'} is not possible; {hint}")
        if self.cost not in ("measured", "roofline", *PROFILES):
            known = ["measured", "roofline", *PROFILES]
            raise GraphoptError(f"there is no cost model {self.cost!r}; {did_you_mean(self.cost, known) or known}")

    def apply(self, program: Program) -> Changed:
        """See the class; rewrites the program that runs."""
        if any(info(node).origin.startswith(_ORIGIN) for node in program.phase_nodes(Phase.RECOMPUTE, Phase.FORWARD)):
            return Changed(reason="the program has been fitted already")
        memory = program.memory()
        budget = _bytes_of(self.budget, memory)
        if memory.peak_bytes <= budget:
            peak, room = format_bytes(memory.peak_bytes), format_bytes(budget)
            return Changed(reason=f"the peak of the program as it is, {peak}, is within the budget of {room}")
        costs = self.costs(memory)
        fitting = Fitting(program, memory, costs.seconds, time_limit=self.time_limit)
        fitted = fitting.within(budget)
        if fitted is None:
            raise _infeasible(fitting, budget)
        done = fitting.apply(program, fitted.simulated, origin=_ORIGIN)
        again = len(fitted.simulated.plan.repeats())
        return Changed(
            counts={"run again": again, "random ops replayed": len(done.replayed)},
            tensors=tuple(name for node in done.clones for name in info(node).names[:1]),
            lines=(*_summary(fitting, fitted, budget, costs), *plan_lines(fitting, fitted.simulated)),
        )

    def costs(self, memory: MemoryTimeline) -> CostReport:
        """Seconds of every call, as this pass was told to find them."""
        if self.cost == "measured":
            return cost_report(memory.nodes)
        return cost_report(memory.nodes, method="roofline", profile=PROFILES.get(self.cost))


def _check_budget(budget: int | str) -> None:
    if isinstance(budget, bool) or not isinstance(budget, (int, str)):
        raise TypeError(f"budget is a number of bytes, text such as 8GB or 60%, or auto; got {budget!r}")
    if isinstance(budget, str) and budget != "auto" and not re.fullmatch(r"\d+(\.\d+)?%", budget):
        try:
            parse_bytes(budget)
        except ValueError as error:
            raise GraphoptError(f"budget={budget!r}: {error}, 60% (of the peak), or auto (what is free)") from None


def _bytes_of(budget: int | str, memory: MemoryTimeline) -> int:
    if isinstance(budget, int):
        return budget
    if budget == "auto":
        devices = {node.meta["val"].device for node in memory.nodes if hasattr(node.meta.get("val"), "device")}
        return memory.resident_bytes + int(0.95 * sum(free_bytes(device) for device in devices))
    if budget.endswith("%"):
        return int(memory.peak_bytes * float(budget[:-1]) / 100)
    return parse_bytes(budget)


def _infeasible(fitting: Fitting, budget: int) -> GraphoptError:
    smallest = fitting.check(fitting.frontier.lowest)
    rewritten = fitting.program.copy()
    fitting.apply(rewritten, smallest.simulated, origin=_ORIGIN)
    rewritten.erase_dead()
    memory = rewritten.memory()
    error = GraphoptError(
        f"no plan fits into {format_bytes(budget)} ({budget} bytes): the smallest peak found is {smallest.peak_bytes} "
        f"bytes ({format_bytes(smallest.peak_bytes)}), of which {format_bytes(memory.resident_bytes)} are parameters, "
        "optimizer state and inputs"
    )
    error.add_note(f"the smallest peak is reached at {_named(memory)}; the largest tensors alive there:")
    for item in memory.alive[:8]:
        error.add_note(f"  {item.name}: {format_bytes(item.bytes)} ({item.category}) {item.source}".rstrip())
    error.add_note("what to do: a larger budget, a smaller batch, or passes that make these tensors smaller")
    return error


def _named(memory: MemoryTimeline) -> str:
    node = memory.peak_at
    return (info(node).names or (node.name,))[0]


def _summary(fitting: Fitting, fitted: Fitted, budget: int, costs: CostReport) -> Sequence[str]:
    share = fitted.simulated.again / fitting.seconds if fitting.seconds else 0.0
    how = "measured" if costs.measured or costs.cached else "roofline"
    return [
        f"peak {format_bytes(fitted.peak_bytes)} of {format_bytes(budget)} allowed; the program as it is takes "
        f"{format_bytes(fitting.memory.peak_bytes)}; the smallest peak found is "
        f"{format_bytes(fitting.frontier.lowest.peak)}",
        f"what runs again takes {fitted.simulated.again * 1e3:.3g} ms on top of {fitting.seconds * 1e3:.3g} ms, "
        f"{share:.1%} ({how})",
    ]
