"""Computing the last projection and the loss in chunks of tokens, so that logits are never whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, final

import torch
from torch import fx

from graphopt.errors import ArgumentError, GraphoptError, wrong_argument
from graphopt.ir.node import Phase, info, value_of
from graphopt.ir.program import Program
from graphopt.ir.words.written_units import format_bytes
from graphopt.rewriting.memory.chunk.chunk_rows import chunked
from graphopt.rewriting.memory.chunk.row_regions import RowRegion, row_region, sizes_that_vary
from graphopt.rewriting.memory.order.loss_in_place import chunks_in_place
from graphopt.rewriting.pass_ import Changed, Numerics, Pass, PassStage

__all__ = ["ChunkLoss"]

_ORIGIN = "chunk-loss"
_SMALLEST = 1 << 20
"""Bytes of logits below which ``auto`` leaves them as they are."""

_CANDIDATES = (2, 4, 8, 16, 32, 64)
_WORTH = 0.01
"""The share of the peak that twice as many chunks have to save."""

_ENOUGH_TOKENS = 256
"""In a chunk, for ``auto``: with fewer, reading and writing a large weight's gradient takes a good part of the time."""


@final
@dataclass(frozen=True)
class ChunkLoss(Pass):
    """Compute the last projection and the loss in chunks of tokens, so that logits are never whole.

    Logits are by far the largest tensor of a language model with a large vocabulary, and three of their size live
    together: the log-probabilities, their gradient, and the gradient of the logits. In a whole step the gradient of
    the loss is known before the loss, so each chunk of tokens goes through projection, softmax, loss and their
    backward before the next one begins; what stays is the gradient of the hidden states and of the weight. The
    gradient of a cross entropy takes the place of the chunk's log-probabilities, unless a compiler makes the code.

    Found by itself: a matrix product whose rows are tokens, with or without a bias, tied or not; and behind it calls
    that work on each token by itself: casts, soft caps (``tanh``), softmax, cross entropy with ``ignore_index``,
    weights of classes and label smoothing, a penalty on the log-sum-exp (z-loss), masks, a shift that leaves out the
    last token.

    Sums over tokens are added up in another order, chunk by chunk: losses and gradients equal the captured program's
    within rounding, ``rtol`` 1e-5 (float32) or 2e-2 (16 bits) of the largest element of each. Losses of 16-bit logits
    are added up in float32.

    After Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training", 2024 (arXiv 2410.10989), as a rewrite
    of the program's own calls.

    Args:
        chunks: how many; ``auto`` takes the fewest that bring the peak as low as more would, by the program's timeline.
            Each chunk adds to all of the weight's gradient, so it leaves chunks at least as many tokens as the hidden
            states have features, of up to 256 features, and half as many of more than 512.

    Raises:
        GraphoptError: for fewer than two chunks; for a given number, where the program has no such loss, with the call
            that is in the way.

    Example:
        >>> step = graphopt.optimize_step(model, optimizer, [ChunkLoss()], loss=loss).prepare(x)
        >>> step.records[0].name
        'chunk-loss'
    """

    name: ClassVar[str] = "chunk-loss"
    stage: ClassVar[PassStage] = "joint"
    numerics: ClassVar[Numerics] = "tolerant"
    after: ClassVar[tuple[str, ...]] = ("mixed-precision", "scale-loss", "float8")
    fixed_sizes: ClassVar[bool] = True

    chunks: int | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        if self.chunks == "auto":
            return
        if isinstance(self.chunks, bool) or not isinstance(self.chunks, int):
            raise wrong_argument("chunks", self.chunks, "a number of chunks, or 'auto'")
        if self.chunks < 2:
            raise ArgumentError(f"chunk-loss: {self.chunks} chunks leave the loss as it is: give 2 at least, or 'auto'")

    def apply(self, program: Program) -> Changed:
        """See the class; rewrites a joint program with a loss."""
        if any(info(node).made_by == _ORIGIN for node in program.phase_nodes(Phase.BACKWARD)):
            return Changed(reason="the loss is in chunks already")
        if not any(spec.role == "loss" for _, spec in program.outputs_of("loss")):
            return self._nothing("the loss is not part of this program: use graphopt.optimize_step with loss=")
        region = _largest(program)
        if isinstance(region, str):
            return self._nothing(region)
        if self.chunks == "auto" and region.matrix_bytes < _SMALLEST:
            size, least = format_bytes(region.matrix_bytes), format_bytes(_SMALLEST)
            return Changed(reason=f"the logits, {size}, are less than {least}: for chunks anyway, give their number")
        chunks = self._choose(program, region)
        if chunks < 2:
            return Changed(
                reason=f"chunks of the logits, {format_bytes(region.matrix_bytes)}, would not lower the peak"
            )
        rows = region.rows
        chunked(program, region, chunks, _ORIGIN)
        chunks_in_place(program, _ORIGIN)
        return Changed(
            counts={"chunks": -(-rows // -(-rows // chunks)), "calls for each": len(region.steps)},
            tensors=tuple(info(region.projection).names[:1]),
            lines=(f"logits of {format_bytes(region.matrix_bytes)} for {rows} tokens, {-(-rows // chunks)} at a time",),
        )

    def _nothing(self, reason: str) -> Changed:
        if self.chunks != "auto":
            raise GraphoptError(f"chunk-loss finds no loss that it can compute in chunks: {reason}")
        return Changed(reason=reason)

    def _choose(self, program: Program, region: RowRegion) -> int:
        if self.chunks != "auto":
            return min(self.chunks, region.rows)
        best, found = 1, program.memory(measure=False).peak_bytes
        for chunks in _CANDIDATES:
            if region.rows < chunks * max(min(region.width, _ENOUGH_TOKENS), region.width / 2):
                break
            trial = program.copy()
            again = row_region(trial, next(node for node in trial.nodes if node.name == region.projection.name))
            assert isinstance(again, RowRegion)
            chunked(trial, again, chunks, _ORIGIN)
            chunks_in_place(trial, _ORIGIN)
            peak = trial.memory(measure=False).peak_bytes
            if peak < found * (1 - _WORTH):
                best, found = chunks, peak
        return best


def _largest(program: Program) -> RowRegion | str:
    """The region of the largest matrix behind which a loss is computed by rows; or why there is none."""
    varying = sizes_that_vary(program)
    products = [] if varying else [node for node in program.phase_nodes(Phase.FORWARD) if _makes_logits(node)]
    products.sort(key=lambda node: value_of(node).numel(), reverse=True)
    found: RowRegion | str = varying or "no loss is computed from the rows of a matrix product"
    for node in reversed(products):
        region = row_region(program, node)
        found = found if isinstance(found, RowRegion) and isinstance(region, str) else region
    return found


def _makes_logits(node: fx.Node) -> bool:
    """Whether a node is a matrix product whose result goes into a softmax or a log-sum-exp, as in losses of classes."""
    if node.target not in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
        return False
    size = value_of(node).numel()
    seen, waiting = {node}, [node]
    while waiting:
        for user in waiting.pop().users:
            if str(user.target).partition(".")[2].startswith(("_log_softmax", "_softmax", "logsumexp")):
                return True
            value = value_of(user) if user.op == "call_function" and info(user).phase is Phase.FORWARD else None
            if isinstance(value, torch.Tensor) and 2 * value.numel() >= size and user not in seen:
                seen.add(user)
                waiting.append(user)
    return False
