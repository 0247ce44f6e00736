"""Values that forward keeps for backward, stored in 8 or 4 bits an element."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from torch import fx

from graphopt.errors import GraphoptError, wrong_argument
from graphopt.ir.ops import schema
from graphopt.ir.program import Program
from graphopt.rewriting.memory.compress.compressible_values import KeptValue, kept_values
from graphopt.rewriting.memory.compress.compression import Compression, left_lines, name_of, waiting
from graphopt.rewriting.memory.recompute.checkpoint_segments import leaves_segments
from graphopt.rewriting.pass_ import Changed, Numerics, Pass, PassStage

__all__ = ["CompressActivations"]

_ORIGIN = "compress-activations"


@final
@dataclass(frozen=True)
class CompressActivations(Pass):
    """Store what forward keeps for backward in 8 or 4 bits an element.

    Behind its last reader in forward, a value becomes bytes: in groups of elements, each with its smallest element and
    a step, elements are steps above the smallest one, rounded at random so that their expectation is what they were.
    Backward makes the value again in front of its first reader. Forward is exact; gradients of weights get noise
    without bias. The value with which backward begins, which is made again at once, stays as it is where the peak would
    rise otherwise, unless it is named.

    Which values: those that backward reads as numbers that may be a little off, such as operands of products and
    convolutions, inputs of activations and norms, and in 8 bits log-probabilities. Never masks, indices, statistics,
    inputs and parameters; the record says which calls kept how many bytes as they are. An element is less than a step
    away from what it was: the range of its group over 255 (8 bits) or 15 (4 bits). The zeros of ``relu``, which decide
    in backward, are kept, and its other elements stay positive, in steps of the range over 254 or 14. A group with an
    element that is not finite is nowhere finite behind it but for such zeros, so that checks of gradients see it.

    Each step draws one number from the CPU's default generator, and all rounding follows from it: two runs from one
    seed are equal to the last bit. Masks of dropout are other ones than without the pass.

    Source: Chen et al., ActNN, ICML 2021 (arXiv 2104.14129).

    Args:
        bits: of an element, 8 or 4.
        group: elements that share a smallest one and a step (8 bytes), a multiple of 8.
        tensors: names or globs of forward tensors; empty for all that may be.
        min_bytes: smaller values stay as they are.

    Raises:
        GraphoptError: for a name that is unknown, or of a value that may not be stored so, with the call that reads it.

    Example:
        >>> passes = [CompressActivations(min_bytes=1000)]
        >>> step = graphopt.optimize_step(model, optimizer, passes, loss=loss).prepare(x)
        >>> step.records[0].changed.counts
        {'values': 4, 'bits': 8}
    """

    name: ClassVar[str] = "compress-activations"
    stage: ClassVar[PassStage] = "joint"
    numerics: ClassVar[Numerics] = "changes"
    after: ClassVar[tuple[str, ...]] = (
        "mixed-precision",
        "scale-loss",
        "float8",
        "chunk-loss",
        "chunk",
        "recompute",
        "recompute-evenly",
    )
    draws: ClassVar[bool] = True
    fixed_sizes: ClassVar[bool] = True

    bits: int = 8
    group: int = 256
    tensors: tuple[str, ...] = ()
    min_bytes: int = 65_536

    def __post_init__(self) -> None:
        if self.bits not in (4, 8) or isinstance(self.bits, bool):
            raise wrong_argument("bits", self.bits, "8 or 4")
        if isinstance(self.group, bool) or not isinstance(self.group, int) or self.group < 8 or self.group % 8:
            raise wrong_argument("group", self.group, "a multiple of 8 elements, such as 256")
        if isinstance(self.min_bytes, bool) or not isinstance(self.min_bytes, int) or self.min_bytes < 0:
            raise wrong_argument("min_bytes", self.min_bytes, "a number of bytes of at least 0")

    @leaves_segments
    def apply(self, program: Program) -> Changed:
        """See the class; rewrites a joint program."""
        how = Compression(self.bits, self.group, _ORIGIN)
        if how.is_in(program):
            return Changed(reason="values of this program are compressed already")
        everything = list(kept_values(program, self.bits))
        kept = [value for value in everything if value.bytes >= self.min_bytes]
        if self.tensors:
            chosen = [value for value in self._named(program, kept) if how.bytes(value) < value.bytes]
        else:
            smaller = [value for value in kept if not value.obstacle and how.bytes(value) < value.bytes]
            early = set(waiting(program, everything))
            fewer = [value for value in smaller if value in early]
            chosen = how.without_higher_peak(program, smaller, fewer)
        others = left_lines(value for value in kept if value not in chosen)
        if not chosen:
            return Changed(reason="; ".join(["nothing that waits for backward can be compressed", *others]))
        how.apply(program, chosen)
        return Changed(
            counts={"values": len(chosen), "bits": self.bits},
            tensors=tuple(name_of(value.node) for value in chosen),
            lines=(how.line(chosen), *others),
        )

    def _named(self, program: Program, kept: list[KeptValue]) -> list[KeptValue]:
        """The values that names and globs stand for; what a glob matches and may not be compressed is left."""
        by_node = {value.node: value for value in kept}
        found: dict[fx.Node, KeptValue] = {}
        for pattern in self.tensors:
            refused: dict[str, str] = {}
            for name, node in program.find(pattern).items():
                value = by_node.get(schema.storage_root(node))
                if value is None:
                    refused[name] = f"it is smaller than {self.min_bytes} bytes, or does not wait for backward"
                elif value.obstacle:
                    refused[name] = value.obstacle
                else:
                    found[value.node] = value
            if refused and not any(schema.storage_root(node) in found for node in program.find(pattern).values()):
                name, reason = next(iter(refused.items()))
                raise GraphoptError(f"{name!r} cannot be compressed: {reason}")
        return list(found.values())
