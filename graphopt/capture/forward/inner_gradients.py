"""Models that differentiate inside of their forward: forces, gradient penalties, equations of physics.

What they differentiate by has to require a gradient in the program too, which no call of an op says there: models ask
for it with ``requires_grad_()``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import fx

from graphopt import _torch
from graphopt.capture.call.source_lines import user_frame
from graphopt.errors import CaptureError, GraphBreakError
from graphopt.ir.program import Program

__all__ = ["differentiated_by", "refuse_arguments_without_gradients", "refused_inside"]

_REGIONS = (torch.ops.higher_order.wrap_with_autocast, torch.ops.higher_order.wrap_with_set_grad_enabled)


def refused_inside(what: str) -> GraphBreakError:
    """The error for a way to gradients inside of forward that no program has."""
    return GraphBreakError(
        f"forward calls {what} at {user_frame()}, which a program cannot do there\n"
        "  what to do: take gradients by torch.autograd.grad(outputs, inputs, create_graph=True) of tensors, which is "
        "captured and differentiated with the rest"
    )


def differentiated_by(module: fx.GraphModule) -> set[fx.Node]:
    """The nodes of a forward program by which it differentiates inside, those of the regions below it included."""
    found: set[fx.Node] = set()
    for node in module.graph.nodes:
        if node.target is _torch.inner_gradients:
            count, _, _, *tensors = node.args
            found.update(_torch.inner_gradients.inputs(count, *tensors))
        elif node.target in _REGIONS:
            place = next(i for i, argument in enumerate(node.args) if _is_body(argument))
            body = getattr(module, str(node.args[place].target))
            inside = differentiated_by(body)
            places = body.graph.find_nodes(op="placeholder")
            found.update(given for given, own in zip(node.args[place + 1 :], places, strict=True) if own in inside)
    return found


def _is_body(argument: object) -> bool:
    return isinstance(argument, fx.Node) and argument.op == "get_attr"


def refuse_arguments_without_gradients(
    program: Program, tensors: Mapping[str, torch.Tensor], examples: Iterable[torch.Tensor]
) -> None:
    """Refuse a forward that sets ``requires_grad`` on what it is given: eager mode would leave a gradient there.

    Args:
        program: of stage ``forward``.
        tensors: parameters and buffers, by name.
        examples: what it was captured for, in the program's order.

    Raises:
        CaptureError: with the argument and what to do.
    """
    by = differentiated_by(fx.GraphModule(program.attributes, program.graph))
    supply = iter(examples)
    for node, spec in zip(program.placeholders, program.inputs, strict=True) if by else ():
        tensor = next(supply) if spec.role == "input" else tensors.get(str(spec.target))
        if node in by and tensor is not None and not tensor.requires_grad:
            raise CaptureError(
                f"{program.title} differentiates by {spec.target}, which requires no gradient when it is called: eager "
                "mode would set requires_grad on the tensor itself, and leave a gradient there\n"
                "  what to do: in forward, take x.detach().requires_grad_() in its place, or give it with "
                "requires_grad=True"
            )
