"""Trains ResNet-50 in eager PyTorch and with recomputation at its 16 blocks, res2a to res5c.

The names are given inside the model with graphopt.name. Results do not differ, to the last bit: neither losses nor
parameters nor the statistics of BatchNorm, which recomputation must not update twice.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from comparison import Batch, Way, argument_parser, compare, show_program
from models import ResNet50, label_loss
from rich.console import Console
from torch import nn

from graphopt.passes import Recompute

CLASSES = 10


def build(width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A new model and its optimizer, whose implementation is named so that all ways run the same one."""
    model = ResNet50(CLASSES, width)
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)


def draw_batches(*, count: int, size: int, pixels: int, seed: int) -> list[Batch]:
    """``count`` pairs of random ``[size, 3, pixels, pixels]`` images and ``[size]`` labels."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(size, 3, pixels, pixels, generator=generator),
            torch.randint(CLASSES, (size,), generator=generator),
        )
        for _ in range(count)
    ]


def factory() -> dict[str, Any]:
    """What the command line captures: ``graphopt tensors examples/resnet50_checkpoints.py:factory``."""
    model, optimizer = build(width=64)
    batch = draw_batches(count=1, size=8, pixels=96, seed=0)[0]
    return {"model": model, "example_inputs": batch, "loss": label_loss, "optimizer": optimizer}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argument_parser(__doc__, steps=4, out=Path("runs/resnet50"))
    parser.add_argument("--batch", type=int, default=8, help="images in a batch")
    parser.add_argument("--pixels", type=int, default=96, help="height and width of an image")
    parser.add_argument("--width", type=int, default=64, help="channels after the first convolution")
    parser.add_argument(
        "--checkpoints", nargs="+", default=ResNet50.block_names(), metavar="NAME", help="tensors to keep"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Train, print the table and write the dump; returns 1 where results differ."""
    options = parse(argv)
    console = Console()
    batches = draw_batches(count=options.steps, size=options.batch, pixels=options.pixels, seed=options.seed)
    console.print(f"ResNet-50; {options.steps} steps of {options.batch} images of {options.pixels} × {options.pixels}")
    ways = [
        Way("eager PyTorch", captured=False),
        Way("with Recompute", captured=True, passes=[Recompute(options.checkpoints)]),
    ]
    make = functools.partial(build, options.width)
    title = f"ResNet-50, checkpoints at {len(options.checkpoints)} names"
    runs, same = compare(console, ways, make, label_loss, batches, seed=options.seed, title=title)
    show_program(console, runs[-1], options.out)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
