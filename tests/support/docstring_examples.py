"""The examples in docstrings of public names: what they can use, running them, and which names have them."""

from __future__ import annotations

import contextlib
import doctest
import inspect
import io
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import nn

import graphopt
from graphopt import checkpoint, configs, passes, planning, sharded_state

__all__ = ["PREAMBLE", "examples", "failures", "message_of_example", "namespace", "public_objects"]

PREAMBLE = """\
from dataclasses import dataclass
from typing import final
import torch
import torch.nn.functional as F
from torch import nn
import graphopt
from graphopt import planning
from graphopt.passes import *

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3)))
    def forward(self, x):
        return self.blocks(x)

def loss(model, x):
    return model(x).square().mean()

torch.manual_seed(0)
model, x = Net(), torch.randn(64, 16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

# What reads which values, makes which values, and takes how many seconds: three operations forward, two backward
calls = [((), (0,), 1.0), ((0,), (1,), 5.0), ((1,), (2,), 1.0), ((2, 1), (3,), 1.0), ((3, 0), (4,), 1.0)]
operations = tuple(planning.Operation(*call) for call in calls)
problem = planning.Problem(operations, sizes=(80, 100, 10, 10, 10), boundary=3)
"""
"""What every example begins with; documents show it once."""

_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class _Net(nn.Module):
    """The model of the examples."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the blocks."""
        result: torch.Tensor = self.blocks(x)
        return result


def namespace() -> dict[str, Any]:
    """The names that an example can use, as ``PREAMBLE`` makes them."""

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model(x).square().mean()
        return result

    torch.manual_seed(0)
    model, x = _Net(), torch.randn(64, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    offered = {name: getattr(passes, name) for name in passes.__all__}
    calls = [((), (0,), 1.0), ((0,), (1,), 5.0), ((1,), (2,), 1.0), ((2, 1), (3,), 1.0), ((3, 0), (4,), 1.0)]
    operations = tuple(planning.Operation(*call) for call in calls)
    problem = planning.Problem(operations, sizes=(80, 100, 10, 10, 10), boundary=3)
    return {
        "final": final, "dataclass": dataclass, "torch": torch, "nn": nn, "F": F, "graphopt": graphopt,
        "planning": planning,
        **offered,
        "model": model, "x": x, "loss": loss, "optimizer": optimizer, "problem": problem,
    }  # fmt: skip


def public_objects() -> dict[str, Any]:
    """Every public class and function, by the name that users import it under."""
    modules = {"graphopt": graphopt, "graphopt.passes": passes, "graphopt.planning": planning}
    modules |= {"graphopt.configs": configs, "graphopt.sharded_state": sharded_state, "graphopt.checkpoint": checkpoint}
    return {
        f"{where}.{name}": found
        for where, module in modules.items()
        for name in module.__all__
        if inspect.isclass(found := getattr(module, name)) or inspect.isfunction(found)
    }


def examples(value: Any) -> list[doctest.Example]:
    """The examples in the docstring of a class or function, none of its methods."""
    return doctest.DocTestParser().get_examples(inspect.getdoc(value) or "")


def failures(name: str, value: Any) -> str:
    """What doctest says where an example does not print what it says; empty where all do."""
    test = doctest.DocTest(examples(value), namespace(), name, None, None, None)
    said = io.StringIO()
    with _quiet():
        doctest.DocTestRunner(optionflags=_FLAGS).run(test, out=said.write)
    return said.getvalue()


def message_of_example(error: type[Exception]) -> tuple[str, str]:
    """The source of an error's example, and the error's message and notes when it is run.

    Raises:
        AssertionError: where it ends without the error.
    """
    names, source = namespace(), ""
    for example in examples(error):
        source += example.source
        try:
            with _quiet(), contextlib.redirect_stdout(io.StringIO()):
                exec(compile(example.source, "<example>", "exec", dont_inherit=True), names)
        except error as raised:
            return source.rstrip(), "\n".join([str(raised), *getattr(raised, "__notes__", ())])
    raise AssertionError(f"the example of {error.__name__} does not end in it")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without log lines: an example shows what it prints."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
