"""A GPT with a large vocabulary: bytes and time of a step with ``ChunkLoss``, by itself and within budgets.

Bytes are what a step adds to parameters, optimizer state and the batch, predicted and measured. Times are medians of
paired rounds, as a ratio to the step without passes.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from harness import example_models, make_table, parser, show

import graphopt
from graphopt.passes import ChunkLoss, FitMemory

models = example_models()


_LESS = 34_000_000
"""How many bytes lower the lowest budget can be with more chunks: gradients of logits take less."""


def ways(budgets: Sequence[int]) -> dict[str, list[Any]]:
    """The passes that are compared, by name; budgets in bytes, of everything."""
    found: dict[str, list[Any]] = {"no passes": [], "ChunkLoss()": [ChunkLoss()], "ChunkLoss(64)": [ChunkLoss(64)]}
    for budget in budgets:
        found[f"ChunkLoss(), FitMemory within {budget / 1e6:.0f} MB"] = [ChunkLoss(), FitMemory(budget)]
    if budgets:
        least = min(budgets) - _LESS
        found[f"ChunkLoss(64), FitMemory within {least / 1e6:.0f} MB"] = [ChunkLoss(64), FitMemory(least)]
    return found


def make(config: Any, passes: list[Any], batch: torch.Tensor) -> graphopt.TrainStep:
    """A step that has run twice, so that its state is there."""
    torch.manual_seed(0)
    model = models.GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    step = graphopt.optimize_step(model, optimizer, passes, loss=models.next_token_loss)
    step(*batch)
    step(*batch)
    return step


def made(config: Any, batch: torch.Tensor, above: Sequence[int]) -> dict[str, graphopt.TrainStep]:
    """A step of every way; ``above`` has budgets, in bytes beyond persistent memory."""
    plain = make(config, [], batch)
    resident = plain.program.memory().resident_bytes
    steps = {"no passes": plain}
    for name, passes in ways([resident + bytes_ for bytes_ in above]).items():
        if passes:
            steps[name] = make(config, passes, batch)
    return steps


def compared(steps: Mapping[str, graphopt.TrainStep], batch: Sequence[Any], rounds: int) -> list[dict[str, Any]]:
    """Bytes and times of every way.

    Args:
        steps: by the name of the way, the one without passes among them.
        batch: arguments of a step.
        rounds: how often each is timed.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            started = time.perf_counter()
            step(*batch)
            seconds[name].append(time.perf_counter() - started)
    found = []
    for name, step in steps.items():
        pairs = zip(seconds[name], seconds["no passes"], strict=True)
        found.append(
            {
                "passes": name,
                "predicted_bytes": step.program.memory().allocated_peak_bytes,
                "measured_bytes": graphopt.measure_peak(lambda step=step: step(*batch)).allocated_peak_bytes,
                "ratio": statistics.median(one / other for one, other in pairs),
            }
        )
    return found


def shown(title: str, results: Sequence[Mapping[str, Any]], *, as_json: bool) -> None:
    """Print results of ``compared`` as a table, or as JSON."""
    rows = [
        (
            row["passes"],
            f"{row['predicted_bytes'] / 1e6:.1f} MB",
            f"{row['measured_bytes'] / 1e6:.1f} MB",
            f"×{row['ratio']:.2f}",
        )
        for row in results
    ]
    show({"results": results}, [make_table(title, ("", "predicted", "measured", "time"), rows)], as_json=as_json)


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=9, help="rounds that are timed")
    given = options.parse_args(argv)
    torch.set_num_threads(given.threads)
    quick = given.quick
    config = models.GPTConfig(vocab=2000 if quick else 32_000, context=64 if quick else 256, d=64 if quick else 256,
        layers=1 if quick else 6, heads=4)  # fmt: skip
    batch = torch.randint(config.vocab, (2, 4 if quick else 8, config.context))
    above = [] if quick else [95_000_000, 86_000_000]
    results = compared(made(config, batch, above), batch, 1 if quick else given.rounds)
    title = f"A step of a GPT with {config.vocab:,} words, beyond persistent memory"
    shown(title, results, as_json=given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
