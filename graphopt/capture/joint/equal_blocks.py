"""Equal blocks of a forward program: the layers of a model, where one is like the other.

A model of many equal layers is a long row of calls in which a group of calls comes again and again. They are looked for
in the program and not in the model's Python: it does not matter how layers are written, and hooks, regions and autocast
are part of what is compared.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphopt import _torch
from graphopt.ir.node import InputSpec, value_of
from graphopt.ir.program import Program

__all__ = [
    "KEPT",
    "LEAST",
    "EqualBlocks",
    "constants_of",
    "equal_blocks",
    "longest_period",
    "value_form",
    "without_most",
]

KEPT = 5
"""How many of many equal blocks are traced: the first, two that are compared, and the last two.

What a value that all blocks read gets as its gradient is added up from the last one on, which adds nothing itself.
"""

LEAST = KEPT + 2
"""From how many equal blocks on that is done."""

_REGIONS = (torch.ops.higher_order.wrap_with_autocast, torch.ops.higher_order.wrap_with_set_grad_enabled)
_PLAIN = (int, bool, str, float, complex, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(frozen=True)
class EqualBlocks:
    """A row of blocks of a forward program, each linked to the one before it in the same way.

    Attributes:
        calls: of each block, in order; those at one place of all blocks correspond.
        owned: the parameters, buffers and constants that each block has for itself, corresponding likewise.
        bodies: the sub-graphs of blocks, by the names of the nodes that refer to them.
    """

    calls: tuple[tuple[fx.Node, ...], ...]
    owned: tuple[tuple[fx.Node, ...], ...]
    bodies: Mapping[str, fx.GraphModule]

    @property
    def kept(self) -> tuple[int, ...]:
        """The numbers of the blocks that are traced."""
        count = len(self.calls)
        return (*range(KEPT - 2), count - 2, count - 1)


class NotComparableError(Exception):
    """Something that cannot be compared, or that may do another thing each time."""


def equal_blocks(program: Program, tensors: Mapping[str, torch.Tensor]) -> EqualBlocks | None:
    """The longest row of equal blocks; None where there are fewer than ``LEAST``.

    Args:
        program: of stage forward.
        tensors: its parameters and buffers by name.
    """
    if len(program.graph.nodes) < LEAST:
        return None
    return _Finder(program, tensors).find()


class _Finder:
    """Looks for equal blocks in one program."""

    def __init__(self, program: Program, tensors: Mapping[str, torch.Tensor]) -> None:
        self._program = program
        self._specs = dict(zip(program.placeholders, program.inputs, strict=True))
        self._tensors = {
            node: program.constants[node.name] if spec.role == "constant" else tensors.get(spec.target)
            for node, spec in self._specs.items()
        }
        self._calls = [node for node in program.graph.nodes if node.op not in ("placeholder", "output")]
        self._place = {node: place for place, node in enumerate(self._calls)}
        self._reads = [_nodes_in((node.args, node.kwargs)) for node in self._calls]

    def find(self) -> EqualBlocks | None:
        numbers: dict[Any, int] = {}
        keys = [numbers.setdefault(self._form(node), len(numbers)) for node in self._calls]
        found = longest_period(keys, self._corresponds)
        if found is None:
            return None
        start, period, end = found
        start = self._earliest(keys, start, period)
        count = (end - start) // period
        blocks = tuple(tuple(self._calls[start + period * i : start + period * (i + 1)]) for i in range(count))
        return self._described(blocks) if count >= LEAST else None

    def _form(self, node: fx.Node) -> Any:
        """What two calls have in common that may stand at one place of two blocks, but for what they read."""
        try:
            return self._call_form(node)
        except NotComparableError:
            return object()

    def _call_form(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            body = self._program.attributes.get(str(node.target))
            if body is None:
                raise NotComparableError
            return "body", _body_form(body)
        return _plain_call(node), constants_of((node.args, node.kwargs), self._argument), value_form(value_of(node))

    def _argument(self, node: fx.Node) -> Any:
        if node.op != "placeholder":
            return "call", value_form(value_of(node)) if node.op != "get_attr" else None
        tensor = self._tensors[node]
        trained = (tensor.requires_grad, isinstance(tensor, torch.nn.Parameter)) if tensor is not None else None
        return self._specs[node].role, value_form(value_of(node)), trained

    def _corresponds(self, place: int, period: int) -> bool:
        """Whether a call reads what the one a period later does, but a period earlier."""
        pairs = zip(self._reads[place], self._reads[place + period], strict=True)
        return all(earlier is later or self._shifted(earlier, later, period) for earlier, later in pairs)

    def _shifted(self, earlier: fx.Node, later: fx.Node, period: int) -> bool:
        if earlier in self._place and later in self._place:
            return self._place[later] - self._place[earlier] == period
        return self._can_be_owned(earlier) and self._can_be_owned(later)

    def _can_be_owned(self, node: fx.Node) -> bool:
        return node.op == "placeholder" and self._specs[node].role in ("parameter", "buffer", "constant")

    def _earliest(self, keys: Sequence[int], start: int, period: int) -> int:
        """Where the first block begins, which reads from before the row what the others read from their neighbour."""
        first = start
        while first > 0 and start - first < period and keys[first - 1] == keys[first - 1 + period]:
            first -= 1
        place = first
        while place < start:
            after = self._cannot_begin(place, first, period)
            first, place = (first, place + 1) if after is None else (after, after)
        return first

    def _cannot_begin(self, place: int, first: int, period: int) -> int | None:
        """None where a call may stand in a first block that begins at ``first``; else where one may begin earliest."""
        for earlier, later in zip(self._reads[place], self._reads[place + period], strict=True):
            if earlier is later or self._shifted(earlier, later, period):
                continue
            from_neighbour = first <= self._place.get(later, -1) < first + period
            if not from_neighbour or earlier.op == "placeholder":
                return place + 1
            if self._place[earlier] >= first:
                return self._place[earlier] + 1
        return None

    def _described(self, blocks: tuple[tuple[fx.Node, ...], ...]) -> EqualBlocks | None:
        """The blocks with what they own; None where they are not linked alike, or something else leaves them."""
        number_of = {node: number for number, block in enumerate(blocks) for node in block}
        owned = self._owned(blocks)
        if owned is None or not self._alone(owned, number_of):
            return None
        for node, number in number_of.items():
            read = [number_of[source] for source in node.all_input_nodes if source in number_of]
            if any(number - other not in (0, 1) for other in read):
                return None
            if number < len(blocks) - 1 and any(user not in number_of for user in node.users):
                return None
        attributes = self._program.attributes
        bodies = {node.name: attributes[str(node.target)] for node in number_of if node.op == "get_attr"}
        return EqualBlocks(blocks, owned, bodies)

    def _owned(self, blocks: tuple[tuple[fx.Node, ...], ...]) -> tuple[tuple[fx.Node, ...], ...] | None:
        """What each block has for itself, in the order of its first reader."""
        found: list[dict[fx.Node, int]] = [{} for _ in blocks]
        patterns: list[list[int]] = [[] for _ in blocks]
        for calls in zip(*blocks, strict=True):
            for row in zip(*(self._reads[self._place[call]] for call in calls), strict=True):
                if len(set(row)) == 1 or not any(node.op == "placeholder" for node in row):
                    continue
                if not all(map(self._can_be_owned, row)):
                    return None
                for node, known, pattern in zip(row, found, patterns, strict=True):
                    pattern.append(known.setdefault(node, len(known)))
        alike = all(pattern == patterns[0] for pattern in patterns)
        return tuple(tuple(known) for known in found) if alike else None

    def _alone(self, owned: tuple[tuple[fx.Node, ...], ...], number_of: Mapping[fx.Node, int]) -> bool:
        """Whether nothing else reads what a block owns, and its memory is that of nothing else."""
        memory = Counter(_memory_of(tensor) for tensor in self._tensors.values() if tensor is not None)
        for number, nodes in enumerate(owned):
            for node in nodes:
                tensor = self._tensors[node]
                if tensor is None or memory[_memory_of(tensor)] > 1:
                    return False
                if any(number_of.get(user) != number for user in node.users):
                    return False
        return True


def _memory_of(tensor: torch.Tensor) -> Hashable:
    return _torch.storage_key(tensor) if tensor.layout is torch.strided else ("tensor", id(tensor))


# --- periods ---------------------------------------------------------------------------------------------------------


def longest_period(
    keys: Sequence[Hashable], corresponds: Callable[[int, int], bool] = lambda place, period: True
) -> tuple[int, int, int] | None:
    """The longest stretch of a sequence that repeats itself at least ``LEAST`` times.

    Args:
        keys: the sequence.
        corresponds: whether the item at a place is like the one a period behind it; asked where their keys are equal.

    Returns:
        Where it begins, its period, and where it ends; the shorter period where two make it equally long.
    """
    best: tuple[int, int, int] | None = None
    for period in sorted(_periods(keys)):
        start = 0
        for place in range(len(keys) - period + 1):
            more = place < len(keys) - period and keys[place] == keys[place + period] and corresponds(place, period)
            if more:
                continue
            end = place + period
            if end - start >= LEAST * period and (best is None or end - start > best[2] - best[0] + period):
                best = (start, period, end)
            start = place + 1
    return best


def _periods(keys: Sequence[Hashable]) -> set[int]:
    """Distances at which rare items come again; one of them is the period where there is one."""
    places: dict[Hashable, list[int]] = defaultdict(list)
    for place, key in enumerate(keys):
        places[key].append(place)
    found: dict[int, None] = {}
    for known in sorted((known for known in places.values() if len(known) >= LEAST), key=len):
        for times in (1, 2, 3):
            gaps = Counter(map(operator.sub, known[times:], known))
            gap, count = gaps.most_common(1)[0]
            if count >= LEAST - times:
                found[gap] = None
        if len(found) > _PERIODS_TRIED:
            break
    return set(found)


_PERIODS_TRIED = 8


# --- forms -----------------------------------------------------------------------------------------------------------


def value_form(value: Any) -> Hashable:
    """What is known of an example value, in a form that is equal for values that are alike.

    Raises:
        NotComparableError: where it is of a kind that has no such form, as sizes that depend on data.
    """
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            raise NotComparableError
        sizes = tuple(map(_size_form, (*value.shape, *value.stride(), value.storage_offset())))
        flags = (value.requires_grad, value.is_conj(), value.is_neg())
        return len(value.shape), sizes, value.dtype, value.device, flags
    if isinstance(value, (tuple, list)):
        return tuple(map(value_form, value))
    if isinstance(value, torch.SymInt):
        return "size", _size_form(value)
    return constants_of(value, lambda _: None)


def _size_form(size: Any) -> Hashable:
    if isinstance(size, int):
        return size
    if not _torch.is_of_sizes(size):
        raise NotComparableError
    return str(size)


def constants_of(value: Any, of_node: Callable[[fx.Node], Hashable]) -> Hashable:
    """Arguments in a form that is equal where they are; nodes stand as ``of_node`` has them.

    Raises:
        NotComparableError: for what has no such form.
    """
    if isinstance(value, fx.Node):
        return "node", of_node(value)
    if isinstance(value, (tuple, list)):
        return tuple(constants_of(item, of_node) for item in value)
    if isinstance(value, Mapping):
        return tuple((name, constants_of(item, of_node)) for name, item in value.items())
    if isinstance(value, slice):
        return "slice", constants_of((value.start, value.stop, value.step), of_node)
    if not isinstance(value, _PLAIN):
        raise NotComparableError
    return type(value).__name__, repr(value)  # which tells signs of zero apart, and takes nan for itself


def _nodes_in(value: Any) -> list[fx.Node]:
    """Every node in some arguments, as often as it is there."""
    found: list[fx.Node] = []
    _torch.map_aggregate(value, lambda item: found.append(item) if isinstance(item, fx.Node) else None)
    return found


def _plain_call(node: fx.Node) -> Hashable:
    """What a call calls: an op or a region, which do the same each time, and no function of the user's."""
    if isinstance(node.target, _torch.OpOverload) or node.target in _REGIONS:
        return node.target
    if getattr(node.target, "__module__", "") in ("_operator", "math", "torch", "torch.sym"):
        return node.target
    raise NotComparableError


def _body_form(body: fx.GraphModule) -> Hashable:
    """A sub-graph: calls with what they read by place, bodies inside likewise."""
    places = {node: place for place, node in enumerate(body.graph.nodes)}
    found: list[Hashable] = []
    for node in body.graph.nodes:
        if node.op == "get_attr":
            inner = getattr(body, str(node.target))
            if not isinstance(inner, fx.GraphModule):
                raise NotComparableError
            found.append(("body", _body_form(inner)))
            continue
        target = _plain_call(node) if node.op == "call_function" else node.op
        read = constants_of((node.args if node.op != "placeholder" else (), node.kwargs), places.__getitem__)
        found.append((target, read, value_form(value_of(node))))
    return tuple(found)


# --- fewer of them ---------------------------------------------------------------------------------------------------


def without_most(program: Program, blocks: EqualBlocks) -> Program:
    """The program with the blocks alone that are kept, the last two behind those at the beginning.

    Args:
        program: of stage forward; it stays as it is.
        blocks: of that program. Nodes keep their names.
    """
    made = program.copy()
    there = {node.name: node for node in made.graph.nodes}
    before, behind = blocks.kept[-3:-1]
    pairs = zip(blocks.calls[behind - 1], blocks.calls[before], strict=True)
    follows = {there[left_out.name]: there[kept.name] for left_out, kept in pairs}

    def mapped(value: Any) -> Any:
        return follows.get(value, value) if isinstance(value, fx.Node) else value

    for node in blocks.calls[behind]:
        copy = there[node.name]
        copy.args = _torch.map_aggregate(copy.args, mapped)
        copy.kwargs = _torch.map_aggregate(copy.kwargs, mapped)
    for number in range(behind - 1, before, -1):
        for node in reversed(blocks.calls[number]):
            made.graph.erase_node(there[node.name])
            if node.op == "get_attr":
                made.attributes.pop(str(node.target))
    gone = {node.name for number in range(before + 1, behind) for node in blocks.owned[number]}
    inputs: list[InputSpec] = []
    for node, spec in zip(made.placeholders, made.inputs, strict=True):
        if node.name in gone:
            made.graph.erase_node(node)
            made.constants.pop(node.name, None)
        else:
            inputs.append(spec)
    made.inputs = inputs
    return made
