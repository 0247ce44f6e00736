"""MixedPrecision against torch.autocast and GradScaler: the same losses over 200 steps, and bytes and time of a step.

The first table trains small models from the same seeds in eager PyTorch under autocast (in float16 with GradScaler) and
as a whole step with MixedPrecision, and counts the steps whose losses are equal to the last bit. The second one runs
the GPT of recompute.py: peaks are exact, above persistent memory; times are ratios to eager float32, paired by round.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from frontier_models import WORKLOADS, Batch, WithLoss, Workload
from harness import make_table, parser, show
from recompute import Setting, Variant, measure, models, table_of
from torch import nn

import graphopt
from graphopt.passes import MixedPrecision

MODELS = ("gpt", "bert", "resnet50", "vit")
DTYPES = (torch.bfloat16, torch.float16)
RATE = 1e-3


def build(workload: Workload, *, dropout: bool) -> tuple[WithLoss, Batch, torch.optim.Optimizer]:
    """A small model with its loss, a batch, and AdamW (fused)."""
    torch.manual_seed(0)
    model, batch = workload.make(True)
    whole = WithLoss(model.train(), workload.loss)
    for module in whole.modules():
        if isinstance(module, nn.Dropout) and not dropout:
            module.p = 0.0
    return whole, batch, torch.optim.AdamW(whole.parameters(), lr=RATE, fused=True)


def drawn(batch: Batch, number: int) -> Batch:
    """Another batch of the same shapes for every step: numbers from the same range, or normal ones."""
    generator = torch.Generator().manual_seed(number)
    return tuple(
        torch.randn(part.shape, generator=generator)
        if part.is_floating_point()
        else torch.randint(int(part.max()) + 1, part.shape, generator=generator)
        for part in batch
    )


def eager_losses(workload: Workload, dtype: torch.dtype, steps: int, *, dropout: bool) -> list[torch.Tensor]:
    """Losses of the loop that everyone writes."""
    model, batch, optimizer = build(workload, dropout=dropout)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)
    torch.manual_seed(1)
    losses = []
    for number in range(steps):
        with torch.autocast("cpu", dtype):
            loss = model(*drawn(batch, number))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def our_losses(workload: Workload, dtype: torch.dtype, steps: int, *, dropout: bool) -> list[torch.Tensor]:
    """Losses of the rewritten step."""
    model, batch, optimizer = build(workload, dropout=dropout)
    passes = [MixedPrecision(str(dtype).removeprefix("torch."))]
    step = graphopt.optimize_step(model, optimizer, passes)
    torch.manual_seed(1)
    return [step(*drawn(batch, number)) for number in range(steps)]


def agreement(name: str, dtype: torch.dtype, steps: int, *, dropout: bool) -> dict[str, Any]:
    """How many losses are equal to the last bit, and how far the others are off."""
    theirs, ours = (losses(WORKLOADS[name], dtype, steps, dropout=dropout) for losses in (eager_losses, our_losses))
    off = [((a - b).abs() / b.abs()).item() for a, b in zip(ours, theirs, strict=True)]
    return {
        "model": f"{name}, dropout" if dropout else name,
        "dtype": str(dtype).removeprefix("torch."),
        "steps": steps,
        "equal": sum(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)),
        "largest_relative_difference": max(off),
        "last_loss": ours[-1].item(),
        "last_loss_eager": theirs[-1].item(),
    }


def variants(setting: Setting) -> list[Variant]:
    """One whole step of the GPT in float32, under autocast, and rewritten."""
    x, y = setting.draw()

    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def eager(name: str, dtype: torch.dtype | None) -> Variant:
        model = setting.build()
        optimizer = optimizer_of(model)

        def run() -> torch.Tensor:
            with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
                loss = models.next_token_loss(model, x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return Variant(name, run)

    def rewritten(name: str, passes: Sequence[graphopt.Pass]) -> Variant:
        model = setting.build()
        step = graphopt.optimize_step(model, optimizer_of(model), passes, loss=models.next_token_loss)
        predict: Callable[[], int] = lambda: step.program.memory().allocated_peak_bytes  # noqa: E731
        return Variant(name, lambda: step(x, y), predict)

    return [
        eager("eager, float32", None),
        eager("eager, autocast bfloat16", torch.bfloat16),
        rewritten("MixedPrecision()", [MixedPrecision()]),
        rewritten("MixedPrecision(level='O2')", [MixedPrecision(level="O2")]),
        rewritten("MixedPrecision('float16')", [MixedPrecision("float16")]),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, help="rounds of each variant (default: 15; 2 with --quick)")
    options.add_argument("--steps", type=int, help="training steps of each model (default: 200; 3 with --quick)")
    given = options.parse_args(argv)
    torch.set_num_threads(given.threads)
    steps = given.steps or (3 if given.quick else 200)
    found = [agreement(name, dtype, steps, dropout=False) for name in MODELS for dtype in DTYPES]
    found.append(agreement("gpt-dropout", torch.bfloat16, steps, dropout=True))
    full = models.GPTConfig(vocab=2048, context=256, d=256, layers=6, heads=4, dropout=0.0)
    small = models.GPTConfig(vocab=64, context=32, d=32, layers=2, heads=2, dropout=0.0)
    setting = Setting(small, 2, given.rounds or 2) if given.quick else Setting(full, 8, given.rounds or 15)
    timed = measure(variants(setting), setting.rounds)
    headings = ("small model", "dtype", "losses equal", "largest difference", "last loss", "eager's")
    rows = [
        (
            one["model"], one["dtype"], f"{one['equal']} of {one['steps']}",
            f"{one['largest_relative_difference']:.1e}", f"{one['last_loss']:.6f}", f"{one['last_loss_eager']:.6f}",
        )
        for one in found
    ]  # fmt: skip
    tables = [make_table("Against torch.autocast and GradScaler", headings, rows), table_of("GPT, whole step", timed)]
    show({"losses": found, "step": timed}, tables, as_json=given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
