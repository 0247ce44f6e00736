"""Bringing a program within a number of bytes: what there is to plan, a search, and the plan carried out.

``MemoryPlanner.plan`` is where to start reading. Most programs are planned alone: prepared by what costs no time, then
rewritten by the plan of a search (``fit``), which other programs of the capture and other ranks are given as data
(``decision``). Around that stands what else saves bytes: activations that are compressed, optimizer state that is
offloaded, and inputs that other passes have offloaded or sharded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from graphopt.analysis.costs.cost import profile_of_cost
from graphopt.analysis.program_replay import reserved_where_cached
from graphopt.errors import GraphoptError
from graphopt.ir.context import UNLIMITED
from graphopt.ir.memory.timeline import MemoryTimeline
from graphopt.ir.node import value_of
from graphopt.ir.ops.values import storage_bytes
from graphopt.ir.program import Program
from graphopt.planning.frontier import Frontier
from graphopt.planning.transfers.offloading import Lanes
from graphopt.rewriting.distributed.agreed_decision import decided_by_first_rank, decided_in_group
from graphopt.rewriting.distributed.sharding.sharded_parameters import sharded_inputs
from graphopt.rewriting.memory.compress.compression import Compression
from graphopt.rewriting.memory.fit.budget import (
    BudgetError,
    budget_bytes,
    infeasible,
    refuse_elsewhere,
    refuse_hopeless,
    within_already,
    within_share,
)
from graphopt.rewriting.memory.fit.compress_action import CompressAction, choose_values, values_of
from graphopt.rewriting.memory.fit.decision import Decision, MemoryPlan, ProgramPlan, carry, or_own_segments
from graphopt.rewriting.memory.fit.fitting import Fitting, FittingOptions
from graphopt.rewriting.memory.fit.known_plans import ProgramKey, known_plans, made_known_plans
from graphopt.rewriting.memory.fit.named_plan import shared_calls
from graphopt.rewriting.memory.fit.other_sizes import Searches, written_sizes
from graphopt.rewriting.memory.fit.planned import Planned, plan_of
from graphopt.rewriting.memory.fit.plans_with_copies import AroundCopies, copies_line
from graphopt.rewriting.memory.fit.preparation import Prepared, prepared
from graphopt.rewriting.memory.fit.state_action import (
    StateAction,
    link_to,
    movable_state,
    move_created_state,
    state_to_move,
    swapped_line,
)
from graphopt.rewriting.memory.recompute.checkpoint_segments import has_segments
from graphopt.rewriting.memory.recompute.gathered_parameters import (
    costs_with_gathers,
    gathering_group,
    measure_gathers,
)
from graphopt.rewriting.memory.recompute.planning_problem import PlanningProblem
from graphopt.rewriting.memory.transfers.state_swaps import created_state, elsewhere
from graphopt.rewriting.memory.transfers.transfer_insertion import Swaps, host_lanes, lift_gathers, lift_swaps, nodes_of
from graphopt.rewriting.pass_ import Changed
from graphopt.rewriting.progress import measuring, searching

__all__ = ["ORIGIN", "MemoryPlanner", "MemoryPlannerOptions"]

ORIGIN = "fit-memory"
"""Who rewrites programs, for people."""

_STATE_ORIGIN = "state of fit-memory"

_SHARES = 3
"""Where sizes vary: into how many parts what the largest ones exceed the budget by is divided, to plan for each."""

_COMPRESSION = Compression(8, 256, "compress of fit-memory")


@dataclass(frozen=True, slots=True)
class MemoryPlannerOptions:
    """The budget of a program, and by what it is met; as ``FitMemory`` has it.

    Attributes:
        key: tells what is planned with these options from what is planned with others.
        budget: in bytes, as text, or a share.
        host_room: bytes on the host that offloading may take; None for what is free there.
        allow: what may be done.
        cost: where seconds come from.
        effort: ``default`` or ``thorough``.
        time_limit: seconds that a search may take.
        insist: where no plan is found within the budget, search for plans at every budget with the most effort.
    """

    key: str
    budget: int | str
    host_room: int | None
    allow: tuple[str, ...]
    cost: str
    effort: str
    time_limit: float | None
    insist: bool = True

    def of_bytes(self, budget: int) -> MemoryPlannerOptions:
        """The same for another number of bytes."""
        return replace(self, budget=budget, key=f"{self.key} of {budget} bytes")


class MemoryPlanner:
    """Brings programs within a budget: decides once for a capture, and does that to each of its programs.

    Args:
        options: how.
    """

    def __init__(self, options: MemoryPlannerOptions) -> None:
        self._options = options

    def plan(self, program: Program) -> Changed:
        """Bring a program within its budget, and say what was done; what another pass put elsewhere stays there."""
        if "compress" not in self._options.allow:
            return self._plan_uncompressed(program)
        if program.context.room is None:
            return self._plan_compressed(program)
        done = self._plan_uncompressed(program)
        return replace(done, lines=(*done.lines, "in models that are captured in parts no value is compressed"))

    def _plan_uncompressed(self, program: Program) -> Changed:
        """Plan a program none of whose saved activations is compressed."""
        lifted = [found for found in (lift_swaps(program), lift_gathers(program)) if found is not None]
        if lifted:
            return self._without_state(
                self._plan_around_copies(program, lifted), "offload-state says which state moves here"
            )
        if program.stage != "step":
            return self._without_state(self._plan_alone(program), "there is no update in this program")
        return self._plan_with_state(program) if "state" in self._options.allow else self._plan_alone(program)

    def _plan_compressed(self, program: Program) -> Changed:
        """Plan a program of whose saved activations as many are stored in 8 bits as pay."""
        memory = program.memory()
        plans, key = made_known_plans(program), self._options.key
        if key not in plans.compressed:
            budget = self._bytes(program, memory)
            if within_already(memory, budget, reserved_where_cached(program, memory)):
                return self._plan_uncompressed(program)
            try:
                action = decided_by_first_rank(program, lambda: self._choose_values(program, budget))
            except BudgetError:  # with values compressed, but no state moved
                return self._plan_uncompressed(program)
            plans.compressed[key] = budget, action
        budget, action = plans.compressed[key]  # of the program that was planned, in all programs of a step
        chosen = values_of(program, _COMPRESSION, action.names)
        if not chosen:
            return self._plan_uncompressed(program)
        _COMPRESSION.apply(program, chosen)
        done = MemoryPlanner(self._options.of_bytes(budget))._plan_uncompressed(program)
        lines = (*done.lines, _COMPRESSION.line(chosen), action.line)
        return replace(done, counts={**done.counts, "compressed": len(chosen)}, lines=lines)

    def _choose_values(self, program: Program, budget: int) -> CompressAction:
        """Which values are compressed where the step is the fastest."""

        def seconds_of(trial: Program) -> float:
            found = self._decide(trial, budget).found
            if found is not None:
                return found.seconds
            return sum(costs_with_gathers(trial, trial.memory(), self._options.cost).seconds)

        return choose_values(program, _COMPRESSION, seconds_of)

    def _without_state(self, done: Changed, reason: str) -> Changed:
        """What was done, with the reason why state was left where it is, where it was allowed to move."""
        if "state" not in self._options.allow:
            return done
        return replace(done, lines=(*done.lines, f"no optimizer state is moved by this pass: {reason}"))

    def _plan_around_copies(self, program: Program, lifted: Sequence[Swaps]) -> Changed:
        """Plan a program some of whose inputs are offloaded or sharded; each plan is one around their copies."""
        with elsewhere(program, nodes_of(program, lifted)):
            room = program.context.room
            budget = self._bytes(program, program.memory()) if room is None else room
        made_known_plans(program)
        done, swapped = self._around(program, lifted, budget)
        return replace(done, lines=(*done.lines, *map(copies_line, lifted, swapped)))

    @property
    def _around(self) -> AroundCopies:
        return AroundCopies(self._plan_alone, self._least_expected, self._options.cost)

    def _least_expected(self, program: Program) -> int | None:
        """The fewest bytes that a plan of a program is expected to take; None where there was no search.

        What was searched for is rewritten already, so that no further plan can be looked at as a program.
        """
        plans = known_plans(program)
        known = None if plans is None else plans.planned.get(self._key(program))
        return known[0].fitting.least_expected if known else None

    def _key(self, program: Program) -> ProgramKey:
        """What plans of programs with the same calls, for the same sizes, are kept under."""
        return self._options.key, shared_calls(program), tuple(sorted(program.context.sizes.planned.items()))

    def _plan_with_state(self, program: Program) -> Changed:
        """Plan a program of whose optimizer state as much may be offloaded as pays."""
        memory = program.memory()
        plans, room, key = made_known_plans(program), program.context.room, self._options.key
        actions = plans.state.get(key)
        budget = self._bytes(program, memory) if room is None else room
        if actions is None:
            state = movable_state(program)
            if not state:
                return self._without_state(
                    self._plan_alone(program), "the optimizer has none that is large, or runs in eager mode"
                )
            if within_already(memory, budget, reserved_where_cached(program, memory)):
                return self._plan_alone(program)
            actions = self._choose_state(program, state, budget)
        for action in actions:
            insist = action is actions[-1]  # before that more state may move
            planner = self if insist else MemoryPlanner(replace(self._options, insist=False))
            try:
                done = planner._plan_with_state_moved(program, action, budget)
            except BudgetError:
                if action is actions[-1]:
                    raise
            else:
                plans.state[key] = [action]
                return done
        raise AssertionError("there is an action, that of all state at the least")

    def _plan_with_state_moved(self, program: Program, chosen: StateAction, budget: int) -> Changed:
        """Plan a program some of whose optimizer state is offloaded."""
        link = link_to(program, self._options.cost, chosen.tier)
        created = [name for _, name in created_state(program, 1) if name in chosen.names]
        if created:
            move_created_state(program, created, link, self._options.cost, origin=_STATE_ORIGIN)
        names = {node.name: name for node, name in chosen.nodes(program).items()}
        done, (swapped,) = self._around(program, [Swaps(names, chosen.tier, _STATE_ORIGIN)], budget)
        moved = sum(storage_bytes(value_of(node)) for node in chosen.nodes(program))
        lines = (*done.lines, *([swapped_line(swapped, moved, link.tier)] if swapped.inputs else ()))
        counts = {**done.counts, "state elsewhere": len(swapped.inputs) + len(created)}
        return replace(done, counts=counts, lines=lines)

    def _choose_state(self, program: Program, state: Mapping[fx.Node, str], budget: int) -> list[StateAction]:
        """How much of the state is to reside elsewhere, the best first."""
        trial = prepared(program.copy(), ORIGIN).program
        names = {node.name: name for node, name in state.items()}
        there = {node: names[node.name] for node in trial.placeholders if node.name in names}
        largest_first = dict(sorted(there.items(), key=lambda item: -storage_bytes(value_of(item[0]))))
        with elsewhere(trial, there):
            without = trial.memory()
            with measuring() as measured:
                costs = costs_with_gathers(trial, without, self._options.cost, measured)
            with searching() as searched:
                fitting = Fitting(trial, without, costs.seconds, self._search_options(searched, ()))
            link = link_to(trial, self._options.cost)
            return state_to_move(fitting, without, costs.seconds, largest_first, budget, link)

    def _plan_alone(self, program: Program, share: int | None = None, known: Planned | None = None) -> Changed:
        """Plan a program by recomputation and offloading alone; where parameters are gathered, as the first rank does.

        Args:
            program: rewritten in place.
            share: the budget in bytes, where it is known already.
            known: a plan that was found for this program before.
        """
        gathering = gathering_group(program)
        if gathering is not None or sharded_inputs(program):
            measure_gathers(program, self._options.cost)

            def decide() -> MemoryPlan:
                return self._decide(program.copy(), share).plan

            plan = decided_by_first_rank(program, decide) if gathering is None else decided_in_group(gathering, decide)
            ready = program if plan.preparation is None else plan.preparation.done_to(program, ORIGIN)
            if ready is None:
                raise GraphoptError("what the first rank does to its program cannot be done on this one")
            program.take_over(ready)
            return plan.carry_out(program, origin=ORIGIN)
        context, memory, plans = program.context, program.memory(), known_plans(program)
        alone = share is None and known is None and context.room is None and not context.sizes.planned
        decided = [] if plans is None or not alone else plans.decided.setdefault(self._key(program), [])
        for made in decided:
            done = made.carried_to(program, memory, self._bytes(program, memory), origin=ORIGIN)
            if done is not None:
                return done
        decision = self._decide(program, share, known)
        found = decision.found
        made = ProgramPlan(decision.plan, memory.peak_bytes, {} if found is None else found.details)
        if found is not None:
            decided.append(made)
        return made.carry_out(program, origin=ORIGIN, fitting=None if found is None else found.fitting)

    def _decide(self, program: Program, share: int | None, known: Planned | None = None) -> Decision:
        """What is to be done to a program; what comes before the plan is done already.

        Where the model has segments of ``torch.utils.checkpoint``, it is planned as if it had none, also within a
        budget above its peak; parts of a model are, too, but for the program that their shares are counted by.
        """
        memory = program.memory()
        room = program.context.room
        key = self._key(program)
        plans = known_plans(program)
        carried = [known] if known else [] if plans is None else list(plans.planned.get(key, ()))
        budget = room if room is not None else share or self._bytes(program, memory)
        reason = within_already(memory, budget, reserved_where_cached(program, memory))
        segments = has_segments(program)
        if reason and room is not None and (not segments or room == UNLIMITED):
            return Decision(reason=within_share(memory))
        if reason and not segments:
            sizes = written_sizes(program)
            return Decision(reason=f"{reason}, up to {sizes}" if sizes else reason)
        if not segments:
            return self._decide_in_an_order(program, budget, key, carried)
        plan = functools.partial(self._decide_in_an_order, program, budget, key, carried)
        return or_own_segments(program, plan, budget, self._options.cost, ORIGIN)

    def _decide_in_an_order(
        self, program: Program, budget: int, key: ProgramKey, carried: Sequence[Planned]
    ) -> Decision:
        """What is to be done to a program that exceeds its budget, or has segments.

        Where no plan is found with calls of backward in another order, one is looked for in theirs.
        """
        original, ready = program.graph, prepared(program, ORIGIN)
        try:
            return self._decide_prepared(program, ready, budget, key, carried)
        except BudgetError as refused:
            if not (ready.done.reordered and refused.searched):
                raise
            program.graph = original
            try:
                given = prepared(program, ORIGIN, reorder=False)
                return self._decide_prepared(program, given, budget, key, carried)
            except BudgetError as error:
                raise min(refused, error, key=lambda each: each.smallest_bytes) from None

    def _decide_prepared(
        self, program: Program, ready: Prepared, budget: int, key: ProgramKey, carried: Sequence[Planned]
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
        room, plans = program.context.room, known_plans(program)
        _, calls, wanted = key
        changed = ready.segments is not None or (room is None and bool(ready.lines))
        if changed and within_already(memory, budget, reserved_where_cached(program, memory)):
            return Decision(prepared=ready)
        shared = room is not None
        several = (self._options.key, calls)
        searches = None if plans is None or not wanted else plans.searches.setdefault(several, Searches())
        found = carry(program, memory, carried, budget, shared=shared)
        if found is None and searches is not None:
            found = searches.plan_within(program, budget)
        if found is None:
            found = self._search(program, memory, budget, shared=shared)
            if searches is not None:
                searches.add(found)
        if plans is not None and all(found is not other for other in plans.planned.setdefault(key, [])):
            plans.planned[key].append(found)
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
            refuse_hopeless(
                program, memory, budget, moves="offload" in self._options.allow and self._options.host_room != 0
            )
        with measuring() as measured:
            costs = costs_with_gathers(program, memory, self._options.cost, measured)
        with searching() as searched:
            everywhere = shared or program.context.offloaded.names  # ask for plans at all budgets
            budgets = [] if everywhere else [budget]
            if budgets and program.context.sizes.planned:  # smaller ones need less of what the plan does
                budgets += [budget + (memory.peak_bytes - budget) * share // _SHARES for share in range(1, _SHARES)]
            fitting = Fitting(program, memory, costs.seconds, self._search_options(searched, budgets))
            fitted = fitting.within(budget)
            if fitted is None and not shared and self._options.insist:
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
        shares = isinstance(self._options.budget, str) and self._options.budget.strip().endswith("%")
        largest, plans = program.context.sizes.largest, known_plans(program)
        counted = program.memory(sizes=largest) if shares and largest else memory
        sizes = tuple(sorted(program.context.sizes.planned.items()))
        key = self._options.key, tuple(sorted(largest.items())), sizes
        known = 0 if plans is None else plans.budgets.get(key, 0)
        if known and not program.inputs_of("gradient"):
            return known
        found = budget_bytes(self._options.budget, counted, reserved_where_cached(program, counted) if shares else None)
        if plans is not None:
            plans.budgets[key] = max(known, found)
        return max(known, found)

    def _search_options(self, progress: Callable[[float, Frontier], None], budgets: Sequence[int]) -> FittingOptions:
        """How plans are searched for: for some budgets, or for all."""
        return FittingOptions(
            self._options.time_limit,
            progress,
            self._lanes(),
            recompute="recompute" in self._options.allow,
            budgets=tuple(budgets),
            thorough=self._options.effort == "thorough",
            origin=ORIGIN,
        )

    def _lanes(self) -> Callable[[PlanningProblem], Lanes] | None:
        """What copies can do; nothing where they are not allowed, or where the host is the device itself."""
        if "offload" not in self._options.allow:
            return None
        room = self._options.host_room
        profile = profile_of_cost(self._options.cost)
        return lambda planning: host_lanes(planning, room, rate=profile.host_bandwidth if profile else None)
