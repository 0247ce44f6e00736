"""Backward for outputs that a loss leaves out: what came from their gradients is not computed, as in eager mode.

torch's compiled functions take a gradient that does not come for zeros, which is not the same: zero times infinity is
no number (the derivative of a square root at zero), and adding zero changes the sign of a negative zero.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from graphopt.ir.gradients import base_of
from graphopt.ir.graph_copies import copy_graph
from graphopt.ir.node import value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.inplace import FUNCTIONAL, as_functional
from graphopt.runtime.compile.backend import Boxed

__all__ = ["run_without_absent", "without_absent"]

_aten = torch.ops.aten
_SUMS = (_aten.add.Tensor, _aten.add_.Tensor)

Absent = frozenset[str]


def run_without_absent(
    backward: fx.GraphModule,
    tangents: Sequence[str],
    absent: Callable[[], Absent],
    compiled: Callable[[fx.GraphModule], Boxed],
) -> Boxed:
    """What runs a backward half: as it is where all gradients come, else as ``without_absent`` makes it.

    Args:
        backward: the half.
        tangents: the names of its inputs that are tangents.
        absent: which of these do not come, asked at each run.
        compiled: compiles a half; called once for each set of names.
    """
    known: dict[Absent, Boxed] = {frozenset(): compiled(backward)}

    def run(args: list[Any]) -> Any:
        names = absent()
        if names not in known:
            known[names] = compiled(without_absent(backward, tangents, names))
        return known[names](args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def without_absent(backward: fx.GraphModule, tangents: Collection[str], absent: Collection[str]) -> fx.GraphModule:
    """A copy of a backward half that does what autograd does where gradients are absent.

    A call that gets none of the gradients it is computed from is left out; in a sum of gradients, those that are there
    stay. Where an op needs all of them, and where others are told of a value (exchanges between ranks), an absent one
    is zeros, and so is the gradient of an input that no other gradient reaches.

    Args:
        backward: with the placeholders that it keeps, read or not; is not changed.
        tangents: the names of its inputs that are tangents.
        absent: those of them that do not come, and are zeros.
    """
    pruned = _Pruned(copy_graph(backward.graph), tangents, absent)
    pruned.prune()
    made = fx.GraphModule(backward, pruned.graph, class_name="GraphoptBackward")
    made.graph.set_codegen(backward.graph._codegen)
    made.recompile()
    return made


class _Pruned:
    """A graph being pruned."""

    def __init__(self, graph: fx.Graph, tangents: Collection[str], absent: Collection[str]) -> None:
        self.graph = graph
        given = [node for node in graph.find_nodes(op="placeholder") if node.name in tangents]
        self._absent = {node for node in given if node.name in absent}
        self._present = {node for node in given if node.name not in absent}
        self._longer: set[fx.Node] = set()  # what is read in the place of sums as well

    def prune(self) -> None:
        """Do so."""
        self._leave_out()
        bases = {base_of(node) for node in self._longer}
        for node in self.graph.nodes:
            if node.target in FUNCTIONAL and not bases.isdisjoint(map(base_of, schema.mutated_inputs(node))):
                as_functional(node)
        for node in reversed(list(self.graph.nodes)):
            idle = not schema.has_effect(node) or self._absent.issuperset([node, *schema.mutated_inputs(node)])
            if node.op == "call_function" and not node.users and idle:
                self.graph.erase_node(node)

    def _leave_out(self) -> None:
        for node in list(self.graph.nodes):
            if node.op == "output":
                self._answer(node)
            elif node.op != "placeholder":
                self._look_at(node)

    def _look_at(self, node: fx.Node) -> None:
        sources = node.all_input_nodes
        missing = [source for source in sources if source in self._absent]
        reached = not self._present.isdisjoint(sources)
        if not missing:
            self._present.update([node] if reached else [])
        elif not reached and self._only_for_itself(node):
            self._absent.add(node)
        elif len(sources) == 2 and _is_sum(node):
            (left,) = (source for source in sources if source not in self._absent)
            node.replace_all_uses_with(left)
            self._longer.add(left)
            self.graph.erase_node(node)
        else:
            self._give_zeros(node, missing)
            self._present.add(node)

    def _only_for_itself(self, node: fx.Node) -> bool:
        """Whether nothing but what reads its result notices a call."""
        return not schema.has_effect(node) or self._absent.issuperset(schema.mutated_inputs(node) or [node])

    def _give_zeros(self, node: fx.Node, missing: Iterable[fx.Node]) -> None:
        for source in missing:
            node.replace_input_with(source, self._zeros(source, node))

    def _zeros(self, source: fx.Node, before: fx.Node) -> fx.Node:
        """Zeros laid out as an absent value would be; itself, which zeros go into, where its sizes vary."""
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
        """Answer with zeros where a gradient is absent, and with a tensor of its own for each input."""
        given: set[fx.Node] = set()
        answers: list[Any] = []
        for value in output.args[0]:  # type: ignore[union-attr]
            answer: Any = value
            if isinstance(value, fx.Node) and value in self._absent:
                answer = self._zeros(value, output)
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
    if node.target not in _SUMS or node.kwargs or len(node.args) != 2:
        return False
    values = [value_of(argument) for argument in (*node.args, node) if isinstance(argument, fx.Node)]
    kinds = {(tuple(map(str, value.shape)), value.dtype) for value in values}
    return len(values) == 3 and len(kinds) == 1
