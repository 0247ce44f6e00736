"""Trains a byte-level GPT on English text in several processes, which exchange gradients or parameters.

    torchrun --nproc-per-node 2 examples/data_parallel.py --mode sparse

Every process takes batches of its own. What each mode exchanges is printed before the first step; at the end all
processes hold the same parameters, to the last bit.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from models import GPT, GPTConfig, next_token_loss
from text import VOCAB, draw_batches, split_tokens
from torch import nn

import graphopt
from graphopt import Pass
from graphopt.passes import (
    AdaptiveLocalSGD,
    CompressGradients,
    DataParallel,
    DeepGradientCompression,
    DiLoCo,
    LocalSGD,
    ShardOptimizer,
)

MOMENTUM = 0.9


def _sparse(steps: int) -> list[Pass]:
    """Dense for an eighth of the steps, then warm-up up to the half: 99.9 % of the entries stay where they are."""
    return [DeepGradientCompression(rampup_begin_step=steps // 8, rampup_step=max(1, steps * 3 // 8), clip_norm=1.0)]


MODES: dict[str, Callable[[int], list[Pass]]] = {
    "dense": lambda steps: [],
    "sparse": _sparse,
    "local": lambda steps: [LocalSGD(k_steps=4, begin_step=steps // 4, last_step=steps - 1)],
    "adaptive": lambda steps: [AdaptiveLocalSGD(init_k_steps=4, begin_step=steps // 4, last_step=steps - 1)],
    "diloco": lambda steps: [DiLoCo(every=max(1, steps // 4))],
    "bf16": lambda steps: [CompressGradients("bf16")],
    "powersgd": lambda steps: [CompressGradients("powersgd", rank=2, start_step=min(4, steps // 2))],
    "sharded": lambda steps: [ShardOptimizer()],
}
"""What goes with ``DataParallel``, for a number of steps."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=MODES, default="dense", help="what is exchanged (default: dense)")
    parser.add_argument("--steps", type=int, default=64, help="training steps (default: 64)")
    parser.add_argument("--batch", type=int, default=8, help="sequences in a batch of one process (default: 8)")
    parser.add_argument("--context", type=int, default=128, help="tokens in a sequence (default: 128)")
    parser.add_argument("--layers", type=int, default=4, help="transformer blocks (default: 4)")
    parser.add_argument("--features", type=int, default=192, help="features (default: 192)")
    parser.add_argument("--heads", type=int, default=4, help="attention heads (default: 4)")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate of SGD with momentum (default: 0.1)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default: 0)")
    options = parser.parse_args(argv)
    if options.features % options.heads:
        parser.error(f"--features {options.features} is not a multiple of --heads {options.heads}")
    if options.steps < 2:
        parser.error(f"--steps {options.steps}: take at least 2")
    if "RANK" not in os.environ:
        parser.error("start one process for each rank: torchrun --nproc-per-node 2 examples/data_parallel.py")
    return options


def train(options: argparse.Namespace, say: Callable[[str], None]) -> nn.Module:
    """Train one rank's model; ``say`` prints on the first rank."""
    rank = dist.get_rank()
    torch.manual_seed(options.seed)
    model = GPT(GPTConfig(VOCAB, options.context, options.features, options.layers, options.heads))
    added = MODES[options.mode](options.steps)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=MOMENTUM, fused=True)
    step = graphopt.optimize_step(model, optimizer, [DataParallel(), *added], loss=next_token_loss)
    tokens, held_out = split_tokens()
    sizes = {"size": options.batch, "length": options.context}
    batches = draw_batches(tokens, count=options.steps, seed=options.seed + 1000 * rank, **sizes)
    step.prepare(*batches[0])
    for record in step.records:
        say(f"{record.spec}: {record.changed}")
        for line in record.changed.lines:
            say(f"  {line}")
    seconds, every = [], max(1, options.steps // 8)
    for number, batch in enumerate(batches):
        started = time.perf_counter()
        loss = step(*batch)
        seconds.append(time.perf_counter() - started)
        if number % every == every - 1:
            dist.all_reduce(loss)
            mean = loss.item() / dist.get_world_size()
            say(f"step {number + 1:4}: loss {mean:.4f}, {statistics.median(seconds[-every:]) * 1e3:.0f} ms")
    step.synchronize()
    say(f"Loss on text that was held out: {validation_loss(model, held_out, sizes):.4f} nats per byte")
    return model


@torch.no_grad()
def validation_loss(model: nn.Module, tokens: torch.Tensor, sizes: dict[str, int]) -> float:
    """The mean loss over four batches of held-out text, in eval mode."""
    model.eval()
    losses = [next_token_loss(model, *batch) for batch in draw_batches(tokens, count=4, seed=0, **sizes)]
    return torch.stack(losses).mean().item()


def same_on_all_ranks(model: nn.Module) -> bool:
    """Whether the parameters of all ranks are equal to the last bit."""
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    found = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(found, flat)
    return all(torch.equal(flat, other) for other in found)


def main(argv: Sequence[str] | None = None) -> int:
    """Train; returns 1 where ranks differ at the end."""
    options = parse(argv)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    first = dist.get_rank() == 0
    model = train(options, lambda text: print(text, flush=True) if first else None)
    same = same_on_all_ranks(model)
    if first:
        count = sum(parameter.numel() for parameter in model.parameters())
        verdict = "equal to the last bit" if same else "NOT equal"
        print(f"The {count:,} parameters of the {dist.get_world_size()} ranks are {verdict}.")
    dist.destroy_process_group()
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
