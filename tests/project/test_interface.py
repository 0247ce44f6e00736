"""What ``import graphopt`` gives: its names at once, torch when the first of them is asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import graphopt
from graphopt import passes
from graphopt.report import interface
from tests.support.covering import some_of


def run(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("module", [graphopt, passes])
def test_only_public_names_are_listed(module: object) -> None:
    names = {name for name in dir(module) if not name.startswith("__")}
    assert names == {name for name in module.__all__ if not name.startswith("__")}  # type: ignore[attr-defined]
    given: dict[str, object] = {}
    exec(f"from {module.__name__} import *", given)  # type: ignore[attr-defined]
    assert given.keys() - {"__builtins__"} == set(module.__all__)  # type: ignore[attr-defined]


def test_every_name_is_there_whatever_was_imported_before() -> None:
    assert all(hasattr(interface, name) for name in graphopt.__all__)
    code = (
        "from graphopt.passes import FitMemory\n"
        "import graphopt.capture.session, graphopt\n"
        "from graphopt import *\n"
        "print(callable(graphopt.capture), graphopt.capture is capture, FitMemory in vars(graphopt.passes).values())\n"
        "print([name for name in graphopt.__all__ if not hasattr(graphopt, name)], graphopt.planning.plan.__name__)\n"
        "print(hasattr(graphopt, 'optimise'), hasattr(graphopt, 'passes'))\n"
    )
    assert run(code) == "True True True\n[] plan\nFalse True\n"


@pytest.mark.parametrize(
    "words", some_of([("--version",), ("help", "plan"), ("--help",), ("completion", "bash")], ("help", "plan"))
)
def test_arguments_of_the_process_decide_nothing(words: tuple[str, ...]) -> None:
    code = (
        "import sys\n"
        "sys.argv = ['/usr/bin/graphopt', *sys.argv[1:]]\n"
        "import graphopt\n"
        "print('torch' in sys.modules)\n"
        "print(graphopt.optimize.__name__, graphopt.Pipeline('offload'), 'torch' in sys.modules)\n"
    )
    assert run(code, *words) == "False\noptimize offload True\n"


def test_what_stands_above_is_handed_down_without_a_name_of_the_package(tmp_path: Path) -> None:
    """As in a Trainer, or in the script that reproduces a failing pass: no name of ``graphopt`` itself is touched."""
    code = (
        "import torch\n"
        "from graphopt.ir.provided.formats import available_formats\n"
        "from graphopt.runtime.drop_in.module import optimize\n"
        "model = optimize(torch.nn.Linear(2, 2))\n"
        "model(torch.ones(1, 2)).sum().backward()\n"
        "print(model.program.memory().peak_bytes > 0, 'svg' in available_formats())\n"
    )
    assert run(code) == "True True\n"


def test_threads_that_come_at_once_find_everything() -> None:
    code = (
        "import threading, graphopt\n"
        "from graphopt.ir.program import Program\n"
        "from graphopt.ir.provided.methods import provided\n"
        "found = []\n"
        "ask = [lambda: provided(Program, 'memory'), lambda: graphopt.optimize, lambda: graphopt.capture]\n"
        "ask = [*ask, lambda: graphopt.passes.FitMemory] * 3\n"
        "threads = [threading.Thread(target=lambda each=each: found.append(callable(each()))) for each in ask]\n"
        "[thread.start() for thread in threads]; [thread.join() for thread in threads]\n"
        "print(len(found), all(found))\n"
    )
    assert run(code) == "12 True\n"


def test_each_name_is_that_of_the_whole_interface() -> None:
    assert [name for name in graphopt.__all__ if getattr(graphopt, name) is not getattr(interface, name)] == []


FIRST_USED = (
    "torch._dynamo",
    "torch._inductor",
    "torch._functorch",
    "sympy",
    "scipy",
    "networkx",
    "rich",
    "graphopt.report",
)
"""What captures, plans and pictures need, and nobody before the first of them."""


@pytest.mark.parametrize(
    ("code", "also"),
    [
        (
            "graphopt.optimize, graphopt.optimize_step, graphopt.passes",
            ("graphopt.capture", "graphopt.passes.recompute"),
        ),
        ("from graphopt.passes import FitMemory, Recompute", ("graphopt.capture", "graphopt.passes.microbatch")),
        ("from graphopt.passes import *", ("graphopt.capture",)),
        (
            "graphopt.optimize(torch.nn.Linear(2, 2), [graphopt.passes.FitMemory('60%'), 'offload'])",
            (),
        ),
    ],
)
def test_what_is_not_used_yet_is_not_imported(code: str, also: tuple[str, ...]) -> None:
    done = run(f"import sys, torch, graphopt\nbefore = set(sys.modules)\n{code}\nprint(*set(sys.modules) - before)\n")
    names = tuple(f"{name}." for name in (*FIRST_USED, *also))
    assert [name for name in done.split() if f"{name}.".startswith(names)] == []
    assert "graphopt.errors" in done


def test_a_misspelled_name_has_the_near_ones() -> None:
    with pytest.raises(AttributeError) as error:
        getattr(graphopt, "optimise")  # noqa: B009
    assert (error.value.name, error.value.obj) == ("optimise", graphopt)
