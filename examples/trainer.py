"""Trains a byte-level GPT-2 on English text by the Trainer of transformers: plainly, drop-in and in whole steps.

All three end with the same parameters, to the last bit. The Trainer's own settings do the rest: accumulation,
clipping, a schedule, evaluation.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from rich.console import Console
from text import VOCAB, draw_batches, split_tokens
from torch import nn

import graphopt
from graphopt.integrations.transformers import Trainer
from graphopt.passes import FitMemory


def build(options: argparse.Namespace) -> transformers.PreTrainedModel:
    """A new GPT-2, the same each time."""
    torch.manual_seed(options.seed)
    config = transformers.GPT2Config(
        vocab_size=VOCAB,
        n_positions=options.context,
        n_embd=options.d,
        n_layer=options.layers,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)


def rows(tokens: torch.Tensor, options: argparse.Namespace, count: int) -> list[dict[str, torch.Tensor]]:
    """Pieces of the text, each of which is to be predicted byte by byte."""
    (inputs, _), *_ = draw_batches(tokens, count=1, size=count, length=options.context, seed=options.seed)
    return [{"input_ids": row, "labels": row} for row in inputs]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="updates of each way")
    parser.add_argument("--batch", type=int, default=8, help="sequences in a batch")
    parser.add_argument("--context", type=int, default=128, help="bytes in a sequence")
    parser.add_argument("--layers", type=int, default=3, help="transformer blocks")
    parser.add_argument("--d", type=int, default=128, help="features")
    parser.add_argument("--budget", default="70%", help="of the whole step: 40MB, or a share of its peak")
    parser.add_argument("--seed", type=int, default=0, help="of parameters, data and dropout")
    return parser.parse_args(argv)


def train(make: Any, model: nn.Module, options: argparse.Namespace, **more: Any) -> Any:
    """Train by a Trainer; returns it."""
    training, held_out = split_tokens()
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, max_steps=options.steps, per_device_train_batch_size=options.batch, gradient_accumulation_steps=2,
            logging_steps=options.steps, learning_rate=1e-3, lr_scheduler_type="cosine", seed=options.seed,
            report_to=[], disable_tqdm=True, save_strategy="no", use_cpu=True,
        )  # fmt: skip
        data = rows(training, options, 2 * options.batch * options.steps)
        trainer = make(model=model, args=arguments, train_dataset=data, eval_dataset=rows(held_out, options, 8), **more)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        return trainer


def main(argv: Sequence[str] | None = None) -> int:
    """Train in three ways and compare; returns 1 where results differ."""
    options = parse(argv)
    transformers.logging.set_verbosity_error()
    console = Console()
    plain = train(transformers.Trainer, build(options), options)
    drop_in = train(transformers.Trainer, graphopt.optimize(build(options), [FitMemory(options.budget)]), options)
    whole = train(Trainer, build(options), options, budget=options.budget)
    expected = plain.model.state_dict()
    same = True
    for name, trainer in (("plain", plain), ("drop-in", drop_in), ("whole step", whole)):
        losses = [f"{log['loss']:.6f}" for log in trainer.state.log_history if "loss" in log]
        held_out = trainer.evaluate()["eval_loss"]
        equal = all(torch.equal(value, expected[key]) for key, value in trainer.model.state_dict().items())
        same = same and equal
        console.print(
            f"{name:10}  loss {losses[-1]}, on text that was held out {held_out:.6f}; "
            f"{'equal to the last bit' if equal else 'DIFFERENT'}",
            soft_wrap=True,
        )
    console.print(*map(str, whole.step.records), sep="\n", soft_wrap=True)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
