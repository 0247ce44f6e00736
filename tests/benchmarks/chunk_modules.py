"""A transformer with a long context and whole scores: bytes and time of a step with ``Chunk``, beside recomputation.

Bytes are what a step adds to parameters, optimizer state and the batch, predicted and measured. Times are medians of
paired rounds, as a ratio to the step without passes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from chunk_loss import compared, shown
from harness import parser
from torch import nn

import graphopt
from graphopt.passes import Chunk, FitMemory, Recompute


class Attention(nn.Module):
    """Causal attention whose scores are a tensor of the program."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, width = x.shape
        q, k, v = self.qkv(x).view(rows, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) * (width // self.heads) ** -0.5
        later = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(later, float("-inf")).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(x.shape))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and an MLP, each behind a norm and beside a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class Blocks(nn.Sequential):
    """Blocks one after the other."""


WAYS: dict[str, list[Any]] = {
    "no passes": [],
    "Chunk(mlp)": [Chunk("*.mlp")],
    "Chunk(attention), heads": [Chunk("*.attention")],
    "Chunk(attention), queries": [Chunk("*.attention", axis=1)],
    "Chunk of both": [Chunk(("*.attention", "*.mlp"))],
    "Recompute of blocks": [Recompute("*")],
    "Recompute of blocks, Chunk of both": [Recompute("*"), Chunk(("*.attention", "*.mlp"))],
}


def squares(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A loss."""
    return model(x).square().mean()  # type: ignore[no-any-return]


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=7, help="rounds that are timed")
    given = options.parse_args(argv)
    torch.set_num_threads(given.threads)
    width, heads, layers, tokens = (16, 2, 2, 64) if given.quick else (256, 8, 4, 1024)
    batch = (torch.randn(2, tokens, width),)
    steps = {}
    for name, passes in WAYS.items():
        torch.manual_seed(0)
        model = Blocks(*(Block(width, heads) for _ in range(layers)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        steps[name] = graphopt.optimize_step(model, optimizer, passes, loss=squares)
        steps[name](*batch)
        steps[name](*batch)
    chunked = steps["Recompute of blocks, Chunk of both"].program.memory()
    within = chunked.resident_bytes + chunked.allocated_peak_bytes
    model = Blocks(*(Block(width, heads) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    passes = [Chunk(("*.attention", "*.mlp")), FitMemory(within)]
    name = "Chunk of both, FitMemory at the peak above"
    steps[name] = graphopt.optimize_step(model, optimizer, passes, loss=squares)
    steps[name](*batch)
    steps[name](*batch)
    title = f"A step of {layers} blocks of width {width} with {tokens:,} tokens, beyond persistent memory"
    shown(title, compared(steps, batch, 1 if given.quick else given.rounds), as_json=given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
