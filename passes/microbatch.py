"""One step as several slices of its batch, whose gradients are added up inside of the program."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Literal, final

from torch import fx

from graphopt.errors import ArgumentError, GraphoptError, wrong_argument
from graphopt.ir.node import info, value_of
from graphopt.ir.ops.values import tensors_of
from graphopt.ir.program import Program
from graphopt.ir.words.written_units import format_bytes
from graphopt.rewriting.memory.chunk.batch_region import batch_inputs, batch_region
from graphopt.rewriting.memory.chunk.chunk_rows import chunked
from graphopt.rewriting.memory.chunk.row_regions import RowRegion, sizes_that_vary
from graphopt.rewriting.memory.chunk.token_rows import Rows
from graphopt.rewriting.memory.order.loss_in_place import chunks_in_place
from graphopt.rewriting.pass_ import Changed, Numerics, Pass, PassStage

__all__ = ["Microbatch"]

_ORIGIN = "microbatch"
_WORTH = 0.05
"""The share of the peak that twice as many slices have to save."""


@final
@dataclass(frozen=True)
class Microbatch(Pass):
    """Run forward and backward for one slice of the batch after another, and add their gradients up.

    What forward keeps for backward is then alive for one slice at a time, so activations take a part of their bytes in
    as many slices. It is still one step: the batch is given whole, the loss that comes back is that of the whole batch,
    and one update follows. Passes behind it (clipping, checks of gradients, exchange) see the sums.

    Losses are means or sums over samples, tokens or elements, also with ``ignore_index``, weights of classes, masks,
    and sums that are divided by what the whole batch counts: a slice gets its part of the whole batch's divisor, so
    slices need not be alike. What mixes samples is refused by its name and place: batch norm that trains, contrastive
    losses, a maximum over the batch; and what no rule knows. Values that belong to samples are followed through views
    and transposes by the program's own shapes.

    The gradient of a cross entropy takes the place of a slice's log-probabilities, unless a compiler makes the code.

    Masks of dropout are drawn for the whole batch in front, as without the pass, and so the random stream is as before.

    Sums over samples are added up in another order, slice by slice: losses and gradients equal the captured program's
    within rounding, ``rtol`` 1e-5 (float32) or 2e-2 (16 bits) of the largest element of each.

    What ``Recompute`` in front of it recomputes is recomputed for each slice. ``FitMemory`` behind it plans one
    slice, and each recomputes what it has to: the first one less, which has no gradients of others beside it.

    After Huang et al., GPipe, NeurIPS 2019 (arXiv 1811.06965), which has the slices of a batch; here on one device.

    Args:
        slices: how many, at most as many as there are samples; the last one may be smaller. ``auto`` takes the fewest
            that bring the peak as low as twice as many would, by the program's timeline, give or take 5 %.
        axis: which dimension of the batch numbers samples. Inputs that are as long as the first one along it are cut,
            and all others given whole to each slice.
        whole: names or globs of inputs that are given whole although they are as long, such as ``args[1]``.

    Raises:
        GraphoptError: without a loss in the program; for what mixes samples, with the call; for more slices than
            samples.

    Example:
        >>> step = graphopt.optimize_step(model, optimizer, [Microbatch(2)], loss=loss).prepare(x)
        >>> step.records[0].changed.counts["slices"]
        2
    """

    name: ClassVar[str] = "microbatch"
    stage: ClassVar[PassStage] = "joint"
    numerics: ClassVar[Numerics] = "tolerant"
    after: ClassVar[tuple[str, ...]] = ("mixed-precision", "scale-loss", "float8", "recompute", "recompute-evenly")
    conflicts: ClassVar[tuple[str, ...]] = ("chunk-loss", "chunk", "compress-activations")
    fixed_sizes: ClassVar[bool] = True

    slices: int | Literal["auto"] = "auto"
    axis: int = field(default=0, kw_only=True)
    whole: tuple[str, ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        if isinstance(self.axis, bool) or not isinstance(self.axis, int) or self.axis < 0:
            raise wrong_argument("axis", self.axis, "a dimension of the batch, counted from 0")
        if self.slices == "auto":
            return
        if isinstance(self.slices, bool) or not isinstance(self.slices, int):
            raise wrong_argument("slices", self.slices, "a number of slices, or 'auto'")
        if self.slices < 2:
            raise ArgumentError(f"microbatch: {self.slices} slices leave the step as it is: give 2 at least, or 'auto'")

    def apply(self, program: Program) -> Changed:
        """See the class; rewrites a joint program with a loss."""
        if any(node.op == "call_function" and info(node).made_by == _ORIGIN for node in program.nodes):
            return Changed(reason="the batch is in slices already")
        if not any(True for _ in program.outputs_of("loss")):
            raise GraphoptError(
                "microbatch needs the loss in the program, to know what slices of the batch are summed up by: use "
                "graphopt.optimize_step with loss="
            )
        region = self._region(program)
        slices = self._choose(program, region)
        if slices < 2:
            return Changed(reason=f"slices of the {region.rows} samples would not lower the peak")
        size = -(-region.rows // slices)
        calls = len(region.steps)
        whole = list(_written(region))
        given = [spec.target for node, spec in program.inputs_of("input") if node in self._batch(program)]
        chunked(program, region, slices, _ORIGIN)
        chunks_in_place(program, _ORIGIN)
        return Changed(
            counts={"slices": -(-region.rows // size), "calls for each": calls},
            tensors=tuple(given),
            lines=(f"{region.rows} samples, {size} at a time", *whole),
        )

    def _batch(self, program: Program) -> dict[fx.Node, Rows]:
        found = batch_inputs(program, self.axis, self.whole)
        if not found:
            raise GraphoptError(f"microbatch finds no input with a dimension {self.axis} that could number samples")
        return found

    def _region(self, program: Program) -> RowRegion:
        region = sizes_that_vary(program) or batch_region(program, self._batch(program))
        if isinstance(region, str):
            raise GraphoptError(f"microbatch cannot cut the batch into slices: {region}")
        if self.slices != "auto" and self.slices > region.rows:
            raise GraphoptError(
                f"microbatch: {self.slices} slices of {region.rows} samples: give at most {region.rows}"
            )
        return region

    def _choose(self, program: Program, region: RowRegion) -> int:
        if self.slices != "auto":
            return self.slices
        best, found = 1, program.memory(measure=False).peak_bytes
        for slices in _doubled(region.rows):
            trial = program.copy()
            chunked(trial, self._region(trial), slices, _ORIGIN)
            chunks_in_place(trial, _ORIGIN)
            peak = trial.memory(measure=False).peak_bytes
            if peak > found * (1 - _WORTH):
                break
            best, found = slices, peak
        return best


def _written(region: RowRegion) -> Iterator[str]:
    """What is said of calls that stay whole."""
    calls = [node for node in region.whole if node.op == "call_function"]
    count = sum(tensor.numel() * tensor.element_size() for node in calls for tensor in tensors_of(value_of(node)))
    if calls:
        first = next(iter(info(calls[0]).names), calls[0].name)
        yield f"{len(calls)} calls of {format_bytes(count)} stay whole: {first} and what reads it"


def _doubled(samples: int) -> Iterator[int]:
    slices = 2
    while slices < samples:
        yield slices
        slices *= 2
    if samples > 1:
        yield samples
