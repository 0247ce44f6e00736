"""Values that forward keeps for backward, stored in 8 or 4 bits an element."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from torch import fx

from graphopt.errors import GraphoptError, wrong_argument
from graphopt.ir.node import Phase, info, value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.quantize import dequantize, quantize, quantized_bytes, rounding_seed
from graphopt.ir.ops.values import format_bytes
from graphopt.ir.program import Program
from graphopt.rewriting.memory.compressible_values import KeptValue, kept_values
from graphopt.rewriting.memory.recompute_plan import Again, recompute
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
    without bias. The value with which backward begins stays as it is, unless it is named.

    Which values: those that backward reads as numbers that may be a little off, such as operands of products and
    convolutions, inputs of activations and norms. Never masks, indices, statistics, inputs and parameters; the record
    says which calls kept how many bytes as they are. An element is less than a step away from what it was: the range of
    its group over 255 (8 bits) or 15 (4 bits). The zeros of ``relu``, which decide in backward, are kept, and its other
    elements stay positive, in steps of the range over 254 or 14. A group with an element that is not finite is nowhere
    finite behind it but for such zeros, so that checks of gradients see it.

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

    def apply(self, program: Program) -> Changed:
        """See the class; rewrites a joint program."""
        if any(info(node).origin.startswith(f"{_ORIGIN}: ") for node in program.phase_nodes(Phase.FORWARD)):
            return Changed(reason="values of this program are compressed already")
        everything = list(kept_values(program))
        kept = [value for value in everything if value.bytes >= self.min_bytes]
        if self.tensors:
            chosen = self._named(program, kept)
        else:
            chosen = [value for value in _waiting(program, everything) if value in kept and not value.obstacle]
        chosen = [value for value in chosen if self._bytes(value) < value.bytes]
        others = _left(value for value in kept if value not in chosen)
        if not chosen:
            return Changed(reason="; ".join(["nothing that waits for backward can be compressed", *others]))
        self._insert(program, chosen)
        before, after = (sum(sizes) for sizes in zip(*((v.bytes, self._bytes(v)) for v in chosen), strict=True))
        line = (
            f"{format_bytes(before)} wait for backward as {format_bytes(after)}; an element is off by less than "
            f"1/{2**self.bits - 1} of the range of its {self.group}"
        )
        return Changed(
            counts={"values": len(chosen), "bits": self.bits},
            tensors=tuple(_name(value.node) for value in chosen),
            lines=(line, *others),
        )

    def _bytes(self, value: KeptValue) -> int:
        return quantized_bytes(value_of(value.node).numel(), self.bits, self.group)

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

    def _insert(self, program: Program, chosen: list[KeptValue]) -> None:
        first = next(program.phase_nodes(Phase.FORWARD))
        common = {"phase": Phase.FORWARD, "origin": f"{_ORIGIN}: seed"}
        seed = program.insert(rounding_seed, (), before=first, hint="rounding_seed", **common)  # type: ignore[arg-type]
        returned = [self._inserted(program, value, seed, key) for key, value in enumerate(chosen)]
        recompute(program, returned)

    def _inserted(self, program: Program, kept: KeptValue, seed: fx.Node, key: int) -> Again:
        node, value = kept.node, value_of(kept.node)
        origin = f"{_ORIGIN}: {_name(node)}"
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


def _name(node: fx.Node) -> str:
    return next(iter(info(node).names), node.name)


def _waiting(program: Program, kept: Sequence[KeptValue]) -> list[KeptValue]:
    """The values while which others begin to wait: not the last one, with which backward begins."""
    place = {node: index for index, node in enumerate(program.nodes)}
    return [
        value for value in kept if any(place[value.after] < place[other.node] < place[value.before] for other in kept)
    ]


def _left(values: Iterable[KeptValue]) -> list[str]:
    """A line for each reason for which values stay as they are, with their bytes."""
    bytes_: Counter[str] = Counter()
    for value in values:
        bytes_[value.obstacle or "nothing would be gained"] += value.bytes
    return [f"{format_bytes(total)} stay as they are: {reason}" for reason, total in bytes_.most_common()]
