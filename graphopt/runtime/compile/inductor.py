"""Programs compiled with inductor, within the memory that they promise.

Inductor fuses ops and reorders kernels; a value may then wait for a kernel that was moved, or be recomputed before
there is room for it. Code is therefore run dry once it is compiled, and where it would take more bytes than the
generated code of the same graph it is compiled again in smaller parts: nothing moves across the border of two parts.
"""

from __future__ import annotations

import logging
import operator
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphopt import _torch
from graphopt.ir.node import Phase, info, value_of
from graphopt.ir.words.written_units import counted, format_bytes
from graphopt.runtime.compile.dry_run import Ledger, Temporaries, dry_generated, dry_inductor
from graphopt.runtime.compile.functional import write_nothing

__all__ = ["compile_graph"]

Boxed = Callable[[list[Any]], Any]

logger = logging.getLogger(__name__)

_FEWEST = 8
"""Parts of fewer calls than this are not divided further: their generated code runs in eager mode."""

_RESIDENT = ("parameter", "buffer", "constant", "input", "tangent", "gradient", "state", "hyperparameter", "pass_state")
"""The roles of inputs that somebody else holds while code runs."""


@dataclass(eq=False)
class _Part:
    """Consecutive calls of a graph.

    Attributes:
        calls: in order.
        takes: the values that they read, of inputs and of earlier parts.
        gives: the values that later parts or the results read.
        module: the calls as generated code of the boxed convention, from ``takes`` to ``gives``.
        compiled: what inductor made of it; None where the generated code runs.
        settled: whether it stays as it is.
    """

    calls: list[fx.Node]
    takes: list[fx.Node]
    gives: list[fx.Node]
    module: fx.GraphModule
    compiled: _torch.InductorCode | None = None
    settled: bool = False

    @property
    def run(self) -> Boxed:
        """What computes it."""
        return self.module.forward if self.compiled is None else self.compiled.run

    def run_dry(self, args: list[Any], ledger: Ledger) -> Any:
        """Compute it on example values."""
        if self.compiled is None:
            return dry_generated(self.module, args, ledger)
        return dry_inductor(self.compiled, args, ledger)


class _Chain:
    """A graph as parts that run one after the other, each value dropped at its last use."""

    def __init__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> None:
        self._module = module
        self._given = module.graph.find_nodes(op="placeholder")
        self._examples = dict(zip(self._given, inputs, strict=True))
        self._results: Sequence[Any] = module.graph.output_node().args[0]  # type: ignore[assignment]
        self._kept = {value for value in self._results if isinstance(value, fx.Node)}
        self._owned = {node for node in self._given if self._is_owned(node)}
        calls = _calls(module.graph)
        self._temporaries = Temporaries(calls)
        self.parts = [self._part(calls)]

    # --- parts -------------------------------------------------------------------------------------------------------

    def _part(self, calls: list[fx.Node]) -> _Part:
        inside = set(calls)
        read = dict.fromkeys(source for node in calls for source in node.all_input_nodes if source not in inside)
        takes = [node for node in read if node.op != "get_attr"]
        gives = [node for node in calls if node in self._kept or any(user not in inside for user in node.users)]
        return _Part(calls, takes, gives, _extracted(self._module, takes, calls, gives))

    def divide(self, part: _Part, position: int) -> None:
        """Replace a part by two, the second of which begins at the call at ``position``."""
        index = self.parts.index(part)
        self.parts[index : index + 1] = [self._part(part.calls[:position]), self._part(part.calls[position:])]

    def reduce(self, part: _Part) -> bool:
        """Divide a part that takes too much, or let its generated code run; returns whether there was a way."""
        if part.settled:
            return False
        middle = _middle(part.calls) if len(part.calls) >= _FEWEST else 0
        if middle:
            self.divide(part, middle)
        else:
            part.compiled, part.settled = None, True
        return True

    def compile(self) -> None:
        """Compile every part that is not compiled, and not settled to run as generated code."""
        last = self._last_uses()
        for part in self.parts:
            if part.compiled is None and not part.settled:
                dying = [i for i, n in enumerate(part.takes) if last.get(n) is part and not self._outlives(n)]
                part.compiled = _compiled(part, [self._example(node) for node in part.takes], dying)

    def _is_owned(self, node: fx.Node) -> bool:
        """Whether nobody else holds an input, or what it is a view of, while the code runs."""
        value = self._examples[node]
        real = isinstance(value, torch.Tensor) and _torch.stands_for_real(value)
        return info(node).origin not in _RESIDENT and not real

    def _example(self, node: fx.Node) -> Any:
        return self._examples.get(node, value_of(node))

    def _last_uses(self) -> dict[fx.Node, _Part]:
        """The last part that reads each value; results outlive them all."""
        return {node: part for part in self.parts for node in part.takes if node not in self._kept}

    def _outlives(self, node: fx.Node) -> bool:
        return node.op == "placeholder" and node not in self._owned

    # --- running -----------------------------------------------------------------------------------------------------

    def runner(self) -> Boxed:
        """A callable of the boxed convention that runs the parts."""
        given, results = self._given, self._results
        last = self._last_uses()
        plan = [([(n, last.get(n) is part) for n in part.takes], part.run, part.gives) for part in self.parts]
        unread = [node for node in given if node not in last and node not in self._kept]

        def run(args: list[Any]) -> Any:
            values = dict(zip(given, args, strict=True))
            args.clear()
            for node in unread:
                del values[node]
            for takes, compute, gives in plan:
                made = compute([values.pop(node) if dies else values[node] for node, dies in takes])
                values.update(zip(gives, made, strict=True))
                del made
            return tuple(values[value] if isinstance(value, fx.Node) else value for value in results)

        return run

    def peaks(self) -> list[int]:
        """Bytes at the peak of each part above what was there at the start, by a dry run.

        Raises:
            Exception: of any kind, where compiled code cannot run without data.
        """
        with torch.no_grad(), _torch.as_traced(list(self._examples.values())):
            return self._peaks(Ledger(self._temporaries))

    def _peaks(self, ledger: Ledger) -> list[int]:
        twins = _torch.example_twins(list(self._examples.values()), nullcontext())
        ledger.hold(twins, counted=False)
        values = dict(zip(self._given, twins, strict=True))
        del twins
        resident = [value for node, value in values.items() if self._outlives(node)]
        last = self._last_uses()
        found = []
        for part in self.parts:
            ledger.peak = ledger.alive
            made = part.run_dry([values.pop(n) if last.get(n) is part else values[n] for n in part.takes], ledger)
            values.update(zip(part.gives, made, strict=True))
            del made
            found.append(ledger.peak)
        del resident
        return found


def _calls(graph: fx.Graph) -> list[fx.Node]:
    """The calls of a graph in order, those that take elements of a tuple right behind the call that makes it."""
    found: dict[fx.Node, None] = {}

    def add(node: fx.Node) -> None:
        found[node] = None
        for user in node.users:
            if user.target is operator.getitem:
                add(user)

    for node in graph.nodes:
        if node.op not in ("placeholder", "get_attr", "output") and node not in found:
            add(node)
    return list(found)


def _extracted(
    module: fx.GraphModule, takes: Sequence[fx.Node], calls: Sequence[fx.Node], gives: Sequence[fx.Node]
) -> fx.GraphModule:
    """Some calls of a module as a module of the boxed convention."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in takes:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    _copy_calls(calls, graph, copies)
    graph.output(tuple(copies[node] for node in gives))
    graph.set_codegen(_torch.BoxedCodeGen())
    return fx.GraphModule(module, graph)


def _copy_calls(calls: Sequence[fx.Node], graph: fx.Graph, copies: dict[fx.Node, fx.Node]) -> None:
    """Copy calls into a graph, with the tensors of their module that they read; ``copies`` holds what is there."""
    for node in calls:
        for source in node.all_input_nodes:
            if source.op == "get_attr" and source not in copies:
                copies[source] = graph.node_copy(source)
        copies[node] = graph.node_copy(node, copies.__getitem__)


def _compiled(part: _Part, examples: Sequence[Any], owned: Sequence[int]) -> _torch.InductorCode:
    """Compile a part; what writes in place becomes functional."""
    graph = fx.Graph()
    given = graph.placeholder("given")
    copies = {node: graph.call_function(operator.getitem, (given, index)) for index, node in enumerate(part.takes)}
    _copy_calls(part.calls, graph, copies)
    for node in part.calls:
        write_nothing(node, copies[node])
    graph.output(tuple(copies[node] for node in part.gives))
    return _torch.compile_with_inductor(fx.GraphModule(part.module, graph), examples, frozenset(owned))


def _start_of_backward(calls: Sequence[fx.Node]) -> int:
    """The position of the first call behind forward; 0 where there is none, or nothing else."""
    around = (Phase.FORWARD, Phase.TRANSFER, Phase.SYNC)
    late = (n for n, node in enumerate(calls) if info(node).phase not in around and node.target is not operator.getitem)
    return next(late, 0)


def _middle(calls: Sequence[fx.Node]) -> int:
    """Where to divide calls: around the middle, where the fewest values are handed over."""
    position = {node: index for index, node in enumerate(calls)}
    ends = [max([index, *(position.get(user, index) for user in node.users)]) for index, node in enumerate(calls)]
    third = len(calls) // 3
    cuts = [cut for cut in range(third, len(calls) - third) if calls[cut].target is not operator.getitem]

    def handed_over(cut: int) -> int:
        return sum(1 for index in range(cut) if ends[index] >= cut)

    return min(cuts, key=lambda cut: (handed_over(cut), abs(2 * cut - len(calls))), default=0)


def compile_graph(module: fx.GraphModule, inputs: Sequence[Any], room: int = 0) -> Boxed:
    """Compile a generated module with inductor; the result takes no more memory than was promised.

    That is what the module's generated code takes, or the room that there is. Forward and backward are compiled apart,
    and whatever takes more in smaller parts, down to generated code.

    Args:
        module: of the boxed convention, its nodes with ``NodeInfo``.
        inputs: example values without data.
        room: bytes above what is there before it runs that it may take even if its generated code takes less.
    """
    chain = _Chain(module, inputs)
    promised = max(room, *chain.peaks())
    start = _start_of_backward(chain.parts[0].calls)
    if start:
        chain.divide(chain.parts[0], start)
    while True:
        chain.compile()
        try:
            peaks = chain.peaks()
        except Exception as error:  # whatever a release of inductor generates that has no meaning without data
            _warn(f"could not be checked ({type(error).__name__}: {error}), and may take more than", promised)
            return chain.runner()
        logger.info(
            "inductor: %s, at most %d bytes of %d", counted(len(chain.parts), "parts"), max(peaks, default=0), promised
        )
        over = [part for part, peak in zip(chain.parts, peaks, strict=True) if peak > promised]
        reduced = [chain.reduce(part) for part in over]
        if not any(reduced):
            if over:
                _warn(f"takes {format_bytes(max(peaks))}, more than", promised)
            return chain.runner()


def _warn(what: str, promised: int) -> None:
    message = (
        f"inductor's code {what} the {format_bytes(promised)} that this program takes above what is there before it "
        'runs: its budget may not hold; backend="eager" keeps it'
    )
    warnings.warn(message, RuntimeWarning, stacklevel=4)
