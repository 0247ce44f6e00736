"""A program as plain data; ``graphopt.ir.files.deserialization`` reads it back."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from graphopt import _torch
from graphopt.errors import GraphoptError
from graphopt.ir.node import value_of
from graphopt.ir.ops.values import tensors_of
from graphopt.ir.program import Program

__all__ = ["SCHEMA_VERSION", "tensor_to_json", "to_json"]

SCHEMA_VERSION = 1
_CONSTANT_LIMIT = 16 * 1024 * 1024


def to_json(program: Program) -> dict[str, Any]:
    """Everything of a program but the data of its inputs; constants up to 16 MB are included where there is data.

    Raises:
        GraphoptError: for a program with something that has no textual form (a larger constant, an unknown callable).
    """
    device = program.context.device
    constants = program.constants if device is None else {}
    return {
        "schema": SCHEMA_VERSION,
        "stage": program.stage,
        "title": program.title,
        "history": list(program.history),
        "compiled": program.context.compiled,
        **({} if device is None else {"device": [device.name, device.kind]}),
        "inputs": [[spec.role, spec.target] for spec in program.inputs],
        "outputs": [[spec.role, spec.target] for spec in program.outputs],
        "constants": {name: _encode_constant(name, tensor) for name, tensor in constants.items()},
        "pass_state": {target: state.to_json() for target, state in program.pass_state.items()},
        "attributes": _encode_attributes(program.attributes),
        "symbols": _symbols(program),
        "nodes": _encode_graph(program.graph),
    }


# --- encoding --------------------------------------------------------------------------------------------------------


def _encode_attributes(modules: Mapping[str, Any], prefix: str = "") -> dict[str, list[dict[str, Any]]]:
    """Sub-graphs by path; one that a sub-graph refers to itself comes behind it, under a dotted path."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name, module in modules.items():
        if isinstance(module, fx.GraphModule):
            found[prefix + name] = _encode_graph(module.graph)
            found |= _encode_attributes(dict(module.named_children()), f"{prefix}{name}.")
    return found


def _encode_graph(graph: fx.Graph) -> list[dict[str, Any]]:
    return [_encode_node(node) for node in graph.nodes]


def _encode_node(node: fx.Node) -> dict[str, Any]:
    known = node.meta.get("graphopt") if node.op != "output" else None
    record: dict[str, Any] = {
        "name": node.name,
        "op": node.op,
        "target": _encode_target(node.target) if node.op == "call_function" else str(node.target),
        "args": [_encode(arg) for arg in node.args],
        "kwargs": {key: _encode(value) for key, value in node.kwargs.items()},
        "value": _encode_value(value_of(node), given=node.op == "placeholder"),
    }
    if known is not None:
        record |= {
            "phase": known.phase.value,
            "module": known.module,
            "names": list(known.names),
            "source": known.source,
            "origin": known.origin,
            "policy": known.policy.value if known.policy else None,
            "region": known.region,
        }
        if known.batch_slice is not None:
            record["batch_slice"] = [known.batch_slice.number, known.batch_slice.of, known.batch_slice.phase.value]
    return record


def _encode_target(target: Any) -> str:
    if isinstance(target, _torch.OpOverload):
        return str(target)
    if isinstance(target, _torch.HigherOrderOperator):
        return f"higher_order.{target}"
    module, name = getattr(target, "__module__", ""), getattr(target, "__name__", "")
    if module in ("_operator", "operator"):
        return f"operator.{name}"
    if module in ("math", "torch"):
        return f"{module}.{name}"
    raise GraphoptError(
        f"{target!r} has no textual form: programs call aten ops, registered ops and operator functions"
    )


def _encode(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return {"list" if isinstance(value, list) else "tuple": [_encode(item) for item in value]}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return {"float": repr(value)}
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, dict):
        return {"dict": {key: _encode(item) for key, item in value.items()}}
    if isinstance(value, slice):
        return {"slice": [_encode(value.start), _encode(value.stop), _encode(value.step)]}
    return _encode_atom(value)


def _encode_atom(value: Any) -> Any:
    if isinstance(value, (torch.dtype, torch.memory_format, torch.layout)):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, (_torch.OpOverload, _torch.HigherOrderOperator)):
        return {"op": _encode_target(value)}
    raise GraphoptError(f"the argument {value!r} of type {type(value).__name__} has no textual form")


def _encode_value(value: Any, *, given: bool = False) -> Any:
    """What is known of a value without its data; ``given`` for one that comes from outside."""
    if isinstance(value, torch.Tensor):
        return tensor_to_json(value)
    if isinstance(value, (tuple, list)):
        return {"list" if isinstance(value, list) else "tuple": [_encode_value(item) for item in value]}
    if isinstance(value, torch.SymInt):
        size = _encode_size(value)
        return {"constant": size} if isinstance(size, int) else {"symbolic": size}
    if isinstance(value, torch.SymFloat) and given:
        return {"number": _torch.number_hint(value)}
    if isinstance(value, (torch.SymFloat, torch.SymBool)):
        return {"computed": type(value).__name__}
    return {"constant": value} if value is None or isinstance(value, (bool, int, float, str)) else None


def tensor_to_json(value: torch.Tensor) -> dict[str, Any]:
    """A tensor without its data; sizes that vary are expressions of symbols."""
    return {
        "shape": [_encode_size(size) for size in value.shape],
        "stride": [_encode_size(stride) for stride in value.stride()],
        "dtype": str(value.dtype).removeprefix("torch."),
        "device": str(value.device),
    }


def _encode_size(size: Any) -> Any:
    if isinstance(size, torch.SymInt) and not size.node.expr.is_number:
        return {"expression": str(size.node.expr), "hint": _torch.size_hint(size)}
    return int(size)


def _symbols(program: Program) -> dict[str, int]:
    """The symbols that sizes are written with, and their example values."""
    names: set[str] = set()
    for node in program.graph.nodes:
        value = value_of(node)
        numbers = [number for tensor in tensors_of(value) for number in (*tensor.shape, *tensor.stride())]
        for number in (value, *numbers):
            if isinstance(number, torch.SymInt):
                names.update(_torch.size_symbols(number))
    return {name: known.hint for name, known in _torch.open_symbols(program.fake_mode).items() if name in names}


def _encode_constant(name: str, tensor: torch.Tensor) -> dict[str, Any]:
    if tensor.numel() * tensor.element_size() > _CONSTANT_LIMIT:
        raise GraphoptError(
            f"the constant {name!r} of shape {tuple(tensor.shape)} is larger than 16 MB; register it as a buffer of "
            "the model, so that programs refer to it instead of holding it"
        )
    raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return {
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "device": str(tensor.device),
        "base64": base64.b64encode(raw).decode("ascii"),
    }
