"""What the benchmarks share: the model of the examples, paired timing, tables and JSON."""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.checkpoint import checkpoint

import graphopt

os.environ.setdefault("GRAPHOPT_CACHE_PROGRAMS", "0")  # what is measured is made each time

Action = Callable[[], Any]


def example_models() -> ModuleType:
    """The module ``examples/models.py``."""
    path = Path(__file__).parents[2] / "examples" / "models.py"
    spec = importlib.util.spec_from_file_location("example_models", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class CheckpointedBlock(nn.Module):
    """Runs a block under torch.utils.checkpoint."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint(self.block, x, use_reentrant=False)
        return result


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    made.add_argument("--quick", action="store_true", help="small sizes and few rounds: whether it runs, not how fast")
    made.add_argument("--json", action="store_true", help="print JSON in place of tables")
    made.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads that torch's kernels use")
    return made


def machine() -> dict[str, Any]:
    """What the figures were measured on and with."""
    return {
        "graphopt": graphopt.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": "cpu",
        "threads": torch.get_num_threads(),
    }


def paired_seconds(actions: Sequence[Action], rounds: int, *, warm_up: int = 2) -> list[list[float]]:
    """Seconds of every action in every round: one call of each in turn, starting with another one each round.

    What slows a shared machine down then meets all actions alike, and ratios within a round stay comparable.
    """
    for action in actions:
        for _ in range(warm_up):
            action()
    gc.collect()
    gc.freeze()  # what is here now stays: looking for garbage in it would take longer than the actions
    seconds: list[list[float]] = [[] for _ in actions]
    for number in range(rounds):
        for offset in range(len(actions)):
            index = (number + offset) % len(actions)
            gc.collect()
            started = time.perf_counter()
            actions[index]()
            seconds[index].append(time.perf_counter() - started)
    gc.unfreeze()
    return seconds


def paired_ratio(seconds: Sequence[float], reference: Sequence[float]) -> float:
    """The median over the rounds of one action's time divided by the reference's in the same round."""
    return statistics.median(a / b for a, b in zip(seconds, reference, strict=True))


def show(result: dict[str, Any], tables: Sequence[Table], *, as_json: bool) -> None:
    """Print the result, with the machine, as JSON or as tables."""
    result = {"machine": machine(), **result}
    if as_json:
        print(json.dumps(result, indent=2))
        return
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(", ".join(f"{key} {value}" for key, value in result["machine"].items()))
    for table in tables:
        console.print(table)


def make_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table whose first column is text and whose others are figures."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table
