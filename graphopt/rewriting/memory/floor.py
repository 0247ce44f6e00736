"""What no plan goes below, and the passes that would lower it: what an error about a budget can say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from torch import fx

from graphopt.ir.node import value_of
from graphopt.ir.ops.values import tensors_of
from graphopt.ir.program import Program
from graphopt.ir.timeline import MemoryTimeline
from graphopt.ir.written_units import format_bytes
from graphopt.rewriting.memory.batch_region import batch_inputs, batch_region

__all__ = ["always_alive", "least_bytes", "what_would_help"]

_KEPT = ("activations", "recomputed")


def always_alive(memory: MemoryTimeline) -> int:
    """Bytes that no plan can do without at the end: what is there before a program, and what it leaves behind."""
    left = sum(s.bytes for s in memory.storages if not s.is_input and s.last >= len(memory.nodes))
    return memory.resident_bytes + left


def least_bytes(memory: MemoryTimeline) -> int:
    """Bytes below which no plan of a program peaks, whatever it runs again or moves away.

    At the least there is what ``always_alive`` counts, or what is resident with the operands or the results of one
    call, whichever is more, and its temporaries.
    """
    calls = (_operands_or_results(memory, node) for node in memory.nodes)
    most = max((own + extra for own, extra in zip(calls, memory.temporaries, strict=True)), default=0)
    return max(always_alive(memory), memory.resident_bytes + most)


def _operands_or_results(memory: MemoryTimeline, node: fx.Node) -> int:
    """The larger of the bytes that a call reads and of those that it makes, inputs of the program left out."""
    results = {id(s): s.bytes for s in memory.refers.get(node, ()) if not s.is_input}
    operands = {
        id(s): s.bytes for source in node.all_input_nodes for s in memory.refers.get(source, ()) if not s.is_input
    }
    return max(sum(results.values()), sum(operands.values()))


def what_would_help(program: Program, memory: MemoryTimeline, *, moves: bool) -> Iterator[str]:
    """The passes that would lower a peak, each with the bytes that it would take off there.

    Args:
        program: that was to be fitted.
        memory: of it, or of the smallest plan that was found.
        moves: whether values may be moved to the host already.
    """
    done = " ".join(program.history)
    alive = Counter(memory.categories)
    gradients = _gradients(memory)
    kept = sum(alive[name] for name in _KEPT)
    if "chunk-loss" not in done and (logits := _logits(memory)):
        less = format_bytes(logits)
        yield f"ChunkLoss() (logits and loss in chunks of tokens, in a whole step with loss=: up to {less} less)"
    samples = _samples(program, done)
    if samples > 1 and (most := kept * (samples - 1) // samples) > memory.peak_bytes // 100:
        yield f"Microbatch() (some of the {samples} samples at a time: up to {format_bytes(most)} less)"
    yield from _fewer_bits(memory, done)
    early = sum(gradients) - max(gradients, default=0)
    if early > memory.peak_bytes // 1000 and program.stage == "joint":
        less = format_bytes(early)
        yield f"graphopt.optimize_step with FuseUpdate() in place of graphopt.optimize (gradients: up to {less} less)"
    if kept and not moves:
        there = format_bytes(kept)
        yield f"host_budget= or Offload(tier='disk') (activations elsewhere, {there} are alive; on a CPU the disk)"
    if alive["optimizer state"] > memory.peak_bytes // 100:
        state = format_bytes(alive["optimizer state"])
        if "offload-state" not in done and "state" not in done:
            yield f"OffloadState() or allow=('recompute', 'state') ({state} of optimizer state elsewhere)"
        if "shard-optimizer" not in done and "shard-parameters" not in done:
            yield f"ShardOptimizer() on several ranks (for each its share of {state} of optimizer state)"


def _fewer_bits(memory: MemoryTimeline, done: str) -> Iterator[str]:
    """The passes that keep activations in fewer bits an element."""
    single = _single_precision(memory)
    if single < memory.peak_bytes // 100:
        return
    if "mixed-precision" not in done:
        yield f"MixedPrecision() (activations in two bytes an element: up to {format_bytes(single // 2)} less)"
    if "compress" not in done:
        less = format_bytes(single * 3 // 4)
        yield f"CompressActivations() or allow=('recompute', 'compress') (8 bits, noisy gradients: up to {less} less)"


def _samples(program: Program, done: str) -> int:
    """How many samples a step could be computed in slices of; 0 where it cannot be."""
    if (
        program.stage != "step"
        or program.symbols
        or any(name in done for name in ("microbatch", "chunk", "compress-activations"))
    ):
        return 0
    batch = batch_inputs(program)
    region = batch_region(program, batch) if batch and any(program.outputs_of("loss")) else ""
    return 0 if isinstance(region, str) else region.rows


_OF_LOSSES = ("_log_softmax", "_softmax", "nll_loss", "_log_softmax_backward_data", "loss_gradient")


def _logits(memory: MemoryTimeline) -> int:
    """The bytes of logits, log-probabilities and their gradients that are alive at the peak, if they are the largest.

    They are as large as each other, and each may be in the place of one before.
    """
    position = memory.bytes.index(memory.peak_bytes) if memory.bytes else -1
    alive = [s for s in memory.storages if not s.is_input and s.first <= position <= s.last]
    largest = [s for s in alive if s.bytes == max(other.bytes for other in alive)]
    wanted = {id(storage) for storage in largest}
    calls = [node for node, storages in memory.refers.items() if any(id(s) in wanted for s in storages)]
    found = any(str(node.target).partition(".")[2].startswith(_OF_LOSSES) for node in calls)
    return sum(s.bytes for s in largest) if found else 0


def _gradients(memory: MemoryTimeline) -> list[int]:
    """The bytes of the gradients that are alive at the peak."""
    position = memory.bytes.index(memory.peak_bytes) if memory.bytes else -1
    return [s.bytes for s in memory.storages if s.category == "gradients" and s.first <= position <= s.last and s.bytes]


def _single_precision(memory: MemoryTimeline) -> int:
    """The bytes in float32 that forward made, or made again, and that are alive at the peak."""
    position = memory.bytes.index(memory.peak_bytes) if memory.bytes else -1
    return sum(
        s.bytes
        for s in memory.storages
        if s.category in _KEPT
        and s.first <= position <= s.last
        and any(tensor.dtype is torch.float32 for tensor in tensors_of(value_of(s.owner)))
    )
