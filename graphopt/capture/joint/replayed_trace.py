"""What torch needs to make a joint program differentiable, for a program that was read from a file.

A capture has it from tracing the model (``_torch.JointTrace``): which tensors come in and out, which are changed, which
have gradients. Here a stand-in with the same tensors around an empty middle is traced, which takes no model's code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from graphopt import _torch
from graphopt.capture.joint.differentiation import JointCapture
from graphopt.errors import GraphoptError, quoted
from graphopt.ir.graphs.autocast import plain_precision
from graphopt.ir.host import refuse_shortage
from graphopt.ir.node import InputSpec, value_of
from graphopt.ir.program import Program

__all__ = ["StandInTrace", "not_replayed", "replay_trace"]


def not_replayed(joint: JointCapture, program: Program) -> str:
    """Why a stand-in cannot take the place of a trace; empty where it can.

    Args:
        joint: the capture.
        program: its joint program behind passes.
    """
    routes = joint.trace.gradient_routes()
    if routes.changed or routes.views or routes.together or program.outputs_of("base"):
        return "the model returns views, or changes its arguments, and torch's trace says how gradients reach them"
    if any(len(group) != 1 for group in routes.tangents):
        return "gradients of several results are one tangent, and torch's trace says how they are added up"
    inputs = {spec.target for _, spec in program.inputs_of("input")}
    if any(spec.target in inputs for _, spec in program.outputs_of("mutation")):
        return "the model changes its arguments"
    if any(spec.role == "mutation" and spec.target not in _names(program, "buffer") for spec in program.outputs):
        return "the model changes what is no buffer"
    if joint.trace.returns_arguments():
        return "the model returns one of its arguments or parameters as it is"
    return ""


def _names(program: Program, role: str) -> set[str]:
    return {spec.target for _, spec in program.inputs_of(role)}


def replay_trace(
    program: Program, inputs: Sequence[InputSpec], tensors: Mapping[str, torch.Tensor], examples: Sequence[torch.Tensor]
) -> JointCapture:
    """The joint capture of a program that was read.

    Args:
        program: of stage joint.
        inputs: the parameters, buffers and constants that the callable takes first, in order.
        tensors: the live parameters and buffers by name.
        examples: the tensors of the call.

    Raises:
        GraphoptError: where the program and these tensors do not fit together.
    """
    trace = _trace(_StandIn(program, inputs, tensors), examples, program.title)
    return JointCapture(program, trace, list(inputs))


class StandInTrace:
    """The trace of a program of which no whole one was made: a stand-in is traced when it is to be compiled.

    Args:
        program: of stage joint, as it was before passes; it can be compiled where ``not_replayed`` says so.
        inputs: as for ``replay_trace``.
        tensors: likewise.
        examples: likewise.
        routes: how gradients come into it.
        returns_arguments: whether a result is an argument, a parameter, or a view of one.
    """

    def __init__(
        self,
        program: Program,
        inputs: Sequence[InputSpec],
        tensors: Mapping[str, torch.Tensor],
        examples: Sequence[torch.Tensor],
        routes: _torch.GradientRoutes,
        returns_arguments: bool,
    ) -> None:
        self._stand_in = _StandIn(program, inputs, tensors)
        self._examples = examples
        self._title = program.title
        self._routes = routes
        self._returns_arguments = returns_arguments

    @functools.cached_property
    def _made(self) -> _torch.JointTrace:
        with plain_precision():
            return _trace(self._stand_in, self._examples, self._title)

    def gradient_routes(self) -> _torch.GradientRoutes:
        """As ``JointTrace`` has it."""
        return self._routes

    def returns_arguments(self) -> bool:
        """As ``JointTrace`` has it."""
        return self._returns_arguments

    def backward_layout(self) -> list[bool]:
        """As ``JointTrace`` has it."""
        return self._made.backward_layout()

    def compile(self, *halves: Any, **options: Any) -> Callable[..., Any]:
        """As ``JointTrace`` has it."""
        return self._made.compile(*halves, **options)


def _trace(stand_in: _StandIn, examples: Sequence[torch.Tensor], title: str) -> _torch.JointTrace:
    """The trace of a stand-in.

    Raises:
        GraphoptError: where it does not have the inputs and results of its program.
    """
    try:
        trace = _torch.JointTrace(stand_in, tuple(examples), stand_in.has_gradient)
    except Exception as error:
        refuse_shortage(error, title or "the program")
        raise GraphoptError(f"no trace of {title or 'the program'}: {quoted(error).splitlines()[0]:.200}") from error
    if trace.parameter_order() != stand_in.inputs or not trace.requires_grad:
        raise GraphoptError("the inputs are in another order, or nothing has a gradient")
    roles = [role.kind for _, role in trace.inputs()]
    if roles.count("tangent") != stand_in.tangents:
        raise GraphoptError("other results have gradients than the program is given")
    kinds = [role.kind for _, role in trace.outputs()]
    if kinds != stand_in.outputs:
        raise GraphoptError("the program returns something else than it says")
    return trace


class _StandIn(nn.Module):
    """Takes and returns what a program does, and computes nothing.

    Attributes:
        inputs: the names of its tensors, in the order in which the callable takes them.
        tangents: how many results have gradients.
        outputs: the roles of what comes out.
    """

    def __init__(self, program: Program, inputs: Sequence[InputSpec], tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        constants = {spec.target: program.constants[node.name] for node, spec in program.inputs_of("constant")}
        self._places = {spec.target: f"t{index}" for index, spec in enumerate(inputs)}
        for spec in inputs:
            tensor = constants.get(spec.target) if spec.role == "constant" else tensors.get(spec.target)
            if tensor is None:
                raise GraphoptError(f"there is no {spec.role} {spec.target!r}")
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(self._places[spec.target], tensor)
            else:
                self.register_buffer(self._places[spec.target], tensor)
        self._order = [spec.target for spec in inputs] + [spec.target for _, spec in program.inputs_of("input")]
        self._changed = [spec.target for _, spec in program.outputs_of("mutation")]
        self._results = [value_of(value) for value, _ in program.outputs_of("output", "loss")]
        self._tangents = {spec.target for _, spec in program.inputs_of("tangent")}
        self._with_gradient = {spec.target for _, spec in program.outputs_of("gradient")}
        self.inputs = list(self._places.values())
        self.tangents = len(self._tangents)
        self.outputs = [spec.role for spec in program.outputs]

    def has_gradient(self, given: _torch.AotInput) -> bool:
        """Whether the program has a gradient for an input."""
        own = len(self._places)
        place = own + given.target if isinstance(given.target, int) else int(given.target.removeprefix("t"))
        return self._order[place] in self._with_gradient

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        own = [getattr(self, self._places[name]) for name in self._order[: len(self._places)]]
        given = [*own, *inputs]
        has = [name in self._with_gradient for name in self._order]
        differentiable = [f"tangent[{index}]" in self._tangents for index in range(len(self._results))]
        results: Any = _Empty.apply(self._results, differentiable, has, *given)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for name in self._changed:
                buffer = getattr(self, self._places[name])
                buffer.copy_(torch.empty_like(buffer))
        return tuple(results)


class _Empty(torch.autograd.Function):
    """Results and gradients without values: the tensors stand for their gradients, which takes no ops."""

    @staticmethod
    def forward(
        ctx: Any, results: Any, differentiable: Any, has: Any, *given: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        made = [
            torch.empty_strided(tuple(value.shape), value.stride(), dtype=value.dtype, device=value.device)
            for value in results
        ]
        ctx.mark_non_differentiable(*(value for value, known in zip(made, differentiable, strict=True) if not known))
        ctx.has = has
        ctx.save_for_backward(*given)
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Any, ...]:
        gradients = [tensor if known else None for tensor, known in zip(ctx.saved_tensors, ctx.has, strict=True)]
        return (None, None, None, *gradients)
