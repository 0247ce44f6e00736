"""Recomputation at named checkpoints."""

from __future__ import annotations

import math
import operator
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import fx

from graphopt.errors import GraphoptError
from graphopt.ir.node import Phase, Policy, info, value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.layers.dropout import masked_dropout
from graphopt.ir.ops.values import storage_bytes
from graphopt.ir.program import Program
from graphopt.ir.words.written_units import counted, format_bytes
from graphopt.rewriting.memory.recompute.checkpoint_segments import leaves_segments
from graphopt.rewriting.memory.recompute.rematerialize import Rematerialized, recomputed, rematerialize
from graphopt.rewriting.memory.recompute.replay import can_recompute
from graphopt.rewriting.pass_ import Changed, Numerics, Pass, PassStage

__all__ = ["Recompute"]

_ORIGIN = "recompute"
"""How the provenance of what this pass makes begins."""


@final
@dataclass(frozen=True)
class Recompute(Pass):
    """Keep only checkpoints of forward, and compute the rest again in backward, just before it is needed.

    The forward program is cut into segments at the named tensors. Between two checkpoints nothing is kept; what comes
    after the last checkpoint is kept as usual, since backward starts there. A value made in one segment and read by
    forward in another is kept too, and listed: better checkpoints would avoid it. Random ops replay the generator's
    state, so results, gradients and the random stream equal eager's to the last bit.

    After Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016 (arXiv 1604.06174).

    Args:
        checkpoints: names or globs of forward tensors (``blocks.*``, ``encoder.layer.3``, ``layers.*::mm``), in any
            order; ``"auto"`` takes about the square root of all tensors that cut the network in two.

    Raises:
        GraphoptError: for a name that is unknown, or that is not a tensor of forward.

    Example:
        >>> step = graphopt.optimize_step(model, optimizer, [Recompute("blocks.*")], loss=loss).prepare(x)
        >>> record = step.records[0]
        >>> record.peak_after < record.peak_before
        True
    """

    name: ClassVar[str] = "recompute"
    stage: ClassVar[PassStage] = "joint"
    numerics: ClassVar[Numerics] = "bitwise"
    in_parts: ClassVar[bool] = True
    after: ClassVar[tuple[str, ...]] = ("mixed-precision", "float8", "chunk-loss", "chunk")

    checkpoints: tuple[str, ...]

    def __init__(self, checkpoints: str | tuple[str, ...] | list[str]) -> None:
        given = (checkpoints,) if isinstance(checkpoints, str) else tuple(checkpoints)
        bad = [item for item in given if not isinstance(item, str)]
        if bad:
            raise TypeError(f"checkpoints are names of tensors (text), got {bad[0]!r}")
        object.__setattr__(self, "checkpoints", given)

    @leaves_segments
    def apply(self, program: Program) -> Changed:
        """See the class; rewrites a joint program."""
        automatic = self.checkpoints == ("auto",) and "auto" not in program.names()
        if automatic and _is_recomputing(program):
            return Changed(reason="checkpoints have been chosen for this program already")
        chosen = _square_root_choice(program) if automatic else self._named(program)
        if not chosen:
            return Changed(reason=f"{self._none(automatic)}, so everything is kept")
        plan = _Plan(program, chosen)
        program.set_policy(plan.kept_roots, Policy.MUST_SAVE)
        if not _count_ops(recomputed(program, plan.recomputed)):
            return Changed(reason="backward reads nothing between these checkpoints that is not kept anyway")
        origins = {node: f"{_ORIGIN}: {plan.segment_name(node)}" for node in plan.recomputed}
        done = rematerialize(program, plan.recomputed, origin=origins)
        counts = {
            "recomputed": _count_ops(done.clones),
            "checkpoints": len(plan.kept_roots),
            "random ops replayed": len(done.replayed),
        }
        return Changed(counts, tensors=tuple(chosen), lines=(*plan.report(), *_refused(done)))

    def _none(self, automatic: bool) -> str:
        """Why there are no checkpoints."""
        if automatic:
            return "auto finds no tensor that separates the network in two"
        return (
            "none of the checkpoints is in this part of the model" if self.checkpoints else "no checkpoints are given"
        )

    def _named(self, program: Program) -> dict[str, fx.Node]:
        found = program.find(*self.checkpoints)
        # a glob stands for what can be a checkpoint; only a name has to be one
        usable = {name: node for name, node in found.items() if name in self.checkpoints or _can_be_kept(node)}
        for name, node in (usable or found).items():
            if info(node).phase is not Phase.FORWARD:
                raise GraphoptError(
                    f"{name!r} cannot be a checkpoint: it is computed in {info(node).phase.value}, and a checkpoint is "
                    "a tensor of forward (names of backward tensors hold a ~)"
                )
            if schema.mutated_inputs(node):
                raise GraphoptError(
                    f"{name!r} cannot be a checkpoint: it is a write into {node.args[0]}, not a new tensor"
                )
        return usable


def _can_be_kept(node: fx.Node) -> bool:
    return info(node).phase is Phase.FORWARD and not schema.mutated_inputs(node)


def _is_recomputing(program: Program) -> bool:
    """Whether this pass has run on the program."""
    return any(info(node).made_by == _ORIGIN for node in program.phase_nodes(Phase.RECOMPUTE))


def _count_ops(nodes: Iterable[fx.Node]) -> int:
    """How many of the nodes compute something: elements of tuples and views do not."""
    return sum(1 for node in nodes if node.target is not operator.getitem and not schema.is_view(node))


def _refused(done: Rematerialized) -> list[str]:
    """What lies between checkpoints and backward reads, but may not run twice."""
    return [
        f"{(info(node).names or (node.name,))[0]} is kept ({_bytes(node)}): {reason}"
        for node, reason in done.kept.items()
    ]


def _bytes(node: fx.Node) -> str:
    value = value_of(node)
    return format_bytes(storage_bytes(value)) if isinstance(value, torch.Tensor) else "several tensors"


def _square_root_choice(program: Program) -> dict[str, fx.Node]:
    """Cut after each √n-th part of the bytes that forward keeps for backward, at a separating tensor."""
    candidates = program.checkpoint_candidates()
    nodes = {node.name: node for node in program.graph.nodes}
    parts = max(1, round(math.sqrt(len(candidates))))
    share = sum(c.saves + c.bytes for c in candidates) / parts
    chosen: dict[str, fx.Node] = {}
    passed = 0
    for candidate in candidates[:-1]:
        passed += candidate.saves + candidate.bytes
        if passed >= share * (len(chosen) + 1):
            chosen[candidate.name] = nodes[candidate.node]
    return chosen


class _Plan:
    """Which segment every forward op is in, and so what is kept and what is recomputed."""

    def __init__(self, program: Program, chosen: dict[str, fx.Node]) -> None:
        self._order = {node: index for index, node in enumerate(program.graph.nodes)}
        self._names = {schema.storage_root(node): name for name, node in reversed(chosen.items())}
        self.kept_roots = self._in_order(root for root in self._names if root.op != "placeholder")
        self._cuts = [self._order[root] for root in self.kept_roots]
        self._cut_names = [self._names[root] for root in self.kept_roots]
        repeatable = [node for node in self._before_last_cut(program) if can_recompute(node)]
        crossing = self._crossing(repeatable)
        self.crossing = self._in_order(node for node in crossing if isinstance(value_of(node), torch.Tensor))
        kept = {*self._checkpoints(), *crossing}
        self.recomputed = [node for node in repeatable if node not in kept]

    def _in_order(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        return sorted(nodes, key=self._order.__getitem__)

    def _before_last_cut(self, program: Program) -> list[fx.Node]:
        """Forward up to the last checkpoint; what comes after it is kept as usual."""
        return [node for node in program.phase_nodes(Phase.FORWARD) if self._segment(node) < len(self._cuts)]

    def _checkpoints(self) -> set[fx.Node]:
        """The checkpoints, and what is made along with them."""
        return {*self._names, *(sibling for root in self._names for sibling in _siblings(root))}

    def _crossing(self, nodes: Iterable[fx.Node]) -> set[fx.Node]:
        """What forward makes in one segment and reads in another, but for the checkpoints."""
        roots = {schema.storage_root(node) for node in nodes if self._crosses(node)}
        return {root for root in roots if root.op != "placeholder"} - self._checkpoints()

    def _segment(self, node: fx.Node) -> int:
        """Segments are numbered from 0; what comes after the last checkpoint has number ``len(cuts)``."""
        return bisect_left(self._cuts, self._order[node])

    def _crosses(self, node: fx.Node) -> bool:
        """Whether forward reads a value outside of the segment that makes it, or returns it."""
        mine = self._segment(node)
        for user in node.users:
            if user.op == "output":
                return True
            if (
                info(user).phase is Phase.FORWARD
                and self._segment(user) != mine
                and user.target is not operator.getitem
            ):
                return True
        return False

    def segment_name(self, node: fx.Node) -> str:
        """The segment of a forward node, called after the checkpoints around it."""
        number = min(self._segment(node), len(self._cut_names) - 1)
        start = self._cut_names[number - 1] if number else "start"
        return f"{start} .. {self._cut_names[number]}"

    def report(self) -> list[str]:
        """What crosses a segment's border and is kept, largest first."""
        rows = sorted(((storage_bytes(value_of(n)), n) for n in self.crossing), key=lambda row: -row[0])
        lines = []
        if rows:
            total = sum(size for size, _ in rows)
            lines.append(
                f"kept, since they cross a segment's border: {counted(len(rows), 'tensors')} ({format_bytes(total)}); "
                "better checkpoints would avoid them:"
            )
        for size, node in rows:
            known = info(node)
            lines.append(
                f"  {known.names[0] if known.names else node.name}: {format_bytes(size)}  {known.source}".rstrip()
            )
        return lines


def _siblings(node: fx.Node) -> list[fx.Node]:
    """The other results of the op that made a checkpoint, or its mask: to keep them saves running the op again."""
    if node.target is masked_dropout:
        return [node.args[1]]  # type: ignore[list-item]
    if node.target is not operator.getitem:
        return []
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return [source, *(user for user in source.users if user is not node)]
