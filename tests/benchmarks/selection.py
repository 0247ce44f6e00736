"""What sparse exchange costs a rank before and after the network: selecting, and the passes around it.

``select`` against ``torch.topk`` of the magnitudes (not sorted), and against what is usual: a threshold from a strided
sample that a little more than k entries exceed, and ``torch.topk`` among these (which need not give all k). Ratios are
to ``torch.topk`` in the same round. The other ops stand beside a multiplication in place of a tensor of the same size,
which reads and writes it once::

    python tests/benchmarks/selection.py            # 1 and 2 threads
    python tests/benchmarks/selection.py --threads 1
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from harness import Action, make_table, paired_ratio, paired_seconds, parser, show
from rich.table import Table

from graphopt.ir.ops.communication.residual import accumulate_, clear_at_
from graphopt.ir.ops.communication.selection import select
from graphopt.ir.ops.communication.sparse import pack, sum_sparse

RESNET_50 = 25_557_032
SIZES = (36_864, 2_359_296, RESNET_50)
"""A convolution of 64 channels to 64, one of 512 to 512, and all of ResNet-50."""

DENSITIES = (0.001, 0.004, 0.015625, 0.0625, 0.25)
RANKS = 4
SAMPLE = 1 << 18


def residual(size: int) -> torch.Tensor:
    """Numbers with the heavy tails of gradients."""
    return torch.randn(size) * torch.rand(size)


def by_sample(v: torch.Tensor, k: int) -> torch.Tensor:
    """The indices of about the k largest magnitudes."""
    magnitudes = v.abs()
    sample = magnitudes[:: max(1, v.numel() // SAMPLE)]
    expected = math.ceil(1.1 * k * sample.numel() / v.numel())
    threshold = torch.topk(sample, min(expected, sample.numel()), sorted=False).values.amin()
    candidates = (magnitudes >= threshold).nonzero().view(-1)
    chosen = torch.topk(magnitudes[candidates], min(k, candidates.numel()), sorted=False).indices
    return candidates[chosen]


def selecting(size: int, density: float, rounds: int) -> dict[str, Any]:
    """Median seconds of each way, and the median ratios to ``torch.topk``."""
    v, k = residual(size), max(1, int(size * density))
    actions: list[Action] = [
        lambda: torch.topk(v.abs(), k, sorted=False),
        lambda: by_sample(v, k),
        lambda: select(v, k),
    ]
    topk, sample, ours = paired_seconds(actions, rounds, warm_up=1)
    return {
        "size": size,
        "k": k,
        "topk": statistics.median(topk),
        "sample": statistics.median(sample),
        "select": statistics.median(ours),
        "sample_ratio": paired_ratio(sample, topk),
        "ratio": paired_ratio(ours, topk),
    }


def passes(size: int, density: float, rounds: int) -> dict[str, Any]:
    """Seconds that the other ops take for a tensor of ``size`` elements, medians."""
    v, u, gradient = residual(size), residual(size), residual(size)
    low, k = gradient.bfloat16(), int(size * density)
    scale, keep = torch.ones(()), torch.ones(())
    indices, values = select(v, k)
    packed = pack([indices], [values], torch.float32)
    gathered = torch.cat([packed] * RANKS)
    wire = torch.float32
    actions: dict[str, Action] = {
        "multiply in place": lambda: gradient.mul_(1.0),
        "accumulate_, feedback": lambda: accumulate_(gradient, None, v, 0.9, False),
        "accumulate_, momentum": lambda: accumulate_(gradient, u, v, 0.9, False),
        "accumulate_, nesterov": lambda: accumulate_(gradient, u, v, 0.9, True),
        "accumulate_, all options": lambda: accumulate_(gradient, u, v, 0.9, True, scale, keep, gradient, 1e-4),
        "accumulate_, bfloat16 gradient": lambda: accumulate_(low, u, v, 0.9, True),
        "clear_at_": lambda: clear_at_(u, indices),
        "pack": lambda: pack([indices], [values], wire),
        f"sum_sparse, {RANKS} ranks": lambda: sum_sparse(gathered, RANKS, [k], [size], wire, wire, 1 / RANKS),
    }
    measured = paired_seconds(list(actions.values()), rounds, warm_up=1)
    return {name: statistics.median(seconds) for name, seconds in zip(actions, measured, strict=True)}


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f}"


def measure(threads: int, sizes: Sequence[int], rounds: int) -> dict[str, Any]:
    """Everything with so many threads."""
    torch.set_num_threads(threads)
    return {
        "threads": threads,
        "selecting": [selecting(size, density, rounds) for size in sizes for density in DENSITIES],
        "passes": passes(max(sizes), min(DENSITIES), rounds),
    }


def main() -> None:
    """Measure with one thread and with two, and print."""
    options = parser(__doc__)
    options.set_defaults(threads=0)
    options.add_argument("--rounds", type=int, default=7, help="rounds of each measurement")
    given = options.parse_args()
    torch.manual_seed(0)
    sizes, rounds = (SIZES[:1], 2) if given.quick else (SIZES, given.rounds)
    found = [measure(threads, sizes, rounds) for threads in ([given.threads] if given.threads else [1, 2])]
    show(
        {"measurements": found}, [table for part in found for table in tables_of(part, max(sizes))], as_json=given.json
    )


def tables_of(part: dict[str, Any], size: int) -> list[Table]:
    """What was measured with one number of threads."""
    rows = [
        [
            f"{row['size']:,}",
            f"{row['k']:,}",
            *(milliseconds(row[way]) for way in ("topk", "sample", "select")),
            *(f"{row[ratio]:.2f}" for ratio in ("sample_ratio", "ratio")),
        ]
        for row in part["selecting"]
    ]
    headings = ["elements", "k", "topk, ms", "sample, ms", "select, ms", "sample / topk", "select / topk"]
    others = [[name, milliseconds(seconds)] for name, seconds in part["passes"].items()]
    title = f"threads: {part['threads']}"
    return [make_table(title, headings, rows), make_table(f"{title}; {size:,} elements", ["op", "ms"], others)]


if __name__ == "__main__":
    main()
