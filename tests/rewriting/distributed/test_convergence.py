"""Training on real data with a thousandth of the gradients; ``benchmarks/convergence.py`` has more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import run_ranks

DIGITS = """
import math
from sklearn.datasets import load_digits
from torch import nn
import graphopt
from graphopt.passes import DataParallel, DeepGradientCompression

STEPS, RATE = 200, 0.2
found = load_digits()
x, y = torch.tensor(found.data, dtype=torch.float32) / 16, torch.tensor(found.target)
order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
held_out, kept = order[:360], order[360:]

def train(momentum, passes):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=momentum)
    loss = lambda model, x, y: nn.functional.cross_entropy(model(x), y)
    step = graphopt.optimize_step(model, optimizer, [DataParallel(), *passes], loss=loss)
    generator, sum_of_losses = torch.Generator().manual_seed(0), 0.0
    for number in range(STEPS):
        rows = kept[torch.randint(len(kept), (64,), generator=generator)][rank::world]
        optimizer.param_groups[0]["lr"] = RATE * (1 + math.cos(math.pi * number / STEPS)) / 2
        step(x[rows], y[rows])
    with torch.no_grad():
        right = (model(x[held_out]).argmax(-1) == y[held_out]).double().mean().item()
        return right, nn.functional.cross_entropy(model(x[kept]), y[kept]).item(), step.records[-1].changed.counts

compression = dict(rampup_step=20, min_elements=16384)
say({
    "dense": train(0.9, []),
    "compressed": train(0.0, [DeepGradientCompression(**compression)]),
})
"""


@pytest.mark.sweep
def test_digits_are_learned_with_a_thousandth_of_the_gradients(tmp_path: Path) -> None:
    """Four ranks, 200 steps, two large layers: accuracy on images that were held out, and equal on all ranks."""
    ranks = [found for (found,) in run_ranks(DIGITS, 4, tmp_path / "store")]
    assert all(found == ranks[0] for found in ranks)
    accuracy, _, _ = ranks[0]["dense"]
    compressed, loss, counts = ranks[0]["compressed"]
    assert counts["sparse gradients"] == 2
    assert accuracy > 0.95
    assert compressed > accuracy - 0.02
    assert loss < 0.1
