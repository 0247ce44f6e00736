"""Real English text that every Python carries: the language reference, as tokens of one byte each."""

from __future__ import annotations

from pydoc_data.topics import topics

import torch

VOCAB = 256
"""A token is one byte of UTF-8."""

Batch = tuple[torch.Tensor, torch.Tensor]


def english_text() -> str:
    """What ``help()`` shows about Python's own topics: some hundred thousand characters of technical prose."""
    return "\n\n".join(topics[name] for name in sorted(topics))


def split_tokens(held_out: float = 0.1) -> tuple[torch.Tensor, torch.Tensor]:
    """The text as two one-dimensional int64 tensors: what to train on, and the last share of it to validate on."""
    tokens = torch.frombuffer(bytearray(english_text().encode()), dtype=torch.uint8).long()
    border = int(len(tokens) * (1 - held_out))
    return tokens[:border], tokens[border:]


def draw_batches(tokens: torch.Tensor, *, count: int, size: int, length: int, seed: int) -> list[Batch]:
    """``count`` pairs of ``[size, length]`` tokens and the tokens that follow each, from random places of the text.

    The places come from a generator of their own, so the model's random numbers stay as they are.
    """
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(tokens) - length - 1, (count, size), generator=generator)
    windows = tokens.unfold(0, length + 1, 1)
    return [(windows[row, :-1].clone(), windows[row, 1:].clone()) for row in starts]
