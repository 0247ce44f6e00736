"""Mixed precision trains: the final losses of float32 on real data, and the bytes of activations that it promises."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import graphopt
from examples.models import GPT, GPTConfig, next_token_loss
from examples.text import VOCAB, draw_batches, split_tokens
from graphopt.passes import MixedPrecision

Batch = tuple[torch.Tensor, torch.Tensor]
Task = tuple[nn.Module, list[Batch], Callable[..., torch.Tensor]]


def digits() -> Task:
    """A classifier of scikit-learn's 8 × 8 digits, 20 times through all of them."""
    torch.manual_seed(0)
    data = load_digits()
    pictures = torch.tensor(data.data, dtype=torch.float32) / 16
    labels = torch.tensor(data.target)
    model = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.GELU(), nn.Linear(128, 10))
    parts = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).split(256)[:7]
    return model, [(pictures[part], labels[part]) for part in parts] * 20, classify


def classify(model: nn.Module, pictures: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(pictures), labels)


def text() -> Task:
    """A small version of the demo's GPT, on its text."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(VOCAB, context=32, d=32, layers=2, heads=2))
    return model, draw_batches(split_tokens()[0], count=150, size=8, length=32, seed=0), next_token_loss


def final_loss(task: Callable[[], Task], passes: list[graphopt.Pass]) -> tuple[float, graphopt.TrainStep]:
    """The mean loss of the last seven batches."""
    model, batches, loss = task()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    step = graphopt.optimize_step(model, optimizer, passes, loss=loss)
    losses = [step(*batch) for batch in batches]
    return torch.stack(losses[-7:]).mean().item(), step


@pytest.mark.sweep
@pytest.mark.parametrize("task", [digits, pytest.param(text, marks=pytest.mark.sweep)])
def test_the_final_loss_is_that_of_float32_within_one_per_cent(task: Callable[[], Task]) -> None:
    full, _ = final_loss(task, [])
    for dtype in ("bfloat16", "float16"):
        for level in ("O1", "O2"):
            low, step = final_loss(task, [MixedPrecision(dtype, level=level)])
            assert low == pytest.approx(full, rel=0.01)
            if dtype == "float16":
                assert step.state_dict()["held"]["loss-scale/scale"] >= 1024


@pytest.mark.sweep
def test_activations_take_the_bytes_that_are_promised() -> None:
    """At the peak: at most 0.60 of float32's under O1, and 0.55 under O2."""
    tokens, targets = torch.randint(2048, (2, 8, 256))
    bytes_ = {}
    for level in ("", "O1", "O2"):
        model = GPT(GPTConfig(vocab=2048, context=256, d=256, layers=6, heads=4))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        passes = [MixedPrecision(level=level)] if level else []
        step = graphopt.optimize_step(model, optimizer, passes, loss=next_token_loss).prepare(tokens, targets)
        bytes_[level] = step.program.memory().categories["activations"]
    assert bytes_["O1"] <= 0.60 * bytes_[""]
    assert bytes_["O2"] <= 0.55 * bytes_[""]


class CachedAttention(nn.Module):
    """Attention with dropout whose keys and values get an empty cache in front, as in models of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).chunk(3, -1)
        cache = torch.empty(x.shape[0], 0, 8)
        return F.scaled_dot_product_attention(q, torch.cat([cache, k], 1), torch.cat([cache, v], 1), dropout_p=0.2)


@pytest.mark.sweep
def test_attention_with_dropout_and_operands_of_two_dtypes() -> None:
    torch.manual_seed(0)
    model, x = CachedAttention(), torch.randn(2, 6, 8)
    optimized = graphopt.optimize(copy.deepcopy(model), [MixedPrecision()])
    torch.manual_seed(1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(x).float().sum()
    torch.manual_seed(1)
    found = optimized(x).float().sum()
    assert torch.equal(found, expected)
