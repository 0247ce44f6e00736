"""Budgets in bytes, and the error where nothing fits: shared by everything that fits programs.

What no plan goes below, and the passes that would lower it: what an error about a budget can say.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import torch
from torch import fx

from graphopt.analysis.costs.profiles import DeviceProfile
from graphopt.errors import GraphoptError
from graphopt.ir.host import local_ranks
from graphopt.ir.memory.timeline import MemoryTimeline, ReservedMemory
from graphopt.ir.node import Phase, info, value_of
from graphopt.ir.ops.values import tensors_of
from graphopt.ir.program import Program
from graphopt.ir.words.written_units import format_bytes, parse_bytes
from graphopt.rewriting.memory.budget_text import PERCENT, is_what_is_free
from graphopt.rewriting.memory.chunk.batch_region import batch_inputs, batch_region
from graphopt.rewriting.memory.fit.fitting import Fitting
from graphopt.rewriting.memory.fit.planned import Planned
from graphopt.rewriting.memory.free_memory import free_bytes

__all__ = [
    "BudgetError",
    "Share",
    "always_alive",
    "budget_bytes",
    "budget_error",
    "infeasible",
    "least_bytes",
    "refuse_elsewhere",
    "refuse_hopeless",
    "what_would_help",
    "within_already",
    "within_share",
]


class Share(int):
    """A number of bytes that is so many per cent of others.

    Attributes:
        whole: what it is a share of, in bytes.
    """

    whole: int

    def __new__(cls, percent: float, whole: int) -> Share:
        """So many per cent of a number of bytes."""
        made = super().__new__(cls, int(whole * percent / 100))
        made.whole = whole
        return made

    @classmethod
    def of(cls, count: int, whole: int) -> Share:
        """A number of bytes that is known to be a share of others."""
        made = super().__new__(cls, count)
        made.whole = whole
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        """The same for another rank, whose errors are those of the first one."""
        return Share.of, (int(self), self.whole)


class BudgetError(GraphoptError):
    """No plan fits into a budget.

    Args:
        message: for people.
        smallest_bytes: the smallest peak that was found; where nothing was searched, bytes that every plan takes.
        budget: what was asked for, in bytes.
        searched: whether plans were searched; they are not where the budget is below what every plan takes.

    Attributes:
        smallest: the plan with that peak, where it is known; not on ranks that another one decides for.
    """

    smallest: Planned | None = None

    def __init__(self, message: str, smallest_bytes: int, budget: int, *, searched: bool = True) -> None:
        super().__init__(message)
        self.smallest_bytes = smallest_bytes
        self.budget = budget
        self.searched = searched

    def in_shares(self, budget: object) -> BudgetError:
        """The same error; where a share was asked for (``Share``), it begins with the least one.

        Args:
            budget: as the user gave it.
        """
        if not isinstance(self.budget, Share):
            return self
        least = math.ceil(100 * self.smallest_bytes / self.budget.whole)
        that = "" if self.searched else " that any plan can take"
        told = type(self)(
            f"{least}% is the least{that}, and {budget} is asked for: {self}",
            self.smallest_bytes,
            self.budget,
            searched=self.searched,
        )
        told.smallest = self.smallest
        for note in getattr(self, "__notes__", ()):
            told.add_note(note)
        return told

    def __reduce__(self) -> tuple[Any, ...]:
        """The same error for another rank, without the plan."""
        told = {"searched": self.searched, "__notes__": getattr(self, "__notes__", [])}
        return type(self), (str(self), self.smallest_bytes, self.budget), told


def budget_error(error: BaseException | None) -> BudgetError | None:
    """That no plan fits into a budget, where this is what an error says, or was caused by."""
    while error is not None and not isinstance(error, BudgetError):
        error = error.__cause__
    return error


def budget_bytes(budget: int | str, memory: MemoryTimeline, reserved: ReservedMemory | None = None) -> int:
    """A budget in bytes.

    Args:
        budget: as ``check_budget`` allows.
        memory: the timeline of the program to fit. ``60%`` is of its peak, with the optimizer's state that a first step
            creates counted from the beginning, so that it means the same bytes at every step; ``auto`` is what it holds
            already and 95 % of what is free on its device (on a CPU each rank's part of that); without data, what its
            device has for tensors.
        reserved: what its device reserves for it, where that is more than its tensors; ``60%`` is then of this.

    Raises:
        GraphoptError: for ``auto``, where it is not known how much is free.
    """
    if not isinstance(budget, str):
        return int(budget)
    if is_what_is_free(budget) and isinstance(memory.device, DeviceProfile):
        return memory.device.memory_bytes - memory.device.context_bytes
    if is_what_is_free(budget):
        device = torch.device(memory.where)
        sharing = local_ranks() if device.type == "cpu" else 1  # each has a GPU of its own, but all have one host
        return memory.present_bytes + int(0.95 * free_bytes(device) / sharing)
    percent = PERCENT.fullmatch(budget)
    if percent:
        more = 0 if reserved is None else reserved.reserved_peak_bytes - memory.peak_bytes
        return Share(float(percent[1]), _lasting_peak(memory) + more)
    return parse_bytes(budget)


def _lasting_peak(memory: MemoryTimeline) -> int:
    """The peak, as it would be if the state that the update creates had been there before."""
    count = len(memory.nodes)
    more = [0] * count
    for storage in memory.storages:
        if 0 < storage.first < count <= storage.last and info(storage.owner).phase is Phase.UPDATE:
            more[storage.first - 1] += storage.bytes
    waiting = list(accumulate(reversed(more)))[::-1]
    return max([now + then for now, then in zip(memory.bytes, waiting, strict=True)], default=memory.peak_bytes)


def within_already(memory: MemoryTimeline, budget: int, reserved: ReservedMemory | None = None) -> str:
    """A sentence that says so, where a program fits into ``budget`` bytes unmodified; empty where it does not.

    Args:
        memory: its timeline.
        budget: in bytes.
        reserved: what its device reserves for it, where that is more than its tensors.
    """
    taken = memory.peak_bytes if reserved is None else reserved.reserved_peak_bytes
    if taken > budget or _over_budget_elsewhere(memory, budget):
        return ""
    peak, room = format_bytes(memory.peak_bytes), format_bytes(budget)
    if reserved is None:
        return f"the peak without recomputation, {peak}, is within the budget of {room}"
    return (
        f"what {reserved.device} reserves without recomputation, {format_bytes(taken)} with a peak of {peak}, is "
        f"within the budget of {room}"
    )


def within_share(memory: MemoryTimeline) -> str:
    """A sentence that says that a part of a model fits into its share of a budget as it is."""
    return (
        f"this part's peak without recomputation, {format_bytes(memory.peak_bytes)}, is within its share of the budget"
    )


def _over_budget_elsewhere(memory: MemoryTimeline, budget: int) -> list[str]:
    """The accelerators, beside the one that is planned for, on which a program takes more than ``budget`` bytes."""
    return [where for where, other in memory.others.items() if where != "cpu" and other.peak_bytes > budget]


def refuse_elsewhere(memory: MemoryTimeline, budget: int) -> None:
    """Refuse a budget that a program exceeds on another accelerator than the one that plans lower the peak of.

    Args:
        memory: its timeline.
        budget: in bytes, of each device.

    Raises:
        BudgetError: naming the devices and their peaks.
    """
    over = _over_budget_elsewhere(memory, budget)
    if not over:
        return
    peaks = ", ".join(f"{format_bytes(memory.others[where].peak_bytes)} on {where}" for where in over)
    raise BudgetError(
        f"the program runs on several devices, and plans lower the peak of {memory.where} "
        f"({format_bytes(memory.peak_bytes)}) only; it takes {peaks}, more than the budget of {format_bytes(budget)}\n"
        "  what to do: move layers from one device to the other, or name what is recomputed (Recompute)",
        max(memory.others[where].peak_bytes for where in over),
        budget,
        searched=False,
    )


def refuse_hopeless(program: Program, memory: MemoryTimeline, budget: int, *, moves: bool = True) -> None:
    """Refuse a budget that is known to be too small before plans are searched.

    Args:
        program: to be fitted.
        memory: its timeline.
        budget: in bytes.
        moves: whether values may be moved to the host.

    Raises:
        BudgetError: with what is always alive, the least bytes that every plan takes, and what would lower them.
    """
    least = least_bytes(memory)
    if budget >= least:
        return
    resident = format_bytes(memory.resident_bytes)
    error = BudgetError(
        f"no plan fits into {format_bytes(budget)} ({budget} bytes): parameters, optimizer state and inputs alone take "
        f"{resident}, with what the program leaves behind {format_bytes(always_alive(memory))}, and every plan takes "
        f"{format_bytes(least)} ({least} bytes) or more; nothing was searched",
        least,
        budget,
        searched=False,
    )
    residents = sorted((s for s in memory.storages if s.is_input and s.bytes), key=lambda s: -s.bytes)
    shown = [(s.names[0] if s.names else s.owner.name, s) for s in residents[:_SHOWN]]
    largest = ", ".join(f"{name} ({format_bytes(storage.bytes)}, {storage.category})" for name, storage in shown)
    error.add_note(f"the largest tensors that are there all the time: {largest}")
    _advise(error, program, memory, moves=moves)
    raise error


_SHOWN = 3
"""Tensors that an error names."""


def _advise(error: BudgetError, program: Program, memory: MemoryTimeline, *, moves: bool) -> None:
    ways = ("a larger budget", "a smaller batch", *what_would_help(program, memory, moves=moves))
    error.add_note(f"what to do: {', '.join(ways)}")


def infeasible(fitting: Fitting, budget: int) -> BudgetError:
    """The error where no plan fits into ``budget`` bytes: the smallest peak found, and what is alive there.

    Args:
        fitting: whose frontier holds no plan within the budget.
        budget: in bytes.
    """
    smallest = fitting.smallest()
    rewritten = fitting.program.copy()
    fitting.apply(rewritten, smallest, origin="")
    rewritten.erase_dead()
    memory = rewritten.memory()
    least = smallest.taken_bytes
    what = "peak found is" if fitting.reserved is None else f"plan found has {fitting.reserved.device} reserve"
    error = BudgetError(
        f"no plan fits into {format_bytes(budget)} ({budget} bytes): the smallest {what} {least} "
        f"bytes ({format_bytes(least)}), of which {format_bytes(memory.resident_bytes)} are parameters, "
        "optimizer state and inputs",
        least,
        budget,
    )
    largest = ", ".join(
        f"{item.name} ({', '.join(filter(None, (format_bytes(item.bytes), item.category, item.source)))})"
        for item in memory.alive[:_SHOWN]
    )
    error.add_note(f"the smallest peak is reached at {_named(memory)}; the largest tensors there: {largest}")
    moves = fitting.lanes is not None and fitting.lanes.room > 0
    _advise(error, fitting.program, memory, moves=moves)
    return error


def _named(memory: MemoryTimeline) -> str:
    node = memory.peak_at
    return (info(node).names or (node.name,))[0]


_KEPT = ("activations", "recomputed")


def always_alive(memory: MemoryTimeline) -> int:
    """Bytes that no plan can do without at the end: what is there before a program, and what it leaves behind."""
    left = sum(s.bytes for s in memory.storages if not s.is_input and s.last >= len(memory.nodes))
    return memory.resident_bytes + left


def least_bytes(memory: MemoryTimeline) -> int:
    """Bytes below which no plan of a program peaks, whatever it recomputes or offloads.

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
