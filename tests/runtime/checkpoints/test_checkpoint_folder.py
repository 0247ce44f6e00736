"""A process that is killed at any moment leaves the last good checkpoint."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import graphopt
from graphopt import TrainStep, checkpoint
from tests.runtime.checkpoints.test_checkpoint import FORMATS, Format
from tests.support.forking import start

STEPS = 100_000
"""More than a process gets to."""


def training() -> TrainStep:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return graphopt.optimize_step(model, optimizer, loss=lambda model, x: model(x).square().mean())


def batch(number: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(number))


def train(folder: str, format: Format) -> None:
    """Train from the last checkpoint on, with one after each step."""
    torch.set_num_threads(1)
    step, done = training(), 0
    if any(Path(folder).glob("checkpoint-????????")):
        done = checkpoint.load(folder, {"step": step})["done"]
    for number in range(done, STEPS):
        step(batch(number))
        checkpoint.save(folder, {"step": step, "done": number + 1}, format=format)


def assert_goes_on(folder: Path) -> int:
    """The newest checkpoint is what training without a stop has at that step, and training goes on from it."""
    step = training()
    done: int = checkpoint.load(folder, {"step": step})["done"]
    other = training()
    for number in range(done):
        other(batch(number))
    state = torch.get_rng_state()
    expected = [other(batch(done + number)) for number in range(2)]
    checkpoint.load(folder, {"step": step, "done": None})
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(step(batch(done + number)), value) for number, value in enumerate(expected))
    for one, two in zip(step.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(one, two)
    return done


def kill_again_and_again(folder: Path, format: Format, kills: int, seed: int) -> None:
    moments, before = random.Random(seed), 0
    for _ in range(kills):
        (process,) = start(train, [(str(folder), format)])
        while process.is_alive() and not _further(folder, before):
            time.sleep(0.01)
        time.sleep(moments.random() * 0.1)
        assert process.is_alive()
        process.kill()
        process.join()
        done = assert_goes_on(folder)
        assert done > before
        before = done


def _further(folder: Path, done: int) -> bool:
    """Whether there is a checkpoint behind the last step that was seen."""
    return max((int(path.name.partition("-")[2]) for path in folder.glob("checkpoint-????????")), default=0) > done


@pytest.mark.sweep
@pytest.mark.parametrize("format", FORMATS)
def test_killed_at_any_moment(tmp_path: Path, format: Format) -> None:
    kill_again_and_again(tmp_path, format, kills=3, seed=7)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("format", FORMATS)
def test_killed_at_many_moments(tmp_path: Path, format: Format, seed: int) -> None:
    kill_again_and_again(tmp_path, format, kills=12, seed=seed)
