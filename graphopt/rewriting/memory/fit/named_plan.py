"""A plan by the names of calls: what is planned for one program can be done to others that have the same calls.

The program of an optimizer's first step, say, differs from that of later steps in its update alone, so that one search
serves both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from graphopt.analysis.program_replay import reserved_where_cached
from graphopt.ir.node import Phase, info, value_of
from graphopt.ir.ops.values import type_text
from graphopt.ir.program import Program
from graphopt.rewriting.memory.recompute.planning_problem import repeatable_calls
from graphopt.rewriting.memory.recompute.recompute_plan import Again, Recomputation, recompute
from graphopt.rewriting.memory.transfers.transfer_insertion import Move, move

__all__ = ["ACCUMULATION", "NamedMove", "NamedPlan", "shared_calls"]

ACCUMULATION = "gradient accumulation"
"""The origin of the calls that weigh the gradients of a batch, and add up those of several."""


@dataclass(frozen=True, slots=True)
class NamedMove:
    """A tensor that waits elsewhere: the call that owns it, and the steps before which copies are begun and awaited.

    Attributes:
        maker: the name of the call.
        freed: the step before which the copy away is awaited.
        fetched: the step before which the copy back begins.
        needed: the step that reads what came back.
    """

    maker: str
    freed: int
    fetched: int
    needed: int


@dataclass(frozen=True, slots=True)
class NamedPlan:
    """What is recomputed and what is moved, by the names of calls.

    Attributes:
        steps: the name of the call of each step, in order; empty for what is no call. A name that was there before is
            that of a call that is recomputed.
        moves: what waits elsewhere; steps are indices into ``steps``.
        tier: where to: ``host`` or ``disk``.
    """

    steps: tuple[str, ...]
    moves: tuple[NamedMove, ...] = ()
    tier: str = "host"

    @property
    def again(self) -> list[str]:
        """The names of the calls that are recomputed, once for each time."""
        return [name for name, first in zip(self.steps, self._first_runs(), strict=True) if not first]

    def apply(self, program: Program, *, origin: str) -> Recomputation:
        """Rewrite a program that has these calls; what runs before one that it lacks runs before the next one."""
        named = {node.name: node for node in program.graph.nodes}
        done = recompute(program, self._runs(named, origin))
        calls = self._calls(named, done)
        moves = []
        for item in self.moves:
            original = named[item.maker]
            maker = done.replaced.get(original) or original
            places = (_from(calls, place) for place in (item.freed, item.fetched, item.needed))
            moves.append(Move(maker, maker, *places))
        if moves:
            move(program, moves, self.tier, origin=origin)
        return done

    def fits(self, program: Program, budget: int) -> bool:
        """Whether a program can be rewritten so, and then takes ``budget`` bytes or less: at its peak, or reserved."""
        if not self.possible(program, repeatable_calls(program)):
            return False
        copy = program.copy()
        self.apply(copy, origin="")
        copy.erase_dead()
        memory = copy.memory()
        reserved = reserved_where_cached(copy, memory)
        return (memory.peak_bytes if reserved is None else reserved.reserved_peak_bytes) <= budget

    def possible(self, program: Program, repeatable: Collection[fx.Node]) -> bool:
        """Whether a program has the calls that are recomputed or are moved, and may run them again.

        Args:
            program: is only read.
            repeatable: its calls that may be recomputed.
        """
        named = {node.name: node for node in program.graph.nodes}
        again, makers = set(self.again), {item.maker for item in self.moves}
        return named.keys() >= again | makers and all(named[name] in repeatable for name in again)

    def _first_runs(self) -> list[bool]:
        """Whether each step is the first run of its call."""
        seen: set[str] = set()
        first = []
        for name in self.steps:
            first.append(name not in seen)
            if name:
                seen.add(name)
        return first

    def _runs(self, named: Mapping[str, fx.Node], origin: str) -> list[Again]:
        runs: list[Again] = []
        waiting: list[fx.Node] = []
        for name, first in zip(self.steps, self._first_runs(), strict=True):
            if not first:
                waiting.append(named[name])
            elif name in named:
                runs += [Again(again, named[name], origin) for again in waiting]
                waiting.clear()
        return runs

    def _calls(self, named: Mapping[str, fx.Node], done: Recomputation) -> list[fx.Node | None]:
        """The call of every step in a program that has been rewritten; None where there is none."""
        clones = {node: iter(made) for node, made in done.clones.items()}
        found: list[fx.Node | None] = []
        for name, first in zip(self.steps, self._first_runs(), strict=True):
            node = named.get(name)
            if node is None:
                found.append(None)
            elif first:
                found.append(done.first(node))
            else:
                found.append(next(clones[done.replaced.get(node, node)]))
        return found


def _from(calls: Sequence[fx.Node | None], place: int) -> fx.Node:
    """The call of a step, or of the next one that is a call."""
    return next(node for node in calls[place:] if node is not None)


def shared_calls(program: Program) -> str:
    """A digest of what programs of one capture have in common where one plan serves them.

    Equal for programs whose calls have the same names, ops, arguments and results, in the same order, but for those of
    the update, with copies of its state, and of gradient accumulation, which one program of a step has and another has
    not.
    """
    outside = (Phase.UPDATE, Phase.SYNC, Phase.TRANSFER)
    calls = [
        (node.name, str(node.target), [_shared(s).name for s in node.all_input_nodes], type_text(value_of(node)))
        for node in program.graph.nodes
        if node.op == "call_function" and info(node).phase not in outside and not _accumulates(node)
    ]
    return hashlib.sha256(repr(calls).encode()).hexdigest()


def _accumulates(node: fx.Node) -> bool:
    return node.op == "call_function" and info(node).origin == ACCUMULATION


def _shared(source: fx.Node) -> fx.Node:
    """What a call reads in a program without accumulation."""
    while _accumulates(source):
        source = next(node for node in source.all_input_nodes if node.op == "call_function")
    return source
