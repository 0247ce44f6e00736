"""Fitting a program into a number of bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, final

from graphopt.analysis.costs.cost import check_cost
from graphopt.errors import GraphoptError, did_you_mean
from graphopt.ir.memory.timeline import MemoryTimeline
from graphopt.ir.node import Phase, info
from graphopt.ir.program import Program
from graphopt.ir.words.written_units import parse_bytes
from graphopt.rewriting.memory.budget_text import check_budget
from graphopt.rewriting.memory.fit.budget import BudgetError, budget_bytes
from graphopt.rewriting.memory.fit.memory_planner import ORIGIN, MemoryPlanner, MemoryPlannerOptions
from graphopt.rewriting.memory.recompute.checkpoint_segments import leaves_segments
from graphopt.rewriting.pass_ import Changed, Numerics, Pass, PassStage, by_options

__all__ = ["FitMemory"]

_WAYS = ("recompute", "offload", "state", "compress")
_EFFORTS = ("default", "thorough")


@final
@dataclass(frozen=True)
class FitMemory(Pass):
    """Meet a peak in bytes at the least cost in time.

    The peak counts everything that is alive: parameters, gradients, the optimizer's state, the batch, activations,
    temporaries, copies in flight. What is dropped is recomputed just before it is needed, several times where that
    pays; random ops replay the generator's state, so results, gradients and the random stream equal eager's to the last
    bit. A budget above the baseline peak changes nothing, but for what the model itself has recomputed; one that cannot
    be met is an error with the smallest peak that was found. More budget never costs more of the predicted time with
    ``effort="thorough"``, and hardly more otherwise: 1 % of a step where the plan is proved to be that near to the best
    one, as most are.

    Segments of ``torch.utils.checkpoint`` in the model (``gradient_checkpointing_enable()``) are a hint. Plans are
    those of the model without them: what they drop is kept where the budget leaves room, also where it is above the
    peak, and what they keep may be recomputed; the record counts both. Where no plan within the budget recomputes less
    than they do, they stay. Shares of the peak are of the program with them. Models that are captured in parts keep
    their segments, since what one part drops makes room for the others.

    Where parameters are gathered when they are read (``ShardParameters``), or inputs reside elsewhere
    (``OffloadState``), they stay between two calls that need them where the budget leaves room, also where it is above
    the peak: up to five plans are weighed by the seconds of what is recomputed and of waiting for what is gathered, or
    copied, again. What is said of more budget holds there as far as these five go.

    Where the budget is below the peak, what costs no time comes first, unless a compiler makes the code: the gradient
    of a loss over classes takes the place of its log-probabilities, so that one tensor of the logits' size is there and
    not two (where the loss is in the program); gradients that are stacked and then copied in another order, as those of
    queries, keys and values are, are stacked in that order; calls of backward that free more than they make run first;
    and in a whole step updates run as soon as their gradients are final (``FuseUpdate``), unless they need all of them.
    A budget below every plan in that order gets one in the given order, which a larger budget does not.

    Where gradients are accumulated (``TrainStep.accumulate``), the budget holds for each call of an update, gradients
    so far and the optimizer's state included; ``60%`` is of the highest peak among these calls, that of the updating
    one. One plan serves all of them, and what one of them cannot meet is refused before the first one runs.

    A step that takes its batch in slices (``Microbatch``) is planned by the slice in which the most bytes are alive;
    the others each take the fastest of these plans with which they stay within the budget.

    Where values are on several devices the budget is for each accelerator; plans lower the peak of the one that holds
    most, and a budget that another one exceeds is refused.

    On a device whose allocator keeps freed blocks (CUDA), a budget holds for what the allocator reserves for the
    program, workspaces of libraries included: each plan is replayed through it (``Program.reserved``), and the fastest
    one is taken for which it reserves no more. The record says both numbers.

    Plans come from minimum cuts with a price for each moment, then a local search that drops and keeps single values
    and crosses neighbouring plans, every candidate simulated to the byte (``graphopt.planning``). How far above the
    best possible plan the one that is taken can be at most is known by linear and integer programming, a relaxation of
    Checkmate's (Jain et al., MLSys 2020, arXiv 1910.02653), and is in the record where nothing is moved.

    Args:
        budget: the peak in bytes: a number, ``"8GB"`` (powers of ten), ``"512MiB"``, ``"60%"`` of the baseline
            peak (of what is reserved for it, where that counts), or ``"auto"``, what the program holds
            already and 95 % of what is free on its device; on a CPU, of this rank's part (``LOCAL_WORLD_SIZE``).
        host_budget: bytes on the host that offloading may take (a number, or text such as ``"8GB"``); None for what is
            free there or, on a CPU, for nothing: there the host's memory is the device's.
        allow: what may be done: ``recompute``; ``offload`` (activations wait on the host); ``state`` (as much of the
            optimizer's state as pays resides on the host or, for a model on a CPU, on a disk, and is copied in for the
            update, as ``OffloadState`` does it); ``compress`` (as many activations as pay are stored in 8 bits an
            element, as ``CompressActivations`` does it: gradients get noise without bias, and random numbers of the
            program are others, so that with it the pass ``changes`` results. Not in models that are captured in parts).
        effort: ``default``, which looks for a plan for this budget, in about a second, and ends as soon as one is
            within half a per cent of the step of a proven bound; or ``thorough``, which looks for the best plans for
            every budget, and takes many times as long. Where plans for other budgets count too, all are looked for in
            any case: with slices, parts, ``state``, inputs that reside elsewhere, and where a device's allocator
            leaves more than an eighth of the budget unused. Where sizes vary, or values may wait on the host, plans
            for some more budgets are.
        time_limit: seconds that the search may take; what it has by then is used. Without a limit the effort depends on
            the program and the budget alone, and so do the plans.
        cost: where seconds come from: ``measured`` (each distinct call is run on this device, and the figures are kept
            on disk), ``roofline`` (nothing of the program is run), or the name of a device whose roofline is taken
            (``a100-80gb``), or a ``.toml`` file with its profile. For a program without data the first two mean the
            roofline of the device that it is for.

    Raises:
        GraphoptError: where no plan is within the budget, with the smallest peak and the largest tensors alive there;
            for options that mean nothing.

    Example:
        >>> step = graphopt.optimize_step(model, optimizer, [FitMemory("80%", cost="roofline")], loss=loss).prepare(x)
        >>> plain = graphopt.capture(model, (x,), loss=loss, optimizer=optimizer)
        >>> step.program.memory().peak_bytes <= 0.8 * plain.memory().peak_bytes
        True
    """

    name: ClassVar[str] = "fit-memory"
    stage: ClassVar[PassStage] = "last"
    numerics: ClassVar[Numerics] = by_options("bitwise", lambda self: "changes" if self._compresses else "bitwise")
    draws: ClassVar[bool] = by_options(False, lambda self: self._compresses)
    fixed_sizes: ClassVar[bool] = by_options(False, lambda self: self._compresses)
    after: ClassVar[tuple[str, ...]] = ("chunk-loss", "chunk", "fuse-update", "shard-parameters")
    in_parts: ClassVar[bool] = True
    has_limit: ClassVar[bool] = True

    budget: int | str
    host_budget: int | str | None = None
    allow: tuple[str, ...] = ("recompute", "offload")
    time_limit: float | None = None
    cost: str = "measured"
    effort: str = "default"

    def __post_init__(self) -> None:
        check_budget(self.budget)
        unknown = [way for way in self.allow if way not in _WAYS]
        if unknown or not self.allow:
            hint = did_you_mean(unknown[0], _WAYS) if unknown else "give some of recompute, offload, state and compress"
            raise GraphoptError(f"allow={','.join(self.allow) or 'nothing'} is not possible; {hint}")
        check_cost(self.cost)
        if self.effort not in _EFFORTS:
            raise GraphoptError(f"effort={self.effort!r} is not possible; {did_you_mean(self.effort, _EFFORTS)}")
        if self.time_limit is not None and not 0 <= self.time_limit < math.inf:
            raise GraphoptError(f"time_limit is a number of seconds of at least 0, got {self.time_limit}")
        self._host_bytes()

    @property
    def _compresses(self) -> bool:
        return "compress" in self.allow

    def _host_bytes(self) -> int | None:
        """The bytes that ``host_budget`` allows."""
        try:
            room = parse_bytes(self.host_budget) if isinstance(self.host_budget, str) else self.host_budget
        except ValueError as error:
            raise GraphoptError(f"host_budget={self.host_budget!r}: {error}") from None
        if room is not None and room >= 2**63:
            raise GraphoptError("host_budget is a number of bytes, and this one is more than any memory has")
        if room is not None and room < 0:
            raise GraphoptError(f"host_budget is a number of bytes, and {room} is negative")
        return room

    @leaves_segments
    def apply(self, program: Program) -> Changed:
        """See the class; rewrites the program that runs."""
        if any(info(node).made_by == ORIGIN for node in program.phase_nodes(Phase.RECOMPUTE, Phase.FORWARD)):
            return Changed(reason="the program has been fitted already")
        try:
            return MemoryPlanner(self._options).plan(program)
        except BudgetError as error:
            raise error.in_shares(self.budget) from None

    def limit(self, memory: MemoryTimeline) -> int:
        """The budget in bytes."""
        return budget_bytes(self.budget, memory)

    @property
    def _options(self) -> MemoryPlannerOptions:
        return MemoryPlannerOptions(
            str(self), self.budget, self._host_bytes(), self.allow, self.cost, self.effort, self.time_limit
        )
