"""Recomputation at every block of a GPT: peak memory and step time of eager PyTorch, checkpoint() and graphopt.

Blocks are recomputed by torch.utils.checkpoint, and by Recompute("blocks.*") drop-in and in a whole step.
Peaks come from the allocator's events and are exact; times are ratios to eager PyTorch, paired round by round. The
first table runs forward and backward with gradients cleared in between; the second one the whole step with AdamW.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from harness import Action, CheckpointedBlock, example_models, make_table, paired_ratio, paired_seconds, parser, show
from torch import nn

import graphopt
from graphopt.passes import Recompute

models = example_models()

CHECKPOINTS = "blocks.*"


@dataclass(frozen=True)
class Setting:
    """The model, the batch and how often each variant runs."""

    config: Any
    batch: int
    rounds: int

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        model: nn.Module = models.GPT(self.config)
        return model

    def draw(self) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        shape = (2, self.batch, self.config.context)
        tokens, targets = torch.randint(self.config.vocab, shape, generator=generator)
        return tokens, targets


@dataclass(frozen=True)
class Variant:
    """One way to do the same work; ``predict`` gives the peak that the memory model predicts, where there is one."""

    name: str
    run: Action
    predict: Callable[[], int] | None = None


def checkpointed(model: nn.Module) -> nn.Module:
    """The model with every block under ``torch.utils.checkpoint``."""
    model.blocks = nn.ModuleList(CheckpointedBlock(block) for block in model.get_submodule("blocks"))
    return model


def forward_and_backward(setting: Setting) -> list[Variant]:
    """Loss and gradients; the gradients are cleared at the end, as in a step whose update takes no time."""
    x, y = setting.draw()

    def variant(name: str, model: nn.Module) -> Variant:
        def run() -> torch.Tensor:
            loss = models.next_token_loss(model, x, y)
            loss.backward()
            model.zero_grad()
            return loss.detach()

        return Variant(name, run)

    return [
        variant("eager PyTorch", setting.build()),
        variant("checkpoint() per block", checkpointed(setting.build())),
        variant("optimize", graphopt.optimize(setting.build())),
        variant("optimize + Recompute", graphopt.optimize(setting.build(), [Recompute(CHECKPOINTS)])),
    ]


def whole_step(setting: Setting) -> list[Variant]:
    """Loss, gradients and the update by AdamW, all with the fused implementation."""
    x, y = setting.draw()

    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def eager(name: str, model: nn.Module) -> Variant:
        optimizer = optimizer_of(model)

        def run() -> torch.Tensor:
            loss = models.next_token_loss(model, x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return Variant(name, run)

    def captured(name: str, passes: Sequence[graphopt.Pass]) -> Variant:
        model = setting.build()
        step = graphopt.optimize_step(model, optimizer_of(model), passes, loss=models.next_token_loss)
        return Variant(name, lambda: step(x, y), lambda: step.program.memory().allocated_peak_bytes)

    return [
        eager("eager PyTorch", setting.build()),
        eager("checkpoint() per block", checkpointed(setting.build())),
        captured("optimize_step", []),
        captured("optimize_step + Recompute", [Recompute(CHECKPOINTS)]),
    ]


def measure(variants: Sequence[Variant], rounds: int) -> list[dict[str, Any]]:
    """Time all variants in turn, then measure the peak of one more run of each; the first one is the reference."""
    seconds = paired_seconds([variant.run for variant in variants], rounds)
    results = []
    for variant, times in zip(variants, seconds, strict=True):
        peak = graphopt.measure_peak(variant.run)
        results.append(
            {
                "variant": variant.name,
                "peak_bytes": peak.allocated_peak_bytes,
                "predicted_peak_bytes": variant.predict() if variant.predict else None,
                "median_seconds": median(times),
                "time_ratio": paired_ratio(times, seconds[0]),
                "loss": peak.result.item(),
            }
        )
    return results


def table_of(title: str, results: Sequence[dict[str, Any]]) -> Any:
    rows = [
        (
            row["variant"],
            f"{row['peak_bytes']:,}",
            "–" if row["predicted_peak_bytes"] is None else f"{row['predicted_peak_bytes']:,}",
            f"{row['median_seconds'] * 1e3:.0f} ms",
            f"×{row['time_ratio']:.3f}",
        )
        for row in results
    ]
    return make_table(title, ("", "peak, bytes", "predicted", "median", "paired"), rows)


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, help="rounds of each variant (default: 15; 2 with --quick)")
    given = options.parse_args(argv)
    torch.set_num_threads(given.threads)
    full = models.GPTConfig(vocab=2048, context=256, d=256, layers=6, heads=4, dropout=0.0)
    small = models.GPTConfig(vocab=64, context=32, d=32, layers=2, heads=2, dropout=0.0)
    setting = Setting(small, 2, given.rounds or 2) if given.quick else Setting(full, 8, given.rounds or 15)
    config = setting.config
    described = (
        f"GPT d={config.d}, {config.layers} layers, {config.heads} heads, vocab {config.vocab}, "
        f"batch {setting.batch} × {config.context}, fp32, {setting.rounds} rounds"
    )
    groups = {}
    for name, make in (("forward and backward", forward_and_backward), ("whole step, AdamW", whole_step)):
        groups[name] = measure(make(setting), setting.rounds)
    tables = [table_of(f"{described}: {name}", results) for name, results in groups.items()]
    show({"setting": described, "results": groups}, tables, as_json=given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
