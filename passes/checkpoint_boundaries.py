"""Marks at checkpoints: synchronise the device there, and time the segments between them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import fx

from graphopt.errors import GraphoptError
from graphopt.ir.node import Phase, Policy, info, value_of
from graphopt.ir.ops.boundary import boundary
from graphopt.ir.program import Program
from graphopt.rewriting.memory.recompute.checkpoint_segments import leaves_segments
from graphopt.rewriting.pass_ import Changed, Numerics, Pass, PassStage

__all__ = ["CheckpointBoundaries"]

_ORIGIN = "checkpoint-boundaries"
_RECOMPUTE = "recompute"
_KEPT = (Policy.MUST_SAVE, Policy.MUST_CPU_OFFLOAD)


@final
@dataclass(frozen=True)
class CheckpointBoundaries(Pass):
    """Mark where the segments between checkpoints begin, in forward and in backward: to synchronise, and to time them.

    A mark stands at the start of forward, behind each checkpoint, in front of what ``Recompute`` recomputes for
    each segment, and behind the last call of backward. ``graphopt.ir.ops.boundary.timings()`` has the seconds between
    marks; ``reset()`` there starts anew. In a drop-in model the interval behind the last checkpoint includes your loss.

    Marks compute nothing and take no memory; they hold up the device where they synchronise. On CUDA, times without
    ``synchronize`` are those of launching. A backend that compiles may leave marks out or move them.

    Args:
        synchronize: wait at each mark until the device is done with all it was given; a CPU always is.
        profile: time what lies between marks.

    Raises:
        GraphoptError: where neither is asked for.

    Example:
        >>> passes = [Recompute("blocks.*"), CheckpointBoundaries()]
        >>> step = graphopt.optimize_step(model, optimizer, passes, loss=loss).prepare(x)
        >>> step.records[-1].name
        'checkpoint-boundaries'
    """

    name: ClassVar[str] = "checkpoint-boundaries"
    stage: ClassVar[PassStage] = "last"
    numerics: ClassVar[Numerics] = "bitwise"
    after: ClassVar[tuple[str, ...]] = ("fuse-update", "fit-memory", "partition-checkpoints", "offload")

    synchronize: bool = True
    profile: bool = False

    def __post_init__(self) -> None:
        if not (self.synchronize or self.profile):
            raise GraphoptError("neither synchronize nor profile is asked for: leave checkpoint-boundaries out")

    @leaves_segments
    def apply(self, program: Program) -> Changed:
        """See the class; rewrites the program that runs."""
        if any(node.target is boundary for node in program.nodes):
            return Changed(reason="the boundaries of this program are marked already")
        checkpoints = _checkpoints(program)
        segments = list(_segments(program))
        if not checkpoints and not segments:
            return Changed(reason="the program has no checkpoints: give Recompute(...) too")
        names = list(checkpoints)
        for name, following in zip(names, [*names[1:], "backward"], strict=True):
            self._mark_behind(program, checkpoints[name], f"forward {name} .. {following}")
        for name, node in segments:
            self._mark_before(program, node, f"backward {name}")
        self._mark_ends(program, names[0] if names else "backward")
        return Changed(
            counts={"marks": len(checkpoints) + len(segments) + 2},
            tensors=tuple(names),
            lines=("graphopt.ir.ops.boundary.timings() has the times",) if self.profile else (),
        )

    def _mark_ends(self, program: Program, first: str) -> None:
        calls = [node for node in program.phase_nodes(Phase.FORWARD) if _tensor_read_by(node) is not None]
        self._mark_before(program, calls[0], f"forward start .. {first}")
        late = [node for node in program.phase_nodes(Phase.BACKWARD, Phase.RECOMPUTE) if _is_tensor(node)]
        self._mark_behind(program, late[-1], "")

    def _mark_before(self, program: Program, call: fx.Node, name: str) -> None:
        """Mark the moment in front of a call."""
        program.insert(boundary, self._arguments(_tensor_read_by(call), name), before=call, **_told(call, name))

    def _mark_behind(self, program: Program, tensor: fx.Node, name: str) -> None:
        """Mark the moment at which a tensor is there."""
        program.insert(boundary, self._arguments(tensor, name), after=tensor, **_told(tensor, name))

    def _arguments(self, tensor: fx.Node | None, name: str) -> tuple[fx.Node | None, str, bool, bool]:
        return tensor, name, self.synchronize, self.profile


def _told(place: fx.Node, name: str) -> dict[str, Any]:
    """Of what phase a mark is, and where it comes from."""
    return {"phase": info(place).phase, "like": place, "origin": f"{_ORIGIN}: {name or 'end'}"}


def _checkpoints(program: Program) -> dict[str, fx.Node]:
    """The checkpoints by name, in the order in which forward makes them; of a partitioned one the whole."""
    named = program.names()
    found: dict[str, fx.Node] = {}
    for node in program.phase_nodes(Phase.FORWARD):
        if info(node).policy in _KEPT:
            name = (info(node).names or (node.name,))[0].removesuffix("/part")
            found[name] = named.get(name, node)
    position = {node: index for index, node in enumerate(program.graph.nodes)}
    return dict(sorted(found.items(), key=lambda item: position[item[1]]))


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(value_of(node), torch.Tensor)


def _tensor_read_by(node: fx.Node) -> fx.Node | None:
    """A tensor that is there when a call runs; one on its device, not a generator's state, which is on the host."""
    tensors = [source for source in node.all_input_nodes if _is_tensor(source)]
    return next(
        (source for source in tensors if value_of(source).device.type != "cpu"), tensors[0] if tensors else None
    )


def _segments(program: Program) -> Iterator[tuple[str, fx.Node]]:
    """The name and the first call of what is recomputed for each segment, in the order in which that happens."""
    seen: set[str] = set()
    for node in program.phase_nodes(Phase.RECOMPUTE):
        known = info(node)
        if known.made_by == _RECOMPUTE and known.made_for not in seen and _tensor_read_by(node) is not None:
            seen.add(known.made_for)
            yield known.made_for, node
