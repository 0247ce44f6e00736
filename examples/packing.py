"""Trains a GPT on sentences of all lengths, padded to the longest of each batch and packed into rows, within a budget.

Every batch has other sizes. From the second one on a single capture serves them all, and the budget holds for each;
losses and parameters have to equal those of eager PyTorch to the last bit.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from models import GPT, GPTConfig
from rich import box
from rich.console import Console
from rich.table import Table
from text import VOCAB, Batch, english_text
from torch import nn

import graphopt
from graphopt.ir.words.written_units import format_bytes
from graphopt.passes import FitMemory

IGNORED = -100
"""The target of what is no token: padding, and the first word behind a sentence."""

Sentence = torch.Tensor
Collate = Callable[[Sequence[Sentence], int], Batch]


def sentences(longest: int, *, seed: int) -> list[Sentence]:
    """The sentences of the text as tokens, in random order, each cut to ``longest`` tokens and the one behind them."""
    found = re.split(r"(?<=[.:!?])\s+", english_text())
    random.Random(seed).shuffle(found)
    tokens = [torch.tensor(list(part.encode()[: longest + 1])) for part in found]
    return [part for part in tokens if len(part) > 8]


def pad(group: Sequence[Sentence], _: int) -> Batch:
    """A row for each sentence, as long as the longest of them; padding is 0, and has no target."""
    inputs = [sentence[:-1] for sentence in group]
    targets = [sentence[1:] for sentence in group]
    return (
        nn.utils.rnn.pad_sequence(inputs, batch_first=True),
        nn.utils.rnn.pad_sequence(targets, batch_first=True, padding_value=IGNORED),
    )


def pack(group: Sequence[Sentence], longest: int) -> Batch:
    """Sentences behind each other in rows of at most ``longest`` tokens: fewer rows, and hardly any padding.

    A sentence sees those before it in its row, as in the usual pretraining on running text; what it begins with is not
    predicted from them.
    """
    rows: list[list[Sentence]] = []
    for sentence in sorted(group, key=len, reverse=True):
        row = next((row for row in rows if sum(map(len, row)) + len(sentence) <= longest + 1), None)
        if row is None:
            rows.append([sentence])
        else:
            row.append(sentence)
    whole = [torch.cat(row) for row in rows]
    targets = []
    for row in rows:
        starts = [torch.cat([torch.tensor([IGNORED]), sentence[1:]]) for sentence in row]
        targets.append(torch.cat(starts)[1:])
    return (
        nn.utils.rnn.pad_sequence([tokens[:-1] for tokens in whole], batch_first=True),
        nn.utils.rnn.pad_sequence(targets, batch_first=True, padding_value=IGNORED),
    )


def batches(found: Sequence[Sentence], collate: Collate, options: argparse.Namespace) -> Iterator[Batch]:
    """Batches of so many sentences each."""
    for start in range(0, options.steps * options.batch, options.batch):
        yield collate(found[start : start + options.batch], options.longest)


def loss_of_words(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy of the targets that are tokens."""
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


@dataclass
class Run:
    """What training gave: losses and parameters, and the step that ran it, where that is graphopt's."""

    losses: list[torch.Tensor]
    parameters: list[torch.Tensor]
    step: graphopt.TrainStep | None
    budget: int = 0


def train(given: Sequence[Batch], options: argparse.Namespace, *, captured: bool) -> Run:
    """Train a new model on batches, in eager mode or within a budget."""
    torch.manual_seed(options.seed)
    model = GPT(GPTConfig(VOCAB, options.longest, options.d, options.layers, options.heads, options.dropout))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    losses = []
    if not captured:
        for batch in given:
            loss = loss_of_words(model, *batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return Run(losses, list(model.parameters()), None)
    largest = max(given, key=lambda batch: batch[0].numel())
    plain = graphopt.capture(model, largest, loss=loss_of_words, optimizer=optimizer).memory().peak_bytes
    budget = int(plain * options.share)
    step = graphopt.optimize_step(model, optimizer, [FitMemory(budget, cost="roofline")], loss=loss_of_words)
    losses = [step(*batch).clone() for batch in given]
    return Run(losses, list(model.parameters()), step, budget)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="batches each way")
    parser.add_argument("--batch", type=int, default=6, help="sentences in a batch")
    parser.add_argument("--longest", type=int, default=256, help="tokens of the longest sentence, and of a packed row")
    parser.add_argument("--share", type=float, default=0.7, help="budget, as a share of the largest batch's plain peak")
    parser.add_argument("--layers", type=int, default=3, help="transformer blocks")
    parser.add_argument("--d", type=int, default=64, help="features")
    parser.add_argument("--heads", type=int, default=4, help="attention heads")
    parser.add_argument("--dropout", type=float, default=0.1, help="dropout probability")
    parser.add_argument("--seed", type=int, default=0, help="of weights, dropout and the order of sentences")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Train with both collators, print the table; returns 1 where results differ from eager PyTorch's."""
    options = parse(argv)
    console = Console(highlight=False)
    found = sentences(options.longest, seed=options.seed)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, heading in enumerate(("", "sizes", "padding", "budget", "predicted peaks", "last loss", "equal bits")):
        table.add_column(heading, justify="right" if number else "left", no_wrap=True)
    same = True
    for name, collate in (("padded", pad), ("packed", pack)):
        given = list(batches(found, collate, options))
        eager, fitted = (train(given, options, captured=captured) for captured in (False, True))
        assert fitted.step is not None
        equal = all(map(torch.equal, (*eager.losses, *eager.parameters), (*fitted.losses, *fitted.parameters)))
        same = same and equal
        peaks = _peaks(fitted.step, given)
        spare = sum(int((targets == IGNORED).sum()) for _, targets in given) / sum(t.numel() for _, t in given)
        table.add_row(
            name,
            str(len({tuple(tokens.shape) for tokens, _ in given})),
            f"{spare:.0%}",
            format_bytes(fitted.budget),
            f"{format_bytes(min(peaks))} – {format_bytes(max(peaks))}",
            f"{fitted.losses[-1].item():.4f}",
            "yes" if equal else "no",
        )
    console.print(table)
    console.print("Sizes: how many different ones the batches have; the peaks are of all of them.")
    return 0 if same else 1


def _peaks(step: graphopt.TrainStep, given: Sequence[Batch]) -> list[int]:
    """The predicted peak of the program that serves each batch, at the sizes of the batch."""
    peaks = []
    for batch in given:
        program = step.prepare(*batch).program
        peaks.append(program.memory(sizes=_sizes(program, batch)).peak_bytes)
    return peaks


def _sizes(program: graphopt.Program, batch: Batch) -> dict[str, int]:
    """The values of a program's symbols for a batch."""
    shapes = [tuple(node.meta["val"].shape) for node, _ in program.inputs_of("input")]
    return {
        str(symbol): size
        for shape, tensor in zip(shapes, batch, strict=True)
        for symbol, size in zip(shape, tensor.shape, strict=True)
        if str(symbol) in program.symbols
    }


if __name__ == "__main__":
    sys.exit(main())
