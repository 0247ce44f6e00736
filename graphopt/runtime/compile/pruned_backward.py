"""Backward for outputs that a loss leaves out: what came from their gradients is not computed, as in eager mode.

torch's compiled functions take a gradient that is missing for zeros, which is not the same: zero times infinity is no
number (the derivative of a square root at zero), and adding zero changes the sign of a negative zero.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from graphopt import _torch
from graphopt.ir.gradients import base_of
from graphopt.ir.graphs.graph_copies import copy_graph
from graphopt.ir.node import value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.inplace import FUNCTIONAL, as_functional, as_in_place
from graphopt.runtime.compile.backend import Boxed

__all__ = ["pruned", "run_pruned"]

_aten = torch.ops.aten


def run_pruned(
    backward: fx.GraphModule,
    tangents: Sequence[str],
    missing: Callable[[], frozenset[str]],
    compiled: Callable[[fx.GraphModule], Boxed],
    *,
    takes_none: bool = False,
) -> Boxed:
    """What runs a backward half: as it is where all gradients come, else as ``pruned`` makes it.

    Args:
        backward: the half.
        tangents: the names of its inputs that are tangents.
        missing: which of these are missing, asked at each run.
        compiled: compiles a half, which it may change; called once for each set of names.
        takes_none: whether what is compiled takes None for an input that it does not read. The zeros which torch makes
            for a missing gradient then go before it runs; other code has them until its end.
    """
    whole = copy_graph(backward.graph)
    known: dict[frozenset[str], Boxed] = {frozenset(): compiled(backward)}
    unread: dict[frozenset[str], list[int]] = {frozenset(): []}

    def run(args: list[Any]) -> Any:
        names = missing()
        if names not in known:
            graph = pruned(whole, tangents, names)
            inputs = graph.find_nodes(op="placeholder")
            given = [place for place, node in enumerate(inputs) if node.name in names and not node.users]
            unread[names] = given if takes_none else []
            known[names] = compiled(fx.GraphModule(backward, graph, class_name="GraphoptBackward"))
        for place in unread[names]:
            args[place] = None
        return known[names](args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def pruned(backward: fx.Graph, tangents: Collection[str], missing: Collection[str]) -> fx.Graph:
    """A copy of the graph of a backward half that does what autograd does where gradients are missing.

    A call that gets none of the gradients it is computed from is left out; in a sum of gradients, those that are there
    stay. Where an op needs all of them, and where others are told of a value (exchanges between ranks), a missing one
    is zeros. An input that no gradient reaches has none.

    Args:
        backward: with the placeholders that it keeps, read or not; is not changed.
        tangents: the names of its inputs that are tangents.
        missing: those of them that do not come, in whose place there are zeros.
    """
    found = _Pruning(copy_graph(backward), tangents, missing)
    found.prune()
    found.graph.set_codegen(_torch.BoxedCodeGen())
    return found.graph


class _Pruning:
    """A graph being pruned."""

    def __init__(self, graph: fx.Graph, tangents: Collection[str], missing: Collection[str]) -> None:
        self.graph = graph
        given = [node for node in graph.find_nodes(op="placeholder") if node.name in tangents]
        self._missing = {node for node in given if node.name in missing}
        self._present = {node for node in given if node.name not in missing}
        self._longer: set[fx.Node] = set()  # what is read in the place of sums as well, and so lives longer

    def prune(self) -> None:
        """Do so; calls that write over an operand are looked at as if they made a new tensor, and do so where not."""
        overwritten = {node: schema.mutated_inputs(node)[0] for node in self.graph.nodes if node.target in FUNCTIONAL}
        # what stays from one run to the next is to be written to
        overwritten = {node: operand for node, operand in overwritten.items() if base_of(operand).op != "get_attr"}
        for node in overwritten:
            as_functional(node)
        for node in list(self.graph.nodes):
            if node.op == "output":
                self._answer(node)
            elif node.op != "placeholder":
                self._look_at(node)
        for node in reversed(list(self.graph.nodes)):
            if node.op == "call_function" and not node.users and not schema.has_effect(node):
                self.graph.erase_node(node)
        bases = {base_of(node) for node in self._longer}
        for node in self.graph.nodes:
            operand = overwritten.get(node)
            if operand is not None and operand in node.all_input_nodes and base_of(operand) not in bases:
                as_in_place(node, operand)

    def _look_at(self, node: fx.Node) -> None:
        sources = node.all_input_nodes
        missing = [source for source in sources if source in self._missing]
        reached = not self._present.isdisjoint(sources)
        if not missing:
            self._present.update([node] if reached else [])
        elif not reached and not schema.has_effect(node):
            self._missing.add(node)
        elif len(sources) == 2 and _is_sum(node):
            (left,) = (source for source in sources if source not in self._missing)
            node.replace_all_uses_with(left)
            self._longer.add(left)
            self.graph.erase_node(node)
        else:
            self._give_zeros(node, missing)
            self._present.add(node)

    def _give_zeros(self, node: fx.Node, missing: Iterable[fx.Node]) -> None:
        for source in missing:
            node.replace_input_with(source, self._zeros(source, node))

    def _zeros(self, source: fx.Node, before: fx.Node) -> fx.Node:
        """Zeros laid out as a missing value would be; itself, which zeros go into, where its sizes vary."""
        value = value_of(source)
        if source.op == "placeholder" or any(isinstance(size, torch.SymInt) for size in value.shape):
            return source
        with self.graph.inserting_before(before):
            kwargs = {"dtype": value.dtype, "device": value.device}
            made = self.graph.call_function(_aten.zeros.default, (list(value.shape),), kwargs)
            made.meta = dict(source.meta)
            if not value.is_contiguous():
                order = sorted(range(value.dim()), key=value.stride, reverse=True)
                made.args = ([value.shape[place] for place in order],)
                back = [order.index(place) for place in range(value.dim())]
                made = self.graph.call_function(_aten.permute.default, (made, back))
                made.meta = dict(source.meta)
        return made

    def _answer(self, output: fx.Node) -> None:
        """Answer with nothing where a gradient is missing, and with a tensor of its own for each input."""
        given: set[fx.Node] = set()
        answers: list[Any] = []
        for value in output.args[0]:  # type: ignore[union-attr]
            answer: Any = value
            if isinstance(value, fx.Node) and value in self._missing:
                answer = None
            if isinstance(answer, fx.Node) and (answer in given or answer.op == "placeholder"):
                with self.graph.inserting_before(output):
                    copied = self.graph.call_function(_aten.clone.default, (answer,))
                copied.meta = dict(answer.meta)
                answer = copied
            given.update([answer] if isinstance(answer, fx.Node) else [])
            answers.append(answer)
        output.args = (tuple(answers),)


def _is_sum(node: fx.Node) -> bool:
    """Whether a call adds two values of one shape and dtype."""
    if node.target is not _aten.add.Tensor or node.kwargs or len(node.args) != 2:
        return False
    values = [value_of(argument) for argument in (*node.args, node) if isinstance(argument, fx.Node)]
    kinds = {(tuple(map(str, value.shape)), value.dtype) for value in values}
    return len(values) == 3 and len(kinds) == 1
