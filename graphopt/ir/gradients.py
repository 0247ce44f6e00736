"""The gradients of a program: which the update reads, what they are called, and tensors of their own for each."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from graphopt import _torch
from graphopt.ir.node import Phase, info, value_of
from graphopt.ir.ops import schema
from graphopt.ir.program import Program

__all__ = [
    "GradientSite",
    "all_gradients_made",
    "base_of",
    "gradient_owners",
    "in_own_storage",
    "site",
    "update_calls",
    "update_gradients",
]

_UPDATE_ORIGIN = "optimizer.step"
_GIVEN = ("parameter", "buffer", "constant", "input", "state", "hyperparameter", "pass_state")
_AFTER_FORWARD = (Phase.BACKWARD, Phase.RECOMPUTE, Phase.TRANSFER, Phase.SYNC)


@dataclass(frozen=True, slots=True)
class GradientSite:
    """A gradient for people: the tensor that it belongs to, the module and the source line that it comes from."""

    tensor: str
    module: str
    source: str

    def __str__(self) -> str:
        place = ", ".join(text for text in (f"module {self.module}" if self.module else "", self.source) if text)
        return f"{self.tensor} ({place})" if place else self.tensor


def update_calls(program: Program) -> list[fx.Node]:
    """The calls of the optimizer itself, in order, without what passes added."""
    return [node for node in program.phase_nodes(Phase.UPDATE) if info(node).origin == _UPDATE_ORIGIN]


def all_gradients_made(program: Program) -> fx.Node:
    """The node in front of which every gradient is there and none is read by the optimizer, the output without one.

    Waits for exchanged gradients that stand further down are moved up to it.
    """
    gradients = set(update_gradients(program))
    readers = (call for call in update_calls(program) if gradients.intersection(call.all_input_nodes))
    place = next(readers, program.output_node)
    behind = False
    for node in program.nodes:
        behind = behind or node is place
        if behind and node.op == "call_function" and info(node).phase is not Phase.UPDATE:
            place.prepend(node)
    return place


def update_gradients(program: Program) -> list[fx.Node]:
    """The gradients that the optimizer reads, each once, in the order in which it reads them.

    They are what it reads and what is neither made by the update itself nor given from outside; accumulated gradients
    of a parameter that the last batch does not reach are inputs of the program.
    """
    given = {node for node, _ in program.inputs_of(*_GIVEN)}
    update = set(program.phase_nodes(Phase.UPDATE))
    sources = [source for node in update_calls(program) for source in node.all_input_nodes]
    return [
        node
        for node in dict.fromkeys(sources)
        if node not in given and node not in update and isinstance(value_of(node), torch.Tensor)
    ]


def gradient_owners(program: Program) -> dict[fx.Node, tuple[str, ...]]:
    """The tensors that each gradient belongs to (several where they are equal), in the order of the program's inputs.

    A gradient is known by its name, that of its tensor and ``~``; an accumulated one that is given, by its input.
    """
    tensors = [spec.target for _, spec in program.inputs_of("parameter", "input")]
    names = program.names()
    found: dict[fx.Node, list[str]] = {}
    for tensor in dict.fromkeys(tensors):
        if f"{tensor}~" in names:
            found.setdefault(names[f"{tensor}~"], []).append(tensor)
    for node, spec in program.inputs_of("gradient"):
        found.setdefault(node, []).append(spec.target)
    return {node: tuple(owners) for node, owners in found.items()}


def site(gradient: fx.Node, owners: Mapping[fx.Node, tuple[str, ...]]) -> GradientSite:
    """What a gradient is, for people."""
    place = info(gradient)
    tensor = " and ".join(owners.get(gradient, ())) or (place.names or (gradient.name,))[0]
    return GradientSite(tensor, place.module, place.source)


def in_own_storage(
    program: Program, gradients: Sequence[fx.Node], origin: str, *, before: fx.Node | None = None
) -> list[fx.Node]:
    """Gradients that may be written to: each in memory of its own, which backward made for nothing else.

    A copy takes the place of a gradient that is an input or a value of forward, that overlaps itself, or that shares
    elements with another gradient or memory with another output. Parts of one bucket stay where they are.

    Args:
        program: of stage joint or step; uses by the update and by outputs of the role ``gradient`` are redirected.
        gradients: each once.
        origin: who needs it.
        before: where copies are made, in front of everything that reads them; in front of the optimizer by default.
    """
    others = [v for v, s in zip(program.output_values, program.outputs, strict=True) if s.role != "gradient"]
    returned = {base_of(value) for value in others if isinstance(value, fx.Node)}
    taken: dict[fx.Node, list[range]] = {}
    found = []
    for gradient in gradients:
        base, extent = base_of(gradient), _extent(value_of(gradient))
        same = taken.setdefault(base, [])
        shared = any(max(other.start, extent.start) < min(other.stop, extent.stop) for other in same)
        if shared or base in returned or not _made_by_backward(program, base) or _overlaps(value_of(gradient)):
            gradient = _copy(program, gradient, origin, before or all_gradients_made(program))
        else:
            same.append(extent)
        found.append(gradient)
    return found


def _extent(value: torch.Tensor) -> range:
    """The elements of its storage that a tensor may touch, from the first to the last."""
    start = _torch.size_hint(value.storage_offset())
    steps = zip(map(_torch.size_hint, value.shape), map(_torch.size_hint, value.stride()), strict=True)
    return range(start, start + 1 + sum((size - 1) * stride for size, stride in steps))


def base_of(node: fx.Node) -> fx.Node:
    """The node that allocated the memory behind views, elements of views, and results of writing in place."""
    while node.op == "call_function":
        if node.target is operator.getitem and not schema.is_view(schema.maker(node)):
            return node
        sources = schema.aliased_inputs(node)
        if not sources:
            return node
        node = sources[0]
    return node


def _made_by_backward(program: Program, base: fx.Node) -> bool:
    if base.op == "placeholder":
        return base in {node for node, _ in program.inputs_of("gradient")}
    return info(base).phase in _AFTER_FORWARD


def _overlaps(value: torch.Tensor) -> bool:
    steps = zip(map(_torch.size_hint, value.shape), map(_torch.size_hint, value.stride()), strict=True)
    return any(stride == 0 and size != 1 for size, stride in steps)


def _copy(program: Program, gradient: fx.Node, origin: str, before: fx.Node) -> fx.Node:
    why = f"{origin}: a gradient in memory of its own"
    clone = torch.ops.aten.clone.default
    own = program.insert(clone, (gradient,), before=before, phase=Phase.BACKWARD, like=gradient, origin=why)
    for name in gradient_owners(program).get(gradient, ()):
        program.hand_over_name(f"{name}~", gradient, own)
    for user in list(gradient.users):
        if user.op == "call_function" and user is not own and info(user).phase is Phase.UPDATE:
            user.replace_input_with(gradient, own)
    values = [
        own if value is gradient and spec.role == "gradient" else value
        for value, spec in zip(program.output_values, program.outputs, strict=True)
    ]
    program.set_outputs(values, program.outputs)
    return own
