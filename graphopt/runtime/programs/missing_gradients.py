"""Outputs that a user's loss leaves out: their parameters get no gradient, instead of one of zeros.

torch's compiled functions take a missing tangent for zeros, and optimizers treat zeros and no gradient differently
(weight decay, momentum). Where a program has several outputs, each call notes which of them a gradient reaches, and
backward computes nothing for the others (``compile.pruned_backward``).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from graphopt import _torch
from graphopt.ir.gradients import base_of
from graphopt.ir.ops import schema
from graphopt.ir.program import Program
from graphopt.rewriting.distributed.sharding.accumulated_gradients import gradients_before_reduction, sum_of_gradients

__all__ = ["MissingGradients"]


class _Drop(torch.autograd.Function):
    """Views of tensors; its backward passes on only the gradients that some noted output contributed to."""

    @staticmethod
    def forward(
        ctx: Any, reached: set[int], sources: tuple[frozenset[int], ...], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.note = (reached, sources)
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        reached, sources = ctx.note
        kept = [g if needs & reached else None for g, needs in zip(gradients, sources, strict=True)]
        reached.clear()  # another backward of the same call notes anew
        return None, None, *kept


def _written(program: Program) -> set[str]:
    """The parameters and inputs that a program writes to, of which there can be no views."""
    specs = dict(program.inputs_of("parameter", "input"))
    bases = {base_of(target) for node in program.graph.nodes for target in schema.mutated_inputs(node)}
    return {specs[base].target for base in bases if base in specs}


class MissingGradients:
    """Which outputs' tangents each gradient of a joint program depends on, applied to single calls.

    Args:
        program: of stage joint with tangents.
        inputs: the names of the parameters and buffers that the compiled function takes first, in order.
        routes: how gradients come into it.

    Attributes:
        names: of the program's tangents.
        needed: whether some of them may be missing where others are there.
        unused: the places of those of the function's arguments that no gradient goes to.
    """

    def __init__(self, program: Program, inputs: list[str], routes: _torch.GradientRoutes) -> None:
        tangents = [node for node, _ in program.inputs_of("tangent")]
        reach: dict[fx.Node, frozenset[int]] = {node: frozenset([number]) for number, node in enumerate(tangents)}
        whole = gradients_before_reduction(program)  # those beside them in the same exchange are of other outputs
        for node in program.graph.nodes:
            if node.op == "call_function":
                sources = [whole[node]] if node in whole else node.all_input_nodes
                reach[node] = frozenset().union(*(reach.get(source, frozenset()) for source in sources))
        gradients = {
            spec.target: reach.get(value, frozenset())
            for value, spec in program.outputs_of("gradient")
            if isinstance(value, fx.Node)
        }
        sums = {name for name in gradients if sum_of_gradients(name) in program.pass_state}
        names = [*inputs, *(spec.target for _, spec in program.inputs_of("input"))]
        self._changed = routes.changed
        self._running = threading.local()
        self.names = tuple(node.name for node in tangents)
        written = _written(program)
        self._sources = {
            place: gradients[name]
            for place, name in enumerate(names)
            if name in gradients
            and place not in routes.changed.values()
            and name not in written
            and name not in sums  # which have a gradient from before, whatever comes now
        }
        reached = {*routes.changed.values(), *routes.views.values()}
        self.unused = [
            place
            for place, name in enumerate(names)
            if name not in gradients
            and name not in written
            and place not in reached
            and sum_of_gradients(name) not in program.pass_state  # to which backward adds, and returns none
        ]
        self._notes: dict[int, int] = {output: number for number, of in enumerate(routes.tangents) for output in of}
        for output, place in routes.views.items():  # whose gradients come by themselves, past every tangent
            self._notes[output] = number = len(tangents) + output
            if place in self._sources:
                self._sources[place] |= {number}
        self.needed = len(tangents) > 1

    def apart(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The function's arguments; those that no gradient goes to are apart from autograd, which calls their hooks."""
        result = tensors
        for place in self.unused:
            if tensors[place].requires_grad:
                result = [*tensors] if result is tensors else result
                result[place] = tensors[place].detach()
        return result

    def before(self, tensors: list[torch.Tensor]) -> tuple[set[int], list[torch.Tensor]]:
        """The function's arguments with their gradients under control, and where this call's outputs are noted."""
        reached: set[int] = set()
        places = [place for place in self._sources if tensors[place].requires_grad]
        if not places:
            return reached, tensors
        sources = tuple(self._sources[place] for place in places)
        views = _torch.apply_function(_Drop, reached, sources, *(tensors[place] for place in places))
        result = list(tensors)
        for place, view in zip(places, views, strict=True):
            result[place] = view
        return reached, result

    def missing(self, *, ask_again: bool = False) -> frozenset[str]:
        """The tangents that do not come in the backward that is about to run in this thread, by name.

        None of those that belong to what the program changes: whether they come is known too late.

        Args:
            ask_again: whether this is asked once more before it runs.
        """
        known = self._running.__dict__
        reached: set[int] | None = known.get("reached") if ask_again else known.pop("reached", None)
        if not reached:
            return frozenset()
        there = reached.union(self._changed)
        return frozenset(name for number, name in enumerate(self.names) if number not in there)

    def after(
        self, reached: set[int], outputs: Sequence[Any], given: list[torch.Tensor], tensors: list[torch.Tensor]
    ) -> tuple[Any, ...]:
        """The call's outputs, those with a gradient noting when one reaches them.

        Args:
            reached: where they note it.
            outputs: of the function.
            given: its arguments, as ``before`` gave them.
            tensors: the arguments of the call, one of which an output may be.
        """
        originals = {id(view): tensor for view, tensor in zip(given, tensors, strict=True)}
        for number, place in self._changed.items():
            _note_gradient(tensors[place], reached, number)
        for output, number in self._notes.items():
            if id(outputs[output]) not in originals:
                _note_gradient(outputs[output], reached, number)
        made = [outputs[output] for output, number in self._notes.items() if number < len(self.names)]
        _torch.before_compiled_backward(made, functools.partial(setattr, self._running, "reached", reached))
        return tuple(originals.get(id(output), output) for output in outputs)


def _note_gradient(tensor: Any, reached: set[int], number: int) -> None:
    if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
        tensor.register_hook(functools.partial(_note, reached, number))  # type: ignore[no-untyped-call]


def _note(reached: set[int], number: int, gradient: torch.Tensor | None) -> None:
    """Called where backward comes to an output; without a gradient, where it comes to another one only."""
    if gradient is not None:
        reached.add(number)
