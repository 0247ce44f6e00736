"""The inputs of a program that was read, compared with the tensors that it is going to be given."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from graphopt.capture import CaptureSession
from graphopt.errors import GraphoptError
from graphopt.ir.node import value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.values import tensors_of
from graphopt.ir.program import Program

__all__ = ["check_inputs", "live_constants"]


def check_inputs(program: Program, session: CaptureSession) -> None:
    """Compare what a program takes with the model, the optimizer and the call.

    Raises:
        GraphoptError: naming the input that is missing or has another shape, dtype or device.
    """
    known = session.tensors()
    batch = session.call_tensors()
    inputs = [(node, spec) for node, spec in program.inputs_of("input")]
    if len(inputs) > len(batch):
        raise GraphoptError(f"the program takes {len(inputs)} tensors of the call, which has {len(batch)}")
    for (node, spec), tensor in zip(inputs, batch, strict=False):
        _compare(spec.target, value_of(node), tensor)
    parameters = {spec.target: value_of(node) for node, spec in program.inputs_of("parameter")}
    for node, spec in program.inputs_of("parameter", "buffer"):
        if spec.target not in known:
            raise GraphoptError(f"the model has no parameter or buffer {spec.target!r}")
        _compare(spec.target, value_of(node), known[spec.target])
    for node, spec in program.inputs_of("gradient"):
        if spec.target not in parameters and spec.target not in known:
            raise GraphoptError(f"a gradient of {spec.target!r}, which is no parameter")
        _compare(f"the gradient of {spec.target}", value_of(node), known[spec.target])
    for node, spec in program.inputs_of("constant"):
        _compare(f"the constant {spec.target}", value_of(node), program.constants.get(node.name))
    for node, spec in program.inputs_of("state"):
        _compare_state(spec.target, value_of(node), session, known)
    _check_update(program)


def _compare(name: str, value: Any, tensor: torch.Tensor | None) -> None:
    if tensor is None or not isinstance(value, torch.Tensor):
        raise GraphoptError(f"{name}: a tensor is expected, and there is none")
    if value.dim() != tensor.dim() or any(
        isinstance(size, int) and size != own for size, own in zip(value.shape, tensor.shape, strict=True)
    ):
        raise GraphoptError(f"{name}: the program takes the shape {list(value.shape)}, and it is {list(tensor.shape)}")
    if value.dtype != tensor.dtype or value.device != tensor.device:
        raise GraphoptError(
            f"{name}: the program takes {value.dtype} on {value.device}, and it is {tensor.dtype} on {tensor.device}"
        )


def _compare_state(target: str, value: Any, session: CaptureSession, known: dict[str, torch.Tensor]) -> None:
    """State that the optimizer has already; what it does not have yet is made by the program of the first step."""
    name, _, key = target.rpartition("/")
    if session.optimizer is None or name not in known:
        raise GraphoptError(f"{target!r} is no state of this optimizer")
    state = session.optimizer.state.get(known[name])
    if not state:
        return
    if key not in state:
        raise GraphoptError(f"the optimizer's state of {name} has no {key!r}")
    if isinstance(state[key], torch.Tensor):
        _compare(target, value, state[key])


def _check_update(program: Program) -> None:
    """Lists that fused kernels walk together have to be of one length and one shape, place by place.

    These kernels do not check what they are given.
    """
    for node in program.graph.nodes:
        name = schema.op_name(node)
        if node.op != "call_function" or not name.startswith(("_fused_", "_foreach_")):
            continue
        lists = [arg for arg in node.args if isinstance(arg, (list, tuple)) and arg and _are_tensors(arg)]
        for other in lists[1:]:
            if len(other) != len(lists[0]):
                raise GraphoptError(f"{node.name}: lists of {len(lists[0])} and {len(other)} tensors")
            for one, two in zip(lists[0], other, strict=True):
                sizes = [tuple(value_of(item).shape) for item in (one, two)]
                if sizes[0] != sizes[1] and 1 not in (value_of(one).numel(), value_of(two).numel()):
                    raise GraphoptError(f"{node.name}: tensors of the shapes {list(sizes[0])} and {list(sizes[1])}")


def _are_tensors(items: Any) -> bool:
    return all(hasattr(item, "meta") and tensors_of(value_of(item)) for item in items)


def live_constants(program: Program, session: CaptureSession) -> None:
    """Let constants that the model holds as plain attributes be the model's own, as they are after a capture."""
    for node, spec in program.inputs_of("constant"):
        path, _, name = spec.target.rpartition(".")
        try:
            owner: nn.Module = session.model.get_submodule(path)
        except AttributeError:
            continue
        own = vars(owner).get(name)
        kept = program.constants[node.name]
        if isinstance(own, torch.Tensor) and _layout(own) == _layout(kept):
            program.constants[node.name] = own


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device
