"""Budgets in bytes, and the error where nothing fits: shared by everything that fits programs."""

from __future__ import annotations

import re
from itertools import accumulate

from graphopt.errors import GraphoptError
from graphopt.ir.node import Phase, info, value_of
from graphopt.ir.ops.values import format_bytes, parse_bytes
from graphopt.ir.timeline import MemoryTimeline
from graphopt.rewriting.memory.fit import Fitting
from graphopt.rewriting.memory.free_memory import free_bytes

__all__ = [
    "BudgetError",
    "budget_bytes",
    "check_budget",
    "infeasible",
    "within_already",
]


class BudgetError(GraphoptError):
    """No plan fits into a budget; ``smallest_bytes`` is the smallest peak that was found."""

    def __init__(self, message: str, smallest_bytes: int) -> None:
        super().__init__(message)
        self.smallest_bytes = smallest_bytes


def check_budget(budget: int | str) -> None:
    """Refuse what is no budget: a number of bytes, ``"8GB"``, ``"512MiB"``, ``"60%"`` or ``"auto"``.

    Raises:
        TypeError: for what is neither a number nor text.
        GraphoptError: for text of another form.
    """
    if isinstance(budget, bool) or not isinstance(budget, (int, str)):
        raise TypeError(f"budget is a number of bytes, text such as 8GB or 60%, or auto; got {budget!r}")
    if isinstance(budget, int) and budget >= 2**63:
        raise GraphoptError("budget is a number of bytes, and this one is more than any memory has")
    if isinstance(budget, str) and budget != "auto" and not re.fullmatch(r"\d+(\.\d+)?%", budget):
        try:
            parse_bytes(budget)
        except ValueError as error:
            raise GraphoptError(f"budget={budget!r}: {error}, 60% (of the peak), or auto (what is free)") from None


def budget_bytes(budget: int | str, memory: MemoryTimeline) -> int:
    """A budget in bytes.

    Args:
        budget: as ``check_budget`` allows.
        memory: the timeline of the program to fit. ``60%`` is of its peak, with the optimizer's state that a first step
            creates counted from the beginning, so that it means the same bytes at every step; ``auto`` is what it holds
            already and 95 % of what is free on its devices.

    Raises:
        GraphoptError: for ``auto``, where it is not known how much is free.
    """
    if isinstance(budget, int):
        return budget
    if budget == "auto":
        devices = {value_of(node).device for node in memory.nodes if hasattr(value_of(node), "device")}
        return memory.resident_bytes + int(0.95 * sum(free_bytes(device) for device in devices))
    if budget.endswith("%"):
        return int(_lasting_peak(memory) * float(budget[:-1]) / 100)
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


def within_already(memory: MemoryTimeline, budget: int) -> str:
    """A sentence that says so, where a program fits into ``budget`` bytes as it is; empty where it does not."""
    if memory.peak_bytes > budget:
        return ""
    peak, room = format_bytes(memory.peak_bytes), format_bytes(budget)
    return f"the peak of the program as it is, {peak}, is within the budget of {room}"


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
    error = BudgetError(
        f"no plan fits into {format_bytes(budget)} ({budget} bytes): the smallest peak found is {smallest.peak_bytes} "
        f"bytes ({format_bytes(smallest.peak_bytes)}), of which {format_bytes(memory.resident_bytes)} are parameters, "
        "optimizer state and inputs",
        smallest.peak_bytes,
    )
    error.add_note(f"the smallest peak is reached at {_named(memory)}; the largest tensors alive there:")
    for item in memory.alive[:8]:
        error.add_note(f"  {item.name}: {format_bytes(item.bytes)} ({item.category}) {item.source}".rstrip())
    error.add_note("what to do: a larger budget, a smaller batch, or passes that make these tensors smaller")
    return error


def _named(memory: MemoryTimeline) -> str:
    node = memory.peak_at
    return (info(node).names or (node.name,))[0]
