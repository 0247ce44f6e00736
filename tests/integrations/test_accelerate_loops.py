"""Accelerate: drop-in models that it prepares, and whole steps inside of its accumulation, as without graphopt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from torch import nn

import graphopt
from graphopt import ArgumentError, GraphoptError
from graphopt.integrations.accelerate import prepare_step
from graphopt.passes import Recompute

pytestmark = pytest.mark.filterwarnings("ignore")  # of the library, about itself

PASSES = [Recompute("auto")]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Accelerate keeps its settings in the process."""
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 4))


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    value: torch.Tensor = model(x).square().mean()
    return value


def overflowing(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Gradients that are infinite under the first loss scales."""
    return loss(model, x) * 1e35


def train(
    way: str, folder: Path, *, precision: str = "no", scaled: bool = False, loss: Any = loss, epochs: int = 1
) -> list[Any]:
    """Some epochs, the last one again from a saved state: losses, parameters, and the learning rate."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=4, cpu=True, mixed_precision=precision)
    if scaled:
        accelerator.scaler = torch.amp.GradScaler("cpu", growth_interval=2)
    model = net()
    if way == "drop-in":
        model = graphopt.optimize(model, PASSES)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    data = torch.randn(18, 8, generator=torch.Generator().manual_seed(0))
    loader = torch.utils.data.DataLoader(data, batch_size=3, shuffle=True)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    if way == "prepared before":
        model = graphopt.optimize(model, PASSES)
    step = prepare_step(accelerator, model, optimizer, PASSES, loss=loss) if way == "whole step" else None
    losses = []
    torch.manual_seed(2)

    def epoch() -> None:
        for x in loader:  # six batches: the last window has two
            with accelerator.accumulate(model):
                if step is not None:
                    value = step(x)
                else:
                    value = loss(model, x)
                    accelerator.backward(value)
                    optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(value.item())

    for _ in range(epochs):
        epoch()
    accelerator.save_state(str(folder))
    epoch()
    parameters = [parameter.detach().clone() for parameter in model.parameters()]
    accelerator.load_state(str(folder))
    epoch()
    if way in ("drop-in", "prepared before"):
        assert [record.name for record in model.records] == ["recompute"]
    return [losses, [*parameters, *model.parameters()], schedule.get_last_lr(), torch.is_autocast_enabled("cpu")]


WAYS = ("drop-in", "whole step")


@pytest.mark.sweep(but=("prepared before-options2",))
@pytest.mark.parametrize(
    ("way", "options"),
    [
        *((way, {"precision": "bf16"}) for way in (*WAYS, "prepared before")),
        *(pytest.param(way, {}, marks=pytest.mark.sweep) for way in (*WAYS, "prepared before")),
        *(pytest.param(way, {"epochs": 25}, marks=pytest.mark.sweep) for way in WAYS),  # of two updates each
        ("whole step", {"scaled": True, "loss": overflowing}),
        pytest.param("whole step", {"scaled": True}, marks=pytest.mark.sweep),
    ],
)
def test_a_loop_trains_as_without_graphopt(way: str, options: dict[str, Any], tmp_path: Path) -> None:
    plain, ours = train("plain", tmp_path / "a", **options), train(way, tmp_path / "b", **options)
    assert ours[0] == plain[0]
    assert all(torch.equal(one, other) for one, other in zip(ours[1], plain[1], strict=True))
    assert ours[2:] == plain[2:] == [plain[2], False]


def test_metrics_beside_the_loss_are_returned_undivided() -> None:
    def with_metric(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = model(x)
        return {"largest": y.max(), "loss": y.square().mean()}

    accelerator = accelerate.Accelerator(gradient_accumulation_steps=2, cpu=True)
    model = net().eval()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), fused=True))
    step = prepare_step(accelerator, model, optimizer, loss=with_metric)
    x = torch.ones(3, 8)
    expected = with_metric(model, x)
    with accelerator.accumulate(model):
        found = step(x)
    assert {name: value.item() for name, value in found.items()} == {n: v.item() for n, v in expected.items()}


def test_what_a_step_cannot_be_made_of() -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    model = net()
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ArgumentError, match=r"accelerator\.prepare"):
        prepare_step(accelerator, model, optimizer, loss=loss)
    accelerator.state.distributed_type = accelerate.DistributedType.DEEPSPEED
    with pytest.raises(GraphoptError, match="one process, and this is DEEPSPEED"):
        prepare_step(accelerator, model, optimizer, loss=loss)
