"""What a call of an optimized model costs beside its program: the checks of the border, beside torch.compile's guards.

Models of many small modules; the compiled function of both is replaced by one that returns what it returned before, so
that what is left is to decide whether the capture fits the call, and to hand the tensors over.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from harness import make_table, parser, show
from torch import nn

import graphopt

CALLS = 50
"""How many calls are timed at once."""


class Many(nn.Module):
    """A chain of blocks, each of a linear layer and a norm."""

    def __init__(self, modules: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)) for _ in range(max(1, (modules - 2) // 3)))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


def border(model: nn.Module, x: torch.Tensor) -> Callable[[], Any]:
    """A call of the optimized model whose program computes nothing."""
    optimized: Any = graphopt.optimize(model)
    optimized(x)
    latest = optimized._graphopt.latest
    flat = latest.function(*latest.gather([x]))
    latest.function = lambda *arguments: flat
    return lambda: optimized(x)


def guards(model: nn.Module, x: torch.Tensor) -> Callable[[], Any]:
    """A call of the compiled model whose graph computes nothing."""
    kept: list[Any] = []

    def backend(module: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            if not kept:
                kept.append(module(*arguments))
            return kept[0]

        return run

    torch.compiler.reset()
    compiled: Any = torch.compile(model, backend=backend)
    compiled(x)
    return lambda: compiled(x)


def microseconds(actions: Sequence[Callable[[], Any]], rounds: int) -> list[float]:
    """The median time of a call of each, in turn."""
    found: list[list[float]] = [[] for _ in actions]
    for _ in range(rounds):
        for seconds, action in zip(found, actions, strict=True):
            started = time.perf_counter()
            for _ in range(CALLS):
                action()
            seconds.append((time.perf_counter() - started) / CALLS)
    return [statistics.median(seconds) * 1e6 for seconds in found]


def measure(modules: int, rounds: int) -> dict[str, Any]:
    """Microseconds per call for a model of about so many modules."""
    model, x = Many(modules), torch.randn(4, 2)
    ours, theirs = microseconds([border(model, x), guards(copy.deepcopy(model), x)], rounds)
    count = sum(1 for _ in model.modules())
    return {"modules": count, "graphopt_us": ours, "torch_compile_us": theirs}


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    given = options.parse_args(argv)
    torch.set_num_threads(given.threads)
    sizes, rounds = ([20], 3) if given.quick else ([20, 100, 1000], 21)
    results = [measure(size, rounds) for size in sizes]
    rows = [
        (str(row["modules"]), f"{row['graphopt_us']:.0f} us", f"{row['torch_compile_us']:.0f} us") for row in results
    ]
    table = make_table("A call beside its program", ("modules", "graphopt", "torch.compile"), rows)
    show({"results": results}, [table], as_json=given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
