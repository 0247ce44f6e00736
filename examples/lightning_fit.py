"""Trains a convolutional network on images of digits by Lightning, without and with the callback of graphopt.

Both end with the same parameters, to the last bit.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from rich.console import Console
from sklearn.datasets import load_digits
from torch import nn

from graphopt.integrations.lightning import Optimize
from graphopt.passes import Recompute

Batch = list[torch.Tensor]


class Digits(lightning.LightningModule):
    """Which digit is on an image of 8 × 8 pixels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before in (1, width, width):
            layers += [nn.Conv2d(before, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        self.net = nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.1), nn.Linear(64 * width, 10))

    def training_step(self, batch: Batch, number: int) -> torch.Tensor:
        """The loss of one batch."""
        images, digits = batch
        loss = F.cross_entropy(self.net(images), digits)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Batch, number: int) -> None:
        """The share of digits that are recognized."""
        images, digits = batch
        self.log("recognized", (self.net(images).argmax(1) == digits).float().mean())

    def configure_optimizers(self) -> Any:
        """Adam, with a rate that falls."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


def loaders(batch: int) -> tuple[Any, Any]:
    """Batches of 1,500 images to train on, and of the others."""
    pixels, digits = load_digits(return_X_y=True)
    data = torch.utils.data.TensorDataset(
        torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(digits)
    )
    training = torch.utils.data.Subset(data, range(1500))
    held_out = torch.utils.data.Subset(data, range(1500, len(data)))
    return torch.utils.data.DataLoader(training, batch, shuffle=True), torch.utils.data.DataLoader(held_out, 297)


def fit(options: argparse.Namespace, callbacks: list[Any]) -> tuple[Digits, dict[str, torch.Tensor]]:
    """Train; returns the model and what was logged last."""
    lightning.seed_everything(options.seed, verbose=False)
    trainer = lightning.Trainer(
        max_epochs=options.epochs, accelerator="cpu", devices=1, gradient_clip_val=1.0, callbacks=callbacks,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    model = Digits(options.width)
    trainer.fit(model, *loaders(options.batch))
    return model, dict(trainer.callback_metrics)


def main(argv: Sequence[str] | None = None) -> int:
    """Train in two ways and compare; returns 1 where results differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=2, help="passes over the images")
    parser.add_argument("--batch", type=int, default=100, help="images in a batch")
    parser.add_argument("--width", type=int, default=16, help="channels")
    parser.add_argument("--seed", type=int, default=0, help="of parameters, order and dropout")
    options = parser.parse_args(argv)
    warnings.filterwarnings("ignore", module="lightning|torch.utils.data")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    console = Console()
    callback = Optimize([Recompute("auto")])
    plain, expected = fit(options, [])
    optimized, found = fit(options, [callback])
    state = plain.state_dict()
    same = all(torch.equal(value, state[name]) for name, value in optimized.state_dict().items())
    for name, metrics in (("plain", expected), ("optimized", found)):
        console.print(f"{name:9}  loss {metrics['loss']:.6f}, recognized {metrics['recognized']:.1%}")
    console.print(*map(str, callback.optimized["net"].records), sep="\n", soft_wrap=True)
    console.print("equal to the last bit" if same else "DIFFERENT")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
