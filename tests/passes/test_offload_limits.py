"""Offload: too little room, whatever autograd is asked to do, and a process whose memory is limited."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import graphopt
from graphopt import GraphoptError
from graphopt.ir.ops import transfers
from graphopt.passes import Offload
from tests.support.covering import covering
from tests.support.errors import attempt
from tests.support.fitting import applied
from tests.support.offloading import ROWS, layers, nothing_held_afterwards, off
from tests.support.paths import ROOT
from tests.support.training import OPTIMIZERS, captured, identical, mean_square
from tests.support.transferring import stored_bytes


@pytest.fixture(autouse=True)
def _nothing_is_held_afterwards() -> Iterator[None]:
    with nothing_held_afterwards():
        yield


# --- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("tier", transfers.TIERS)
def test_too_little_room_is_an_error_before_the_first_step(tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    offload = sys.modules[Offload.__module__]
    monkeypatch.setattr(offload, f"free_{tier}_bytes", lambda: 100_000)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    error = attempt(lambda: applied(captured(layers(), ROWS), off(tier=tier)))
    assert f"on the {tier} for each of 4 processes, and 100000 bytes (100.0 kB) are there" in str(error)


def one_step(model: nn.Module) -> list[torch.Tensor | None]:
    model.zero_grad()
    torch.manual_seed(1)
    mean_square(model, ROWS).backward()
    return [parameter.grad for parameter in model.parameters()]


def test_a_disk_that_is_full_is_an_error_and_the_next_step_runs(tmp_path: Path) -> None:
    model = graphopt.optimize(layers(), [off(tier="disk")])
    expected = one_step(layers())
    transfers.configure(disk_directory=tmp_path, disk_limit=100_000)
    try:
        error = attempt(lambda: one_step(model))
        assert "100000" in str(error)
        del error
        gc.collect()
        assert stored_bytes() == 0
        transfers.configure(disk_directory=tmp_path)
        assert all(identical(a, b) for a, b in zip(one_step(model), expected, strict=True))
        assert list(tmp_path.iterdir()) == []
    finally:
        transfers.configure()


def test_host_memory_that_runs_out_is_an_error_and_the_next_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = graphopt.optimize(layers(), [off()])
    expected = one_step(layers())
    one_step(model)
    engine = transfers.Engine(available=lambda: 10_000)
    with monkeypatch.context() as patch:
        patch.setattr(transfers, "engine", lambda: engine)
        error = attempt(lambda: one_step(model))
        assert "65536 bytes" in str(error)
        del error
        gc.collect()
        assert engine.statistics().stored_bytes == 0
    engine.close()
    assert all(identical(a, b) for a, b in zip(one_step(model), expected, strict=True))


# --- autograd --------------------------------------------------------------------------------------------------------


def two_forwards(model: nn.Module) -> None:
    (mean_square(model, ROWS) * mean_square(model, ROWS.sin())).backward()


def backward_twice(model: nn.Module) -> None:
    loss = mean_square(model, ROWS)
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    loss.backward()


def failing_between(model: nn.Module) -> None:
    def fail(model: nn.Module) -> None:
        loss = mean_square(model, ROWS)
        raise ArithmeticError(str(loss.shape))

    with pytest.raises(ArithmeticError):
        fail(model)
    mean_square(model, ROWS).backward()


def failing_in_backward(model: nn.Module) -> None:
    def fail(gradient: torch.Tensor) -> None:
        raise ArithmeticError("in the middle of backward")

    x = ROWS.clone().requires_grad_()
    x.register_hook(fail)
    with pytest.raises(ArithmeticError):
        mean_square(model, x).backward()
    model.zero_grad()
    mean_square(model, ROWS).backward()


def forward_without_backward(model: nn.Module) -> None:
    mean_square(model, ROWS)
    mean_square(model, ROWS).backward()


@pytest.mark.sweep(but=("backward_twice-disk",))
@covering(
    use={
        use.__name__: use
        for use in (two_forwards, backward_twice, failing_between, failing_in_backward, forward_without_backward)
    },
    tier=transfers.TIERS,
)
def test_whatever_the_user_does_with_the_graph(use: Callable[[nn.Module], None], tier: str) -> None:
    found = []
    for model in (layers(), graphopt.optimize(layers(), [off(tier=tier)])):
        torch.manual_seed(1)
        use(model)
        found.append([parameter.grad for parameter in model.parameters()] + [torch.get_rng_state()])
    assert all(identical(one, other) for one, other in zip(*found, strict=True))
    gc.collect()
    assert stored_bytes() == 0


@pytest.mark.sweep
def test_a_loss_that_is_kept_holds_what_backward_will_need() -> None:
    model = graphopt.optimize(layers(), [off()])
    loss = mean_square(model, ROWS)
    assert stored_bytes() == 65536 * len(model.records[0].changed.tensors)
    loss.backward()
    del loss
    assert stored_bytes() == 0


def test_a_failure_within_the_step_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = layers()
    step = graphopt.optimize_step(model, OPTIMIZERS["sgd"](model.parameters()), [off()], loss=mean_square)
    step(ROWS)
    engine = transfers.engine()
    original, times = engine.prefetch, []

    def fail(*args: Any) -> torch.Tensor:
        times.append(1)
        if len(times) == 2:
            raise GraphoptError("a test")
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "prefetch", fail)
        assert "a test" in str(attempt(lambda: step(ROWS)))
    gc.collect()
    assert stored_bytes() == 0
    step(ROWS)


# --- a process with too little memory --------------------------------------------------------------------------------

LIMITED = """
import resource, sys
import torch
from torch import nn
import graphopt
from graphopt.passes import Offload

torch.set_num_threads(1)
torch.manual_seed(0)
tier, limit = sys.argv[1], int(sys.argv[2])
model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 16)) for _ in range(12)))
x = torch.randn(8192, 16)  # 12 tensors of 8.4 MB that backward needs
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
passes = [Offload(tier=tier, cost="roofline", prefetch=1)] if tier != "keep" else []

def loss(model, x):
    return (model(x) - x).square().mean()

step = graphopt.optimize_step(model, optimizer, passes, loss=loss)
step(x[:512])  # starts threads; captures another shape
step.prepare(x)
torch.ones(1 << 20).sum()

def data_bytes():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))

if limit:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + limit, before[1]))
try:
    for _ in range(2):
        value = step(x)
    print(value.item().hex(), sum(p.double().sum() for p in model.parameters()).item().hex())
except (RuntimeError, graphopt.GraphoptError) as error:
    print("no memory" if "memory" in str(error) else error)
"""


def limited(tier: str, limit: int, folder: Path) -> str:
    """What a process says that trains with ``limit`` more bytes than it has when it is ready; 0 for any number."""
    environment = {
        **os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000", "GRAPHOPT_DISK": str(folder), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LIMITED, tier, str(limit)], cwd=ROOT,
        env=environment, stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    return done.stdout.strip()


@pytest.mark.sweep
def test_a_process_whose_activations_exceed_its_memory_trains_with_the_disk(tmp_path: Path) -> None:
    room = 80_000_000
    free, on_disk = limited("keep", 0, tmp_path), limited("disk", room, tmp_path)
    assert on_disk == free != ""
    assert limited("keep", room, tmp_path) == "no memory"
    assert list(tmp_path.iterdir()) == []
