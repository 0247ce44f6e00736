"""Training over thousands of steps: equal to eager training to the end, and no more memory than at the beginning."""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import nn

import graphopt
from graphopt.passes import FuseUpdate, MixedPrecision, Offload, Recompute
from tests.support.training import OPTIMIZERS, Blocks, Passes, Training, assert_same, mean_square, next_token

pytestmark = pytest.mark.sweep

STEPS = 10_000
SETTLED = 1_000
"""The step from which on nothing may grow."""

BATCHES = [torch.randint(11, (2, length), generator=torch.Generator().manual_seed(length)) for length in (6, 9, 12)]
"""Tokens of three lengths; each is a program of its own."""

MAX_GROWTH = 8 << 20
"""Bytes by which the process may grow over all steps: less than a kilobyte each, with what an allocator wastes."""


def live_bytes() -> int:
    """The bytes of all tensors with data that Python knows, each storage once."""
    gc.collect()
    tensors = [item for item in gc.get_objects() if type(item) in (torch.Tensor, torch.nn.Parameter)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def process_bytes() -> int:
    """The bytes of memory that this process occupies."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@dataclass
class Watch:
    """What a loop holds at step ``SETTLED`` and at its end."""

    tensors: list[int] = field(default_factory=list)
    objects: list[int] = field(default_factory=list)
    process: list[int] = field(default_factory=list)

    def look(self) -> None:
        """Note what is there now."""
        self.tensors.append(live_bytes())
        self.objects.append(len(gc.get_objects()))
        self.process.append(process_bytes())

    def assert_steady(self) -> None:
        """Fail if anything has grown between the first look and the last."""
        assert self.tensors[-1] == self.tensors[0]
        assert self.objects[-1] <= self.objects[0] + 100  # what a cache of Python's own may have taken in
        assert self.process[-1] <= self.process[0] + MAX_GROWTH


def run(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: Callable[[torch.Tensor], torch.Tensor],
    evaluate: Callable[[torch.Tensor], torch.Tensor],
    watch: Watch | None = None,
) -> Training:
    """What is left of ``STEPS`` steps with a schedule, validation and an optimizer state that is saved and loaded."""
    losses, validation, found = torch.empty(STEPS), torch.empty(STEPS // 100), Training()
    torch.manual_seed(1)
    for number in range(STEPS):
        if watch and number == SETTLED:
            watch.look()
        losses[number] = step(BATCHES[number % 3]).detach()
        if number % 100 == 99:
            optimizer.param_groups[0]["lr"] = 0.01 / (1 + number / 1_000)
            model.eval()
            with torch.no_grad():
                validation[number // 100] = evaluate(BATCHES[0])
            model.train()
        if number % 2_500 == 600:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    if watch:
        watch.look()
    found.add("losses", losses)
    found.add("validation", validation)
    return found.end(model, optimizer)


def run_plainly(model: nn.Module, watch: Watch | None = None) -> Training:
    """``run`` with the loop that everyone writes, on a model that may have been optimized."""
    optimizer = OPTIMIZERS["adamw"](model.parameters())

    def step(tokens: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = next_token(model, tokens)
        loss.backward()
        optimizer.step()
        return loss

    return run(model, optimizer, step, lambda tokens: next_token(model, tokens), watch)


@pytest.fixture(scope="module")
def eager() -> Training:
    """What eager mode leaves of the model of these tests."""
    return run_plainly(new_model())


def new_model() -> Blocks:
    """The model whose training ``eager`` is."""
    torch.manual_seed(0)
    return Blocks(2)


@pytest.mark.parametrize(
    "passes",
    [[Recompute("blocks.*"), FuseUpdate()], [Offload(tier="disk", min_bytes=1)]],
    ids=["recomputed", "on-disk"],
)
def test_whole_steps_stay_equal_to_eager_and_hold_no_more(passes: Passes, eager: Training) -> None:
    model, watch = new_model(), Watch()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    step = graphopt.optimize_step(model, optimizer, passes, loss=next_token)
    found = run(model, optimizer, step, step.evaluate, watch)
    assert_same(eager, found, "whole step")
    watch.assert_steady()


def test_a_drop_in_model_stays_equal_to_eager_and_holds_no_more(eager: Training) -> None:
    watch = Watch()
    found = run_plainly(graphopt.optimize(new_model(), [Recompute("blocks.*")]), watch)
    assert_same(eager, found, "drop-in")
    watch.assert_steady()


def test_steps_that_are_skipped_hold_no_more(eager: Training) -> None:
    """Half precision, whose loss scale grows until a step is skipped, over and over."""
    model, watch = new_model(), Watch()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    passes = [MixedPrecision("float16", init_scale=2.0**14, growth_interval=20)]
    step = graphopt.optimize_step(model, optimizer, passes, loss=next_token)
    skipped = 0

    def counted(tokens: torch.Tensor) -> torch.Tensor:
        nonlocal skipped
        loss = step(tokens)
        skipped += step.skipped
        return loss

    found = run(model, optimizer, counted, step.evaluate, watch)
    assert skipped > 100
    assert found.tensors["losses"].isfinite().all()
    assert (found.tensors["validation"][-1] - eager.tensors["validation"][-1]).abs() < 0.05
    watch.assert_steady()


def test_drop_in_calls_leave_nothing_behind() -> None:
    """Forward without backward, backward, and evaluation in turn."""
    model, watch = graphopt.optimize(Blocks(2), [Recompute("blocks.*")]), Watch()
    for number in range(STEPS):
        if number == SETTLED:
            watch.look()
        model.train(number % 4 != 3)
        loss = mean_square(model, BATCHES[number % 3])
        if number % 4 in (0, 1):
            loss.backward()
            model.zero_grad()
        del loss
    watch.look()
    watch.assert_steady()
