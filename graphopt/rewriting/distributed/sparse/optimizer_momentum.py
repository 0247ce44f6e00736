"""The momentum of ``torch.optim.SGD``, taken over by sparse exchange: found in a program, and left out of its update.

Sparse exchange applies momentum before gradients are exchanged, so that the update may not apply it again. In place of
``_fused_sgd_([p, ...], [g, ...], [buffer, ...], momentum=0.9)`` a program then has, for each ``p`` that is exchanged
sparsely, ``_fused_sgd_([p], [mean], [], momentum=0.0)``; the buffer is what sparse exchange keeps its momentum in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from graphopt.errors import GraphoptError
from graphopt.ir.node import Phase, info, value_of
from graphopt.ir.ops.values import is_dense
from graphopt.ir.program import Program

__all__ = ["OptimizerMomentum", "leave_momentum_out", "momenta_of", "why_not_taken_over"]

aten = torch.ops.aten

_SGD = (aten._fused_sgd_.default, aten._fused_sgd_.tensor_lr)
_BUFFER = "momentum_buffer"
_PLAIN = {"momentum": 0.0, "dampening": 0.0, "nesterov": False, "weight_decay": 0.0, "is_first_step": False}


@dataclass(frozen=True, slots=True)
class OptimizerMomentum:
    """What the update of SGD does for one parameter.

    Attributes:
        call: the fused update.
        place: of the parameter in its lists.
        parameter: that is updated.
        buffer: in which its momentum is kept; in the first step, what that step makes.
        momentum: its factor.
        dampening: 1 minus the factor of the gradient, except in the first step.
        nesterov: Nesterov's form of it.
        weight_decay: times the parameter is added to the gradient.
        first: whether this step makes the buffer.
    """

    call: fx.Node
    place: int
    parameter: fx.Node
    buffer: fx.Node
    momentum: float
    dampening: float
    nesterov: bool
    weight_decay: float
    first: bool

    def __str__(self) -> str:
        """The settings that differ from torch's defaults, as they are written for the optimizer."""
        options = {"dampening": self.dampening, "nesterov": self.nesterov, "weight_decay": self.weight_decay}
        return ", ".join([f"momentum={self.momentum}", *(f"{key}={value}" for key, value in options.items() if value)])


def momenta_of(program: Program, origin: str) -> dict[str, OptimizerMomentum]:
    """The momentum of each parameter for which the optimizer keeps one, by name; empty where it keeps no state.

    Args:
        program: of stage step.
        origin: the pass that asks.

    Raises:
        GraphoptError: where the optimizer keeps other state, or its update is not one that can do without momentum.
    """
    buffers: dict[fx.Node, str] = {node: spec.target for node, spec in program.inputs_of("state")}
    buffers |= {node: spec.target for node, spec in program.outputs_of("state") if isinstance(node, fx.Node)}
    other = next((target for target in buffers.values() if not target.endswith(f"/{_BUFFER}")), None)
    if other is not None:
        raise GraphoptError(
            f"the optimizer keeps state of its own ({other}), and {origin} applies momentum before gradients are "
            "exchanged: it takes over the momentum of torch.optim.SGD and of no other optimizer; use SGD, or "
            "correction='feedback' for Adam and its kin"
        )
    found: dict[str, OptimizerMomentum] = {}
    call: fx.Node
    for call in program.graph.nodes:
        if call.op == "call_function" and call.target in _SGD:
            found |= _of_call(call, buffers)
    missing = [target for target in buffers.values() if target.removesuffix(f"/{_BUFFER}") not in found]
    if missing:
        raise GraphoptError(
            f"{origin} takes the momentum of torch.optim.SGD over from its fused implementation, and {missing[0]} is "
            "updated in another way: leave foreach= and maximize= of SGD out, or give it fused=True (16-bit parameters "
            "on a CPU have no such update: train float32 parameters with MixedPrecision); for other optimizers use "
            "correction='feedback'"
        )
    return found


def _of_call(call: fx.Node, buffers: Mapping[fx.Node, str]) -> dict[str, OptimizerMomentum]:
    """The momenta that one fused update applies, by the name of their parameter."""
    settings: Any = call.kwargs
    if settings.get("maximize"):
        return {}
    parameters, _, kept = (_nodes(given) for given in call.args[:3])
    return {
        buffers[buffer].removesuffix(f"/{_BUFFER}"): OptimizerMomentum(
            call=call,
            place=place,
            parameter=parameter,
            buffer=buffer,
            momentum=float(settings["momentum"]),
            dampening=float(settings["dampening"]),
            nesterov=bool(settings["nesterov"]),
            weight_decay=float(settings["weight_decay"]),
            first=bool(settings["is_first_step"]),
        )
        for place, (parameter, buffer) in enumerate(zip(parameters, kept, strict=False))
        if buffer in buffers
    }


def why_not_taken_over(momentum: OptimizerMomentum, gradient: torch.Tensor) -> str:
    """Why a tensor is updated densely by the optimizer; empty where its momentum can be applied before the exchange."""
    parameter = value_of(momentum.parameter)
    kept = torch.float64 if gradient.dtype is torch.float64 else torch.float32
    if parameter.dtype is not kept:
        return f"the optimizer keeps its momentum in {parameter.dtype}"
    if not is_dense(gradient) or parameter.stride() != gradient.stride():
        return "its gradient lies in another order in memory than the optimizer's momentum"
    return ""


def leave_momentum_out(
    program: Program, taken: Mapping[str, OptimizerMomentum], gradients: Mapping[str, fx.Node], origin: str
) -> dict[str, OptimizerMomentum]:
    """Let an update add the gradients of some parameters as they are, without momentum and weight decay.

    Args:
        program: of stage step; is changed.
        taken: from ``momenta_of``.
        gradients: of these parameters, by the same names; a buffer that the step makes is made in front of them.
        origin: the pass that asks.

    Returns:
        the momenta, with buffers that are there when the gradients are; places in calls mean nothing any more.
    """
    places: dict[fx.Node, list[int]] = {}
    for momentum in taken.values():
        places.setdefault(momentum.call, []).append(momentum.place)
    for call, chosen in places.items():
        _split(program, call, sorted(chosen))
    return {
        name: replace(momentum, buffer=_made_early(program, momentum, gradients[name], origin))
        for name, momentum in taken.items()
    }


def _made_early(program: Program, momentum: OptimizerMomentum, gradient: fx.Node, origin: str) -> fx.Node:
    """The buffer of a momentum; where the step makes it, zeros in its place, which exist before the exchange."""
    made = momentum.buffer
    if made.op == "placeholder":
        return made
    calls = (node for node in program.graph.nodes if node.op != "placeholder")
    buffer = program.insert(
        aten.zeros_like.default,
        (momentum.parameter,),
        before=next(calls) if gradient.op == "placeholder" else gradient,
        phase=Phase.SYNC,
        like=momentum.parameter,
        origin=origin,
        hint="buffer",
    )
    made.replace_all_uses_with(buffer)
    program.graph.erase_node(made)
    return buffer


def _split(program: Program, call: fx.Node, chosen: Sequence[int]) -> None:
    parameters, gradients, buffers = (_nodes(given) for given in call.args[:3])
    plain: tuple[list[fx.Node], ...] = (
        [parameters[place] for place in chosen],
        [gradients[place] for place in chosen],
        [],
    )
    program.insert(
        call.target,  # type: ignore[arg-type]
        (*plain, *call.args[3:]),
        {**call.kwargs, **_PLAIN},
        before=call,
        phase=Phase.UPDATE,
        like=call,
        origin=info(call).origin,
    )
    rest = [place for place in range(len(parameters)) if place not in chosen]
    if rest:
        lists = ([given[place] for place in rest] for given in (parameters, gradients, buffers))
        call.args = (*lists, *call.args[3:])
    else:
        program.graph.erase_node(call)


def _nodes(given: Any) -> list[fx.Node]:
    return list(given)
