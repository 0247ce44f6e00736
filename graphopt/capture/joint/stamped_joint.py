"""A joint program of which equal blocks are differentiated once, and copied.

A forward program with many equal blocks is traced with five of them (``equal_blocks``). Where what torch made of the
third is what it made of the second, each call shifted by one block (``traced_blocks``), those that were left out would
come out alike: each meets what the third one met. Copies of its calls, forward and backward, take their place. Nothing
is taken for granted of autograd; where the two differ, the whole program is traced.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from graphopt import _torch
from graphopt.capture.joint.differentiation import JointCapture, build_joint, check_forward
from graphopt.capture.joint.equal_blocks import EqualBlocks, NotComparableError, equal_blocks, without_most
from graphopt.capture.joint.replayed_trace import StandInTrace, not_replayed
from graphopt.capture.joint.traced_blocks import (
    COPIED,
    HELD,
    NEXT,
    DifferentError,
    Place,
    Sweep,
    TracedBlocks,
    names_of,
    order_of,
)
from graphopt.capture.joint.traced_joint import HOLDS, Runner, TracedJoint, base_name, marked, read_trace
from graphopt.ir.graphs.graph_copies import copy_node
from graphopt.ir.node import set_value, value_of
from graphopt.ir.program import Program

__all__ = ["stamp_joint"]

logger = logging.getLogger(__name__)

_TRACES = {"stack_trace": "stack_trace", "nn_module_stack": "nn_module_stack", "fwd_nn_module_stack": "nn_module_stack"}
"""What torch notes of the forward call that a call comes from, which each copy has from its own."""


_OF_ITS_OWN = ("from_node", "seq_nr", "torch_fn")
"""What else it notes; copies go without it, since nothing reads it."""


def stamp_joint(
    forward: Program, tensors: dict[str, torch.Tensor], examples: list[torch.Tensor]
) -> JointCapture | None:
    """Differentiate a forward program with equal blocks; the result is that of ``capture_joint``.

    Args:
        forward: as for ``capture_joint``.
        tensors: likewise.
        examples: likewise.

    Returns:
        None where there are no equal blocks, or where their derivatives are not equal.

    Raises:
        CaptureError: for what ``capture_joint`` refuses before it traces.
    """
    blocks = equal_blocks(forward, tensors)
    if blocks is None:
        return None
    args = check_forward(forward, tensors, examples)
    try:
        found = _traced(forward, tensors, args, blocks)
    except (DifferentError, NotComparableError) as error:
        logger.debug("the equal blocks of %s are traced one by one: %s", forward.title, error)
        return None
    program = build_joint(forward, found.runner, found.traced, found.routes)
    inputs = [found.runner.holder[key] for key in order_of(found.runner)]
    trace = StandInTrace(program, inputs, tensors, args, found.routes, found.returns_arguments)
    capture = JointCapture(program, trace, inputs)
    if not any(spec.role == "loss" for spec in program.outputs) and not_replayed(capture, program):
        return None
    logger.debug("%d equal blocks of %s are differentiated as five", len(blocks.calls), forward.title)
    return capture


@dataclass
class _Found:
    """A joint graph for a forward program, and what torch says of how gradients come in and results go out."""

    runner: Runner
    traced: TracedJoint
    routes: _torch.GradientRoutes
    returns_arguments: bool


def _traced(
    forward: Program, tensors: dict[str, torch.Tensor], args: Sequence[torch.Tensor], blocks: EqualBlocks | None
) -> _Found:
    """The joint graph of a program; of several rows of equal blocks each is copied."""
    runner = Runner(forward, tensors)
    if blocks is None:
        try:
            trace = _torch.JointTrace(runner, tuple(args))
        except Exception as error:  # tracing it whole says it of the right block
            raise DifferentError(f"torch refuses a shorter program: {error}") from error
        traced = read_trace(trace)
        if not trace.requires_grad or any(role.kind == "shared" for _, role in traced.inputs):
            raise DifferentError("it is refused")
        return _Found(runner, traced, trace.gradient_routes(), trace.returns_arguments())
    shorter = without_most(forward, blocks)
    found = _traced(shorter, tensors, args, equal_blocks(shorter, tensors))
    traced = _Expansion(TracedBlocks(blocks, found.runner, found.traced), forward, runner).traced()
    return replace(found, runner=runner, traced=traced)


class _Expansion:
    """Puts copies of a block of the joint graph in the place of those that were left out."""

    def __init__(self, short: TracedBlocks, forward: Program, runner: Runner) -> None:
        self._short = short
        self._runner = runner
        self._blocks = short.blocks
        self._copied, self._next = self._blocks.kept[COPIED], self._blocks.kept[NEXT]
        self._missing = range(self._copied + 1, self._next)
        self._at = {(place.sweep, place.offset): node for node, place in short.place.items() if place.block == COPIED}
        self._copies: dict[int, dict[fx.Node, fx.Node]] = {number: {} for number in self._missing}
        self._forward = dict(marked(forward.graph, forward.attributes))
        self._first_in: dict[int, tuple[fx.Node, int]] = {}
        for node in short.traced.graph.nodes:
            for index, item in enumerate(_items(value_of(node))):
                if isinstance(item, torch.Tensor):
                    self._first_in.setdefault(_torch.storage_key(item), (node, index))
        self._names_of = functools.cache(functools.partial(names_of, self._blocks))

    def traced(self) -> TracedJoint:
        """The joint graph with all blocks."""
        self._add_inputs()
        for sweep in self._short.sweeps:
            self._copy(sweep)
        self._connect()
        known = self._short.traced
        return TracedJoint(known.graph, *self._described(), known.sources, known.backward)

    def _add_inputs(self) -> None:
        graph = self._short.traced.graph
        with graph.inserting_before(next(iter(graph.nodes))):
            for number in self._missing:
                for like, node in zip(self._short.given[COPIED], self._blocks.owned[number], strict=True):
                    new = graph.placeholder(node.name)
                    tensor = getattr(self._runner, self._runner.keys[node.name])
                    with (mode := value_of(like).fake_mode):
                        set_value(new, mode.from_tensor(tensor, static_shapes=True).detach())
                    new.meta[HOLDS] = self._held(like, number)
                    self._copies[number][like] = new

    def _copy(self, sweep: Sweep) -> None:
        """Copy what a pass over the blocks does for the third one."""
        anchor = sweep.calls[NEXT][0] if sweep.upwards else sweep.calls[COPIED][0]
        with self._short.traced.graph.inserting_before(anchor):
            for number in self._missing if sweep.upwards else reversed(self._missing):
                for node in sweep.calls[COPIED]:
                    self._copy_call(node, number)

    def _copy_call(self, node: fx.Node, number: int) -> None:
        known = self._short.traced
        new = copy_node(known.graph, node, functools.partial(self._translated, number=number), base_name(node))
        for key in _OF_ITS_OWN:
            new.meta.pop(key, None)
        self._copies[number][node] = new
        set_value(new, self._value(node, number))
        if HOLDS in node.meta:
            new.meta[HOLDS] = self._held(node, number)
        source, known.sources[new] = known.sources.get(node, ""), self._source(node, number)
        if node in known.backward:
            known.backward.add(new)
        if source != known.sources[new]:
            like, own = self._forward[source].meta, self._forward[known.sources[new]].meta
            for key, key_there in _TRACES.items():
                if key in new.meta and new.meta[key] == like.get(key_there):
                    new.meta[key] = own.get(key_there)

    def _value(self, node: fx.Node, number: int) -> Any:
        """The example value of a copy, in memory of the copy or of its neighbours."""
        value = value_of(node)
        several = isinstance(value, (tuple, list))
        found = [self._item(node, index, item, number) for index, item in enumerate(value if several else (value,))]
        return type(value)(found) if several else found[0]

    def _item(self, node: fx.Node, index: int, item: Any, number: int) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        first, place = self._first_in[_torch.storage_key(item)]
        if first not in self._short.place:
            return item
        if (first, place) == (node, index):
            return _fresh(item)
        return _view_of(_items(value_of(self._translated(first, number)))[place], item)

    def _translated(self, value: Any, number: int) -> Any:
        """What a block reads where the third one reads ``value``."""
        place = self._short.place.get(value) if isinstance(value, fx.Node) else None
        if place is None:
            return value
        block = number + place.block - COPIED
        there = self._at[place.sweep, place.offset]
        return self._copies[block][there] if block in self._copies else there if block == self._copied else value

    def _source(self, node: fx.Node, number: int) -> str:
        """The place of the forward call that a block's call comes from where the third one has ``node``."""
        return self._name(self._short.source(self._short.like[node]), self._short.source(node), number)

    def _held(self, node: fx.Node, number: int) -> tuple[str, ...]:
        """The places of the forward calls whose value a block has where the third one has ``node``."""
        pairs = zip(self._short.like[node].meta[HOLDS], node.meta[HOLDS], strict=True)
        return tuple(self._name(earlier, later, number) for earlier, later in pairs)

    def _name(self, earlier: str, later: str, number: int) -> str:
        """The place that a block has where the second and the third one have these."""
        if earlier == later:
            return later
        block, index = self._short.place_of_name[later]
        return self._names_of(number + block - COPIED)[index]

    # --- what was there ----------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        """Let the third block and the one behind the copies have the copies for neighbours."""
        for node, place in self._short.place.items():
            if place.block not in (COPIED, NEXT):
                continue
            mapped = functools.partial(self._neighbours, block=place.block)
            node.args = _torch.map_aggregate(node.args, mapped) if node.op != "placeholder" else node.args
            node.kwargs = _torch.map_aggregate(node.kwargs, mapped)
            self._move(node, place)
        sources = self._short.traced.sources
        sources |= {node: self._source(node, self._copied) for node in self._at.values() if node in sources}
        for node in self._at.values():
            if HOLDS in node.meta:
                node.meta[HOLDS] = self._held(node, self._copied)
        for node in self._short.traced.graph.nodes:
            if HOLDS in node.meta and node not in self._short.place:
                node.meta[HOLDS] = self._more_held(node.meta[HOLDS])

    def _move(self, node: fx.Node, place: Place) -> None:
        """Let the example value of something that lies in a neighbour's memory lie in that of the new one."""
        items = _items(value_of(node))
        for index, item in enumerate(items):
            first, there = self._first_in[_torch.storage_key(item)] if isinstance(item, torch.Tensor) else (node, 0)
            neighbour = self._neighbours(first, place.block)
            if neighbour is not first:
                items[index] = _view_of(_items(value_of(neighbour))[there], item)
                several = isinstance(value_of(node), (tuple, list))
                set_value(node, type(value_of(node))(items) if several else items[0])

    def _neighbours(self, value: Any, block: int) -> Any:
        """What one of the two blocks reads where it has read ``value``."""
        place = self._short.place.get(value) if isinstance(value, fx.Node) else None
        if place is None or (block, place.block) not in ((COPIED, NEXT), (NEXT, COPIED)):
            return value
        number = self._copied + 1 if block == COPIED else self._next - 1
        return self._copies[number][self._at[place.sweep, place.offset]]

    def _more_held(self, names: Sequence[str]) -> tuple[str, ...]:
        """The places whose value something of outside has, with those in the copies."""
        of_copied = [index for index, name in enumerate(names) if self._block_of(name) == COPIED]
        if not of_copied:
            return tuple(names)
        numbers = [self._short.place_of_name[names[index]][1] for index in of_copied]
        more = [self._names_of(number)[index] for number in self._missing for index in numbers]
        behind = of_copied[-1] + 1
        return (*names[:behind], *more, *names[behind:])

    def _block_of(self, name: str) -> int | None:
        return self._short.place_of_name.get(name, (None,))[0]

    # --- what goes in and out ----------------------------------------------------------------------------------------

    def _described(self) -> tuple[list[tuple[fx.Node, _torch.AotInput]], list[tuple[Any, _torch.AotOutput]]]:
        """Inputs and outputs of the whole graph, in torch's order."""
        short = self._short
        key_of = {key: self._runner.keys[name] for name, key in short.runner.keys.items()}
        renamed = {
            role: replace(role, target=key_of[str(role.target)]) if role.kind in HELD else role
            for role in short.roles.values()
        }
        of_key: dict[Any, Any] = {renamed[role].target: (node, renamed[role]) for node, role in short.roles.items()}
        gradients = {renamed[role]: self._gradient(role, value) for role, value in short.gradients.items()}
        for number in self._missing:
            for like, node in zip(short.given[COPIED], self._blocks.owned[number], strict=True):
                role = replace(short.roles[like], target=self._runner.keys[node.name])
                of_key[role.target] = self._copies[number][like], role
                if short.roles[like] in short.gradients:
                    gradients[role] = self._translated(short.gradients[short.roles[like]], number)
        inputs = [of_key[key] for key in order_of(self._runner)]
        inputs += [(node, role) for node, role in short.roles.items() if role.kind not in HELD]
        outputs = [
            (value, role if role.of is None else replace(role, of=renamed.get(role.of, role.of)))
            for value, role in short.traced.outputs
            if role.kind != "gradient"
        ]
        outputs += [(gradients[role], _torch.AotOutput("gradient", of=role)) for _, role in inputs if role in gradients]
        return inputs, outputs

    def _gradient(self, role: _torch.AotInput, value: Any) -> Any:
        """The gradient of an input that was traced."""
        owners = [block for block, nodes in enumerate(self._short.given) if role in map(self._short.roles.get, nodes)]
        return self._neighbours(value, owners[0]) if owners else value


def _items(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def _fresh(like: torch.Tensor) -> torch.Tensor:
    """An example value like another one, in memory of its own."""
    with _mode_of(like), torch.no_grad():
        made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
        if made.untyped_storage().nbytes() == like.untyped_storage().nbytes() and not like.storage_offset():
            return made
        count = like.untyped_storage().nbytes() // like.element_size()
        made = torch.empty(count, dtype=like.dtype, device=like.device)
        return made.as_strided(like.shape, like.stride(), like.storage_offset())


def _view_of(base: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """An example value like another one, in the memory of ``base``."""
    with _mode_of(base), torch.no_grad():
        if base.dtype == like.dtype:
            return base.as_strided(like.shape, like.stride(), like.storage_offset())
        made = torch.empty(0, dtype=like.dtype, device=like.device)
        made.set_(base.untyped_storage(), like.storage_offset(), like.shape, like.stride())
        return made


def _mode_of(value: Any) -> Any:
    if value.is_conj() or value.is_neg():
        raise DifferentError("values that are conjugate or negative views")
    return value.fake_mode
