"""Trains a small Llama that FSDP2 has sharded, within a budget of bytes for each process.

    torchrun --nproc-per-node 2 examples/fsdp2.py --budget 60%

The model is given to ``fully_shard``, layer by layer and as a whole, and then to ``graphopt.optimize``; the loop, the
optimizer and gradient clipping stay as they are. Beside it the same model is trained by FSDP2 alone, and with
activation checkpointing in each layer. A table shows what a step of each allocates and takes on the slowest process;
losses and parameters are compared to the last bit.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import transformers
from text import VOCAB, Batch, draw_batches, split_tokens
from torch import nn
from torch.distributed.fsdp import fully_shard

import graphopt
from graphopt.passes import FitMemory


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="60%", help="of what a process takes without it, or bytes (default: 60%%)")
    parser.add_argument("--steps", type=int, default=8, help="training steps, at least 4 (default: 8)")
    parser.add_argument("--batch", type=int, default=4, help="sequences in a batch of one process (default: 4)")
    parser.add_argument("--context", type=int, default=128, help="tokens in a sequence (default: 128)")
    parser.add_argument("--layers", type=int, default=4, help="decoder layers (default: 4)")
    parser.add_argument("--features", type=int, default=256, help="features (default: 256)")
    options = parser.parse_args(argv)
    if "RANK" not in os.environ:
        parser.error("start one process for each rank: torchrun --nproc-per-node 2 examples/fsdp2.py")
    return options


class Llama(nn.Module):
    """A Llama that gives the loss of a batch, so that all of its memory is counted."""

    def __init__(self, options: argparse.Namespace, *, checkpoints: bool) -> None:
        super().__init__()
        config = transformers.LlamaConfig(
            vocab_size=VOCAB, hidden_size=options.features, intermediate_size=3 * options.features,
            num_hidden_layers=options.layers, num_attention_heads=4, max_position_embeddings=options.context,
        )  # fmt: skip
        self.model = transformers.LlamaForCausalLM(config)
        if checkpoints:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.model(tokens, use_cache=False).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclass
class Trained:
    """A model of one way with its optimizer, and what its steps took."""

    model: Any
    optimizer: torch.optim.Optimizer
    losses: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    seconds: list[float] = field(default_factory=list[float])
    peak: int = 0

    def step(self, batch: Batch, *, measured: bool) -> None:
        """One step of a usual loop; its seconds, or what forward and backward allocate at most."""
        self.optimizer.zero_grad()
        dist.barrier()
        started = time.perf_counter()
        if measured:
            self.peak = graphopt.measure_peak(lambda: self._differentiate(batch)).allocated_peak_bytes
        else:
            self._differentiate(batch)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        if not measured:
            self.seconds.append(time.perf_counter() - started)

    def _differentiate(self, batch: Batch) -> None:
        loss = self.model(*batch)
        loss.backward()
        self.losses.append(loss.detach())


def sharded(options: argparse.Namespace, *, checkpoints: bool = False) -> Any:
    """The model after ``fully_shard``, the same for every way."""
    torch.manual_seed(0)
    model: Any = Llama(options, checkpoints=checkpoints)
    for layer in model.model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def main(argv: Sequence[str] | None = None) -> int:
    """Train in each way; returns 1 where losses or parameters differ."""
    options = parse(argv)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    models = {
        "FSDP2": sharded(options),
        "FSDP2, checkpointing": sharded(options, checkpoints=True),
        "optimize": graphopt.optimize(sharded(options)),
        f"FitMemory({options.budget!r})": graphopt.optimize(sharded(options), [FitMemory(options.budget)]),
    }
    ways = {
        name: Trained(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
        for name, model in models.items()
    }
    tokens, _ = split_tokens()
    sizes = {"size": options.batch, "length": options.context}
    for number, batch in enumerate(draw_batches(tokens, count=options.steps, seed=dist.get_rank(), **sizes)):
        for way in ways.values():
            way.step(batch, measured=number == options.steps - 1)
    reference, *others = ways.values()
    same = all(
        all(map(torch.equal, reference.losses, other.losses))
        and all(
            torch.equal(p.full_tensor(), q.full_tensor())
            for p, q in zip(reference.model.parameters(), other.model.parameters(), strict=True)
        )
        for other in others
    )
    report(ways, same)
    dist.barrier()
    dist.destroy_process_group()
    return 0 if same else 1


def report(ways: dict[str, Trained], same: bool) -> None:
    """Print, on the first process, what a step of each way takes: of memory at most, and of time by its median."""
    for name, way in ways.items():
        figures = torch.tensor([float(way.peak), statistics.median(way.seconds[2:])], dtype=torch.float64)
        dist.all_reduce(figures, dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            predicted = ""
            if hasattr(way.model, "program"):
                predicted = f", {way.model.program.memory().allocated_peak_bytes / 1e6:.1f} MB predicted"
            print(f"{name:22} {figures[0] / 1e6:7.1f} MB, {1e3 * figures[1]:5.0f} ms{predicted}", flush=True)
    if dist.get_rank() == 0:
        print(f"Losses and parameters are {'equal' if same else 'NOT equal'} in all ways, to the last bit", flush=True)


if __name__ == "__main__":
    sys.exit(main())
