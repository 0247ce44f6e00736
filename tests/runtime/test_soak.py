"""Training over hundreds of steps: equal to eager training to the end, and no more memory than at the beginning."""

from __future__ import annotations

import copy
import gc

import pytest
import torch

import graphopt
from graphopt.passes import FuseUpdate, Recompute
from tests.support.training import OPTIMIZERS, Blocks, Training, assert_same, mean_square, next_token, train

pytestmark = pytest.mark.sweep

STEPS = 400
LENGTHS = (6, 9, 12)
"""Tokens of a batch; each is a program of its own."""


def batches() -> list[tuple[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randint(11, (2, LENGTHS[number % 3]), generator=generator),) for number in range(STEPS)]


def live_bytes() -> int:
    """The bytes of all tensors with data that Python knows, each storage once."""
    gc.collect()
    tensors = [item for item in gc.get_objects() if type(item) in (torch.Tensor, torch.nn.Parameter)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def test_whole_steps_stay_equal_to_eager_and_hold_no_more() -> None:
    model, run = Blocks(2), batches()
    eager = train(copy.deepcopy(model), OPTIMIZERS["adamw"], next_token, run)
    optimizer, found = OPTIMIZERS["adamw"](model.parameters()), Training()
    step = graphopt.optimize_step(model, optimizer, [Recompute("blocks.*"), FuseUpdate()], loss=next_token)
    torch.manual_seed(1)
    held = 0
    for number, batch in enumerate(run):
        found.add(f"{number}.loss", step(*batch))
        held = live_bytes() if number == 2 * len(LENGTHS) else held
    losses = 4 * (STEPS - 1 - 2 * len(LENGTHS))  # what ``found`` has kept since
    assert live_bytes() == held + losses
    assert_same(eager, found.end(model, optimizer), "whole step", skip=".gradient")


def test_drop_in_calls_leave_nothing_behind() -> None:
    """Forward without backward, backward, and evaluation in turn."""
    model, run = graphopt.optimize(Blocks(2), [Recompute("blocks.*")]), batches()
    held = 0
    for number, (tokens,) in enumerate(run):
        model.train(number % 4 != 3)
        loss = mean_square(model, tokens)
        if number % 4 in (0, 1):
            loss.backward()
            model.zero_grad()
        del loss
        held = live_bytes() if number == 4 * len(LENGTHS) else held
    assert live_bytes() == held
