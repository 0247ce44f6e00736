"""From plain data to a program: the reading half of the JSON form.

The data may come from anybody. Ops are looked up by their overload, Python functions and dtypes in fixed tables, sizes
are read by a small parser; nothing in a file is evaluated, imported or called. Sizes, depths and counts are bounded.
"""

from __future__ import annotations

import base64
import binascii
import keyword
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, get_args

import torch
from torch import fx

from graphopt import _torch
from graphopt.errors import GraphoptError, quoted
from graphopt.ir.context import Context, NamedDevice
from graphopt.ir.files.call_targets import PYTHON_FUNCTIONS, read_target
from graphopt.ir.files.checked_json import Field
from graphopt.ir.files.serialization import SCHEMA_VERSION
from graphopt.ir.files.size_expressions import read_size
from graphopt.ir.node import (
    INPUT_ROLES,
    OUTPUT_ROLES,
    BatchSlice,
    InputSpec,
    NodeInfo,
    OutputSpec,
    Phase,
    Policy,
    Stage,
    set_info,
    set_value,
    value_of,
)
from graphopt.ir.program import Program
from graphopt.ir.state import PassState

__all__ = ["from_json", "read_pass_state", "read_tensor"]

_DEEPEST = 32
"""Lists inside of lists, and sub-graphs inside of sub-graphs."""

_MOST_SYMBOLS = 1_000
_LARGEST_HINT = 2**40
_LARGEST_EXPONENT = 8
_MOST_DIMENSIONS = 64
_LARGEST_CONSTANT = 16 * 1024 * 1024

_PHASES = {phase.value: phase for phase in Phase}
_DTYPES = {str(v).removeprefix("torch."): v for v in vars(torch).values() if isinstance(v, torch.dtype)}
_TORCH_CONSTANTS = _DTYPES | {
    str(v).removeprefix("torch."): v for v in vars(torch).values() if isinstance(v, (torch.memory_format, torch.layout))
}

_OF_NODES = ("name", "op", "target", "args", "kwargs", "value")
_OF_CALLS = ("phase", "module", "names", "source", "origin", "policy", "region", "batch_slice")

_REQUIRED = ("schema", "stage", "title", "history", "inputs", "outputs", "constants", "attributes", "symbols", "nodes")


def from_json(data: Any, mode: _torch.FakeTensorMode | None = None) -> Program:
    """The program that ``to_json`` described.

    Args:
        data: the description.
        mode: whose symbols sizes that vary are made of, for programs that share them; one of the program's own by
            default.

    Raises:
        GraphoptError: for data of another schema, that names ops which are not installed, or that is no description of
            a program; with the place in the data.
    """
    document = Field(data)
    if not document.is_object:
        raise document.expected("the description of a program, an object")
    if data.get("schema") != SCHEMA_VERSION or data["schema"] is True:
        raise GraphoptError(
            f"this description has schema {document['schema'].value!r:.40}, and this version reads {SCHEMA_VERSION}; "
            "make it again with `graphopt dump --format json`"
            if "schema" in document
            else "$: 'schema' is missing: is this the description of a program, as to_json gives it?"
        )
    parts = document.parts(_REQUIRED, ("compiled", "device", "pass_state"))
    try:
        return _program(parts, mode)
    except (RecursionError, MemoryError) as error:
        raise GraphoptError(f"$: too deep or too large to be read ({type(error).__name__})") from error


def _program(parts: Mapping[str, Field], mode: _torch.FakeTensorMode | None) -> Program:
    device = _named_device(parts["device"]) if "device" in parts else None
    decoder = _Decoder(_own_mode(parts["symbols"], device) if mode is None else mode)
    compiled = parts["compiled"].truth() if "compiled" in parts else False
    program = Program(
        graph=decoder.graph(parts["nodes"]),
        stage=parts["stage"].one_of({name: name for name in get_args(Stage)}),
        inputs=[InputSpec(*_role_and_target(item, INPUT_ROLES)) for item in parts["inputs"].items()],
        outputs=[OutputSpec(*_role_and_target(item, OUTPUT_ROLES)) for item in parts["outputs"].items()],
        constants={name: _constant(item) for name, item in parts["constants"].entries()},
        attributes=decoder.attributes(parts["attributes"]),
        title=parts["title"].text(),
        context=Context(tuple(item.text() for item in parts["history"].items()), compiled, device),
    )
    if "pass_state" in parts:
        program.pass_state = {name: read_pass_state(item) for name, item in parts["pass_state"].entries()}
    _check_signature(program, parts)
    return program


def _named_device(field: Field) -> NamedDevice:
    """The device that a program without data is for."""
    pair = list(field.items(most=2))
    if len(pair) != 2:
        raise field.expected("a name and a type of device")
    return NamedDevice(pair[0].text(), pair[1].one_of({kind: kind for kind in ("cpu", "cuda")}))


def _check_signature(program: Program, parts: Mapping[str, Field]) -> None:
    """Inputs, outputs, constants and pass state have to be those of the graph."""
    placeholders = program.placeholders
    if len(placeholders) != len(program.inputs):
        raise parts["inputs"].error(f"{len(program.inputs)} inputs, and {len(placeholders)} placeholders in the graph")
    if len(program.output_values) != len(program.outputs):
        count = len(program.output_values)
        raise parts["outputs"].error(f"{len(program.outputs)} outputs, and {count} values that the graph returns")
    constants = {node.name for node, _ in program.inputs_of("constant")}
    for name in program.constants:
        if name not in constants:
            raise parts["constants"].error(f"{name!r:.80} is no input of the graph with the role constant")
    states = {spec.target for _, spec in program.inputs_of("pass_state")}
    for name in program.pass_state:
        if name not in states:
            raise parts["pass_state"].error(f"{name!r:.80} is no input of the graph with the role pass_state")


def _role_and_target(field: Field, roles: tuple[str, ...]) -> tuple[str, str]:
    pair = list(field.items(most=2))
    if len(pair) != 2:
        raise field.expected("a role and a target")
    return pair[0].one_of({role: role for role in roles}), pair[1].text()


# --- values ----------------------------------------------------------------------------------------------------------


def _is_here(kind: str) -> bool:
    """Whether there is a device of a kind; values on one that is not here would end the process."""
    module = getattr(torch, kind, None)
    return bool(module is not None and module.is_available())


def _device(field: Field) -> torch.device:
    text = field.text(longest=20)
    kind, _, index = text.partition(":")
    if kind not in ("cpu", "cuda", "meta", "mps", "xpu", "hpu") or not (index == "" or index.isdecimal()):
        raise field.expected("a device such as cpu or cuda:0")
    if len(index) > 3:
        raise field.error(f"there is no device {text!r}")
    if kind not in ("cpu", "meta") and not _is_here(kind):
        raise field.error(f"there is no {kind} device here, which this program was captured on: read it where there is")
    return torch.device(text)


def _constant(field: Field) -> torch.Tensor:
    parts = field.parts(("shape", "dtype", "device", "base64"))
    dtype = parts["dtype"].one_of(_DTYPES)
    shape = [item.whole(0, _LARGEST_CONSTANT) for item in parts["shape"].items(most=_MOST_DIMENSIONS)]
    size = math.prod(shape) * dtype.itemsize
    if size > _LARGEST_CONSTANT:
        raise field.error(f"a constant of {size} bytes; at most {_LARGEST_CONSTANT} are read")
    try:
        raw = bytearray(base64.b64decode(parts["base64"].text(longest=2 * _LARGEST_CONSTANT), validate=True))
    except (binascii.Error, ValueError) as error:
        raise parts["base64"].error(f"no base64: {error}") from error
    if len(raw) != size:
        raise parts["base64"].error(f"{len(raw)} bytes, and the shape and dtype take {size}")
    flat = torch.frombuffer(raw, dtype=torch.uint8).view(dtype) if raw else torch.empty(0, dtype=dtype)
    return flat.reshape(shape).to(_device(parts["device"]))


def read_pass_state(field: Field) -> PassState:
    """What a pass keeps, as ``PassState.to_json`` described it."""
    parts = field.parts(("shape", "dtype", "device", "fill", "source", "follows", "saved", "local"), ("shard", "group"))
    try:
        fill = float(parts["fill"].text(longest=40))
    except ValueError:
        raise parts["fill"].expected("a number as text") from None
    return PassState(
        shape=tuple(item.whole(0) for item in parts["shape"].items(most=_MOST_DIMENSIONS)),
        dtype=parts["dtype"].one_of(_DTYPES),
        device=_device(parts["device"]),
        fill=fill,
        source=parts["source"].text(),
        follows=parts["follows"].truth(),
        saved=parts["saved"].truth(),
        local=parts["local"].truth(),
        shard=_shard(parts["shard"]) if "shard" in parts else None,
        group=parts["group"].text() if "group" in parts else "",
    )


def _shard(field: Field) -> tuple[int, int]:
    """The first element of a part of a parameter, and how many they are."""
    pair = [item.whole(0) for item in field.items(most=2)]
    if len(pair) != 2:
        raise field.expected("the first element and how many")
    return pair[0], pair[1]


def _own_mode(symbols: Field, device: NamedDevice | None) -> _torch.FakeTensorMode:
    """A mode for the values of one program, which may stand for those of another device."""
    ranges = {}
    for name, hint in symbols.entries(most=_MOST_SYMBOLS):
        ranges[Field(name, symbols.path).identifier()] = _torch.SymbolRange(hint.whole(0, _LARGEST_HINT))
    return _torch.fake_mode(ranges) if device is None else _torch.stand_in_mode(device)


def read_tensor(field: Field, mode: _torch.FakeTensorMode) -> torch.Tensor:
    """The tensor without data that ``tensor_to_json`` described, in a mode that has its symbols.

    Raises:
        GraphoptError: where it is none, with the place in the data.
    """
    return _Decoder(mode).tensor(field)


class _Decoder:
    """Reads graphs whose sizes are written with the symbols of a mode."""

    def __init__(self, mode: _torch.FakeTensorMode) -> None:
        self._mode = mode
        known = _torch.open_symbols(mode)
        self._symbols = {name: _torch.symbolic_size(mode, name, symbol.hint) for name, symbol in known.items()}
        self._layouts: dict[tuple[Any, ...], tuple[list[Any], list[Any], torch.dtype, torch.device]] = {}
        self._targets: dict[str, Any] = {}

    def attributes(self, field: Field) -> dict[str, fx.GraphModule]:
        """The sub-graphs that a graph refers to."""
        records = dict(field.entries())
        for path, nodes in records.items():
            steps = path.split(".")
            if len(steps) > _DEEPEST or not all(step.isidentifier() for step in steps):
                raise nodes.error("the path of a sub-graph is names joined by dots")
            if len(steps) > 1 and ".".join(steps[:-1]) not in records:
                raise nodes.error(f"there is no sub-graph {'.'.join(steps[:-1])!r:.80} to hold it")
        return self._attributes(records, "")

    def _attributes(self, records: Mapping[str, Field], prefix: str) -> dict[str, fx.GraphModule]:
        found: dict[str, fx.GraphModule] = {}
        for path, nodes in records.items():
            name = path.removeprefix(prefix)
            if path.startswith(prefix) and "." not in name:
                inner = self._attributes(records, f"{path}.")
                try:
                    found[name] = fx.GraphModule(inner, self.graph(nodes))
                except (RuntimeError, AttributeError, SyntaxError) as error:
                    raise nodes.error(f"no graph that runs: {quoted(error)}") from error
        return found

    def graph(self, field: Field) -> fx.Graph:
        """A graph from the records of its nodes."""
        graph = fx.Graph()
        nodes: dict[str, fx.Node] = {}
        finished = False
        for record in field.items():
            if finished:
                raise record.error("a node behind the output")
            node = self._node(record, graph, nodes)
            finished = node.op == "output"
        if not finished:
            raise field.error("the last node is no output")
        return graph

    def _node(self, record: Field, graph: fx.Graph, nodes: dict[str, fx.Node]) -> fx.Node:
        parts = record.parts(_OF_NODES, _OF_CALLS)
        op, name = parts["op"].one_of(_OPS), parts["name"].identifier()
        if name in nodes or keyword.iskeyword(name):
            raise parts["name"].error(f"{name!r} is a name of Python's or of another node")
        args = tuple(self._argument(item, nodes) for item in parts["args"].items())
        kwargs = {
            Field(key, value).identifier(): self._argument(value, nodes) for key, value in parts["kwargs"].entries()
        }
        target = self._target(parts["target"]) if op == "call_function" else _OPS_TARGETS[op](parts["target"])
        if op == "output" and not (len(args) == 1 and isinstance(args[0], (tuple, list)) and not kwargs):
            raise parts["args"].expected("one list with what the program returns")
        if target is operator.getitem and not (len(args) == 2 and isinstance(args[0], fx.Node) and not kwargs):
            raise parts["args"].expected("the node of a call with several results, and which of them")
        node = _torch.add_node(graph, op, target, args, kwargs, name)
        nodes[name] = node
        if parts["value"].value is not None:
            set_value(node, self._node_value(node, parts["value"]))
        if "phase" in parts:
            set_info(node, _info(record, parts))
        return node

    def _target(self, field: Field) -> Any:
        """What a call calls; each name is looked up once."""
        text = field.text(longest=400)
        if text not in self._targets:
            self._targets[text] = read_target(field)
        return self._targets[text]

    def _argument(self, field: Field, nodes: Mapping[str, fx.Node], depth: int = 0) -> Any:
        if not field.is_object:
            return _plain(field)
        if depth > _DEEPEST:
            raise field.error(f"lists inside of lists, deeper than {_DEEPEST}")
        kind, value = field.only_entry()
        if kind == "node":
            return value.one_of(nodes)
        if kind in ("list", "tuple"):
            items = [self._argument(item, nodes, depth + 1) for item in value.items()]
            return items if kind == "list" else tuple(items)
        if kind == "dict":
            return {key: self._argument(item, nodes, depth + 1) for key, item in value.entries()}
        if kind == "slice":
            ends = [self._argument(item, nodes, depth + 1) for item in value.items(most=3)]
            if len(ends) != 3 or any(isinstance(end, (list, tuple, dict, slice, str)) for end in ends):
                raise value.expected("start, stop and step")
            return slice(*ends)
        return Field(kind, field).one_of(_ARGUMENTS)(value)

    # --- example values ----------------------------------------------------------------------------------------------

    def _node_value(self, node: fx.Node, field: Field) -> Any:
        if "number" in field:
            return _torch.symbolic_float(node.name, field["number"].number())
        return _compute(node, field) if "computed" in field else self._example(field)

    def _example(self, field: Field, depth: int = 0) -> Any:
        if depth > _DEEPEST:
            raise field.error(f"values inside of values, deeper than {_DEEPEST}")
        if not field.is_object:
            raise field.expected("a value")
        if "constant" in field:
            return _plain(field["constant"])
        if "symbolic" in field:
            return read_size(field["symbolic"], self._symbols)
        for kind in ("list", "tuple"):
            if kind in field:
                items = [None if item.value is None else self._example(item, depth + 1) for item in field[kind].items()]
                return items if kind == "list" else tuple(items)
        return self.tensor(field)

    def tensor(self, field: Field) -> torch.Tensor:
        """A tensor without data."""
        shape, stride, dtype, device = self._layout(field)
        try:
            return _torch.example_tensor(self._mode, shape, stride, dtype, device)
        except (RuntimeError, ValueError, TypeError, OverflowError) as error:
            raise field.error(f"no tensor has this shape and stride: {quoted(error).splitlines()[0][:200]}") from error

    def _layout(self, field: Field) -> tuple[list[Any], list[Any], torch.dtype, torch.device]:
        """Shape, strides, dtype and device of a tensor; those of fixed sizes are read once for all that are alike."""
        parts = field.parts(("shape", "stride", "dtype", "device"))
        raw = [parts[name].value for name in ("shape", "stride", "dtype", "device")]
        alike = None
        if all(isinstance(numbers, list) and all(type(n) is int for n in numbers) for numbers in raw[:2]):
            alike = (*raw[0], None, *raw[1], *map(str, raw[2:]))
            if alike in self._layouts:
                return self._layouts[alike]
        shape = [read_size(item, self._symbols) for item in parts["shape"].items(most=_MOST_DIMENSIONS)]
        stride = [read_size(item, self._symbols) for item in parts["stride"].items(most=_MOST_DIMENSIONS)]
        if len(shape) != len(stride):
            raise parts["stride"].error(f"{len(stride)} strides for {len(shape)} dimensions")
        found = shape, stride, parts["dtype"].one_of(_DTYPES), _device(parts["device"])
        if alike is not None:
            self._layouts[alike] = found
        return found


def _name(field: Field) -> str:
    name = field.identifier()
    if keyword.iskeyword(name):
        raise field.error(f"{name!r} is a word of Python's")
    return name


def _path(field: Field) -> str:
    text = field.text(longest=400)
    if not all(step.isidentifier() and step.isascii() for step in text.split(".")):
        raise field.expected("names joined by dots")
    return text


_OPS = {name: name for name in ("placeholder", "call_function", "get_attr", "output")}
_OPS_TARGETS: dict[str, Callable[[Field], Any]] = {
    "placeholder": _name,
    "call_function": read_target,
    "get_attr": _path,
    "output": lambda field: field.one_of({"output": "output"}),
}


def _plain(field: Field) -> Any:
    """None, a truth value, a number of 64 bits or a text."""
    if field.value is None or isinstance(field.value, bool):
        return field.value
    if isinstance(field.value, int):
        return field.whole()
    if isinstance(field.value, float):
        return field.value
    return field.text()


def _float(field: Field) -> float:
    try:
        return float(field.text(longest=40))
    except ValueError:
        raise field.expected("a number as text") from None


def _complex(field: Field) -> complex:
    parts = [item.number() for item in field.items(most=2)]
    if len(parts) != 2:
        raise field.expected("a real and an imaginary part")
    return complex(*parts)


def _compute(node: fx.Node, field: Field) -> Any:
    """The value of a call on sizes that gives a symbolic number or truth value: arithmetic of the fixed list only."""
    if node.target not in PYTHON_FUNCTIONS.values() or node.kwargs:
        raise field.error("only arithmetic on sizes is computed")
    values = [value_of(arg) if isinstance(arg, fx.Node) else arg for arg in node.args]
    numbers = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
    if not all(isinstance(value, numbers) for value in values) or not all(_is_small(value) for value in values):
        raise field.error("only arithmetic on sizes is computed")
    if node.target in (operator.pow, operator.lshift, math.pow) and not _is_small(values[-1], _LARGEST_EXPONENT):
        raise field.error(f"an exponent above {_LARGEST_EXPONENT}")
    try:
        return node.target(*values)  # type: ignore[operator]
    except Exception as error:  # of arithmetic, of sympy
        raise field.error(f"cannot be computed: {type(error).__name__}: {error!s:.80}") from error


def _is_small(value: Any, largest: int = 2**63) -> bool:
    return not isinstance(value, int) or abs(value) <= largest


_ARGUMENTS: dict[str, Callable[[Field], Any]] = {
    "float": _float,
    "torch": lambda value: value.one_of(_TORCH_CONSTANTS),
    "device": _device,
    "complex": _complex,
    "op": read_target,
}
"""Arguments that hold no others."""


def _info(record: Field, parts: Mapping[str, Field]) -> NodeInfo:
    missing = [name for name in ("module", "names", "source", "origin", "policy", "region") if name not in parts]
    if missing:
        raise record.error(f"{missing[0]!r} is missing")
    policy, region = parts["policy"], parts["region"]
    return NodeInfo(
        phase=parts["phase"].one_of(_PHASES),
        module=parts["module"].text(),
        names=tuple(item.text() for item in parts["names"].items()),
        source=parts["source"].text(),
        origin=parts["origin"].text(),
        policy=None if policy.value is None else policy.one_of({known.value: known for known in Policy}),
        region=None if region.value is None else region.whole(),
        batch_slice=_batch_slice(parts["batch_slice"]) if "batch_slice" in parts else None,
    )


def _batch_slice(field: Field) -> BatchSlice:
    parts = list(field.items(most=3))
    if len(parts) != 3:
        raise field.expected("a number, the name of a call and a phase")
    return BatchSlice(parts[0].whole(0), parts[1].text(), parts[2].one_of(_PHASES))
