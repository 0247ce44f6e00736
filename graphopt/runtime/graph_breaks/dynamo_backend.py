"""The backend ``"graphopt"`` of ``torch.compile``: Dynamo cuts and guards, and each of its graphs is rewritten.

A function that is one graph is planned as ``graphopt.optimize`` plans a model. Where there are several, each has its
smallest program until backward has begun for the first time; then it is known what runs in a step, and the next
call plans all of that together, so that it is within the limit as a whole.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from graphopt import _torch
from graphopt.capture.effects.side_effects import CAPTURE_LOCK
from graphopt.capture.guards.code_analysis import found_by
from graphopt.capture.guards.impure_calls import asks_whether_compiled
from graphopt.errors import GraphoptError, wrong_argument
from graphopt.ir.program import Program
from graphopt.ir.words.written_units import format_bytes
from graphopt.rewriting.pass_ import PassRecord
from graphopt.runtime.calls.observers import tell_observers, tell_seconds
from graphopt.runtime.compiled_joint import CompiledJoint
from graphopt.runtime.graph_breaks.compile_options import options_of
from graphopt.runtime.graph_breaks.cut_graphs import CutGraph, CutGraphs
from graphopt.runtime.graph_breaks.part_budget import PartBytes, timeline
from graphopt.runtime.runner import Options, Runner

__all__ = ["CompiledGraph", "backend", "compiled_graphs"]

logger = logging.getLogger(__name__)

_Calls = tuple[tuple[CutGraph, int], ...]
"""Graphs in the order in which they run, and how often."""


@dataclass(frozen=True)
class CompiledGraph:
    """One of the graphs behind a function that ``torch.compile`` has compiled with the backend ``"graphopt"``.

    Attributes:
        program: the rewritten program that trains; None for a graph that runs as torch made it.
        records: what each pass did.
        reason: why the graph runs in eager mode; empty where it has a program.

    Example:
        >>> compiled = torch.compile(model.eval(), backend="graphopt")
        >>> with torch.no_grad():
        ...     y = compiled(x)
        >>> graphopt.compiled_graphs(compiled)[0].reason
        'nothing in it requires a gradient'
    """

    program: Program | None
    records: tuple[PassRecord, ...]
    reason: str


class _Run:
    """Lives as long as what one run of a graph keeps for its backward."""

    def __init__(self, graph: CutGraph) -> None:
        self.graph = graph


class _Compiled:
    """The graphs of one use of ``torch.compile``.

    Args:
        call: the call for which the first of them is compiled.
        options: as the user gave them.
    """

    def __init__(self, call: _torch.CompiledCall, options: Options) -> None:
        self._module: Callable[[], nn.Module | None] = weakref.ref(call.module) if call.module else lambda: None
        self.options = options
        title = type(call.module).__name__ if call.module else getattr(call.function, "__name__", "a function")
        self._runner: Runner[CompiledJoint] = Runner(options, "joint", self._parameter)
        self._graphs = CutGraphs(self, self._runner, title, resident=False)
        self._function = None if call.module else call.function
        for sentence in found_by(*self.subject()).told:
            if asks_whether_compiled(sentence):
                logger.warning("%s", sentence)
        self._taken: list[CutGraph] = []
        self._beyond: list[str] = []
        self._alive: list[weakref.ref[_Run]] = []
        self._due: _Calls = ()
        self._planned: list[tuple[_Calls, int, int]] = []
        self._announced: set[CutGraph] = set()

    def _parameter(self, name: str) -> torch.Tensor:
        module = self._module()
        assert module is not None
        return module.get_parameter(name)

    def take(self, graph: fx.GraphModule, call: _torch.CompiledCall) -> Callable[..., Any]:
        """What runs in place of a graph."""
        whole = _torch.whole_function(graph, call)
        others = [each.name for each in self.options.pipeline.passes if not each.in_parts]
        if others and not whole:
            return _raising(
                GraphoptError(
                    f"torch.compile has cut {self._graphs.title} into several graphs, and {', '.join(others)} cannot "
                    "be applied to one part of a model by itself\n"
                    "  what to do: leave it out, or make the model one graph (fullgraph=True says where it is cut)"
                )
            )
        found = self._graphs.take(graph, whole=whole)
        self._taken.append(found)
        return _Locked(found)

    # --- what graphs tell --------------------------------------------------------------------------------------------

    def names(self) -> dict[int, str]:
        """What the tensors of the module are called."""
        module = self._module()
        return {} if module is None else {id(t): n for n, t in [*module.named_parameters(), *module.named_buffers()]}

    def subject(self) -> tuple[nn.Module, object]:
        """The module that is compiled, or an empty one and the function."""
        return self._module() or type(self._graphs.title, (nn.Module,), {})(), self._function

    def goes_beyond(self, where: str) -> bool:
        """Say that torch cuts a function no more, and runs it in eager mode.

        Raises:
            GraphBreakError: where a limit would not hold then.
        """
        if self._graphs.limited:
            raise self._graphs.too_many(where)
        self._beyond.append(f"{where} has had as many graphs as torch makes, and runs in eager mode since")
        logger.warning("a part of %s is not counted from now on: %s", self._graphs.title, self._beyond[-1])
        return True

    def begins(self, graph: CutGraph) -> None:
        """Plan what ran before the last backward, where that was something new, and say what runs."""
        if self._due:
            due, self._due = self._due, ()
            self._plan(due)
        if graph not in self._announced and (graph.whole or not self._graphs.limited):
            self._announce(graph)

    def ran(self, graph: CutGraph, result: Any) -> None:
        """Remember the run for as long as autograd does."""
        if graph.whole or not self._graphs.limited:
            return
        for leaf in _torch.pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                run = _Run(graph)
                metadata: Any = leaf.grad_fn.metadata  # a dictionary, which torch's stubs have as a method
                metadata.setdefault("graphopt", []).append(run)
                self._alive = [known for known in self._alive if known() is not None]
                self._alive.append(weakref.ref(run))
                return

    def goes_back(self, graph: CutGraph) -> None:
        """Note what is alive when backward begins; the rest of a backward finds nothing."""
        del graph
        runs = [run for reference in self._alive if (run := reference()) is not None]
        self._alive.clear()
        calls = tuple(Counter(run.graph for run in runs).items())
        if calls and not any(_within(calls, known) for known, _, _ in self._planned):
            self._due = calls

    # --- planning ----------------------------------------------------------------------------------------------------

    def _plan(self, calls: _Calls) -> None:
        """Give each graph of a step its share of the limit; what it had is kept where it takes no more.

        Raises:
            BudgetError: where together they do not meet it.
        """
        graphs = []
        for graph, times in calls:
            graph.times = times
            graphs.append(graph)
        before = {graph: graph.compiled for graph in graphs if any(graph in dict(known) for known, *_ in self._planned)}
        resident = self._resident(graphs)
        found = self._graphs.plan(graphs, resident)
        for graph, compiled in before.items():
            if compiled is not None and _takes_less(compiled, graph.compiled):
                graph.compiled = compiled
        self._planned.append((calls, resident, found.limit))
        self._settle()
        peak = _peak(calls, resident)
        logger.info(
            "%s: the programs of %d of its graphs take %s together at most (predicted), of %s",
            self._graphs.title,
            len(graphs),
            format_bytes(peak),
            format_bytes(found.limit),
        )
        for graph in graphs:
            self._announce(graph)

    def _settle(self) -> None:
        """Where steps share graphs, and what one was given is too much for another, take the smallest programs."""
        for calls, resident, limit in self._planned:
            if _peak(calls, resident) > limit:
                for graph, _ in calls:
                    self._graphs.use_smallest(graph)

    def _resident(self, graphs: Sequence[CutGraph]) -> int:
        """Bytes of the module, of what the first graph is given, and of what others are given from outside."""
        module = self._module()
        tensors = [] if module is None else [*module.parameters(), *module.buffers()]
        storages = {_torch.storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
        for place, graph in enumerate(graphs):
            storages |= graph.storages[0 if place == 0 else 1]
        return sum(storages.values())

    def _announce(self, graph: CutGraph) -> None:
        assert graph.compiled is not None
        first = not self._announced
        self._announced.add(graph)
        tell_observers(graph.compiled.rewritten, first)
        tell_seconds(graph.compiled.rewritten, first=first and graph.whole)  # of several graphs, those that took long

    def look(self) -> tuple[CompiledGraph, ...]:
        """The graphs that have run, in the order in which they were cut; then functions that are cut no more."""
        found = [_seen(variant) for graph in self._taken for variant in graph.variants.values()]
        return (*found, *(CompiledGraph(None, (), why) for why in self._beyond))


class _Locked:
    """Runs one graph after another, where several threads do: a capture changes what all of them see."""

    def __init__(self, graph: CutGraph) -> None:
        self._graph = graph

    def __call__(self, *arguments: Any) -> Any:
        """What the graph gives."""
        with CAPTURE_LOCK:
            return self._graph(*arguments)


_compiled: weakref.WeakKeyDictionary[Any, _Compiled] = weakref.WeakKeyDictionary()
"""By the object that torch has for each use of ``torch.compile``."""


def _goes_beyond(where: str) -> bool:
    context = _torch.compiled_call().context
    found = None if context is None else _compiled.get(context)
    return found is None or found.goes_beyond(where)


_torch.guard_hooks()
_torch.tell_of_limits(_goes_beyond)


def backend(
    graph: fx.GraphModule, examples: Sequence[Any], *, options: Mapping[str, Any] | None = None, mode: str | None = None
) -> Callable[..., Any]:
    """What torch calls for each graph of ``torch.compile(model, backend="graphopt", options={...})``.

    Args:
        graph: as Dynamo cut it.
        examples: stand-ins for its arguments; graphs are captured when they are first called.
        options: ``passes`` (as for ``graphopt.optimize``), ``budget`` (short for the pass ``fit-memory``: bytes,
            ``"8GB"``, or ``"60%"`` of the peak without it), ``verify`` (``"structure"``, ``"numerics"`` or False) and
            ``codegen`` (``"eager"``, ``"inductor"``, or a callable, as the ``backend`` of ``graphopt.optimize``).
        mode: of torch's own compiler; there is none here.

    Torch imports this file when it looks the backend up. That changes one setting of torch's for the whole process,
    ``torch._dynamo.config.skip_nnmodule_hook_guards = False``: Dynamo looks at the hooks of modules in every call, so
    that one that is registered later acts, behind other backends too. They keep their results otherwise.

    Returns:
        What runs in its place. Torch would wrap an error that is raised here, so that is raised where it runs.

    Example:
        >>> compiled = torch.compile(model, backend="graphopt", options={"passes": "recompute{checkpoints=blocks.*}"})
        >>> compiled(x).square().mean().backward()
        >>> [graph.records[0].name for graph in graphopt.compiled_graphs(compiled)]
        ['recompute']
    """
    del examples
    call = _torch.compiled_call()
    try:
        found = None if call.context is None else _compiled.get(call.context)
        if found is None:
            found = _Compiled(call, options_of(options, mode))
            if call.context is not None:
                _compiled[call.context] = found
    except GraphoptError as error:
        return _raising(error)
    return found.take(graph, call)


def compiled_graphs(compiled: Any) -> tuple[CompiledGraph, ...]:
    """The graphs behind what ``torch.compile(..., backend="graphopt")`` returned, as far as they have run.

    Args:
        compiled: what it returned, or a module that ``module.compile(backend="graphopt")`` has compiled.

    Returns:
        Each with its program and records, or with why it runs as torch made it; empty before the first call.

    Raises:
        ArgumentError: for what torch has not compiled.

    Example:
        >>> compiled = torch.compile(model, backend="graphopt", options={"budget": "100%"})
        >>> compiled(x).square().mean().backward()
        >>> (graph,) = graphopt.compiled_graphs(compiled)
        >>> graph.program.stage
        'joint'
    """
    context = _torch.compiled_with(compiled)
    if context is None:
        raise wrong_argument("compiled", compiled, "what torch.compile(model, backend='graphopt') returned")
    found = _compiled.get(context)
    return () if found is None else found.look()


def _seen(graph: CutGraph) -> CompiledGraph:
    program = None if graph.compiled is None else graph.compiled.rewritten.program
    return CompiledGraph(program, tuple(graph.records), graph.why)


def _within(calls: _Calls, known: _Calls) -> bool:
    """Whether a step runs nothing that a known one does not run as often."""
    times = dict(known)
    return all(count <= times.get(graph, 0) for graph, count in calls)


def _bytes(compiled: CompiledJoint | None, times: int = 1) -> PartBytes:
    assert compiled is not None
    return PartBytes.of(compiled.rewritten.program, times)


def _peak(calls: _Calls, resident: int) -> int:
    """The bytes of a step, as its graphs are now."""
    return timeline([_bytes(graph.compiled, times) for graph, times in calls], resident).peak_bytes


def _takes_less(one: CompiledJoint, other: CompiledJoint | None) -> bool:
    """Whether a program takes no more than another, by itself and while others run."""
    was, now = _bytes(one), _bytes(other)
    return was.kept <= now.kept and was.memory.peak_bytes <= now.memory.peak_bytes


def _raising(error: GraphoptError) -> Callable[..., Any]:
    def run(*_arguments: Any) -> Any:
        raise error

    return run
