"""Trains a GPT on English text in a loop of Accelerate: plainly, drop-in, and whole steps.

All accumulate two batches, save in the middle and load again, and end with the same parameters, to the last bit.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence

import accelerate
import torch
from models import GPT, GPTConfig, next_token_loss
from rich.console import Console
from text import VOCAB, Batch, draw_batches, split_tokens
from torch import nn

import graphopt
from graphopt.integrations.accelerate import prepare_step
from graphopt.passes import Recompute

PASSES = [Recompute("blocks.*")]


def train(way: str, options: argparse.Namespace) -> tuple[list[float], nn.Module]:
    """Train in one way; returns the losses and the model."""
    torch.manual_seed(options.seed)
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=2, mixed_precision=options.precision, cpu=True)
    config = GPTConfig(VOCAB, options.context, options.d, options.layers, 2, 0.0)
    model: nn.Module = GPT(config)
    if way == "drop-in":
        model = graphopt.optimize(model, PASSES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    step = None
    if way == "whole step":
        step = prepare_step(accelerator, model, optimizer, PASSES, loss=next_token_loss)
    losses = []

    def run(batch: Batch) -> None:
        with accelerator.accumulate(model):
            if step is not None:
                loss = step(*batch)
            else:
                loss = next_token_loss(model, *batch)
                accelerator.backward(loss)
                optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(loss.item())

    count = 4 * options.steps
    batches = draw_batches(
        split_tokens()[0], count=count, size=options.batch, length=options.context, seed=options.seed
    )
    with tempfile.TemporaryDirectory() as folder:
        for batch in batches[: count // 2]:
            run(batch)
        accelerator.save_state(folder)
        run(batches[0])  # is forgotten
        run(batches[1])
        accelerator.load_state(folder)
        for batch in batches[count // 2 :]:
            run(batch)
    return losses, accelerator.unwrap_model(model)


def main(argv: Sequence[str] | None = None) -> int:
    """Train in three ways and compare; returns 1 where results differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6, help="updates before and behind the middle")
    parser.add_argument("--batch", type=int, default=4, help="sequences in a batch")
    parser.add_argument("--context", type=int, default=128, help="bytes in a sequence")
    parser.add_argument("--layers", type=int, default=4, help="transformer blocks")
    parser.add_argument("--d", type=int, default=128, help="features")
    parser.add_argument("--precision", default="no", choices=("no", "bf16"), help="of Accelerate's autocast")
    parser.add_argument("--seed", type=int, default=0, help="of parameters and data")
    options = parser.parse_args(argv)
    console = Console()
    plain, expected = train("plain", options)
    same = True
    console.print(f"plain       loss {plain[-1]:.6f}")
    for way in ("drop-in", "whole step"):
        losses, model = train(way, options)
        state = expected.state_dict()
        equal = losses == plain and all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
        same = same and equal
        console.print(f"{way:10}  loss {losses[-1]:.6f}, {'equal to the last bit' if equal else 'DIFFERENT'}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
