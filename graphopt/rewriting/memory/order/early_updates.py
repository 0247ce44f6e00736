"""Updates as soon as their gradients are final: list ops in parts, and each part in the earliest place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from graphopt.analysis.liveness import storages_of
from graphopt.ir.memory.timeline import MemoryTimeline, Storage
from graphopt.ir.node import Phase, info, info_like, set_info, set_value, value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.updates import foreach
from graphopt.ir.ops.values import storage_bytes, tensors_of
from graphopt.ir.program import Program
from graphopt.ir.words.written_units import counted, format_bytes

__all__ = ["EarlyUpdates", "early_updates", "move_updates", "ordered_updates"]


@dataclass(frozen=True, slots=True)
class EarlyUpdates:
    """An order in which parameters are updated as soon as their gradients are final.

    Attributes:
        program: in that order, with one call for each parameter.
        late: the calls that stay behind backward for lack of room, by name.
        early: the parameters that are updated while backward still runs.
        split: how many calls for several parameters were split.
        lines: what a user should read.
    """

    program: Program
    late: frozenset[str]
    early: Sequence[str]
    split: int
    lines: tuple[str, ...]


def early_updates(program: Program, was: MemoryTimeline, origin: str) -> EarlyUpdates | str:
    """A program with its updates as early as their gradients allow, or why it had better stay as it is.

    Args:
        program: is only read.
        was: its timeline.
        origin: who does it, for people.
    """
    if program.stage != "step" or not any(program.phase_nodes(Phase.UPDATE)):
        return "there is no update in this program: the optimizer runs after it"
    trial = program.copy()
    split = _split_lists(trial, origin)
    obstacle = _sharing(trial) or _gathering(trial)
    if obstacle:
        return obstacle
    best = _best_order(trial, was)
    reason = best.objection(program, was, split)
    if reason:
        return reason
    return EarlyUpdates(best.program, best.late, tuple(best.early), split, tuple(best.lines(was)))


def move_updates(program: Program, late: frozenset[str], origin: str) -> bool:
    """Move the updates of a program as those of another one of its capture were moved, without weighing it again.

    Args:
        program: rewritten in place.
        late: the calls that stay behind backward (``EarlyUpdates.late``).
        origin: who does it, for people.

    Returns:
        whether they can run one by one.
    """
    _split_lists(program, origin)
    if _sharing(program) or _gathering(program):
        return False
    _Order(program, late).act()
    return True


def ordered_updates(program: Program, origin: str) -> list[Program]:
    """Copies of a step program in which each parameter is updated by itself, all calls for it together.

    The first has every update as early as its gradient allows, where each needs one gradient only; the last has them
    behind backward, as far as nothing else needs them.

    Args:
        program: is only read.
        origin: who does it, for people.
    """
    split = program.copy()
    _split_lists(split, origin)
    if _sharing(split):
        return [split]
    late = split.copy()
    _Order(late, frozenset(node.name for node in late.phase_nodes(Phase.UPDATE))).act()
    if _gathering(split):
        return [late]
    _Order(split, frozenset()).act()
    return [split, late]


_ROUNDS = 4


def _best_order(program: Program, was: MemoryTimeline) -> _Candidate:
    """The order with the lowest peak of: everything early; created state late; what runs above the old peak late too.

    An update that needs room for itself, or creates state, may not have it while activations are alive.
    """
    best = latest = _Candidate(program, frozenset())
    late = {storage.owner.name for storage in latest.created()} or latest.above(was.peak_bytes)
    for _ in range(_ROUNDS):
        if best.peak <= was.peak_bytes or latest.late >= late:
            break
        latest = _Candidate(program, latest.late | late)
        best = min(best, latest, key=lambda candidate: candidate.peak)
        late = latest.above(was.peak_bytes)
    return best


class _Candidate:
    """One order of a program, with its peak; ``late`` names the calls that stay behind backward."""

    def __init__(self, program: Program, late: frozenset[str]) -> None:
        self.program = program.copy()
        self.late = late
        _Order(self.program, late).act()
        self.memory = self.program.memory()
        self.peak = self.memory.peak_bytes
        self.trained, self.early = _updated(self.program)

    def created(self) -> list[Storage]:
        """The state that the update creates."""
        values = [value for value, _ in self.program.outputs_of("state") if isinstance(value, fx.Node)]
        return [storage for value in values for storage in self.memory.refers[value]]

    def above(self, peak: int) -> set[str]:
        """The calls of the update that run where more bytes are alive."""
        at = zip(self.memory.nodes, self.memory.bytes, strict=True)
        return {node.name for node, count in at if count > peak and info(node).phase is Phase.UPDATE}

    def objection(self, program: Program, was: MemoryTimeline, split: int) -> str:
        """Why the program had better stay as it is; empty where this order is better."""
        if [node.name for node in program.graph.nodes] == [node.name for node in self.program.graph.nodes]:
            return "every update runs as early as it can already"
        if self.peak > was.peak_bytes:
            return f"the peak would rise from {format_bytes(was.peak_bytes)} to {format_bytes(self.peak)}"
        if not self.early and (self.peak == was.peak_bytes or not split):
            last = list(program.phase_nodes(*_BEFORE_UPDATE))[-1]
            return f"every update has to wait for the end of backward ({last.name})"
        return ""

    def lines(self, was: MemoryTimeline) -> Iterable[str]:
        """What a user should read."""
        early, are = len(self.early), "is" if len(self.early) == 1 else "are"
        yield f"{early} of {counted(len(self.trained), 'parameters')} {are} updated while backward still runs"
        if self.late:
            yield "the others have room for what they allocate behind backward only, and stay there"
        before, after = format_bytes(was.peak_bytes), format_bytes(self.peak)
        if self.peak < was.peak_bytes:
            yield f"the predicted peak falls by {format_bytes(was.peak_bytes - self.peak)}, {before} -> {after}"
        else:
            node = self.memory.peak_at
            place = (info(node).names or (node.name,))[0]
            where = f"{place} in {info(node).phase.value}"
            yield f"the predicted peak stays {after} by that alone: it is reached at {where}"


_BEFORE_UPDATE = (Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTE, Phase.TRANSFER, Phase.SYNC)


def _updated(program: Program) -> tuple[list[str], list[str]]:
    """The parameters that the update writes, and those of them whose last write is in front of the end of backward."""
    position = {node: index for index, node in enumerate(program.graph.nodes)}
    end = max((position[node] for node in program.phase_nodes(Phase.BACKWARD, Phase.RECOMPUTE)), default=-1)
    written: dict[fx.Node, int] = {}
    for node in program.phase_nodes(Phase.UPDATE):
        for target in schema.mutated_inputs(node):
            written[_base(target)] = position[node]
    parameters = [(node, spec.target) for node, spec in program.inputs_of("parameter") if node in written]
    return [name for _, name in parameters], [name for node, name in parameters if written[node] < end]


def _base(node: fx.Node) -> fx.Node:
    """The node that stands for a storage: behind views, elements of tuples, and results of writing in place."""
    while sources := schema.aliased_inputs(node) if node.op == "call_function" else []:
        node = sources[0]
    return node


# --- splitting list ops ----------------------------------------------------------------------------------------------


def _split_lists(program: Program, origin: str) -> int:
    """Replace every list op of the update by one op per element; returns how many were split."""
    owner = _owners(program)
    split = 0
    for node in list(program.phase_nodes(Phase.UPDATE)):
        count = foreach.elements(node)
        if count > 1:
            _split(program, node, count, owner, origin)
            split += 1
    return split


def _split(program: Program, node: fx.Node, count: int, owner: dict[fx.Node, str], who: str) -> None:
    results: dict[int, list[fx.Node]] = defaultdict(list)
    for user in node.users:
        results[user.args[1]].append(user)  # type: ignore[index]
    known = info_like(node, Phase.UPDATE, f"{who}: one of {count} elements of {node.name}", ())
    for index in range(count):
        call = foreach.element_call(node, index)
        with program.graph.inserting_before(node):
            one = program.graph.create_node("call_function", *call, name=f"{node.name}_{index}")
        one.meta |= {key: value for key, value in node.meta.items() if key == "stack_trace"}
        set_value(one, foreach.element_value(node, index))
        modules = {owner[source] for source in one.all_input_nodes if source in owner}
        if len(modules) == 1:
            (owner[one],) = modules
        set_info(one, replace(known, module=owner.get(one, known.module)))
        for result in results[index]:
            result.args = (one, 0)
            set_info(result, replace(info(result), module=info(one).module))
            owner.update({result: owner[one]} if one in owner else {})
    program.graph.erase_node(node)


def _owners(program: Program) -> dict[fx.Node, str]:
    """The modules of parameters and of their state."""
    return {
        node: spec.target.split("/")[0].rpartition(".")[0] for node, spec in program.inputs_of("parameter", "state")
    }


# --- what keeps updates from running one by one ----------------------------------------------------------------------


def _sharing(program: Program) -> str:
    """Two inputs that are one piece of memory, where the update writes it; empty without such a pair."""
    written = {_base(target) for node in program.phase_nodes(Phase.UPDATE) for target in schema.mutated_inputs(node)}
    found: dict[torch.UntypedStorage, tuple[fx.Node, str]] = {}
    for node, spec in zip(program.placeholders, program.inputs, strict=True):
        for tensor in tensors_of(value_of(node)):
            other, name = found.setdefault(tensor.untyped_storage(), (node, spec.target))
            if other is not node and {other, node} & written:
                return f"{name} and {spec.target} share memory, so that updating one early would change the other"
    return ""


class _GradientsBehind:
    """Which gradients each call of the update depends on, call by call in the order of the program."""

    def __init__(self, program: Program) -> None:
        self._refers = storages_of(program)[1]
        self._accumulators = {node for node, _ in program.inputs_of("gradient")}
        self._behind: dict[object, set[int]] = defaultdict(set)
        self.names: dict[int, str] = {}

    def of(self, node: fx.Node) -> set[int]:
        """The gradients (by the identity of their storages) that the next call depends on."""
        for source in node.all_input_nodes:
            if source in self._accumulators or _is_gradient(source):
                self._add(source)
        keys = [id(storage) for source in node.all_input_nodes for storage in self._refers[source]]
        return set[int]().union(*(self._behind[key] for key in [*keys, *node.all_input_nodes]))

    def _add(self, gradient: fx.Node) -> None:
        for storage in self._refers[gradient]:
            self.names[id(storage)] = (storage.names or (gradient.name,))[0]
            self._behind[id(storage)].add(id(storage))

    def pass_on(self, node: fx.Node, gradients: set[int]) -> None:
        """What a call makes or writes depends on what the call depends on."""
        written = [storage for target in schema.mutated_inputs(node) for storage in self._refers[target]]
        for key in [node, *(id(storage) for storage in [*written, *self._refers[node]])]:
            self._behind[key] |= gradients


def _gathering(program: Program) -> str:
    """Why updates cannot run one by one: which call of the update depends on several gradients; empty without one."""
    behind = _GradientsBehind(program)
    for node in program.phase_nodes(Phase.UPDATE):
        found = behind.of(node)
        if len(found) > 1:
            listed = ", ".join(_first_three(sorted(behind.names[key] for key in found)))
            return (
                f"{node.name} ({schema.op_name(node)}) depends on {len(found)} gradients ({listed}), so the update has "
                "to wait for all of them"
            )
        behind.pass_on(node, found)
    return ""


def _is_gradient(node: fx.Node) -> bool:
    """Whether a value that an update reads is a gradient, not a number for all (a loss, a flag, a scale)."""
    if node.op != "call_function" or info(node).phase in (Phase.FORWARD, Phase.UPDATE):
        return False
    value = value_of(node)
    if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
        return False  # indices, say
    return storage_bytes(value) > value.element_size()


def _first_three(names: list[str]) -> list[str]:
    return names[:3] + ([f"and {len(names) - 3} more"] if len(names) > 3 else [])


# --- the order -------------------------------------------------------------------------------------------------------


@dataclass
class _Storage:
    """Who has touched a storage so far: other calls by position, calls of the update since its last write."""

    touched: int = -1
    written: int = -1
    writer: fx.Node | None = None
    readers: list[fx.Node] = field(default_factory=list)


class _Order:
    """The earliest place of every call of the update, behind what it depends on.

    A call depends on what makes its arguments, on the earlier writes of the storages that it reads, and on everything
    earlier that touches the storages that it writes. All other calls keep their order, in which places are counted: a
    call of the update at place ``i`` runs behind the ``i``-th of the others.

    Calls without an effect, and those that depend on no gradient (a step count), run just before the first call of the
    update that depends on them. In one place, the calls for one parameter run before those for the next.

    Args:
        program: of stage step.
        late: names of calls that stay behind backward, and with them what depends on them; but in front of what needs
            them and is not of the update (exchanges of norms, or of parameters that were updated).
    """

    def __init__(self, program: Program, late: frozenset[str]) -> None:
        calls = [node for node in program.graph.nodes if node.op not in ("placeholder", "output")]
        self._others = [node for node in calls if info(node).phase is not Phase.UPDATE]
        self._calls = calls
        self._refers = storages_of(program)[1]
        self._place = {node: index for index, node in enumerate(self._others)}
        self._first = next((i for i, n in enumerate(self._others) if info(n).phase is not Phase.FORWARD), 0)
        self._stands: dict[fx.Node, int] = {}
        self._passed = 0
        self._before: dict[fx.Node, dict[fx.Node, None]] = {}
        self._followed: set[fx.Node] = set()
        self._pinned: dict[fx.Node, int] = {}
        self._dependent: set[fx.Node] = {node for node, _ in program.inputs_of("gradient")}
        self._storages: dict[object, _Storage] = defaultdict(_Storage)
        self._late = late
        names = dict.fromkeys(spec.target for _, spec in program.inputs_of("parameter"))
        number = {name: index for index, name in enumerate(names)}
        self._number: dict[object, int] = {
            id(storage): number.get(spec.target.rsplit("/", 1)[0], len(number))
            for node, spec in program.inputs_of("parameter", "state")
            for storage in self._refers[node]
        }
        self._parameter: dict[fx.Node, int] = {}

    def act(self) -> None:
        """Put every call of the update where it belongs."""
        for node in self._calls:
            self._read(node)
        done: set[fx.Node] = set()
        last = dict(enumerate(self._others))
        free = [node for node in self._before if not self._waits(node)]
        for node in sorted(free, key=lambda node: (self._due(node), self._parameter[node])):
            place = self._due(node)
            for moved in self._with_preparation(node, done):
                last[place].append(moved)
                last[place] = moved

    def _due(self, node: fx.Node) -> int:
        """The place of a call; nothing tells when one is due that needs no gradient and that no other call needs."""
        idle = all(node not in nodes for nodes in (self._dependent, self._followed, self._pinned))
        return self._stands[node] if idle else min(self._place[node], self._pinned.get(node, self._place[node]))

    def _waits(self, node: fx.Node) -> bool:
        """Whether a call runs when another one of the update needs it, instead of at a place of its own."""
        prepares = not schema.has_effect(node) or node not in self._dependent
        return prepares and node in self._followed and node not in self._pinned

    def _with_preparation(self, node: fx.Node, done: set[fx.Node]) -> list[fx.Node]:
        """A call behind the calls of the update that it needs and that have not run."""
        found: list[fx.Node] = []
        pending = [node]
        while pending:
            current = pending[-1]
            missing = [n for n in self._before[current] if n not in done]
            if missing:
                pending += reversed(missing)
                continue
            pending.pop()
            if current not in done:
                done.add(current)
                found.append(current)
        return found

    def _read(self, node: fx.Node) -> None:
        """Note what a call depends on, and what it leaves for later calls to depend on."""
        reads = self._keys(node.all_input_nodes)
        writes = self._keys(schema.mutated_inputs(node))
        if schema.is_random(node) or schema.is_collective(node):
            writes["effects"] = None
        before = dict.fromkeys(source for source in node.all_input_nodes if source in self._before)
        places = [self._place[source] for source in node.all_input_nodes if source in self._place]
        for key in {**reads, **writes}:
            storage = self._storages[key]
            before |= dict.fromkeys(storage.readers if key in writes else ())
            before |= {storage.writer: None} if storage.writer is not None else {}
            places.append(storage.touched if key in writes else storage.written)
        if info(node).phase is Phase.UPDATE:
            self._depend(node, before, [*places, *(self._place[other] for other in before)])
            self._leave_update(node, reads, writes)
        else:
            self._passed += 1
            for other in before:
                self._pinned.setdefault(other, self._place[node] - 1)
            self._leave(self._place[node], reads, writes)

    def _depend(self, node: fx.Node, before: dict[fx.Node, None], places: list[int]) -> None:
        sources = node.all_input_nodes
        given = any(n in self._place and n not in self._before and info(n).phase is not Phase.FORWARD for n in sources)
        if given or not self._dependent.isdisjoint([*before, *sources]):
            self._dependent.add(node)
        self._before[node] = before
        numbers = [self._number[key] for key in self._keys(sources) if key in self._number]
        self._parameter[node] = min([*numbers, *(self._parameter[other] for other in before)], default=-1)
        self._followed.update(before)
        self._stands[node] = max(self._passed - 1, 0)
        self._place[node] = max([len(self._others) - 1 if node.name in self._late else self._first, *places])

    def _leave(self, place: int, reads: Iterable[object], writes: Iterable[object]) -> None:
        for key in reads:
            self._storages[key].touched = place
        for key in writes:
            self._storages[key].touched = self._storages[key].written = place

    def _leave_update(self, node: fx.Node, reads: Iterable[object], writes: Iterable[object]) -> None:
        for key in reads:
            self._storages[key].readers.append(node)
        for key in writes:
            self._storages[key].writer = node
            self._storages[key].readers = []

    def _keys(self, nodes: Iterable[fx.Node]) -> dict[object, None]:
        return dict.fromkeys(id(storage) for node in nodes for storage in self._refers.get(node, ()))
