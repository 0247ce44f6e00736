"""Loops that others own, on several ranks: plainly, and with optimized models; prints what differs, as JSON.

Started by ``torch.distributed.run``, with the name of the loop.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import graphopt

PASSES = "fit-memory{budget=98%}"

Trained = tuple[list[float], list[torch.Tensor]]
"""The losses of a run, and the parameters behind it."""


def _whole(model: nn.Module) -> list[torch.Tensor]:
    values: list[Any] = list(model.parameters())
    return [value.full_tensor() if hasattr(value, "full_tensor") else value.detach().clone() for value in values]


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


def lightning(strategy: Callable[[], Any], optimized: bool) -> Trained:
    """Lightning's Trainer, whose module shards and optimizes in ``configure_model``."""
    from lightning import pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.model = nn.Sequential(_Block(), _Block())
            self.losses: list[float] = []

        def configure_model(self) -> None:
            mesh: Any = self.device_mesh
            for block in self.model if mesh is not None else ():
                plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
                parallelize_module(block, mesh["tensor_parallel"], plan)
                fully_shard(block, mesh=mesh["data_parallel"])
            if mesh is not None:
                fully_shard(self.model, mesh=mesh["data_parallel"])
            if optimized:
                self.model = graphopt.optimize(self.model, PASSES)

        def training_step(self, batch: Any, _index: int) -> torch.Tensor:
            loss = self.model(batch[0]).square().mean()
            self.losses.append(float(loss.detach()))
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.model.parameters(), lr=0.01, foreach=False)

    module = Module()
    rows = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=strategy(), max_epochs=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=16))
    return module.losses, _whole(module.model)


def trainer(optimized: bool) -> Trained:
    """The Trainer of transformers, which puts the model into DDP."""
    import transformers

    from tests.support.loops import gpt

    model = gpt()
    if optimized:
        model = graphopt.optimize(model, PASSES)
    tokens = torch.randint(1, 64, (16, 12), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder, use_cpu=True, per_device_train_batch_size=4, num_train_epochs=2, report_to=[],
            logging_steps=1, save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        loop = transformers.Trainer(model=model, args=arguments, train_dataset=rows)  # type: ignore[arg-type]
        loop.train()
    return [entry["loss"] for entry in loop.state.log_history if "loss" in entry], _whole(model)


def accelerate(optimized: bool) -> Trained:
    """A loop with Accelerate's FSDP2, which it does not choose on a CPU by itself."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType

    from tests.support.fully_sharded import Net, loss_of

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Sequential"]
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=2)
    accelerator.state._shared_state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
    torch.manual_seed(0)
    model: Any = Net(6, False, 0.1)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    if optimized:
        model = graphopt.optimize(model, "fit-memory{budget=90%}")
    generator = torch.Generator().manual_seed(accelerator.process_index)
    losses = []
    for number in range(4):
        x, y = torch.randint(0, 11, (2, 4, 7), generator=generator)
        torch.manual_seed(number + accelerator.process_index)
        with accelerator.accumulate(model):
            loss = loss_of(model(x), y)
            accelerator.backward(loss)
            losses.append(float(loss.detach()))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return losses, _whole(model)


def _model_parallel(shards: int, parts: int) -> Any:
    from lightning.pytorch.strategies import ModelParallelStrategy

    return ModelParallelStrategy(data_parallel_size=shards, tensor_parallel_size=parts)


LOOPS: dict[str, Callable[[bool], Trained]] = {
    "lightning-tensor": lambda optimized: lightning(lambda: _model_parallel(1, 2), optimized),
    "lightning-shards": lambda optimized: lightning(lambda: _model_parallel(2, 1), optimized),
    "lightning-ddp": lambda optimized: lightning(lambda: "ddp", optimized),
    "trainer": trainer,
    "accelerate": accelerate,
}


def main() -> None:
    """Train both ways, and print whether anything differs on this rank."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    logging.getLogger("graphopt").setLevel(logging.ERROR)
    (losses, parameters), (others, theirs) = (LOOPS[sys.argv[1]](optimized) for optimized in (False, True))
    same = [torch.equal(one, other) for one, other in zip(parameters, theirs, strict=True)]
    print(json.dumps({"losses": losses == others and len(losses) > 1, "parameters": all(same)}), flush=True)
    os._exit(0)  # Lightning and Trainer leave threads, and what they end with is not looked at


if __name__ == "__main__":
    main()
