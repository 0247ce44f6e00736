"""The smallest set of modules or ops to keep in the wide dtype, so that results stay within a tolerance."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from graphopt.errors import PipelineError
from graphopt.ir.node import NodeInfo, info, value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.values import type_text
from graphopt.ir.program import Program
from graphopt.rewriting.pass_ import Pass
from graphopt.rewriting.pipeline import Pipeline
from graphopt.rewriting.text.spec import option_fields
from graphopt.runtime.comparison.granularity import By

__all__ = ["Denied", "deniable", "denying", "precision_pass", "smallest_denied"]


_OPTION = "deny"
Progress = Callable[[float, str], None]


@dataclass(frozen=True, slots=True)
class Denied:
    """What a search found.

    Attributes:
        entries: what to deny, in the order given; results are within the tolerance with it.
        trials: how many sets were tried.
        minimal: whether it was verified that without any single one of the entries the tolerance is broken.
        interrupted: the search was ended from the keyboard, and a smaller set may exist.
    """

    entries: tuple[str, ...]
    trials: int
    minimal: bool
    interrupted: bool = False


def smallest_denied(
    entries: Sequence[str], within: Callable[[tuple[str, ...]], bool], *, progress: Progress | None = None
) -> Denied | None:
    """Find a minimal set of entries to deny such that ``within`` holds.

    Everything starts denied. Segments of the list are allowed, the largest untested one first: where results stay
    within the tolerance beside all that is allowed already, the segment stays allowed, else it is halved; single
    entries that do not fit are denied (the bisection of ONNX's ``auto_convert_mixed_precision``). Then each denied
    entry is allowed once more beside all others, until none can be: the set is minimal, whether or not errors add up
    evenly.
    For k denied of n entries these are about k · log2(n) trials. The first Ctrl-C ends the search with the best set.

    Args:
        entries: candidates in program order, each once.
        within: whether the tolerance holds with this set denied, in the order of ``entries``; called once for each set.
        progress: is told the share of the entries that is settled, and a remark.

    Returns:
        the set, or None where the tolerance does not hold even with all entries denied.

    Raises:
        KeyboardInterrupt: before any set that holds the tolerance is known.
    """
    search = _Search(tuple(entries), within, progress)
    if not search.holds(frozenset(entries)):
        return None
    try:
        search.run()
    except KeyboardInterrupt:
        return Denied(search.listed(search.denied), search.trials, minimal=False, interrupted=True)
    return Denied(search.listed(search.denied), search.trials, minimal=True)


class _Search:
    """A bisection under way; ``denied`` always holds the tolerance."""

    def __init__(
        self, entries: tuple[str, ...], within: Callable[[tuple[str, ...]], bool], progress: Progress | None
    ) -> None:
        self._entries = entries
        self._within = within
        self._progress = progress
        self._known: dict[frozenset[str], bool] = {}
        self._settled = 0
        self.denied = frozenset(entries)

    @property
    def trials(self) -> int:
        return len(self._known)

    def listed(self, chosen: frozenset[str]) -> tuple[str, ...]:
        return tuple(entry for entry in self._entries if entry in chosen)

    def holds(self, denied: frozenset[str]) -> bool:
        if denied not in self._known:
            self._show()
            self._known[denied] = self._within(self.listed(denied))
        return self._known[denied]

    def run(self) -> None:
        waiting = [self._entries]
        while waiting:
            waiting.sort(key=len)
            segment = waiting.pop()
            if self._allow(segment) or len(segment) == 1:
                self._settled += len(segment)
            elif segment:
                middle = len(segment) // 2
                waiting += [segment[middle:], segment[:middle]]  # of two equally long ones, the first is next
        while any(self._allow((entry,)) for entry in self.listed(self.denied)):
            pass

    def _allow(self, segment: tuple[str, ...]) -> bool:
        """Deny less by a segment, if the tolerance still holds."""
        fewer = self.denied - set(segment)
        if not self.holds(fewer):
            return False
        self.denied = fewer
        return True

    def _show(self) -> None:
        if self._progress is not None and self._entries:
            remark = f"trial {self.trials + 1}, {len(self.denied)} denied; Ctrl-C takes the best set so far"
            self._progress(self._settled / len(self._entries), remark)


# --- what can be denied ----------------------------------------------------------------------------------------------


def precision_pass(pipeline: Pipeline) -> Pass:
    """The pass of a pipeline that has the option ``deny``.

    Raises:
        PipelineError: where no pass has it.
    """
    for current in pipeline.passes:
        if any(option.field == _OPTION for option in option_fields(type(current))):
            return current
    given = f"these are {pipeline}" if pipeline.passes else "none are given"
    raise PipelineError(
        f"what to keep in float32 is found for a pass with the option deny, such as mixed-precision, and {given}"
    )


def denying(pipeline: Pipeline, entries: Sequence[str]) -> Pipeline:
    """The same passes, with entries denied on top of those that the user denies."""
    chosen: Any = precision_pass(pipeline)
    more = tuple(dict.fromkeys((*chosen.deny, *entries)))
    changed: Any = replace(chosen, deny=more)
    return Pipeline([changed if current is chosen else current for current in pipeline.passes])


def deniable(before: Program, after: Program, by: By) -> list[str]:
    """The modules or ops whose calls run in another precision in a rewritten forward program, in program order.

    A module is named where none inside it is; the calls that others make themselves are named one by one, as tensors
    (``layers.0::add``, and ``::add`` for the root), so that no entry stands for part of another.

    Args:
        before: the forward program as it was captured.
        after: the same after its passes.
        by: what to name.
    """
    same = {node.name: node for node in after.graph.nodes if node.op == "call_function"}
    changed = [node for node in _calls(before) if _types(node) != _types(same.get(node.name))]
    outer = {path for node in changed for path in _around(info(node).module)}
    return list(dict.fromkeys(name for node in changed if (name := _entry(node, by, outer))))


def _calls(program: Program) -> Iterator[fx.Node]:
    for node in program.graph.nodes:
        if node.op == "call_function" and isinstance(node.meta.get("graphopt"), NodeInfo):
            yield node


def _types(node: fx.Node | None) -> list[str]:
    """The types of what a call reads and gives."""
    if node is None:
        return []
    return [type_text(value_of(item)) for item in (*node.all_input_nodes, node)]


def _around(module: str) -> Iterator[str]:
    """The paths of the modules that a module is in, the root's among them."""
    while module:
        module = module.rpartition(".")[0]
        yield module


def _entry(node: fx.Node, by: By, outer: set[str]) -> str:
    if by == "op":
        return schema.op_name(node)
    known = info(node)
    if known.module and known.module not in outer:
        return known.module
    return next((name for name in known.names if "::" in name), "")
