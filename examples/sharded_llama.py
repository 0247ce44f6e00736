"""Trains a small Llama on English text, of which each process keeps its share, within a budget of bytes.

    torchrun --nproc-per-node 4 examples/sharded_llama.py --budget 70%

The model is made without data and gets its values module by module, so that no process ever has all of it. Checkpoints
hold each process's shards; started again, also with another number of processes, training goes on from the newest one:

    torchrun --nproc-per-node 4 examples/sharded_llama.py --folder runs/llama --steps 20
    torchrun --nproc-per-node 2 examples/sharded_llama.py --folder runs/llama --steps 40

With ``--page ranks.html`` the first process writes a page that shows what each process holds, and when it waits.

At the end the first process puts the model together and computes a loss with it, which is that of the shards.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from text import VOCAB, Batch, draw_batches, split_tokens
from torch import nn

import graphopt
from graphopt.passes import DataParallel, FitMemory, ShardParameters


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="70%", help="of what a process takes without it, or bytes (default: 70%%)")
    parser.add_argument("--steps", type=int, default=20, help="training steps in all (default: 20)")
    parser.add_argument("--batch", type=int, default=4, help="sequences in a batch of one process (default: 4)")
    parser.add_argument("--context", type=int, default=128, help="tokens in a sequence (default: 128)")
    parser.add_argument("--layers", type=int, default=4, help="decoder layers (default: 4)")
    parser.add_argument("--features", type=int, default=256, help="features (default: 256)")
    parser.add_argument("--folder", type=Path, help="where checkpoints are, to go on from and to add to")
    parser.add_argument("--page", type=Path, help="write what each process holds, and when it waits, as HTML")
    options = parser.parse_args(argv)
    if "RANK" not in os.environ:
        parser.error("start one process for each rank: torchrun --nproc-per-node 4 examples/sharded_llama.py")
    return options


def build(options: argparse.Namespace) -> nn.Module:
    """A Llama, on ``meta``."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=options.features, intermediate_size=3 * options.features,
        num_hidden_layers=options.layers, num_attention_heads=4, max_position_embeddings=options.context,
    )  # fmt: skip
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config)


def loss(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy of the next tokens."""
    return F.cross_entropy(model(tokens, use_cache=False).logits.flatten(0, 1), targets.flatten())


def train(options: argparse.Namespace, say: Callable[[str], None]) -> tuple[graphopt.TrainStep, Batch]:
    """Train this process's shards; the step, and a batch that all processes have."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = build(options)
    graphopt.materialize_shards(model, model._init_weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    passes = [DataParallel(), ShardParameters(), FitMemory(options.budget)]
    step = graphopt.optimize_step(model, optimizer, passes, loss=loss)
    if options.folder is not None and any(options.folder.glob("checkpoint-*")):
        graphopt.checkpoint.load(options.folder, step)
        say(f"Went on behind step {step.steps}, with {dist.get_world_size()} processes.")
    tokens, held_out = split_tokens()
    sizes = {"size": options.batch, "length": options.context}
    batches = draw_batches(tokens, count=options.steps, seed=1 + rank, **sizes)
    step.prepare(*batches[0])
    for record in step.records:
        if not record.changed.reason:
            say(f"{record.spec}: {record.changed}")
    measured = 0
    for batch in batches[step.steps :]:
        losses: list[torch.Tensor] = []
        started = time.perf_counter()
        peak = graphopt.measure_peak(lambda batch=batch, losses=losses: losses.append(step(*batch)))
        milliseconds, measured = 1e3 * (time.perf_counter() - started), peak.allocated_peak_bytes
        dist.all_reduce(losses[0])
        if step.steps % max(1, options.steps // 8) == 0:
            say(f"step {step.steps:4}: loss {losses[0].item() / dist.get_world_size():.4f}, {milliseconds:.0f} ms")
    memory = step.program.memory()
    total = sum(parameter.numel() * 4 for parameter in model.parameters())
    say(
        f"Each process keeps {memory.resident_bytes / 1e6:.1f} MB of {3 * total / 1e6:.1f} MB of parameters and states,"
    )
    say(
        f"and its step takes {memory.allocated_peak_bytes / 1e6:.1f} MB beside them ({measured / 1e6:.1f} MB measured)."
    )
    if options.page is not None and rank == 0:
        options.page.write_text(step.program.to("ranks"), encoding="utf-8")
    if options.folder is not None:
        say(f"Saved as {graphopt.checkpoint.save(options.folder, step)}.")
    return step, draw_batches(held_out, count=1, seed=0, **sizes)[0]


def main(argv: Sequence[str] | None = None) -> int:
    """Train; returns 1 where the model that is put together is another one than the shards."""
    options = parse(argv)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    first = dist.get_rank() == 0
    step, batch = train(options, lambda text: print(text, flush=True) if first else None)
    found, whole = step.evaluate(*batch), step.full_state_dict()
    same = True
    if first:
        plain = build(options).to_empty(device="cpu")
        plain.apply(plain._init_weights)  # sets what no state holds
        plain.load_state_dict(whole["model"])
        with torch.no_grad():
            same = torch.equal(loss(plain.eval(), *batch), found)
        verdict = "equal" if same else "NOT equal"
        print(f"Loss on text that was held out: {found.item():.4f}; {verdict} with the model that is put together")
    dist.barrier()
    dist.destroy_process_group()
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
