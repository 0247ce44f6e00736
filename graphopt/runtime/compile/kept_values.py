"""What a joint graph of ``torch.compile`` may keep for its backward: candidates, and what each takes.

Inductor fuses what works element by element, so that such a value takes memory only where something else reads it, or
where backward is given it. Otherwise bytes are counted as everywhere: by storage, from the call that makes it to the
last one that reads it, with backward computing again what it lacks just before it needs it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import fx

from graphopt import _torch
from graphopt.analysis.costs.profiles import PROFILES
from graphopt.analysis.costs.roofline import call_device, call_precision, flops_of, moved_bytes
from graphopt.ir.ops import schema
from graphopt.planning import Operation, Problem
from graphopt.planning.search.cuts import CutNetwork, priced_cuts
from graphopt.planning.simulation.schedule import Scheduler

__all__ = ["Candidate", "KeptValues"]

_TARGETS = 12
"""How many budgets the search for candidates aims at."""

_ROUNDS = 6
"""How often the prices of memory are adapted to each."""

_CPU_FLOPS, _CPU_BANDWIDTH, _DEVICE = 1e11, 2e10, PROFILES["a100-80gb"]
"""Seconds are those of a typical device, and not measured: the same graph is to be divided the same way each time."""

_FUSED = 0.2
"""What a fused op costs beside one that stands alone: its operands are in registers already."""


@dataclass(frozen=True)
class Candidate:
    """Values that are saved for backward.

    Attributes:
        kept: in program order; views and sizes among them cost nothing.
        kept_bytes: of what forward has computed, without its results.
        peak_bytes: the most that is alive at once, parameters and inputs included.
        seconds: of what backward recomputes.
        again: how many calls these are.
    """

    kept: tuple[fx.Node, ...]
    kept_bytes: int
    peak_bytes: int
    seconds: float
    again: int


class KeptValues:
    """The choice for one joint graph.

    Args:
        split: the graph, as torch has prepared it.
    """

    def __init__(self, split: _torch.JointSplit) -> None:
        self._split = split
        self._nodes = list(split.joint.graph.nodes)
        self._place = {node: place for place, node in enumerate(self._nodes)}
        self._calls = [node for node in self._nodes if node.op in ("call_function", "get_attr")]
        self._bases: dict[fx.Node, fx.Node] = {}
        for node in self._nodes:
            self._bases[node] = self._bases[_first(node)] if _is_view(node) else node
        self._results, self._gradients = split.results()
        self._changed = split.changed()
        self._backward = [node for node in self._calls if split.is_backward(node)]

    # --- candidates --------------------------------------------------------------------------------------------------

    def candidates(self) -> list[Candidate]:
        """Ways to divide the graph, of which none is better in bytes and seconds; from many bytes to few.

        With fewer bytes at the peak goes never more that is kept: a smaller budget never keeps more. What torch's own
        partitioner keeps is the first of them.
        """
        found = [self.candidate(kept) for kept in {*self._planned()}]
        first = self.candidate(self.closed(self._split.kept_by_torch()))
        chain = [first]
        for candidate in sorted(found, key=lambda c: (-c.peak_bytes, -c.kept_bytes, c.seconds)):
            if candidate.peak_bytes < first.peak_bytes and candidate.kept_bytes <= first.kept_bytes:
                chain.append(candidate)
        return _without_worse(chain)

    def _planned(self) -> Iterator[tuple[fx.Node, ...]]:
        """Sets of values from minimum cuts, with prices of memory for each moment that are adapted to some budgets."""
        scheduler = Scheduler(self.problem)
        if not 0 < self.problem.boundary < len(self.problem.operations):
            return
        network = CutNetwork(scheduler, self.problem.boundary)
        if not network.values:
            return
        everything = scheduler.evaluate(network.drops(set(network.needed))).peak
        low, high = self.problem.resident, max(everything, scheduler.evaluate(frozenset()).peak)
        count = len(self.problem.operations)
        for price in np.geomspace(1e-2, 1e4, 2 * _TARGETS):
            unit = price * max(self.problem.seconds, 1e-12) / max(1.0, float(sum(self.problem.sizes)) * count)
            yield self._of_values(network.carried(np.full(count, unit)))
        for number in range(1, _TARGETS + 1):
            budget = low + (high - low) * number // _TARGETS
            for drops, _ in priced_cuts(network, budget, start=10.0, rounds=_ROUNDS):
                gone = {decision.value for decision in drops}
                yield self._of_values(set(network.values) - gone)

    def _of_values(self, values: Iterable[int]) -> tuple[fx.Node, ...]:
        return self.closed([self._makers[value] for value in values])

    def closed(self, kept: Iterable[fx.Node]) -> tuple[fx.Node, ...]:
        """What has to be kept where some values are to be: those of them that are needed, and what has no other way."""
        wanted = {self._bases[node] for node in kept}
        found: set[fx.Node] = set()
        seen: set[fx.Node] = set()
        pending = [source for node in self._backward for source in node.all_input_nodes]
        pending += self._gradients
        while pending:
            node = pending.pop()
            if node in seen or self._split.is_backward(node):
                continue
            seen.add(node)
            if not self._computed_again(node, wanted):
                found.add(node)
            else:
                pending += node.all_input_nodes
        return tuple(sorted(found, key=self._place.__getitem__))

    def _computed_again(self, node: fx.Node, wanted: set[fx.Node]) -> bool:
        """Whether backward makes a value of forward again, or takes it as a view of what it has."""
        if node.op == "get_attr":
            return True
        if node.op == "placeholder" or not isinstance(node.meta.get("val"), (torch.Tensor, tuple, list)):
            return False
        if self._bases[node] is not node:
            return True
        return node not in wanted and self._repeatable(node)

    def _repeatable(self, node: fx.Node) -> bool:
        """Whether a call of forward may be recomputed: it is pure, and nothing it reads is overwritten meanwhile."""
        maker = _first(node) if node.target is operator.getitem else node
        if not self._split.may_repeat(maker) or not self._marked(node):
            return False
        return not any(self._bases[source] in self._changed for source in maker.all_input_nodes)

    def _marked(self, node: fx.Node) -> bool:
        """Whether torch has not marked a result as one that is to be kept."""
        return node.target is not operator.getitem or _torch.is_free_to_go(node)

    # --- what a choice takes -----------------------------------------------------------------------------------------

    def candidate(self, kept: tuple[fx.Node, ...]) -> Candidate:
        """What a choice takes, in bytes and seconds."""
        order = self._backward_order(kept)
        again = [node for node in order if not self._split.is_backward(node)]
        results = {self._bases[node] for node in self._results}
        carried = {self._bases[node] for node in kept if self._bases[node].op != "placeholder"}
        kept_bytes = sum(self._bytes(node) for node in carried - results)
        forward = self._forward_order(kept)
        before = self._peak(forward, ends={*results, *carried})
        after = self._peak(order, starts={*results, *carried}, ends={self._bases[node] for node in self._gradients})
        seconds = sum(self._seconds(node) for node in again)
        return Candidate(kept, kept_bytes, self.resident + max(before, after), seconds, len(again))

    def _forward_order(self, kept: Sequence[fx.Node]) -> list[fx.Node]:
        """The calls that forward's results and what is kept need."""
        needed: set[fx.Node] = set()
        pending = [*self._results, *kept]
        while pending:
            node = pending.pop()
            if node not in needed:
                needed.add(node)
                pending += node.all_input_nodes
        return [node for node in self._calls if node in needed]

    def _backward_order(self, kept: Sequence[fx.Node]) -> list[fx.Node]:
        """The calls of backward, before each of them what has to be recomputed for it."""
        done: set[fx.Node] = {*kept, *(node for node in self._nodes if node.op == "placeholder")}
        order: list[fx.Node] = []
        for target in [*self._backward, *self._gradients]:
            pending, missing = [target], set[fx.Node]()
            while pending:
                node = pending.pop()
                if node not in done and node not in missing:
                    missing.add(node)
                    pending += node.all_input_nodes
            order += sorted(missing, key=self._place.__getitem__)
            done |= missing
        return order

    def _peak(self, order: Sequence[fx.Node], starts: Iterable[fx.Node] = (), ends: Iterable[fx.Node] = ()) -> int:
        """The most bytes that calls in an order have alive, with what is there before them and stays behind them."""
        kept, lasting, inside = set(starts), set(ends), set(order)
        last: dict[fx.Node, int] = dict.fromkeys(lasting, len(order))
        for place, node in enumerate(order):
            for source in node.all_input_nodes:
                base = self._bases[source]
                last[base] = max(last.get(base, -1), place)
        alive = sum(self._bytes(node) for node in kept)
        most = alive
        leaving: dict[int, int] = {}
        for node in kept:
            place = last.get(node, 0)
            leaving[place] = leaving.get(place, 0) + self._bytes(node)
        for place, node in enumerate(order):
            if self._bases[node] is node and (node in lasting or self._is_stored(node, inside)):
                size = self._bytes(node)
                alive += size
                end = last.get(node, place)
                leaving[end] = leaving.get(end, 0) + size
            most = max(most, alive)
            alive -= leaving.get(place, 0)
        return most

    def _is_stored(self, node: fx.Node, inside: set[fx.Node]) -> bool:
        """Whether a value lies in memory: not where only fused calls of the same graph make and read it."""
        if not _torch.is_fusible(node):
            return True
        pending = list(node.users)
        while pending:
            user = pending.pop()
            if user not in inside:
                continue
            if self._bases[user] is not user:
                pending += user.users
            elif not _torch.is_fusible(user):
                return True
        return False

    @cached_property
    def resident(self) -> int:
        """Bytes of parameters, buffers and inputs."""
        inputs = [node for node in self._nodes if node.op == "placeholder" and not self._split.is_backward(node)]
        return sum(self._bytes(node) for node in inputs)

    def _bytes(self, node: fx.Node) -> int:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return 0
        count = 1
        for size in value.shape:
            count *= _torch.size_hint(size)
        return count * value.element_size()

    def _seconds(self, node: fx.Node) -> float:
        """What a call costs where it is fused with others, or stands by itself."""
        if self._bases[node] is not node or node.op != "call_function" or node.target is operator.getitem:
            return 0.0
        on_cpu = call_device(node).type == "cpu"
        moved = moved_bytes(node) / (_CPU_BANDWIDTH if on_cpu else _DEVICE.memory_bandwidth)
        if _torch.is_fusible(node):
            return _FUSED * moved
        flops = _CPU_FLOPS if on_cpu else _DEVICE.peak_flops(call_precision(node))
        return max(flops_of(node) / flops, moved) + _DEVICE.overhead

    # --- the planner's view ------------------------------------------------------------------------------------------

    @cached_property
    def _makers(self) -> list[fx.Node]:
        """The node behind each value of the problem."""
        return list(self._numbers)

    @cached_property
    def _numbers(self) -> dict[fx.Node, int]:
        """The values of the problem: what calls make, storage by storage; getters stand for what they get."""
        found = [node for node in self._calls if self._bases[node] is node and not self._is_tuple(node)]
        tangents = [n for n in self._nodes if n.op == "placeholder" and self._split.is_backward(n)]
        return {node: number for number, node in enumerate([*tangents, *found])}

    def _is_tuple(self, node: fx.Node) -> bool:
        return isinstance(node.meta.get("val"), (tuple, list))

    @cached_property
    def problem(self) -> Problem:
        """The graph as operations and values: forward, the arrival of gradients, backward."""
        early = [node for node in self._calls if not self._split.is_backward(node)]
        late = self._backward
        tangents = [n for n in self._nodes if n.op == "placeholder" and self._split.is_backward(n)]
        operations = [found for node in early if (found := self._operation(node)) is not None]
        boundary = len(operations)
        operations.append(Operation((), tuple(self._numbers[t] for t in tangents), 0.0, repeatable=False))
        operations += [found for node in late if (found := self._operation(node)) is not None]
        ends = {self._bases[n] for n in (*self._results, *self._gradients)}
        held = {self._numbers[node]: len(operations) for node in ends if node in self._numbers}
        sizes = tuple(self._bytes(node) for node in self._numbers)
        return Problem(tuple(operations), sizes, self.resident, held, boundary)

    def _operation(self, node: fx.Node) -> Operation | None:
        """The operation behind a call; None for views and for getters, which belong to what they get from."""
        if self._bases[node] is not node or node.target is operator.getitem:
            return None
        reads = dict.fromkeys(
            self._numbers[base] for source in node.all_input_nodes if (base := self._bases[source]) in self._numbers
        )
        makes = [node] if node in self._numbers else [u for u in node.users if u in self._numbers]
        return Operation(
            tuple(reads),
            tuple(self._numbers[made] for made in makes),
            self._seconds(node),
            repeatable=not self._split.is_backward(node) and all(map(self._repeatable, makes or [node])),
            name=node.name,
        )


def _is_view(node: fx.Node) -> bool:
    """Whether inductor gives a call no memory of its own; getters of what a view gives are views as well."""
    if node.op != "call_function":
        return False
    of = _first(node) if node.target is operator.getitem else node
    return of.target is torch.ops.aten._unsafe_view.default or schema.is_view(of)


def _first(node: fx.Node) -> fx.Node:
    return node.all_input_nodes[0]


def _without_worse(chain: Sequence[Candidate]) -> list[Candidate]:
    """Those of some candidates that are fastest within their peaks, each keeping no more than the one before it."""
    best: list[Candidate] = []
    for candidate in reversed(chain):  # from few bytes
        if not best or candidate.seconds < best[-1].seconds or candidate is chain[0]:
            best.append(candidate)
    result: list[Candidate] = []
    for candidate in reversed(best):
        if not result or (
            candidate.kept_bytes <= result[-1].kept_bytes and candidate.peak_bytes < result[-1].peak_bytes
        ):
            result.append(candidate)
    return result
