"""Files and pass texts as a stranger may have changed them, by number, and what comes of reading each.

``python -m tests.support.hostile_inputs program 17`` says what document 17 of programs is, and what comes of it.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import json
import logging
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import graphopt
from graphopt import GraphoptError, Pipeline, Program
from graphopt.analysis.costs.figures import Figure, Figures
from graphopt.passes import Recompute, ScaleLoss
from tests.support.hostile_recordings import recording

__all__ = ["KINDS", "SECONDS", "describe", "problems", "tried_alone"]

SECONDS = 1.0
"""Seconds of processor time that one input may take."""

_FORBIDDEN = ("exec", "compile", "import", "os.", "subprocess.", "socket.", "shutil.", "ctypes.", "pty.", "webbrowser.")
"""Events of the interpreter that no input may bring about; opening files is watched beside them."""

_watching: list[list[str] | None] = []
"""What was noticed of each reading, the innermost last; None for what the test itself does meanwhile."""
_own_files: set[str] = set()


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watching or _watching[-1] is None:
        return
    opened = event == "open" and str(arguments[0]) not in _own_files and not _quotes_source(arguments)
    if opened or (event.startswith(_FORBIDDEN) and not _defines(event, arguments)):
        _watching[-1].append(f"{event} {str(arguments[:1])[:200]}")


def _defines(event: str, arguments: tuple[Any, ...]) -> bool:
    """Whether source is only parsed, or is one function of ``torch.fx``, which is defined and not called."""
    if event == "exec":
        return str(arguments[0].co_filename).startswith("<eval_with_key>")  # its source was looked at when compiled
    if event != "compile":
        return False
    _watching.append(None)
    try:
        body = ast.parse(arguments[0]).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return True  # nothing can come of it
    finally:
        _watching.pop()
    if all(isinstance(statement, ast.Expr) for statement in body):
        return arguments[1] == "<unknown>"  # what ast.parse says
    return len(body) == 1 and isinstance(body[0], ast.FunctionDef) and _is_inert(body[0])


def _quotes_source(arguments: tuple[Any, ...]) -> bool:
    """Whether a module that is imported is read again, as for the lines of a traceback."""
    path, mode = str(arguments[0]), arguments[1]
    known = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    return mode in (None, "r", "rb") and (path in known or path.startswith("<eval_with_key>"))


def _is_inert(function: ast.FunctionDef) -> bool:
    """Whether defining a function evaluates nothing but names."""
    given = function.args
    evaluated = [*function.decorator_list, *given.defaults, *(value for value in given.kw_defaults if value)]
    notes = [argument.annotation for argument in (*given.args, *given.kwonlyargs) if argument.annotation]
    return not evaluated and all(isinstance(note, (ast.Name, ast.Attribute)) for note in notes)


sys.addaudithook(_watch)


def tried_alone(read: Callable[[], Any]) -> str:
    """What is wrong with how something was read; empty where it gave a result or a ``GraphoptError``."""
    events: list[str] = []
    raised = ""
    started = time.process_time()
    _watching.append(events)
    try:
        read()
    except GraphoptError as error:
        raised = "" if str(error) else "an error without a message"
    except Exception as error:
        raised = f"{type(error).__name__}: {error}"
    finally:
        _watching.pop()
    seconds = time.process_time() - started
    if raised:
        return raised[:500]
    if events:
        return f"brought about {events[:3]}"
    return f"took {seconds:.1f} s" if seconds > SECONDS else ""


# --- changes at random -----------------------------------------------------------------------------------------------

ATOMS: list[Any] = [
    None, True, False, 0, 1, -1, 7, 2**31, 2**63, 10**400, -(10**30), 0.5, 1e308, float("inf"), float("nan"), "", "x",
    "output", "a\nb", "\x00", "\ud800", "\u202e", "a" * 20_000, "torch.load", "operator.attrgetter", "operator.call",
    "os.system", "builtins.eval", "aten.mul.Tensor", "aten.add.Tensor", "aten.view.default", "higher_order.cond",
    "9**9**9**9", "__import__('os').system('true')", "().__class__.__bases__[0]", "s0", "s0*s0", "Max(s0, 9**99)",
    "(" * 2000, "1e999", "8GB", "-5%", [], {}, [[]], [{}], [0] * 3000, {"node": "x"}, {"node": "primals_1"},
    {"float": "nan"}, {"torch": "os"}, {"torch": "float32"}, {"op": "torch.load"}, {"tuple": []},
    {"list": [{"list": []}]}, {"dict": {"a b": 1}}, {"slice": [0, 1, 2]}, {"computed": "SymInt"}, {"number": 1e308},
    {"symbolic": {"expression": "s0*s0", "hint": 4}}, {"expression": "2**s0", "hint": 64}, {"constant": 3},
    {"shape": [2], "stride": [1], "dtype": "int64", "device": "cpu"}, {"shape": [2**40] * 3, "stride": [0, 0, 0]},
    functools.reduce(lambda inner, _: {"list": [inner]}, range(150), 0),
]  # fmt: skip

HOSTILE_TEXT = (
    "{", "}", ",", "=", '"', "'", "\\", " ", "\n", "\x00", "\ud800", "\u202e", "é", "٣", "ſ", "$", ";", "#", "-",
    "1" * 400, "1e999", "nan", "inf", "-0", "none", "true", "(" * 500, "[" * 500, "{" * 500, "x" * 5000, "__class__",
    "os.system('true')", "{__import__('os')}", "%s%n", "../../etc/passwd", "*" * 300, "**.", "[!a-", "(a|a)*" * 20,
    "99999999999999999999GB",
)  # fmt: skip


def _places(data: Any) -> list[tuple[Any, Any]]:
    """Every container of a document with each of its keys."""
    found: list[tuple[Any, Any]] = []
    waiting = [data]
    while waiting:
        place = waiting.pop()
        keys = list(place) if isinstance(place, dict) else range(len(place))
        found += [(place, key) for key in keys]
        waiting += [place[key] for key in keys if isinstance(place[key], (dict, list))]
    return found


def changed_data(data: Any, chance: random.Random) -> Any:
    """Plain data with one to three changes; ``data`` itself is changed."""
    if chance.random() < 0.01:
        return copy.deepcopy(chance.choice(ATOMS))
    for _ in range(chance.randint(1, 3)):
        found = _places(data)
        if not found:
            return data
        place, key = chance.choice(found)
        how = chance.choice(["value", "value", "value", "value", "delete", "copy", "rename"])
        if how == "delete":
            del place[key]
        elif how == "copy":
            other, source = chance.choice(found)
            place[key] = copy.deepcopy(other[source]) if len(repr(other[source])) < 10_000 else None
        elif how == "rename" and isinstance(place, dict):
            place[chance.choice(["x", "", "node", "op", "a\nb", "__class__"])] = place.pop(key)
        else:
            place[key] = _changed_value(place[key], chance)
    return data


def _changed_value(value: Any, chance: random.Random) -> Any:
    """Something else, a changed text, a number, or the value one level deeper."""
    how = chance.choice(["replace", "replace", "text", "number", "wrap"])
    if how == "replace":
        return copy.deepcopy(chance.choice(ATOMS))
    if how == "text":
        return changed_text(str(value)[:200], chance)
    if how == "number":
        return chance.choice([chance.randint(-3, 9), chance.getrandbits(64), chance.uniform(-2, 2)])
    return chance.choice([[value], {"list": [value]}, {"x": value}])


def changed_text(text: str, chance: random.Random) -> str:
    """A text with one to four changes."""
    for _ in range(chance.randint(1, 4)):
        at = chance.randint(0, len(text))
        end = min(len(text), at + chance.randint(0, 8))
        how = chance.randrange(5)
        if how == 0:
            text = text[:at] + chance.choice(HOSTILE_TEXT) + text[at:]
        elif how == 1:
            text = text[:at] + text[end:]
        elif how == 2:
            text = text[:at] + text[at:end] * chance.randint(2, 5) + text[end:]
        elif how == 3:
            text = text[:at] + chr(chance.choice([chance.randrange(128), chance.randrange(0x3000)])) + text[end:]
        else:
            other = chance.randint(0, len(text))
            text = text[:at] + text[other : other + 12] + text[end:]
    return text


# --- what is read ----------------------------------------------------------------------------------------------------


class _Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.linear(x)
        return y * torch.tensor([1.0, 2.0])


def _sum(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    total: torch.Tensor = model(x).sum()
    return total


def _step() -> graphopt.TrainStep:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return graphopt.optimize_step(model, optimizer, [ScaleLoss()], loss=_sum)


@functools.cache
def _programs() -> list[str]:
    """Small programs of every stage, with replayed randomness, symbolic sizes, sub-graphs, constants and pass state."""
    x = torch.randn(6, 2)
    rows = torch.export.Dim("rows", min=2, max=64)
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    joint = graphopt.capture(model, (x,), dynamic_shapes=({0: rows},))
    Pipeline([Recompute("0")]).run(joint)
    forward = [graphopt.capture(each, (x,), stage="forward") for each in (_Autocast(), model)]
    programs = [*forward, *forward, graphopt.capture(model, (x,)), _step().prepare(x).program, joint]
    return [json.dumps(program.to_json()) for program in programs]


def _read_program(data: Any) -> None:
    program = Program.from_json(data)
    str(program.to_text())
    with contextlib.suppress(GraphoptError):
        _watching.append(None)  # parsing what was written is the test's own
        try:
            ast.parse(program.to_python())
        finally:
            _watching.pop()


def _program(chance: random.Random) -> tuple[Any, Callable[[], Any]]:
    data = changed_data(json.loads(chance.choice(_programs())), chance)
    return data, lambda: _read_program(data)


def _program_text(chance: random.Random) -> tuple[Any, Callable[[], Any]]:
    """A file whose text was changed: what is no JSON any more does not come to graphopt."""
    text = changed_text(chance.choice(_programs()), chance)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        data = text
    return data, lambda: _read_program(data)


@functools.cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="hostile-inputs-"))


def _file(text: str, name: str) -> Path:
    path = _folder() / name
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    _own_files.add(str(path))
    return path


def _json_file(data: Any, chance: random.Random, name: str) -> Path:
    """A file with changed data, or with data whose text was changed."""
    if chance.random() < 0.3:
        return _file(changed_text(json.dumps(data), chance), name)
    return _file(json.dumps(changed_data(data, chance)), name)


_IDENTITY = {"device": "cpu", "torch": "2", "threads": "1"}


@functools.cache
def _figures() -> str:
    path = _folder() / "good.json"
    figures = Figures(path, _IDENTITY)
    for number in range(3):
        figures.put("seconds", f"aten.mm {number}", Figure(1e-6 * (number + 1), number == 2))
        figures.put("bandwidth", f"disk {number}", Figure(1e9, False))
    figures.save()
    return path.read_text(encoding="utf-8")


def _costs(chance: random.Random) -> tuple[Any, Callable[[], Any]]:
    path = _json_file(json.loads(_figures()), chance, "costs.json")

    def read() -> None:
        figures = Figures(path, _IDENTITY)
        figures.get("seconds", "aten.mm 0")

    return path.read_bytes(), read


_DEEPSPEED = {
    "train_batch_size": 8,
    "activation_checkpointing": {
        "partition_activations": True, "cpu_checkpointing": True, "contiguous_memory_optimization": True,
        "number_checkpoints": 4, "synchronize_checkpoint_boundary": True, "profile": False,
    },
}  # fmt: skip
_PADDLE = {
    "amp": True, "recompute": True,
    "recompute_configs": {"checkpoints": ["a.0", "a.1"], "enable_offload": True, "checkpoint_shape": [1, 2]},
}  # fmt: skip


def _config(read: Callable[[Path], Any], given: dict[str, Any], chance: random.Random) -> tuple[Any, Callable[[], Any]]:
    path = _json_file(copy.deepcopy(given), chance, "config.json")
    return path.read_bytes(), lambda: read(path)


@functools.cache
def _state() -> tuple[graphopt.TrainStep, dict[str, Any]]:
    step = _step()
    step(torch.randn(6, 2))
    return step, step.state_dict()


def _loaded_state(chance: random.Random) -> tuple[Any, Callable[[], Any]]:
    step, known = _state()
    data = changed_data(copy.deepcopy(known), chance)

    def load() -> None:
        try:
            step.load_state_dict(data)
        finally:
            _watching.append(None)
            step.load_state_dict(known)
            _watching.pop()

    return data, load


TEXTS = (
    "recompute{checkpoints=blocks.*,layers.*::mm}", "recompute-evenly{number=3}", "fuse-update", "",
    "offload{tier=disk min-bytes=1}", "partition-checkpoints{group=tp}", "contiguous-checkpoints,checkpoint-boundaries",
    "fit-memory{budget=8GB cost=roofline}", "fit-memory{budget=60% host-budget=1GB time-limit=3.5}",
    "mixed-precision{dtype=float16 level=O2 init-scale=1024.0}", "clip-gradients{max-norm=1.0}",
    "data-parallel{bucket-mb=0.5},deep-gradient-compression{sparsity=0.9,0.99 clip-norm=1.0 bandwidth=25GB/s}",
    "data-parallel,compress-gradients{how=powersgd rank=2}", "data-parallel,local-sgd{k-steps=4 begin-step=2}",
    "data-parallel,adaptive-local-sgd{init-k-steps=2}", "data-parallel,shard-optimizer",
    "data-parallel,diloco{every=8 fragments=2 delay=1 mix=0.5 bits=8}",
    "scale-loss{init-scale=1.0 dynamic=false}", 'recompute{checkpoints="a b","c\\"d"},offload{min-bytes=1000}',
)  # fmt: skip


def _passes(chance: random.Random) -> tuple[Any, Callable[[], Any]]:
    text = ",".join(chance.sample(TEXTS, chance.randint(1, 3)))
    text = changed_text(text, chance)

    def read() -> None:
        pipeline = Pipeline(text)
        again = Pipeline(str(pipeline))
        if again.passes != pipeline.passes:
            raise ValueError(f"{pipeline} came back as {again}")

    return text, read


KINDS: dict[str, Callable[[random.Random], tuple[Any, Callable[[], Any]]]] = {
    "program": _program,
    "program text": _program_text,
    "costs": _costs,
    "deepspeed": functools.partial(_config, graphopt.configs.from_deepspeed, _DEEPSPEED),
    "paddle": functools.partial(_config, graphopt.configs.from_paddle, _PADDLE),
    "state": _loaded_state,
    "passes": _passes,
    "recording": functools.partial(recording, changed_data),
}
"""What is read, by name: makes an input of a random generator, and the call that reads it."""


def describe(kind: str, number: int) -> tuple[Any, str]:
    """One input, and what is wrong with how it is read."""
    given, read = KINDS[kind](random.Random(f"{kind} {number}"))
    return given, tried_alone(read)


def problems(kind: str, first: int, last: int) -> Iterator[dict[str, Any]]:
    """What is wrong with how inputs of some numbers are read, and last how many were read."""
    torch.set_num_threads(1)
    logging.getLogger("graphopt").setLevel(logging.CRITICAL)
    for text in TEXTS:  # what is imported and compiled once
        Pipeline(text)
    for number in range(200):
        describe(kind, -1 - number)
    for number in range(first, last):
        if problem := describe(kind, number)[1]:
            yield {"kind": kind, "number": number, "problem": problem}
    yield {"read": last - first}


if __name__ == "__main__":
    shown, wrong = describe(sys.argv[1], int(sys.argv[2]))
    print(repr(shown)[:20_000])
    print(wrong or "read, or refused")
