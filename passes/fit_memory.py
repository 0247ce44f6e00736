"""Fitting a program into a number of bytes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, final

from torch import fx

from graphopt.analysis.costs.cost import check_cost, costs_of, profile_of_cost
from graphopt.analysis.program_replay import reserved_where_cached
from graphopt.errors import GraphoptError, did_you_mean
from graphopt.ir.node import Phase, info, value_of
from graphopt.ir.ops.values import format_bytes, parse_bytes, storage_bytes
from graphopt.ir.program import Program
from graphopt.ir.timeline import MemoryTimeline
from graphopt.planning.frontier import Frontier
from graphopt.planning.offloading import Lanes
from graphopt.rewriting.distributed.agreed_decision import decided_by_first_rank
from graphopt.rewriting.distributed.sharded_parameters import sharded_inputs
from graphopt.rewriting.memory.around_copies import AroundCopies, copies_line
from graphopt.rewriting.memory.budget import (
    BudgetError,
    budget_bytes,
    infeasible,
    refuse_elsewhere,
    refuse_hopeless,
    within_already,
)
from graphopt.rewriting.memory.budget_text import check_budget
from graphopt.rewriting.memory.checkpoint_segments import has_segments, leaves_segments
from graphopt.rewriting.memory.compress_action import CompressAction, choose_values, values_of
from graphopt.rewriting.memory.compression import Compression
from graphopt.rewriting.memory.decision import Decision, ProgramPlan, carry, or_own_segments
from graphopt.rewriting.memory.fit import Fitting, FittingOptions
from graphopt.rewriting.memory.lifted_copies import Swaps, lift_gathers, lift_swaps, nodes_of
from graphopt.rewriting.memory.named_plan import shared_calls
from graphopt.rewriting.memory.other_sizes import Searches, written_sizes
from graphopt.rewriting.memory.planned import Planned, plan_of
from graphopt.rewriting.memory.planning_problem import PlanningProblem
from graphopt.rewriting.memory.preparation import Prepared, prepared
from graphopt.rewriting.memory.state_action import (
    StateAction,
    link_to,
    movable_state,
    move_created_state,
    state_to_move,
    swapped_line,
)
from graphopt.rewriting.memory.state_swaps import created_state, elsewhere
from graphopt.rewriting.memory.transfer_insertion import host_lanes
from graphopt.rewriting.pass_ import Changed, Numerics, Pass, PassStage
from graphopt.rewriting.progress import measuring, searching

__all__ = ["FitMemory"]

_ORIGIN = "fit-memory"
_STATE_ORIGIN = "state of fit-memory"

_Key = tuple[str, Hashable, tuple[tuple[str, int], ...]]
_WAYS = ("recompute", "offload", "state", "compress")
_EFFORTS = ("default", "thorough")
_SHARES = 3
"""Where sizes vary: into how many parts what the largest ones exceed the budget by is divided, to plan for each."""

_COMPRESSION = Compression(8, 256, "compress of fit-memory")


@final
@dataclass(frozen=True)
class FitMemory(Pass):
    """Meet a peak in bytes at the least cost in time.

    The peak counts everything that is alive: parameters, gradients, the optimizer's state, the batch, activations,
    temporaries, copies in flight. What is dropped is computed again just before it is needed, several times where that
    pays; random ops replay the generator's state, so results, gradients and the random stream equal eager's to the last
    bit. A budget above the peak of the program as it is changes nothing, but for what the model itself has run again;
    one that cannot be met is an error with the smallest peak that was found. More budget never costs more of the
    predicted time with ``effort="thorough"``, and hardly more otherwise: 1 % of a step where the plan is proved to be
    that near to the best one, as most are.

    Segments of ``torch.utils.checkpoint`` in the model (``gradient_checkpointing_enable()``) are a hint. Plans are
    those of the model without them: what they drop is kept where the budget leaves room, also where it is above the
    peak, and what they keep may run again; the record counts both. Where no plan within the budget runs less again
    than they do, they stay. Shares of the peak are of the program with them. Models that are captured in parts keep
    their segments, since what one part drops makes room for the others.

    Where parameters are gathered when they are read (``ShardParameters``), or inputs reside elsewhere
    (``OffloadState``), they stay between two calls that need them where the budget leaves room, also where it is above
    the peak: up to five plans are weighed by the seconds of what runs again and of waiting for what is gathered, or
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
        budget: the peak in bytes: a number, ``"8GB"`` (powers of ten), ``"512MiB"``, ``"60%"`` of the peak of the
            program as it is (of what is reserved for it, where that counts), or ``"auto"``, what the program holds
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
            any case: with copies to a host, slices, parts, ``state``, inputs that reside elsewhere, and on devices
            whose allocator keeps freed blocks. Where sizes vary, plans for three budgets are.
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
    numerics: ClassVar[Numerics] = "bitwise"
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
        self._room()
        if "compress" in self.allow:
            for name, value in (("numerics", "changes"), ("draws", True), ("fixed_sizes", True)):
                object.__setattr__(self, name, value)  # of this pass, in the place of the class's

    def _room(self) -> int | None:
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
        if any(info(node).origin.startswith(_ORIGIN) for node in program.phase_nodes(Phase.RECOMPUTE, Phase.FORWARD)):
            return Changed(reason="the program has been fitted already")
        try:
            return self._fit_all(program)
        except BudgetError as error:
            raise error.in_shares(self.budget) from None

    def _fit_all(self, program: Program) -> Changed:
        """Fit a program that has not been fitted yet."""
        if "compress" not in self.allow:
            return self._fit_uncompressed(program)
        if program.context.room is None:
            return self._fit_compressed(program)
        done = self._fit_uncompressed(program)
        return replace(done, lines=(*done.lines, "in models that are captured in parts no value is compressed"))

    def _fit_uncompressed(self, program: Program) -> Changed:
        """Fit a program whose values stay as they are."""
        lifted = [found for found in (lift_swaps(program), lift_gathers(program)) if found is not None]
        if lifted:
            return self._without_state(self._fit_around(program, lifted), "offload-state says which state moves here")
        if program.stage != "step":
            return self._without_state(self._fit(program), "there is no update in this program")
        return self._fit_with_state(program) if "state" in self.allow else self._fit(program)

    def _fit_compressed(self, program: Program) -> Changed:
        """Fit a program of whose activations as many are stored in 8 bits as pay."""
        memory = program.memory()
        if program.context.plans is None:
            program.context = replace(program.context, plans={})
        plans = program.context.plans
        assert plans is not None
        key = str(self), "compress"
        if key not in plans:
            budget = self._bytes(program, memory)
            if within_already(memory, budget, reserved_where_cached(program, memory)):
                return self._fit_uncompressed(program)
            try:
                plans[key] = budget, decided_by_first_rank(program, lambda: self._choose_values(program, budget))
            except BudgetError:  # with values compressed, but no state moved
                return self._fit_uncompressed(program)
        budget, action = plans[key]  # of the program that was planned, in all programs of a step
        chosen = values_of(program, _COMPRESSION, action.names)
        if not chosen:
            return self._fit_uncompressed(program)
        _COMPRESSION.apply(program, chosen)
        done = replace(self, budget=budget)._fit_uncompressed(program)
        lines = (*done.lines, _COMPRESSION.line(chosen), action.line)
        return replace(done, counts={**done.counts, "compressed": len(chosen)}, lines=lines)

    def _choose_values(self, program: Program, budget: int) -> CompressAction:
        """Which values are compressed where the step is the fastest."""

        def seconds_of(trial: Program) -> float:
            found = self._decide(trial, budget).found
            return sum(costs_of(trial.memory(), self.cost).seconds) if found is None else found.seconds

        return choose_values(program, _COMPRESSION, seconds_of)

    def _without_state(self, done: Changed, reason: str) -> Changed:
        """What was done, with the reason why state was left where it is, where it was allowed to move."""
        if "state" not in self.allow:
            return done
        return replace(done, lines=(*done.lines, f"no optimizer state is moved by this pass: {reason}"))

    def _fit_around(self, program: Program, lifted: Sequence[Swaps]) -> Changed:
        """Fit a program some of whose inputs reside elsewhere; each plan is one around their copies."""
        with elsewhere(program, nodes_of(program, lifted)):
            room = program.context.room
            budget = self._bytes(program, program.memory()) if room is None else room
        if program.context.plans is None:
            program.context = replace(program.context, plans={})
        done, swapped = self._around(program, lifted, budget)
        return replace(done, lines=(*done.lines, *map(copies_line, lifted, swapped)))

    @property
    def _around(self) -> AroundCopies:
        return AroundCopies(self._fit, self._smallest, self.cost)

    def _smallest(self, program: Program) -> int | None:
        """The smallest peak of a program that was found; None where there was no search."""
        known = (program.context.plans or {}).get(self._key(program))
        return known[0].fitting.smallest().taken_bytes if known else None

    def _key(self, program: Program) -> _Key:
        """What plans of programs with the same calls, for the same sizes, are kept under."""
        return str(self), shared_calls(program), tuple(sorted(program.context.sizes.items()))

    def _fit_with_state(self, program: Program) -> Changed:
        """Fit a program of whose optimizer state as much may reside elsewhere as pays."""
        memory = program.memory()
        context = program.context
        if context.plans is None:
            program.context = context = replace(context, plans={})
        plans = context.plans
        assert plans is not None
        key = str(self), "state"
        actions: list[StateAction] | None = plans.get(key)
        budget = self._bytes(program, memory) if context.room is None else context.room
        if actions is None:
            state = movable_state(program)
            if not state:
                return self._without_state(self._fit(program), "the optimizer has none that is large, or runs as it is")
            if within_already(memory, budget, reserved_where_cached(program, memory)):
                return self._fit(program)
            actions = self._choose_state(program, state, budget)
        for action in actions:
            try:
                done = self._fit_moving(program, action, budget)
            except BudgetError:
                if action is actions[-1]:
                    raise
            else:
                plans[key] = [action]
                return done
        raise AssertionError("there is an action, that of all state at the least")

    def _fit_moving(self, program: Program, chosen: StateAction, budget: int) -> Changed:
        """Fit a program some of whose optimizer state resides elsewhere."""
        link = link_to(program, self.cost, chosen.tier)
        created = [name for _, name in created_state(program, 1) if name in chosen.names]
        if created:
            move_created_state(program, created, link, self.cost, origin=_STATE_ORIGIN)
        names = {node.name: name for node, name in chosen.nodes(program).items()}
        done, (swapped,) = self._around(program, [Swaps(names, chosen.tier, _STATE_ORIGIN)], budget)
        moved = sum(storage_bytes(value_of(node)) for node in chosen.nodes(program))
        lines = (*done.lines, *([swapped_line(swapped, moved, link.tier)] if swapped.inputs else ()))
        counts = {**done.counts, "state elsewhere": len(swapped.inputs) + len(created)}
        return replace(done, counts=counts, lines=lines)

    def _choose_state(self, program: Program, state: Mapping[fx.Node, str], budget: int) -> list[StateAction]:
        """How much of the state is to reside elsewhere, the best first."""
        trial = prepared(program.copy(), _ORIGIN).program
        names = {node.name: name for node, name in state.items()}
        there = {node: names[node.name] for node in trial.placeholders if node.name in names}
        largest_first = dict(sorted(there.items(), key=lambda item: -storage_bytes(value_of(item[0]))))
        with elsewhere(trial, there):
            without = trial.memory()
            with measuring() as measured:
                costs = costs_of(without, self.cost, progress=measured)
            with searching() as searched:
                fitting = Fitting(trial, without, costs.seconds, self._options(searched, ()))
            link = link_to(trial, self.cost)
            return state_to_move(fitting, without, costs.seconds, largest_first, budget, link)

    def _fit(self, program: Program, share: int | None = None, known: Planned | None = None) -> Changed:
        """Fit a program as it is; where ranks keep shards of its parameters, as the first of them decides.

        Args:
            program: rewritten in place.
            share: the budget in bytes, where it is known already.
            known: a plan that was found for this program before.
        """
        if sharded_inputs(program):
            plan = decided_by_first_rank(program, lambda: self._decide(program.copy(), share).plan)
            ready = program if plan.preparation is None else plan.preparation.done_to(program, _ORIGIN)
            if ready is None:
                raise GraphoptError("what the first rank does to its program cannot be done on this one")
            program.take_over(ready)
            return plan.carry_out(program, origin=_ORIGIN)
        context, memory = program.context, program.memory()
        alone = share is None and known is None and context.room is None and not context.sizes
        key = (*self._key(program), "plan")
        plans: list[ProgramPlan] = [] if context.plans is None or not alone else context.plans.setdefault(key, [])
        for made in plans:
            done = made.carried_to(program, memory, self._bytes(program, memory), origin=_ORIGIN)
            if done is not None:
                return done
        decision = self._decide(program, share, known)
        found = decision.found
        made = ProgramPlan(decision.plan, memory.peak_bytes, {} if found is None else found.details)
        if found is not None:
            plans.append(made)
        return made.carry_out(program, origin=_ORIGIN, fitting=None if found is None else found.fitting)

    def _decide(self, program: Program, share: int | None, known: Planned | None = None) -> Decision:
        """What is to be done to a program; what comes before the plan is done already.

        Where the model has segments of ``torch.utils.checkpoint``, it is planned as if it had none, also within a
        budget above its peak; parts of a model share a limit by their bytes, and stay as they are there.
        """
        memory = program.memory()
        room = program.context.room
        key = self._key(program)
        carried = [known] if known else list((program.context.plans or {}).get(key, ()))
        budget = room if room is not None else share or self._bytes(program, memory)
        reason = within_already(memory, budget, reserved_where_cached(program, memory))
        segments = room is None and has_segments(program)
        if reason and room is not None:
            peak = format_bytes(memory.peak_bytes)
            return Decision(reason=f"the peak of this part as it is, {peak}, is within its share of the budget")
        if reason and not segments:
            sizes = written_sizes(program)
            return Decision(reason=f"{reason}, up to {sizes}" if sizes else reason)
        if not segments:
            return self._decide_in_an_order(program, budget, key, carried)
        plan = functools.partial(self._decide_in_an_order, program, budget, key, carried)
        return or_own_segments(program, plan, budget, self.cost, _ORIGIN)

    def _decide_in_an_order(self, program: Program, budget: int, key: _Key, carried: Sequence[Planned]) -> Decision:
        """What is to be done to a program that exceeds its budget, or has segments.

        Where no plan is found with calls of backward in another order, one is looked for in theirs.
        """
        undo = program.context.room is None
        original, ready = program.graph, prepared(program, _ORIGIN, undo=undo)
        try:
            return self._decide_prepared(program, ready, budget, key, carried)
        except BudgetError as refused:
            if not (ready.done.reordered and refused.searched):
                raise
            program.graph = original
            try:
                given = prepared(program, _ORIGIN, reorder=False, undo=undo)
                return self._decide_prepared(program, given, budget, key, carried)
            except BudgetError as error:
                raise min(refused, error, key=lambda each: each.smallest_bytes) from None

    def _decide_prepared(
        self, program: Program, ready: Prepared, budget: int, key: _Key, carried: Sequence[Planned]
    ) -> Decision:
        """What is to be done to a program that is prepared for it.

        Args:
            program: gets the calls of ``ready``.
            ready: the program, prepared.
            budget: in bytes.
            key: what plans of the program are kept under.
            carried: the plans that were found for such programs before.
        """
        program.take_over(ready.program)
        memory = program.memory()
        room, plans = program.context.room, program.context.plans
        _, calls, wanted = key
        changed = bool(ready.lines) or ready.segments is not None
        if changed and room is None and within_already(memory, budget, reserved_where_cached(program, memory)):
            return Decision(prepared=ready)
        shared = room is not None
        searches = None if plans is None or not wanted else plans.setdefault((str(self), calls), Searches())
        found = carry(program, memory, carried, budget, shared=shared)
        if found is None and searches is not None:
            found = searches.plan_within(program, budget)
        if found is None:
            found = self._search(program, memory, budget, shared=shared)
            if searches is not None:
                searches.add(found)
        if plans is not None and all(found is not other for other in plans.setdefault(key, [])):
            plans[key].append(found)
        return Decision(found=found, prepared=ready)

    def _search(self, program: Program, memory: MemoryTimeline, budget: int, *, shared: bool) -> Planned:
        """Search for plans, and take the fastest one within the budget.

        Args:
            program: is only read.
            memory: its timeline.
            budget: in bytes.
            shared: whether it is one part's share of a budget, which the smallest plan may exceed.
        """
        refuse_elsewhere(memory, budget)
        if not shared:
            refuse_hopeless(program, memory, budget, moves="offload" in self.allow and self._room() != 0)
        with measuring() as measured:
            costs = costs_of(memory, self.cost, progress=measured)
        with searching() as searched:
            everywhere = shared or program.context.elsewhere  # ask for plans at all budgets
            budgets = [] if everywhere else [budget]
            if budgets and program.context.sizes:  # smaller ones need less of what the plan does
                budgets += [budget + (memory.peak_bytes - budget) * share // _SHARES for share in range(1, _SHARES)]
            fitting = Fitting(program, memory, costs.seconds, self._options(searched, budgets))
            fitted = fitting.within(budget)
            if fitted is None and not shared:
                fitting = fitting.thorough()
                fitted = fitting.within(budget)
        if fitted is None and not shared:
            error = infeasible(fitting, budget)
            error.smallest = plan_of(fitting, fitting.smallest(), error.smallest_bytes, costs)
            raise error
        return plan_of(fitting, fitted or fitting.smallest(), budget, costs)

    def _bytes(self, program: Program, memory: MemoryTimeline) -> int:
        """The budget in bytes; a share means that of the program that was planned first, in all programs of a step.

        Where gradients are accumulated, it is a share of the highest peak of the calls of an update, the updating one.
        Where sizes vary, it is a share of the peak at the largest that have come up.
        """
        shares = isinstance(self.budget, str) and self.budget.strip().endswith("%")
        largest, plans = program.context.largest, program.context.plans
        counted = program.memory(sizes=largest) if shares and largest else memory
        key = str(self), "budget", tuple(sorted(largest.items())), tuple(sorted(program.context.sizes.items()))
        known = 0 if plans is None else plans.get(key, 0)
        if known and not program.inputs_of("gradient"):
            return known
        found = budget_bytes(self.budget, counted, reserved_where_cached(program, counted) if shares else None)
        if plans is not None:
            plans[key] = max(known, found)
        return max(known, found)

    def limit(self, memory: MemoryTimeline) -> int:
        """The budget in bytes."""
        return budget_bytes(self.budget, memory)

    def _options(self, progress: Callable[[float, Frontier], None], budgets: Sequence[int]) -> FittingOptions:
        """How plans are searched for: for some budgets, or for all."""
        return FittingOptions(
            self.time_limit,
            progress,
            self._lanes(),
            recompute="recompute" in self.allow,
            budgets=tuple(budgets),
            thorough=self.effort == "thorough",
            origin=_ORIGIN,
        )

    def _lanes(self) -> Callable[[PlanningProblem], Lanes] | None:
        """What copies can do; nothing where they are not allowed, or where the host is the device itself."""
        if "offload" not in self.allow:
            return None
        room = self._room()
        profile = profile_of_cost(self.cost)
        return lambda planning: host_lanes(planning, room, rate=profile.host_bandwidth if profile else None)
