"""Plans around copies of inputs that are offloaded: what is recomputed against what is copied, or gathered, again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import fx

from graphopt.analysis.costs.cost import costs_of
from graphopt.analysis.liveness import bytes_of_copy
from graphopt.ir.program import Program
from graphopt.ir.words.written_units import counted, format_bytes, format_seconds
from graphopt.rewriting.distributed.agreed_decision import decided_by_first_rank
from graphopt.rewriting.memory.fit.budget import BudgetError
from graphopt.rewriting.memory.fit.decision import taken_bytes
from graphopt.rewriting.memory.fit.known_plans import known_plans
from graphopt.rewriting.memory.fit.planned import Planned
from graphopt.rewriting.memory.fit.state_action import link_of
from graphopt.rewriting.memory.transfers.state_swaps import RANKS, Swapped, elsewhere, swap_state
from graphopt.rewriting.memory.transfers.transfer_insertion import Swaps, nodes_of
from graphopt.rewriting.pass_ import Changed
from graphopt.rewriting.progress import measuring

__all__ = ["AroundCopies", "copies_line"]

_ATTEMPTS = 6
"""How often a smaller target is tried where copies have the allocator reserve more than a plan alone."""

_SHARES = 4
"""In how many steps, from nothing to all that resides elsewhere, memory is left for what stays between two calls."""

_LITTLE = 0.01
"""The share of a program's seconds below which waiting for copies is not worth another plan."""


@dataclass(frozen=True, slots=True)
class _Tried:
    """A program with a plan and its copies.

    Attributes:
        target: the bytes that it was planned for.
        seconds: that it is expected to take, waiting for copies included.
    """

    target: int
    graph: fx.Graph
    done: Changed
    swapped: list[Swapped]
    seconds: float

    @property
    def waited(self) -> float:
        return sum(swapped.waited for swapped in self.swapped)


@dataclass(frozen=True)
class AroundCopies:
    """Fits programs some of whose inputs reside elsewhere.

    Attributes:
        fit: fits a program, whose inputs elsewhere count while they are touched, into a number of bytes; given a plan
            that was found before, by that.
        least: the fewest bytes that ``fit`` expects a plan of a program to take; None where it has not searched.
        cost: where seconds come from.
    """

    fit: Callable[[Program, int, Planned | None], Changed]
    least: Callable[[Program], int | None]
    cost: str

    def __call__(self, program: Program, lifted: Sequence[Swaps], budget: int) -> tuple[Changed, list[Swapped]]:
        """Rewrite a program by the plan with which it takes the fewest seconds, and put in the copies.

        Inputs stay between two calls that need them where the budget leaves room; so a plan for fewer bytes is tried as
        well, which runs more again and copies less.

        Args:
            program: without the copies, which were taken out of it.
            lifted: what resides elsewhere.
            budget: in bytes.

        Raises:
            BudgetError: where no plan is within the budget.
        """
        plans = known_plans(program)
        sizes = tuple(sorted(program.context.sizes.planned.items()))
        key = sizes, *(swaps.origin for swaps in lifted)
        known = None if plans is None else plans.left_to_copies.get(key)
        tried = [] if known is None else self._tried(program, lifted, [budget - known], budget)
        if not tried:
            tried = [self._within(program, lifted, budget, budget)]
            targets = decided_by_first_rank(program, lambda: self._targets(program, lifted, budget, tried[0]))
            tried += self._tried(program, lifted, targets, budget)
        best = tried[decided_by_first_rank(program, lambda: _fastest(tried))]
        program.graph = best.graph
        if plans is not None:
            plans.left_to_copies.setdefault(key, budget - best.target)
        line = _left_line(budget - best.target, lifted)
        return replace(best.done, lines=(*best.done.lines, *line)), best.swapped

    def _tried(self, program: Program, lifted: Sequence[Swaps], targets: Sequence[int], budget: int) -> list[_Tried]:
        """Plans for some numbers of bytes, from many to few, as far as there are any."""
        tried: list[_Tried] = []
        for target in targets:
            try:
                tried.append(self._within(program, lifted, target, budget))
            except BudgetError:
                break
        return tried

    def _targets(self, program: Program, lifted: Sequence[Swaps], budget: int, first: _Tried) -> list[int]:
        """Fewer bytes to plan for, so that more of what resides elsewhere may stay between two calls."""
        if first.waited <= _LITTLE * first.seconds:
            return []
        nodes = nodes_of(program, lifted)
        total = sum(bytes_of_copy(program, node) for node in nodes)
        with elsewhere(program, nodes):
            highest, least = min(budget, taken_bytes(program)), self.least(program) or 0
        targets = [highest - total * share // _SHARES for share in range(1, _SHARES + 1)]
        return [target for target in targets if target > least]

    def _within(self, program: Program, lifted: Sequence[Swaps], target: int, budget: int) -> _Tried:
        """Fit a program into ``target`` bytes, and put in its copies with the rest of the budget as their room.

        Where the device's allocator keeps freed blocks, it may reserve more with the copies than without: then they are
        not ahead, and then a plan is taken that leaves them room.
        """
        planned, least, refused = target, 2**63, None
        for _ in range(_ATTEMPTS):
            fitted = program.copy()
            try:
                with elsewhere(fitted, nodes_of(fitted, lifted)):
                    done = self.fit(fitted, planned, refused.smallest if refused else None)
                    room, seconds = decided_by_first_rank(fitted, lambda made=fitted: self._left(made, budget))  # type: ignore[misc]
            except BudgetError as error:
                if refused is not None or not error.searched or target < budget:
                    raise
                refused, planned = error, error.smallest_bytes  # what the smallest plan takes with the copies
                continue
            over = 0
            for at_once, spare in dict.fromkeys([(False, room), (False, 0), (True, 0)]):
                trial = fitted.copy()
                swapped = self._swap(trial, lifted, spare, at_once=at_once)
                over = decided_by_first_rank(trial, lambda made=trial: taken_bytes(made) - budget)  # type: ignore[misc]
                if over <= 0 or (program.context.room is not None and at_once):
                    return _Tried(target, trial.graph, done, swapped, seconds + sum(each.waited for each in swapped))
                least = min(least, budget + over)
            if refused is not None:
                break
            planned -= over
        nothing = BudgetError(
            f"no plan fits into {format_bytes(budget)} ({budget} bytes): with the copies of what resides elsewhere the "
            f"smallest peak found is {least} bytes ({format_bytes(least)})",
            least,
            budget,
        )
        for note in getattr(refused, "__notes__", ()):
            nothing.add_note(note)
        raise nothing

    def _left(self, fitted: Program, budget: int) -> tuple[int, float]:
        """The bytes that a plan leaves of a budget, and the seconds that it takes without waiting for copies."""
        with measuring() as measured:
            seconds = costs_of(fitted.memory(), self.cost, progress=measured).seconds
        return max(0, budget - taken_bytes(fitted)), sum(seconds)

    def _swap(self, program: Program, lifted: Sequence[Swaps], room: int, *, at_once: bool) -> list[Swapped]:
        """Put in the copies of inputs that reside elsewhere, as far ahead as is wanted, or each at its call."""
        done = []
        for number, swaps in enumerate(lifted):
            nodes = swaps.nodes(program)
            ahead = 0 if at_once else program.context.offloaded.prefetch.get(swaps.origin)
            spare = min(room, program.context.offloaded.keep.get(swaps.origin, room)) if number == 0 else 0
            link = replace(link_of(program, swaps, self.cost), ahead=ahead, room=spare)
            with elsewhere(program, nodes_of(program, lifted[number + 1 :])):
                done.append(swap_state(program, nodes, link, self.cost, origin=swaps.origin))
        return done


def _fastest(tried: Sequence[_Tried]) -> int:
    return min(range(len(tried)), key=lambda index: tried[index].seconds)


def _left_line(left: int, lifted: Sequence[Swaps]) -> list[str]:
    """What a plan leaves of its budget on purpose, for people."""
    again = "gathered" if any(swaps.tier == RANKS for swaps in lifted) else "copied"
    line = f"{format_bytes(left)} of the budget are left to what stays between two calls instead of being {again} again"
    return [line] if left else []


def copies_line(lifted: Swaps, swapped: Swapped) -> str:
    """How often inputs are copied, or gathered, around a plan, for people."""
    way = "gathered from all ranks" if lifted.tier == RANKS else f"copied in from the {lifted.tier}"
    return (
        f"{lifted.origin}: {counted(len(swapped.inputs), 'tensors')} {way} {counted(swapped.visits, 'times')} a step "
        f"around this plan; "
        f"the computation waits {format_seconds(swapped.waited)} for them (expected)"
    )
