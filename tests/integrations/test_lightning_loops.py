"""Lightning: models with optimized submodules, by its callback or by hand, train as without graphopt."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch import nn

import graphopt
from graphopt import ArgumentError, GraphoptError
from graphopt.integrations.lightning import Optimize
from graphopt.passes import Recompute

pytestmark = pytest.mark.filterwarnings("ignore")  # of the library, about itself


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 4))

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[torch.Tensor], number: int) -> None:
        self.log("validation", self.net(batch[0]).square().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def loader() -> Any:
    data = torch.randn(20, 8, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), batch_size=4, shuffle=True)


def fit(folder: Path, callbacks: list[Any], model: Net | None = None, resume: str | None = None, **options: Any) -> Any:
    lightning.seed_everything(0, verbose=False)
    model = model or Net()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = lightning.Trainer(devices=1, default_root_dir=folder, callbacks=callbacks, **{**quiet, **options})
    trainer.fit(model, loader(), loader(), ckpt_path=resume)
    return {**model.state_dict(), **trainer.callback_metrics}, trainer, model


def assert_same(ours: dict[str, torch.Tensor], plain: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == plain.keys()
    assert [name for name in ours if not torch.equal(ours[name], plain[name])] == []


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
        pytest.param({"precision": "bf16-mixed"}, marks=pytest.mark.sweep),
    ],
)
def test_a_callback_trains_as_without_it_also_from_a_checkpoint(options: dict[str, Any], tmp_path: Path) -> None:
    plain, _, _ = fit(tmp_path, [], max_epochs=2, **options)
    callback = Optimize([Recompute("auto")])
    ours, trainer, model = fit(tmp_path, [callback], max_epochs=2, **options)
    assert_same(ours, plain)
    assert [record.name for record in callback.optimized["net"].records] == ["recompute"]
    assert type(model.net) is nn.Sequential
    middle = tmp_path / "middle.ckpt"
    _, trainer, _ = fit(tmp_path, [], max_epochs=1, **options)
    trainer.save_checkpoint(middle)
    expected, _, _ = fit(tmp_path, [], resume=str(middle), max_epochs=2, **options)
    resumed, _, _ = fit(tmp_path, [Optimize([Recompute("auto")])], resume=str(middle), max_epochs=2, **options)
    assert_same(resumed, expected)


@pytest.mark.sweep
def test_fifty_steps(tmp_path: Path) -> None:
    plain, _, _ = fit(tmp_path, [], max_steps=50)
    ours, trainer, _ = fit(tmp_path, [Optimize([Recompute("auto")])], max_steps=50)
    assert trainer.global_step == 50
    assert_same(ours, plain)


def test_a_module_of_fabric_is_optimized_by_hand() -> None:
    def train(passes: list[Any] | None) -> list[torch.Tensor]:
        lightning.seed_everything(0, verbose=False)
        fabric = lightning.Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
        model: nn.Module = Net().net
        if passes is not None:
            model = graphopt.optimize(model, passes)
        wrapped, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
        for (x,) in fabric.setup_dataloaders(loader()):
            fabric.backward(wrapped(x).square().mean())
            fabric.clip_gradients(wrapped, optimizer, max_norm=0.1)
            optimizer.step()
            optimizer.zero_grad()
        assert passes is None or model.records[0].name == "recompute"
        return [parameter.detach() for parameter in model.parameters()]

    assert all(torch.equal(*pair) for pair in zip(train([Recompute("auto")]), train(None), strict=True))


class Two(Net):
    """Two submodules with parameters, of which training calls one."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(2, 2)


def test_what_is_to_be_optimized_has_to_be_clear(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(GraphoptError, match=r"have parameters: 'net', 'other'; name in modules="):
        fit(tmp_path, [Optimize()], Two(), max_steps=1)
    with pytest.raises(ArgumentError, match="no submodule 'nett'; did you mean 'net'"):
        fit(tmp_path, [Optimize(modules="nett")], Two(), max_steps=1)
    with caplog.at_level(logging.WARNING, "graphopt"):
        fit(tmp_path, [Optimize(modules="other")], Two(), max_steps=1)
    assert "'other' was never called in training: no pass has acted on it" in caplog.text
