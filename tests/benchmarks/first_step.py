"""What the first step costs beyond a later one, beside torch.compile(backend="aot_eager") of the same model.

Processor seconds of forward, backward and AdamW's update, with one thread unless told otherwise: the first step of a
process less the shortest of three later ones. Each cell is a process of its own, which finds nothing that others have
kept; a second process finds what the one before it left in its folder of ``GRAPHOPT_CACHE``. Everything that either
side imports is imported before the clock starts, in every cell; with ``--imported compiler`` torch's compiler, SciPy
and networkx alone, so that each side imports its own files itself, as it does for a user. GPTs of three depths, with
batches of 8 × 64 tokens, and eight models of ``transformers`` at tiny sizes, with 32 rows.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from harness import example_models, make_table, parser, show
from torch import nn

import graphopt
from graphopt.passes import FitMemory

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.support.zoo import ZOO, own_loss

models = example_models()

BUDGET = "60%"

BUDGETS = {"ResNet": "70%"}
"""Of models for which ``BUDGET`` is less than their smallest peak."""

IMPORTED = (
    "torch._dynamo",
    "torch._dynamo.backends.debugging",
    "torch._inductor.compile_fx",
    "torch.export",
    "scipy.optimize",
    "networkx",
    "graphopt._torch.every_name",
    "graphopt.report.register",
    "graphopt.rewriting.memory.fit.fitting",
    "graphopt.runtime.compiled_joint",
)
"""What each side needs some of, and pays for once in a process however many models it compiles."""

COMPILER = ("torch._dynamo", "scipy.optimize", "networkx")

GPTS = {"GPT, 2 layers of 64": (2, 64), "GPT, 12 layers of 128": (12, 128), "GPT, 48 layers of 32": (48, 32)}

TRANSFORMERS = ("BERT", "GPT-2", "Llama", "Mamba", "Qwen3", "ResNet", "T5", "ViT")

REPEATED = 16
"""How often the rows of their batches are there, so that a budget has activations to save beside the parameters."""

Loss = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Column:
    """One way to train.

    Attributes:
        title: what it is, in the table.
        after: the name of the column whose process fills the folder before this one's; empty for none.
    """

    title: str
    after: str = ""


COLUMNS = {
    "aot_eager": Column("aot_eager"),
    "plain": Column("optimize"),
    "fitted": Column(f"optimize, {BUDGET}"),
    "step": Column(f"optimize_step, {BUDGET}"),
    "fitted-again": Column("second: optimize", "fitted"),
    "step-again": Column("second: optimize_step", "step"),
}


def build(name: str) -> tuple[nn.Module, Loss, tuple[Any, ...]]:
    """A model in training mode, the loss of it and a batch, and the batch."""
    if name in GPTS:
        torch.manual_seed(0)
        layers, width = GPTS[name]
        config = models.GPTConfig(vocab=64, context=64, d=width, layers=layers, heads=2)
        return models.GPT(config), models.next_token_loss, tuple(torch.randint(config.vocab, (2, 8, config.context)))
    model, batches = ZOO[name].build(1)
    rows = {key: tensor.repeat(REPEATED, *[1] * (tensor.dim() - 1)) for key, tensor in batches[0].items()}
    return model, own_loss, (rows,)


def training(name: str, column: str) -> Callable[[], Any]:
    """What makes one step."""
    model, loss, batch = build(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    way = COLUMNS[column].after or column
    if way == "step":
        step = graphopt.optimize_step(model, optimizer, [FitMemory(BUDGETS.get(name, BUDGET))], loss=loss)
        return lambda: step(*batch)
    if way == "aot_eager":
        run: Any = torch.compile(model, backend="aot_eager")
    else:
        run = graphopt.optimize(model, [FitMemory(BUDGETS.get(name, BUDGET))] if way == "fitted" else [])

    def drop_in() -> None:
        loss(run, *batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return drop_in


def first_step(name: str, column: str, imported: str) -> dict[str, float]:
    """Processor seconds of the first step of this process, and of the shortest of three later ones."""
    for module in COMPILER if imported == "compiler" else IMPORTED:
        importlib.import_module(module)
    step = training(name, column)
    seconds = []
    for _ in range(4):
        started = time.process_time()
        step()
        seconds.append(time.process_time() - started)
    return {"first": seconds[0], "later": min(seconds[1:])}


def in_a_process(name: str, column: str, threads: int, imported: str, folder: str) -> float:
    """Processor seconds of the first step beyond a later one in a process that keeps what it finds in ``folder``."""
    settings = {"GRAPHOPT_CACHE": folder, "GRAPHOPT_CACHE_PROGRAMS": "1", "GRAPHOPT_LOG": "off"}
    options = ["--models", name, "--columns", column, "--threads", str(threads), "--imported", imported, "--alone"]
    command = [sys.executable, __file__, *options]
    ran = subprocess.run(command, env=os.environ | settings, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(ran.stdout)
    return float(found["first"] - found["later"])


def row(name: str, columns: Sequence[str], threads: int, imported: str) -> dict[str, float]:
    """The cells of one model; a process that fills a folder for another one is a cell itself."""
    found: dict[str, float] = {}
    own = [column for column in columns if not COLUMNS[column].after]
    for column in dict.fromkeys([*own, *(COLUMNS[column].after for column in columns if COLUMNS[column].after)]):
        with tempfile.TemporaryDirectory() as folder:
            found[column] = in_a_process(name, column, threads, imported, folder)
            for later in columns:
                if COLUMNS[later].after == column:
                    found[later] = in_a_process(name, later, threads, imported, folder)
    return {column: found[column] for column in COLUMNS if column in found}


def cell(cells: dict[str, float], column: str) -> str:
    """Seconds, and how many times those of aot_eager they are."""
    if column not in cells:
        return ""
    other = cells.get("aot_eager")
    ratio = "" if other is None or column == "aot_eager" else f" ×{cells[column] / other:.2f}"
    return f"{cells[column]:.2f} s{ratio}"


def main(argv: Sequence[str] | None = None) -> int:
    every = [*GPTS, *TRANSFORMERS]
    options = parser(__doc__)
    options.set_defaults(threads=1)
    options.add_argument("--models", nargs="+", choices=every, help="default: all; the first with --quick")
    options.add_argument("--columns", nargs="+", choices=[*COLUMNS], default=[*COLUMNS], help="which ways to train")
    options.add_argument("--rounds", type=int, default=1, help="times that all is measured; the fewest seconds count")
    options.add_argument("--imported", choices=("all", "compiler"), default="all", help="before the clock starts")
    options.add_argument("--alone", action="store_true", help="one cell in this process, as JSON")
    given = options.parse_args(argv)
    torch.set_num_threads(given.threads)
    names = given.models or (every[:1] if given.quick else every)
    if given.alone:
        print(json.dumps(first_step(names[0], given.columns[0], given.imported)))
        return 0
    results: dict[str, dict[str, float]] = {}
    for name in names:
        rounds = [row(name, given.columns, given.threads, given.imported) for _ in range(given.rounds)]
        results[name] = {column: min(cells[column] for cells in rounds) for column in rounds[0]}
        print(name, *(f"{column} {seconds:.2f} s" for column, seconds in results[name].items()), file=sys.stderr)
    shown = [column for column in COLUMNS if any(column in cells for cells in results.values())]
    rows = [(name, *(cell(cells, column) for column in shown)) for name, cells in results.items()]
    headings = ("", *(COLUMNS[column].title for column in shown))
    title = "Processor seconds of the first step beyond a later one"
    show({"results": results}, [make_table(title, headings, rows)], as_json=given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
