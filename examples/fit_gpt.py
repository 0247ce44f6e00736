"""Trains a GPT within fewer bytes than its training step takes: memory before and after, and equal results.

The same steps run twice on the same batches of English text: as eager PyTorch runs them, and with ``FitMemory``, which
keeps the peak within a budget. Losses, parameters and optimizer state have to be equal to the last bit.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from comparison import Run, Way, argument_parser, differences, progress_bar, train
from models import GPT, GPTConfig, next_token_loss
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from text import VOCAB, Batch, draw_batches, split_tokens
from torch import nn

import graphopt
from graphopt.ir.memory.timeline import MemoryTimeline
from graphopt.ir.words.written_units import format_bytes, parse_bytes
from graphopt.passes import FitMemory
from graphopt.report.page import page_of_snapshots
from graphopt.report.text.memory_chart import chart

_WIDEST = 96
"""Columns of the charts, where the terminal has so many."""


def build(config: GPTConfig) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A new model and its optimizer, whose implementation is named so that both ways run the same one."""
    model = GPT(config)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def factory() -> dict[str, Any]:
    """The model and the batch of this example, for the command line: ``graphopt plan examples/fit_gpt.py:factory``."""
    config = GPTConfig(VOCAB, layers=6)
    return _target(config, draw_batches(split_tokens()[0], count=1, size=8, length=config.context, seed=0)[0])


def large() -> dict[str, Any]:
    """A GPT of 196 million parameters and a batch of 12 × 1,024 tokens, whose step takes 18.6 GB."""
    config = GPTConfig(vocab=16384, context=1024, d=768, layers=24, heads=12)
    tokens = torch.randint(config.vocab, (12, config.context + 1))
    return _target(config, (tokens[:, :-1].clone(), tokens[:, 1:].clone()))


def _target(config: GPTConfig, batch: Batch) -> dict[str, Any]:
    model, optimizer = build(config)
    return {"model": model, "example_inputs": batch, "loss": next_token_loss, "optimizer": optimizer}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argument_parser(__doc__, steps=5, out=Path("runs/fit_gpt"))
    parser.add_argument("--budget", type=_budget, default="128MB", help="bytes that a step may take")
    parser.add_argument("--batch", type=int, default=8, help="sequences in a batch")
    parser.add_argument("--context", type=int, default=256, help="tokens in a sequence")
    parser.add_argument("--layers", type=int, default=6, help="transformer blocks")
    parser.add_argument("--d", type=int, default=256, help="features")
    parser.add_argument("--heads", type=int, default=4, help="attention heads")
    parser.add_argument("--dropout", type=float, default=0.1, help="dropout probability")
    options = parser.parse_args(argv)
    if options.d % options.heads:
        parser.error(f"--d {options.d} is not a multiple of --heads {options.heads}")
    return options


def _budget(text: str) -> str:
    try:
        parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Show the step as it is, train it both ways and compare; returns 1 where they differ or the budget is no limit."""
    options = parse(argv)
    console = Console(highlight=False)
    config = GPTConfig(VOCAB, options.context, options.d, options.layers, options.heads, options.dropout)
    sizes = {"size": options.batch, "length": options.context}
    batches = draw_batches(split_tokens()[0], count=options.steps, seed=options.seed, **sizes)
    model, optimizer = build(config)
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    console.print(
        f"A GPT of {millions:.1f} million parameters, {config.layers} blocks, trained on English text in batches of "
        f"{options.batch} × {options.context} bytes; threads: {torch.get_num_threads()}."
    )
    before = graphopt.capture(model, batches[0], loss=next_token_loss, optimizer=optimizer).memory()
    budget, needed = parse_bytes(options.budget), format_bytes(before.peak_bytes)
    if before.peak_bytes <= budget:
        console.print(f"A step takes {needed}, which fits into {options.budget} as it is: lower --budget.")
        return 1
    console.print(
        f"\n[bold]Before: a step takes {needed} (predicted), and {options.budget} are there: too few.[/bold]\n"
    )
    show_memory(console, before, before, budget)
    console.print(f'\n[bold]{options.steps} steps each way, the second with FitMemory("{options.budget}")[/bold]\n')
    fitted = Way("FitMemory", captured=True, passes=[FitMemory(options.budget)])
    make = functools.partial(build, config)
    with progress_bar(console) as progress:
        runs = [
            train(way, make, next_token_loss, batches, seed=options.seed, progress=progress)
            for way in (Way("eager PyTorch", captured=False), fitted)
        ]
    return finish(console, runs, before, options)


def finish(console: Console, runs: Sequence[Run], before: MemoryTimeline, options: argparse.Namespace) -> int:
    """Show the memory after, both ways side by side, and whether they are equal; write the page."""
    eager, fitted = runs
    assert fitted.step is not None
    after = fitted.step.program.memory()
    console.print(f"\n[bold]After: a step takes {format_bytes(after.peak_bytes)} (predicted).[/bold]\n")
    budget = parse_bytes(options.budget)
    show_memory(console, after, before, budget)
    console.print()
    console.print(table(runs, after.resident_bytes, budget))
    for line in fitted.step.records[0].changed.lines[:2]:
        console.print(f"The plan: {line}")
    wrong = differences(eager, fitted)
    if wrong:
        console.print(f"{len(wrong)} values differ from eager PyTorch: {', '.join(wrong[:5])}", style="red")
    else:
        console.print(
            f"All {len(eager.losses)} losses, and all {len(eager.state)} tensors of the model, the optimizer's state "
            "and the random generator, are equal to the last bit (torch.equal)."
        )
    page = options.out / "step.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(page_of_snapshots(fitted.step.snapshots, fitted.step.records), encoding="utf-8")
    console.print("\nThe plan, memory over time and every tensor on one page, to open in a web browser:")
    console.print(f"  {page}", soft_wrap=True)
    return 1 if wrong else 0


def show_memory(console: Console, shown: MemoryTimeline, before: MemoryTimeline, budget: int) -> None:
    """Draw bytes over the calls of a step, on the scale of the program as it was, with a line at the budget."""
    width = min(console.width, _WIDEST)
    lines = chart(shown, width, colored=console.is_terminal, top=before.peak_bytes, limit=budget)
    for line in lines:
        console.print(Text.assemble(*line), soft_wrap=True)


def table(runs: Sequence[Run], resident: int, budget: int) -> Table:
    """What each way took: peaks as the allocator reports them, with parameters, optimizer state and batch."""
    found = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    found.add_column("", no_wrap=True)
    for heading in ("measured peak", f"within {format_bytes(budget)}", "step time", "last loss"):
        found.add_column(heading, justify="right", no_wrap=True)
    for run in runs:
        peak = resident + run.measured_bytes
        found.add_row(
            run.way.name,
            format_bytes(peak),
            "yes" if peak <= budget else "no",
            f"{run.step_seconds * 1e3:.0f} ms",
            f"{run.losses[-1].item():.6f}",
        )
    return found


if __name__ == "__main__":
    sys.exit(main())
