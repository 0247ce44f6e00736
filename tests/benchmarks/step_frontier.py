"""Peak memory against the time of a whole training step: optimize_step with FitMemory at a row of budgets.

Forward, backward and the update by AdamW (the fused implementation everywhere), on the GPT of recompute.py, in one
run with eager PyTorch and torch.utils.checkpoint. Peaks are exact, in bytes above persistent memory before a step:
parameters, the state of the optimizer and the batch. Times are ratios to eager PyTorch, paired round by round.
`memory_frontier.py` compares more models and more of PyTorch's own ways, for forward and backward.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from harness import make_table, parser, show
from recompute import Setting, Variant, measure, models, table_of, whole_step

import graphopt
from graphopt.passes import FitMemory, Microbatch

BUDGETS = (214, 176, 151, 128, 96, 77, 64)
"""Megabytes above persistent memory."""

QUICK_SHARES = (0.8, 0.6)
"""Of the plain peak, for --quick."""


def resident_bytes(setting: Setting) -> tuple[int, int]:
    """What a step holds before it begins, and its peak as it is, both in bytes."""
    model = setting.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    program = graphopt.capture(model, setting.draw(), loss=models.next_token_loss, optimizer=optimizer)
    memory = program.memory()
    return memory.resident_bytes, memory.allocated_peak_bytes


def fitted(
    setting: Setting, budgets: Sequence[int], slices: Sequence[int]
) -> tuple[list[Variant], list[graphopt.TrainStep]]:
    """Whole steps for every budget, in bytes above persistent memory: of the whole batch, and of so many slices."""
    resident, _ = resident_bytes(setting)
    x, y = setting.draw()
    steps = []

    def variant(budget: int, count: int) -> Variant:
        model = setting.build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        passes = [*([Microbatch(count)] if count > 1 else []), FitMemory(resident + budget)]
        step = graphopt.optimize_step(model, optimizer, passes, loss=models.next_token_loss)
        steps.append(step)
        name = f"{f'Microbatch({count}), ' if count > 1 else ''}FitMemory, {budget / 1e6:.4g} MB"
        return Variant(name, lambda: step(x, y), lambda: step.program.memory().allocated_peak_bytes)

    return [variant(budget, count) for budget in budgets for count in (1, *slices)], steps


def said(step: graphopt.TrainStep) -> list[str]:
    """What the record of FitMemory says of the peak, of recomputation, and of how near that is to the best plan."""
    wanted = ("peak ", "what is recomputed takes ", "no plan takes less ")
    return [line for record in step.records for line in record.changed.lines if line.startswith(wanted)]


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, help="rounds of each variant (default: 15; 2 with --quick)")
    options.add_argument(
        "--budgets",
        nargs="+",
        type=float,
        metavar="MB",
        help="megabytes above persistent memory, in place of the usual",
    )
    options.add_argument(
        "--slices", nargs="*", type=int, default=[], metavar="N", help="budgets are also met with the batch in N slices"
    )
    given = options.parse_args(argv)
    torch.set_num_threads(given.threads)
    full = models.GPTConfig(vocab=2048, context=256, d=256, layers=6, heads=4, dropout=0.0)
    small = models.GPTConfig(vocab=64, context=32, d=32, layers=2, heads=2, dropout=0.0)
    setting = Setting(small, 2, given.rounds or 2) if given.quick else Setting(full, 8, given.rounds or 15)
    budgets = [int(megabytes * 10**6) for megabytes in given.budgets or BUDGETS]
    if given.quick and not given.budgets:
        _, plain = resident_bytes(setting)
        budgets = [int(plain * share) for share in QUICK_SHARES]
    variants, steps = fitted(setting, budgets, given.slices)
    results = measure([*whole_step(setting), *variants], setting.rounds)
    records = {variant.name: said(step) for variant, step in zip(variants, steps, strict=True)}
    config = setting.config
    described = (
        f"GPT d={config.d}, {config.layers} layers, {config.heads} heads, vocab {config.vocab}, batch {setting.batch} "
        f"× {config.context}, fp32, AdamW, {setting.rounds} rounds"
    )
    rows = [(name, line) for name, lines in records.items() for line in lines]
    tables = [table_of(described, results), make_table("What the records say", ("", ""), rows)]
    show({"setting": described, "results": results, "records": records}, tables, as_json=given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
