"""Trains a byte-level GPT on English text: eager PyTorch, one captured program, and with recomputation.

All take the same steps on the same batches; memory and time differ, results do not, to the last bit. Where the CPU has
instructions for 16-bit products, mixed precision is a fourth way, whose results are rounded.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from comparison import Way, argument_parser, compare, show_program
from models import GPT, GPTConfig, next_token_loss
from rich.console import Console
from text import VOCAB, draw_batches, split_tokens
from torch import nn

from graphopt.passes import MixedPrecision, Recompute
from graphopt.rewriting.precision.devices import fast_dtype


def build(config: GPTConfig, lr: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A new model and its optimizer, whose implementation is named so that all ways run the same one."""
    model = GPT(config)
    return model, torch.optim.AdamW(model.parameters(), lr=lr, fused=True)


def factory() -> dict[str, Any]:
    """What the command line captures: ``graphopt dump examples/train_gpt.py:factory``."""
    config = GPTConfig(vocab=VOCAB)
    model, optimizer = build(config, lr=1e-3)
    batch = draw_batches(split_tokens()[0], count=1, size=4, length=config.context, seed=0)[0]
    return {"model": model, "example_inputs": batch, "loss": next_token_loss, "optimizer": optimizer}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argument_parser(__doc__, steps=16, out=Path("runs/train_gpt"))
    parser.add_argument("--batch", type=int, default=4, help="sequences in a batch")
    parser.add_argument("--context", type=int, default=256, help="tokens in a sequence")
    parser.add_argument("--layers", type=int, default=12, help="transformer blocks")
    parser.add_argument("--d", type=int, default=256, help="features")
    parser.add_argument("--heads", type=int, default=4, help="attention heads")
    parser.add_argument("--dropout", type=float, default=0.0, help="dropout probability")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate")
    options = parser.parse_args(argv)
    if options.d % options.heads:
        parser.error(f"--d {options.d} is not a multiple of --heads {options.heads}")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Train, print the table and write the dump; returns 1 where results differ."""
    options = parse(argv)
    console = Console()
    config = GPTConfig(VOCAB, options.context, options.d, options.layers, options.heads, options.dropout)
    tokens, held_out = split_tokens()
    sizes = {"size": options.batch, "length": options.context}
    batches = draw_batches(tokens, count=options.steps, seed=options.seed, **sizes)
    model, _ = build(config, options.lr)
    console.print(
        f"GPT of {sum(p.numel() for p in model.parameters()) / 1e6:.1f} million parameters, {options.layers} blocks; "
        f"{len(tokens):,} bytes of text; {options.steps} steps of {options.batch} × {options.context} bytes; "
        f"{torch.get_num_threads()} threads"
    )
    ways = [
        Way("eager PyTorch", captured=False),
        Way("captured", captured=True),
        Way("with Recompute", captured=True, passes=[Recompute("blocks.*")]),
    ]
    low = fast_dtype()
    if low is not None:
        name = str(low).removeprefix("torch.")
        passes = [MixedPrecision(name), Recompute("blocks.*")]
        ways.append(Way(f"the same, {name}", captured=True, passes=passes, exact=False))
    make = functools.partial(build, config, options.lr)
    title = f"GPT, {options.layers} blocks"
    runs, same = compare(console, ways, make, next_token_loss, batches, seed=options.seed, title=title)
    recomputed = [run for run in runs if run.way.exact][-1]
    state = {k.removeprefix("model."): v for k, v in recomputed.state.items() if k.startswith("model.")}
    model.load_state_dict(state)
    console.print(f"Loss on text that was held out: {validation_loss(model, held_out, sizes):.4f} nats per byte")
    show_program(console, recomputed, options.out)
    return 0 if same else 1


@torch.no_grad()
def validation_loss(model: nn.Module, tokens: torch.Tensor, sizes: dict[str, int]) -> float:
    """The mean loss over four batches of held-out text, in eval mode."""
    model.eval()
    losses = [next_token_loss(model, *batch) for batch in draw_batches(tokens, count=4, seed=0, **sizes)]
    return torch.stack(losses).mean().item()


if __name__ == "__main__":
    sys.exit(main())
