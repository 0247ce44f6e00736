"""Descriptions of programs from strangers: whatever is in them, reading gives a program or an error that says where."""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import json
import sys
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import graphopt
from graphopt import GraphoptError, Program
from graphopt.ir.context import Context
from graphopt.passes import Recompute
from tests.support.properties import examples
from tests.support.training import Blocks, next_token

CALLED = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "socket.connect", "shutil.rmtree")
"""What a file must not bring about, as the interpreter announces it."""

_watching: list[list[str]] = []


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    written = event == "open" and not set("wax+").isdisjoint(str(arguments[1]))
    if _watching and (written or event in CALLED):
        _watching[-1].append(f"{event} {arguments[:1]}")


sys.addaudithook(_watch)


def read(data: Any) -> Program | GraphoptError:
    """What reading gives; anything else that happens fails the test."""
    _watching.append([])
    try:
        return Program.from_json(data)
    except GraphoptError as error:
        return error
    finally:
        assert _watching.pop() == []


@functools.cache
def documents() -> list[str]:
    """Programs of every stage, with dropout recomputed, symbolic sizes, sub-graphs, constants and pass state."""
    tokens = torch.randint(11, (2, 5))
    model = Blocks(layers=1, p=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = graphopt.optimize_step(
        model, optimizer, "mixed-precision{dtype=float16 level=O2},recompute{checkpoints=blocks.*}", loss=next_token
    )
    programs = [step.prepare(tokens).program]
    rows = torch.export.Dim("rows", min=2, max=64)
    joint = graphopt.capture(
        nn.Sequential(nn.Linear(4, 4), nn.Dropout()), (torch.randn(6, 4),), dynamic_shapes=({0: rows},)
    )
    graphopt.Pipeline([Recompute("0")]).run(joint)
    programs += [joint, graphopt.capture(_Autocast(), (torch.randn(2, 4),), stage="forward")]
    return [json.dumps(program.to_json()) for program in programs]


class _Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.linear(x)
        return y * torch.tensor([1.0, 2.0, 3.0, 4.0])


def test_the_documents_themselves_are_read() -> None:
    for text in documents():
        program = read(json.loads(text))
        assert isinstance(program, Program)
        assert json.dumps(program.to_json()) == text


# --- one by one ------------------------------------------------------------------------------------------------------


def changed(path: str, value: Any, document: int = 1) -> Any:
    """A document with another value at a path such as ``nodes.3.target``."""
    data = json.loads(documents()[document])
    *steps, last = [int(step) if step.isdecimal() else step for step in path.split("/")]
    place = functools.reduce(lambda inner, step: inner[step], steps, data)
    place[last] = value
    return data


def first_call(data: Any) -> int:
    return next(i for i, node in enumerate(data["nodes"]) if node["op"] == "call_function")


CALL = str(first_call(json.loads(json.dumps({"nodes": [{"op": "call_function"}]}))))

TARGETS = [
    "operator.attrgetter", "operator.call", "operator.methodcaller", "operator.itemgetter", "torch.os", "torch.load",
    "torch.os.system", "torch.hub.load", "builtins.eval", "builtins.exec", "os.system", "subprocess.run",
    "math.__loader__",
    "torch.__builtins__", "load_library.x.y", "aten.__class__.default", "aten.mul.__call__", "_dir.x.default",
    "aten..default",
    "higher_order.__class__", "higher_order.nothing", "classes.x.y", "", ".", "aten.mul.Tensor\nimport os",
    "a" * 10_000,
]  # fmt: skip


@pytest.mark.sweep(cases=("True-operator.call", "True-math.__loader__"))
@pytest.mark.parametrize("target", TARGETS, ids=lambda text: text[:30])
@pytest.mark.parametrize("computed", [False, True])
def test_nothing_is_looked_up_outside_of_the_list(target: str, computed: bool) -> None:
    data = json.loads(documents()[1])
    node = data["nodes"][first_call(data)]
    node["target"] = target
    if computed:
        node["value"] = {"computed": "SymFloat"}
    error = read(data)
    assert isinstance(error, GraphoptError)
    assert f"$.nodes[{first_call(data)}]" in str(error)
    assert len(str(error)) < 2000


EXPRESSIONS = [
    "__import__('os').system('true')", "9**9**9**9", "s0**9", "2**s0", "s0" + "+s0" * 400, "(" * 400 + "s0" + ")" * 400,
    "s0.__class__", "[s0]*9", "lambda: s0", "s0 if s0 else 1", "Max()", "Max(*[1])", "exec('x')", "s0 // 0",
    "Mod(s0, 0)",
    "1e999", "'a'*9", "s0\x00", "\ud800", "", "s0 s0", "f'{s0}'", "-" * 400 + "s0", "PowByNatural(s0, 99999)",
    "9" * 499,
]  # fmt: skip


@pytest.mark.parametrize("text", EXPRESSIONS, ids=lambda text: ascii(text)[:30])
def test_an_expression_is_read_and_never_evaluated(text: str) -> None:
    data = json.loads(documents()[1])
    shaped = next(node for node in data["nodes"] if isinstance(node["value"], dict) and "shape" in node["value"])
    shaped["value"]["shape"][0] = {"expression": text, "hint": 6}
    error = read(data)
    assert isinstance(error, GraphoptError)
    assert ".value.shape[0]" in str(error)


@pytest.mark.parametrize("name", ["__import__('os').system('true')", "s 0", "", "a\nb", "s0\x00", "ſ", "1", "9" * 300])
def test_a_symbol_is_a_name(name: str) -> None:
    error = read(changed("symbols", {name: 3}))
    assert isinstance(error, GraphoptError)
    assert "$.symbols" in str(error)


NESTED: Any = functools.reduce(lambda inner, _: {"list": [inner]}, range(3000), 0)

WRONG: list[tuple[str, Any, str]] = [
    ("schema", 99, "schema 99, and this version reads"),
    ("schema", True, "schema True"),
    ("stage", "later", "$.stage"),
    ("nodes", {}, "$.nodes: expected a list, found an object of 0"),
    ("nodes", [], "$.nodes: the last node is no output"),
    ("nodes/0/name", "x\ny", "$.nodes[0].name"),
    ("nodes/0/name", "import", "a name of Python's"),
    ("nodes/0/target", "x): import os #", "$.nodes[0].target"),
    ("nodes/0/target", "class", "$.nodes[0].target"),
    ("nodes/0/op", "call_method", "$.nodes[0].op"),
    ("nodes/0/op", "call_module", "$.nodes[0].op"),
    ("nodes/0/value/dtype", "nn", "$.nodes[0].value.dtype"),
    ("nodes/0/value/device", "cuda:0", "there is no cuda device here"),
    ("nodes/0/value/device", "cpu; import os", "$.nodes[0].value.device"),
    ("nodes/0/value/shape", [-1, 4], "$.nodes[0].value.shape[0]"),
    ("nodes/0/value/shape", [2**62, 2**62], "$.nodes[0].value"),
    ("nodes/0/value/shape", [10**400, 4], "a number of 1329 bits"),
    ("nodes/0/value/shape", [1] * 100, "at most 64 are read"),
    ("nodes/0/value/stride", [1], "1 strides for 2 dimensions"),
    ("nodes/0/phase", "never", "$.nodes[0].phase"),
    ("nodes/0/names", "weight", "$.nodes[0].names"),
    ("nodes/0/extra", 1, "$.nodes[0]: 'extra' means nothing here"),
    ("inputs", [], "0 inputs, and"),
    ("inputs/0", ["parameter"], "expected a role and a target"),
    ("inputs/0/0", "owner", "$.inputs[0][0]"),
    ("outputs", [], "$.outputs"),
    ("constants", {"x": {}}, "$.constants.x: 'shape' is missing"),
    ("attributes", {"a b": []}, "$.attributes['a b']"),
    ("attributes", {"a.b": []}, "there is no sub-graph 'a'"),
    ("title", 3, "$.title: expected text"),
    ("title", "\ud800", "lone surrogate"),
    ("history", "recompute", "$.history: expected a list"),
    ("pass_state", [], "$.pass_state"),
    ("pass_state", {"x": {"shape": [1]}}, "$.pass_state.x"),
]


@pytest.mark.parametrize(("path", "value", "message"), WRONG, ids=[f"{path}={value!r:.20}" for path, value, _ in WRONG])
def test_what_is_wrong_is_named_with_its_place(path: str, value: Any, message: str) -> None:
    error = read(changed(path, value))
    assert isinstance(error, GraphoptError)
    assert message in str(error)
    assert len(str(error)) < 1000


@pytest.mark.parametrize("data", [None, 3, "text", [], {}, {"schema": 1}, b"bytes"])
def test_what_is_no_description_is_an_error(data: Any) -> None:
    assert isinstance(read(data), GraphoptError)


def test_depth_is_bounded() -> None:
    data = json.loads(documents()[1])
    data["nodes"][first_call(data)]["args"] = [NESTED]
    error = read(data)
    assert isinstance(error, GraphoptError)
    assert "deeper than 32" in str(error)


def test_a_constant_has_the_bytes_that_it_says() -> None:
    data = json.loads(documents()[2])
    name = next(iter(data["constants"]))
    for key, value in (("base64", "!!"), ("base64", "AAAA"), ("shape", [2**40]), ("shape", [-1]), ("dtype", "load")):
        wrong = copy.deepcopy(data)
        wrong["constants"][name][key] = value
        error = read(wrong)
        assert isinstance(error, GraphoptError)
        assert f"$.constants.{name}" in str(error)


# --- at random -------------------------------------------------------------------------------------------------------

ATOMS: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**63, 10**400, 0.5, float("inf"), float("nan"), "", "x", "output",
    "a\nb", "\x00",
    "\ud800", "torch.load", "operator.attrgetter", "aten.mul.Tensor", "aten.add.Tensor", "9**9**9", "s0", [], {}, [[]],
    {"node": "x"}, {"node": "primals_1"}, {"float": "nan"}, {"float": "x"}, {"torch": "os"},
    {"torch": "float32"}, {"op": "torch.load"},
    {"tuple": []}, {"list": [{"list": []}]}, {"dict": {"a b": 1}}, {"slice": [0, 1, 2]}, {"computed": "SymInt"},
    {"number": 1e308},
    {"symbolic": {"expression": "s0*s0", "hint": 4}}, {"constant": 3},
    {"shape": [2], "stride": [1], "dtype": "int64", "device": "cpu"},
]  # fmt: skip


def places(data: Any) -> list[tuple[Any, Any]]:
    """Every container of a document with each of its keys."""
    found: list[tuple[Any, Any]] = []
    waiting = [data]
    while waiting:
        place = waiting.pop()
        keys = list(place) if isinstance(place, dict) else range(len(place))
        found += [(place, key) for key in keys]
        waiting += [place[key] for key in keys if isinstance(place[key], (dict, list))]
    return found


@dataclass
class Mutated:
    """A changed document, and how it was changed."""

    data: Any
    how: list[str]

    def __repr__(self) -> str:
        return f"a document after {self.how}"


@st.composite
def mutated(draw: st.DrawFn) -> Mutated:
    number = draw(st.integers(0, len(documents()) - 1))
    data, done = json.loads(documents()[number]), [f"document {number}"]
    for _ in range(draw(st.integers(1, 3))):
        found = places(data)
        place, key = found[draw(st.integers(0, len(found) - 1))]
        how = draw(st.sampled_from(["replace", "replace", "delete", "copy", "rename", "wrap", "text"]))
        if how == "replace":
            place[key] = copy.deepcopy(draw(st.sampled_from(ATOMS)))
        elif how == "text":
            place[key] = draw(st.text(max_size=20))
        elif how == "delete":
            del place[key]
        elif how == "wrap":
            place[key] = draw(st.sampled_from([[place[key]], {"list": [place[key]]}, {"x": place[key]}]))
        elif how == "copy":
            other, source = found[draw(st.integers(0, len(found) - 1))]
            place[key] = copy.deepcopy(other[source]) if len(repr(other[source])) < 10_000 else None
        elif isinstance(place, dict):
            place[draw(st.sampled_from(["x", "", "node", "op", "a\nb"]))] = place.pop(key)
        left = place.get(key) if isinstance(place, dict) else place[key : key + 1]
        done.append(f"{how} {key!r:.40} -> {left!a:.120}")
    return Mutated(data, done)


@given(mutated())
@examples(60)
def test_a_mutated_document_is_read_or_refused(document: Mutated) -> None:
    found = read(document.data)
    if isinstance(found, Program):
        assert found.outputs is not None
        for write in (found.to_text, found.to_python):
            with contextlib.suppress(GraphoptError):  # what cannot be written is said
                compile(write(), "written", "exec") if write == found.to_python else write()
    else:
        assert str(found)


# --- what is written -------------------------------------------------------------------------------------------------

IMPORTS = {"operator", "math", "torch", "graphopt.passes"}


def statements(source: str) -> list[str]:
    """What a module consists of, and what it imports; the source is compiled and not run."""
    tree = ast.parse(source)
    compile(source, "written", "exec")
    found = []
    for statement in tree.body:
        if isinstance(statement, ast.Import):
            assert {name.name for name in statement.names} <= IMPORTS
        else:
            found.append(type(statement).__name__)
    return found


@given(st.lists(st.text(alphabet=st.characters(codec=None), max_size=30), min_size=4, max_size=4))
@examples(60)
def test_python_is_valid_and_inert_for_any_name(texts: list[str]) -> None:
    title, spec, target, output = (
        f"{text}\n{text}\r\x00\x0c\u2028import os\n" if len(text) % 2 else text for text in texts
    )
    program = Program.from_json(json.loads(documents()[1]))
    program.title, program.context = title, Context(history=(spec,))
    program.inputs[0] = replace(program.inputs[0], target=target)
    program.outputs[0] = replace(program.outputs[0], target=output)
    source = program.to_python()
    assert statements(source) == ["Expr", "FunctionDef"]
    source.encode("utf-8")


def test_an_autograd_function_of_a_file_is_not_imported() -> None:
    data = json.loads(documents()[1])
    call = data["nodes"][first_call(data)]
    call |= {
        "target": "higher_order.graphopt_custom_function",
        "args": ["antigravity.fly", {"node": data["nodes"][0]["name"]}],
    }
    program = read(data)
    assert isinstance(program, Program)
    with pytest.raises(GraphoptError, match=r"'antigravity\.fly' is none that was captured in this process"):
        program.to_python()
    assert "antigravity" not in sys.modules
