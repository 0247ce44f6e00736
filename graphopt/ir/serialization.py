"""A program as plain data, and back."""

from __future__ import annotations

import ast
import base64
import functools
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from graphopt import _torch
from graphopt.errors import GraphoptError
from graphopt.ir.context import Context
from graphopt.ir.node import InputSpec, NodeInfo, OutputSpec, Phase, Policy, set_info, set_value, value_of
from graphopt.ir.ops import register_all
from graphopt.ir.ops.values import tensors_of
from graphopt.ir.program import Program
from graphopt.ir.state import PassState

__all__ = ["SCHEMA_VERSION", "from_json", "to_json"]

SCHEMA_VERSION = 1
_CONSTANT_LIMIT = 16 * 1024 * 1024

_HIGHER_ORDER = {
    "run_and_save_rng_state": _torch.run_and_save_rng_state,
    "run_with_rng_state": _torch.run_with_rng_state,
    "graphopt_custom_function": _torch.custom_function,
}

_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "Max": lambda *values: functools.reduce(torch.sym_max, values),
    "Min": lambda *values: functools.reduce(torch.sym_min, values),
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "IntTrueDiv": operator.truediv,
    "FloatTrueDiv": operator.truediv,
    "PowByNatural": operator.pow,
    "ModularIndexing": lambda value, divisor, modulus: value // divisor % modulus,
    "CeilToInt": math.ceil,
    "FloorToInt": math.floor,
    "TruncToInt": math.trunc,
    "ToFloat": torch.sym_float,
}
"""How expressions of sizes are computed again when they are read."""


def to_json(program: Program) -> dict[str, Any]:
    """Everything of a program but the data of its inputs; constants up to 16 MB are included.

    Raises:
        GraphoptError: for a program with something that has no textual form (a larger constant, an unknown callable).
    """
    return {
        "schema": SCHEMA_VERSION,
        "stage": program.stage,
        "title": program.title,
        "history": list(program.history),
        "compiled": program.context.compiled,
        "inputs": [[spec.role, spec.target] for spec in program.inputs],
        "outputs": [[spec.role, spec.target] for spec in program.outputs],
        "constants": {name: _encode_constant(name, tensor) for name, tensor in program.constants.items()},
        "pass_state": {target: state.to_json() for target, state in program.pass_state.items()},
        "attributes": _encode_attributes(program.attributes),
        "symbols": _symbols(program),
        "nodes": _encode_graph(program.graph),
    }


def from_json(data: dict[str, Any]) -> Program:
    """The program that ``to_json`` described.

    Raises:
        GraphoptError: for data of another schema, or that names ops which are not installed.
    """
    if data.get("schema") != SCHEMA_VERSION:
        raise GraphoptError(
            f"this description has schema {data.get('schema')!r}, and this version reads {SCHEMA_VERSION}; "
            "make it again with `graphopt dump --format json`"
        )
    decoder = _Decoder(data["symbols"])
    return Program(
        graph=decoder.graph(data["nodes"]),
        stage=data["stage"],
        inputs=[InputSpec(*spec) for spec in data["inputs"]],
        outputs=[OutputSpec(*spec) for spec in data["outputs"]],
        constants={name: _decode_constant(value) for name, value in data["constants"].items()},
        attributes=decoder.attributes(data["attributes"]),
        title=data["title"],
        context=Context(history=tuple(data["history"]), compiled=data.get("compiled", False)),
        pass_state={target: PassState.from_json(state) for target, state in data.get("pass_state", {}).items()},
    )


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
        return {
            "shape": [_encode_size(size) for size in value.shape],
            "stride": [_encode_size(stride) for stride in value.stride()],
            "dtype": str(value.dtype).removeprefix("torch."),
            "device": str(value.device),
        }
    if isinstance(value, (tuple, list)):
        return {"list" if isinstance(value, list) else "tuple": [_encode_value(item) for item in value]}
    if isinstance(value, torch.SymInt):
        size = _encode_size(value)
        return {"constant": size} if isinstance(size, int) else {"symbolic": size}
    if isinstance(value, torch.SymFloat) and given:
        return {"number": float(value.node.hint)}
    if isinstance(value, (torch.SymFloat, torch.SymBool)):
        return {"computed": type(value).__name__}
    return {"constant": value} if value is None or isinstance(value, (bool, int, float, str)) else None


def _encode_size(size: Any) -> Any:
    if isinstance(size, torch.SymInt) and not size.node.expr.is_number:
        return {"expression": str(size.node.expr), "hint": _torch.size_hint(size)}
    return int(size)


def _symbols(program: Program) -> dict[str, int]:
    """The symbols that sizes are written with, and their example values."""
    found: dict[str, int] = {}
    for node in program.graph.nodes:
        for tensor in tensors_of(value_of(node)):
            sizes: list[Any] = list(tensor.shape)
            found |= {str(size): _torch.size_hint(size) for size in sizes if str(size).isidentifier()}
    return found


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


# --- decoding --------------------------------------------------------------------------------------------------------


def _decode_constant(data: dict[str, Any]) -> torch.Tensor:
    raw = bytearray(base64.b64decode(data["base64"]))
    dtype = getattr(torch, data["dtype"])
    flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return flat.reshape(data["shape"]).to(data["device"])


def _decode_target(text: str) -> Any:
    space, _, rest = text.partition(".")
    if space == "higher_order":
        if rest in _HIGHER_ORDER:
            return _HIGHER_ORDER[rest]
        return getattr(torch.ops.higher_order, rest)
    if space == "operator":
        return getattr(operator, rest)
    if space == "torch":
        return getattr(torch, rest)
    if space == "math":
        return getattr(math, rest)
    name, _, overload = rest.partition(".")
    if space == "graphopt":
        register_all()
    try:
        return getattr(getattr(getattr(torch.ops, space), name), overload or "default")
    except AttributeError as error:
        raise GraphoptError(
            f"this installation has no op {text!r}: import the package that registers it first"
        ) from error


class _Decoder:
    def __init__(self, symbols: dict[str, int]) -> None:
        self._mode = _torch.fake_mode(symbols)
        self._symbols = {name: _torch.symbolic_size(self._mode, name, hint) for name, hint in symbols.items()}

    def attributes(self, records: dict[str, list[dict[str, Any]]], prefix: str = "") -> dict[str, fx.GraphModule]:
        found: dict[str, fx.GraphModule] = {}
        for path, nodes in records.items():
            name = path.removeprefix(prefix)
            if path.startswith(prefix) and "." not in name:
                found[name] = fx.GraphModule(self.attributes(records, f"{path}."), self.graph(nodes))
        return found

    def graph(self, records: list[dict[str, Any]]) -> fx.Graph:
        graph = fx.Graph()
        nodes: dict[str, fx.Node] = {}
        for record in records:
            args = tuple(self._value(arg, nodes) for arg in record["args"])
            kwargs = {key: self._value(value, nodes) for key, value in record["kwargs"].items()}
            target = _decode_target(record["target"]) if record["op"] == "call_function" else record["target"]
            node = graph.create_node(record["op"], target, args, kwargs, name=record["name"])
            nodes[record["name"]] = node
            if record["value"] is not None:
                set_value(node, self._node_value(node, record["value"]))
            if "phase" in record:
                set_info(node, _decode_info(record))
        return graph

    def _node_value(self, node: fx.Node, data: dict[str, Any]) -> Any:
        if "number" in data:
            return _torch.symbolic_float(node.name, data["number"])
        return _compute(node) if "computed" in data else self._example(data)

    def _value(self, data: Any, nodes: dict[str, fx.Node]) -> Any:
        if not isinstance(data, dict):
            return data
        ((kind, value),) = data.items()
        if kind in ("list", "tuple"):
            items = [self._value(item, nodes) for item in value]
            return items if kind == "list" else tuple(items)
        if kind == "dict":
            return {key: self._value(item, nodes) for key, item in value.items()}
        if kind == "slice":
            return slice(*(self._value(item, nodes) for item in value))
        simple: dict[str, Callable[[], Any]] = {
            "node": lambda: nodes[value],
            "float": lambda: float(value),
            "torch": lambda: getattr(torch, value),
            "device": lambda: torch.device(value),
            "complex": lambda: complex(*value),
            "op": lambda: _decode_target(value),
        }
        return simple[kind]()

    def _size(self, data: Any) -> Any:
        if isinstance(data, dict):
            return self._evaluate(ast.parse(data["expression"], mode="eval").body, data)
        return data

    def _evaluate(self, tree: ast.expr, data: dict[str, Any]) -> Any:
        """A size written as an expression, computed from the symbols: sympy would read ``//`` as another function."""
        match tree:
            case ast.Constant(value=int() | float() as number):
                return number
            case ast.Name(id=name) if name in self._symbols:
                return self._symbols[name]
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._evaluate(operand, data)
            case ast.BinOp(op=ast.Mult()):
                # numbers last: sympy would multiply a number into a sum at once, and print the product differently
                factors = sorted(_factors(tree), key=lambda factor: isinstance(factor, ast.Constant))
                return functools.reduce(operator.mul, [self._evaluate(factor, data) for factor in factors])
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                return _ARITHMETIC[type(op)](self._evaluate(left, data), self._evaluate(right, data))
            case ast.Call(func=ast.Name(id=name), args=items) if name in _FUNCTIONS:
                return _FUNCTIONS[name](*(self._evaluate(item, data) for item in items))
        raise GraphoptError(
            f"the size {data['expression']!r} cannot be read: {ast.unparse(tree)!r} is none of the symbols "
            f"{sorted(self._symbols)} and no function that sizes are made of ({', '.join(_FUNCTIONS)})"
        )

    def _example(self, data: dict[str, Any]) -> Any:
        if "constant" in data:
            return data["constant"]
        if "symbolic" in data:
            return self._size(data["symbolic"])
        for kind in ("list", "tuple"):
            if kind in data:
                items = [None if item is None else self._example(item) for item in data[kind]]
                return items if kind == "list" else tuple(items)
        with self._mode:
            return torch.empty_strided(
                [self._size(size) for size in data["shape"]],
                [self._size(stride) for stride in data["stride"]],
                dtype=getattr(torch, data["dtype"]),
                device=data["device"],
            )


def _factors(tree: ast.expr) -> list[ast.expr]:
    if isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.Mult):
        return [*_factors(tree.left), *_factors(tree.right)]
    return [tree]


def _compute(node: fx.Node) -> Any:
    """The value of a call on sizes that gives a symbolic number or truth value."""
    args, kwargs = _torch.map_aggregate(
        (node.args, node.kwargs), lambda a: value_of(a) if isinstance(a, fx.Node) else a
    )
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _decode_info(record: dict[str, Any]) -> NodeInfo:
    return NodeInfo(
        phase=Phase(record["phase"]),
        module=record["module"],
        names=tuple(record["names"]),
        source=record["source"],
        origin=record["origin"],
        policy=Policy(record["policy"]) if record["policy"] else None,
        region=record["region"],
    )
