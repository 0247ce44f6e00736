"""Trains a byte-level GPT in float32 and in 16 bits: eager PyTorch under autocast, and as rewritten programs.

The program of level O1 gives the bits that eager PyTorch gives under autocast. Level O2 keeps low-precision copies of
the parameters beside their float32 masters. In float16 the loss is scaled by ops of the program.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from comparison import Way, argument_parser, comparison_table, differences, progress_bar, show_program, train
from models import GPTConfig, next_token_loss
from rich.console import Console
from text import VOCAB, draw_batches, split_tokens
from torch import nn
from train_gpt import build

from graphopt.passes import ClipGradients, MixedPrecision

WAYS = (
    Way("eager, float32", captured=False),
    Way("eager, autocast", captured=False),
    Way("O1, bfloat16", captured=True, passes=[MixedPrecision()]),
    Way("O2, bfloat16", captured=True, passes=[MixedPrecision(level="O2")]),
    Way("O2, float16", captured=True, passes=[MixedPrecision("float16", level="O2"), ClipGradients(max_norm=1.0)]),
)


def autocast_loss(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The loss in bfloat16, as eager PyTorch computes it."""
    with torch.autocast("cpu", torch.bfloat16):
        return next_token_loss(model, tokens, targets)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argument_parser(__doc__, steps=16, out=Path("runs/mixed_precision"))
    parser.add_argument("--batch", type=int, default=4, help="sequences in a batch")
    parser.add_argument("--context", type=int, default=256, help="tokens in a sequence")
    parser.add_argument("--layers", type=int, default=6, help="transformer blocks")
    parser.add_argument("--d", type=int, default=256, help="features, a multiple of the 4 heads")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Train, print the table and write the dump; returns 1 where level O1 differs from autocast."""
    options = parse(argv)
    console = Console()
    config = GPTConfig(VOCAB, options.context, options.d, options.layers, heads=4)
    tokens, _ = split_tokens()
    batches = draw_batches(tokens, count=options.steps, seed=options.seed, size=options.batch, length=options.context)
    make = functools.partial(build, config, options.lr)
    with progress_bar(console) as progress:
        runs = [
            train(
                way, make, autocast_loss if "autocast" in way.name else next_token_loss, batches,
                seed=options.seed, progress=progress,
            )
            for way in WAYS
        ]  # fmt: skip
    console.print(comparison_table(runs, f"GPT, {options.layers} blocks"))
    _, autocast, captured, *_ = runs
    wrong = differences(autocast, captured)
    if wrong:
        console.print(f"{captured.way.name} differs from {autocast.way.name} in {', '.join(wrong[:5])}", style="red")
    else:
        console.print(f"{captured.way.name} equals {autocast.way.name} to the last bit, after {options.steps} steps.")
    show_program(console, runs[-1], options.out)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
