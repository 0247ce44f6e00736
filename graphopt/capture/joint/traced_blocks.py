"""The blocks of a shortened program in its joint graph: where their calls stand, and whether they are alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from graphopt.capture.joint.equal_blocks import KEPT, EqualBlocks, constants_of, value_form
from graphopt.capture.joint.traced_joint import HOLDS, Runner, TracedJoint, base_name, mark_of, marked
from graphopt.ir.node import value_of

__all__ = [
    "COPIED",
    "HELD",
    "NEXT",
    "DifferentError",
    "Place",
    "Sweep",
    "TracedBlocks",
    "names_of",
    "order_of",
]

FIRST, BEFORE, COPIED, NEXT, LAST = range(KEPT)
"""The blocks that are traced. The third is what is copied; it is compared with the second."""

HELD = ("parameter", "buffer")
"""The kinds of inputs that the model has, not the call."""

_KINDS = (*HELD, "input", "tangent")
_UP = list(range(KEPT))
_GIVEN = -1
"""The sweep of what blocks own."""


class DifferentError(Exception):
    """What torch made of two blocks is not equal, or stands where it cannot be copied."""


@dataclass(frozen=True)
class Place:
    """Where something of a block is: which block, in which pass over the blocks, and the how-manieth there."""

    block: int
    sweep: int
    offset: int


@dataclass(frozen=True)
class Sweep:
    """One pass over the blocks, from the first to the last or back; the calls are by block, upwards."""

    upwards: bool
    calls: Sequence[Sequence[fx.Node]]


class TracedBlocks:
    """The blocks of a shortened program in torch's joint graph.

    Args:
        blocks: of the whole program.
        runner: of the shortened one.
        traced: the joint graph of that.

    Attributes:
        place: of the nodes that are of a block.
        sweeps: forward, backward, and what else goes over all blocks.
        given: by block the inputs that it owns.
        roles: of all inputs, in order.
        gradients: by what they are of.
        names: by block the places of its calls in the whole program.
        place_of_name: the other way round: the block, and the how-manieth.
        like: the call of the second block that one of the third corresponds to.

    Raises:
        DifferentError: where the second and the third block are not equal, or cannot be copied.
    """

    def __init__(self, blocks: EqualBlocks, runner: Runner, traced: TracedJoint) -> None:
        self.blocks = blocks
        self.runner = runner
        self.traced = traced
        self.names = [names_of(blocks, number) for number in blocks.kept]
        self.place_of_name = {
            name: (block, number) for block, names in enumerate(self.names) for number, name in enumerate(names)
        }
        self.place: dict[fx.Node, Place] = {}
        self.sweeps: list[Sweep] = []
        self.given: list[list[fx.Node]] = [[] for _ in blocks.kept]
        self.roles = dict(traced.inputs)
        self.gradients = {
            role.of: value for value, role in traced.outputs if role.kind == "gradient" and role.of is not None
        }
        self.like: dict[fx.Node, fx.Node] = {}
        self._find_inputs()
        self._find_sweeps()
        self._compare()
        self._check_readers()
        self._check_names()

    # --- finding -----------------------------------------------------------------------------------------------------

    def _find_inputs(self) -> None:
        """Note the inputs of each block; inputs and gradients have to be in the order in which more are put in."""
        held = [str(role.target) for role in self.roles.values() if role.kind in HELD]
        kinds = [role.kind for role in self.roles.values()]
        if held != order_of(self.runner) or kinds != sorted(kinds, key=_KINDS.index):
            raise DifferentError("inputs are in another order")
        answered = [role for role in self.roles.values() if role in self.gradients]
        if [role.of for _, role in self.traced.outputs if role.kind == "gradient"] != answered:
            raise DifferentError("gradients are in another order")
        node_of = {str(role.target): node for node, role in self.roles.items() if role.kind in HELD}
        for block, number in enumerate(self.blocks.kept):
            self.given[block] = [node_of[self.runner.keys[node.name]] for node in self.blocks.owned[number]]
            self.place.update({node: Place(block, _GIVEN, slot) for slot, node in enumerate(self.given[block])})

    def _find_sweeps(self) -> None:
        """Cut the graph where calls of another block begin; each block has to come once in each pass over them."""
        runs = list(self._runs())
        while runs:
            block, late, _ = runs[0]
            if block is None:
                runs.pop(0)
                continue
            ahead, runs = runs[:KEPT], runs[KEPT:]
            order = [run[0] for run in ahead]
            if order not in (_UP, _UP[::-1]) or any(run[1] != late for run in ahead):
                raise DifferentError("calls of blocks stand between each other")
            sweep = Sweep(order == _UP, [ahead[order.index(number)][2] for number in _UP])
            for number, nodes in enumerate(sweep.calls):
                self.place.update({node: Place(number, len(self.sweeps), at) for at, node in enumerate(nodes)})
            self.sweeps.append(sweep)

    def _runs(self) -> Iterator[tuple[int | None, bool, list[fx.Node]]]:
        """Calls in a row that are known to be of one block, or of none, with those behind them of which it is not."""
        current: tuple[int | None, bool, list[fx.Node]] = (None, False, [])
        for node in self.traced.graph.nodes:
            if node.op in ("placeholder", "output") or self._is_size_of_outside(node):
                continue
            known = self._known_block(node)
            if known is not None and known != current[:2]:
                yield current
                current = (*known, [])
            current[2].append(node)
        yield current

    def _is_size_of_outside(self, node: fx.Node) -> bool:
        """Whether a call reads a size of an input: torch notes it at the first use, which may be inside of a block."""
        return node.target is torch.ops.aten.sym_size.int and node.args[0] in self.roles

    def _known_block(self, node: fx.Node) -> tuple[int | None, bool] | None:
        """The block that a call is of, and whether it is of backward; None where nothing says so."""
        late = node in self.traced.backward or node.meta.get("partitioner_tag") == "is_backward"
        if node.target is torch.ops.aten.copy_.default and node.args[0] in self.place:  # a buffer's new value
            return self.place[node.args[0]].block, late  # type: ignore[index]
        mark = mark_of(node)
        return (self._block_of(mark), late) if mark else None

    # --- comparing ---------------------------------------------------------------------------------------------------

    def _compare(self) -> None:
        for sweep in self.sweeps:
            before, copied = sweep.calls[BEFORE], sweep.calls[COPIED]
            for earlier, later in zip(before, copied, strict=False):
                self._compare_calls(earlier, later)
                self.like[later] = earlier
            if len(before) != len(copied):
                raise DifferentError(f"one block makes {len(before)} calls and one {len(copied)}")
        for earlier, later in zip(self.given[BEFORE], self.given[COPIED], strict=True):
            gradients = [self.gradients.get(self.roles[node]) for node in (earlier, later)]
            held = [node.meta.get(HOLDS, ()) for node in (earlier, later)]
            if not self._corresponds(*gradients) or not self._names_correspond(*held):
                raise DifferentError(f"gradients or values of {earlier} and {later}")
            self.like[later] = earlier

    def _compare_calls(self, earlier: fx.Node, later: fx.Node) -> None:
        same = {
            "op": earlier.op == later.op == "call_function" and earlier.target == later.target,
            "name": base_name(earlier) == base_name(later),
            "arguments": self._arguments_correspond(earlier, later),
            "value": value_form(value_of(earlier)) == value_form(value_of(later)),
            "metadata": _metadata(earlier) == _metadata(later),
            "phase": (earlier in self.traced.backward) == (later in self.traced.backward),
            "source": self._names_correspond([self.source(earlier)], [self.source(later)]),
            "held values": self._names_correspond(earlier.meta.get(HOLDS, ()), later.meta.get(HOLDS, ())),
        }
        if not all(same.values()):
            different = ", ".join(what for what, equal in same.items() if not equal)
            raise DifferentError(f"{different} of {earlier.format_node()} and {later.format_node()}")

    def _arguments_correspond(self, earlier: fx.Node, later: fx.Node) -> bool:
        read: list[list[fx.Node]] = [[], []]
        forms = [
            constants_of((node.args, node.kwargs), found.append)
            for node, found in zip((earlier, later), read, strict=True)
        ]
        return forms[0] == forms[1] and all(map(self._corresponds, *read))

    def _corresponds(self, earlier: Any, later: Any) -> bool:
        """Whether two values are one of outside, or stand in neighbouring blocks at one place."""
        here, there = self.place.get(earlier), self.place.get(later)
        if here is None or there is None:
            return earlier is later and here is None and there is None
        return here.block <= COPIED and there == replace(here, block=here.block + 1)

    def _names_correspond(self, earlier: Sequence[str], later: Sequence[str]) -> bool:
        """Whether places of forward calls are the same, or of neighbouring blocks."""
        return len(earlier) == len(later) and all(map(self._name_corresponds, earlier, later))

    def _name_corresponds(self, earlier: str, later: str) -> bool:
        if earlier == later:
            return self.place_of_name.get(earlier, (LAST,))[0] == LAST
        (block, number), there = self.place_of_name.get(earlier, (LAST, 0)), self.place_of_name.get(later)
        return block <= COPIED and there == (block + 1, number)

    def _block_of(self, name: str) -> int | None:
        return self.place_of_name.get(name, (None,))[0]

    def source(self, node: fx.Node) -> str:
        """The place of the forward call that a call comes from."""
        return self.traced.sources.get(node, "")

    def _check_readers(self) -> None:
        """Nothing but their neighbours may read values of the two blocks that are compared."""
        for node in self.traced.graph.nodes:
            reader = self.place.get(node)
            for source in node.all_input_nodes if node.op != "output" else ():
                read = self.place.get(source)
                near = reader is not None and read is not None and abs(reader.block - read.block) <= 1
                if read is not None and read.block in (BEFORE, COPIED) and not near:
                    raise DifferentError(f"{node} reads {source}")
        owned = {self.roles[node] for nodes in self.given for node in nodes}
        for value, role in self.traced.outputs:
            place = self.place.get(value)
            inside = place is not None and place.block in (BEFORE, COPIED)
            if role.kind != "gradient" if role.of in owned else inside:
                raise DifferentError(f"{value} is an output")

    def _check_names(self) -> None:
        """Nothing but they and their neighbours may be known by places in the two blocks that are compared.

        What is of outside may hold the same values in all blocks.
        """
        for node in self.traced.graph.nodes:
            place = self.place.get(node)
            held = node.meta.get(HOLDS, ())
            if place is None:
                numbers = [
                    [self.place_of_name[name][1] for name in held if self._block_of(name) == block]
                    for block in (BEFORE, COPIED)
                ]
                if numbers[0] != numbers[1]:
                    raise DifferentError(f"{node} holds values of one block alone")
                held = ()
            for name in (*held, self.source(node)):
                block = self._block_of(name)
                if block in (BEFORE, COPIED) and (place is None or abs(place.block - block) > 1):
                    raise DifferentError(f"{node} is known by {name}")


def _metadata(node: fx.Node) -> list[Any]:
    return [sorted(node.meta), node.meta.get("partitioner_tag"), str(node.meta.get("original_aten"))]


def names_of(blocks: EqualBlocks, number: int) -> list[str]:
    """The places (``marked``) of what a block owns, of its calls, and of those in its bodies."""
    found = [node.name for node in blocks.owned[number]]
    for node in blocks.calls[number]:
        found.append(node.name)
        if node.op == "get_attr":
            body = blocks.bodies[node.name]
            found += [name for name, _ in marked(body.graph, dict(body.named_children()), f"{node.target}/")]
    return found


def order_of(runner: Runner) -> list[str]:
    """The keys of what a runner holds, in the order of torch's joint graph."""
    return [name for name, _ in runner.named_parameters()] + [name for name, _ in runner.named_buffers()]
