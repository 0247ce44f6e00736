"""One limit in bytes for a model in parts: what the parts take together, and the share that each of them gets.

A model's parts run one after the other, and backward in the reverse order. While a part runs forward, everything is
alive that the parts before it keep for backward; while it runs backward, that and the gradients of the parts behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from graphopt.ir.context import UNLIMITED
from graphopt.ir.memory.timeline import MemoryTimeline
from graphopt.ir.node import Phase, info, value_of
from graphopt.ir.program import Program
from graphopt.ir.words.written_units import format_bytes
from graphopt.rewriting.memory.fit.budget import BudgetError
from graphopt.rewriting.memory.recompute.checkpoint_segments import has_segments
from graphopt.rewriting.pipeline import Pipeline

__all__ = ["PartBytes", "Rewrites", "Together", "fit_together", "timeline"]

_HALVINGS = 3
"""How often the range between the smallest plans and the largest is halved."""


@dataclass(frozen=True)
class PartBytes:
    """The bytes of one part of a model.

    Attributes:
        memory: of its program.
        begins: the number of the first call of its backward.
        kept: what it allocates in forward and backward needs, or its caller.
        gradients: of its parameters.
        times: how often it runs in one call of the model.
        segments: whether calls are recomputed because the model asks for it (``torch.utils.checkpoint``).
    """

    memory: MemoryTimeline
    begins: int
    kept: int
    gradients: int
    times: int
    segments: bool

    @classmethod
    def of(cls, program: Program, times: int) -> PartBytes:
        """The bytes of a joint program that runs so many times in a call of a model."""
        memory = program.memory()
        forward = [place for place, node in enumerate(memory.nodes) if info(node).phase is Phase.FORWARD]
        begins = forward[-1] + 1 if forward else 0
        kept = sum(s.bytes for s in memory.storages if 0 <= s.first < begins <= s.last)
        trained = {spec.target for value, spec in program.outputs_of("gradient") if value is not None}
        parameters = [value_of(node) for node, spec in program.inputs_of("parameter") if spec.target in trained]
        gradients = sum(p.numel() * p.element_size() for p in parameters)
        return cls(memory, begins, kept, gradients, times, has_segments(program))


@dataclass(frozen=True)
class Together:
    """Plans for all parts of a model.

    Attributes:
        made: what stands for the program of each part.
        peak: of all of them, in bytes, as predicted.
        limit: in bytes.
    """

    made: list[Any]
    peak: int
    limit: int


class Rewrites(Protocol):
    """The programs that passes make of one part."""

    def within(self, room: int) -> tuple[PartBytes, Any]:
        """The bytes of the program within ``room`` bytes, or of the smallest one, and what stands for it."""
        ...


def timeline(parts: Sequence[PartBytes], resident: int) -> MemoryTimeline:
    """Bytes over the calls of all parts: forward in order, each as often as it runs at most, then backward.

    Args:
        parts: in the order in which they run.
        resident: bytes of all parameters, buffers and arguments of the model.
    """
    runs = [part for part in parts for _ in range(part.times)]
    nodes, amounts = [], []
    before = [sum(part.kept for part in runs[:place]) for place in range(len(runs))]
    for part, kept in zip(runs, before, strict=True):
        nodes += part.memory.nodes[: part.begins]
        amounts += [resident + kept + now - part.memory.resident_bytes for now in part.memory.bytes[: part.begins]]
    gradients = 0
    for part, kept in reversed(list(zip(runs, before, strict=True))):
        around = resident + kept + gradients - part.memory.resident_bytes
        nodes += part.memory.nodes[part.begins :]
        amounts += [around + now for now in part.memory.bytes[part.begins :]]
        gradients += part.gradients
    return MemoryTimeline(nodes, amounts, resident, [], [0] * len(nodes), {})


def fit_together(parts: Sequence[Rewrites], pipeline: Pipeline, resident: int) -> Together:
    """Plan the programs of all parts so that together they are within the limit of the passes.

    Each part may take a share of the bytes between its smallest peak and that without a plan, the same share for all
    of them, and the largest that fits. A part with segments of its own may take up to the whole limit: nothing has to
    be recomputed for them where there is room.

    Args:
        parts: in the order in which they run.
        pipeline: with the passes that have a limit.
        resident: bytes of all parameters, buffers and arguments of the model.

    Raises:
        BudgetError: where the smallest plans of all parts together are above the limit.
    """
    given = [part.within(UNLIMITED) for part in parts]
    whole = timeline([found for found, _ in given], resident)
    limits = [(limit, current) for current in pipeline.passes if (limit := current.limit(whole)) is not None]
    limit, lowest = min(limits, key=lambda pair: pair[0])
    free = [
        part.within(limit) if found.segments else (found, made)
        for part, (found, made) in zip(parts, given, strict=True)
    ]
    needed = timeline([found for found, _ in free], resident).peak_bytes
    if needed <= limit:
        return Together([made for _, made in free], needed, limit)
    small = [part.within(0) for part in parts]
    best, peak = small, timeline([found for found, _ in small], resident).peak_bytes
    if peak > limit:
        raise BudgetError(
            f"no plan fits into {format_bytes(limit)} ({limit} bytes): in {len(parts)} parts the model's smallest peak "
            f"is {peak} bytes ({format_bytes(peak)}), of which {format_bytes(resident)} are parameters, buffers and "
            "inputs",
            peak,
            limit,
        ).in_shares(getattr(lowest, "budget", None))
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        share = (low + high) / 2
        tried = [
            part.within(_between(least[0], most[0], share)) if _differ(least[0], most[0]) else most
            for part, least, most in zip(parts, small, free, strict=True)
        ]
        reached = timeline([found for found, _ in tried], resident).peak_bytes
        if reached <= limit:
            best, peak, low = tried, reached, share
        else:
            high = share
    return Together([made for _, made in best], peak, limit)


def _differ(least: PartBytes, most: PartBytes) -> bool:
    """Whether there is anything between the smallest plan of a part and none."""
    return (least.memory.peak_bytes, least.kept) != (most.memory.peak_bytes, most.kept)


def _between(least: PartBytes, most: PartBytes, share: float) -> int:
    low, high = least.memory.peak_bytes, most.memory.peak_bytes
    return low + int(share * (high - low))
