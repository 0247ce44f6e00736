"""The segments that a model's own calls of ``torch.utils.checkpoint`` make, and a program without them.

A capture honours them: what they drop is recomputed in backward. To a planner they are a hint about what may be
recomputed, so it begins from the program in which nothing does.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from torch import fx

from graphopt import _torch
from graphopt.ir.node import Phase, info, own_phase, set_info
from graphopt.ir.ops import schema
from graphopt.ir.ops.layers.rms_norm import without_statistics
from graphopt.ir.program import Program
from graphopt.rewriting.memory.recompute.replay import (
    can_recompute,
    forget_generator,
    is_replayable,
    replayed_result,
    stale_values,
)
from graphopt.rewriting.pass_ import Changed

__all__ = ["CHECKPOINT", "Segments", "has_segments", "is_asked_for", "leaves_segments", "undo_recomputation"]

Apply = TypeVar("Apply", bound=Callable[..., Changed])

CHECKPOINT = "torch.utils.checkpoint"
"""The origin of what is recomputed because the model asks for it."""


@dataclass(frozen=True, slots=True)
class Segments:
    """What a model's own segments do with the values of forward that backward needs, by the names of the calls.

    Attributes:
        drops: that they recompute.
        keeps: that they keep.
    """

    drops: frozenset[str]
    keeps: frozenset[str]

    def counts(self, again: Iterable[str] = ()) -> dict[str, int]:
        """How many values are kept that they drop, and recomputed that they keep, where these calls are recomputed."""
        names = set(again)
        return {"kept of checkpoint()": len(self.drops - names), "dropped beside checkpoint()": len(self.keeps & names)}

    def line(self, again: Iterable[str] = ()) -> str:
        """The same, for people."""
        kept, dropped = self.counts(again).values()
        return f"the model's checkpoint() segments: {kept} values kept that they drop, {dropped} dropped that they keep"


def has_segments(program: Program) -> bool:
    """Whether something is recomputed because the model asks for it."""
    return any(map(is_asked_for, program.graph.nodes))


def leaves_segments(apply: Apply) -> Apply:
    """For ``apply`` of a pass: where it leaves the model's own segments as they are, its record says so."""

    @functools.wraps(apply)
    def told(self: Any, program: Program) -> Changed:
        changed = apply(self, program)
        calls = [node for node in program.graph.nodes if is_asked_for(node) and not _is_part(node)]
        line = f"the model's checkpoint() segments stay as they are: {len(calls)} ops are recomputed for them"
        return replace(changed, lines=(*changed.lines, line)) if calls and line not in changed.lines else changed

    return cast(Apply, told)


def undo_recomputation(program: Program) -> tuple[Program, Segments] | None:
    """A program in which nothing is recomputed because the model asks for it: forward keeps what backward reads.

    Results, buffers and the random stream are the same to the last bit: what ran again gave what its first run had
    given. What other passes recompute still is.

    Args:
        program: of stage joint or step; is only read.

    Returns:
        a copy, with what the segments drop and keep; None without segments.
    """
    if not has_segments(program):
        return None
    trial = program.copy()
    undoing = _Undoing(trial)
    undoing.run()
    return trial, undoing.segments()


def _is_again(node: fx.Node) -> bool:
    return node.op == "call_function" and own_phase(node) is Phase.RECOMPUTE


def is_asked_for(node: fx.Node) -> bool:
    """Whether a call is recomputed because the model asks for it."""
    return _is_again(node) and info(node).origin == CHECKPOINT


def _is_part(node: fx.Node) -> bool:
    """Whether a call gives what another one has made: an element of it, or a view."""
    return node.target is operator.getitem or schema.is_view(node)


class _Undoing:
    """Lets all that reads a second run read the first one, which is found by op and arguments."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._stale = stale_values(program)
        self._alike: dict[Any, list[fx.Node]] = {}
        self._same: dict[fx.Node, fx.Node] = {}
        self._replaced: dict[fx.Node, fx.Node] = {}
        self._dropped: dict[fx.Node, None] = {}

    def run(self) -> None:
        for node in self._program.nodes:
            if node.op == "call_function" and own_phase(node) is Phase.FORWARD:
                self._enter(node)
            elif node.op == "call_function" and own_phase(node) is Phase.RECOMPUTE:
                self._again(node)
        for node in reversed(self._replaced):
            self._program.graph.erase_node(node)
        again = {
            self._same[node] for node in self._program.phase_nodes(*Phase) if _is_again(node) and node in self._same
        }
        for node in [*self._dropped]:
            if self._same.get(node, node) not in again:
                self._runs_once(node)

    def segments(self) -> Segments:
        """What the segments do with the values that backward reads."""
        late = {
            node
            for node in self._program.phase_nodes(*Phase)
            if own_phase(node) is Phase.FORWARD
            and not _is_part(node)
            and any(own_phase(reader) is not Phase.FORWARD for reader in schema.readers(node))
        }
        dropped = {schema.maker(node) for node in self._dropped}
        return Segments(frozenset(n.name for n in late & dropped), frozenset(n.name for n in late - dropped))

    def _enter(self, node: fx.Node) -> None:
        """Note a call of forward, beside those before it that give the same."""
        if not can_recompute(node) or schema.is_random(node):
            return
        alike = self._alike.setdefault(self._form(node.target, node.args, node.kwargs), [])
        alike.append(node)
        self._same[node] = alike[0]
        pure = without_statistics(node)
        if pure is not None:
            self._alike.setdefault(self._form(pure[0], pure[1], {}), []).append(node)

    def _form(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Equal for calls that give the same; types and signs of numbers count."""
        first = _torch.map_aggregate((args, kwargs), lambda a: self._same.get(a, a) if isinstance(a, fx.Node) else a)
        return target, repr(first)

    def _again(self, node: fx.Node) -> None:
        """Find the first run of an op that is recomputed, and let it be read where the model asks for the second."""
        first = self._first_run(node)
        if first is None:
            if is_asked_for(node):
                self._to_forward(node)
            return
        self._same[node] = self._same.get(first, first)
        if is_asked_for(node):
            node.replace_all_uses_with(first)
            self._replaced[node] = first
            self._dropped[first] = None

    def _first_run(self, node: fx.Node) -> fx.Node | None:
        if node.target is _torch.run_with_rng_state:
            state = node.args[0]
            return replayed_result(self._program, state) if isinstance(state, fx.Node) else None
        alike = self._alike.get(self._form(node.target, node.args, node.kwargs), ())
        return next((first for first in alike if _first_names(node) == info(first).names), next(iter(alike), None))

    def _to_forward(self, node: fx.Node) -> None:
        """What backward alone reads has no first run there, since nothing has read it: its one run is that."""
        sources = node.all_input_nodes
        if any(own_phase(source) is not Phase.FORWARD or source in self._stale for source in sources):
            return
        first = next(self._program.phase_nodes(*Phase))
        max([source for source in sources if source.op != "placeholder"], default=first.prev).append(node)
        known, part = info(node), info(node).batch_slice
        moved: dict[str, Any] = {"phase": Phase.FORWARD}
        if part is not None:
            moved = {"batch_slice": part._replace(phase=Phase.FORWARD)}
        set_info(node, replace(known, names=_first_names(node), origin="capture", **moved))
        self._enter(node)
        self._dropped[node] = None

    def _runs_once(self, node: fx.Node) -> None:
        """Take back what is noted of a call that ran again, and the state that it has saved for that."""
        set_info(node, replace(info(node), policy=None))
        if is_replayable(node):
            plain = forget_generator(self._program, node)
            del self._dropped[node]
            self._dropped[plain] = None


def _first_names(node: fx.Node) -> tuple[str, ...]:
    """What the first run of a call is called that runs a second time."""
    return tuple(name.removesuffix("'") for name in info(node).names)
