"""Offloading: tensors that backward reads wait on the host or on a disk instead of on the device."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar, final

from torch import fx

from graphopt.analysis.costs.cost import cost_report, link_bandwidth
from graphopt.errors import GraphoptError, no_such_word
from graphopt.ir.host import local_ranks
from graphopt.ir.memory.timeline import MemoryTimeline
from graphopt.ir.node import Phase, Policy, info, value_of
from graphopt.ir.ops import schema
from graphopt.ir.program import Program
from graphopt.ir.words.written_units import counted, format_bytes
from graphopt.planning.transfers.copies import Copy, CopyOptions, Window, schedule_copies
from graphopt.rewriting.memory.free_memory import free_disk_bytes, free_host_bytes
from graphopt.rewriting.memory.recompute.checkpoint_segments import leaves_segments
from graphopt.rewriting.memory.recompute.planning_problem import PlanningProblem, planning_problem
from graphopt.rewriting.memory.transfers.transfer_insertion import Move, check_copies, movable, move
from graphopt.rewriting.pass_ import Changed, Numerics, Pass, PassStage
from graphopt.rewriting.progress import measuring

__all__ = ["Offload"]

_ORIGIN = "offload"


@final
@dataclass(frozen=True)
class Offload(Pass):
    """Copy tensors that backward reads away after forward has read them, and back in time for backward.

    Copies run beside the computation, one at a time each way: on CUDA on a stream of their own through pinned memory,
    on a CPU in a thread. A tensor is freed when its copy is done, and no earlier than forward has read it for the last
    time; where it would raise the peak until then, the computation waits for it. The copy back starts as late as the
    measured seconds of the ops and the measured bandwidth allow for it to be there in time, and later where its bytes
    would raise the peak. Values, strides and offsets come back as they were, so results equal eager's to the last bit.

    Where the peak sits elsewhere, so that offloading cannot lower it, nothing is moved, and the record says so.

    Args:
        tensors: names or globs of forward tensors; empty for the checkpoints that ``Recompute`` keeps or, without any,
            every tensor that backward reads.
        tier: ``host`` (memory beside the device) or ``disk`` (a temporary file without a name).
        prefetch: ``auto``, by time; or how many tensors ahead: ``1`` starts each copy back when the one before it is
            needed.
        min_bytes: smaller tensors stay where they are.
        keep_last: how many tensors stay of those that backward needs first; forward ends with them, and moving them
            gains nothing.
        cost: where seconds of ops come from: ``measured`` or ``roofline``.

    Raises:
        GraphoptError: for a name that is unknown or cannot be moved; where the host or the disk has no room.

    Example:
        >>> passes = [Offload(("blocks.0",), min_bytes=1000, cost="roofline")]
        >>> step = graphopt.optimize_step(model, optimizer, passes, loss=loss).prepare(x)
        >>> step.records[0].changed.tensors
        ('blocks.0',)
    """

    name: ClassVar[str] = "offload"
    stage: ClassVar[PassStage] = "last"
    numerics: ClassVar[Numerics] = "bitwise"
    in_parts: ClassVar[bool] = True
    fixed_sizes: ClassVar[bool] = True
    after: ClassVar[tuple[str, ...]] = ("fuse-update", "fit-memory", "partition-checkpoints")

    tensors: tuple[str, ...] = ()
    tier: str = "host"
    prefetch: int | str = "auto"
    min_bytes: int = 1_000_000
    keep_last: int = 1
    cost: str = "measured"

    def __post_init__(self) -> None:
        given: object = self.tensors
        if isinstance(given, str):
            raise TypeError(f"tensors is a tuple of names, got the text {given!r}: write ({given!r},)")
        check_copies(self.tier, self.prefetch)
        if self.keep_last < 0 or self.min_bytes < 0:
            raise GraphoptError("keep_last and min_bytes are numbers of at least 0")
        if self.cost not in ("measured", "roofline"):
            raise no_such_word("cost", self.cost, ("measured", "roofline"))

    @leaves_segments
    def apply(self, program: Program) -> Changed:
        """See the class; rewrites the program that runs."""
        if any(info(node).made_by == _ORIGIN for node in program.phase_nodes(Phase.TRANSFER)):
            return Changed(reason="tensors of this program are offloaded already")
        memory = program.memory()
        with measuring() as measured:
            seconds = cost_report(memory.nodes, method=self.cost, progress=measured).seconds  # type: ignore[arg-type]
        planning = planning_problem(program, seconds)
        chosen, kept = self._choose(program, planning)
        if not chosen:
            return Changed(reason=kept or "backward reads no tensor of forward that is large enough to move")
        plan = _Plan(self, program, memory, planning, chosen)
        plan.check_room()
        if plan.peak_bytes(program) >= memory.peak_bytes:
            where = (info(memory.peak_at).names or (memory.peak_at.name,))[0]
            return Changed(
                reason=f"the peak of {format_bytes(memory.peak_bytes)} is at {where}, where moving "
                f"{format_bytes(plan.bytes)} in {len(chosen)} tensors would not lower it"
            )
        plan.insert(program)
        return Changed(
            counts={"offloaded": len(chosen)},
            tensors=tuple(plan.names),
            lines=(*plan.lines(), *([kept] if kept else [])),
        )

    def _choose(self, program: Program, planning: PlanningProblem) -> tuple[list[int], str]:
        """The values to move, in the order in which backward needs them, latest first; and what is said of others."""
        problem = planning.problem
        idle = _idle_values(planning)
        found = self._named(program, planning, idle) if self.tensors else _by_policy(planning, idle)
        found = [value for value in found if problem.sizes[value] >= self.min_bytes and value not in problem.held]
        found.sort(key=lambda value: -idle[value][1])
        if not len(found) > self.keep_last > 0:
            return found, ""
        moved, staying = found[: -self.keep_last], found[-self.keep_last :]
        names = ", ".join(problem.names[value] for value in staying)
        return moved, f"{names} stays: backward begins with it, and moving it gains nothing"

    def _named(self, program: Program, planning: PlanningProblem, idle: Mapping[int, tuple[int, int]]) -> list[int]:
        """The values that names and globs stand for; what a glob matches and cannot be moved is left where it is."""
        numbers = {node: value for value, node in enumerate(planning.makers)}
        found: dict[int, None] = {}
        for pattern in self.tensors:
            refused: dict[str, str] = {}
            matched = False
            for name, node in program.find(pattern).items():
                value = numbers.get(schema.storage_root(node))
                reason = _refusal(node, value is not None and value in idle)
                if reason or value is None:
                    refused[name] = reason
                else:
                    found[value] = None
                    matched = True
            if refused and not matched:
                name, reason = next(iter(refused.items()))
                raise GraphoptError(f"{name!r} cannot be offloaded: {reason}")
        return list(found)


def _refusal(node: fx.Node, idle: bool) -> str:
    """Why a named tensor cannot be offloaded; empty where it can."""
    root = schema.storage_root(node)
    if info(node).phase is not Phase.FORWARD:
        return f"it is computed in {info(node).phase.value}, and tensors of forward are moved"
    if root.op == "placeholder":
        return "it is an input, which the caller holds in any case"
    return movable(root) or ("" if idle else "nothing after forward reads it")


def _idle_values(planning: PlanningProblem) -> dict[int, tuple[int, int]]:
    """The values of forward that wait for backward, and the operations between which each of them does."""
    spans = {value: _idle(planning, value) for value in range(len(planning.makers))}
    return {value: span for value, span in spans.items() if span is not None}


def _by_policy(planning: PlanningProblem, idle: Collection[int]) -> list[int]:
    """The checkpoints among the values that wait for backward or, without any, all of these; what can be moved."""
    marked = [value for value in idle if info(planning.makers[value]).policy is Policy.MUST_SAVE]
    return [value for value in marked or idle if not movable(planning.makers[value])]


def _idle(planning: PlanningProblem, value: int) -> tuple[int, int] | None:
    """The operations between which a value of forward waits for backward: its last reader before, the first after."""
    problem = planning.problem
    maker = next(i for i, operation in enumerate(problem.operations) if value in operation.makes)
    if maker >= problem.boundary:
        return None
    touches = [i for i, operation in enumerate(problem.operations) if value in operation.reads]
    before = max([maker, *(i for i in touches if i < problem.boundary)])
    after = [i for i in touches if i >= problem.boundary]
    return (before, after[0]) if after else None


class _Plan:
    """Where the copies of the chosen values start and end."""

    def __init__(
        self, options: Offload, program: Program, memory: MemoryTimeline, planning: PlanningProblem, chosen: list[int]
    ) -> None:
        self._options = options
        self._planning = planning
        self._chosen = chosen
        problem = planning.problem
        self.names = [problem.names[value] for value in chosen]
        self.bytes = sum(problem.sizes[value] for value in chosen)
        spans = {value: _idle(planning, value) for value in chosen}
        makers = problem.makers
        self._copies = [
            Copy(problem.sizes[value], makers[value], *span) for value, span in spans.items() if span is not None
        ]
        devices = {value_of(planning.makers[value]).device for value in chosen}
        self._rate = min(link_bandwidth(device, options.tier) for device in devices)  # type: ignore[arg-type]
        self._windows = self._schedule(memory, drop_in=bool(program.inputs_of("tangent")))

    def _schedule(self, memory: MemoryTimeline, *, drop_in: bool) -> list[Window]:
        """When each value is freed and fetched; in a drop-in program not across the end of forward."""
        problem, prefetch = self._planning.problem, self._options.prefetch
        copying = CopyOptions(
            out=self._rate,
            back=self._rate,
            boundary=problem.boundary if drop_in else None,
            ahead=None if prefetch == "auto" else int(prefetch),
        )
        seconds = [operation.seconds for operation in problem.operations]
        return schedule_copies(seconds, self._alive(memory), self._copies, copying)

    def _alive(self, memory: MemoryTimeline) -> list[int]:
        """Bytes alive at each operation, with the chosen values away while they wait."""
        at = dict(zip(memory.nodes, memory.bytes, strict=True))
        alive = [at[node] if node is not None else 0 for node in self._planning.nodes]
        for copy in self._copies:
            for step in range(copy.last + 1, copy.needed):
                alive[step] -= copy.bytes
        return alive

    def check_room(self) -> None:
        """Say before the first step when there is no room for what will be held.

        Raises:
            GraphoptError: with the bytes that are needed and those that are there.
        """
        ranks = local_ranks()
        tier = self._options.tier
        there = free_host_bytes() if tier == "host" else free_disk_bytes()
        if there is not None and self.bytes * ranks > there:
            raise GraphoptError(
                f"offloading needs {self.bytes} bytes ({format_bytes(self.bytes)}) on the {tier} for each of {ranks} "
                f"processes, and {there} bytes ({format_bytes(there)}) are there: name fewer tensors, or use the tier "
                f"{'disk' if tier == 'host' else 'host'}"
            )

    def peak_bytes(self, program: Program) -> int:
        """The peak of the program with the transfers."""
        trial = program.copy()
        self.insert(trial)
        return trial.memory().peak_bytes

    def insert(self, program: Program) -> None:
        """Insert the transfers into the program, or into a copy of it."""
        named = {node.name: node for node in program.graph.nodes}
        nodes = [named[node.name] if node is not None else None for node in self._planning.nodes]
        moves = []
        for value, copy, window in zip(self._chosen, self._copies, self._windows, strict=True):
            maker = named[self._planning.makers[value].name]
            moves.append(
                Move(maker, maker, _at(nodes, window.freed), _at(nodes, window.fetched), _at(nodes, copy.needed))
            )
        move(program, moves, self._options.tier, origin=_ORIGIN)

    def lines(self) -> list[str]:
        """What is moved, when it is freed and fetched, and what the computation waits for."""
        late = sum(window.late for window in self._windows)
        amount, link = format_bytes(self.bytes), format_bytes(self._rate)
        summary = (
            f"{amount} in {counted(len(self._chosen), 'tensors')} wait on the {self._options.tier}, over a link of "
            f"{link}/s; the computation waits {late * 1e3:.3g} ms for copies (expected)"
        )
        found = [summary]
        for name, copy, window in zip(self.names, self._copies, self._windows, strict=True):
            found.append(f"  {name}: {format_bytes(copy.bytes)}, {self._described(copy, window)}")
        return found

    def _described(self, copy: Copy, window: Window) -> str:
        operations = self._planning.problem.operations
        seconds = sum(operation.seconds for operation in operations[window.fetched : copy.needed])
        return (
            f"freed {counted(window.freed - copy.last, 'ops')} after its last use, fetched "
            f"{counted(copy.needed - window.fetched, 'ops')} "
            f"({seconds * 1e3:.3g} ms) before its next"
        )


def _at(nodes: list[fx.Node | None], index: int) -> fx.Node:
    """The call of an operation; of the next one, for the arrival of tangents."""
    return next(node for node in nodes[index:] if node is not None)
