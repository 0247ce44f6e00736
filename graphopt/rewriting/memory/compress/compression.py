"""Values that wait for backward in a few bits an element: put in behind forward's last reader, made again for backward.

Source: Chen et al., ActNN, ICML 2021 (arXiv 2104.14129).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import fx

from graphopt.ir.node import Phase, info, value_of
from graphopt.ir.ops.storage.quantize import dequantize, quantize, quantized_bytes, rounding_seed
from graphopt.ir.program import Program
from graphopt.ir.words.written_units import format_bytes
from graphopt.rewriting.memory.compress.compressible_values import KeptValue, kept_values
from graphopt.rewriting.memory.recompute.recompute_plan import Again, recompute

__all__ = ["Compression", "left_lines", "name_of", "waiting"]


@dataclass(frozen=True, slots=True)
class Compression:
    """How values are stored.

    Attributes:
        bits: of an element, 8 or 4.
        group: elements that share a smallest one and a step.
        origin: who asks.
    """

    bits: int
    group: int
    origin: str

    def bytes(self, value: KeptValue) -> int:
        """What is stored in place of a value."""
        return quantized_bytes(value_of(value.node).numel(), self.bits, self.group)

    def is_in(self, program: Program) -> bool:
        """Whether values of a program are compressed already."""
        return any(info(node).made_by == self.origin for node in program.phase_nodes(Phase.FORWARD))

    def line(self, chosen: Sequence[KeptValue]) -> str:
        """What was done to values, and how far off an element is, for people."""
        before, after = (sum(sizes) for sizes in zip(*((v.bytes, self.bytes(v)) for v in chosen), strict=True))
        return (
            f"{format_bytes(before)} wait for backward as {format_bytes(after)}; an element is off by less than "
            f"1/{2**self.bits - 1} of the range of its {self.group}"
        )

    def apply(self, program: Program, chosen: Sequence[KeptValue]) -> None:
        """Store values so; rewrites a program in place."""
        first = next(program.phase_nodes(Phase.FORWARD))
        common = {"phase": Phase.FORWARD, "origin": f"{self.origin}: seed"}
        seed = program.insert(rounding_seed, (), before=first, hint="rounding_seed", **common)  # type: ignore[arg-type]
        recompute(program, [self._inserted(program, value, seed, key) for key, value in enumerate(chosen)])

    def without_higher_peak(self, program: Program, values: list[KeptValue], fewer: list[KeptValue]) -> list[KeptValue]:
        """The values, or where the peak is lower with fewer of them, these; the program is only read."""
        if len(values) == len(fewer):
            return values
        peaks = []
        for chosen in (values, fewer):
            trial, names = program.copy(), {value.node.name for value in chosen}
            if names:
                self.apply(trial, [value for value in kept_values(trial, self.bits) if value.node.name in names])
            peaks.append(trial.memory().peak_bytes)
        return values if peaks[0] <= peaks[1] else fewer

    def _inserted(self, program: Program, kept: KeptValue, seed: fx.Node, key: int) -> Again:
        node, value = kept.node, value_of(kept.node)
        origin = f"{self.origin}: {name_of(node)}"
        packed = program.insert(
            quantize,
            (node, seed, key, self.bits, self.group, kept.zeros),
            after=kept.after,
            phase=Phase.FORWARD,
            origin=origin,
            like=node,
            hint=f"{node.name}_codes",
        )
        layout = (list(value.shape), list(value.stride()), value.dtype)
        made = program.insert(
            dequantize,
            (packed, self.bits, self.group, kept.zeros, *layout),
            before=kept.before,
            phase=Phase.BACKWARD,
            origin=origin,
            like=node,
            hint=f"{node.name}_again",
        )
        return Again(node, kept.before, origin, made)


def name_of(node: fx.Node) -> str:
    """What a value is called."""
    return next(iter(info(node).names), node.name)


def waiting(program: Program, kept: Sequence[KeptValue]) -> list[KeptValue]:
    """The values while which others begin to wait: not the last one, with which backward begins."""
    place = {node: index for index, node in enumerate(program.nodes)}
    return [
        value for value in kept if any(place[value.after] < place[other.node] < place[value.before] for other in kept)
    ]


def left_lines(values: Iterable[KeptValue]) -> list[str]:
    """A line for each reason for which values stay as they are, with their bytes."""
    bytes_: Counter[str] = Counter()
    for value in values:
        bytes_[value.obstacle or "nothing would be gained"] += value.bytes
    return [f"{format_bytes(total)} stay as they are: {reason}" for reason, total in bytes_.most_common()]
